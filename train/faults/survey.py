"""What a rank sees of the others: rank 0 reads every beat and sums them up, the others read what rank 0 made of them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from train.faults.phase import Phase
from train.faults.verdict import Outlook, outlook

if TYPE_CHECKING:
    from train.dist.world import World

BLIND = 4  # periods without a look, after which what was seen before counts neither for nor against anybody


class Eye:
    """What one rank sees. `outlook` is None until it has looked; `gone` counts the ranks that rank 0 finds silent."""

    def __init__(self, world: World, period_s: float):
        self.world, self.period_s = world, period_s
        self.outlook: Outlook | None = None
        self.gone = 0
        self.first_name = "rank 0"
        self.first_host: str | None = None
        self._looked = time.monotonic()

    @property
    def unanswered_s(self) -> float:
        """Since the store has answered, while this rank looks."""
        return time.monotonic() - self._looked

    @property
    def first_silent_s(self) -> float:
        """Since rank 0 has posted something new, while this rank looks."""
        return 0.0

    def begin(self) -> None:
        """It is looked at from now on."""
        self._looked = time.monotonic()

    def look(self, mine: Phase, *, is_wanted: bool) -> None:
        """Read, and remember when what changed. Raises DistStoreError if the store is gone."""

    def post(self, mine: Phase) -> str:
        """The sign of life of a rank in the phase `mine`."""
        return json.dumps({"phase": asdict(mine)})

    def _was_blind(self) -> bool:
        """Whether it has not looked for so long that it cannot know who was silent meanwhile; it looks now."""
        before, self._looked = self._looked, time.monotonic()
        return self._looked - before > BLIND * self.period_s


class Survey(Eye):
    """Rank 0's: a beat is read for what it says only once somebody is silent or stands still."""

    def __init__(self, world: World, period_s: float):
        super().__init__(world, period_s)
        self._beats: list[bytes] = [b""] * world.size
        self._changed = [time.monotonic()] * world.size

    def look(self, mine: Phase, *, is_wanted: bool) -> None:
        beats = list(self.world.board.beats()) if self.world.size > 1 else [b""]
        blind, now = self._was_blind(), time.monotonic()
        for rank, beat in enumerate(beats):
            if blind or rank == 0 or beat != self._beats[rank]:
                self._changed[rank] = now
        self._beats = beats
        silent_s = {rank: now - changed for rank, changed in enumerate(self._changed)}
        quiet_s = 2 * self.period_s
        self.gone = sum(seconds > quiet_s for seconds in silent_s.values())
        if is_wanted or self.gone:
            phases = {rank: phase_of(beat) for rank, beat in enumerate(beats)}
            self.outlook = outlook({**phases, 0: mine}, silent_s=silent_s, quiet_s=quiet_s)
        else:
            self.outlook = None

    def post(self, mine: Phase) -> str:
        return json.dumps({"phase": asdict(mine), "outlook": self.outlook and self.outlook.as_json()})


class Echo(Eye):
    """Any other rank's."""

    def __init__(self, world: World, period_s: float):
        super().__init__(world, period_s)
        self._beat = b""
        self._changed = time.monotonic()

    @property
    def first_silent_s(self) -> float:
        return time.monotonic() - self._changed

    def begin(self) -> None:
        super().begin()
        self._changed = time.monotonic()

    def look(self, mine: Phase, *, is_wanted: bool) -> None:
        beat = self.world.board.first_beat()
        if self._was_blind() or beat != self._beat:
            self._changed = time.monotonic()
        self._beat = beat
        said: dict[str, Any] = json.loads(beat or "{}")
        self.outlook = Outlook.of_json(said["outlook"]) if said.get("outlook") else None
        if said:
            self.first_host = said["phase"]["host"]
            self.first_name = f"rank 0 on {self.first_host} ({said['phase']['label']})"


def phase_of(beat: bytes) -> Phase | None:
    """None if the rank has not come so far as to post one."""
    return Phase(**json.loads(beat)["phase"]) if beat else None
