"""`muster collectives [options]`: check, time and plot all-reduce algorithms, with or without torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from pydantic import ByteSize, TypeAdapter, ValidationError

from muster.collectives.measure import Bench, Figures
from muster.collectives.table import draw, show, write_json
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


SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"


@dataclass(frozen=True)
class Options:
    """Options of a measurement. ranks: number of processes to start if no launcher has started them."""

    ranks: int
    sizes: list[int]
    world_sizes: list[int] | None
    rounds: int
    device: str
    out: Path


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError, where argparse prints the usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `muster collectives --help` lists all options")


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line; exits after --help. Raises ConfigError."""
    parser = Parser(prog="muster collectives", description="Check, time and plot all-reduce algorithms.")
    parser.add_argument(
        "--ranks", type=int, default=4, help="number of processes to start without torchrun (%(default)s)"
    )
    parser.add_argument("--sizes", default=SIZES, help="message sizes (%(default)s)")
    parser.add_argument(
        "--world-sizes", help="world sizes to time; default: 2, 3, 4, further powers of 2, and all ranks"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of turns; the median is reported (%(default)s)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each rank has one"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/collectives"), help="output folder (%(default)s)")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        raise ConfigError(f"--rounds={given.rounds} measures nothing: use 1 or more")
    world_sizes = _numbers("--world-sizes", given.world_sizes) if given.world_sizes else None
    return Options(given.ranks, _sizes(given.sizes), world_sizes, given.rounds, given.device, given.out)


def world_sizes(options: Options, world_size: int) -> list[int]:
    """Return the world sizes to measure with `world_size` ranks. Raises ConfigError."""
    if world_size < 2:
        raise ConfigError(
            "a world of 1 rank has no rank to send to: use --ranks, or torchrun's --nproc-per-node, of 2 or more"
        )
    if not options.world_sizes:
        return [size for size in range(2, world_size + 1) if size <= 4 or size & (size - 1) == 0 or size == world_size]
    for size in options.world_sizes:
        if not 2 <= size <= world_size:
            raise ConfigError(f"--world-sizes={size} in a world of {world_size} ranks: use 2 to {world_size}")
    return options.world_sizes


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(TypeAdapter(ByteSize).validate_python(each)) for each in text.split(",")})
    except ValidationError:
        raise ConfigError(f"--sizes={text} are not sizes: use, for example, 1KiB,64KiB,1MiB") from None
    if sizes[0] < 4:
        raise ConfigError(f"--sizes={text}: a message holds at least one float32, 4 bytes")
    return [size // 4 * 4 for size in sizes]


def _numbers(name: str, text: str) -> list[int]:
    try:
        return sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise ConfigError(f"{name}={text} are not whole numbers: use, for example, 2,4") from None


def become_torchrun(module: str, arguments: Sequence[str], *, ranks: int) -> NoReturn:
    """Replace this process by torchrun, which starts `module` with `arguments` on `ranks` ranks; the pid is kept."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", module, *arguments])


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main(sys.argv[1:]))
