"""Exclusive ownership of a checkpoint storage: only the owner commits there.

Two runs in two folders may be given the same `checkpoint.storage`, and the lease on a folder does not cover it. So an
attempt claims the storage with a marker `owner-N.json` at its root (fencing.py): a run that finds a newer marker than its
own has lost the storage and leaves it as it is. A claim never waits, so a run that was moved to another folder, or that
returns with an empty folder, continues at once, and the earlier one ends.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from muster.checkpoint.commit import Lost, Storage
from muster.errors import say
from muster.lease.fencing import Claim, StorageEntries, newest
from muster.outcome import DONE, Outcome


class StorageLease:
    """An attempt's claim on `storage`. All public methods raise StorageError."""

    def __init__(self, storage: Storage, *, folder: Path, attempt: str, agents: list[str]):
        self.storage, self.agents = storage, agents
        marker = {"folder": str(folder.absolute()), "host": socket.gethostname(), "attempt": attempt, "agents": agents}
        self._claim = Claim(StorageEntries(storage), marker)

    @property
    def token(self) -> int:
        """The number of this attempt's marker; 0 before `claim`."""
        return self._claim.token

    def claim(self, before: Outcome) -> None:
        """Take over the storage, and print so if another run owned it. `before`: the previous attempt in this folder.

        Raises Lost: this launch owned the storage, and another run has taken it over since.
        """
        self.storage.prepare()
        token, holder = newest(self._claim.entries)
        if holder and self._is_strange(holder, before):
            if before.is_same_launch(self.agents) and before.outcome != DONE:
                raise self._lost(holder)
            say(
                f"muster: checkpoint.storage={self.storage.root} was last used by {_name(holder)}: this run takes it "
                "over; if the other still trains, it ends at its next checkpoint"
            )
        while not self._claim.take(token):
            token, _ = newest(self._claim.entries)
        self._claim.clear_older()

    def check(self) -> None:
        """Raise Lost if another attempt has taken over the storage. If all markers were deleted, none has."""
        token, holder = newest(self._claim.entries)
        if token and holder != self._claim.content:
            raise self._lost(holder)

    def _is_strange(self, holder: dict[str, Any], before: Outcome) -> bool:
        """Return True if the marker belongs, as far as is known, to no earlier attempt at this run."""
        own = self._claim.content
        return (
            holder.get("attempt") != before.attempt
            and {*holder.get("agents", ())}.isdisjoint(self.agents)
            and (holder.get("folder"), holder.get("host")) != (own["folder"], own["host"])
        )

    def _lost(self, holder: dict[str, Any]) -> Lost:
        return Lost(
            f"checkpoint.storage={self.storage.root} was taken over by {_name(holder)}: give each run a storage of its own"
        )


def _name(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run"
    return f"a run in {holder.get('folder')} on {holder.get('host')} (attempt {holder.get('attempt')})"
