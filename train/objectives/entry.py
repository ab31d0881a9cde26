"""Entries of a model's structured outputs: the one that a metric takes, and the scalars to log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from muster.code_location import described
from muster.errors import ConfigError

LOGITS = "logits"


def entry(outputs: Any, of: str | int, *, key: str) -> Any:
    """Return the entry `of` of the outputs: a key, an attribute, or the place in a tuple or list. Raises ConfigError."""
    if isinstance(outputs, Mapping) and of in outputs:
        return outputs[of]
    if isinstance(of, int) and isinstance(outputs, tuple | list) and -len(outputs) <= of < len(outputs):
        return outputs[of]
    if isinstance(of, str) and not isinstance(outputs, Mapping | Tensor) and hasattr(outputs, of):
        return getattr(outputs, of)
    valid = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else ""
    if isinstance(outputs, tuple | list):
        valid = f"0 to {len(outputs) - 1}"
    hint = f"; valid: {valid}" if valid else f"; leave out {key}"
    raise ConfigError(f"{key}={of}: the model's outputs are {described(outputs)} and have no such entry{hint}")


def logits_of(outputs: Any) -> Any:
    """Return the `logits` of outputs as Hugging Face's models give them, which have it as an attribute; else `outputs`."""
    logits = None if isinstance(outputs, Tensor) else getattr(outputs, LOGITS, None)
    return logits if isinstance(logits, Tensor) else outputs


def scalars(outputs: Any) -> dict[str, Tensor]:
    """Return the [] floating-point tensors beside `loss` in outputs with names: means over the micro-batch."""
    if not isinstance(outputs, Mapping):
        return {}
    return {
        str(name): value
        for name, value in outputs.items()
        if isinstance(value, Tensor) and not value.dim() and value.is_floating_point() and name != "loss"
    }
