"""Try a user's own metric, before its first update, as if several ranks had the same samples.

Its value then has to be that of one rank which has all of them: a metric that forgets to add something up over the ranks gives
another one. The trial is in a child of this process: metrics keep caches, write files and change what they are given, and none of that
may reach the run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from muster import process
from muster.train.objectives.samples import bytes_per_sample, few, repeated, telling
from muster.train.objectives.sandbox import confine
from muster.train.objectives.undeclared import equal, undeclared
from muster.train.objectives.uniform_ranks import Untried, uniform_ranks

FEWEST, TRIED, TRIED_BYTES = 2, 64, 16 << 20
"""The fewest and the most samples with which a metric is tried, and about the most bytes of them."""
RANKS, TRIAL_S = 3, 10.0
NEARLY = 0.05
"""A relative difference that may be the rounding of sums in another order; a larger one is refused."""


@dataclass(frozen=True)
class Trial:
    """What a metric was seen to do.

    said: how its value differs on several ranks. counts: what it counts undeclared. unknown: names of values that show
    nothing, being 0, NaN, another one each time, or nearly that of one rank. talks: whether `update` communicates.
    """

    said: str = ""
    counts: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    talks: bool = False


def tried(metric: Any, samples: tuple[Any, Any], build: Callable[[], Any] | None = None) -> Trial | None:
    """Return what `metric`, before its first update, does as if `RANKS` ranks all had the same samples; None if it cannot be tried.

    Not collective. The child is confined, prints nothing, and is ended after `TRIAL_S`.
    build: makes the metric anew: it may have asked for the number of ranks when it was made.
    """
    if sys.platform != "linux":
        return None
    try:
        samples = few(samples, min(TRIED, max(FEWEST, TRIED_BYTES // bytes_per_sample(samples))))
        samples = pytree.tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, samples)
        if _uses_cuda() and hasattr(metric, "to"):
            metric = copy.deepcopy(metric).to("cpu")
        tempfile.gettempdir()  # it writes a file to find out, and a confined process cannot
        reads, writes = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, of threads: as in a loader's worker, none of them is here
            child = os.fork()
    except Exception:
        return None
    if not child:
        try:
            os.close(reads)
            os.write(writes, json.dumps(_in_child(metric, samples, build, writes)).encode())
        finally:
            os._exit(0)
    os.close(writes)
    said, deadline = b"", time.monotonic() + TRIAL_S
    try:
        answers = select.poll()  # any number of files may be open
        answers.register(reads, select.POLLIN | select.POLLHUP)
        while (left := deadline - time.monotonic()) > 0 and answers.poll(left * 1000):
            if not (more := os.read(reads, 65536)):
                break
            said += more
    finally:
        os.close(reads)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    try:
        found = json.loads(said)
        return Trial(found["said"], tuple(found["counts"]), tuple(found["unknown"]), found["talks"])
    except (ValueError, KeyError, TypeError):
        return None


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _in_child(
    metric: Any, samples: tuple[Any, Any], build: Callable[[], Any] | None, pipe: int
) -> dict[str, str | bool | list[str]]:
    """Try the metric, in a process of its own, which answers by `pipe`. Raises an error if it cannot be tried."""
    process.die_with_parent()
    process.call_it("muster-trial")
    with open(os.devnull, "r+b") as nothing:
        for stream in range(3):
            os.dup2(nothing.fileno(), stream)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")
    torch.set_num_threads(1)  # the threads of this process are not here
    copy._deepcopy_dispatch[Tensor] = _clone  # type: ignore[attr-defined]  # torch's own way imports torch._dynamo, of 1.3 s
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    confine(pipe)
    said, unknown, talks = _judged(lambda _: copied(metric), samples)
    if said:  # it may have taken the number of ranks when it was made
        try:
            said, unknown, talks = _judged(_made_anew(build), samples)
        except Exception:  # it cannot be made here
            if _may_know(metric, world_size):
                raise
    return {"said": said, "counts": _counts(metric, samples), "unknown": sorted(unknown), "talks": talks}


def _clone(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Return a copy; copies of tensors that share memory share it, too."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        copied = tensor.detach().clone()
    else:
        storage = tensor.untyped_storage()
        key = ("storage", storage.data_ptr())
        if key not in memo:
            memo[key] = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(memo[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    return copied


def _made_anew(build: Callable[[], Any] | None) -> Callable[[int], Any]:
    made = dict[int, Any]()

    def of(ranks: int) -> Any:
        if build is None:
            raise Untried
        if ranks not in made:
            made[ranks] = build()
        return copied(made[ranks])

    return of


def _judged(make: Callable[[int], Any], samples: tuple[Any, Any]) -> tuple[str, set[str], bool]:
    """Return how the value differs for several ranks, the names of values that show nothing, and whether `update` communicates.

    make: number of ranks -> the metric before its first update.
    """

    talks = False

    def value(ranks: int, updates: int, samples: tuple[Any, Any]) -> dict[str, float]:
        nonlocal talks
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        with uniform_ranks(ranks) as collectives:
            each = make(ranks)
            each.reset()
            try:
                before = collectives.calls
                for _ in range(updates):
                    each.update(*copy.deepcopy(samples))
                talks |= ranks > 1 and collectives.calls > before
                return numbers(each.compute())
            finally:
                each.reset()

    known, unknown = set[str](), set[str]()
    for number, tried in enumerate([samples, *telling(samples)]):
        try:
            spread, again = value(RANKS, 1, tried), value(RANKS, 1, tried)
            ones = [value(1, RANKS, tried)]
        except Exception:
            if not number:
                raise
            continue  # samples of our own, which it need not accept
        with contextlib.suppress(Exception):  # samples that cannot be put together
            ones.append(value(1, 1, repeated(tried, RANKS)))
        for name, here in spread.items():
            there = [one.get(name, math.nan) for one in ones]
            if math.isnan(here) or any(map(math.isnan, there)) or not _is_close(here, again.get(name, math.nan)):
                unknown.add(name)
            elif any(_is_close(here, each) for each in there):
                (known if here else unknown).add(name)
            elif any(_is_close(here, each, rel_tol=NEARLY) for each in there):
                unknown.add(name)
            else:
                label = f"{name} " if name else ""
                said = f"{label}{here:.6g} for samples on {RANKS} ranks and {there[0]:.6g} for the same on one"
                return said, set(), talks
    return "", unknown - known, talks


def _counts(metric: Any, samples: tuple[Any, Any]) -> list[str]:
    """Return what a user's own torchmetrics class counts beside its declared states, and its value depends on."""
    once, twice = copied(metric), copied(metric)
    if once is metric or twice is metric:
        return []
    with uniform_ranks(1):
        for each, updates in ((once, 1), (twice, 2)):
            each.reset()
            for _ in range(updates):
                each.update(*copy.deepcopy(samples))
        first, second = undeclared(once), undeclared(twice)
        changed = [key for key in second if key not in first or not equal(first[key], second[key])]
        return [key for key in changed if _depends(twice, once, key, samples)]


