"""Sums whose order, and so whose bits, are the same at every world size.

Floating-point addition is not associative, so a plain sum over ranks rounds differently at each world size. Here the
addends are the leaves of one binary tree that is independent of ranks. Each rank adds up the whole subtrees among its
leaves. The sums of the subtrees are then exchanged in chunks, and each rank joins one chunk for all. With a power of
two of ranks this moves as many bytes as a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from muster.dist.reduce.shared_memory import SharedMemory
from muster.plan import leaves_of

Node = tuple[int, int]
"""(level, index): the sum of the leaves from index * 2**level to the start of the next node, or to the last leaf."""


def subtrees(mine: range, leaves: int) -> list[Node]:
    """Return the largest subtrees that hold only the leaves in `mine`, from left to right."""
    nodes: list[Node] = []
    for leaf in mine:
        nodes.append((0, leaf))
        _fold(nodes, leaves)
    return nodes


def tree_sum(values: dict[Node, Tensor], leaves: int) -> Tensor:
    """Return the sum of all `leaves`, given as disjoint subtrees `values`. Adds in place, into the left operands."""
    nodes, sums = [], []
    for node in sorted(values, key=lambda node: node[1] << node[0]):
        nodes.append(node)
        sums.append(values[node])
        _fold(nodes, leaves, sums)
    (total,) = sums
    return total


class TreeSum:
    """A sum over all ranks of `leaves` tensors of one shape and dtype; each rank contributes its own leaves.

    Holds at most one tensor for each level of the tree, or two if the rank's leaves begin within a subtree.
    """

    def __init__(self, leaves: int, *, rank: int, world_size: int, memory: SharedMemory | None = None):
        self.leaves, self.rank, self.world_size, self.memory = leaves, rank, world_size, memory
        self._nodes: list[Node] = []
        self._sums: list[Tensor] = []

    def add(self, leaf: int, value: Tensor) -> None:
        """Add this rank's next leaf, in order. `value`, [n], is taken over and changed in place."""
        self._nodes.append((0, leaf))
        self._sums.append(value)
        _fold(self._nodes, self.leaves, self._sums)

    def total(self) -> Tensor:
        """Return the sum, [n], bitwise equal at any world size, after all leaves are added. Collective."""
        size, leaves = self.world_size, self.leaves
        nodes = [subtrees(leaves_of(rank, size, leaves), leaves) for rank in range(size)]
        if size == 1:
            (total,) = self._sums
        elif self.memory:
            total = self._sums[0]
            self.memory.exchange(self._sums, [*map(len, nodes)], partial(self._combine, nodes), into=total)
        else:
            total = self._exchange(torch.stack(self._sums) if len(self._sums) > 1 else self._sums[0][None], nodes)
        self._nodes, self._sums = [], []
        return total

    def _combine(self, nodes: list[list[Node]], parts: Sequence[Tensor]) -> Tensor:
        """Add up all ranks' subtrees in place, into the first rank's first."""
        flat = zip(chain(*nodes), chain(*parts), strict=True)
        return tree_sum(dict(flat), self.leaves)

    def _exchange(self, mine: Tensor, nodes: list[list[Node]]) -> Tensor:
        """Give every rank its chunk of all ranks' subtrees to add up, and gather the chunks."""
        size, length = self.world_size, mine.shape[1]
        chunk = -(-length // size)
        padded = torch.nn.functional.pad(mine, (0, chunk * size - length)) if length % size else mine
        outgoing = padded.view(len(mine), size, chunk).transpose(0, 1).contiguous()
        incoming = mine.new_empty((sum(map(len, nodes)), chunk))
        counts = [len(of_rank) * chunk for of_rank in nodes]
        dist.all_to_all_single(
            incoming.view(-1),
            outgoing.view(-1),
            output_split_sizes=counts,
            input_split_sizes=[len(mine) * chunk] * size,
        )
        part = self._combine(nodes, torch.split(incoming, [*map(len, nodes)]))
        whole = mine.new_empty(chunk * size)
        dist.all_gather_into_tensor(whole, part)
        return whole[:length]


def _fold(nodes: list[Node], leaves: int, sums: list[Tensor] | None = None) -> None:
    """Join the last node with its left sibling while they are a pair, or lift it while it has no right sibling."""
    while True:
        level, index = nodes[-1]
        if index == 0 and (1 << level) >= leaves:
            return
        if index % 2 == 0:
            if (index + 1) << level < leaves:
                return
            nodes[-1] = (level + 1, index // 2)  # the last of an odd number of nodes: nothing to add
        elif len(nodes) > 1 and nodes[-2] == (level, index - 1):
            nodes[-2:] = [(level + 1, index // 2)]
            if sums is not None:
                right = sums.pop()
                sums[-1].add_(right)
        else:
            return
