"""One run, one writer.

Whoever wants to write to a run's folder claims it: a file `.claim-N` that is made with all its content in one step and
only if nobody else has (link(2)), so of launches at the same moment one wins. N only grows; whoever finds a larger one
than its own has been superseded and leaves. The holder renews `.alive` every second. Before a claim is taken over it is
watched for a while: if it is renewed, somebody is there. Only change is looked for, so clocks need not agree. A restart
by the same agents does not wait, nor does one that sees that all processes of the holder are gone from this host.

Who holds it may be another job, and that is final. Or it is another part of this very job, which torchrun has formed a
group without: a node that is lost but has not noticed, or agents that were starved for longer than their keep-alive.
Such a holder is waited for. If it waits itself for ranks that are gone, it is superseded; if it trains, it is asked, by
`.wanted`, to save and to start again together. `.alive` says which: token, beat, state, time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.dist.place import (
    agents_compare_clocks,
    has_ended,
    is_at_work,
    job_name,
    launcher,
    rendezvous_at,
    restarts_left,
)
from train.errors import ConfigError, Held, Preempted, RankLost, storage_error
from train.faults import attempts
from train.files import clear_drafts, create_file, draft_of

RENEW_S = 1.0
HELD_S = 10.0
"""A holder that stood still for less (garbage collection, a slow file server) keeps its lease; after more it may lose
it, and then leaves as soon as it wakes."""
WAIT_S = 30.0
"""The longest wait for another part of this job."""
SUPERSEDED_S = 2.0  # a holder that says for so long that it trains no more is not waited for
CLOCKS_APART_S = 10.0
"""More than torchrun's keep-alive tolerates, and more than a file server shows a file late."""
TRAINS, STANDS, RESTARTS = "trains", "stands", "restarts"
CLAIM = re.compile(r"\.claim-([0-9]{1,18})$")


@dataclass(frozen=True)
class JobPart:
    """Which job this process is a part of, and where its agents meet; empty where that is not known."""

    job: str = ""
    meets_at: str = ""

    @classmethod
    def own(cls) -> JobPart:
        return cls(job_name(), rendezvous_at())


