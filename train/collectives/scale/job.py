"""What a prediction is made from: what is trained, on what, and how it is cut up."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.collectives.model import Network


@dataclass(frozen=True)
class Workload:
    """A model and what a rank trains of it in one step.

    parameters: P, how many. layers: L, alike, with P / L parameters each. samples: b, of one rank and step.
    flops: of forward and backward of one sample. boundary_bytes: what one sample hands from a layer to the next.
    activation_bytes: what backward needs of one sample, all layers together.
    value_bytes: of a parameter, and of its gradient, as they are kept and sent. optimizer_bytes: for each parameter.
    """

    parameters: float
    layers: int
    samples: float
    flops: float
    boundary_bytes: float
    activation_bytes: float
    value_bytes: float = 4
    optimizer_bytes: float = 8

    @property
    def nbytes(self) -> float:
        """n: of all parameters, or of all gradients."""
        return self.parameters * self.value_bytes


def transformer(
    *,
    parameters: float,
    layers: int,
    hidden: int,
    sequence: int,
    samples: float,
    value_bytes: float,
    optimizer_bytes: float,
) -> Workload:
    """A decoder of `hidden` channels on samples of `sequence` tokens, nothing recomputed, attention never in memory.

    6 P operations a token (Kaplan et al., "Scaling Laws for Neural Language Models", 2020); 34 bytes a channel, token
    and layer at two bytes a value (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
    """
    values = sequence * hidden
    return Workload(
        parameters, layers, samples,
        flops=6 * parameters * sequence,
        boundary_bytes=values * value_bytes,
        activation_bytes=17 * values * layers * value_bytes,
        value_bytes=value_bytes, optimizer_bytes=optimizer_bytes,
    )  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Ranks in nodes of `node_size`: within a node they talk over `inner`, else over `outer`. flops_per_s: of a rank."""

    flops_per_s: float
    outer: Network
    inner: Network
    node_size: int = 1

    def network(self, ranks: int, *, apart: int = 1) -> Network:
        """What connects `ranks` ranks, each `apart` from the one before: the slower one as soon as they leave a node."""
        return self.inner if ranks * apart <= self.node_size else self.outer


@dataclass(frozen=True)
class Job:
    """A workload on a machine, and the sizes that a strategy is told.

    group: ranks of a shard group (hybrid). tensor: ranks that share a layer. stages, micro_batches: of a pipeline.
    every: steps between two averages of local SGD. servers: of the ranks. bucket_bytes: of an all-reduce of gradients.
    recursive: collectives take log2 W rounds, as halving and doubling does, in place of a ring's W - 1.
    """

    workload: Workload
    machine: Machine
    group: int = 8
    tensor: int = 8
    stages: int = 8
    micro_batches: int = 32
    every: int = 16
    servers: int = 1
    bucket_bytes: float = field(default=25 * 2**20)
    recursive: bool = False
