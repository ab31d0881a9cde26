"""The command line of `muster collectives`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import ByteSize, TypeAdapter, ValidationError

from muster.errors import ConfigError

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
