"""The form of a model's inputs: shapes, types and ranges, without samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muster.errors import ConfigError

BATCH = "B"
Form = Any
"""A tensor's form, {"shape": ["B", 1, 8, 8], "dtype": "float32", "low": 0.0, "high": 1.0}, or a dict or list of forms."""


def form_of(inputs: Any, *, size: int) -> Form:
    """Return the form of a batch's inputs; a first dimension of `size` is that of the batch. Raises ConfigError: an input is not a tensor."""
    if isinstance(inputs, Mapping):
        return {str(name): form_of(value, size=size) for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return [form_of(value, size=size) for value in inputs]
    if not isinstance(inputs, Tensor):
        raise ConfigError(f"an input of the model is a {type(inputs).__name__}, and only tensors have a form")
    shape = [BATCH if not place and length == size else length for place, length in enumerate(inputs.shape)]
    return {"shape": shape, "dtype": str(inputs.dtype).removeprefix("torch."), **_range(inputs)}


def example(form: Form, *, size: int) -> Any:
    """Return inputs of this form for `size` random samples, as tensors on the CPU, and tuples in place of lists."""
    if isinstance(form, list):
        return tuple(example(each, size=size) for each in form)
    if not is_tensors(form):
        return {name: example(each, size=size) for name, each in form.items()}
    dtype, shape = getattr(torch, form["dtype"]), [size if each == BATCH else each for each in form["shape"]]
    low, high = form.get("low", 0), form.get("high", 1)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, dtype=dtype) * (high - low) + low
    if high <= 1:  # a mask: random values might hide all of a sample
        return torch.full(shape, high, dtype=dtype)
    return torch.randint(int(low), int(high) + 1, shape).to(dtype)


def is_tensors(form: Form) -> bool:
    return isinstance(form, dict) and isinstance(form.get("dtype"), str)


def described(form: Form) -> str:
    """Return the form in one line: `float32 [B, 1, 8, 8]`."""
    if isinstance(form, list):
        return f"({', '.join(map(described, form))})"
    if not is_tensors(form):
        return f"{{{', '.join(f'{name}: {described(each)}' for name, each in form.items())}}}"
    return f"{form['dtype']} [{', '.join(map(str, form['shape']))}]"


def _range(values: Tensor) -> dict[str, Any]:
    """Return the lowest and the highest value: other integers may be none of the model's tokens."""
    if not values.numel() or values.is_complex():
        return {}
    low, high = values.min().item(), values.max().item()
    return {"low": low, "high": high} if math.isfinite(low) and math.isfinite(high) else {}


def image_shape(input_shape: Sequence[int], *, model: str) -> tuple[int, int, int]:
    """Return `input_shape` as (C, H, W). Raises ConfigError if the data's inputs are not images."""
    if len(input_shape) != 3:
        raise ConfigError(
            f"model={model} expects images [C, H, W], but the data's inputs are {list(input_shape)}: choose another model or data"
        )
    return input_shape[0], input_shape[1], input_shape[2]
