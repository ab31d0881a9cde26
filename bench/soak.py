"""Inject random faults at random times, then check that nothing was lost: `make soak MINUTES=5`, or only kill ranks: `make soak ARGS="--kills 1000"`.

Two nodes of one rank each train without an end. Every few seconds a process is killed, paused, preempted or started
twice, or a checkpoint is damaged; each kind of fault comes once before any is repeated. Nodes that end are started again
with the same command, as by a scheduler. With --kills, ranks alone are killed, one half of the times the first one and then
the second, each after a random time once the last death is survived; what the other rank and the supervisors hold of memory,
descriptors and threads is looked at along the way. At the end the run is finished and compared with an undisturbed one. Exit code
1 if they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.job import finish, run, start
from kit.ledger import RECORDED, assert_exact
from kit.loopback import Nodes, Process, nodes

LINE = (
    *RECORDED,
    "virtual_world_size=4",
    "batch_size=10",
    "checkpoint.every_steps=10",
    "dist.timeout_s=6",
    "eval.every_steps=50",
)
PAUSE_S = 8.0
"""The longest that a node stands still: less than a lease outlives (lease/folder_lease.py)."""
HARMLESS = ("second launch", "node paused")
"""After these the run may go on without a new attempt."""


class Soak:
    """The faults, on one cluster that always has two nodes."""

    def __init__(self, cluster: Nodes, within_s: float):
        self.cluster, self.within_s = cluster, within_s
        self.agents: list[Process] = []

    def keep_two(self, *overrides: str) -> None:
        self.agents = [agent for agent in self.agents if agent.poll() is None]
        while len(self.agents) < 2:
            self.agents.append(self.cluster.start(*overrides))

    def agent(self) -> Process:
        """Return a random agent that has started its worker."""
        agents = [agent for agent in self.agents if self.cluster.workers(agent)]
        if not agents:
            raise ProcessLookupError
        return random.choice(agents)

    def rank_killed(self) -> None:
        os.kill(self.cluster.ranks(self.agent())[0], signal.SIGKILL)

    def supervisor_killed(self) -> None:
        os.kill(self.cluster.workers(self.agent())[0], signal.SIGKILL)

    def rank_stopped(self) -> None:
        os.kill(self.cluster.ranks(self.agent())[0], signal.SIGSTOP)

    def agent_killed(self) -> None:
        random.choice(self.agents).kill()

    def node_lost(self) -> None:
        self.cluster.kill_node(random.choice(self.agents))

    def everything_killed(self) -> None:
        for agent in self.agents:
            self.cluster.kill_node(agent)

    def node_preempted(self) -> None:
        random.choice(self.agents).send_signal(signal.SIGTERM)

    def all_preempted(self) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)

    def store_lost(self) -> None:
        """Kill the store, without which no rank can meet; start everything again with a new store, as after a requeue."""
        assert self.cluster.store
        self.cluster.store.kill()
        self.cluster.store.wait()
        for agent in self.agents:
            try:
                agent.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.cluster.kill_node(agent)
        self.cluster.start_store()

    def checkpoint_spoiled(self) -> None:
        """Flip a bit of the newest checkpoint."""

        def flip(data: bytearray) -> None:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)

        self._spoil(flip)

    def checkpoint_truncated(self) -> None:
        def cut(data: bytearray) -> None:
            del data[random.randrange(len(data)) :]

        self._spoil(cut)

    def _spoil(self, change: Callable[[bytearray], None]) -> None:
        """Kill everything and change a file of the newest checkpoint, which the next attempt would use.

        An older checkpoint must exist: without a valid one the run must not go on.
        """

        def states() -> list[Path]:
            return sorted((self.cluster.folder / "checkpoints").glob("step-*/rank-00000.bin"))

        def two() -> bool:
            self.keep_two()
            return len(states()) > 1

        self.cluster.until(two, "two checkpoints", timeout_s=self.within_s)
        self.everything_killed()
        newest = states()[-1]
        data = bytearray(newest.read_bytes())
        change(data)
        newest.write_bytes(data)

    def node_paused(self) -> None:
        """Pause agent and workers for a while, like a machine that swaps."""
        agent = random.choice(self.agents)
        node = self.cluster.node(agent)
        try:
            for pid in node:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(random.uniform(0.5, PAUSE_S))
        finally:
            for pid in node:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def starting_preempted(self) -> None:
        """Send SIGTERM to all nodes, start them again, and send it again within the first second."""
        self.all_preempted()
        self.cluster.until(self._is_over, "end of all agents", timeout_s=self.within_s)
        self.keep_two()
        time.sleep(random.uniform(0.0, 1.0))
        self.all_preempted()

    def second_launch(self) -> None:
        """Start the same command with another rendezvous; it must be refused and change nothing."""
        self.cluster.until(self._is_whole, "two nodes at work", timeout_s=self.within_s)
        before = self.cluster.result().outcome["attempt"]
        second = {"TEST_MARK": self.cluster.mark, "LEDGER": self.cluster.env["LEDGER"]}
        refused = finish(
            start(self.cluster.folder, *self.cluster.overrides, ranks=1, env=second, cold=True),
            self.cluster.folder,
            timeout_s=self.within_s,
        )
        assert refused.code and "is in use by another job" in refused.out, f"not refused:\n{refused.out}"
        assert refused.outcome["attempt"] == before, "a refused launch disturbed the run"

    def _is_over(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents)

    def _is_whole(self) -> bool:
        self.keep_two()
        attempts = self.cluster.attempts()
        return attempts[-1]["world_size"] == 2 and self.cluster.step() > attempts[-1]["step"]

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            "rank killed": self.rank_killed,
            "rank stopped": self.rank_stopped,
            "supervisor killed": self.supervisor_killed,
            "agent killed": self.agent_killed,
            "node lost": self.node_lost,
            "everything killed": self.everything_killed,
            "one node preempted": self.node_preempted,
            "all preempted": self.all_preempted,
            "store lost": self.store_lost,
            "checkpoint spoiled": self.checkpoint_spoiled,
            "checkpoint truncated": self.checkpoint_truncated,
            "node paused": self.node_paused,
            "preempted while starting": self.starting_preempted,
            "second launch": self.second_launch,
        }


def turns(cluster: Nodes) -> list[dict[str, Any]]:
    """Return the events with which ranks begin or go on: each attempt's first, and the restarts in place of ranks that have died."""
    return [line for line in cluster.lines() if line.get("event") in ("start", "resume", "survived")]


