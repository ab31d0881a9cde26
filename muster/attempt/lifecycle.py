"""The life of an attempt at a run, as a state machine.

    started -> met -> claimed -> restored -> running -> ended
    any state -> ended: an error on this rank, a lost peer, a folder that another launch has taken over
    any state -> parted: a peer has died, and is restarted in place (survival.py): the ranks meet again, in the next attempt

Each transition is a method of `Lifecycle` that registers how it is undone. At the end an ExitStack undoes them, the last
one first, in one of three ways. If the ranks end together (the run is done or was preempted), each waits for the others
and the group is closed. After a failure ranks may be gone, so nothing is waited for: this process leaves. If they part,
each dissolves its group and goes on in its process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from muster.attempt.failure_report import FailureReport
from muster.errors import CrashLoop, MusterError, Preempted, RankLost, final, say
from muster.faults import agent
from muster.faults.heartbeat import Heartbeat
from muster.faults.preemption import Agreement, Preemption
from muster.lease.folder_lease import Lease
from muster.lease.open_folder import RunFolder, RunOptions, claim_folder, note_end, note_left
from muster.process import end, forget_frames, is_supervised, without_sigchld
from muster.recovery.survival import Survival, is_of_peer
from muster.world import flight_recorder
from muster.world.environment import restarts_left
from muster.world.group import START_S, World, dissolve

REPORT_S = 15.0


class State(Enum):
    """A state of an attempt.

    started: this process runs. met: the ranks have formed their group and watch each other.
    claimed: the run's folder is this attempt's. restored: the position is known. running: the ranks make steps.
    ended: the exit code is known. parted: the group is dissolved, and this process goes on in the next attempt.
    """

    started = auto()
    met = auto()
    claimed = auto()
    restored = auto()
    running = auto()
    ended = auto()
    parted = auto()


FOLLOWS = {
    State.met: {State.started},
    State.claimed: {State.met},
    State.restored: {State.claimed},
    State.running: {State.met, State.restored},  # an evaluation claims and restores nothing
    State.ended: {*State},
    State.parted: {*State} - {State.ended},
}
"""The states that each state may follow."""


class HasStep(Protocol):
    step: int


@dataclass(frozen=True)
class Ending:
    """An end that all ranks reach together: the run is done, or `preempted` says at which step it has stopped.

    is_left: the attempt has not trained, and leaves the run to be continued.
    """

    step: int = 0
    total_steps: int = 0
    preempted: str | None = None
    is_left: bool = False


@dataclass(frozen=True)
class Peers:
    """The ranks of a running attempt: their group, this rank's heartbeat, and the agreement on where to stop."""

    world: World
    heartbeat: Heartbeat
    agreement: Agreement

    def begin(self, phase: str, step: int) -> bool:
        """Enter a phase of work that has a collective; return False, on all ranks, if they agreed to stop before it. Collective."""
        self.heartbeat.enter(phase, step)
        return self.agreement.proceed()


