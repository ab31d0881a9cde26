"""`muster collectives [options]`: check, time and plot all-reduce algorithms, with or without torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from muster.collectives.command_line import Options, become_torchrun, parse, world_sizes
from muster.collectives.measure import Bench, Figures
from muster.collectives.plot import draw
from muster.collectives.table import show, write_json
from muster.errors import ConfigError, MusterError, say, tell
from muster.faults import agent, lost_output
from muster.world.environment import Environment
from muster.world.rendezvous.network import choose_interface, connect
from muster.world.store_keys import StoreKeys

TIMEOUT = timedelta(seconds=120)


def main(arguments: Sequence[str]) -> int:
    """Measure, or replace this process by torchrun to do so, and return the exit code."""
    try:
        options, environment = parse(arguments), Environment.from_env()
        if "RANK" not in os.environ:
            world_sizes(options, options.ranks)
            become_torchrun("muster.collectives", arguments, ranks=options.ranks)
        agent.die_with_it()
        measure(options, environment)
    except MusterError as error:
        if os.environ.get("RANK", "0") == "0":
            tell(error)
        return error.exit_code
    return 0


def form_group(environment: Environment, device: torch.device) -> str:
    """Form the process group and return its backend on `device`. Collective."""
    rank, size, start = environment.rank, environment.world_size, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = connect(environment, timeout_s=TIMEOUT.total_seconds(), stopping=lambda: False)
    keys = StoreKeys(store, attempt=f"collectives/{start}", rank=rank, size=size)
    choose_interface(environment, keys)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backends, store=keys.group_store, rank=rank, world_size=size, timeout=TIMEOUT)
    return backends.rpartition(":")[2]


def measure(options: Options, environment: Environment) -> None:
    """Form the process group, measure, and write the results. Collective. Raises MusterError."""
    sizes, device = world_sizes(options, environment.world_size), choose_device(options, environment)
    backend = form_group(environment, device)
    figures = Bench(device, backend=backend, rounds=options.rounds).measure(world_sizes=sizes, sizes=options.sizes)
    if environment.rank == 0:
        leave(figures, options)
    dist.barrier()
    dist.destroy_process_group()


def choose_device(options: Options, environment: Environment) -> torch.device:
    """Return this rank's device: its GPU, or the CPU if there are too few. Raises ConfigError."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = there >= environment.local_world_size
    if options.device == "cuda" and not enough:
        raise ConfigError(
            f"--device=cuda for {environment.local_world_size} processes on {there} GPUs: use fewer, or --device=cpu"
        )
    return torch.device("cuda", environment.local_rank) if options.device != "cpu" and enough else torch.device("cpu")


def leave(figures: Figures, options: Options) -> None:
    """Print the table, and write plot and numbers to the output folder. Raises StorageError."""
    write_json(options.out / "collectives.json", figures.as_json())
    draw(figures, options.out / "collectives.png")
    show(figures)
    say(f"{options.out}/collectives.json and collectives.png", sys.stdout)


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main(sys.argv[1:]))
