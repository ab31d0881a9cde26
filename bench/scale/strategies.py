"""Cost of one optimizer step of each strategy, as a pure function of the job and the world size W.

n = P v is the number of bytes of all parameters, or of all gradients. b samples per rank at any W: the global batch
grows with W. A gather or a reduce-scatter of n bytes over W ranks sends (W-1)/W n bytes per rank in W - 1 rounds
(log2 W if recursive); an all-reduce is one of each. A round takes alpha, a byte beta. Ranks send and receive at the
same time, without contention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.scale.job import ScaledJob
from muster.collectives.algorithm import rounds_of_doubling


@dataclass(frozen=True)
class Traffic:
    """Seconds that a rank takes to send, and bytes that it sends."""

    seconds: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.seconds + other.seconds, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class CostedStep:
    """Cost of one optimizer step. memory_bytes and sent_bytes are the maximum over ranks."""

    compute_s: float
    communication_s: float
    memory_bytes: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds without overlap of communication and computation."""
        return self.compute_s + self.communication_s

    @property
    def least_seconds(self) -> float:
        """Seconds with full overlap of communication and computation."""
        return max(self.compute_s, self.communication_s)


def ddp(job: ScaledJob, world_size: int) -> CostedStep:
    """b F / S + all_reduce(n, W), in buckets; memory P (2 v + o) + b A.

    Assumes: all ranks are equally fast.
    """
    return _step(job, all_reduce(job, job.workload.nbytes, world_size), state=_whole(job))


def zero(job: ScaledJob, world_size: int) -> CostedStep:
    """ddp + gather(n, W) of the parameters that each rank has updated; memory P (2 v + o / W) + b A.

    Assumes: the broadcasts of all owners run in parallel, and together cost one gather.
    """
    work = job.workload
    traffic = all_reduce(job, work.nbytes, world_size) + gather(job, work.nbytes, world_size)
    state = work.parameters * (2 * work.value_bytes + work.optimizer_bytes / world_size)
    return _step(job, traffic, state=state)


def fsdp(job: ScaledJob, world_size: int) -> CostedStep:
    """b F / S + 3 gather(n, W), layer by layer; memory P (2 v + o) / W + two layers + b A.

    Parameters are gathered twice, gradients reduced once.

    Assumes: a layer's parameters are freed after its forward while the next layer's are gathered, and no parameter has
    fewer rows than there are ranks (fully_shard pads it to one row per rank).
    """
    return _step(job, _sharded(job, world_size), state=_whole(job) / world_size + _two_layers(job))


