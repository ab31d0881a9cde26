"""The figures of a `train` record that depend on its speed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from muster.train.config.keys import Config, Precision
from muster.train.data.load import Data
from muster.train.throughput.peaks import peak_flops
from muster.world.group import World

GIB = 2**30
OF_LINES = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "peak_memory_gib")
"""What a `train` line of the trainer may have beside what every record has."""


@dataclass(frozen=True)
class Throughput:
    """What a sample is worth in the terms of its field.

    tokens: tokens of a sample; None if the data is not text. flops: operations of forward and backward for a sample, of
    the `peak` of all ranks' devices together in FLOP/s; None if one of the two is not known.
    """

    tokens: int | None = None
    flops: float | None = None
    peak: float | None = None

    def rates(self, samples_per_s: float, counted: float | None = None) -> dict[str, float]:
        """Return `tokens_per_s` and `mfu`, as far as they are known.

        counted: tokens of a sample that the objective counts, on average since the last line; None: all that it has.

        mfu: model FLOPs utilization, the rate of the operations that the model needs as a share of the devices' peak: 0 to 1.

        Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
        """
        tokens = counted if self.tokens and counted is not None else self.tokens
        rates = {} if tokens is None else {"tokens_per_s": round(samples_per_s * tokens, 1)}
        if self.flops and self.peak:
            rates["mfu"] = round(samples_per_s * self.flops / self.peak, 4)
        return rates


def throughput(config: Config, data: Data, world: World) -> Throughput:
    """Return what a training sample is worth. Collective: every rank must call it."""
    tokens = getattr(data.train, "tokens_per_sample", None)
    names = world.gather(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else []
    peaks = [peak_flops(name, dtype=multiplied(config)) for name in names]
    known = [peak for peak in peaks if peak]
    if not peaks or len(known) < len(peaks):
        return Throughput(tokens)
    from muster.train.throughput.flops import flops_per_sample  # imports Triton

    return Throughput(tokens, flops_per_sample(config, data) if world.is_first else None, sum(known))


def multiplied(config: Config) -> str:
    """Return the type of the factors of a product: a field of `peaks.Peak`."""
    cast = config.strategy.values.get("param_dtype")
    if cast or config.precision is not Precision.fp32:
        return str(cast or config.precision.name)
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"


def peak_memory(world: World) -> list[float]:
    """Return the most memory that tensors have taken on this rank's device, GiB, in a row of zeros for the other ranks.

    Empty on the CPU. Does not wait for the device.
    """
    if world.device.type != "cuda":
        return []
    row = [0.0] * world.size
    row[world.rank] = torch.cuda.max_memory_allocated(world.device) / GIB
    return row
