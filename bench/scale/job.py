"""Inputs of a prediction: the workload, the machine, and how the work is divided."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.collectives.algorithm import Network


@dataclass(frozen=True)
class Workload:
    """A model, and the work of a rank in one step.

    parameters: P, number of parameters. layers: L equal layers, with P / L parameters each.
    samples: b, per rank and step. flops: operations of forward and backward per sample.
    boundary_bytes: bytes per sample passed from a layer to the next.
    activation_bytes: bytes per sample kept for backward, over all layers.
    value_bytes: bytes of a parameter, and of its gradient, stored and sent. optimizer_bytes: bytes per parameter.
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
        """n: bytes of all parameters, or of all gradients."""
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
    """Return the workload of a decoder with `hidden` channels on samples of `sequence` tokens.

    Assumes no recomputation, and attention that is never stored. 6 P operations per token; 34 bytes per channel, token
    and layer at two bytes per value.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models", 2020; Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models", 2022.
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
    """Nodes of `node_size` ranks, connected by `inner` within a node, else by `outer`. flops_per_s: per rank."""

    flops_per_s: float
    outer: Network
    inner: Network
    node_size: int = 1

    def network(self, ranks: int, *, apart: int = 1) -> Network:
        """Return the network of `ranks` ranks at a distance of `apart`: `outer` if they do not fit into one node."""
        return self.inner if ranks * apart <= self.node_size else self.outer


@dataclass(frozen=True)
class ScaledJob:
    """A workload on a machine, and the sizes of the strategies.

    group: ranks of a shard group (hybrid). tensor: ranks that share a layer. stages, micro_batches: of a pipeline.
    every: steps between two averages of local SGD. servers: number of parameter servers among the ranks.
    bucket_bytes: bytes per all-reduce of gradients.
    recursive: True if collectives take log2 W rounds, as halving and doubling, instead of a ring's W - 1.
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
