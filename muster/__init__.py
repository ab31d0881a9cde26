"""The kit under a name of its own: `muster`, `torchrun -m muster`, `muster evaluate RUN`.

The kit is the package `train`. Projects often have a train.py or a train/ of their own, which Python then finds first.
In a process that begins here, `train` is always the kit; a project's own module of that name cannot be imported in it.
The wheel contains the kit twice, as `train` and within this package: a distribution that overwrites the first leaves
the second intact.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def claim() -> ModuleType:
    """Make `train` the kit in this process, and return it."""
    here = Path(__file__).resolve().parent
    home = next(path for path in (here / "train", here.parent / "train") if (path / "loop.py").is_file())
    found = sys.modules.get("train")
    if found is not None and Path(str(found.__file__)).resolve().parent == home:
        return found
    for name in [name for name in sys.modules if name == "train" or name.startswith("train.")]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location("train", home / "__init__.py", submodule_search_locations=[str(home)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    return module
