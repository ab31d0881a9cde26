"""Count operations on the rendezvous store per rank while ranks meet, send heartbeats, stop and save.

`python -m bench.talk` simulates 64 ranks by threads with connections of their own, which use the store over loopback like
the ranks of a run, without a model and a process group. An operation on several keys counts once per key. Only the counts
carry over to a cluster, not the times.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore

from muster.dist.board import Board
from muster.dist.place import Place
from muster.dist.rendezvous.meeting import Met, meet
from muster.faults import heartbeat
from muster.faults.heartbeat import Heartbeat, period_s
from muster.faults.preemption import Agreement, Preemption

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
    """`size` ranks that have met."""

    def __init__(self, size: int):
        def arrive(rank: int) -> Met:
            return meet(Place(rank, size, rank, size), alike=None, error=None, timeout_s=120.0)

        met = at_once(arrive, size)
        self.met = [one.operations.total() for one in met]
        self.boards = [Board(one.store, attempt=one.attempt, rank=rank, size=size) for rank, one in enumerate(met)]
        for board in self.boards:
            board.post_beat("")
        alike = {"size": size, "device": torch.device("cpu")}
        worlds = [SimpleNamespace(rank=b.rank, is_first=b.rank == 0, board=b, **alike) for b in self.boards]
        self.beats = [Heartbeat(world, timeout_s=STILL_S, start_s=9e9, on_hang=print) for world in worlds]
        self.preemptions = [Preemption() for _ in worlds]
        for beat in self.beats:
            beat.start()
        self.watchers = [Agreement(*each) for each in zip(worlds, self.preemptions, strict=True)]

    def asked(self) -> list[int]:
        return [board.operations.total() for board in self.boards]

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
            time.sleep(STILL_S / 20)


def save(ranks: Ranks, number: int) -> None:
    """Post one rank's part of a save; rank 0 collects all and announces the commit."""

    def work(rank: int) -> None:
        board = ranks.boards[rank]
        board.post_part(number, {"files": {f"rank-{rank:05d}": {"size": 1, "sha256": "0" * 64}}})
        if rank:
            board.save_end(number, 60.0)
        else:
            board.parts(number, 60.0)
            board.end_save(number, None)

    at_once(work, len(ranks.boards))


def stop(ranks: Ranks) -> None:
    """Request a stop on one rank; return when all ranks know the step."""
    ranks.preemptions[-1].request()
    for watcher in ranks.watchers:
        while watcher._watcher.is_alive():
            time.sleep(0.01)


def counted(size: int, seconds: float) -> Iterator[tuple[str, str, list[float]]]:
    """Return the counts: phase, unit, and a figure per rank."""
    ranks = Ranks(size)
    yield "start-up", "operations", [float(count) for count in ranks.met]
    ranks.move(1.0)
    quiet = ranks.during(lambda: ranks.move(seconds))
    yield "idle", "operations/s", [count / seconds for count in quiet]
    for number in (1, 2, 3):
        save(ranks, number)
    for beat in ranks.beats:
        beat.close()
    time.sleep(2 * period_s(size, STILL_S))
    talk = ranks.during(lambda: save(ranks, 4))
    yield "save", "operations", [float(count) for count in talk]
    yield "preemption", "operations", [float(count) for count in ranks.during(lambda: stop(ranks))]
    still = Ranks(size)
    still.move(0.5)
    time.sleep(STILL_S / 2 + 0.5)
    talk = still.during(lambda: time.sleep(min(seconds, STILL_S / 2 - 1)))
    yield "standing still", "operations/s", [count / min(seconds, STILL_S / 2 - 1) for count in talk]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.talk", description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a measurement (default: 3)")
    arguments = parser.parse_args()
    heartbeat.Watchdog = Unarmed
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    print(f"| {arguments.ranks} ranks | | rank 0 | each other rank | all |\n|---|---|---|---|---|", flush=True)
    for phase, unit, counts in counted(arguments.ranks, arguments.seconds):
        others = sum(counts[1:]) / max(1, len(counts) - 1)
        print(f"| {phase} | {unit} | {counts[0]:.1f} | {others:.1f} | {sum(counts):.0f} |", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
