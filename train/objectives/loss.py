"""Call an objective and validate its result: return a loss, or raise an error that explains the problem."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from muster.code_location import defined, described, is_raised_by_own, kind_and_message, name_of
from muster.errors import ConfigError, MusterError


def loss_of(objective: Any, outputs: Any, targets: Any, *, model: Any, trains: bool = True) -> Tensor:
    """Return the mean loss over a micro-batch, [] float, with a gradient if `trains`.

    Raises ConfigError: the result is not a loss, or model, objective and data do not fit together.
    """
    refuse_each_with_each(objective, outputs, targets, model)
    loss = explained(objective, objective, outputs, targets, model=model)
    if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not trains):
        return loss
    raise _no_loss(loss, objective, outputs, model)


PAIRWISE = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""torch's losses of pairs of numbers: of [8, 1] outputs and [8] targets they take each with each, and only warn."""


def refuse_each_with_each(objective: Any, outputs: Any, targets: Any, model: Any) -> None:
    """Raise ConfigError if one of torch's own losses would compare each output with each target."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.shape == targets.shape:
        return
    own = getattr(objective, "func", objective)  # of functools.partial
    kind = own if inspect.isroutine(own) else type(own)
    is_pairwise = kind.__module__.startswith("torch.nn.") and kind.__name__ in PAIRWISE
    if is_pairwise and outputs.numel() == targets.numel() > 1:
        raise ConfigError(
            f"{name_of(model)}.forward returns {described(outputs)}{_where(model)}, and {name_of(objective)} would compare each "
            f"with each of the targets, {described(targets)}: write .squeeze(-1) in the model, or .unsqueeze(-1) in the data set"
        )


def measured(objective: Any, outputs: Any, targets: Any, *, model: Any) -> Mapping[str, Any]:
    """Return the result of the objective's `metrics`. Raises ConfigError as `loss_of` does."""
    found = explained(objective.metrics, objective, outputs, targets, model=model)
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{name_of(objective)}.metrics returns {described(found)}{defined(objective, 'metrics')}: write `return {{name: sum, ...}}`"
        )
    return found


def explained(call: Callable[..., Any], objective: Any, outputs: Any, targets: Any, *, model: Any) -> Any:
    """Call the objective or its method `call`. Raises ConfigError if it does not accept the outputs or targets."""
    try:
        return call(outputs, targets)
    except MusterError as error:
        of_data = getattr(error, "of_data", False)
        raise error if of_data else type(error)(f"{error}{_where(model)}") from error
    except Exception as error:
        if outputs is None:
            raise _no_outputs(model) from error
        if is_raised_by_own(error):
            raise
        if call is not objective:  # its error says more about targets that do not fit
            explained(objective, objective, outputs, targets, model=model)
        raise _misfit(objective, outputs, targets, model, error) from error


def _no_loss(loss: Any, objective: Any, outputs: Any, model: Any) -> ConfigError:
    if outputs is None:
        return _no_outputs(model)
    where, remedy = defined(objective, "__call__", "forward"), "give one number: the mean loss over the samples"
    if loss is None:
        remedy = "write `return ...` as its last line"
    elif isinstance(loss, Tensor) and loss.numel() != 1:
        remedy = "write `return loss.mean()`"
    elif isinstance(loss, (float, int)):
        remedy = "write `return loss`, the tensor, without .item() or float()"
    elif isinstance(loss, Tensor):
        if isinstance(outputs, Tensor) and not outputs.requires_grad:
            return ConfigError(
                f"{name_of(model)}.forward returns {described(outputs)} without a gradient{_where(model)}: "
                "remove detach(), .data, no_grad and anything else that detaches its outputs from the parameters"
            )
        remedy = "it has no gradient: remove detach(), .data and no_grad, and use differentiable operations"
    return ConfigError(f"the objective {name_of(objective)} returns {described(loss)} as the loss{where}: {remedy}")


def _no_outputs(model: Any) -> ConfigError:
    return ConfigError(f"{name_of(model)}.forward returns None{_where(model)}: write `return ...` as its last line")


def _misfit(objective: Any, outputs: Any, targets: Any, model: Any, error: Exception) -> Exception:
    if isinstance(error, torch.OutOfMemoryError):
        return error
    got = f"{name_of(model)}.forward returns {described(outputs)}{_where(model)}"
    if isinstance(outputs, Tensor):
        said = f"the objective {name_of(objective)} cannot compare it with targets that are {described(targets)}"
        return ConfigError(
            f"{got}, and {said} ({': '.join(kind_and_message(error))[:200]}): give them the shapes and types "
            "that it accepts, or use another objective"
        )
    return ConfigError(
        f"{got}, and the objective {name_of(objective)} takes one tensor, the logits: {_remedy(outputs)}"
    )


def _remedy(outputs: Any) -> str:
    names = set(outputs) if isinstance(outputs, Mapping) else {*dir(outputs)}
    if "loss" in names:
        return "write objective=model_loss for the model's own loss"
    if isinstance(outputs, (tuple, list)):
        return "return the logits alone, or write objective._target_=package.module.function for a loss of your own"
    name = "logits" if "logits" in names else "..."
    named = f'["{name}"]' if isinstance(outputs, Mapping) else f".{name}"
    return f"return its entry {named} alone, or write objective._target_=package.module.function for a loss of your own"


def _where(model: Any) -> str:
    return defined(model, "forward")
