"""The claim on a run's folder, which ensures that each run has at most one writer.

An attempt that wants to write to a run's folder claims it with a file `.claim-N` (fencing.py); an attempt that finds a
larger N than its own has been superseded and leaves. The holder renews `.alive` every second. Before an attempt takes
over a claim, it watches `.alive` for a while: if the file is renewed, the holder lives. Only changes count, so clocks
need not agree. A restart by the same agents does not wait, nor does a launch that sees that all processes of the holder
are gone from this host.

If the holder is another job, that is final. The holder may also be another part of this job, which torchrun has left
out of the new group: a node that is lost but has not noticed, or agents that were starved for longer than their
keep-alive. The attempt waits for such a holder. A holder that itself waits for lost ranks is superseded; a holder that
trains is asked, by `.wanted`, to save and to restart together with the new part. `.alive` tells them apart: token,
beat, state, time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster import outcome
from muster.clock import SYSTEM, SystemClock
from muster.errors import ConfigError, Held, Preempted, RankLost, storage_error
from muster.files import clear_drafts, draft_of
from muster.lease.fencing import Claim, FolderEntries, newest
from muster.process import start_detached
from muster.world.environment import (
    agents_compare_clocks,
    has_ended,
    is_at_work,
    job_name,
    launcher,
    record_name,
    rendezvous_at,
    restarts_left,
    tasks_apart,
)

RENEW_S = 1.0
HELD_S = 10.0
"""A holder that stalls for less (garbage collection, a slow file server) keeps its lease; after more it may lose it, and leaves."""
WAIT_S = 30.0
"""The longest wait for another part of this job."""
SUPERSEDED_S = 2.0  # a holder that has not trained for so long is superseded
CLOCKS_APART_S = 10.0
"""More than torchrun's keep-alive tolerates, and more than the delay with which a file server shows a file."""
TRAINS, STANDS, RESTARTS = "trains", "stands", "restarts"


@dataclass(frozen=True)
class Claimant:
    """The attempt that claims a run's folder.

    agents: the launchers of all its ranks. launcher: its job's name from `muster launch` or the scheduler.
    job, meets_at: the job that it is a part of, and the endpoint of that job's agents; empty if unknown.
    """

    attempt: str
    agents: tuple[str, ...] = ()
    launcher: str = ""
    job: str = ""
    meets_at: str = ""

    @classmethod
    def own(cls, attempt: str, agents: list[str]) -> Claimant:
        return cls(attempt, tuple(agents), record_name(), job_name(), rendezvous_at())

    def as_entry(self) -> dict[str, Any]:
        return asdict(self) | {"host": socket.gethostname(), "restarts": restarts_left()}


def look(
    folder: Path,
    own: Claimant,
    *,
    wait_s: float = 0.0,
    stopping: Callable[[], bool] = lambda: False,
    clock: SystemClock = SYSTEM,
) -> int:
    """Wait until no other attempt uses `folder`, and return the largest token it has had; `Lease` takes the next.

    Changes nothing, except that it may write `.wanted`, which it removes again. `wait_s`: the longest wait for another part of
    this job. `stopping` returns whether this process has received a stop request.

    Raises ConfigError: another job uses the folder; or another part of this job does, and its clock differs. Raises Held:
    another part has not released the folder within `wait_s`. Raises Preempted: `stopping` became true meanwhile.
    """
    recorded = outcome.last(folder).token  # read first: an attempt that begins in between is seen by its claim
    token, holder = newest_claim(folder)
    known = max(token, recorded)
    if not token or {*holder.get("agents", ())} & {*own.agents}:
        return known
    if holder.get("agents") and all(has_ended(agent) for agent in holder["agents"]):
        return known
    is_ours = bool(own.job) and holder.get("job") == own.job
    if not is_ours and holder.get("restarts") and any(map(is_at_work, holder.get("agents", ()))):
        raise in_use(folder, holder)  # even without ranks now, its agent restarts them
    seen = _read(folder / ".alive")
    renewed = trained = began = clock.monotonic()
    with contextlib.ExitStack() as request:
        while (now := clock.monotonic()) - renewed < HELD_S:
            clock.sleep(RENEW_S / 4)
            if newest_claim(folder)[0] != token:
                request.close()
                return look(folder, own, wait_s=wait_s - (now - began), stopping=stopping, clock=clock)
            if stopping():
                raise Preempted(f"stopped while another launch held {folder}: run the same command again")
            if (sign := _read(folder / ".alive")) is None or sign == seen:
                continue
            if not is_ours:
                raise in_use(folder, holder)
            seen, renewed = sign, now
            state, moment = _said(sign)
            if agents_compare_clocks() and moment is not None:
                _compare_clocks(clock.time() - moment, holder)
            trained = now if state == TRAINS else trained
            if now - trained > SUPERSEDED_S:
                return known
            if now - began > wait_s:
                raise Held(
                    f"output_dir={folder} is held by another part of this job on {holder.get('host')} (attempt "
                    f"{holder.get('attempt')}), which has not released it for {now - began:.0f} s: try again"
                )
            request.callback(_ask(folder, own, holder))
    return known


def _said(sign: bytes) -> tuple[str, float | None]:
    """Return a holder's state and clock; a holder that posts neither counts as training."""
    words = sign.decode(errors="replace").split()
    try:
        return words[2], float(words[3])
    except (IndexError, ValueError):
        return TRAINS, None


def _compare_clocks(apart_s: float, holder: dict[str, Any]) -> None:
    """Raise ConfigError if torchrun would not keep both agents in one group. apart_s: this host's clock less the holder's."""
    if abs(apart_s) > CLOCKS_APART_S:
        raise ConfigError(
            f"the clock of {socket.gethostname()} is {abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} that of "
            f"{holder.get('host')}: torchrun compares them to tell which agents are alive; synchronize them (NTP)"
        )


