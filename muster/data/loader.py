"""Load the plan's micro-batches onto the device. The plan chooses the samples; this module fetches them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from muster import process
from muster.data.fetch import Fetch
from muster.data.onto_device import onto
from muster.data.stream import Stream, read_whole
from muster.errors import ConfigError, DataError
from muster.process import ranks_on_host
from muster.sample_plan import MicroBatch, Plan, Share

SIGCHLD_S = 1.0
"""Time in seconds within which the signal of a worker's death arrives."""
AHEAD_S = 4e-3
AHEAD_BYTES = 4 << 20
"""Limits in seconds and bytes on batches made ahead, see several_at_a_time."""
MOST = 16
"""Default maximum of a rank's workers."""
SHARED = "/dev/shm"


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device. `count` of its samples count (see sample_plan.MicroBatch), out of `total` in the step.

    first: position of its first sample in the epoch.
    planned: `count` with the samples that were left out; None: there are none.
    own: what its mean loss is over, a number or a tensor [], if not samples.
    of: returns what the global batch has of that; it may wait for other ranks.
    """

    inputs: Any
    targets: Any
    count: int
    total: int
    slice: int = 0
    first: int = 0
    own: Any = None
    of: Callable[[], Any] | None = None
    planned: int | None = None

    @property
    def part(self) -> float:
        """The part of the step's planned samples that are planned for this micro-batch."""
        return (self.count if self.planned is None else self.planned) / self.total

    @property
    def share(self) -> Any:
        """The weight of the micro-batch's mean loss in that of the step, a number or a tensor []."""
        return ratio(self.own, self.of()) if self.of else self.part


def ratio(count: Any, total: Any) -> Any:
    """Return a part of a total, numbers or tensors []; 0 of nothing."""
    if isinstance(total, torch.Tensor):
        return torch.where(total == 0, 0.0, count / total)
    return count / total if total else 0.0


@dataclass(frozen=True)
class LoaderConfig:
    """How samples are fetched. `share` says which of them are a rank's.

    num_workers: processes that load samples; None: none on the CPU and for a stream, else `by_default`.
    max_bad: number of unreadable samples to tolerate; None: none. replaces_bad: whether the next one takes the place of each, or none.
    collate, adapter: a user's own functions; None: torch's default_collate, and the default of `split`.
    """

    share: Share
    device: torch.device
    seed: int = 0
    num_workers: int | None = 0
    max_bad: int | None = None
    replaces_bad: bool = True
    collate: Callable[[list[Any]], Any] | None = None
    adapter: Callable[[Any], Any] | None = None


