"""How many processes have replaced ranks that died, counted in the rendezvous store of a launch.

A group of ranks knows how many replacements its members are: if more are counted, one of them has died and is back.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, Store


class Incarnations:
    """The replacements in one launch.

    Args:
        store: a client of the rendezvous store.
        launch: the first attempt of the launch.
        known: the number of replacements among the ranks of this group.
    """

    def __init__(self, store: Store, launch: str, *, known: int = 0):
        self.launch, self.known = launch, known
        self._store = PrefixStore(launch, store)

    def announce(self) -> None:
        """Count this process as a replacement."""
        self._store.add("incarnations", 1)

    def is_one_lost(self) -> bool:
        """Whether a rank of this group has died and is restarted in place. Answered at once."""
        return int(self._store.add("incarnations", 0)) > self.known
