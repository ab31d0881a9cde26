"""How a batch's inputs become arguments of a model: as one argument, as keywords, or by position; why it rejects them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from muster.code_location import defined, described, is_own, kind_and_message, place
from muster.data.inputs_and_targets import TARGETS
from muster.errors import ConfigError, MusterError


class Call:
    """Calls `model`, or a wrapper of it, with arguments that fit the signature of the model's `forward`.

    A dict is passed as keywords if any of its keys is a parameter of `forward`, or if `forward` takes any keyword. A
    tuple or list is passed by position if `forward` requires more than one argument and accepts as many. Everything
    else is passed as the first argument.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        parameters = inspect.signature(model.forward).parameters.values()
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._most = len(by_place)
        self._needed = [p.name for p in by_place if p.default is p.empty]
        self._any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def __call__(self, forward: Callable[..., Any], inputs: Any) -> Any:
        """Return the output of `forward` for `inputs`. Raises ConfigError if the model does not accept them."""
        args, kwargs = self.arguments(inputs)
        try:
            return forward(*args, **kwargs)
        except MusterError:
            raise
        except Exception as error:
            if refused := why_refused(error, self.model, args, kwargs):
                raise refused from error
            raise

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (positional, keyword) arguments for `inputs`. Raises ConfigError if a name does not fit."""
        if isinstance(inputs, Mapping) and (self._any_name or self._names & inputs.keys()):
            return (), self._by_name(inputs)
        if isinstance(inputs, (tuple, list)) and len(self._needed) > 1 and len(inputs) <= self._most:
            return tuple(inputs), {}
        return (inputs,), {}

    def needs(self, name: str) -> bool:
        return name in self._needed

    def _by_name(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        unknown = [] if self._any_name else [name for name in inputs if name not in self._names and name not in TARGETS]
        missing = [name for name in self._needed if name not in inputs]
        if unknown or missing:
            what = f"has no parameter {unknown[0]}" if unknown else f"needs {missing[0]}"
            raise ConfigError(
                f"{type(self.model).__name__}.forward {what}, and a batch has {', '.join(inputs)}{defined(self.model, 'forward')}: "
                "say what the model gets with loader.batch=package.module.function"
            )
        return {name: value for name, value in inputs.items() if self._any_name or name in self._names}


DTYPES = re.compile(
    r"the same dtype|expected (scalar type|m1 and m2)|one of the following scalar types|Input type .* and (weight|bias) type|"
    r"not implemented for '(Long|Int|Short|Byte|Char|Bool)|mixed dtype"
)
SHAPES = re.compile(
    r"shapes? cannot be multiplied|size mismatch|must match the size|Sizes of tensors must match|is invalid for input of size|"
    r"Given groups=|Given normalized_shape|Given input size|running_mean should contain|inconsistent tensor size|not broadcastable|"
    r"[Ee]xpected .*\b\d-?D\b|Dimension out of range|index out of range in self|must be the same shape|must have \d dimensions|"
    r"input\.size\(-1\) must be equal"
)
ELSEWHERE = re.compile(r"gloo|nccl|CUDA|out of memory|timed? ?out|connection", re.IGNORECASE)
SIZES = {"in_features": -1, "in_channels": 1, "num_features": 1, "input_size": -1}
"""Attribute of a layer that holds its input size -> the input dimension of that size."""


def why_refused(
    error: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ConfigError | None:
    """Explain an `error` that `model(*args, **kwargs)` raised: what was given, what was expected, and how to fix it; None for other errors."""
    message = kind_and_message(error)[1]
    given = described(args[0]) if len(args) == 1 else described(dict(kwargs) if kwargs else args)
    name, where = f"{type(model).__name__}.forward", defined(model, "forward")
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as unbound:
        return ConfigError(
            f"{name} takes {_parameters(model)}{where}, and a batch has {given} ({unbound}): say what the model gets with "
            "loader.batch=package.module.function"
        )
    whole = args[0] if len(args) == 1 and not isinstance(args[0], Tensor) else None
    if whole is not None and isinstance(error, (TypeError, AttributeError)) and type(whole).__name__ in message:
        return ConfigError(
            f"{name} gets {given} whole{where} ({message[:160]}): name its parameters as the batch's keys, or say what the model "
            "gets with loader.batch=package.module.function"
        )
    if not isinstance(error, (RuntimeError, ValueError, IndexError, TypeError)) or ELSEWHERE.search(message):
        return None
    line = place(error)
    at = f" ({line})" if line and is_own(line.file) else where
    layer, got = _layer(error, model)
    took = f"{layer} got {described(got)}" if layer else f"{name} got {given}"
    refused: ConfigError | None = None
    if DTYPES.search(message):
        refused = ConfigError(
            f"types do not fit: {took}{at} ({message[:160]}): {_dtype_remedy(got if layer else args)}"
        )
    elif SHAPES.search(message):
        refused = ConfigError(f"shapes do not fit: {took}{at} ({message[:160]}): {_shape_remedy(error, got)}")
    if refused:
        refused.of_data = True
    return refused


def _parameters(model: nn.Module) -> str:
    return f"({', '.join(inspect.signature(model.forward).parameters)})"


def _layer(error: BaseException, model: nn.Module) -> tuple[str, Any]:
    """Return the innermost module that raised `error`, as `layer1 = Linear(in_features=10, ...)`, and its input."""
    module, got = _innermost(error)
    if module is None or len(text := repr(module)) > 120 or "\n" in text:
        return "", None
    names = {id(each): name for name, each in model.named_modules()}
    name = names.get(id(module), "")
    return f"{name} = {text}" if name else text, got


def _innermost(error: BaseException) -> tuple[nn.Module | None, Any]:
    """Return the innermost module in the traceback and its first tensor, if it is a torch.nn module with a tensor."""
    found: tuple[nn.Module | None, Any] = None, None
    trace = error.__traceback__
    while trace:
        values = trace.tb_frame.f_locals
        module = values.get("self")
        if isinstance(module, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            tensors = [value for name, value in values.items() if name != "self" and isinstance(value, Tensor)]
            torch_s = type(module).__module__.startswith("torch.nn.modules")
            found = (module, tensors[0]) if tensors and torch_s else (None, None)
        trace = trace.tb_next
    return found


def _shape_remedy(error: BaseException, got: Any) -> str:
    module, _ = _innermost(error)
    for name, dimension in SIZES.items():
        expected = getattr(module, name, None)
        if isinstance(got, Tensor) and isinstance(expected, int) and _has_channels(module, got):
            if got.shape[dimension] != expected:
                return f"write {name}={got.shape[dimension]} there, or give the model inputs of {expected}"
    if isinstance(module, nn.Embedding) and isinstance(got, Tensor) and got.numel():
        return f"write num_embeddings={int(got.max()) + 1} or more: the data's largest index is {int(got.max())}"
    return "fix that line, or the shape of the data"


def _has_channels(module: nn.Module | None, got: Tensor) -> bool:
    """Return True if a convolution's input has all dimensions; for other layers, if it has at least two."""
    sizes = getattr(module, "kernel_size", None)
    return got.dim() == len(sizes) + 2 if isinstance(sizes, tuple) else got.dim() > 1


def _dtype_remedy(got: Any) -> str:
    leaves = [value for value in (got if isinstance(got, tuple) else (got,)) if isinstance(value, Tensor)]
    if leaves and leaves[0].is_floating_point():
        return "write .float() where the data set makes its input (numpy's arrays are float64), or loader.batch=package.module.function"
    return "write .float() for numbers, or .long() for indices, where the data set makes its input"
