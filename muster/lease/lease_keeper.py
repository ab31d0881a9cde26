"""Keep a claim while torchrun restarts its ranks: `python -m muster.lease.lease_keeper FOLDER TOKEN AGENT`.

This is a process of its own, because no rank exists during a restart and torchrun's agent knows nothing of claims. It
exits once the ranks have claimed the run again, and gives the claim up when the agent, identified as by
`environment.launcher`, is gone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from muster.lease.folder_lease import RENEW_S, RESTARTS, give_up, newest_claim, remove_last_sign, show, sign
from muster.world.environment import has_ended

POLL_S = 0.2


def main(given: Sequence[str]) -> None:
    folder, token, agent = Path(given[0]), int(given[1]), given[2]
    beat, shown = 0, 0.0
    while newest_claim(folder)[0] == token:
        if has_ended(agent):
            give_up(folder, token)
            return
        if time.monotonic() - shown > RENEW_S:
            beat, shown = beat + 1, time.monotonic()
            show(folder, sign(token, beat, RESTARTS))
        time.sleep(POLL_S)
    remove_last_sign(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
