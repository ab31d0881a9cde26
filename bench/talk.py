"""Count operations on the rendezvous store per rank while ranks meet, send heartbeats, stop and save.

`python -m bench.talk` simulates 64 ranks by threads with connections of their own, which use the store over loopback like
the ranks of a run, without a model and a process group. An operation on several keys counts once per key. Only the counts
carry over to a cluster, not the times.

`python -m bench.talk --idle 1024 4096` counts only what ranks do that train: each rank's heartbeat and look for a request to
stop, by the code of a run, in turns in one thread. It also measures how many operations a second the store answers.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore

from muster.faults import heartbeat
from muster.faults.heartbeat import Heartbeat
from muster.faults.preemption import POLL_S, Agreement, Preemption, poll_s
from muster.world.environment import Environment
from muster.world.node_memory import NodeMemory
from muster.world.rendezvous.meeting import Met, meet
from muster.world.store_client import Connections
from muster.world.store_keys import StoreKeys

STILL_S = 4.0  # for the simulation: a rank without progress for half of it starts to watch


class Unarmed:
    """Replaces the watchdog, which would kill this process."""

    def wind(self, seconds: float) -> None: ...


def at_once(work: Callable[[int], Any], ranks: int) -> list[Any]:
    """Run `work(rank)` in one thread per rank; return the values."""
    values: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        values[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return values


class Ranks:
    """`size` ranks that have met, `per_node` of them on each node."""

    def __init__(self, size: int, per_node: int, *, timeout_s: float = 300.0):
        places = [Environment(rank, size, rank % per_node, per_node, rank // per_node) for rank in range(size)]

        def arrive(rank: int) -> Met:
            return meet(places[rank], alike=None, error=None, timeout_s=600.0)

        began = time.monotonic()
        met = at_once(arrive, size)
        self.boards = [self._store_keys(environment, one) for environment, one in zip(places, met, strict=True)]
        for store_keys in self.boards:
            store_keys.post_beat("")
        self.seconds = time.monotonic() - began
        self.met = [
            one.operations.total() + store_keys.operations.total()
            for one, store_keys in zip(met, self.boards, strict=True)
        ]
        alike = {"size": size, "device": torch.device("cpu"), "calls": Counter[str]()}
        worlds = [
            SimpleNamespace(
                rank=store_keys.rank,
                is_first=store_keys.rank == 0,
                store_keys=store_keys,
                environment=environment,
                **alike,
            )
            for store_keys, environment in zip(self.boards, places, strict=True)
        ]
        self.beats = [Heartbeat(world, timeout_s=timeout_s, start_s=9e9, on_hang=print) for world in worlds]
        self.preemptions = [Preemption() for _ in worlds]
        for beat in self.beats:
            beat.start()
        self.watchers = [Agreement(*each) for each in zip(worlds, self.preemptions, strict=True)]

    @staticmethod
    def _store_keys(environment: Environment, met: Met) -> StoreKeys:
        size, node = environment.local_world_size, None
        if size > 1:  # for threads of one process, the nodes are told apart by name
            node = NodeMemory.open(f"muster-talk-{met.attempt}-{environment.node_rank}", environment.local_rank, size)
        return StoreKeys(met.store, attempt=met.attempt, rank=environment.rank, size=environment.world_size, node=node)

    def asked(self) -> list[int]:
        return [store_keys.operations.total() for store_keys in self.boards]

    def during(self, work: Callable[[], Any]) -> list[int]:
        before = self.asked()
        work()
        return [after - earlier for after, earlier in zip(self.asked(), before, strict=True)]

    def move(self, seconds: float) -> None:
        """Enter the phases one after the other."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for beat in self.beats:
                beat.enter("step", 0)
            time.sleep(0.2)


def save(ranks: Ranks, number: int) -> None:
    """Post one rank's part of a save; rank 0 collects all and announces the commit."""

    def work(rank: int) -> None:
        store_keys = ranks.boards[rank]
        store_keys.post_part(number, {"files": {f"rank-{rank:05d}": {"size": 1, "sha256": "0" * 64}}})
        if rank:
            store_keys.save_end(number, 60.0)
        else:
            store_keys.parts(number, 60.0)
            store_keys.end_save(number, None)

    at_once(work, len(ranks.boards))


def stop(ranks: Ranks) -> None:
    """Request a stop on one rank; return when all ranks know the step."""
    ranks.preemptions[-1].request()
    for watcher in ranks.watchers:
        while watcher._watcher.is_alive():
            time.sleep(0.01)


