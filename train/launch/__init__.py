"""How a job is launched: one policy for every substrate, decided by pure functions.

`train.launch(...)` is `launch` below: processes on this machine without a launcher, from a script or a notebook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from train.launch.spawn import Finished

T = TypeVar("T")


@overload
def launch(what: Sequence[str], *, nproc: int, max_restarts: int = 0) -> Finished: ...
@overload
def launch(what: Callable[..., T], *args: Any, nproc: int, max_restarts: int = 0) -> list[T]: ...
def launch(what: Any, *args: Any, nproc: int, max_restarts: int = 0) -> Any:
    """Start `nproc` processes on this machine, wait for their end, and give back what came of them.

    Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and a free MASTER_PORT set, as
    torchrun would set them; `__main__` is imported again by none.

    Args:
        what: overrides of a run, as after `python -m train`: gives the run's folder and outcome. Or a function, which
            each process calls with `args`, and which forms a process group itself if it wants one: gives the value
            of each rank, in order. Function and values travel by cloudpickle.
        *args: of the function.
        nproc: how many processes.
        max_restarts: how often all processes are started again after one has failed.

    Raises:
        MusterError: the kind that tells why, with the failing rank's one line.
        Preempted: SIGTERM came to this process: the others were told, and have ended.
        KeyboardInterrupt: the same by Ctrl-C, or a notebook's stop button. A second one does not let them save.
    """
    from train.launch import spawn  # what only starts a node or checks overrides does not need it

    return spawn.launch(what, *args, nproc=nproc, max_restarts=max_restarts)


class _Package(ModuleType):
    """Python looks for `__call__` in a module's class and not in the module, so this package has a class of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
