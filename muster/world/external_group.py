"""The ranks of a process group that exists already: a script, or Accelerate, has formed it and goes on to own it."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from muster.errors import ConfigError
from muster.world.environment import Environment, launcher, restarts_left, store_is_agents
from muster.world.group import World
from muster.world.group_options import GroupOptions
from muster.world.node_memory import node_memory
from muster.world.reduce.shared_memory import share_memory
from muster.world.rendezvous.meeting import digest
from muster.world.rendezvous.network import read_addresses_at_once
from muster.world.store_keys import StoreKeys

UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SHARED = "torchrun shares its store with this script's own process group, which may hang or fail to form when torchrun restarts the ranks: {}"
"""torch's `env://` puts the addresses of every start under the same keys of the agent's store (torch 2.15, rendezvous.py)."""


def exists() -> bool:
    return dist.is_available() and dist.is_initialized()


def why_restart_may_hang() -> str:
    """Return why the ranks may not meet after a restart by torchrun, and the remedy; empty if they do.

    A static rendezvous, that of --node-rank, shares its store whatever the variable says.
    """
    if not (exists() and store_is_agents() and restarts_left()):
        return ""
    is_set = os.environ.get(UNSHARED) == "1"
    return SHARED.format(
        "use --rdzv-backend=c10d in place of --node-rank"
        if is_set
        else f"set {UNSHARED}=1 before torchrun, as muster launch node does"
    )


def borrow(options: GroupOptions) -> World:
    """Return the ranks of the existing default group. Collective. Raises ConfigError: ranks differ in `options.alike`."""
    group = _group_of_cpu_tensors()
    environment, store = _place(group), dist.distributed_c10d._get_default_store()
    attempt = _gathered(uuid.uuid4().hex[:8], group)[0]
    agents = _gathered(launcher(), group)
    agents = sorted({*agents}) if environment.rank == 0 else [launcher()]
    with node_memory(environment, attempt) as node:
        store_keys = StoreKeys(
            _own(store), attempt=attempt, rank=environment.rank, size=environment.world_size, node=node
        )
        store_keys.post_beat("")
        world = World(environment, _device(options), attempt, store_keys, agents, group=group, is_borrowed=True)
        world.barrier()  # from here on every rank has mapped its node's memory and has a beat to read
    if options.alike is not None:
        world.same(
            "job options: digest", digest(options.alike), remedy="give every rank the same arguments", error=ConfigError
        )
    return replace(world, memory=share_memory(world)) if options.shared_memory else world


def _group_of_cpu_tensors() -> dist.ProcessGroup | None:
    """Return a group that carries CPU tensors; None if the default group does. Collective."""
    assert dist.group.WORLD
    if any(device.type == "cpu" for device in dist.group.WORLD._device_types):
        return None
    read_addresses_at_once()
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup)
    return made


def _own(store: Store) -> Store:
    """Return the group's store without its prefix, under which torch keeps its own keys."""
    return store.underlying_store if isinstance(store, dist.PrefixStore) else store


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _place(group: dist.ProcessGroup | None) -> Environment:
    """Return this process's position: in its host from the environment, else from the ranks' host names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    if all(os.environ.get(name, "").isdecimal() for name in names):
        local_rank, local_size, node = (int(os.environ[name]) for name in names)
        return Environment(rank, size, local_rank, local_size, node)
    hosts = _gathered(socket.gethostname(), group)
    here = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    return Environment(rank, size, here.index(rank), len(here), list(dict.fromkeys(hosts)).index(hosts[rank]))


def _device(options: GroupOptions) -> torch.device:
    """Return the device that the script has chosen: the current CUDA device if the group carries its tensors."""
    if options.device == "cpu" or not torch.cuda.is_available() or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
