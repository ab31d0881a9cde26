"""How many processes have been born in the place of ranks that died, counted in the rendezvous store of a launch.

A group of ranks knows how many births its members are: if more are counted, one of them has died and is back.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, Store


class Incarnations:
    """The births in one launch.

    Args:
        store: a client of the rendezvous store.
        launch: the first attempt of the launch.
        known: the number of births that the ranks of this group are.
    """

    def __init__(self, store: Store, launch: str, *, known: int = 0):
        self.launch, self.known = launch, known
        self._store = PrefixStore(launch, store)

    def announce(self) -> None:
        """Count the birth of this process."""
        self._store.add("births", 1)

    def is_one_lost(self) -> bool:
        """Whether a rank of this group has died and is born again. Answered at once."""
        return int(self._store.add("births", 0)) > self.known
