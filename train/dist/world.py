"""All ranks of one attempt: where this one stands among them, and the collectives that a run asks of them."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.dist.board import Board
from train.dist.device import choose_backend, choose_device
from train.dist.meeting import meet
from train.dist.network import check_descriptors, choose_interface
from train.dist.options import GroupOptions
from train.dist.place import Place
from train.dist.reach import closed
from train.dist.shared_file import SharedFile
from train.dist.shared_memory import SharedMemory, share_memory
from train.errors import ConfigError, DataError, MusterError, RankLost, environment_error, of_code, one_line

# Hangs are found by faults/heartbeat.py, which knows a long phase from a hang; a collective's own timeout does not.
LAST_RESORT_S = 3 * 3600.0
START_S = 2 * 3600.0
"""The longest that a start may take: a download, the digests of a large checkpoint."""


@dataclass(frozen=True)
class World:
    """All ranks of one attempt at a run. Methods marked "collective" must be called by every rank."""

    place: Place
    device: torch.device
    attempt: str
    board: Board
    agents: list[str]
    """On rank 0, the launchers of all ranks (place.launcher); elsewhere this rank's."""
    shared: SharedFile | None = None
    """What the store's file is to be removed by."""
    memory: SharedMemory | None = None
    """What all ranks have in common, if they are on one host and train on its processors."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes the run's files."""
        return self.place.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sum over ranks in float64. Collective."""
        if self.size == 1:
            return [*map(float, values)]
        total = torch.tensor(values, dtype=torch.float64)
        if self.memory:
            self.memory.add_up(total)
        else:
            dist.all_reduce(total)
        return [float(value) for value in total]

    def sum_named(self, values: dict[str, float]) -> dict[str, float]:
        """Sum by name; a rank may lack names that others have (one without samples, say). Collective."""
        names = sorted({name for theirs in self.gather(sorted(values)) for name in theirs})
        return dict(zip(names, self.sum([values.get(name, 0.0) for name in names]), strict=True))

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """The `value` of rank `source`, which has to be JSON. Collective."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, source)
        buffer = _bytes(text, int(length))
        dist.broadcast(buffer, source)
        return json.loads(bytes(buffer.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, which has to be JSON and small: all ranks hold all of them. Collective."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        longest = max(map(int, lengths))
        buffers = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(buffers, _bytes(text, longest))
        return [json.loads(bytes(buffer[: int(n)].tolist())) for buffer, n in zip(buffers, lengths, strict=True)]

    def lowest(self, is_so: bool) -> int | None:
        """The lowest rank on which `is_so`, if there is one. Collective."""
        if self.memory:
            told = self.sum([float(is_so and rank == self.rank) for rank in range(self.size)])
            return next((rank for rank, is_one in enumerate(told) if is_one), None)
        rank = torch.tensor([self.rank if is_so else self.size])
        if self.size > 1:
            dist.all_reduce(rank, dist.ReduceOp.MIN)
        return int(rank) if int(rank) < self.size else None

    def barrier(self) -> None:
        """Until every rank is here. Collective."""
        self.sum([0.0])

    def together(self, failure: MusterError | None) -> None:
        """Raise on every rank if any rank has a `failure`: the lowest such rank's. Collective."""
        rank = self.lowest(failure is not None)
        if rank is None:
            return
        said = self.broadcast([failure.exit_code, str(failure)] if failure else None, source=rank)
        if failure and rank == self.rank:
            raise failure
        exit_code, message = said
        raise of_code(exit_code, f"rank {rank}: {message}")

    def on_first(self, ask: Callable[[], Any]) -> Any:
        """What rank 0 gets for an answer, which has to be JSON, or the MusterError that it gets. Collective."""
        answer, failure = None, None
        if self.is_first:
            try:
                answer = ask()
            except MusterError as error:
                failure = error
        self.together(failure)
        return self.broadcast(answer)

    def same(self, what: str, value: str, *, remedy: str, error: type[MusterError] = DataError) -> None:
        """Raise `error` on every rank unless all have the same `value`, naming the first that differs. Collective.

        The message reads "`what` `value` on rank 1 (host), ... on rank 0 (host): `remedy`".
        """
        first = self.broadcast([socket.gethostname(), value])
        rank = self.lowest(first[1] != value)
        if rank is not None:
            host, other = self.broadcast([socket.gethostname(), value], source=rank)
            raise error(f"{what} {other} on rank {rank} ({host}), {first[1]} on rank 0 ({first[0]}): {remedy}")

    @contextlib.contextmanager
    def local_first(self, folder: str | None = None) -> Iterator[bool]:
        """Let one rank of all that see `folder` go through the block before the others: for downloads. Collective.

        Yields True on that rank. One rank of each node leaves a token in the folder, or in the part of its path that
        is there; of those who see each other's, the lowest goes first. Where no token can be left, as without a
        folder, it is one of each node. Nothing is locked, so a rank that is killed leaves nothing to wait for but
        the collective that it lacks, and views of a shared folder that lag give two downloads, as without it.
        """
        goes_first = self._sees_nobody_lower(Path(folder)) if folder else self.place.local_rank == 0
        if not goes_first:
            self.barrier()
        try:
            yield goes_first
        finally:
            if goes_first:
                self.barrier()

    def _sees_nobody_lower(self, folder: Path) -> bool:
        is_leader, seen = self.place.local_rank == 0, [self.rank]
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
        """Before this process ends in a failure: let the others, less the `gone`, read why. Waits for nobody for long."""
        if self.size > 1:
            all_left = self.board.leave(hosts_store=self.place.hosts_store, gone=gone)
            if self.shared and all_left:  # or the next launch removes it
                self.shared.remove()

    def close(self) -> None:
        """Leave the process group; rank 0, which may hold the store, goes last."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            self.board.say_bye(hosts_store=self.place.hosts_store)
            if self.shared:
                self.shared.remove()


def start(options: GroupOptions, place: Place, *, stopping: Callable[[], bool] = lambda: False) -> World:
    """Meet the other ranks and form the process group. Collective.

    Raises:
        ConfigError: a rank is missing, or differs in config, code or torch version; no such device or backend.
        Stopped: `stopping` on some rank before all had met.
        RankLost: a rank was lost while the group was formed.
    """
    timeout_s = options.start_timeout_s
    try:
        device = choose_device(options, place)
        backend = choose_backend(options, device)
        check_descriptors(place)
    except ConfigError as error:
        meet(place, alike=options.alike, error=error, timeout_s=timeout_s, stopping=stopping)
        raise
    if device.type == "cuda":
        torch.cuda.set_device(device)
    met = meet(place, alike=options.alike, error=None, timeout_s=timeout_s, device=device.type, stopping=stopping)
    board = Board(met.store, attempt=met.attempt, rank=place.rank, size=place.world_size)
    board.operations.update(met.operations)
    board.post_beat("")  # from here on every rank's is there to be read
    if place.world_size > 1:
        form_group(options, place, board, backend=backend, device=device)
    world = World(place, device, met.attempt, board, met.agents, met.shared)
    return replace(world, memory=share_memory(world)) if options.shared_memory else world


def form_group(options: GroupOptions, place: Place, board: Board, *, backend: str, device: torch.device) -> None:
    """Form torch's process group; afterwards its collectives wait for as long as the heartbeat lets them. Collective.

    Raises:
        RankLost: it was not formed within `dist.start_timeout_s`, or broke.
    """
    choose_interface(place)
    try:
        dist.init_process_group(
            backend,
            store=board.group_store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=options.start_timeout_s),
            device_id=device if "nccl" in backend else None,
        )
    except RuntimeError as error:
        if known := environment_error(error):
            raise known from error
        why = "" if place.is_one_node else closed(board)
        why = why or f"one was lost since, or the network between them is closed ({one_line(error)[:200]})"
        raise RankLost(
            f"no process group within dist.start_timeout_s={options.start_timeout_s:g}, though all ranks had met: {why}"
        ) from error
    extend = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # its name before torch 2.15
    extend(timedelta(seconds=LAST_RESORT_S + options.timeout_s))


def _bytes(text: bytes, length: int) -> torch.Tensor:
    """`text` as `[length] uint8`, padded."""
    return torch.frombuffer(bytearray(text.ljust(length, b"\0") or b"\0"), dtype=torch.uint8)[:length]
