"""Sums whose order is the same at every world size, so that their bits are, too.

Floating-point addition is not associative: a sum over ranks rounds differently with each number of them. Here the
addends are the leaves of one binary tree that knows nothing of ranks; a rank adds up the whole subtrees among its
leaves, and what joins the subtrees of several ranks is exchanged in chunks, each of which one rank adds up for all.
With a power of two of ranks that moves the bytes of a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from train.dist.shared_memory import SharedMemory
from train.plan import leaves_of

Node = tuple[int, int]
"""(level, index): the sum of the leaves from index * 2**level to the next one's, or to the last leaf."""


def subtrees(mine: range, leaves: int) -> list[Node]:
    """The largest subtrees that hold none but the leaves `mine`, from left to right."""
    nodes: list[Node] = []
    for leaf in mine:
        nodes.append((0, leaf))
        _fold(nodes, leaves)
    return nodes


def tree_sum(values: dict[Node, Tensor], leaves: int) -> Tensor:
    """The sum of all `leaves`, of which the disjoint subtrees `values` are given. Adds in place to their left ones."""
    nodes, sums = [], []
    for node in sorted(values, key=lambda node: node[1] << node[0]):
        nodes.append(node)
        sums.append(values[node])
        _fold(nodes, leaves, sums)
    (total,) = sums
    return total


class TreeSum:
    """One sum over all ranks of `leaves` tensors alike, each given by the rank whose leaf it is.

    Holds at most one tensor for each level of the tree, twice where the rank's leaves begin within a subtree.
    """

    def __init__(self, leaves: int, *, rank: int, world_size: int, memory: SharedMemory | None = None):
        self.leaves, self.rank, self.world_size, self.memory = leaves, rank, world_size, memory
        self._nodes: list[Node] = []
        self._sums: list[Tensor] = []

    def add(self, leaf: int, value: Tensor) -> None:
        """Take the next of this rank's leaves, in order. `value`, [n], becomes the sum's own."""
        self._nodes.append((0, leaf))
        self._sums.append(value)
        _fold(self._nodes, self.leaves, self._sums)

    def total(self) -> Tensor:
        """[n] the sum, after every rank has given all its leaves; bit for bit the same at any world size. Collective."""
        nodes = [subtrees(leaves_of(rank, self.world_size, self.leaves), self.leaves) for rank in range(self.world_size)]
        if self.world_size == 1:
            (total,) = self._sums
        elif self.memory:
            total = self._sums[0]
            self.memory.exchange(self._sums, [*map(len, nodes)], partial(self._combine, nodes), into=total)
        else:
            total = self._exchange(torch.stack(self._sums) if len(self._sums) > 1 else self._sums[0][None], nodes)
        self._nodes, self._sums = [], []
        return total

    def _combine(self, nodes: list[list[Node]], parts: Sequence[Tensor]) -> Tensor:
        """All ranks' subtrees added up: in place, in the first rank's first."""
        flat = zip(chain(*nodes), chain(*parts), strict=True)
        return tree_sum(dict(flat), self.leaves)

    def _exchange(self, mine: Tensor, nodes: list[list[Node]]) -> Tensor:
        """Every rank adds up its chunk of all ranks' subtrees."""
        size, length = self.world_size, mine.shape[1]
        chunk = -(-length // size)
        padded = torch.nn.functional.pad(mine, (0, chunk * size - length)) if length % size else mine
        outgoing = padded.view(len(mine), size, chunk).transpose(0, 1).contiguous()
        incoming = mine.new_empty((sum(map(len, nodes)), chunk))
        counts = [len(of_rank) * chunk for of_rank in nodes]
        dist.all_to_all_single(
            incoming.view(-1), outgoing.view(-1), output_split_sizes=counts, input_split_sizes=[len(mine) * chunk] * size
        )
        part = self._combine(nodes, torch.split(incoming, [*map(len, nodes)]))
        whole = mine.new_empty(chunk * size)
        dist.all_gather_into_tensor(whole, part)
        return whole[:length]


def _fold(nodes: list[Node], leaves: int, sums: list[Tensor] | None = None) -> None:
    """Join the last node with its left neighbour as long as they are a pair, or has none to come on its right."""
    while True:
        level, index = nodes[-1]
        if index == 0 and (1 << level) >= leaves:
            return
        if index % 2 == 0:
            if (index + 1) << level < leaves:
                return
            nodes[-1] = (level + 1, index // 2)  # the last of an odd number: nothing to add
        elif len(nodes) > 1 and nodes[-2] == (level, index - 1):
            nodes[-2:] = [(level + 1, index // 2)]
            if sums is not None:
                right = sums.pop()
                sums[-1].add_(right)
        else:
            return
