"""Process groups of hosts, for sums of which a host sends one part over the network, not each of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from muster.errors import ConfigError, say
from muster.world import timeouts

if TYPE_CHECKING:
    from muster.world.group import World

FEWEST, SLOWER = 4, 10
"""`auto` needs so many ranks on each host, and a network so many times slower than memory."""
BYTES, TIMES = 4 << 20, 3


@dataclass(frozen=True)
class Hosts:
    """The hosts of all ranks, as many ranks on each, in their order.

    here: the ranks of this host. across: those with this local rank, one on each host.
    """

    number: int
    per_host: int
    here: dist.ProcessGroup
    across: dist.ProcessGroup

    def ranks(self, host: int) -> range:
        return range(host * self.per_host, (host + 1) * self.per_host)


def find_hosts(world: World, wanted: str, *, within_s: float = 60.0) -> Hosts | None:
    """Return the hosts if sums should go by hosts, as `dist.hierarchical` says. Collective.

    within_s: seconds in which groups are formed: one of the ranks may die meanwhile.
    Raises ConfigError: `always`, and the ranks train on GPUs.
    """
    if wanted == "never" or world.size == 1:
        return None
    if world.device.type != "cpu":
        if wanted == "always":
            raise ConfigError("dist.hierarchical=always is for ranks on CPUs: leave it out on GPUs, or give never")
        return None
    each = world.environment.local_world_size
    stands = [world.environment.local_rank == world.rank % each, each]
    alike = all(theirs == [True, each] for theirs in world.gather(stands)) and world.size % each == 0
    fewest = FEWEST if wanted == "auto" else 2
    if not alike or not fewest <= each < world.size:
        if wanted == "always" and world.is_first:
            say(
                "muster: dist.hierarchical=always has no effect: it needs several hosts with as many ranks on each, 2 or more"
            )
        return None
    number = world.size // each
    hosts = Hosts(
        number,
        each,
        _group([[*range(host * each, (host + 1) * each)] for host in range(number)], within_s),
        _group([[*range(local, world.size, each)] for local in range(each)], within_s),
    )
    return hosts if wanted == "always" or _is_slow(world, hosts) else None


def _group(groups: list[list[int]], within_s: float) -> dist.ProcessGroup:
    """Form all `groups`, and return that of this rank. Collective."""
    formed = [dist.new_group(ranks, timeout=timedelta(seconds=within_s)) for ranks in groups]
    own = next(each for each in formed if isinstance(each, dist.ProcessGroup))
    timeouts.set_timeout(own)
    return own


def _is_slow(world: World, hosts: Hosts) -> bool:
    """Measure memory and network, with all ranks at a time, and return whether the network is much slower. Collective."""
    data = torch.ones(BYTES // hosts.number * hosts.number, dtype=torch.uint8)
    copy = torch.empty_like(data)
    leaving = len(data) * (hosts.number - 1) / hosts.number
    memory = len(data) / _seconds(world, lambda: copy.copy_(data))
    network = leaving / _seconds(world, lambda: dist.all_to_all_single(copy, data, group=hosts.across))
    is_slow = bool(world.broadcast(network * SLOWER < memory))
    if world.is_first:
        speeds = (
            f"{network * hosts.per_host / 1e9:.2g} GB/s between hosts, {memory * hosts.per_host / 1e9:.2g} in memory"
        )
        said = "sums go host by host" if is_slow else "sums do not go host by host"
        say(f"muster: dist.hierarchical=auto: {said} ({speeds}, {hosts.number} hosts of {hosts.per_host} ranks)")
    return is_slow


def _seconds(world: World, do: Callable[[], object]) -> float:
    """Return the mean over ranks of the least seconds that `do` takes. Collective."""
    seen = []
    for _ in range(TIMES + 1):  # the first connects
        world.barrier()
        began = time.perf_counter()
        do()
        seen.append(time.perf_counter() - began)
    return world.sum([min(seen[1:])])[0] / world.size
