"""How fast a run is, in the terms of its field: tokens per second, utilization of the device, its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from muster.data.generators import kept_generators
from muster.train.config.keys import Config, Precision
from muster.train.config.parts import build
from muster.train.data.batches import first_inputs
from muster.train.data.load import Data
from muster.train.models.model_json import filled_in
from muster.train.strategies.step.call import Call
from muster.world.group import World

GIB = 2**30
OF_LINES = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "peak_memory_gib")
"""What a `train` line of the trainer may have beside what every record has."""


class Peak(NamedTuple):
    """Peak rates of dense matrix products in TFLOP/s, by the type that is multiplied; None: not on tensor cores.

    NVIDIA's data sheets give twice these numbers where they count structured sparsity.
    """

    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float


H100_SXM = Peak(bf16=989.4, fp16=989.4, tf32=494.7, fp32=66.9)
A100 = Peak(bf16=312.0, fp16=312.0, tf32=156.0, fp32=19.5)
V100_SXM = Peak(bf16=None, fp16=125.0, tf32=None, fp32=15.7)
PEAKS = {
    "NVIDIA H200": H100_SXM,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 PCIe": Peak(bf16=756.0, fp16=756.0, tf32=378.0, fp32=51.0),
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "Tesla V100-SXM2-16GB": V100_SXM,
    "Tesla V100-SXM2-32GB": V100_SXM,
}
"""By torch.cuda.get_device_name().

Source: NVIDIA's data sheets and architecture papers. H100: "NVIDIA H100 Tensor Core GPU Architecture", 2022, table 2 (SXM5
and PCIe); H200: its data sheet, the same rates. A100: "NVIDIA A100 Tensor Core GPU Architecture", 2020, table 1. V100:
"NVIDIA Tesla V100 GPU Architecture", 2017, table 1.
"""


@dataclass(frozen=True)
class Throughput:
    """What a sample is worth in the terms of its field.

    tokens: tokens of a sample; None if the data is not text. flops: operations of forward and backward for a sample, on rank 0; not
    counted if the peak is not known. peak: FLOP/s of all ranks' devices together. None: not known.
    """

    tokens: int | None = None
    flops: float | None = None
    peak: float | None = None

    def rates(self, samples_per_s: float, counted: float | None = None) -> dict[str, float]:
        """Return `tokens_per_s` and `mfu`, as far as they are known.

        `counted`: tokens of a sample that the objective counts, on average since the last line; None: all that it has.
        mfu: model FLOPs utilization, the rate of the operations that the model needs as a share of the devices' peak: 0 to 1.

        Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
        """
        tokens = counted if self.tokens and counted is not None else self.tokens
        rates = {} if tokens is None else {"tokens_per_s": round(samples_per_s * tokens, 1)}
        if self.flops and self.peak:
            rates["mfu"] = round(samples_per_s * self.flops / self.peak, 4)
        return rates


def throughput(config: Config, data: Data, world: World) -> Throughput:
    """Return what a training sample is worth. Collective."""
    tokens = getattr(data.train, "tokens_per_sample", None)
    names = world.gather(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else []
    peaks = [peak_flops(name, dtype=multiplied(config)) for name in names]
    known = [peak for peak in peaks if peak]
    if not peaks or len(known) < len(peaks):
        return Throughput(tokens)

    return Throughput(tokens, flops_per_sample(config, data) if world.is_first else None, sum(known))


def multiplied(config: Config) -> str:
    """Return the type of the factors of a product: a field of `Peak`."""
    cast = config.strategy.values.get("param_dtype")
    if cast or config.precision is not Precision.fp32:
        return str(cast or config.precision.name)
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"


def peak_memory(world: World) -> list[float]:
    """Return this rank's peak memory of tensors, GiB, in a row of zeros for the other ranks; empty on the CPU. Does not wait for the device."""
    if world.device.type != "cuda":
        return []
    row = [0.0] * world.size
    row[world.rank] = torch.cuda.max_memory_allocated(world.device) / GIB
    return row


def peak_flops(device: str, *, dtype: str) -> float | None:
    """Return the peak rate of `device` in FLOP/s for products of `dtype` (a field of Peak); None if it is not known."""
    rate: float | None = getattr(PEAKS.get(device), dtype, None)
    return rate * 1e12 if rate else None


PASSES = 3
"""A step's operations in forward passes: backward takes two, for the gradients of inputs and of weights."""


def flops_per_sample(config: Config, data: Data) -> float | None:
    """Return the operations of forward and backward for one training sample; None if they cannot be counted.

    The model is built without storage and called once, on the device `meta`. What is counted are the matrix products,
    convolutions and attention of the forward pass, a multiplication and an addition as two, three times: for a
    transformer this is PaLM's 6N + 12LHQT per token, N the parameters of its products, L layers, H heads of size Q, T
    tokens. As there, a causal attention counts in full, and recomputed activations do not count. A model with frozen
    parameters is not counted, as its backward pass takes less.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    if config.freeze:
        return None
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    try:
        inputs = first_inputs(config, data.train, size=1)
        with kept_generators(), torch.device("meta"):
            model = build(config.model, **filled_in(config.model, data)).eval()
            inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                Call(model)(model, inputs)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            return None
    except Exception:  # a user's model may need real tensors: the run goes on without the figure
        return None
    return float(PASSES * counter.get_total_flops()) or None
