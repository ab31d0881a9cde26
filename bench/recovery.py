"""Measure seconds from a fault to the next step, with real agents and ranks on loopback: `make recovery`.

Each agent stands for a node with one rank. The rendezvous store is a process of its own, except where its loss is the
fault. A step of the model takes microseconds, so the times are those of torchrun, the kit and imports, not of training.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kit.ledger import RECORDED, assert_exact
from kit.loopback import Nodes, nodes

TIMEOUT_S = 10.0
EARLY_S = 10.0
ENDLESS = (
    *RECORDED,
    "batch_size=10",
    "checkpoint.every_steps=10",
    "max_steps=1000000",
    f"dist.timeout_s={TIMEOUT_S:g}",
)


def both(cluster: Nodes) -> list[Any]:
    agents = [cluster.start(), cluster.start()]
    cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both nodes")
    settle(cluster)
    return agents


def settle(cluster: Nodes) -> None:
    """Wait until the attempt has trained for a while and saved one more checkpoint."""
    cluster.reach(cluster.attempts()[-1]["step"] + random.randint(12, 30))


def signalled(number: int, cluster: Nodes, times: int) -> Iterator[float]:
    """Send signal `number` to a random rank, whose death restarts all; yield the seconds to the next step."""
    agents = both(cluster)
    for _ in range(times):
        victim = random.choice(agents)
        yield cluster.next_step(lambda victim=victim: os.kill(cluster.workers(victim)[0], number))
        settle(cluster)
    print(
        f"  attempts beyond one for each: {sum(a['world_size'] == 2 for a in cluster.attempts()) - 1 - times}",
        flush=True,
    )


def survived(cluster: Nodes, times: int, *, number: int = signal.SIGKILL) -> Iterator[float]:
    """Send signal `number` to a random rank, which is restarted in place; yield the seconds to the next step."""
    agents = both(cluster)
    for _ in range(times):
        yield survived_once(cluster, random.choice(agents), number)
        cluster.reach(cluster.step() + random.randint(12, 30))
    print(f"  restarts {len(cluster.attempts()) - 1}, steps repeated {repeated(cluster)}", flush=True)


def early(cluster: Nodes, times: int) -> Iterator[float]:
    """Kill a random rank in the first ten seconds after the first step of a launch; yield the seconds to the next step."""
    for _ in range(times):
        cluster.start(), cluster.start()
        before = len(cluster.attempts())
        cluster.until(lambda before=before: len(cluster.attempts()) > before, "both nodes")
        begun = cluster.attempts()[-1]["step"]
        cluster.until(lambda begun=begun: cluster.step() > begun, "first step", every_s=0.005)
        time.sleep(random.uniform(0, EARLY_S))
        yield survived_once(cluster, random.choice(cluster.agents), signal.SIGKILL)
        for agent in cluster.agents:
            cluster.kill_node(agent)
        cluster.agents.clear()
    told = [line["seconds"] for line in survivals(cluster)]
    print(f"  restarts {len(cluster.attempts()) - times}, told by the records {told}", flush=True)


def survived_once(cluster: Nodes, agent: Any, number: int) -> float:
    """Send signal `number` to the rank of an agent, which is restarted in place; return the seconds to the next step."""
    [rank] = cluster.ranks(agent)
    before, began = len(survivals(cluster)), time.monotonic()
    os.kill(rank, number)
    cluster.until(lambda: len(survivals(cluster)) > before, "restart in place", every_s=0.005)
    at = survivals(cluster)[-1]["step"]
    cluster.until(lambda: cluster.step() > at, f"step after {at}", every_s=0.005)
    return time.monotonic() - began


def survivals(cluster: Nodes) -> list[dict[str, Any]]:
    return [line for line in cluster.lines() if line.get("event") == "survived"]


def repeated(cluster: Nodes) -> int:
    """Return how many steps are in metrics.jsonl more than once."""
    steps = [line["step"] for line in cluster.lines() if line["kind"] == "train"]
    return len(steps) - len({*steps})


def node_loss(cluster: Nodes, times: int) -> Iterator[float]:
    agents = both(cluster)
    for _ in range(times):
        lost, at = agents.pop(random.randrange(2)), cluster.step()
        yield cluster.next_step(lambda lost=lost: cluster.kill_node(lost))
        print(f"  steps repeated {max(0, at - cluster.attempts()[-1]['step'])}", flush=True)
        settle(cluster)
        agents.append(cluster.start())
        cluster.until(lambda: cluster.attempts()[-1]["world_size"] == 2, "both nodes")
        settle(cluster)


def rejoin(cluster: Nodes, times: int) -> Iterator[float]:
    """Kill a node and let a new one join; yield the pause of training, from the last step of the group without the new node to the first step with it."""
    agents = both(cluster)
    for _ in range(times):
        lost = agents.pop(random.randrange(2))
        cluster.next_step(lambda lost=lost: cluster.kill_node(lost))
        settle(cluster)
        before = len(cluster.attempts())
        agents.append(cluster.start())
        last, at = cluster.step(), time.monotonic()
        while len(cluster.attempts()) == before:
            if (step := cluster.step()) != last:
                last, at = step, time.monotonic()
            time.sleep(0.005)
        begun = cluster.attempts()[-1]["step"]
        cluster.until(lambda begun=begun: cluster.step() > begun, "next step")
        yield time.monotonic() - at
        settle(cluster)


def host_loss(cluster: Nodes, times: int) -> Iterator[float]:
    """Kill the host of the store; start both agents again as soon as they end, like a scheduler."""
    for _ in range(times):
        first, second = both(cluster)

        def fault(first: Any = first, second: Any = second) -> None:
            cluster.kill_node(first)
            second.wait()
            cluster.start(host=True)
            cluster.start(host=False)

        yield cluster.next_step(fault)
        for agent in cluster.agents:
            cluster.kill_node(agent)
        cluster.agents.clear()


def preemption(cluster: Nodes, times: int) -> Iterator[float]:
    """Yield the number of steps (not seconds) to repeat after SIGTERM to all nodes."""
    for _ in range(times):
        agents = both(cluster)
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.wait()
        done = cluster.step()
        cluster.agents.clear()
        yield done - int(cluster.result().outcome["step"])


Scenario = Callable[[Nodes, int], Iterator[float]]
SCENARIOS: dict[str, tuple[Scenario, str, float, dict[str, Any]]] = {
    "rank killed, dist.survive=false": (
        partial(signalled, signal.SIGKILL),
        "s to the next step",
        5.0,
        {"more": ("dist.survive=false",)},
    ),
    "rank killed": (
        survived,
        "s to the next step",
        0.5,
        {"more": ("dist.max_survivals_per_hour=1000000",)},
    ),
    "rank killed early": (early, "s to the next step", 1.0, {"more": ("log.tensorboard=true",), "nnodes": "2"}),
    "node lost": (node_loss, "s to the next step", 6.0, {}),
    "node joins": (rejoin, "s of pause", 4.0, {}),
    "rendezvous host lost": (host_loss, "s to the next step", 10.0, {"own_store": False, "nnodes": "2"}),
    f"rank stopped, dist.timeout_s={TIMEOUT_S:g}": (
        partial(survived, number=signal.SIGSTOP),
        "s to the next step",
        TIMEOUT_S + 1,
        {"more": ("dist.max_survivals_per_hour=1000000",)},
    ),
    "all preempted": (preemption, "steps to do again", 0.0, {"nnodes": "2"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="faults of each kind (default: 5)")
    parser.add_argument("--kills", type=int, default=50, help="killed workers (default: 50)")
    parser.add_argument("--only", default="", help="the scenarios whose name begins so")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    rows = []
    for name, (scenario, unit, target, kwargs) in SCENARIOS.items():
        if not name.startswith(arguments.only):
            continue
        times = arguments.kills if "killed" in name else arguments.times
        kwargs = dict(kwargs)
        more = kwargs.pop("more", ())
        with tempfile.TemporaryDirectory() as place:
            ledger = Path(place, "ledger")
            ledger.mkdir()
            with nodes(Path(place, "run"), *ENDLESS, *more, LEDGER=str(ledger), **kwargs) as cluster:
                values = [round(value, 2) for value in scenario(cluster, times)]
                print(f"{name}: {values}", flush=True)
            steps = cluster.step()
            assert_exact(ledger, steps=None if steps else 0, batch_size=10)
        rows.append(
            f"| {name} | {len(values)} | {unit} | {statistics.median(values):.2f} | {max(values):.2f} | {target:g} |"
        )
    print("\n| fault | times | | median | worst | target |\n|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
