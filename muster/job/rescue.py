"""The save of the last step when a rank is lost: of a replicated state, each rank that is left holds all.

The ranks that are left post how far they have come in the rendezvous store, which one part of a divided network has. The
furthest of them commits a checkpoint alone; the others wait for it, since torchrun ends a node's ranks once one of them
has ended. A rank that waits for one that is left learns of the loss only when that one ends: it comes later, and saves if
the others cannot. If it is a step further than the rank that has saved, that step is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from muster.dist.board import Board, within
from muster.dist.world import World
from muster.errors import MusterError, say
from muster.job.folder import RunFolder
from muster.job.lease import newest_claim

POSTED_S = 0.5
"""The longest wait for the marks of ranks that may be gone."""
SAVED_S = 25.0
"""The longest wait for another rank's save: torchrun ends a node's other ranks 30 s after one has ended."""


def rescue(world: World, folder: RunFolder, *, mark: Sequence[int] | None, save: Callable[[], None]) -> None:
    """Let the furthest of the ranks that are left save its state, and wait for it. Every rank that is left must call it.

    Args:
        world: the ranks, some of which are gone.
        folder: the run's folder.
        mark: how far this rank has come, to be compared in order; None: it cannot save its state.
        save: writes and commits a checkpoint. Called on one rank.
    """
    board = world.board
    chosen = within(POSTED_S + 1.0, lambda: _chosen(board, mark))
    if chosen == world.rank:
        try:
            if newest_claim(folder.path)[1].get("attempt") == world.attempt and folder.may_commit():
                started = time.perf_counter()
                save()
                say(
                    f"muster: rank {world.rank} has saved this step in {time.perf_counter() - started:.1f} s: none is repeated"
                )
        except MusterError as error:
            say(f"muster: the steps since the last checkpoint are repeated: {error}")
        finally:
            within(1.0, board.end_rescue)
    elif chosen is not None and chosen >= 0:
        within(SAVED_S + 1.0, lambda: board.await_rescue(SAVED_S))


def _chosen(board: Board, mark: Sequence[int] | None) -> int:
    """Return the rank that saves; -1 if none can, of those that have posted by now: one that comes later then may."""
    board.post_mark(",".join(map(str, mark or ())))
    marks = {rank: [*map(int, text.split(","))] for rank, text in board.marks(POSTED_S).items() if text}
    return board.choose(max(marks, key=lambda rank: (marks[rank], -rank))) if marks else -1