def hybrid(job: ScaledJob, world_size: int) -> CostedStep:
    """fsdp within groups of N + all_reduce(n / N, W / N) between them; memory P (2 v + o) / N + two layers + b A.

    Assumes: the ranks of a group are consecutive, so that a group of a node's size stays within the node.
    """
    group = min(job.group, world_size)
    between = all_reduce(job, job.workload.nbytes / group, world_size // group, apart=group)
    return _step(job, _sharded(job, group) + between, state=_whole(job) / group + _two_layers(job))


def tensor_parallel(job: ScaledJob, world_size: int) -> CostedStep:
    """b F / S + 4 L all_reduce(b T h, T) + all_reduce(n / T, W / T); memory P (2 v + o) / T + b A.

    T ranks share b T samples, with h bytes each between layers. Assumes: layers are fully sharded, no part replicated.
    """
    work, tensor = job.workload, min(job.tensor, world_size)
    activations = work.boundary_bytes * work.samples * tensor
    within = collective(job, 4 * work.layers * activations, tensor, passes=2, calls=4 * work.layers)
    between = all_reduce(job, work.nbytes / tensor, world_size // tensor, apart=tensor)
    return _step(job, within + between, state=_whole(job) / tensor)


def pipeline(job: ScaledJob, world_size: int) -> CostedStep:
    """b F / S (1 + (p-1)/m) + 2 m messages of b p h / m + all_reduce(n / p, W / p).

    Memory P (2 v + o) / p + min(p, m) b A / m.

    p stages share b p samples in m micro-batches: the bubble is (p-1)/(m+p-1) of the step. Assumes: 1F1B, equal stages.
    """
    work, stages, pieces = job.workload, min(job.stages, world_size), job.micro_batches
    handed = work.boundary_bytes * work.samples * stages
    network = job.machine.network(stages)
    there_and_back = Traffic(2 * (pieces * network.alpha_s + handed * network.beta_s), 2 * handed)
    messages = there_and_back if stages > 1 else Traffic()
    traffic = messages + all_reduce(job, work.nbytes / stages, world_size // stages, apart=stages)
    alive = min(stages, pieces) / pieces
    return _step(job, traffic, state=_whole(job) / stages, slower=1 + (stages - 1) / pieces, alive=alive)


def local_sgd(job: ScaledJob, world_size: int) -> CostedStep:
    """b F / S + all_reduce(n, W) / H: parameters are averaged every H steps; memory as ddp; gradients stay local.

    Assumes: averaging every H steps trains as well, which this model does not examine.
    """
    whole = all_reduce(job, job.workload.nbytes, world_size)
    return _step(job, Traffic(whole.seconds / job.every, whole.nbytes / job.every), state=_whole(job))


def parameter_server(job: ScaledJob, world_size: int) -> CostedStep:
    """b F / S + 2 (W-K) (alpha + n / K beta): K servers receive gradients from each trainer and return parameters.

    Memory P (2 v + o) + b A; bytes sent are the larger of a server's and a trainer's. Assumes: synchronous updates;
    servers add and update in no time.
    """
    servers = min(job.servers, world_size - 1)
    share, trainers = job.workload.nbytes / servers, world_size - servers
    network = job.machine.network(world_size)
    seconds = 2 * trainers * (network.alpha_s + share * network.beta_s)
    return _step(job, Traffic(seconds, max(trainers * share, job.workload.nbytes)), state=_whole(job))


STRATEGIES: dict[str, Callable[[ScaledJob, int], CostedStep]] = {
    each.__name__: each for each in (ddp, zero, fsdp, hybrid, tensor_parallel, pipeline, local_sgd, parameter_server)
}


def all_reduce(job: ScaledJob, nbytes: float, ranks: int, *, apart: int = 1) -> Traffic:
    """Return the traffic of an all-reduce: 2 (W-1)/W n bytes, in 2 (W-1) rounds for each bucket."""
    return collective(job, nbytes, ranks, passes=2, calls=math.ceil(nbytes / job.bucket_bytes), apart=apart)


def gather(job: ScaledJob, nbytes: float, ranks: int) -> Traffic:
    """Return the traffic of a gather or a reduce-scatter: (W-1)/W n bytes in W - 1 rounds."""
    return collective(job, nbytes, ranks, passes=1, calls=1)


def collective(job: ScaledJob, nbytes: float, ranks: int, *, passes: int, calls: int, apart: int = 1) -> Traffic:
    """Return the traffic of `calls` collectives with `nbytes` in total, of `passes` passes each.

    apart: distance between the ranks.
    """
    if ranks == 1:
        return Traffic()
    network = job.machine.network(ranks, apart=apart)
    rounds = calls * passes * (rounds_of_doubling(ranks) if job.recursive else ranks - 1)
    sent = passes * (ranks - 1) / ranks * nbytes
    return Traffic(rounds * network.alpha_s + sent * network.beta_s, sent)


def _sharded(job: ScaledJob, ranks: int) -> Traffic:
    work = job.workload
    return collective(job, work.nbytes, ranks, passes=3, calls=work.layers)


def _whole(job: ScaledJob) -> float:
    work = job.workload
    return work.parameters * (2 * work.value_bytes + work.optimizer_bytes)


def _two_layers(job: ScaledJob) -> float:
    return 2 * job.workload.nbytes / job.workload.layers


def _step(job: ScaledJob, traffic: Traffic, *, state: float, slower: float = 1.0, alive: float = 1.0) -> CostedStep:
    work = job.workload
    compute_s = work.samples * work.flops / job.machine.flops_per_s * slower
    return CostedStep(compute_s, traffic.seconds, state + alive * work.samples * work.activation_bytes, traffic.nbytes)
