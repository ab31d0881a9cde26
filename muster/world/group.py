"""All ranks of one attempt: this rank's position, and the collectives that a run needs."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

from muster.code_location import SourceLine, innermost_own
from muster.errors import ConfigError, DataError, MusterError, RankLost, environment_error, of_code, one_line
from muster.process import collect_garbage
from muster.world import flight_recorder, timeouts
from muster.world.device import choose_backend, choose_device
from muster.world.environment import Environment, leave_store
from muster.world.group_options import GroupOptions
from muster.world.node_memory import node_memory
from muster.world.reduce.hierarchical import Hosts, find_hosts
from muster.world.reduce.shared_memory import POST, SharedMemory, share_memory
from muster.world.rendezvous.meeting import Membership, meet
from muster.world.rendezvous.network import (
    check_descriptors,
    check_interface,
    choose_interface,
    closed,
    read_addresses_at_once,
)
from muster.world.rendezvous.shared_file import SharedFile
from muster.world.store_keys import StoreKeys

KIT = Path(__file__).parents[1]  # as in a frame's file name
START_S = 2 * 3600.0
"""The longest that a start may take, for example for a download or the digests of a large checkpoint."""
CLOSED_S = 1.0  # longer than the destructor of a group takes whose threads have ended
AGAIN_S = 10.0
"""The longest that ranks take to form their group again: one may have died since they met."""


@dataclass(frozen=True)
class World:
    """All ranks of one attempt at a run. Every rank must call the methods marked "Collective"."""

    environment: Environment
    device: torch.device
    attempt: str
    store_keys: StoreKeys
    agents: list[str]
    """On rank 0 the launchers of all ranks (environment.launcher); on other ranks only the rank's own."""
    shared: SharedFile | None = None
    """Removes the store's file, if the ranks met through a file."""
    memory: SharedMemory | None = None
    """Memory shared by all ranks, if they are on one host and train on its CPUs."""
    hosts: Hosts | None = None
    """The hosts, if sums go host by host."""
    group: dist.ProcessGroup | None = None
    """The group that carries CPU tensors; None: the default group."""
    is_borrowed: bool = False
    """True if the default group existed before, and outlives this attempt."""
    calls: Counter[str] = field(default_factory=Counter)
    """The exchanges over the ranks that this rank has begun, by method; all ranks begin the same ones in the same order."""
    again: bool = False
    """True if some of the ranks have met before, in this launch: one of them has died since, and is restarted in place."""

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def size(self) -> int:
        return self.environment.world_size

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the run's files."""
        return self.environment.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sum over ranks in float64. Collective. Raises ConfigError: another rank has called something else of the kit's."""
        return self._sum(values, call=call_of(sys._getframe(1)))

    def _sum(self, values: list[float], *, call: int) -> list[float]:
        self.calls["sum"] += 1
        if self.size == 1:
            return [*map(float, values)]
        total = torch.tensor([call, *values], dtype=torch.float64)
        if self.memory:
            self.memory.add_up(total)
        else:
            dist.all_reduce(total, group=self.group)
        calls, *sums = map(float, total)
        self._refuse_other(calls != call * self.size)
        return sums

    def _refuse_other(self, is_other: bool) -> None:
        if is_other:
            raise ConfigError(
                f"rank {self.rank} on {socket.gethostname()} and another rank have called different functions{_where()}: all ranks must make "
                "the same calls, in the same order"
            )

    def sum_later(self, values: list[float]) -> Callable[[], list[float]]:
        """Begin to sum over ranks in float64; return a function that waits for the other ranks and returns the sums. Collective.

        No sum but the next may be begun before all ranks have asked for this one.
        """
        self.calls["sum_later"] += 1
        if self.size == 1:
            return lambda: values
        if self.memory and len(values) <= POST:
            posted = self.memory.post(values)
            return lambda: [sum(column) for column in zip(*posted(), strict=True)]
        total = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(total, group=self.group, async_op=True)

        def summed() -> list[float]:
            work.wait()
            found: list[float] = total.tolist()
            return found

        return summed

    def sum_named(self, values: dict[str, float]) -> dict[str, float]:
        """Sum over ranks by name; a rank may lack names (if it has no samples, for example). Collective."""
        names = sorted({name for theirs in self.gather(sorted(values)) for name in theirs})
        return dict(zip(names, self.sum([values.get(name, 0.0) for name in names]), strict=True))

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """Return the `value` of rank `source`, which must be JSON. Collective."""
        self.calls["broadcast"] += 1
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.rank == source else b""
        call = call_of(sys._getframe(1))
        length = torch.tensor([len(text), call])
        dist.broadcast(length, source, group=self.group)
        self._refuse_other(int(length[1]) != call)
        buffer = _bytes(text, int(length[0]))
        dist.broadcast(buffer, source, group=self.group)
        return json.loads(bytes(buffer.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, on every rank; the values must be JSON and small. Collective."""
        self.calls["gather"] += 1
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        call = call_of(sys._getframe(1))
        told = [torch.zeros(2, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(told, torch.tensor([len(text), call]), group=self.group)
        self._refuse_other(any(int(each[1]) != call for each in told))
        lengths = [int(each[0]) for each in told]
        longest = max(lengths)
        buffers = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(buffers, _bytes(text, longest), group=self.group)
        return [json.loads(bytes(buffer[:length].tolist())) for buffer, length in zip(buffers, lengths, strict=True)]

    def lowest(self, is_so: bool) -> int | None:
        """Return the lowest rank on which `is_so` is true; None if there is none. Collective."""
        self.calls["lowest"] += 1
        if self.memory:
            own = [float(is_so and rank == self.rank) for rank in range(self.size)]
            told = self._sum(own, call=call_of(sys._getframe(1)))
            return next((rank for rank, is_one in enumerate(told) if is_one), None)
        rank = torch.tensor([self.rank if is_so else self.size])
        if self.size > 1:
            dist.all_reduce(rank, dist.ReduceOp.MIN, group=self.group)
        return int(rank) if int(rank) < self.size else None

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        self.sum([0.0])

    def together(self, failure: MusterError | None) -> None:
        """Raise on every rank the `failure` of the lowest rank that has one. Collective."""
        rank = self.lowest(failure is not None)
        if rank is None:
            return
        here = [failure.exit_code, str(failure), socket.gethostname()] if failure else None
        exit_code, message, host = self.broadcast(here, source=rank)
        if failure and rank == self.rank:
            raise failure
        theirs = of_code(exit_code, f"rank {rank}: {message}")
        theirs.origin = rank, host
        raise theirs

    def on_first(self, ask: Callable[[], Any]) -> Any:
        """Return rank 0's result of `ask`, which must be JSON, or raise its MusterError on every rank. Collective."""
        answer, failure = None, None
        if self.is_first:
            try:
                answer = ask()
            except MusterError as error:
                failure = error
        self.together(failure)
        return self.broadcast(answer)

    def same(self, what: str, value: str, *, remedy: str, error: type[MusterError] = DataError) -> None:
        """Raise `error` on every rank unless all have the same `value`. Collective.

        The message names the first rank that differs: "`what` `value` on rank 1 (host), ... on rank 0 (host): `remedy`".
        """
        first = self.broadcast([socket.gethostname(), value])
        rank = self.lowest(first[1] != value)
        if rank is not None:
            host, other = self.broadcast([socket.gethostname(), value], source=rank)
            raise error(f"{what} {other} on rank {rank} ({host}), {first[1]} on rank 0 ({first[0]}): {remedy}")

    @contextlib.contextmanager
    def local_first(self, folder: str | None = None) -> Iterator[bool]:
        """Let one of the ranks that share `folder` run the block before the others, for downloads. Collective.

        Yields True on that rank. See `_sees_nobody_lower` for the choice; without a folder one rank of each node goes
        first. There are no locks, so after a rank is killed the others wait only in the collective that it misses. If
        views of a shared folder lag, two ranks may download, as without this method.
        """
        goes_first = self._sees_nobody_lower(Path(folder)) if folder else self.environment.local_rank == 0
        if not goes_first:
            self.barrier()
        try:
            yield goes_first
        finally:
            if goes_first:
                self.barrier()

    def _sees_nobody_lower(self, folder: Path) -> bool:
        """Return whether this is the lowest of the ranks that share `folder`, among one rank of each node. Collective.

        Each of these creates a token file in the folder or its nearest existing parent. A rank that cannot, sees only its own.
        """
        is_leader, seen = self.environment.local_rank == 0, [self.rank]
        where = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        mark = f".muster-{self.attempt}-"
        token = where / f"{mark}{self.rank}"
        if is_leader:
            with contextlib.suppress(OSError):
                token.touch()
        self.barrier()
        if is_leader:
            with contextlib.suppress(OSError, ValueError):
                seen += [int(path.name.removeprefix(mark)) for path in where.glob(f"{mark}*")]
        self.barrier()
        if is_leader:
            with contextlib.suppress(OSError):
                token.unlink()
        return is_leader and min(seen) == self.rank

    def leave(self, *, gone: int) -> None:
        """Before this process ends in a failure, let the others, less the `gone`, read the cause. Never waits long."""
        if self.size > 1:
            all_left = self.store_keys.leave(hosts_store=self.environment.hosts_store, gone=gone)
            if self.shared and all_left:  # otherwise the next launch removes it
                self.shared.remove()

    def part(self) -> None:
        """Dissolve the process group: some of its ranks are gone, and the others meet again.

        It closes this rank's connections: so ranks that wait for this one, and not for one that is gone, get an error, too.
        """
        dissolve()
        if self.memory:
            self.memory.close()

    def close(self) -> None:
        """Leave the process group; rank 0, which may hold the store, leaves last."""
        if self.size > 1 and dist.is_initialized() and not self.is_borrowed:
            dist.destroy_process_group()
            self.store_keys.say_bye(hosts_store=self.environment.hosts_store)
            if self.shared:
                self.shared.remove()
            else:
                leave_store()


def start(
    options: GroupOptions,
    environment: Environment,
    *,
    stopping: Callable[[], bool] = lambda: False,
    membership: Membership | None = None,
    on_meeting: Callable[[StoreKeys], object] = lambda _: None,
) -> World:
    """Meet the other ranks and form the process group. Collective.

    `stopping` returns whether this process has received a stop request. `membership`: None unless a rank that dies may be
    restarted in place. `on_meeting` is called when all ranks have met, before the group is formed.

    Raises ConfigError: a rank is missing, or differs in config, code or torch version; a device or backend is not available.
    Raises Stopped: `stopping` became true on some rank before all had met. Raises RankLost: a rank was lost while the group
    was formed.
    """
    timeout_s = options.start_timeout_s
    try:
        device = choose_device(options, environment)
        backend = choose_backend(options, device)
        check_descriptors(environment)
        check_interface()
    except ConfigError as error:
        meet(environment, alike=options.alike, error=error, timeout_s=timeout_s, stopping=stopping)
        raise
    if device.type == "cuda":
        torch.cuda.set_device(device)
    met = meet(
        environment,
        alike=options.alike,
        error=None,
        timeout_s=timeout_s,
        device=device.type,
        stopping=stopping,
        membership=membership,
    )
    with node_memory(environment, met.attempt) as node:
        store_keys = StoreKeys(
            met.store,
            attempt=met.attempt,
            rank=environment.rank,
            size=environment.world_size,
            connections=met.connections,
            incarnations=met.incarnations,
            node=node,
        )
        store_keys.operations.update(met.operations)
        on_meeting(store_keys)
        store_keys.post_beat("")
        within_s = min(timeout_s, AGAIN_S) if met.again else timeout_s
        if environment.world_size > 1:
            form_group(
                replace(options, start_timeout_s=within_s), environment, store_keys, backend=backend, device=device
            )
        # From here on every rank has mapped its node's memory and has a beat to read.
    world = World(environment, device, met.attempt, store_keys, met.agents, met.shared, again=met.again)
    world = replace(world, memory=share_memory(world)) if options.shared_memory else world
    return world if world.memory else replace(world, hosts=find_hosts(world, options.hierarchical, within_s=within_s))


def dissolve() -> None:
    """Destroy the process group, if there is one, without the others, and close its connections.

    Its destructor waits for gloo's threads, and gloo does not always tell them that a rank is gone (faults/heartbeat.py): after
    `CLOSED_S` such a group is left behind, in a thread of its own.
    """
    groups = list[dist.ProcessGroup]()
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            groups = [*dist.distributed_c10d._world.pg_map]
            _forget_default(dist.group.WORLD)
            dist.destroy_process_group()
    collect_garbage()  # DistributedDataParallel is in a cycle of references, and holds the group
    closing = threading.Thread(target=groups.clear, name="process group", daemon=True)
    closing.start()
    closing.join(CLOSED_S)


def _forget_default(group: dist.ProcessGroup | None) -> None:
    """Replace `group` as the default of functions of a module imported while it existed; they would hold it for ever.

    DistributedDataParallel imports that module, with torch._dynamo.
    """
    for each in vars(sys.modules.get("torch.distributed.nn.functional", object)).values():
        if isinstance(each, FunctionType) and each.__defaults__:
            each.__defaults__ = tuple(None if value is group else value for value in each.__defaults__)


def alone(device: torch.device) -> World:
    """Return a world of this process only, for work outside of an attempt; no process group is formed."""
    attempt = uuid.uuid4().hex
    return World(Environment(), device, attempt, StoreKeys(dist.HashStore(), attempt=attempt, rank=0, size=1), [])


def form_group(
    options: GroupOptions, environment: Environment, store_keys: StoreKeys, *, backend: str, device: torch.device
) -> None:
    """Form torch's process group, whose collectives then wait as long as the heartbeat allows. Collective.

    Raises RankLost: the group was not formed within `dist.start_timeout_s`, or broke.
    """
    choose_interface(environment, store_keys)
    read_addresses_at_once()
    if "nccl" in backend:
        flight_recorder.switch_on()
    hook = sys.excepthook
    try:
        dist.init_process_group(
            backend,
            store=store_keys.group_store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=options.start_timeout_s),
            device_id=device if "nccl" in backend else None,
        )
    except RuntimeError as error:
        if known := environment_error(error):
            raise known from error
        why = "" if environment.is_one_node else closed(store_keys)
        why = why or f"one was lost since, or the network between them is closed ({one_line(error)[:200]})"
        raise RankLost(
            f"no process group was formed within dist.start_timeout_s={options.start_timeout_s:g}, although all ranks had met: {why}"
        ) from error
    if getattr(hook, "__module__", "") == dist.init_process_group.__module__:
        sys.excepthook = hook  # of the group before: one prefix is enough
    timeouts.extend(options.timeout_s)


def call_of(frame: FrameType) -> int:
    """Return a number of the line of the kit's that `frame` is in, the same on all ranks; 0 for a line of other code, which may differ."""
    return _number_of(frame.f_code.co_filename, frame.f_lineno)


@cache
def _number_of(file: str, line: int) -> int:
    path = Path(file)
    return zlib.crc32(f"{path.name}:{line}".encode()) % 2**24 if KIT in path.parents else 0


def _where() -> str:
    """Return ` (mine.py:12)`, the innermost line of user code that has called; empty if there is none."""
    frame = innermost_own(sys._getframe())
    return f" ({SourceLine(frame.f_code.co_filename, frame.f_lineno)})" if frame else ""


def _bytes(text: bytes, length: int) -> torch.Tensor:
    """The result has shape [length], padded with zeros."""
    return torch.frombuffer(bytearray(text.ljust(length, b"\0") or b"\0"), dtype=torch.uint8)[:length]