def _ask(folder: Path, own: Claimant, holder: dict[str, Any]) -> Callable[[], None]:
    """Ask a holder that torchrun can bring together with this part to make way. Returns a function to withdraw."""
    wanted = folder / ".wanted"
    if holder.get("meets_at") != own.meets_at:
        return lambda: None
    with contextlib.suppress(OSError):
        wanted.write_text(
            json.dumps({"job": own.job, "meets_at": own.meets_at, "host": socket.gethostname()}), encoding="utf-8"
        )
    return lambda: _remove(wanted)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def newest_claim(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the largest token claimed in `folder` and its claim; (0, {}) if the folder is free."""
    return newest(FolderEntries(folder))


def in_use(folder: Path, holder: dict[str, Any]) -> ConfigError:
    """Return the error for a folder that another job uses, or another task of the srun that started this process."""
    if holder.get("launcher") == record_name() and (tasks := tasks_apart()) > 1:
        return ConfigError(
            f"srun has started {tasks} tasks of this command, which know nothing of each other, and another one of them uses "
            f"output_dir={folder}: `sbatch slurm/ddp.sbatch`, or in an allocation `bash slurm/ddp.sbatch`, "
            "starts the ranks of one run"
        )
    return ConfigError(
        f"output_dir={folder} is in use by another job on {holder.get('host')} (attempt {holder.get('attempt')}, "
        f"launcher {holder.get('launcher')}): stop it, or give this one another name"
    )


class Lease:
    """A claim on a run's folder, renewed until it is released.

    `after` is the result of `look`; if another launch has claimed the folder since, this claim fails. `on_loss` is called once
    if another launch takes the folder over, `on_request` once if another part of this job asks for it. `stands` returns True
    while this attempt waits for lost ranks, so that another part may take over.

    Raises ConfigError: another launch was faster. Raises StorageError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        own: Claimant,
        *,
        after: int,
        on_loss: Callable[[RankLost], object],
        on_request: Callable[[str], object] = lambda _: None,
        stands: Callable[[], bool] = lambda: False,
        clock: SystemClock = SYSTEM,
    ):
        self.folder, self.own, self.clock = folder, own, clock
        self.on_loss, self.on_request, self.stands = on_loss, on_request, stands
        self.claim = Claim(FolderEntries(folder), own.as_entry())
        try:
            is_held = self.claim.take(after)
        except OSError as error:
            raise storage_error("use output_dir:", error, folder) from error
        if not is_held:
            raise in_use(folder, newest_claim(folder)[1])
        _remove(folder / ".wanted")
        self.claim.clear_older()
        clear_drafts(folder)
        self._beat, self._asked = 0, False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @property
    def token(self) -> int:
        return self.claim.token

    def is_held(self) -> bool:
        """Whether no other attempt has taken the run over; False if that cannot be determined."""
        record = outcome.read(self.folder)
        return record.get("token") == self.token and self.claim.is_newest()

    def let_go(self) -> None:
        self.stop()
        give_up(self.folder, self.token)

    def leave_to_restart(self) -> None:
        """Leave the claim to torchrun's agent: a process renews it until the agent restarts the ranks or ends."""
        self.stop()
        start_detached("muster.lease.lease_keeper", str(self.folder.absolute()), str(self.token), launcher())

    def stop(self) -> None:
        """Stop renewing; the claim stands until another attempt takes it."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def renew(self) -> bool:
        """Renew `.alive`, and pass on a request for the run; return False if another attempt has taken it over."""
        self._beat += 1
        self._show(sign(self.token, self._beat, STANDS if self.stands() else TRAINS, self.clock))
        if not self._asked and (other := self._request()):
            self._asked = True
            self.on_request(other)
        return newest_claim(self.folder)[0] <= self.token

    def _renew(self) -> None:
        while not self._ended.is_set():
            if not self.renew():
                self.on_loss(RankLost(f"another launch has taken over {self.folder}: this one ends"))
                return
            self.clock.wait(self._ended, RENEW_S)
        remove_last_sign(self.folder)

    def _request(self) -> str:
        try:
            request = json.loads((self.folder / ".wanted").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        is_known = self.own.job and isinstance(request, dict)
        if not is_known or (request.get("job"), request.get("meets_at")) != (self.own.job, self.own.meets_at):
            return ""
        return f"a part on {request.get('host')}"

    def _show(self, text: str) -> None:
        show(self.folder, text)


def sign(token: int, beat: int, state: str, clock: SystemClock = SYSTEM) -> str:
    return f"{token} {beat} {state} {clock.time():.2f}"


def show(folder: Path, text: str) -> None:
    """Renew a claim; ignores a full disk, which the checkpoints report.

    A draft that it has cut short must not remain: there would be a new one every second.
    """
    draft = draft_of(folder / ".alive")
    with contextlib.suppress(OSError):
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, folder / ".alive")
        finally:
            draft.unlink(missing_ok=True)


def remove_last_sign(folder: Path) -> None:
    """Remove `.alive` if it was renewed while its claim was given up, and nobody has claimed the folder since."""
    if not newest_claim(folder)[0]:
        _remove(folder / ".alive")


def give_up(folder: Path, token: int) -> None:
    """Remove a claim and its files, unless it has been superseded."""
    with contextlib.suppress(OSError):
        if newest_claim(folder)[0] == token:
            (folder / ".wanted").unlink(missing_ok=True)
            (folder / ".alive").unlink(missing_ok=True)
            (folder / f".claim-{token}").unlink()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
