"""Start of a command on several processes of this machine, if no launcher has started it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def become_torchrun(module: str, arguments: Sequence[str], *, ranks: int) -> NoReturn:
    """Replace this process by torchrun, which starts `module` with `arguments` on `ranks` ranks; the pid is kept."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", module, *arguments])
