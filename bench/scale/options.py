"""The command line of `python -m bench.scale`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from bench.scale.job import Machine, ScaledJob, transformer
from muster.collectives.__main__ import Parser
from muster.collectives.algorithm import Network
from muster.errors import ConfigError

WORLD_SIZES = [2**power for power in range(3, 15)]


POSITIVE = ("parameters", "layers", "hidden", "sequence", "samples", "flops_per_s", "node_size", "group", "tensor", "stages", "micro_batches", "every", "servers")  # fmt: skip
"""Options that must be above 0."""


def parse(arguments: Sequence[str]) -> tuple[ScaledJob, Path]:
    """Return the job and the output folder; exits after --help. Raises ConfigError."""
    given = _parser().parse_args(arguments)
    for name in POSITIVE:
        if getattr(given, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(given, name)}: use a number above 0")
    workload = transformer(
        parameters=given.parameters, layers=given.layers, hidden=given.hidden, sequence=given.sequence,
        samples=given.samples, value_bytes=given.value_bytes, optimizer_bytes=given.optimizer_bytes,
    )  # fmt: skip
    return ScaledJob(
        workload, _machine(given),
        group=given.group, tensor=given.tensor, stages=given.stages, micro_batches=given.micro_batches,
        every=given.every, servers=given.servers, recursive=given.recursive,
    ), given.out  # fmt: skip


def _machine(given: Namespace) -> Machine:
    outer = _network(given)
    inner = _given(given.inner_alpha_us, given.inner_gb_per_s) if given.inner_gb_per_s else outer
    return Machine(given.flops_per_s, outer, inner, given.node_size)


def _parser() -> Parser:
    parser = Parser(prog="python -m bench.scale", description="Model the cost of strategies from 8 to 16,384 ranks.")
    work = parser.add_argument_group("transformer")
    work.add_argument("--parameters", type=float, required=True, help="number of parameters, such as 7e9")
    work.add_argument("--layers", type=int, required=True)
    work.add_argument("--hidden", type=int, required=True, help="hidden size")
    work.add_argument("--sequence", type=int, required=True, help="tokens per sample")
    work.add_argument("--samples", type=float, default=1, help="samples per rank and step (%(default)s)")
    work.add_argument(
        "--value-bytes", type=float, default=4, help="bytes per parameter or gradient (%(default)s; bf16: 2)"
    )
    work.add_argument(
        "--optimizer-bytes", type=float, default=8, help="bytes per parameter (%(default)s; bf16 with AdamW: 12)"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--flops-per-s", type=float, required=True, help="achieved FLOP/s of a rank, such as 4e14")
    machine.add_argument("--network", type=Path, help="collectives.json with fitted constants, or set the next two")
    machine.add_argument("--alpha-us", type=float, help="microseconds per message")
    machine.add_argument("--gb-per-s", type=float, help="10^9 bytes per second and rank")
    machine.add_argument("--inner-alpha-us", type=float, help="microseconds per message within a node")
    machine.add_argument("--inner-gb-per-s", type=float)
    machine.add_argument("--node-size", type=int, default=1, help="ranks per node (%(default)s)")
    cut = parser.add_argument_group("parallelism")
    cut.add_argument("--group", type=int, default=8, help="ranks per shard group of hybrid (%(default)s)")
    cut.add_argument("--tensor", type=int, default=8, help="ranks that shard a layer (%(default)s)")
    cut.add_argument("--stages", type=int, default=8, help="stages of the pipeline (%(default)s)")
    cut.add_argument("--micro-batches", type=int, default=32, help="micro-batches of the pipeline (%(default)s)")
    cut.add_argument("--every", type=int, default=16, help="steps between averages of local SGD (%(default)s)")
    cut.add_argument("--servers", type=int, default=1, help="number of parameter servers (%(default)s)")
    cut.add_argument("--recursive", action="store_true", help="collectives in log2 W rounds instead of a ring's W - 1")
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="output folder (%(default)s)")
    return parser


def _network(given: Namespace) -> Network:
    if given.network is None:
        return _given(given.alpha_us, given.gb_per_s)
    try:
        return Network(**json.loads(given.network.read_text())["network"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--network={given.network} holds no fitted constants ({type(error).__name__}): `python -m train.collectives` makes such a file"
        ) from None


def _given(alpha_us: float | None, gb_per_s: float | None) -> Network:
    if alpha_us is None or gb_per_s is None or alpha_us < 0 or gb_per_s <= 0:
        raise ConfigError(
            f"alpha-us={alpha_us} and gb-per-s={gb_per_s} do not describe a network: give both, for example --alpha-us=10 --gb-per-s=50, or --network=FILE"
        )
    return Network(alpha_us * 1e-6, 1e-9 / gb_per_s)
