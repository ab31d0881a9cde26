"""The start and the end of a job in a process that stays its user's: signals, group, claim, exit code."""

from __future__ import annotations

import atexit
import contextlib
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistBackendError

from muster.attempt.lifecycle import Lifecycle, State
from muster.attempt.records import names_of
from muster.attempt.start import Fresh, Start, begin
from muster.data.generators import drawn_so_far, seeded_by_script
from muster.errors import ConfigError, RankLost
from muster.faults import agent, lost_output
from muster.faults.heartbeat import Heartbeat
from muster.faults.preemption import Preemption
from muster.job.options import JobOptions, check_options, group_options_of, run_options_of
from muster.job.trainee import JobHandOver
from muster.process import STOP_SIGNALS, forget_frames, ignore, keep_memory
from muster.world import external_group
from muster.world.device import choose_backend
from muster.world.environment import Environment
from muster.world.group import World
from muster.world.layout import form_alone

_entered: list[Bootstrap] = []
"""The bootstrap of the job that is open in this process."""


def await_saved(folder: Path, checkpoint: str | None) -> None:
    """Wait until this rank sees what the job that is open in this process has saved in `folder`, if it is that job's.

    Raises ConfigError: `checkpoint` is still to be saved.
    """
    for each in _entered:
        if each.await_saved and Path(each.options.folder).resolve() == folder.resolve():
            each.await_saved(checkpoint)


class Parted(Exception):
    """A rank has died and is restarted in place: this process goes on in the next attempt."""


class Bootstrap:
    """A job's group, its claimed folder and its lifecycle, from `enter` to `leave`.

    why_no_survival: why the rank does not survive the death of another, although the settings ask for it.
    """

    def __init__(
        self,
        options: JobOptions,
        *,
        preemption: Preemption | None = None,
        kept: JobHandOver | None = None,
        why_no_survival: str = "",
    ):
        self.options, self.preemption = options, preemption or Preemption()
        self.kept, self.why_no_survival = kept or JobHandOver(), why_no_survival
        self.life = Lifecycle(
            Path(options.folder),
            self.preemption,
            max_idle_attempts=options.max_idle_attempts,
            survival=self.kept.survival,
        )
        self.start: Start
        self.await_saved: Callable[[str | None], None] | None = None
        """See the function of this name."""
        self._world: World | None = None
        self._heartbeat: Heartbeat | None = None
        self._before: dict[int, Any] = {}

    @property
    def world(self) -> World:
        """The ranks. Raises ConfigError before `enter`."""
        if self._world is None:
            raise ConfigError(f"Job({str(self.options.folder)!r}) is not entered: use it in a `with` block")
        return self._world

    @property
    def is_group_gone(self) -> bool:
        """True if the script has ended the process group."""
        return self._world is not None and not dist.is_initialized()

    def enter(self) -> None:
        """Form the group and claim the folder. Collective.

        Raises:
            ConfigError: a job is open in this process, or this one has been used.
            SystemExit: the attempt has ended already; its error is reported.
            Parted: a rank has died meanwhile, and is restarted in place.
        """
        if self.life.state != State.started:
            raise ConfigError(f"this Job({str(self.options.folder)!r}) has been used: create one for each `with` block")
        if _entered:
            raise ConfigError(
                f"Job({str(self.options.folder)!r}): {_entered[0].options.folder} is open in this process: leave its "
                "`with` block first"
            )
        _entered.append(self)
        if self.kept.drawn is None:
            self.kept.drawn, self.kept.seeded = drawn_so_far(), seeded_by_script()
        self._install()
        try:
            check_options(self.options)
            keep_memory(self.options.keep_memory)
            self._world = self._start()
            self._heartbeat = self.life.meet(self.world, timeout_s=self.options.timeout_s)
            self._group_alone()
            options = run_options_of(self.options)
            self.start = begin(self.life, self.world, options, self.kept, refusal=lambda saved: None)
            self._refuse_memory()
        except BaseException as error:
            if self.leave(error):
                raise Parted from None

    def _refuse_memory(self) -> None:
        """Raise RankLost if ranks that have made steps would start over: untracked objects may remember them. Collective."""
        if not (self.world.again and isinstance(self.start, Fresh)):
            return
        if self.world.lowest(self.kept.has_worked) is None:
            return
        deaths, why_lost = self.kept.deaths(self.world), self.kept.why_lost
        first = deaths[0] if deaths else {"rank": None, "host": None}
        raise RankLost(
            f"{names_of(deaths) or 'a rank'} died{f', {why_lost}' if why_lost else ''}, and there is no checkpoint: all ranks restart",
            rank=first["rank"],
            host=first["host"],
        )

    @property
    def has_parted(self) -> bool:
        return self.life.has_parted

    def leave(self, error: BaseException | None) -> bool:
        """End the attempt: with other ranks an error ends this process. Raises SystemExit unless the run is done.

        Return True if `error` comes from the death of a rank that is restarted in place: this process goes on.
        """
        if error is not None:
            self.kept.part(error, self.life.survives)
        self.life.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        self.kept.release()
        if self._heartbeat:
            self._heartbeat.disarm()
        _entered.clear()
        if self.life.has_parted:
            return True
        if self.life.exit_code:
            _ignore_signals()
            forget_frames(error)  # they may hold a DataLoader, for whose workers Python would wait at its exit for ever
            raise SystemExit(self.life.exit_code) from error
        atexit.register(_ignore_signals)  # a script that is done is not stopped
        if self._before:
            self.preemption.uninstall()
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: set by something else than Python
        return False

    def _start(self) -> World:
        options, stopping = group_options_of(self.options), lambda: self.preemption.signalled
        if external_group.exists():
            return external_group.borrow(options)
        return self.kept.meet(options, Environment.from_env(), stopping=stopping, prepare=lambda: None)

    def _group_alone(self) -> None:
        """Form a group of one rank, for DistributedDataParallel and fully_shard in a loop that is the same for all."""
        if self.world.size > 1 or external_group.exists():
            return
        backend = choose_backend(group_options_of(self.options), self.world.device)
        form_alone(backend, device_type=self.world.device.type)
        self.life.on_end(dist.destroy_process_group, failed=_end_group)

    def _install(self) -> None:
        if self.kept.survival:  # its supervisor has done so
            return
        lost_output.endure()
        agent.die_with_it()
        with contextlib.suppress(ValueError):  # not in the main thread: a stop comes from another rank then
            before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
            self.preemption.install()
            self._before = before


