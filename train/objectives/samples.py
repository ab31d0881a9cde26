"""Parts and variations of the samples that a metric takes, a pair of outputs and targets, for its trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def few(samples: Any, most: int) -> Any:
    """Return copies of the first `most` of `samples`, a pair of outputs and targets: of tensors and lists as long as the targets."""
    count = _count(samples)

    def cut(each: Any) -> Any:
        if isinstance(each, list):
            return pytree.tree_map(lambda one: one.detach().clone() if isinstance(one, Tensor) else one, each[:most])
        if isinstance(each, Tensor):
            return (each.detach()[:most] if _is_of(each, count) else each.detach()).clone()
        return each

    return pytree.tree_map(cut, samples, is_leaf=lambda each: isinstance(each, list) and len(each) == count)


def bytes_per_sample(samples: Any) -> int:
    """Return about how many bytes of tensors belong to one sample."""
    count = _count(samples)
    tensors = (each for each in pytree.tree_leaves(samples) if isinstance(each, Tensor) and _is_of(each, count))
    return max(1, sum(each.nbytes // max(1, count) for each in tensors))


def repeated(samples: Any, times: int) -> Any:
    """Return all `samples` several times over, one after the other."""
    count = _count(samples)

    def more(each: Any) -> Any:
        if _is_of(each, count):
            return torch.cat([each] * times) if isinstance(each, Tensor) else each * times
        return each

    return pytree.tree_map(more, samples, is_leaf=lambda each: isinstance(each, list) and len(each) == count)


def telling(samples: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield samples of all classes, every other one told right, if the outputs are scores of classes and the targets classes.

    The first samples may have a value of 0, such as the recall of an untrained model, or none at all.
    """
    outputs, targets = samples
    is_class = isinstance(targets, Tensor) and not targets.is_floating_point() and not targets.is_complex()
    if not is_class or targets.dtype is torch.bool or not targets.dim():
        return
    count: int | None = None

    def told(scores: Any) -> Any:
        nonlocal count
        if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() != targets.dim() + 1:
            return scores
        if scores.shape[:-1] == targets.shape:
            at = -1
        elif (scores.shape[0], *scores.shape[2:]) == targets.shape:
            at = 1
        else:
            return scores
        count = count or scores.shape[at]
        right = torch.full_like(scores, -9.0).scatter_(at, _classes(targets, scores.shape[at]).unsqueeze(at), 9.0)
        right[1::2] = scores[1::2]
        return right

    outputs = pytree.tree_map(told, outputs)
    if count:
        yield outputs, _classes(targets, count).to(targets.dtype)


def _classes(like: Tensor, count: int) -> Tensor:
    """Return classes below `count` in turn: samples 0 and 1 have class 0, 2 and 3 class 1."""
    each = torch.arange(len(like)) // 2 % count
    return each.view(-1, *[1] * (like.dim() - 1)).expand(like.shape)


def _count(samples: Any) -> int:
    """Return the number of samples: the length of the targets, or else of the outputs."""
    for each in reversed(samples):
        while isinstance(each, Mapping) and each:
            each = next(iter(each.values()))
        if (isinstance(each, Tensor) and each.dim()) or isinstance(each, list | tuple):
            return len(each)
    return 0


def _is_of(each: Any, count: int) -> bool:
    if isinstance(each, Tensor):
        return bool(each.dim()) and len(each) == count
    return isinstance(each, list) and len(each) == count
