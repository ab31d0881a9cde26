"""Launch a job: one policy for every substrate, decided by pure functions.

`train.launch(...)` is `launch` below: it starts processes on this machine from a script or a notebook, without a
launcher.
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
    """Start `nproc` processes on this machine, wait for their end, and return their results.

    Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and a free MASTER_PORT, as torchrun
    would set them. No process imports `__main__` again.

    Args:
        what: overrides of a run, as after `python -m train`; then the result is the run's folder and outcome. Or a
            function, which each process calls with `args`, and which forms a process group itself if it needs one; then
            the result is each rank's return value, in rank order. Function and values are pickled by cloudpickle.
        *args: arguments of the function.
        nproc: the number of processes.
        max_restarts: how often all processes are restarted after one has failed.

    Raises:
        MusterError: the type of the cause, with the failing rank's message in one line.
        Preempted: this process got SIGTERM; the ranks were told to stop, and have ended.
        KeyboardInterrupt: the same after Ctrl-C or a notebook's stop button. After a second one the ranks do not save.
    """
    from train.launch import spawn  # imported here: starting a node or checking overrides does not need it

    return spawn.launch(what, *args, nproc=nproc, max_restarts=max_restarts)


class _Package(ModuleType):
    """The class of this package, because Python looks up `__call__` in a module's class, not in the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