def soak(cluster: Nodes, minutes: float, within_s: float) -> tuple[Counter[str], list[float]]:
    """Inject faults for `minutes`; return the number of each kind, and the seconds from each to the next new step."""
    job, done, seconds, bag = Soak(cluster, within_s), Counter[str](), list[float](), list[str]()
    job.keep_two()
    cluster.reach(5, timeout_s=within_s)
    until = time.monotonic() + minutes * 60
    while time.monotonic() < until:
        time.sleep(random.uniform(0.0, 6.0))
        bag = bag or random.sample(list(job.faults), k=len(job.faults))
        fault = bag.pop()
        before, began = len(turns(cluster)), time.monotonic()
        try:
            job.faults[fault]()
        except ProcessLookupError:
            continue  # it has just ended by itself
        done[fault] += 1
        at = cluster.step() if fault in HARMLESS else 0

        def goes_on(before: int = before, at: int = at) -> bool:
            job.keep_two()
            done = turns(cluster)
            return (at > 0 or len(done) > before) and cluster.step() > max(at, done[-1]["step"])

        cluster.until(goes_on, f"step after fault {sum(done.values())} ({fault})", timeout_s=within_s)
        took = time.monotonic() - began
        print(f"{fault}: {took:.1f} s, step {cluster.step()}", flush=True)
        seconds += [] if fault in HARMLESS else [took]
    finish_run(cluster, job, within_s)
    return done, seconds