class Lifecycle:
    """One attempt at a run. A context manager: an error in its block ends the attempt and is reported, not raised.

    max_idle_attempts, records: see `FailureReport`. survival: None if the death of another rank ends this one.
    """

    def __init__(
        self,
        folder: Path,
        preemption: Preemption,
        *,
        max_idle_attempts: int | None = None,
        records: bool = True,
        survival: Survival | None = None,
    ):
        self.folder, self.preemption = folder, preemption
        self.max_idle_attempts, self.records, self._survival = max_idle_attempts, records, survival
        self.state, self.exit_code = State.started, 1
        self._world: World | None = None
        self._heartbeat: Heartbeat | None = None
        self._lease: Lease | None = None
        self._agreement: Agreement | None = None
        self._progress: HasStep | None = None
        self._report: Callable[[], None] | None = None
        self._flight_recorder: str | None = None
        self._together = False  # the ranks end at the same point, and none of them is gone
        self._undo = contextlib.ExitStack()
        self._failing = threading.Lock()

    def __enter__(self) -> Lifecycle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._agreement:  # before a report: the heartbeat, which names a lost peer and its wait, then reports first
            self._agreement.close()
        try:
            if error is None:
                self._undo.close()
        except BaseException as late:
            error = late
        if error is not None:
            with without_sigchld():
                if self.survives(error):
                    forget_frames(error)
                    self._undo.close()
                    if self._world is None:
                        dissolve()
                else:
                    self._fail(error)
        return True

    @property
    def has_parted(self) -> bool:
        return self.state == State.parted

    # The transitions.

    def meet(self, world: World, *, timeout_s: float) -> Heartbeat:
        """started -> met: watch the other ranks. The heartbeat starts only with several ranks or under torchrun.

        Undone by leaving the group.
        """
        self._enter(State.met)
        self._world = world
        self._heartbeat = heartbeat = Heartbeat(
            world,
            timeout_s=timeout_s,
            start_s=START_S,
            on_hang=self.lose,
            is_asked_to_stop=self.preemption.has_arrived,
        )
        self.on_end(self._part, failed=self._leave, parted=self._dissolve)
        if self._survival:
            self._survival.met(world)
        if world.size > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
            heartbeat.start()
        return heartbeat

    def claim(self, options: RunOptions, *, opens: Callable[[RunOptions, World, Lease | None], RunFolder]) -> RunFolder:
        """met -> claimed: claim the run's folder, and return what `opens` finds in it. Collective.

        outcome.json then has this attempt as the running one. Undone by giving up the claim, or by leaving it to torchrun's
        restart or to the next attempt of these ranks. Raises MusterError: see `claim_folder` and `opens`.
        """
        assert self._world and self._heartbeat
        heartbeat = self._heartbeat
        self._lease = claim_folder(
            options,
            self._world,
            stopping=lambda: self.preemption.signalled,
            on_loss=self.lose,
            on_request=self._regroup,
            stands=lambda: heartbeat.is_abandoned,
        )
        self._enter(State.claimed)
        self.on_end(self._release, failed=self._release, parted=self._hand_on)
        return opens(options, self._world, self._lease)

    def restored(self, progress: HasStep, *, report: Callable[[], None] | None) -> None:
        """claimed -> restored: the run is at the step of `progress`. Undone by `report`, which writes the report, unless `end` did."""
        self._enter(State.restored)
        self._progress, self._report = progress, report
        self.on_end(self._report_soon, failed=self._report_soon)

    def run(self) -> Peers:
        """restored -> running: let the ranks agree on where to stop from now on. Undone first of all."""
        assert self._world and self._heartbeat
        self._enter(State.running)
        self._agreement = Agreement(self._world, self.preemption)
        return Peers(self._world, self._heartbeat, self._agreement)

    def end(self, ending: Ending, *, report: bool = True) -> None:
        """running -> ended: record the end that all ranks have reached. Collective.

        report: False if the report is there already. Raises StorageError: outcome.json cannot be written.
        """
        assert self._world
        if self._survival:
            self._survival.end()
        if ending.preempted:
            self.exit_code = self._failure_report().because(Preempted(ending.preempted))
        else:
            failure = self._record(ending)
            if report and self._report and not failure:
                self._report()
            self._world.together(failure)
            self.exit_code, self._report = 0, None
        self._together = True
        self._enter(State.ended)

    def lose(self, error: MusterError) -> None:
        """any state -> ended: a peer is lost, or the run itself. Called from a thread, and ends this process.

        It returns if the stopped peer is ended and restarted in place meanwhile: the main thread then gets an error.
        """
        if self._survival and self._world and isinstance(error, RankLost):
            try:
                if self._survival.replaces(error, self._world, ends=partial(self._failing.acquire, blocking=False)):
                    return
            except CrashLoop as again:
                error = again
        if self._world and self._world.device.type == "cuda" and self.records:
            self._flight_recorder = flight_recorder.write(
                self.folder, attempt=self._world.attempt, rank=self._world.rank
            )
        try:
            self._fail(error)
        finally:
            end(self.exit_code)

    def survives(self, error: BaseException) -> bool:
        """any state -> parted: return whether `error` comes from the death of a rank that is restarted in place.

        Call it on the main thread. What is undone then leaves this process able to meet the others again.
        """
        if self.state == State.parted:
            return True
        if self._survival and self._heartbeat and is_of_peer(error):
            self._heartbeat.watch()  # who is silent is known by the time that no replacement has come
        is_so = self._survival is not None and self._survival.covers(error, self._world)
        if is_so and self._failing.acquire(blocking=False):  # else another thread ends this process
            self._enter(State.parted)
            return True
        return False

    def on_end(
        self,
        together: Callable[[], object],
        *,
        failed: Callable[[], object] = lambda: None,
        parted: Callable[[], object] = lambda: None,
    ) -> None:
        """Register how the last transition is undone: the ranks end `together`, one has `failed`, or they have `parted`."""

        def undo(_: object, error: BaseException | None, __: object) -> None:
            if self.state == State.parted:
                parted()
                return
            if error is not None and self._together:  # an undoing has failed: the others may not get through theirs
                self._together, self.exit_code = False, self._failure_report().because(error)
            (together if self._together else failed)()

        self._undo.push(undo)

    # Their effects.

    def _enter(self, state: State) -> None:
        assert self.state in FOLLOWS[state], f"{self.state.name} -> {state.name}"
        self.state = state

    def _failure_report(self) -> FailureReport:
        return FailureReport(
            folder=self.folder,
            preemption=self.preemption,
            max_idle_attempts=self.max_idle_attempts,
            records=self.records,
            world=self._world,
            heartbeat=self._heartbeat,
            lease=self._lease,
            step=self._progress.step if self._progress else None,
            flight_recorder=self._flight_recorder,
            entered=self._heartbeat.phases.step if self._heartbeat else None,
        )

    def _fail(self, error: BaseException) -> None:
        """Report `error` and undo everything; with other ranks, end this process.

        The first thread to call it does so; any other one waits until the process ends.
        """
        self._failing.acquire()
        self.exit_code = self._failure_report().because(error)
        self._together = isinstance(error, Preempted) and self._world is not None
        self._enter(State.ended)
        self._undo.close()
        if self._world is None:
            agent.end_restarts(self.exit_code, process_ends=False)
        elif self._world.size > 1 and not self._together:
            end(self.exit_code)

    def _record(self, ending: Ending) -> MusterError | None:
        """Record on rank 0 that the run is done; return the failure to do so."""
        if not self._lease:
            return None
        try:
            note = note_left if ending.is_left else note_end
            note(self.folder, step=ending.step, total_steps=ending.total_steps)
        except MusterError as error:
            return error
        return None

    def _regroup(self, other: str) -> None:
        """Have all ranks save and leave, so that torchrun restarts them together with `other`."""
        say(f"muster: {other} of this job waits for the run: all ranks save a checkpoint and restart together")
        self.preemption.request()

    def _report_soon(self) -> None:
        """Write the report while this attempt holds the run. Wait at most `REPORT_S`: the folder may be lost."""
        if self._report and self._lease and self._lease.is_held():
            writer = threading.Thread(target=self._report, name="report", daemon=True)
            writer.start()
            writer.join(REPORT_S)

    def _release(self) -> None:
        if not self._lease:
            return
        is_stopped = self.exit_code == Preempted.exit_code and self.preemption.signalled
        if restarts_left() and self.exit_code and not is_stopped and self.exit_code not in final():
            self._lease.leave_to_restart()
        else:
            self._lease.let_go()

    def _hand_on(self) -> None:
        if self._lease:
            self._lease.stop()

    def _dissolve(self) -> None:
        """Stop watching, and dissolve the group: others wait for this rank until its connections are closed."""
        if self._world and self._heartbeat:
            self._heartbeat.close()
            self._world.part()
            self._heartbeat.release()

    def _part(self) -> None:
        """Close the group. Collective."""
        if self._world and self._heartbeat:
            self._heartbeat.close()
            self._heartbeat.join()
            self._world.close()

    def _leave(self) -> None:
        """Leave without waiting for ranks that may be gone: destroying a broken process group can block."""
        agent.end_restarts(self.exit_code, process_ends=not is_supervised())
        sys.stdout.flush()
        sys.stderr.flush()
        if self._world and self._heartbeat:
            self._world.leave(gone=self._heartbeat.gone)
