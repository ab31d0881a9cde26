"""Two ranks on one GPU over NCCL: see sitecustomize.py, which a process with `ON_ONE` in its environment starts with."""

import os
from pathlib import Path

from kit.job import ROOT

ON_ONE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, ROOT, ROOT / "tests"))),
}
