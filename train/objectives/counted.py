"""What an objective's mean is over: samples, or what it counts, such as the labels that are not left out.

A micro-batch's mean weighs as its count over that of the global batch: (x1 / n1 + x2 / n2) / 2 is not (x1 + x2) / (n1 + n2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from muster.code_location import defined, name_of
from muster.errors import ConfigError
from muster.train.config.keys import Config
from muster.world.counts import counted as checked

Count = Callable[[Any, Any], Any]
"""(inputs, targets) -> what the mean over this micro-batch is over, a number or a tensor []; None: its samples."""
IGNORED = -100
"""torch's default of `ignore_index`, which Hugging Face's models use, too."""
LABELS = "labels"
FEW = 256
"""Labels that Python counts sooner than NumPy."""
OWN = ("torch", "muster")
"""The packages whose losses are known."""


def count_of(objective: Any, model: Any = None) -> Count | None:
    """Return what `objective` counts; None if its mean is over samples, or nobody knows over what.

    An objective's own method `count(targets)` comes first. torch's cross_entropy and nll_loss, and their modules, leave out the labels
    `ignore_index`, and take a mean weighted by `weight`. `model_loss` of one of Hugging Face's models leaves out the labels -100. A class
    that is derived from one of these and computes its loss itself has to define `count` again.
    """
    given = dict[str, Any]()
    while isinstance(objective, partial):
        objective, given = objective.func, {**objective.keywords, **given}
    if callable(own := getattr(objective, "count", None)):
        if getattr(own, "__func__", own) is not labels:
            return lambda inputs, targets: own(targets)
        return Labels() if _says_again(objective) else None
    if _package(objective) not in OWN:
        return None
    if getattr(objective, "of_model", False):
        return partial(_model_labels, is_shifted=_predicts_next(model)) if hasattr(model, "loss_function") else None
    if isinstance(objective, nn.CrossEntropyLoss | nn.NLLLoss):
        given = {"weight": objective.weight, "ignore_index": objective.ignore_index}
    elif objective is not F.cross_entropy and objective is not F.nll_loss:
        return None
    return Labels(given.get("ignore_index", IGNORED), given.get("weight"))


def _package(objective: Any) -> str:
    """Return the package of the function that computes the loss: a class may be derived from one of torch's."""
    kind = type(objective)
    function = objective if hasattr(objective, "__name__") else kind.__call__
    if function is nn.Module.__call__:
        function = kind.forward
    return str(getattr(function, "__module__", "")).partition(".")[0]


def _says_again(objective: Any) -> bool:
    """Return whether the class that has `count` is the one that computes the loss, or is derived from it."""
    kinds = type(objective).__mro__
    first = next(kind for kind in kinds if "count" in vars(kind) or "__call__" in vars(kind))
    return "count" in vars(first)


def labels(targets: Any, *, ignored: int = IGNORED, weight: Tensor | None = None) -> Tensor | None:
    """Return the number of integer labels that are not `ignored`, or the sum of their classes' weights, [].

    None for other targets: with probabilities of classes, the mean is over samples.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    kept = targets != ignored
    if weight is None:
        return kept.sum()
    return torch.where(kept, weight.to(targets.device).double()[targets.clamp(0, len(weight) - 1)], 0.0).sum()


class Labels:
    def __init__(self, ignored: int = IGNORED, weight: Tensor | None = None):
        self.ignored, self.weight = ignored, weight

    def __call__(self, inputs: Any, targets: Any) -> Tensor | None:
        return labels(targets, ignored=self.ignored, weight=self.weight)

    def number(self, inputs: Any, targets: Any) -> Any:
        """Return the count on the CPU as a number: on a small batch torch's operations take ten times as long."""
        if self.weight is not None or not isinstance(targets, Tensor) or targets.is_floating_point():
            return self(inputs, targets)
        if targets.dim() == 1 and len(targets) <= FEW:
            return len(targets) - targets.tolist().count(self.ignored)
        return int(np.count_nonzero(targets.numpy() != self.ignored))


