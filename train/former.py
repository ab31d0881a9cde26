"""Import paths of earlier versions: `train.X` for what is now `muster.train.X` or `muster.X`.

Configs in old checkpoints have such paths, and in a clone `train` is still a name of the package. A module has one
identity whatever name it is imported by.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

MOVED = {
    "train.launch": "muster.launcher",
    "train.strategies.ddp_rpc": "muster.train.strategies.rpc.ddp_rpc",
    "train.strategies.parameter_server": "muster.train.strategies.rpc.parameter_server",
}
TRAINER = Path(__file__).resolve().parent


def present(path: Any) -> Any:
    """Return the present import path of `path`, which is unchanged unless it begins with the kit's former name.

    It is also unchanged where the project has a `train` of its own.
    """
    if not isinstance(path, str) or not path.startswith("train.") or not is_the_kit(sys.modules.get("train")):
        return path
    for old, new in MOVED.items():
        if path == old or path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    room = path.split(".")[1]
    is_trainers = (TRAINER / room).is_dir() or (TRAINER / f"{room}.py").is_file()
    return f"muster.{path}" if is_trainers else f"muster.{path.removeprefix('train.')}"


def is_the_kit(module: ModuleType | None) -> bool:
    """Return True if `train` is this package or nothing at all."""
    if module is not None:
        return module.__name__ != "train" or _is_here(getattr(module, "__file__", None))
    try:
        found = importlib.util.find_spec("train")
    except (ImportError, ValueError):
        return True
    return found is None or _is_here(found.origin)


def _is_here(file: str | None) -> bool:
    return file is not None and Path(file).resolve().parent == TRAINER


def lend() -> None:
    """Make `train` another name of `muster.train` in this process."""
    sys.modules["train"] = importlib.import_module("muster.train")
    if not any(isinstance(finder, Former) for finder in sys.meta_path):
        sys.meta_path.insert(0, Former())


class Former(MetaPathFinder, Loader):
    """Finds `train.X` where it is now, as a finder and loader of `sys.meta_path`."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec of the module under its former name; None if it is none of the kit's."""
        if not name.startswith("train."):
            return None
        try:
            found = importlib.util.find_spec(present(name))
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        return ModuleSpec(name, self, origin=found.origin, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself. It keeps its own spec, which the import system is about to replace."""
        module = importlib.import_module(present(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put the module's own spec back; it has been executed before."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """Return the module's code, for `python -m train.X`."""
        found = importlib.util.find_spec(present(name))
        loader: Any = found.loader if found else None
        code: CodeType | None = loader.get_code(present(name))
        return code
