"""How an attempt ends: the first cause said once for all ranks, outcome.json, and the exit code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from train.errors import CrashLoop, MusterError, RankLost, environment_error, one_line, say
from train.faults import agent, attempts
from train.faults.attempts import Attempt
from train.faults.heartbeat import BEAT_S, Heartbeat
from train.faults.lease import Lease, newest_claim

if TYPE_CHECKING:
    from train.dist.world import World

FIRST_CAUSE_WAIT_S = 1.0  # a rank that fails by itself says so at once; one that was killed says nothing
SILENCE_S = 0.3  # and beats no more
REPORT_S = 5.0


class HasStep(Protocol):
    step: int


class Exit:
    """The end of this process's attempt. It is told how far the attempt has come, and so whom an error concerns."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.world: World | None = None
        self.heartbeat: Heartbeat | None = None
        self.lease: Lease | None = None
        self.progress: HasStep | None = None
        self.report: Callable[[], None] | None = None
        self._leaving = threading.Lock()

    @property
    def step(self) -> int | None:
        return self.progress.step if self.progress else None

    def because(self, error: BaseException) -> int:
        """Report `error` once for all ranks, write outcome.json, and give the exit code.

        Called by the main thread or the heartbeat's, whichever comes first; the other waits for the end.
        """
        self._leaving.acquire()
        lost = self._is_lost(error)
        error = _put_into_words(error)
        agent.tell(error)
        if lost or isinstance(error, RankLost):
            agent.end_if_stuck()
        code = error.exit_code if isinstance(error, MusterError) else 1
        if self.world is None:
            code = self._alone(error, code)
        else:
            if self.heartbeat:
                self.heartbeat.enter("leaving after step", self.step or 0)
            code = self._with_others(self.world, error, code, lost=lost)
        self._report()
        if self.lease:  # also where a thread ends the process and nothing is unwound
            self.lease.let_go()
        return self._quit(code)

    def _report(self) -> None:
        """report.html, while the run is still this attempt's. Nothing waits for long for it: the folder may be lost."""
        if self.report and self.lease and self.lease.is_held():
            writer = threading.Thread(target=self.report, name="report", daemon=True)
            writer.start()
            writer.join(REPORT_S)

    def at_once(self, error: BaseException) -> NoReturn:
        """The same from a thread: end the process."""
        code = 1
        try:
            code = self.because(error)
        finally:
            os._exit(code)

    def _alone(self, error: BaseException, code: int) -> int:
        """Before the ranks have met: rank 0 speaks for all, unless this rank never reached it."""
        from train.dist.network import Abandoned, Unheard

        alone = isinstance(error, (Unheard, Abandoned)) or not isinstance(error, MusterError)
        if alone or os.environ.get("RANK", "0") == "0":
            tell(error)
        return code

    def _with_others(self, world: World, error: BaseException, code: int, *, lost: bool) -> int:
        if lost:
            first = self._first_cause(world, error)
            if isinstance(first, dict):
                self._write(first)
                return int(first["exit_code"])
            error = first
        told = attempts.last(self.folder)
        if isinstance(error, RankLost) and told.attempt == world.attempt and told.outcome != attempts.RUNNING:
            return told.exit_code or 1  # the first cause, from a rank that is gone
        record = self._record(world, error, code, lost=lost)
        if record["failure"] and told.attempt == world.attempt and told.failure_before == record["failure"]:
            again = CrashLoop(
                f"{record['error']}: the same error at the same place as in the attempt before; mend it, and run the same command again"
            )
            traceback.print_exception(error)
            error, code = again, again.exit_code
            record |= {"outcome": again.outcome, "exit_code": code, "error": one_line(again)}
        won, first_said = world.board.claim_failure(record)
        if won:
            tell(error)
        self._write(first_said, first=won)
        return int(first_said["exit_code"]) if isinstance(error, MusterError) else code

    def _is_lost(self, error: BaseException) -> bool:
        """Whether torch's own words say that another rank is gone: then the cause is to be heard from others."""
        if self.world is None or self.world.size == 1 or not isinstance(error, RuntimeError):
            return False
        named = type(error).__module__ == "torch.distributed" or re.search(r"\bgloo\b|NCCL|nccl", str(error))
        return bool(named) and environment_error(error) is None

    def _first_cause(self, world: World, error: BaseException) -> dict[str, Any] | RankLost:
        """What another rank has posted as the cause; if none has, who gives no sign of life."""

        def silent() -> RankLost | None:
            return self.heartbeat.silence(SILENCE_S) if self.heartbeat else None

        if self.heartbeat:
            self.heartbeat.watch()
        if first := world.board.first_failure(FIRST_CAUSE_WAIT_S, enough=silent):
            return first
        time.sleep(2 * BEAT_S)  # the store may be gone so suddenly that nobody has noticed yet
        return silent() or RankLost(
            f"rank {world.rank} on {socket.gethostname()} lost contact with another rank, which gave no reason: {one_line(error)[:300]}"
        )

    def _record(self, world: World, error: BaseException, code: int, *, lost: bool) -> dict[str, Any]:
        known = isinstance(error, MusterError)
        whose = error if isinstance(error, RankLost) and error.rank is not None else None
        return {
            "outcome": error.outcome if isinstance(error, MusterError) else "failed",
            "exit_code": code,
            "step": self.step,
            "rank": whose.rank if whose else world.rank,
            "failed_host": whose.host if whose else socket.gethostname(),
            "error": one_line(error) if known else f"{type(error).__name__}: {one_line(error)}",
            "traceback": traceback.format_exc() if lost or not known else None,
            "failure": None if lost or known else _digest(f"{self.step} {traceback.format_exc()}"),
        }

    def _write(self, record: dict[str, Any], *, first: bool = False) -> None:
        """Into outcome.json if the run is this attempt's; a command that was refused leaves the run's record alone.

        The rank that said it first writes it, and so does the one that holds the run: it may be gone before the other
        has written, and its report reads what is there.
        """
        assert self.world
        with contextlib.suppress(MusterError, OSError):  # it could not be written; the line that was said says why
            now = attempts.last(self.folder)
            if now.attempt != self.world.attempt:
                if first:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    own = self.world.attempt
                    is_held = newest_claim(self.folder)[1].get("attempt", own) != own
                    attempts.refuse(self.folder, Attempt.of({**record, "attempt": own}), beside=is_held)
            elif self.lease.is_held() if self.lease else first:
                attempts.write(self.folder, replace(now, **record))

    def _quit(self, code: int) -> int:
        """Leave without waiting for ranks that may be gone: destroying a broken group can block."""
        agent.end_restarts(code)
        sys.stdout.flush()
        sys.stderr.flush()
        if self.world is not None and self.world.size > 1:
            self.world.leave(gone=self.heartbeat.gone if self.heartbeat else 0)
            os._exit(code)
        return code


def _digest(text: str) -> str:
    """Of a text in which addresses do not count."""
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]


def _put_into_words(error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return RankLost("interrupted from the keyboard; the same command resumes from the last checkpoint")
    return environment_error(error) or error if isinstance(error, Exception) else error


def tell(error: BaseException) -> None:
    """One line for what a person can act on; the traceback for what is a defect."""
    if isinstance(error, MusterError):
        say(f"muster: {error.outcome.replace('_', ' ')}: {one_line(error)}")
    else:
        traceback.print_exception(error)