def held(pid: int) -> dict[str, int]:
    """Return what a process holds: memory of its own and shared with none (MB), descriptors, threads."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own = sum(
        int(line.split()[1]) for line in rollup.splitlines() if line.startswith(("Private_Clean", "Private_Dirty"))
    )
    return {
        "own MB": own // 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def kill_ranks(cluster: Nodes, kills: int, within_s: float) -> tuple[Counter[str], list[float]]:
    """Kill ranks `kills` times; return the number of kills, and the seconds from each to the next new step."""
    job, seconds = Soak(cluster, within_s), list[float]()
    job.keep_two()
    cluster.reach(5, timeout_s=within_s)
    victims = [job.agents[0]] * (kills // 2) + [job.agents[1]] * (kills - kills // 2)
    looked_at = {*range(kills // 20, kills, max(1, kills // 10))}
    for number, agent in enumerate(victims):
        time.sleep(random.uniform(0.0, 0.3))
        before, began = len(turns(cluster)), time.monotonic()
        os.kill(cluster.ranks(agent)[0], signal.SIGKILL)

        def goes_on(before: int = before) -> bool:
            done = turns(cluster)
            return len(done) > before and cluster.step() > done[-1]["step"]

        cluster.until(goes_on, f"step after death {number + 1}", timeout_s=within_s)
        seconds.append(time.monotonic() - began)
        if number in looked_at:
            other = next(each for each in job.agents if each is not agent)
            parts = {"survivor": cluster.ranks(other)[0], "its supervisor": cluster.workers(other)[0]}
            parts["supervisor of the dead"] = cluster.workers(agent)[0]
            print(f"after {number + 1} deaths: { ({name: held(pid) for name, pid in parts.items()}) }", flush=True)
    finish_run(cluster, job, within_s)
    return Counter({"rank killed": kills}), seconds


def finish_run(cluster: Nodes, job: Soak, within_s: float) -> None:
    """Stop the run, and let it go on to an end that it comes to soon."""
    for agent in job.agents:
        agent.send_signal(signal.SIGTERM)
    for agent in job.agents:
        agent.wait()
    cluster.overrides = (*cluster.overrides, f"max_steps={cluster.step() + 50}")

    def done_at_last() -> bool:
        if cluster.result().outcome.get("outcome") == "done":
            return True
        job.keep_two()
        return False

    cluster.until(done_at_last, "end of the run", timeout_s=within_s * 2)
    cluster.until(lambda: not cluster.left_over(), "end of all processes", timeout_s=within_s / 4)


def repeated(ledger: Path) -> int:
    """Count the steps that were begun more than once."""
    begun = Counter(
        json.loads(line)["step"]
        for path in ledger.glob("*-0.jsonl")  # rank 0 of each attempt
        for line in path.read_text().splitlines()
        if line.endswith("}")
    )
    return sum(count - 1 for count in begun.values())


def check(cluster: Nodes, ledger: Path, place: Path) -> dict[str, Any]:
    """Check that a disturbed run equals the undisturbed one. Raises AssertionError."""
    result = cluster.result()
    steps = result.outcome["total_steps"]
    assert_exact(ledger, steps=steps, batch_size=10)
    assert [line["step"] for line in result.lines("train")] == list(range(1, steps + 1)), "a step twice, or none"
    left = [*cluster.folder.glob(".*"), *(cluster.folder / "checkpoints").glob(".*")]
    assert not left, f"left behind: {left}"
    (place / "undisturbed-ledger").mkdir()
    whole = run(
        place / "undisturbed", *LINE, f"max_steps={steps}", "+model.delay_s=0", ranks=2, timeout_s=600,
        env={"LEDGER": str(place / "undisturbed-ledger")},
    )  # fmt: skip
    sizes = Counter(attempt["world_size"] for attempt in cluster.attempts())
    survived = Counter(line["cause"] for line in result.events("survived"))
    assert whole.sha256 == result.sha256, "other weights than those of the undisturbed run"
    return {
        "steps": steps,
        "steps begun more than once": repeated(ledger),
        "attempts by world size": dict(sizes),
        "ranks restarted in place, by signal": dict(survived),
        "SHA-256 of the weights, as undisturbed": whole.sha256[:12],
        "checkpoints quarantined": len(list((cluster.folder / "checkpoints").glob("bad-*"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--kills", type=int, default=0, help="only kill ranks, so many times, whatever the minutes")
    parser.add_argument(
        "--within-s", type=float, default=60.0, help="without a step for as long, the run is called lost"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.set_num_threads(1)
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        ledger = place / "ledger"
        ledger.mkdir()
        more = ("max_steps=1000000", "max_idle_attempts=20", f"dist.max_survivals_per_hour={20 + arguments.kills}")
        with nodes(place / "run", *LINE, *more, LEDGER=str(ledger)) as cluster:
            try:
                if arguments.kills:
                    done, seconds = kill_ranks(cluster, arguments.kills, arguments.within_s)
                else:
                    done, seconds = soak(cluster, arguments.minutes, arguments.within_s)
                facts = check(cluster, ledger, place)
            except AssertionError as error:
                print(f"FAILED (seed {arguments.seed}): {error}")
                sys.exit(1)
    print(f"\n{sum(done.values())} faults: {dict(done.most_common())}")
    print(f"seconds to the next step: median {statistics.median(seconds):.1f}, worst {max(seconds):.1f}")
    for name, value in facts.items():
        print(f"{name}: {value}")
    print("every sample in its place, no step twice, nothing left behind")


if __name__ == "__main__":
    main()