LEAVE_ALIKE = "all ranks must leave the loop after the same step, and make the same calls in it and after it"
POLL_S = 0.02
POLLS_PER_S = 2000.0  # of all ranks together


def end_alike(world: World, heartbeat: Heartbeat, step: int) -> None:
    """Wait until the loops of all ranks have ended, this rank's after `step`. Collective.

    It goes over the store: a collective of a rank that has left the loop would meet those of ranks that still train, and gloo
    ends a process whose peer sends another number of bytes.

    Raises ConfigError: a loop has ended after another step, or waits in a collective for this rank.
    Raises DistBackendError: another rank has failed, or has died.
    """
    if world.size == 1:
        return
    store_keys, pause_s = world.store_keys, max(POLL_S, world.size / POLLS_PER_S)
    store_keys.post_end(step)
    heartbeat.watch()
    while (ends := store_keys.ends()) is None:
        if store_keys.has_failure() or store_keys.is_one_lost():
            raise DistBackendError("another rank has failed while this one waited for the end of its loop")
        if waits := heartbeat.waited_for():
            raise ConfigError(
                f"the loop has ended after step {step} on rank {world.rank} ({socket.gethostname()}), for which {waits}: {LEAVE_ALIKE}"
            )
        time.sleep(pause_s)
    for rank, end in enumerate(ends):
        if end != ends[0]:
            raise ConfigError(
                f"the loop has ended after step {end} on rank {rank}, and after step {ends[0]} on rank 0: {LEAVE_ALIKE}"
            )


def _end_group() -> None:
    if dist.is_initialized():  # the script may have ended it
        dist.destroy_process_group()


def _ignore_signals() -> None:
    """A launcher's signal during interpreter teardown would hide the exit code."""
    with contextlib.suppress(ValueError):
        ignore(*STOP_SIGNALS)