def counted(size: int, per_node: int, seconds: float) -> Iterator[tuple[str, str, list[float]]]:
    """Return the counts: phase, unit, and a figure per rank."""
    ranks = Ranks(size, per_node)
    yield f"start-up, {ranks.seconds:.1f} s", "operations", [float(count) for count in ranks.met]
    ranks.move(2 * ranks.beats[0].period_s)
    seconds = max(seconds, 3 * ranks.beats[0].period_s)
    quiet = ranks.during(lambda: ranks.move(seconds))
    yield f"idle, a beat in {ranks.beats[0].period_s:.1f} s", "operations/s", [count / seconds for count in quiet]
    for number in (1, 2, 3):
        save(ranks, number)
    for beat in ranks.beats:
        beat.close()
    time.sleep(2 * ranks.beats[0].period_s)
    talk = ranks.during(lambda: save(ranks, 4))
    yield "save", "operations", [float(count) for count in talk]
    yield "preemption", "operations", [float(count) for count in ranks.during(lambda: stop(ranks))]
    still = Ranks(size, per_node, timeout_s=STILL_S)
    still.move(0.5)
    time.sleep(STILL_S / 2 + 0.5)
    talk = still.during(lambda: time.sleep(min(seconds, STILL_S / 2 - 1)))
    yield "standing still", "operations/s", [count / min(seconds, STILL_S / 2 - 1) for count in talk]


def idle(size: int, per_node: int, store: TCPStore) -> tuple[float, float, float]:
    """Return the period of the heartbeat in s, and the operations per second of rank 0 and of all ranks that train."""
    attempt, places = (
        f"idle-{size}-{per_node}",
        [Environment(rank, size, rank % per_node, per_node) for rank in range(size)],
    )
    boards, connections = [], Connections(store)  # shared: they are not what is counted
    for environment in places:
        node = f"muster-talk-{os.getpid()}-{size}-{environment.rank // per_node}"
        memory = NodeMemory.open(node, environment.local_rank, per_node) if per_node > 1 else None
        alike: dict[str, Any] = {"attempt": attempt, "connections": connections, "node": memory}
        boards.append(StoreKeys(store, rank=environment.rank, size=size, **alike))
        boards[-1].post_beat("")
    beats = []
    for environment, store_keys in zip(places, boards, strict=True):
        world = SimpleNamespace(
            rank=environment.rank,
            is_first=not environment.rank,
            size=size,
            store_keys=store_keys,
            environment=environment,
        )
        world.device = torch.device("cpu")
        beats.append(Heartbeat(world, timeout_s=300.0, start_s=9e9, on_hang=print))
    period, polls = beats[0].period_s, poll_s(places[0].nodes)
    turns = random.Random(0)
    due = [(turns.random() * period, number, False) for number in range(size)]
    due += [(turns.random() * polls, number, True) for number in range(size)]
    heapq.heapify(due)
    seconds = max(15.0, 3 * max(period, polls))
    began, before = time.monotonic(), None
    while (now := time.monotonic() - began) < period + seconds:
        if before is None and now > period:
            before = [store_keys.operations.total() for store_keys in boards]
        at, number, is_poll = due[0]
        if at > now:
            time.sleep(at - now)
            continue
        if is_poll:
            boards[number].asked_to_stop(every_s=polls)
        else:
            beats[number].beat()
        heapq.heapreplace(due, (max(at + (POLL_S if is_poll else period), now - 1.0), number, is_poll))
    done = [store_keys.operations.total() - earlier for store_keys, earlier in zip(boards, before or [], strict=True)]
    return period, done[0] / seconds, sum(done) / seconds


def rate(store: TCPStore, *, clients: int = 4, seconds: float = 3.0) -> float:
    """Return how many small operations a second the store answers to processes that do nothing else."""
    code = (
        "import sys, time; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False, wait_for_workers=False)\n"
        "count, end = 0, time.monotonic() + float(sys.argv[2])\n"
        "while time.monotonic() < end: store.add('rate', 1); count += 1\n"
        "print(count)"
    )
    line = [sys.executable, "-c", code, str(store.port), str(seconds)]
    processes = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(clients)]
    return sum(int(process.communicate()[0]) for process in processes) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.talk", description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--per-node", type=int, default=8, help="ranks on a node (default: 8)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a measurement (default: 3)")
    parser.add_argument(
        "--idle", type=int, nargs="+", default=[], metavar="RANKS", help="count ranks that train, in turns"
    )
    arguments = parser.parse_args()
    heartbeat.Watchdog = Unarmed
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    if arguments.idle:
        print(
            "| ranks | on a node | a beat every, s | rank 0, operations/s | all, operations/s |\n|---|---|---|---|---|",
            flush=True,
        )
        for size in arguments.idle:
            period, first, every = idle(size, arguments.per_node, store)
            print(f"| {size} | {arguments.per_node} | {period:.2f} | {first:.0f} | {every:.0f} |", flush=True)
        print(f"\nThe store answers {rate(store):.0f} operations/s here.", flush=True)
        os._exit(0)
    print(
        f"| {arguments.ranks} ranks, {arguments.per_node} on a node | | rank 0 | each other rank | all |\n|---|---|---|---|---|",
        flush=True,
    )
    for phase, unit, counts in counted(arguments.ranks, arguments.per_node, arguments.seconds):
        others = sum(counts[1:]) / max(1, len(counts) - 1)
        print(f"| {phase} | {unit} | {counts[0]:.1f} | {others:.1f} | {sum(counts):.0f} |", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
