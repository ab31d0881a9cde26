"""The ranks' views of each other: rank 0 sums up all beats, the others read its summary."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from muster.clock import SYSTEM, SystemClock
from muster.faults.phase import Phase
from muster.faults.rank_at_fault import Outlook, outlook

if TYPE_CHECKING:
    from muster.world.group import World

BLIND = 4  # after this many missed polls, discard old beats


class Eye:
    """`outlook` is None before the first look; `gone` counts the ranks that rank 0 finds silent."""

    def __init__(self, world: World, period_s: float, *, clock: SystemClock = SYSTEM):
        self.world, self.period_s, self.clock = world, period_s, clock
        self.outlook: Outlook | None = None
        self.gone = 0
        self.first_name = "rank 0"
        self.first_host: str | None = None
        self._looked = self.clock.monotonic()

    @property
    def unanswered_s(self) -> float:
        """Seconds since the store last answered, while this rank watches."""
        return self.clock.monotonic() - self._looked

    @property
    def first_silent_s(self) -> float:
        """Seconds since rank 0 last posted a new beat, while this rank watches."""
        return 0.0

    def begin(self) -> None:
        """Start to watch."""
        self._looked = self.clock.monotonic()

    def look(self, mine: Phase, *, is_wanted: bool) -> None:
        """Read the beats, and record when they changed. Raises DistStoreError if the store is gone."""

    def post(self, mine: Phase) -> str:
        """Return the beat of a rank in the phase `mine`."""
        return json.dumps({"phase": asdict(mine)})

    def _was_blind(self) -> bool:
        """Whether the last look is too old to know which ranks were silent meanwhile; counts as a look."""
        before, self._looked = self._looked, self.clock.monotonic()
        return self._looked - before > BLIND * self.period_s


class Survey(Eye):
    """Rank 0's view. Parses the beats only when a rank is silent or stands still."""

    def __init__(self, world: World, period_s: float, *, clock: SystemClock = SYSTEM):
        super().__init__(world, period_s, clock=clock)
        self._beats: list[bytes] = [b""] * world.size
        self._changed = [self.clock.monotonic()] * world.size

    def look(self, mine: Phase, *, is_wanted: bool) -> None:
        beats = list(self.world.store_keys.beats()) if self.world.size > 1 else [b""]
        blind, now = self._was_blind(), self.clock.monotonic()
        for rank, beat in enumerate(beats):
            if blind or rank == 0 or beat != self._beats[rank]:
                self._changed[rank] = now
        self._beats = beats
        silent_s = {rank: now - changed for rank, changed in enumerate(self._changed)}
        quiet_s = self.world.store_keys.beat_lag * self.period_s
        self.gone = sum(seconds > quiet_s for seconds in silent_s.values())
        if is_wanted or self.gone:
            phases = {rank: phase_of(beat) for rank, beat in enumerate(beats)}
            self.outlook = outlook({**phases, 0: mine}, silent_s=silent_s, quiet_s=quiet_s)
        else:
            self.outlook = None

    def post(self, mine: Phase) -> str:
        return json.dumps({"phase": asdict(mine), "outlook": self.outlook and self.outlook.as_json()})


class Echo(Eye):
    def __init__(self, world: World, period_s: float, *, clock: SystemClock = SYSTEM):
        super().__init__(world, period_s, clock=clock)
        self._beat = b""
        self._changed = self.clock.monotonic()

    @property
    def first_silent_s(self) -> float:
        return self.clock.monotonic() - self._changed

    def begin(self) -> None:
        super().begin()
        self._changed = self.clock.monotonic()

    def look(self, mine: Phase, *, is_wanted: bool) -> None:
        beat = self.world.store_keys.first_beat()
        if self._was_blind() or beat != self._beat:
            self._changed = self.clock.monotonic()
        self._beat = beat
        said: dict[str, Any] = json.loads(beat or "{}")
        self.outlook = Outlook.of_json(said["outlook"]) if said.get("outlook") else None
        if said:
            self.first_host = said["phase"]["host"]
            self.first_name = f"rank 0 on {self.first_host} ({said['phase']['label']})"


def phase_of(beat: bytes) -> Phase | None:
    """None if the rank has not posted a phase yet."""
    return Phase(**json.loads(beat)["phase"]) if beat else None
