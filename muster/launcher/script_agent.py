"""torchrun for a user's own script: an agent that exits with what its ranks' exit codes mean.

torchrun exits with 1 for every failure. The trainer's ranks write to a file how they ended; a script writes no such
file, but the agent knows its ranks' exit codes. This one exits with

    0      all ranks are done
    75     a rank left with 75, or the agent was told to stop before a rank began
    69     the nodes did not meet, or lost each other
    1-74   a rank failed with this code, the largest of several; 1 stands for a signal and for any other code

The agent ends the other ranks of a node that fails by SIGTERM. Their exit codes do not count: a script that saves on
SIGTERM and always fails would be run again for ever.

torchrun.py loads this file by its path, because the working folder may have its own `train`; so this file imports
nothing of the kit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import IO, Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api as launcher

COME_BACK, UNMET, LARGEST = 75, 69, 74  # EX_TEMPFAIL and EX_UNAVAILABLE of sysexits.h
STEADY_S = 600.0
"""After ranks have worked for this long, a failure is the first in a row again."""
POLL_S = 0.2
LEAVES_S = 2.0  # from the first closed connection of a rank that leaves to the end of its process
STUCK_S = 30.0  # longer than any read_timeout that the launchers pass in --rdzv-conf
LAST_LINES_S = 2.0  # a process that a rank has left behind may hold its output open
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec


def main() -> int:
    """Run torchrun with the arguments of this process, and return the exit code."""
    vars(launcher)["LocalElasticAgent"] = ScriptAgent
    vars(api)["get_subprocess_handler"] = Rank
    told = False
    try:
        run.main()
        return 0
    except SignalException:
        told = True
    except ChildFailedError:
        pass
    except Exception:
        traceback.print_exc()
        return UNMET
    finally:
        agent = ScriptAgent.newest
        ranks = agent.ranks() if agent else []
        for each in ranks:
            each.end_output()
    ended = {each.rank: each.proc.poll() for each in ranks if told or not each.is_told}
    for rank, code in ended.items():
        if code not in (0, None):
            print(f"muster: rank {rank} {_described(code)}", file=sys.stderr, flush=True)
    return exit_code({rank: code for rank, code in ended.items() if code is not None}, told=told)


def exit_code(ended: Mapping[int, int], *, told: bool) -> int:
    """Return the agent's exit code.

    Args:
        ended: the exit codes of this node's ranks, negative for a signal; without those of ranks that the agent ended
            because another rank had failed.
        told: whether the agent was told to stop.
    """
    codes = [*ended.values()]
    if COME_BACK in codes or (told and not codes):
        return COME_BACK
    failed = [code for code in codes if code != 0]
    if not failed:
        return 0 if told else 1
    return max((code for code in failed if 0 < code <= LARGEST and code != UNMET), default=1)


def _described(code: int) -> str:
    return f"left with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


class ScriptAgent(LocalElasticAgent):
    """torch's agent, with a bound on failures in a row, without a restart after exit code 75, and ended if it hangs."""

    newest: ScriptAgent | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.began = 0.0
        self.looks: int | None = None  # how often it has looked at its ranks; None while it waits for other nodes
        ScriptAgent.newest = self
        threading.Thread(target=self._watch, daemon=True).start()

    def ranks(self) -> list[Rank]:
        """Return this node's ranks, also those that have ended."""
        return [*getattr(self._pcontext, "subprocess_handlers", {}).values()]

    def _start_workers(self, worker_group: WorkerGroup) -> Any:
        self.began = time.monotonic()
        return super()._start_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Restart the ranks, unless one of them is about to fail by itself: then torch's loop finds its exit code next.

        A rank that leaves closes its connections before its process ends. So a rank of another node may fail, and its
        agent wait for this one, while the rank that left with 75 still seems to work here.
        """
        others_wait, self.looks = self.looks is not None, None
        if not (others_wait and self._fails_within(LEAVES_S)):
            super()._restart_workers(worker_group)

    def _fails_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(each.proc.poll() for each in self.ranks()):
                return True
            time.sleep(POLL_S / 2)
        return False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self.looks = (self.looks or 0) + 1 if result.state == WorkerState.HEALTHY else None
        if result.is_failed():
            if any(each.proc.poll() == COME_BACK for each in self.ranks() if not each.is_told):
                self._remaining_restarts = 0
            elif time.monotonic() - self.began > STEADY_S:
                self._remaining_restarts = worker_group.spec.max_restarts
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **named: Any) -> None:
        super()._shutdown(signal.SIGTERM, *more, **named)  # after Ctrl-C too: SIGTERM is what a script handles

    def _watch(self) -> None:
        """End the ranks and this process if the agent hangs between two looks at its ranks.

        If the host of the rendezvous store vanishes without closing its connections (power, link), an agent whose read
        timed out waits for the answer without a timeout (`TCPStore::doWait`): see muster/faults/agent.py. Meanwhile its
        ranks would work on beside those of a job that was started again elsewhere.
        """
        unseen_s, before = 0.0, None
        while unseen_s < STUCK_S:
            time.sleep(POLL_S)
            unseen_s = unseen_s + POLL_S if before == self.looks is not None else 0.0
            before = self.looks
        print(
            f"muster: this node has lost the rendezvous store for {STUCK_S:.0f} s: its ranks are ended", file=sys.stderr
        )
        assert self._pcontext
        self._pcontext.close(signal.SIGTERM)
        for each in self.ranks():
            each.end_output()
        os._exit(COME_BACK if COME_BACK in [each.proc.poll() for each in self.ranks()] else UNMET)


class Rank(SubprocessHandler):
    """A rank's process: it dies with the agent, and its lines begin with its rank if there are several.

    `is_told`: the agent has sent it a signal to end.
    """

    is_told = False

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        self.rank, alone, parent = int(env["RANK"]), env["WORLD_SIZE"] == "1", os.getpid()
        pipe = None if alone else subprocess.PIPE
        process = subprocess.Popen(
            args, env=env, stdout=pipe, stderr=pipe, start_new_session=True, preexec_fn=lambda: _die_with(parent)
        )
        streams = [] if alone else [(process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)]
        self.output = [threading.Thread(target=_copy, args=(*each, self.rank), daemon=True) for each in streams]
        for each in self.output:
            each.start()
        return process

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send the signal to the rank and to the processes that it started."""
        self.is_told = True
        super().close(death_sig)

    def end_output(self) -> None:
        """Wait for the last lines of a rank that has ended."""
        for each in self.output:
            each.join(LAST_LINES_S)


def _die_with(parent: int) -> None:
    """Between fork and exec: have the kernel kill this process when the agent dies. See PR_SET_PDEATHSIG in prctl(2)."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _copy(source: IO[bytes], sink: IO[bytes], rank: int) -> None:
    """Copy a rank's output, each line in one write. A progress bar's carriage return ends a line.

    A line without an end is searched for one only where it has grown: the rank waits while this reads.
    """
    mark, rest = f"[{rank}] ".encode(), list[bytes]()
    while chunk := source.read1():  # type: ignore[attr-defined]
        *lines, last = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", chunk)
        if lines:
            lines[0] = b"".join([*rest, lines[0]])
            _write(sink, b"".join(mark + line for line in lines))
            rest = []
        rest += [last] if last else []
    _write(sink, mark + b"".join(rest) + b"\n" if rest else b"")


def _write(sink: IO[bytes], text: bytes) -> None:
    with contextlib.suppress(OSError):  # no reader is left: the rank must not block on a full pipe
        sink.write(text)
        sink.flush()
