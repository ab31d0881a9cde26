"""The report of an attempt that fails or is stopped."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster import outcome
from muster.code_location import AGAIN, kind_and_message, place
from muster.errors import (
    BadHost,
    CrashLoop,
    Held,
    MusterError,
    Preempted,
    RankLost,
    and_where,
    environment_error,
    final,
    in_words,
    one_line,
    tell,
)
from muster.faults import agent
from muster.faults.heartbeat import BEAT_S, Heartbeat
from muster.lease.folder_lease import Lease, newest_claim
from muster.loggers.jsonl import append_event
from muster.outcome import Outcome
from muster.recovery.survival import is_of_peer
from muster.redact import redacted

if TYPE_CHECKING:
    from muster.faults.preemption import Preemption
    from muster.world.group import World

FIRST_CAUSE_WAIT_S = 1.0  # a failing rank reports at once; a killed rank never does
WRITE_S = 1.0  # less than a rank that stands still is left (heartbeat.STILL_S)
SILENCE_S = 0.3  # a killed rank sends no heartbeat either
OF_A_START = ("token", "idle_attempts", "times_held")


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Reports why an attempt ends: the first cause, once for all ranks, in one line, in outcome.json and as an exit code.

    max_idle_attempts: failed starts in a row before CrashLoop; None: starts are not counted.
    records: False if outcome.json is left alone, as by an evaluation.
    world, heartbeat, lease, step: those of the attempt so far; they decide which ranks an error concerns.
    flight_recorder: where each rank's last collectives on GPUs are, after a hang.
    entered: the step at which the present phase of this rank has begun; None before the first.
    """

    folder: Path
    preemption: Preemption
    max_idle_attempts: int | None = None
    records: bool = True
    world: World | None = None
    heartbeat: Heartbeat | None = None
    lease: Lease | None = None
    step: int | None = None
    flight_recorder: str | None = None
    entered: int | None = None

    def because(self, error: BaseException) -> int:
        """Report `error` and return the exit code."""
        lost = self._is_lost(error)
        error = _put_into_words(error)
        agent.tell(in_words(error))
        if lost or isinstance(error, RankLost):
            agent.end_if_stuck()
        code = error.exit_code if isinstance(error, MusterError) else _own_code(error)
        if self.world is None:
            return self._alone(error, code)
        if self.heartbeat:
            self.heartbeat.enter("leaving after step", self.step or 0)
        if isinstance(error, Preempted):
            return self._stopped(self.world, error, code)
        return self._with_others(self.world, error, code, lost=lost)

    def _alone(self, error: BaseException, code: int) -> int:
        """Report an error from before the meeting: rank 0 reports for all, unless this rank never reached it."""
        from muster.world.rendezvous.network import Abandoned, Unheard

        alone = isinstance(error, (Unheard, Abandoned)) or not isinstance(error, MusterError)
        is_first = os.environ.get("RANK", "0") == "0"
        record = self._record(error, code, lost=False)
        if is_first and not isinstance(error, MusterError) and self.max_idle_attempts is not None:
            own = uuid.uuid4().hex[:8]
            error, code = self._counted(error, code, record, own)
            with contextlib.suppress(MusterError, OSError):
                self._refuse(record, own)
        if alone or is_first:
            tell(error)
        return code

    def _stopped(self, world: World, error: Preempted, code: int) -> int:
        """Report a stop: every rank has come to it at the same point, so rank 0 reports for all."""
        record = self._record(error, code, lost=False)
        self._counted(error, code, record, world.attempt)
        if world.is_first:
            tell(error)
        self._write(record, first=world.is_first)
        return code

    def _with_others(self, world: World, error: BaseException, code: int, *, lost: bool) -> int:
        """Agree with the other ranks on the first cause, report it once and return the exit code."""
        if lost:
            first = self._first_cause(world, error)
            if isinstance(first, dict):
                agent.tell(f"rank {first['rank']} failed first: {first['error']}")
                self._write(first)
                return int(first["exit_code"])
            error = first
        last = outcome.last(self.folder)
        if isinstance(error, RankLost) and last.attempt == world.attempt and last.outcome != outcome.RUNNING:
            agent.tell(f"rank {last.rank} failed first: {last.error}")
            return last.exit_code or 1  # the first cause, recorded by a rank that is gone
        record = self._record(error, code, lost=lost)
        error, code = self._counted(error, code, record, world.attempt)
        won, first_said = world.store_keys.claim_failure(record)
        if won and isinstance(error, MusterError):
            tell(error)  # print before a write that may hang
        kept = self._write_soon(first_said, first=won)
        if won and not isinstance(error, MusterError):
            tell(error, kept)
            agent.tell(and_where(error, kept))
        if first_said["rank"] != world.rank:
            agent.tell(f"rank {first_said['rank']} failed first: {first_said['error']}")
        return int(first_said["exit_code"]) if isinstance(error, MusterError) else code

    def _counted(
        self, error: BaseException, code: int, record: dict[str, Any], attempt: str
    ) -> tuple[BaseException, int]:
        """Return `error` and `code`, or a crash loop in their place, which also goes into `record`.

        The next attempt counts the failure of one that had the run (open_folder.py); this method counts that of one that had not.
        """
        last, again = outcome.last(self.folder), None
        failed_before = last.failure_before
        if last.attempt != attempt or not last.token:
            before = outcome.start_before(self.folder, attempt)
            failed_before = before.failure
            count = 0 if before.outcome == CrashLoop.outcome else before.idle_attempts
            record |= {"token": before.token, "idle_attempts": count, "times_held": before.times_held}
            if isinstance(error, Held):
                record["times_held"] += 1
            elif self._is_failed_start(error, code):
                record["idle_attempts"] = count + 1
                if count >= (self.max_idle_attempts or 0):
                    again = f"{count + 1} attempts in a row failed before training began"
        is_left = code == Preempted.exit_code and (self.step or 0) > last.furthest  # by its script, to be continued
        if record["failure"] and failed_before == record["failure"] and self._is_no_further(last) and not is_left:
            again = "the same error at the same place as in the previous attempt"
        if not again:
            return error, code
        known = isinstance(error, MusterError)
        where = f" ({place(error)})" if not known and place(error) else ""
        what = one_line(error) if known else ": ".join(kind_and_message(error))
        loop = CrashLoop(f"{what}: {again}{where}; fix it, and run the same command again")
        record |= {"outcome": loop.outcome, "exit_code": loop.exit_code, "error": one_line(loop)}
        return loop, loop.exit_code

    def _is_no_further(self, last: Outcome) -> bool:
        """True if this attempt got at most a step further than the one before, whose last step other ranks may have saved."""
        return not last.token or self.step is None or 0 <= self.step - last.furthest <= 1

    def _is_failed_start(self, error: BaseException, code: int) -> bool:
        """True if `error` counts as a failed start: not if the launcher ended all ranks because a node joins."""
        ended = code == Preempted.exit_code or (isinstance(error, RankLost) and self.preemption.has_arrived())
        return self.max_idle_attempts is not None and code not in final() and not ended

    def _is_lost(self, error: BaseException) -> bool:
        """True if torch's error means that another rank is gone; the cause then comes from the other ranks."""
        if self.world is None or self.world.size == 1 or not isinstance(error, RuntimeError):
            return False
        return is_of_peer(error) and environment_error(error) is None

    def _first_cause(self, world: World, error: BaseException) -> dict[str, Any] | RankLost:
        """Return the cause that another rank has posted; if there is none, name the ranks without a heartbeat."""

        def silent() -> RankLost | None:
            return self.heartbeat.silence(SILENCE_S) if self.heartbeat else None

        if self.heartbeat:
            self.heartbeat.watch()
        if first := world.store_keys.first_failure(FIRST_CAUSE_WAIT_S, enough=silent):
            return first
        time.sleep(2 * BEAT_S)  # the store may be gone so recently that no check has failed yet
        return silent() or RankLost(
            f"rank {world.rank} on {socket.gethostname()} lost contact with another rank, which gave no reason: {one_line(error)[:300]}"
        )

    def _record(self, error: BaseException, code: int, *, lost: bool) -> dict[str, Any]:
        known = isinstance(error, MusterError)
        lost_one = (error.rank, error.host) if isinstance(error, RankLost) and error.rank is not None else None
        origin = error.origin if isinstance(error, MusterError) else None
        here = (self.world.rank if self.world else 0, socket.gethostname())
        rank, host = lost_one or origin or here
        step = self.step
        if isinstance(error, RankLost) and error.hangs and None not in (step, self.entered):
            step = min(step or 0, self.entered or 0)  # some ranks have counted theirs
        return {
            "outcome": error.outcome if isinstance(error, MusterError) else "failed",
            "exit_code": code,
            "step": step,
            "rank": rank,
            "failed_host": host,
            "error": in_words(error).removeprefix(f"rank {rank}: "),
            "flight_recorder": self.flight_recorder,
            "bad_host": error.host if isinstance(error, BadHost) else None,
            "traceback": redacted(traceback.format_exc()) if lost or not known or error.__cause__ else None,
            "failure": None if lost or known else _digest(traceback.format_exc()),
        }

    def _write_soon(self, record: dict[str, Any], *, first: bool) -> Path | None:
        """See `_write`. Without the lease, wait at most `WRITE_S`: the rank that holds the run writes `record`, too.

        It may be stuck in a collective until this rank's connections are closed, which ends it without its last save.
        """
        if self.lease:
            return self._write(record, first=first)
        found: list[Path | None] = []
        writer = threading.Thread(target=lambda: found.append(self._write(record, first=first)), daemon=True)
        writer.start()
        writer.join(WRITE_S)
        return found[0] if found else None

    def _write(self, record: dict[str, Any], *, first: bool = False) -> Path | None:
        """Write `record` to outcome.json if this attempt has the run; a refused command leaves the run's record alone.

        Both the first rank to report and the rank that holds the run write it: either may be gone before the other has
        written, and the holder's report reads the record. Return the record's path if this rank has written it.
        """
        assert self.world
        if not self.records:
            return None
        with contextlib.suppress(MusterError, OSError):  # the write failed; the printed line has the cause
            now = outcome.last(self.folder)
            if now.attempt != self.world.attempt:
                if first:
                    return self._refuse(record, self.world.attempt)
            elif self.lease.is_held() if self.lease else first:
                known = {key: value for key, value in record.items() if key not in OF_A_START}
                outcome.write(self.folder, replace(now, **known, cause=None))  # `cause` was an earlier attempt's error
                if record["outcome"] != Preempted.outcome and (self.lease or record["rank"] == 0):
                    self._log(record)  # once: by the rank that holds the run, or for it if it is gone
                return self.folder / outcome.OUTCOME
        return None

    def _log(self, record: dict[str, Any]) -> None:
        known = {name: record[name] for name in ("rank", "outcome", "exit_code", "error")}
        step = {} if record["step"] is None else {"step": record["step"]}
        append_event(self.folder, "failed", **step, host=record["failed_host"], **known)

    def _refuse(self, record: dict[str, Any], attempt: str) -> Path:
        """Record the end of a start that never had the run, and return the record's path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        is_held = newest_claim(self.folder)[1].get("attempt", attempt) != attempt
        return outcome.refuse(self.folder, Outcome.of({**record, "attempt": attempt}), beside=is_held)


def _own_code(error: BaseException) -> int:
    """Return the exit code of a script's `sys.exit`; 1 for any other error, and for 0: the run is not done."""
    return (error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1) or 1


def _digest(text: str) -> str:
    """Return a digest of `text` that ignores addresses, and whether the function was called again."""
    return hashlib.sha256(re.sub(rf"0x[0-9a-f]+|\n{re.escape(AGAIN)}.*", "", text).encode()).hexdigest()[:16]


def _put_into_words(error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return RankLost("interrupted from the keyboard; the same command resumes from the last checkpoint")
    return environment_error(error) or error if isinstance(error, Exception) else error
