"""`muster [overrides]` trains, as `python -m train` does in a clone; `muster TOOL ...` runs a tool.

A project's own `train.py` or `train/` does not matter here: the kit is found as `muster`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

TOOLS = {
    "init": "muster.init",
    "launch": "muster.launcher",
    "evaluate": "muster.train.evaluate",
    "load": "muster.train.load",
    "export": "muster.train.export",
    "doctor": "muster.train.doctor",
    "report": "muster.report",
    "collectives": "muster.collectives",
    "config": "muster.train.config",
}


def main() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as python -m does: for the project's own modules
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in TOOLS:
        runpy.run_module(TOOLS[sys.argv.pop(1)], run_name="__main__", alter_sys=True)
        return
    if first in ("--version", "version"):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"muster {version('torch-muster')}")
        except PackageNotFoundError:
            print("muster, from a clone that is not installed")
        return
    if first == "help":
        sys.argv[1:] = [*sys.argv[2:], "--help"]
        return main()
    if first.isalpha():  # overrides have a = in them
        from muster.errors import nearest, say

        say(
            f"muster: config error: there is no tool '{first}'; {nearest(first, TOOLS)}; or overrides, as in muster epochs=3"
        )
        sys.exit(2)
    from muster.train.__main__ import main as train

    train()


if __name__ == "__main__":
    main()
