"""A device that is the CPU: see sitecustomize.py, which a process with `ON_FAKE` in its environment starts with."""

import os
from pathlib import Path

from kit.job import ROOT

ON_FAKE = {
    "FAKE_CUDA": "2",
    "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, ROOT, ROOT / "tests"))),
}
