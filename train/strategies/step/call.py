"""How a batch's inputs become arguments of a model: as one argument, as keywords, or by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from muster.code_location import defined
from muster.data.inputs_and_targets import TARGETS
from muster.errors import ConfigError, MusterError
from muster.train.strategies.step.batch_errors import why_refused


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
