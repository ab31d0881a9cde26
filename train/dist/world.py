"""Where this process stands in the job: rank, device, store, process group. The only room that reads RANK and its kin.

Before any process group exists the ranks meet over the rendezvous store (`meet`): a rank that is missing, failed
early or was started with another config is named there, instead of being waited for in the first collective.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from train.faults import attempts as outcome
from train.config.differences import comparable
from train.config.keys import Backend, Config, Device
from train.errors import ConfigError, MusterError, say

POLL_S = 0.02
STORE_ANSWER_S = 1.0
CLOCKS_APART_S = 2.0
# Hangs are found by heartbeat.py, which knows a long section from a hang; a collective's own timeout does not.
LAST_RESORT_S = 3 * 3600.0
START_S = 2 * 3600.0
"""The longest that a start may take: a download, the digests of a large checkpoint."""


class Unheard(ConfigError):
    """This rank never reached the others: it has to speak for itself."""


@dataclass(frozen=True)
class Place:
    """This process's position, as the launcher wrote it into the environment (one process if it wrote nothing)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def from_env(cls) -> Place:
        """Raises ConfigError if a variable is not a number, or only some of them are set."""

        def read(name: str, default: int) -> int:
            text = os.environ.get(name, "") or str(default)
            try:
                return int(text)
            except ValueError:
                raise ConfigError(
                    f"{name}={text} in the environment is not a whole number; start through torchrun"
                ) from None

        if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
            raise ConfigError("only one of RANK and WORLD_SIZE is set: set both, or start through torchrun")
        rank, world_size = read("RANK", 0), read("WORLD_SIZE", 1)
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0")
        if world_size > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
            raise ConfigError(
                f"WORLD_SIZE={world_size} needs MASTER_ADDR and MASTER_PORT: set both, or start through torchrun"
            )
        return cls(rank, world_size, read("LOCAL_RANK", 0), read("LOCAL_WORLD_SIZE", 1), read("GROUP_RANK", 0))


