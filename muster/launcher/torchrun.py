"""torchrun without the need for synchronized clocks: `python -m muster.launcher.torchrun`, with torchrun's arguments.

With SCRIPT set in its environment, its ranks run a user's own script (script_agent.py).

In torch's c10d rendezvous an agent writes the time of its own clock, and counts as lost when that is older than the keep-alive
window by the reader's clock. So an agent whose clock is a minute behind is removed as soon as it joins, and one a minute ahead
removes all others. Here an agent counts as lost when its entry has not changed for the window's length of elapsed time.

Agents write the same entries as torch's own: both may join one job. The launcher starts this file by its path,
because the working folder may have modules of the kit's names; so this file imports nothing of the kit.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

SCRIPT = "MUSTER_SCRIPT"
"""Set if the ranks run a user's own script; execute.py repeats the name."""


class Steady:
    """Replacement for `datetime` in modules that only call `now`: the system's clock, read once, plus elapsed time."""

    def __init__(self) -> None:
        self.began, self.since = datetime.now(UTC), time.monotonic()

    def now(self, _zone: timezone = UTC) -> datetime:
        return self.began + timedelta(seconds=time.monotonic() - self.since)


def compare_no_clocks() -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    holder: Any = rendezvous._BackendRendezvousStateHolder
    strike_off, steady = holder._sanitize, Steady()

    def sanitize(self: Any) -> None:
        written, now = self._state.last_heartbeats, steady.now()
        before = getattr(self, "seen", {})  # by agent: its entry, and when the entry was new
        self.seen = {
            agent: before[agent] if before.get(agent, (None,))[0] == sign else (sign, now)
            for agent, sign in written.items()
        }
        self._state.last_heartbeats = {agent: when for agent, (_, when) in self.seen.items()}
        strike_off(self)
        self._state.last_heartbeats = {agent: written[agent] for agent in self._state.last_heartbeats}

    holder._sanitize = sanitize
    vars(rendezvous)["datetime"] = steady
    os.environ["MUSTER_STEADY_AGENT"] = "1"  # for the ranks: muster/world/environment.py


def take_signals_between_looks() -> None:
    """Have this process's agent handle stop signals before or after it starts or looks at its workers, not within.

    torch's handler raises. In `subprocess.Popen.poll`, between taking a lock and the `try` that releases it, the lock would stay
    taken, and the agent would never learn that its workers have ended. In a function that Python calls around a fork, or while a line is
    logged, the error would be caught: so it is raised again at each look, also in a restart of the workers, until the agent's loop ends.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import api

    handle, poll, start = api._terminate_process_handler, subprocess.Popen.poll, subprocess.Popen.__init__
    loop, within, came, ends = LocalElasticAgent._invoke_run, [0], list[int](), threading.Event()

    def handler(number: int, frame: Any) -> None:
        if within[0] or not ends.is_set():
            came.append(number)
        if not within[0]:
            handle(number, frame)

    @contextlib.contextmanager
    def undisturbed() -> Iterator[None]:
        within[0] += 1
        try:
            yield
        finally:
            within[0] -= 1

    def is_main() -> bool:  # where handlers run
        return threading.current_thread() is threading.main_thread()

    def started(self: subprocess.Popen[Any], *given: Any, **named: Any) -> None:
        with undisturbed() if is_main() else contextlib.nullcontext():
            start(self, *given, **named)

    def look(self: subprocess.Popen[Any]) -> int | None:
        if not is_main():
            return poll(self)
        try:
            with undisturbed():
                return poll(self)
        finally:
            if came:
                handle(came.pop(0) if ends.is_set() else came[0], None)

    def until_end(self: LocalElasticAgent, *given: Any, **named: Any) -> Any:
        try:
            return loop(self, *given, **named)
        finally:
            came.clear()
            ends.set()

    vars(api)["_terminate_process_handler"] = handler
    subprocess.Popen.poll, subprocess.Popen.__init__ = look, started  # type: ignore[method-assign]
    LocalElasticAgent._invoke_run = until_end  # type: ignore[method-assign, assignment]


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run_script() -> int:
    here = Path(__file__).parent
    agent, world = loaded(here / "script_agent.py"), here.parent / "world"
    vars(agent)["interfaces"] = loaded(world / "rendezvous" / "interfaces.py")
    vars(agent)["store_client"] = loaded(world / "store_client.py")
    return int(agent.main())


def leave(run: Callable[[], Any]) -> NoReturn:
    """Call `run` and end this process with what it returns, or raises, but skip the interpreter's tear-down: C++ threads may abort in it."""
    code = 1
    try:
        code = int(run() or 0)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:  # before torch has installed its handlers
        code = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # in this order, as in Py_FinalizeEx
        atexit._run_exitfuncs()
    finally:
        with contextlib.suppress(BaseException):  # a signal, or a pipe that nobody reads
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from torch.distributed.run import main

    compare_no_clocks()
    take_signals_between_looks()
    leave(run_script if os.environ.pop(SCRIPT, "") else main)