def _model_labels(inputs: Any, targets: Any, *, is_shifted: bool) -> Tensor | None:
    """Count the labels of the model's own loss: its input `labels`, without the first if each output predicts the next."""
    given = inputs.get(LABELS) if hasattr(inputs, "get") else None
    return labels(given[..., 1:] if is_shifted else given) if isinstance(given, Tensor) else None


def _predicts_next(model: Any) -> bool:
    """Return whether the loss of a transformers model compares each output with the label after it; without `loss_type`, it is ForCausalLMLoss."""
    kind = getattr(model, "loss_type", None) or "CausalLM"
    has_decoder_of_its_own = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return not has_decoder_of_its_own and any(each in kind for each in ("CausalLM", "ConditionalGeneration"))


def counted(
    count: Count | None, inputs: Any, targets: Any, samples: int, *, objective: Any, waits: bool = False
) -> Any:
    """Return what a micro-batch of `samples` samples has: a number, or a tensor [] if the objective gives one.

    waits: return a number in any case, for which a device is waited for. Raises ConfigError: `objective.count` gives no number.
    """
    ask = count.number if waits and isinstance(count, Labels) else count
    found = ask(inputs, targets) if ask else None
    if found is None:
        return float(samples)
    if type(found) is int and found >= 0:
        return float(found)
    return checked(found, f"{name_of(objective)}.count{defined(objective, 'count')}", waits=waits)


def weighed(loss: Tensor, weight: float | Tensor, outputs: Any) -> Tensor:
    """Return a micro-batch's share of the global loss, []. What counts nothing is zero, also if its mean is 0 / 0.

    outputs: what the loss was computed from, through which a zero has a gradient.
    """
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, loss * weight.to(loss.dtype))
    if weight == 1:
        return loss
    if weight:
        return loss * weight
    if loss.device.type != "cpu":
        return torch.where(loss.isfinite(), loss * 0.0, 0.0)
    return loss * 0.0 if bool(loss.isfinite()) else _nothing(outputs, loss)


def _nothing(outputs: Any, loss: Tensor) -> Tensor:
    """Return a zero with zero gradients for all that `outputs` depend on: those of a mean of nothing may be 0 / 0."""
    leaves = [each for each in pytree.tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
    finite = [each for each in leaves if bool(each.detach().isfinite().all())]
    if not finite:
        return loss * 0.0
    return torch.stack([(each * 0.0).sum().to(loss.dtype) for each in finite]).sum()


def times(value: Tensor, count: Any) -> Tensor:
    if isinstance(count, Tensor):
        return torch.where(count == 0, 0.0, value.double() * count)
    return value * count if count else torch.zeros_like(value)


def refuse_divided(objective: Any, config: Config, *, parts: int) -> None:
    """Raise ConfigError if the objective is a loss of the batch as a whole (`whole_batch = True`) and the batch is divided, into `parts` by the strategy.

    Also for one of torch's losses that is a sum: it has no weight in a step, whose loss is a mean.
    """
    how = getattr(objective, "keywords", {}).get("reduction") or getattr(objective, "reduction", None) or "mean"
    if how != "mean" and is_known(objective):
        raise ConfigError(
            f"{name_of(objective)} has reduction={how}, and an objective returns the mean loss over a micro-batch, "
            "for the loss of a step is the mean over the global batch: leave reduction out, or give a function of your own with a method count(targets)"
        )
    if not getattr(objective, "whole_batch", False):
        return
    micro = config.micro_batch_size
    said = f"{parts} parts by the ranks" if parts > 1 else ""
    if config.virtual_world_size:
        said = f"{config.virtual_world_size} slices by virtual_world_size"
    if micro and micro < config.batch_size:
        said = f"parts of {micro} by micro_batch_size"
    if said:
        raise ConfigError(
            f"{name_of(objective)} is a loss of the whole batch (whole_batch = True), and the batch of {config.batch_size} is divided "
            f"into {said}: train with one rank and without micro_batch_size"
        )


def is_known(objective: Any, model: Any = None) -> bool:
    """Return whether it is known what the mean of `objective` is over: of the kit's own and torch's, or by its `count`."""
    if count_of(objective, model):
        return True
    while isinstance(objective, partial):
        objective = objective.func
    return not getattr(objective, "of_model", False) and _package(objective) in OWN
