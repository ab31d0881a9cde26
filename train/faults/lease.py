"""One run, one writer.

Whoever wants to write to a run's folder claims it: a file `.claim-N` that is made with all its content in one step and
only if nobody else has (link(2)), so of launches at the same moment one wins. N only grows; whoever finds a larger one
than its own has been superseded and leaves. The holder renews `.alive` every second. Before a claim is taken over it is
watched for a while: if it is renewed, somebody is there. Only change is looked for, so clocks need not agree. A restart
by the same agents does not wait, nor does one that sees that all processes of the holder are gone from this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.dist.place import has_ended
from train.errors import ConfigError, RankLost, storage_error
from train.faults import attempts
from train.files import clear_drafts, create_file, draft_of

RENEW_S = 1.0
HELD_S = 10.0
"""A holder that stood still for less (garbage collection, a slow file server) keeps its lease; after more it may lose
it, and then leaves as soon as it wakes."""
CLAIM = re.compile(r"\.claim-(\d+)$")


def look(folder: Path, agents: list[str]) -> int:
    """The largest token that `folder` has known, for `Lease` to go one further, once nobody else is at work there.

    Changes nothing. Raises ConfigError, naming the holder, if another launch is.
    """
    recorded = attempts.last(folder).token  # read first: whoever begins between the two is seen by its claim
    token, holder = newest_claim(folder)
    known = max(token, recorded)
    if not token or {*holder.get("agents", ())} & {*agents}:
        return known
    if holder.get("agents") and all(has_ended(agent) for agent in holder["agents"]):
        return known
    alive = folder / ".alive"
    first, deadline = _read(alive), time.monotonic() + HELD_S
    while time.monotonic() < deadline:
        time.sleep(RENEW_S / 4)
        if newest_claim(folder)[0] != token:
            return look(folder, agents)
        if (seen := _read(alive)) is not None and seen != first:
            raise in_use(folder, holder)
    return known


def newest_claim(folder: Path) -> tuple[int, dict[str, Any]]:
    """The largest token claimed in `folder`, and who has it; 0 and nobody if it is free."""
    try:
        found = {int(match[1]): path for path in folder.iterdir() if (match := CLAIM.fullmatch(path.name))}
    except OSError:
        return 0, {}
    if not found:
        return 0, {}
    try:
        holder = json.loads(found[max(found)].read_text())
    except (OSError, ValueError):
        holder = {}
    return max(found), holder if isinstance(holder, dict) else {}


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
    ):
        self.folder, self.on_loss, self.token = folder, on_loss, after + 1
        self._claim(
            json.dumps({"attempt": attempt, "agents": agents, "launcher": launcher, "host": socket.gethostname()})
        )
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
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        with contextlib.suppress(OSError):
            if newest_claim(self.folder)[0] == self.token:
                (self.folder / ".alive").unlink(missing_ok=True)
                self._path(self.token).unlink()

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
        beat = 0
        while not self._ended.is_set():
            beat += 1
            self._show(f"{self.token} {beat}")
            if newest_claim(self.folder)[0] > self.token:
                self.on_loss(RankLost(f"another launch has taken over {self.folder}: this one leaves it to that"))
                return
            self._ended.wait(RENEW_S)

    def _show(self, text: str) -> None:
        """A full disk is for the checkpoints to report; but a draft that it cut short must not stay, once a second."""
        draft = draft_of(self.folder / ".alive")
        with contextlib.suppress(OSError):
            try:
                draft.write_text(text)
                os.replace(draft, self.folder / ".alive")
            finally:
                draft.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
