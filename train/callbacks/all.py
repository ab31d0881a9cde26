"""The callbacks of a run as one object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from muster.checkpoint.trained import SavedTensor
from muster.data.stream import Stream
from muster.errors import ConfigError
from muster.train.callbacks.base import Callback
from muster.train.config.keys import Config
from muster.train.config.parts import build
from muster.train.data.load import Data
from muster.train.strategies.base import Strategy

if TYPE_CHECKING:
    from muster.train.loop import Run


class Position(Callback):
    """Saves a data stream's own state, so that a resume does not reread samples.

    The state of any rank will do: no rank has read past the end of the global batch.
    """

    def __init__(self, stream: Stream):
        self.stream = stream

    def state(self) -> dict[str, Any]:
        state = self.stream.state()
        return {"state": state} if state else {}

    def load(self, state: dict[str, Any]) -> None:
        self.stream.load(state["state"])


class Callbacks:
    """Calls each of the `named` callbacks in order.

    `on_eval_end` and `on_checkpoint` call them in reverse order, so that the last change to the model is undone first. Their states
    are stored side by side under `callbacks/NAME/`, and `load` skips callbacks that have none.
    """

    def __init__(self, named: Mapping[str, Callback]):
        self.named = dict(named)
        self.are_within = False
        """True from the beginning of an evaluation, or `on_end`, until its end: callbacks may have changed the model."""
        self.are_cut_short = False
        """True if an error has ended `on_eval_end`: some of the callbacks have taken notice of the evaluation."""

    @classmethod
    def of(cls, config: Config, data: Data) -> Callbacks:
        """Build the callbacks of the config, and one that saves the position of a data stream. Raises ConfigError."""
        named = {name: build(part) for name, part in config.callbacks.items()}
        for name, callback in named.items():
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks.{name} is not a callback: derive {type(callback).__name__} from muster.train.callbacks.base.Callback"
                )
        if isinstance(data.train, Stream):
            named["stream"] = Position(data.train)
        return cls(named)

    @property
    def averages(self) -> list[str]:
        """Prefixes of the weights that evaluation uses in place of the model's; the last one takes precedence."""
        return [_prefix(name) for name, callback in self.named.items() if callback.averages]

    def on_build(self, strategy: Strategy) -> None:
        for callback in self.named.values():
            callback.on_build(strategy)

    def on_start(self, run: Run) -> None:
        for callback in self.named.values():
            callback.on_start(run)

    def on_step_end(self, run: Run) -> None:
        for callback in self.named.values():
            callback.on_step_end(run)

    def on_trial(self, values: dict[str, float]) -> None:
        for callback in self.named.values():
            callback.on_trial(values)

    def on_eval_begin(self, run: Run) -> None:
        self.are_within = True
        for callback in self.named.values():
            callback.on_eval_begin(run)

    def on_eval_end(self, run: Run, values: dict[str, float]) -> None:
        self.are_cut_short = True
        for callback in reversed(self.named.values()):
            callback.on_eval_end(run, values)
        self.are_within = self.are_cut_short = False

    def on_checkpoint(self, run: Run) -> None:
        for callback in reversed(self.named.values()):
            callback.on_checkpoint(run)
        self.are_within = False

    def on_end(self, run: Run) -> None:
        self.are_within = True
        for callback in self.named.values():
            callback.on_end(run)

    def close(self) -> None:
        for callback in self.named.values():
            callback.close()

    def state(self) -> dict[str, Any]:
        return {
            f"{_prefix(name)}{key}": value for name, each in self.named.items() for key, value in each.state().items()
        }

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, callback in self.named.items():
            for key, target in callback.targets(_own(name, saved)).items():
                found[f"{_prefix(name)}{key}"] = target
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        for name, callback in self.named.items():
            if own := _own(name, state):
                callback.load(own)


def _prefix(name: str) -> str:
    return f"callbacks/{name}/"


def _own(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(_prefix(name)): value for key, value in values.items() if key.startswith(_prefix(name))}