def look(
    folder: Path,
    agents: list[str],
    part: JobPart = JobPart(),
    *,
    wait_s: float = 0.0,
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """The largest token that `folder` has known, for `Lease` to go one further, once nobody else is at work there.

    Changes nothing.

    Raises:
        ConfigError: another job is at work there; or another part of this one, whose clock is another.
        Held: another part of this job is, and has not made way within `wait_s`.
        Preempted: `stopping` meanwhile.
    """
    recorded = attempts.last(folder).token  # read first: whoever begins between the two is seen by its claim
    token, holder = newest_claim(folder)
    known = max(token, recorded)
    if not token or {*holder.get("agents", ())} & {*agents}:
        return known
    if holder.get("agents") and all(has_ended(agent) for agent in holder["agents"]):
        return known
    is_ours = bool(part.job) and holder.get("job") == part.job
    if not is_ours and holder.get("restarts") and any(is_at_work(agent) for agent in holder["agents"]):
        raise in_use(folder, holder)  # if no rank is there just now, its agent starts them again
    seen, renewed, began = _read(folder / ".alive"), time.monotonic(), time.monotonic()
    trained = began
    with contextlib.ExitStack() as request:
        while (now := time.monotonic()) - renewed < HELD_S:
            time.sleep(RENEW_S / 4)
            if newest_claim(folder)[0] != token:
                request.close()
                return look(folder, agents, part, wait_s=wait_s - (now - began), stopping=stopping)
            if stopping():
                raise Preempted(f"told to stop while another launch held {folder}: run the same command again")
            if (sign := _read(folder / ".alive")) is None or sign == seen:
                continue
            if not is_ours:
                raise in_use(folder, holder)
            seen, renewed = sign, now
            state, moment = _said(sign)
            if agents_compare_clocks():
                _compare_clocks(moment, holder)
            trained = now if state == TRAINS else trained
            if now - trained > SUPERSEDED_S:
                return known
            if now - began > wait_s:
                raise Held(
                    f"output_dir={folder} is held by another part of this very job on {holder.get('host')} (attempt "
                    f"{holder.get('attempt')}), which has not made way for {now - began:.0f} s: try again"
                )
            request.callback(_ask(folder, part, holder))
    return known


def _said(sign: bytes) -> tuple[str, float]:
    """A holder's state and clock; one that says neither trains."""
    words = sign.decode(errors="replace").split()
    try:
        return words[2], float(words[3])
    except (IndexError, ValueError):
        return TRAINS, time.time()


def _compare_clocks(moment: float, holder: dict[str, Any]) -> None:
    """Raises ConfigError: torchrun would not keep both agents in one group. `moment`: the holder's, of just now."""
    apart_s = time.time() - moment
    if abs(apart_s) > CLOCKS_APART_S:
        raise ConfigError(
            f"the clock of {socket.gethostname()} is {abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} that of "
            f"{holder.get('host')}: torchrun compares them to tell which agents are alive; synchronize them (NTP)"
        )


def _ask(folder: Path, part: JobPart, holder: dict[str, Any]) -> Callable[[], None]:
    """Ask a holder that torchrun can bring together with this part to make way. Gives back what takes the request back."""
    wanted = folder / ".wanted"
    if holder.get("meets_at") != part.meets_at:
        return lambda: None
    with contextlib.suppress(OSError):
        wanted.write_text(json.dumps({"job": part.job, "meets_at": part.meets_at, "host": socket.gethostname()}))
    return lambda: _remove(wanted)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def newest_claim(folder: Path) -> tuple[int, dict[str, Any]]:
    """The largest token claimed in `folder`, and who has it; 0 and nobody if it is free.

    What a claim does not say, or says in another type, is unknown: its holder is then waited for as a stranger.
    """
    try:
        found = {int(match[1]): path for path in folder.iterdir() if (match := CLAIM.fullmatch(path.name))}
    except OSError:
        return 0, {}
    if not found:
        return 0, {}
    return max(found), attempts.read_record(found[max(found)])


def in_use(folder: Path, holder: dict[str, Any]) -> ConfigError:
    return ConfigError(
        f"output_dir={folder} is in use by another job on {holder.get('host')} (attempt {holder.get('attempt')}, "
        f"launcher {holder.get('launcher')}): stop it, or give this one another name"
    )


class Lease:
    """The claim on a run's folder, renewed until it is let go. `on_loss` is called, once, if somebody takes it over.

    `after` is what `look` gave: if anybody has claimed the folder since, this claim fails.

    Raises:
        ConfigError: another launch was faster.
        StorageError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        after: int,
        attempt: str,
        agents: list[str],
        launcher: str,
        on_loss: Callable[[RankLost], object],
        on_request: Callable[[str], object] = lambda _: None,
        stands: Callable[[], bool] = lambda: False,
        part: JobPart = JobPart(),
    ):
        self.folder, self.on_loss, self.token = folder, on_loss, after + 1
        self.on_request, self.stands, self.part = on_request, stands, part
        claim = {"attempt": attempt, "agents": agents, "launcher": launcher, "host": socket.gethostname()}
        self._claim(json.dumps({**claim, "job": part.job, "meets_at": part.meets_at, "restarts": restarts_left()}))
        _remove(folder / ".wanted")
        for token in range(max(1, self.token - 8), self.token):  # of attempts that were killed
            with contextlib.suppress(OSError):
                self._path(token).unlink()
        clear_drafts(folder)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Whether no other attempt has taken the run over; no, if that cannot be told."""
        record = attempts.read(self.folder)
        return record.get("token") == self.token and newest_claim(self.folder)[0] == self.token

    def let_go(self) -> None:
        """Stop renewing, and leave no sign if the folder is still this attempt's."""
        self._stop()
        give_up(self.folder, self.token)

    def leave_to_restart(self) -> None:
        """Leave the claim to torchrun's agent, which starts the ranks again: until it does, or ends, it is renewed."""
        self._stop()
        folder, kit = self.folder.absolute(), Path(__file__).parents[2]  # users have a `train` of their own, too
        line = [sys.executable, "-m", "train.faults.caretaker", str(folder), str(self.token), launcher()]
        with contextlib.suppress(OSError):
            subprocess.Popen(line, cwd=kit, stdin=subprocess.DEVNULL, start_new_session=True)

    def _stop(self) -> None:
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _path(self, token: int) -> Path:
        return self.folder / f".claim-{token}"

    def _claim(self, text: str) -> None:
        try:
            create_file(self._path(self.token), text.encode())
        except FileExistsError:
            raise in_use(self.folder, newest_claim(self.folder)[1]) from None
        except OSError as error:
            raise storage_error("use output_dir:", error) from error

    def _renew(self) -> None:
        beat, asked = 0, False
        while not self._ended.is_set():
            beat += 1
            self._show(sign(self.token, beat, STANDS if self.stands() else TRAINS))
            if not asked and (other := self._request()):
                asked = True
                self.on_request(other)
            if newest_claim(self.folder)[0] > self.token:
                self.on_loss(RankLost(f"another launch has taken over {self.folder}: this one leaves it to that"))
                return
            self._ended.wait(RENEW_S)

    def _request(self) -> str:
        """Which other part of this job asks for the run; empty if none does."""
        try:
            request = json.loads((self.folder / ".wanted").read_text())
        except (OSError, ValueError):
            return ""
        own = self.part.job and isinstance(request, dict)
        if not own or (request.get("job"), request.get("meets_at")) != (self.part.job, self.part.meets_at):
            return ""
        return f"a part on {request.get('host')}"

    def _show(self, text: str) -> None:
        show(self.folder, text)


def sign(token: int, beat: int, state: str) -> str:
    """A sign of life."""
    return f"{token} {beat} {state} {time.time():.2f}"


def show(folder: Path, text: str) -> None:
    """Renew a claim. A full disk is for the checkpoints to report; but a draft that it cut short must not stay, once a second."""
    draft = draft_of(folder / ".alive")
    with contextlib.suppress(OSError):
        try:
            draft.write_text(text)
            os.replace(draft, folder / ".alive")
        finally:
            draft.unlink(missing_ok=True)


def give_up(folder: Path, token: int) -> None:
    """Remove a claim, and what goes with it, unless it has been superseded."""
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
