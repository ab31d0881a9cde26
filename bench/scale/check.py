"""`python -m bench.scale.check`: compare the model's ddp with DDP measured here, at 1, 2 and 4 ranks.

The model's inputs are the measured time of one rank and a network fitted in the same run. Its predictions for more
ranks are compared with measurements: the time of a step, and the bytes that a rank sends, as counted by the kernel.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.scale.job import Machine, ScaledJob, Workload
from bench.scale.strategies import CostedStep, ddp
from muster.collectives.__main__ import Parser, become_torchrun
from muster.collectives.algorithm import Network, fit
from muster.collectives.link import Link, written_bytes
from muster.collectives.measure import Bench
from muster.collectives.table import WIDTH, write_json
from muster.errors import ConfigError, MusterError, say, tell
from muster.faults import agent
from muster.train.models.gpt import Gpt

WORLD_SIZES = (1, 2, 4)
MESSAGES = [4**power for power in range(7, 12)]
TOKENS, VOCABULARY, SAMPLES = 128, 256, 4


@dataclass(frozen=True)
class Checked:
    """DDP at one world size: measured, and by the model.

    seconds: per step. sent_bytes: per step, of the rank that sends most; None if not counted.
    """

    world_size: int
    seconds: float
    sent_bytes: float | None
    model: CostedStep


def main(arguments: Sequence[str]) -> int:
    """Run the check, or replace this process by torchrun to do so, and return the exit code."""
    parser = Parser(prog="python -m bench.scale.check", description="Compare the model with DDP at 1 to 4 ranks.")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns; the median is reported (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="output folder (%(default)s)")
    try:
        given = parser.parse_args(arguments)
        if "RANK" not in os.environ:
            become_torchrun("bench.scale.check", arguments, ranks=max(WORLD_SIZES))
        if (size := int(os.environ["WORLD_SIZE"])) != max(WORLD_SIZES):
            raise ConfigError(f"a world of {size} ranks: start this alone, or on {max(WORLD_SIZES)} ranks")
        agent.die_with_it()
        check(rounds=given.rounds, steps=given.steps, out=given.out)
    except MusterError as error:
        if os.environ.get("RANK", "0") == "0":
            tell(error)
        return error.exit_code
    return 0


def check(*, rounds: int, steps: int, out: Path) -> None:
    """Measure, predict, and show both. Collective: every rank must call it. Raises MusterError."""
    dist.init_process_group("gloo")
    bench = Bench(torch.device("cpu"), backend="gloo", rounds=rounds)
    links = {world_size: bench.link(world_size) for world_size in WORLD_SIZES}
    network = fit(*zip(*bench.ping_pong(links[2], MESSAGES), strict=True))
    turns = {world_size: stepper(link) for world_size, link in links.items()}
    times, sent = measure(turns, rounds=rounds, steps=steps)
    if dist.get_rank() == 0:
        jobs = job(network, seconds=times[1])
        leave([Checked(size, times[size], sent[size], ddp(jobs, size)) for size in WORLD_SIZES], network, out)
    dist.barrier()
    dist.destroy_process_group()


def leave(found: list[Checked], network: Network, out: Path) -> None:
    """Write check.json to the folder `out`, and print its figures."""
    write_json(out / "check.json", {"network": asdict(network), "checked": [asdict(each) for each in found]})
    show(found, network)
    say(f"{out}/check.json", sys.stdout)


def stepper(link: Link | None) -> Callable[[], None] | None:
    """Return a function that trains one step with the ranks of `link`, on local samples; None on other ranks."""
    if link is None:
        return None
    torch.manual_seed(0)
    model = model_here()
    forward: nn.Module = DistributedDataParallel(model, process_group=link.group) if link.size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS))

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def model_here() -> Gpt:
    """Return a GPT that is small enough for a CPU and large enough to keep it busy."""
    return Gpt(input_shape=[TOKENS], num_classes=VOCABULARY, num_layers=4, num_heads=4, hidden_dim=256, dropout=0.0)


def measure(
    turns: dict[int, Callable[[], None] | None], *, rounds: int, steps: int
) -> tuple[dict[int, float], dict[int, float | None]]:
    """Return seconds per step of the slowest rank, and bytes per step of the busiest rank, by world size.

    Collective: every rank must call it.
    """
    seconds = torch.zeros(1 + rounds, len(turns), dtype=torch.float64)
    sent = torch.zeros(len(turns), dtype=torch.float64)
    for turn in range(1 + rounds):
        for at, step in enumerate(turns.values()):
            dist.barrier()
            if step:
                before, began = written_bytes(), time.perf_counter()
                for _ in range(steps):
                    step()
                seconds[turn, at], after = (time.perf_counter() - began) / steps, written_bytes()
                sent[at] = (after - before) / steps if after is not None and before is not None else torch.nan
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    medians = [
        statistics.median(column) for column in seconds[1:].T.tolist()
    ]  # without the first turn, in which DDP builds its buckets
    return dict(zip(turns, medians, strict=True)), {
        size: None if nbytes != nbytes else nbytes for size, nbytes in zip(turns, sent.tolist(), strict=True)
    }


def job(network: Network, *, seconds: float) -> ScaledJob:
    """Return the measured workload as a job; its computation takes the `seconds` per step of one rank."""
    parameters = sum(parameter.numel() for parameter in model_here().parameters())
    workload = Workload(parameters, 4, SAMPLES, flops=seconds / SAMPLES, boundary_bytes=0, activation_bytes=0)
    return ScaledJob(workload, Machine(flops_per_s=1.0, outer=network, inner=network))


def _row(each: Checked) -> tuple[str, ...]:
    model, sent = each.model, each.sent_bytes
    off = (model.seconds / each.seconds - 1) * 100
    return (
        str(each.world_size), f"{each.seconds * 1e3:.1f}",
        f"{model.least_seconds * 1e3:.1f} - {model.seconds * 1e3:.1f}", f"{off:+.0f} %",
        "not counted" if sent is None else f"{sent / 1e6:.3f}", f"{model.sent_bytes / 1e6:.3f}",
    )  # fmt: skip


def show(found: list[Checked], network: Network) -> None:
    """Print measured and predicted values side by side."""
    table = Table("ranks", "ms a step", "model", "model is off by", "MB sent a rank", "model")
    for each in found:
        table.add_row(*_row(each))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(f"alpha {network.alpha_s * 1e6:.1f} us, beta {network.beta_s * 1e9:.3f} ns a byte")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
