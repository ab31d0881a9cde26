"""Sums whose order, and so whose bits, are the same at every world size.

Floating-point addition is not associative, so a plain sum over ranks rounds differently at each world size. Here the
addends are the leaves of one binary tree that is independent of ranks. Each rank adds up the whole subtrees among its
leaves. The sums of the subtrees are then exchanged in chunks, and each rank joins one chunk for all. With a power of
two of ranks this moves as many bytes as a ring all-reduce. On several hosts the ranks of each host can do so first: then
a host sends the subtrees of its leaves, and not those of each of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from muster.sample_plan import leaves_of
from muster.world.reduce.hierarchical import Hosts
from muster.world.reduce.shared_memory import SharedMemory

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
    (total,) = joined(values, leaves)
    return total


def joined(values: dict[Node, Tensor], leaves: int) -> list[Tensor]:
    """Return the largest subtrees that the disjoint subtrees `values` make up, from left to right. Adds in place."""
    nodes, sums = [], []
    for node in sorted(values, key=lambda node: node[1] << node[0]):
        nodes.append(node)
        sums.append(values[node])
        _fold(nodes, leaves, sums)
    return sums


class TreeSum:
    """A sum over all ranks of `leaves` tensors of one shape and dtype; each rank contributes its own leaves.

    Holds at most one tensor for each level of the tree, or two if the rank's leaves begin within a subtree.
    """

    def __init__(
        self,
        leaves: int,
        *,
        rank: int,
        world_size: int,
        memory: SharedMemory | None = None,
        hosts: Hosts | None = None,
    ):
        self.leaves, self.rank, self.world_size, self.memory, self.hosts = leaves, rank, world_size, memory, hosts
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
            mine = torch.stack(self._sums) if len(self._sums) > 1 else self._sums[0][None]
            total = self._by_hosts(mine, nodes, self.hosts) if self.hosts else self._exchange(mine, nodes)
        self._nodes, self._sums = [], []
        return total

    def _combine(self, nodes: list[list[Node]], parts: Sequence[Tensor]) -> Tensor:
        flat = zip(chain(*nodes), chain(*parts), strict=True)
        return tree_sum(dict(flat), self.leaves)

    def _exchange(self, mine: Tensor, nodes: list[list[Node]]) -> Tensor:
        """Give every rank its chunk of all ranks' subtrees to add up, and gather the chunks."""
        part = self._combine(nodes, _dealt(_padded(mine, self.world_size), [*map(len, nodes)]))
        return _gathered(part, self.world_size)[: mine.shape[1]]

    def _by_hosts(self, mine: Tensor, nodes: list[list[Node]], hosts: Hosts) -> Tensor:
        """As `_exchange`, among the ranks of each host first, and then among ranks of one local rank on all hosts."""
        of_hosts = [subtrees(leaves_of(host, hosts.number, self.leaves), self.leaves) for host in range(hosts.number)]
        own = [nodes[rank] for rank in hosts.ranks(self.rank // hosts.per_host)]
        rows = _dealt(_padded(mine, self.world_size), [*map(len, own)], among=hosts.here)
        here = joined(dict(zip(chain(*own), chain(*rows), strict=True)), self.leaves)
        parts = _dealt(torch.stack(here), [*map(len, of_hosts)], among=hosts.across)
        part = _gathered(self._combine(of_hosts, parts), hosts.number, among=hosts.across)
        return _gathered(part, hosts.per_host, among=hosts.here)[: mine.shape[1]]


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """Return `rows`, [k, n], with zeros at their ends up to a multiple of elements."""
    rest = -rows.shape[1] % multiple
    return torch.nn.functional.pad(rows, (0, rest)) if rest else rows


def _dealt(rows: Tensor, counts: list[int], *, among: dist.ProcessGroup | None = None) -> Sequence[Tensor]:
    """Give each rank `among` all its chunk of this rank's `rows`, [k, n]. Collective in the group.

    Returns this rank's chunks: [counts[r], n / ranks] of rank r.
    """
    ranks = len(counts)
    chunk = rows.shape[1] // ranks
    outgoing = rows.view(len(rows), ranks, chunk).transpose(0, 1).contiguous()
    incoming = rows.new_empty((sum(counts), chunk))
    dist.all_to_all_single(
        incoming.view(-1),
        outgoing.view(-1),
        output_split_sizes=[count * chunk for count in counts],
        input_split_sizes=[len(rows) * chunk] * ranks,
        group=among,
    )
    return torch.split(incoming, counts)


def _gathered(part: Tensor, ranks: int, *, among: dist.ProcessGroup | None = None) -> Tensor:
    """Return the parts of all ranks of a group, one after the other. Collective in the group."""
    whole = part.new_empty(len(part) * ranks)
    dist.all_gather_into_tensor(whole, part, group=among)
    return whole


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
