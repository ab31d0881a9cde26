"""`muster [overrides]` is `python -m train [overrides]`; `muster TOOL ...` is `python -m train.TOOL ...`."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

from muster import claim


def main() -> None:
    """Run the kit, or one of its tools, with the rest of the command line."""
    claim()
    sys.path.insert(0, str(Path.cwd()))  # as python -m does: for the project's own modules
    tool = sys.argv[1] if len(sys.argv) > 1 else ""
    if tool.isidentifier() and is_tool(tool):
        del sys.argv[1]
        runpy.run_module(f"train.{tool}", run_name="__main__", alter_sys=True)
        return
    from train.__main__ import main as train

    train()


def is_tool(name: str) -> bool:
    """Return True if `python -m train.NAME` is a tool: other modules do nothing and exit silently."""
    found = importlib.util.find_spec(f"train.{name}")
    return name == "evaluate" or bool(
        found and found.submodule_search_locations and importlib.util.find_spec(f"train.{name}.__main__")
    )


if __name__ == "__main__":
    main()
