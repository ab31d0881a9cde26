"""Compare sums by hosts (`dist.hierarchical`) with sums by ranks, on two hosts: network namespaces with a link between them.

`python -m bench.hosts --per-host 4 --mbit 1000` trains with `virtual_world_size` in turns, and prints steps/s and the bytes
that a host sends in a step. Needs root. All ranks share this machine's processors, which a cluster's do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from kit.hosts import ADDRESSES, inside, sent, two_hosts
from kit.job import QUIET, environment, free_port

from muster.launcher import loopback
from muster.launcher import spec as launch

WORKLOAD = "model=mlp model.hidden=[2048,512] data=synthetic data.image_shape=[1,28,28] batch_size=64"
HOW = ("never", "always")
COLUMNS = ("dist.hierarchical", "steps/s", "beside never", "MB that a host sends in a step", "beside never")


def turn(how: str, hosts: list[str], folder: Path, given: argparse.Namespace) -> tuple[float, float]:
    """Return steps/s and the bytes that the first host sends in a step."""
    every = max(1, given.steps // 5)
    line = [
        *given.set.split(),
        f"virtual_world_size={2 * given.per_host}",
        f"dist.hierarchical={how}",
        f"output_dir={folder}",
    ]
    line += [
        *QUIET,
        "eval.every_steps=off",
        "checkpoint.every_steps=1000000",
        f"log.every_steps={every}",
        f"max_steps={given.steps}",
    ]
    before, port, agents = sent(hosts[0]), free_port(), []
    for place, (host, address) in enumerate(zip(hosts, ADDRESSES, strict=True)):
        spec = loopback.spec("2", port=port, id="bench", is_host=place == 0, nproc=given.per_host)
        meets = replace(spec.rendezvous, endpoint=f"{ADDRESSES[0]}:{port}")
        spec = replace(spec, rendezvous=meets, local_addr=address)
        torchrun = inside(host, sys.executable, "-m", "torch.distributed.run")
        agents.append(
            subprocess.Popen(
                launch.command(spec, line, torchrun=torchrun),
                env=environment(GLOO_SOCKET_IFNAME="link0") | launch.environment(spec),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outs = [agent.communicate(timeout=1800)[0] for agent in agents]
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
    if any(agent.returncode for agent in agents):
        raise SystemExit(outs[0] + outs[1])
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [record for record in records if record["kind"] == "train"]
    speeds = [each["samples_per_s"] for each in lines[1:]]
    return statistics.median(speeds) * lines[-1]["step"] / lines[-1]["samples"], (sent(hosts[0]) - before) / given.steps


def main() -> None:
    """Print one row per way."""
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--per-host", type=int, default=4, help="ranks on each of the two hosts (default: 4)")
    parser.add_argument("--mbit", type=int, help="speed of the link in Mbit/s (default: not limited)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of a run (default: 20)")
    parser.add_argument("--set", default=WORKLOAD, help=f"what is trained (default: {WORKLOAD})")
    given = parser.parse_args()
    with two_hosts(mbit=given.mbit) as hosts, tempfile.TemporaryDirectory() as folder:
        rounds = [
            [turn(how, hosts, Path(folder) / f"{number}-{how}", given) for how in HOW] for number in range(given.rounds)
        ]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for place, how in enumerate(HOW):
        speed, sent_bytes = (statistics.median(each[place][which] for each in rounds) for which in (0, 1))
        ratios = [statistics.median(each[place][which] / each[0][which] for each in rounds) for which in (0, 1)]
        print(f"| {how} | {speed:.2f} | {ratios[0]:.2f} | {sent_bytes / 1e6:.1f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