def _depends(metric: Any, other: Any, key: str, samples: tuple[Any, Any]) -> bool:
    """Return whether `metric` goes on to another value with what `other` keeps as `key`."""

    def goes_on(each: Any) -> dict[str, float]:
        each.update(*copy.deepcopy(samples))
        return numbers(each.compute())

    here, there = copied(metric), copied(metric)
    vars(there).pop(key, None)
    if key in vars(other):
        vars(there)[key] = copy.deepcopy(vars(other)[key])
    try:
        return not _are_close(goes_on(here), goes_on(there))
    except Exception:
        return True


def _may_know(metric: Any, world_size: int) -> bool:
    """Return whether an attribute may be the number of ranks, or 1 / it."""
    parts = metric.modules() if isinstance(metric, nn.Module) else [metric]
    kept = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    return world_size > 1 and any(
        isinstance(each, int | float) and each in (world_size, 1 / world_size) for each in kept
    )


def numbers(value: Any) -> dict[str, float]:
    """Return the numbers of a metric's value by name; a single one by the empty name."""
    return {str(key): float(one) for key, one in value.items()} if isinstance(value, Mapping) else {"": float(value)}


def _are_close(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(_is_close(one[key], other[key]) for key in one)


def _is_close(one: float, other: float, *, rel_tol: float = 1e-4) -> bool:
    return math.isclose(one, other, rel_tol=rel_tol, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))


def copied(metric: Any) -> Any:
    try:
        return copy.deepcopy(metric)
    except Exception:
        return metric


def is_own(metric: Any) -> bool:
    """Return whether any of it is of a class that is not torchmetrics' own."""
    parts = metric.modules() if isinstance(metric, nn.Module) else [metric]
    return any(not type(each).__module__.startswith(("torchmetrics.", "torch.")) for each in parts)