def batches(dataset: Any, plan: Plan, steps: range, config: LoaderConfig) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, on the device.

    One loader serves the whole range, across epochs: its workers start once, and nothing stalls at an epoch boundary.

    For a GPU the samples come from `dataset.compact()`, if it exists, and `dataset.expand(inputs)` converts them on the device
    to the inputs that `dataset` gives. A user's own functions always get the latter.
    """
    on_gpu = config.device.type == "cuda"
    is_own = config.collate is not None or config.adapter is not None
    expand = getattr(dataset, "expand", None) if on_gpu and not is_own and hasattr(dataset, "compact") else None
    fetch = Fetch(
        dataset.compact() if expand else dataset,
        seed=config.seed,
        max_bad=config.max_bad,
        replaces_bad=config.replaces_bad,
        collate=config.collate,
        adapter=config.adapter,
    )
    if on_gpu:
        made = _micro_batches(_loader(fetch, plan, steps, config), plan, steps, config)
        return onto(
            config.device, made, _mover(config.device, expand), tensors=_tensors, ahead=not isinstance(dataset, Stream)
        )
    if config.num_workers:
        return _micro_batches(_loader(fetch, plan, steps, config), plan, steps, config)
    made = _micro_batches(map(fetch.__getitems__, _shares(plan, steps, config)), plan, steps, config)
    return several_at_a_time(made) if fetch.is_keyed else made


def _micro_batches(fetched: Iterable[Any], plan: Plan, steps: range, config: LoaderConfig) -> Iterator[list[Batch]]:
    fetched = _plainly(iter(fetched))
    for step in steps:
        total, before = plan.count(step), step % plan.steps_per_epoch * plan.batch_size
        cuts = config.share.cuts(total)
        yield [
            Batch(inputs, targets, count, total, number, before + begin, planned=end - begin)
            for (number, begin, end), (inputs, targets, count) in zip(cuts, islice(fetched, len(cuts)), strict=True)
        ]


def _mover(device: torch.device, expand: Callable[[Any], Any] | None) -> Callable[[list[Batch]], list[Batch]]:
    def inputs_of(batch: Batch) -> Any:
        moved = to(device, batch.inputs)
        return expand(moved) if expand else moved

    def move(batches: list[Batch]) -> list[Batch]:
        return [replace(batch, inputs=inputs_of(batch), targets=to(device, batch.targets)) for batch in batches]

    return move


def several_at_a_time(made: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
    """Yield the same items, made in blocks of some milliseconds; one by one if they are large or slow to make.

    Between two steps the processor's caches hold the model, so Python starts cold each time it makes a batch.
    """
    number, last = 1, list[Batch]()
    while True:
        block, failure, began = list[list[Batch]](), None, time.perf_counter()
        try:
            for item in islice(made, number):
                block.append(item)  # one by one: items made before a failure are kept
        except Exception as error:
            failure = error
        seconds = max(time.perf_counter() - began, 1e-9)
        yield from block
        if failure:
            raise failure
        if len(block) < number:
            return
        most = AHEAD_BYTES // max(1, _bytes(_tensors(block[-1])))
        may_grow = last and not _places(last) & _places(block[-1])
        number = max(1, min(most, 2 * number, int(number * AHEAD_S / seconds))) if may_grow else 1
        last = block[-1] if most else []


def _tensors(micro_batches: list[Batch]) -> list[Any]:
    return [(batch.inputs, batch.targets) for batch in micro_batches]


def _places(micro_batches: list[Batch]) -> set[int]:
    """Return the data pointers of the tensors: a dataset that overwrites earlier batches must not be read ahead."""
    leaves = pytree.tree_leaves(_tensors(micro_batches))
    return {leaf.data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()}


def _shares(plan: Plan, steps: range, config: LoaderConfig) -> Iterator[MicroBatch]:
    return (micro for step in steps for micro in plan.share(step, config.share))


def _loader(fetch: Fetch, plan: Plan, steps: range, config: LoaderConfig) -> DataLoader[Any]:
    workers = config.num_workers
    if workers is None and isinstance(fetch.dataset, Stream):
        workers = 0  # each worker would read all of it
    if workers != 0:
        samples = max((end - begin for _, begin, end in config.share.cuts(plan.batch_size)), default=0)
        batch_bytes = samples * _bytes(fetch.sample(0))
        workers = by_default(batch_bytes) if workers is None else workers
        check_shared_memory(batch_bytes, num_workers=workers)
        process.end_loader_workers_at_exit()
    return DataLoader(
        fetch,
        batch_sampler=_shares(plan, steps, config),  # type: ignore[arg-type]
        collate_fn=_unchanged,
        num_workers=workers,
        worker_init_fn=partial(_start_worker, reads_stream=isinstance(fetch.dataset, Stream)),
        pin_memory=config.device.type == "cuda",
        generator=torch.Generator(),  # the default draws from the global one, which a resumed run must find unchanged
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(_: int, *, reads_stream: bool) -> None:
    # torchrun signals the whole process group: a worker killed by SIGTERM would prevent the last checkpoint.
    process.ignore(*process.STOP_SIGNALS)
    process.call_it(process.LOADER_WORKER)
    process.die_with_parent()  # do not outlive a rank that was killed
    if reads_stream:
        read_whole()


def _bytes(value: Any) -> int:
    return sum(int(leaf.nbytes) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor | np.ndarray))


def _plainly(fetched: Iterator[Any]) -> Iterator[Any]:
    """Raise a worker's DataError without the traceback that the loader wraps around it.

    If a worker was killed, wait for torch's error that says so: SIGCHLD arrives a moment after the broken pipe.
    """
    try:
        yield from fetched
    except DataError as error:
        raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from None
    except (EOFError, OSError):
        time.sleep(SIGCHLD_S)
        raise


def to(device: torch.device, value: Any) -> Any:
    if device.type == "cpu":
        return value  # samples are made there
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def by_default(batch_bytes: int) -> int:
    """Return the number of workers of a rank on a GPU: its share of the host's cores, as far as half of the free shared memory
    has room for their micro-batches of `batch_bytes`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(MOST, max(1, cores // ranks_on_host()))
    if not os.path.isdir(SHARED):
        return most
    batches = shutil.disk_usage(SHARED).free // 2 // ranks_on_host() // max(1, batch_bytes)
    return max(0, min(most, (batches - 1) // 2))


def check_shared_memory(batch_bytes: int, *, num_workers: int, place: str = SHARED) -> None:
    """Check that this host's shared memory holds the batches that all its ranks' workers pass.

    When it is full, a batch is lost and the trainer waits for it forever. Raises ConfigError: the batches in flight do not fit.
    """
    if not os.path.isdir(place):
        return
    ranks = ranks_on_host()
    needed, free = ranks * batch_bytes * (2 * num_workers + 1), shutil.disk_usage(place).free
    if needed > free:
        of = f"the {ranks} ranks of this host need" if ranks > 1 else "this rank needs"
        raise ConfigError(
            f"loader.num_workers={num_workers}: {of} about {needed / 2**20:.1f} MiB of {place}, and {free / 2**20:.1f} are free: make it "
            "larger (docker --shm-size, a Kubernetes emptyDir with medium: Memory), or set fewer workers or a smaller micro_batch_size"
        )
