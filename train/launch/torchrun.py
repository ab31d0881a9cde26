"""torchrun, whose agents need not have the same time: `python -m train.launch.torchrun`, with torchrun's arguments.

In torch's c10d rendezvous an agent writes the time of its own clock, and is lost when that is older than the keep-alive
window by the clock of the one that reads it. So an agent whose clock is a minute behind is struck off as soon as it
comes, and one a minute ahead strikes off all others. Here an agent is lost when what it wrote has not changed for as
long as the window, and time is what has passed: a clock that is set while agents run changes nothing either.

What an agent writes is what torch's own writes, so both may meet in one job. The launcher starts this file by its path, as
the folder may have a `train` of its own, so it imports nothing of the kit.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any


class Steady:
    """Stands in for `datetime` in a module that calls no more of it than `now`: the system's clock, read once."""

    def __init__(self) -> None:
        self.began, self.since = datetime.now(UTC), time.monotonic()

    def now(self, _zone: timezone = UTC) -> datetime:
        return self.began + timedelta(seconds=time.monotonic() - self.since)


def compare_no_clocks() -> None:
    """Have the agent of this process judge others by how long ago it saw a new sign of them."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    holder: Any = rendezvous._BackendRendezvousStateHolder
    strike_off, steady = holder._sanitize, Steady()

    def sanitize(self: Any) -> None:
        written, now = self._state.last_heartbeats, steady.now()
        before = getattr(self, "seen", {})  # by agent: its sign, and when that was new
        self.seen = {
            agent: before[agent] if before.get(agent, (None,))[0] == sign else (sign, now)
            for agent, sign in written.items()
        }
        self._state.last_heartbeats = {agent: when for agent, (_, when) in self.seen.items()}
        strike_off(self)
        self._state.last_heartbeats = {agent: written[agent] for agent in self._state.last_heartbeats}

    holder._sanitize = sanitize
    vars(rendezvous)["datetime"] = steady
    os.environ["MUSTER_STEADY_AGENT"] = "1"  # for the ranks: train/dist/place.py


if __name__ == "__main__":
    from torch.distributed.run import main

    compare_no_clocks()
    main()