def choose_device(config: Config, place: Place) -> torch.device:
    """The device of this rank: `gpus[local_rank]` where given, else `local_rank`, else the CPU.

    Raises:
        ConfigError: it is not there; says what is.
    """
    if config.device is Device.cpu:
        return torch.device("cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there == 0:
        if config.device is Device.cuda or config.gpus:
            given = "device=cuda" if config.device is Device.cuda else f"gpus={config.gpus}"
            raise ConfigError(f"{given}, but this machine ({socket.gethostname()}) has no CUDA device: use device=cpu")
        return torch.device("cpu")
    chosen = config.gpus or list(range(there))
    if absent := [gpu for gpu in chosen if not 0 <= gpu < there]:
        raise ConfigError(
            f"gpus={chosen}: there is no device {absent[0]} on {socket.gethostname()}; valid: 0 to {there - 1}"
        )
    if place.local_world_size > len(chosen):
        raise ConfigError(
            f"{place.local_world_size} processes on {socket.gethostname()} for {len(chosen)} GPUs: "
            f"use --nproc-per-node={len(chosen)}, or device=cpu"
        )
    return torch.device("cuda", chosen[place.local_rank])


def choose_backend(config: Config, device: torch.device) -> str:
    """gloo for CPU; on CUDA nccl for tensors there and gloo for the few small ones that live on the host."""
    backend = config.dist.backend
    if backend is Backend.nccl and device.type != "cuda":
        raise ConfigError("dist.backend=nccl needs CUDA devices, and this run is on the CPU: use dist.backend=gloo")
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend is not Backend.gloo else "gloo"


@dataclass(frozen=True)
class World:
    """All ranks of one attempt at a run. Methods marked "collective" must be called by every rank."""

    place: Place
    device: torch.device
    attempt: str
    store: Store
    agents: list[str]
    """On rank 0, the launchers of all ranks (outcome.launcher); elsewhere this rank's."""

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
        total = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(total)
        return [float(value) for value in total]

    def sum_named(self, values: dict[str, float]) -> dict[str, float]:
        """Sum by name; a rank may lack names that others have (one without samples, say). Collective."""
        if self.size == 1:
            return dict(sorted(values.items()))
        self.store.set(f"names/{self.rank}", json.dumps(sorted(values)))
        self.sum([0.0])
        names = sorted({name for rank in range(self.size) for name in json.loads(self.store.get(f"names/{rank}"))})
        return dict(zip(names, self.sum([values.get(name, 0.0) for name in names]), strict=True))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, which has to be JSON. Collective."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.is_first else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, 0)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.is_first:
            buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(buffer, 0)
        return json.loads(bytes(buffer.tolist()))

    def together(self, failure: MusterError | None) -> None:
        """Raise on every rank if any rank has a `failure`: the lowest such rank's. Collective."""
        if failure and self.size > 1:
            self.store.set(f"failure/{self.rank}", json.dumps([failure.exit_code, str(failure)]))
        failed = self.sum([float(failure is not None)])[0]
        if not failed:
            return
        rank = next((r for r in range(self.size) if self.store.check([f"failure/{r}"])), self.rank)
        if failure and rank == self.rank:
            raise failure
        exit_code, message = json.loads(self.store.get(f"failure/{rank}"))
        raise _rebuilt(exit_code, f"rank {rank}: {message}")

    @contextlib.contextmanager
    def local_first(self) -> Iterator[None]:
        """Let one rank of each node go through the block before the others do: for downloads. Collective."""
        key = f"local_first/{self.place.node_rank}"
        if self.place.local_rank == 0:
            try:
                yield
            finally:
                self.store.set(key, "1")
        else:
            self.store.wait([key], timedelta(seconds=START_S))  # its end, good or bad, is announced
            yield

    def claim_failure(self, record: dict[str, Any]) -> dict[str, Any]:
        """Post why this rank fails, unless another did before; give back the first failure of the attempt."""
        said = _within(STORE_ANSWER_S, lambda: self.store.compare_set("failed", "", json.dumps(record)))
        return json.loads(said) if said else record

    def first_failure(self, wait_s: float, *, enough: Callable[[], Any] = lambda: False) -> dict[str, Any] | None:
        """What another rank has posted by `claim_failure`, if it does so within `wait_s` or before it is `enough`."""

        def ask() -> Any:
            deadline = time.monotonic() + wait_s
            while not self.store.check(["failed"]):
                if time.monotonic() > deadline or enough():
                    return None
                time.sleep(POLL_S)
            return self.store.get("failed")

        said = _within(wait_s + STORE_ANSWER_S, ask)
        return json.loads(said) if said else None

    def hold_store(self, gone: Collection[int]) -> None:
        """Before this process ends: let the ranks that are not `gone` read why, if it is this one that holds the store."""
        if self.size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return

        def ask() -> None:
            self.store.set(f"left/{self.rank}", "1")
            others = [f"left/{rank}" for rank in range(1, self.size) if rank not in gone]
            if self.is_first and others:
                self.store.wait(others, timedelta(seconds=STORE_ANSWER_S))

        _within(STORE_ANSWER_S, ask)

    def close(self) -> None:
        """Leave the process group; rank 0, which may hold the store, goes last."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            with contextlib.suppress(Exception):
                self.store.set(f"bye/{self.rank}", "1")
                if self.is_first:
                    self.store.wait([f"bye/{rank}" for rank in range(self.size)], timedelta(seconds=10))


def start(config: Config, place: Place) -> World:
    """Meet the other ranks and form the process group. Collective.

    Raises:
        ConfigError: a rank is missing, or differs in config, code or torch version; no such device or backend.
    """
    try:
        device = choose_device(config, place)
        backend = choose_backend(config, device)
    except ConfigError as error:
        meet(place, config=config, error=error, timeout_s=config.dist.start_timeout_s)
        raise
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size == 1:
        return World(place, device, attempt=uuid.uuid4().hex[:8], store=HashStore(), agents=[outcome.launcher()])
    attempt, store, agents = meet(
        place, config=config, error=None, timeout_s=config.dist.start_timeout_s, device=device.type
    )
    _choose_interface(place)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=LAST_RESORT_S + config.dist.timeout_s),
        device_id=device if "nccl" in backend else None,
    )
    return World(place, device, attempt, store, agents)


def meet(
    place: Place, *, config: Config | None, error: MusterError | None, timeout_s: float, device: str = ""
) -> tuple[str, Store, list[str]]:
    """Exchange hellos over the rendezvous store; give back (attempt id, a store of this attempt's own, launchers).

    Rank 0 mints the attempt id and waits for one hello of each rank under it. A store may outlive an attempt (torchrun
    keeps one across worker restarts) and so hold hellos and verdicts of earlier ones: a verdict therefore names the
    nonces that it has seen, and a rank believes only one that names its own. Keys of the process group lie under the
    attempt id, so that a restarted group never reads addresses of the one before.

    Raises:
        MusterError: the lowest rank's early error, as that rank saw it.
        ConfigError: ranks are missing or differ.
    """
    if place.world_size == 1:
        if error:
            raise error
        return "", HashStore(), [outcome.launcher()]
    raw = _connect(place, timeout_s)
    nonce = uuid.uuid4().hex
    hello: dict[str, Any] = {
        "nonce": nonce,
        "host": socket.gethostname(),
        "agent": outcome.launcher(),
        "torch": torch.__version__,
        "code": code_hash(),
        "device": device,
        "config": comparable(config) if config else None,
        "error": [error.exit_code, str(error)] if error else None,
    }
    deadline, agents = time.monotonic() + timeout_s, [hello["agent"]]
    if place.rank == 0:
        attempt = uuid.uuid4().hex[:8]
        raw.set("meet/attempt", attempt)
        hellos = _gather(raw, attempt, hello, place, deadline)
        verdict = {"nonces": [h["nonce"] if h else None for h in hellos], "error": _judge(hellos, timeout_s)}
        raw.set(f"meet/{attempt}/verdict", json.dumps(verdict))
        agents = sorted({h["agent"] for h in hellos if h})
        if verdict["error"]:
            _await_acknowledgements(raw, attempt, hellos)
    else:
        try:
            attempt, verdict = _await_verdict(raw, hello, place, deadline)
            raw.set(f"meet/{attempt}/ack/{place.rank}", "1")
        except RuntimeError as broken:
            raise Unheard(
                f"rank {place.rank} lost rank 0 at {os.environ['MASTER_ADDR']} during start-up: see its log"
            ) from broken
    if error:
        raise error
    if verdict["error"]:
        raise _rebuilt(*verdict["error"])
    return attempt, PrefixStore(attempt, raw), agents


def code_hash() -> str:
    """Digest of the kit's own sources: two nodes with different checkouts must not train together."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for source in sorted(root.rglob("*.py")):
        digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return digest.hexdigest()[:12]


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """What the store answers; None if it is gone or silent: a read from a store that was cut off has no timeout."""
    answers: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _connect(place: Place, timeout_s: float) -> Store:
    host = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        if place.local_world_size != place.world_size:
            raise Unheard(
                f"MASTER_ADDR={host} does not resolve ({error}): give an address that every node knows"
            ) from None
        host = "127.0.0.1"  # the machine does not know its own name; all ranks are on it
    address = f"{host}:{os.environ['MASTER_PORT']}"
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    found: list[Store] = []
    reason = f"what listens there has not answered within dist.start_timeout_s={timeout_s:g} and may be no store"

    def connect() -> None:
        nonlocal reason
        try:
            # As env:// does, but without its wait for all clients: who is missing is for `meet` to say.
            store = TCPStore(
                host,
                int(os.environ["MASTER_PORT"]),
                world_size=place.world_size,
                is_master=place.rank == 0 and not hosted_by_agent,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
            found.append(store)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]

    thread = threading.Thread(target=connect, daemon=True)  # its timeout does not hold with a silent stranger
    thread.start()
    thread.join(timeout_s + 2)
    if not found:
        raise Unheard(
            f"rank {place.rank} cannot reach the rendezvous store at {address}: {reason}; is rank 0 up, and the port free and open?"
        )
    return found[0]


def _gather(
    raw: Store, attempt: str, own: dict[str, Any], place: Place, deadline: float
) -> list[dict[str, Any] | None]:
    skews = {place.rank: 0.0}
    hellos: list[dict[str, Any] | None] = [own] + [None] * (place.world_size - 1)
    while None in hellos and time.monotonic() < deadline:
        for rank, hello in enumerate(hellos):
            key = f"meet/{attempt}/hello/{rank}"
            if hello is None and raw.check([key]):
                hellos[rank] = hello = json.loads(raw.get(key))
                skews[rank] = hello["clock"] - time.time()
        time.sleep(POLL_S)
    rank = max(skews, key=lambda rank: abs(skews[rank]))
    if abs(skews[rank]) > CLOCKS_APART_S and (other := hellos[rank]):
        say(
            f"muster: the clocks of {other['host']} and {own['host']} are {abs(skews[rank]):.0f} s apart: torchrun compares them "
            "to tell who is alive, and may drop nodes or wait for them at the end; synchronize them (NTP)"
        )
    return hellos


def _await_verdict(raw: Store, hello: dict[str, Any], place: Place, deadline: float) -> tuple[str, dict[str, Any]]:
    greeted = None
    while time.monotonic() < deadline + 5:  # rank 0 says who was missing; hear it
        if raw.check(["meet/attempt"]):
            attempt = raw.get("meet/attempt").decode()
            if attempt != greeted:
                raw.set(f"meet/{attempt}/hello/{place.rank}", json.dumps({**hello, "clock": time.time()}))
                greeted = attempt
            if raw.check([f"meet/{attempt}/verdict"]):
                verdict = json.loads(raw.get(f"meet/{attempt}/verdict"))
                if verdict["nonces"][place.rank : place.rank + 1] == [hello["nonce"]]:
                    return attempt, verdict
        time.sleep(POLL_S)
    raise Unheard(
        f"rank {place.rank} on {socket.gethostname()} waited in vain for rank 0 at {os.environ['MASTER_ADDR']}: is it up?"
    )


def _await_acknowledgements(raw: Store, attempt: str, hellos: list[dict[str, Any] | None]) -> None:
    """Rank 0 may hold the store: let the others read the verdict before it goes."""
    keys = [f"meet/{attempt}/ack/{rank}" for rank, hello in enumerate(hellos) if rank and hello]
    with contextlib.suppress(Exception):
        raw.wait(keys, timedelta(seconds=5)) if keys else None


def _judge(hellos: list[dict[str, Any] | None], timeout_s: float) -> tuple[int, str] | None:
    """What keeps these ranks from forming a group: (exit code, message), or None."""
    for rank, hello in enumerate(hellos):
        if hello and hello["error"]:
            code, message = hello["error"]
            return code, message if rank == 0 else f"rank {rank} on {hello['host']}: {message}"
    missing = [rank for rank, hello in enumerate(hellos) if hello is None]
    if missing:
        return 2, (
            f"{len(hellos) - len(missing)} of {len(hellos)} ranks arrived within dist.start_timeout_s={timeout_s:g}; "
            f"missing: {', '.join(map(str, missing[:8]))}{'...' if len(missing) > 8 else ''}: start as many processes as WORLD_SIZE says"
        )
    first = hellos[0]
    assert first is not None
    for rank, hello in enumerate(hellos[1:], start=1):
        assert hello is not None
        who = f"rank {rank} on {hello['host']}"
        for key in ("torch", "code"):
            if hello[key] != first[key]:
                return (
                    2,
                    f"{who} runs {key} {hello[key]}, rank 0 on {first['host']} {first[key]}: install the same on every node",
                )
        if hello["device"] != first["device"]:
            return 2, (
                f"{who} would train on {hello['device']}, rank 0 on {first['host']} on {first['device']}: "
                "see what nvidia-smi says on both, or choose device=cpu"
            )
        ours, theirs = first["config"], hello["config"]
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        if differing:
            told = ", ".join(f"{k}={theirs.get(k)} (rank 0: {ours.get(k)})" for k in differing[:4])
            return 2, f"{who} was started with another config: {told}; give every rank the same overrides"
    return None


def _rebuilt(exit_code: int, message: str) -> MusterError:
    for kind in MusterError.__subclasses__():
        if kind.exit_code == exit_code:
            return kind(message)
    return MusterError(message)


def _choose_interface(place: Place) -> None:
    """Point gloo at the interface that leads to the master, where the job spans nodes and nobody chose one.

    gloo takes the address that the host's own name resolves to, which on many systems is 127.0.1.1.
    """
    if place.local_world_size == place.world_size or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing: only the route is looked up
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(reply[20:24]) == address:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
