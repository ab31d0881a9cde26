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
    """Run the trainer or a tool with the rest of the command line."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as python -m does: for the project's own modules
    if len(sys.argv) > 1 and sys.argv[1] in TOOLS:
        runpy.run_module(TOOLS[sys.argv.pop(1)], run_name="__main__", alter_sys=True)
        return
    from muster.train.__main__ import main as train

    train()


if __name__ == "__main__":
    main()
