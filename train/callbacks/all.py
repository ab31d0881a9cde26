"""The callbacks of a run as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from train.callbacks.base import Callback
from train.callbacks.stream import Position
from train.checkpoint.trained import SavedTensor
from train.config.keys import Config
from train.config.parts import build
from train.data.load import Data
from train.data.stream import Stream
from train.errors import ConfigError
from train.strategies.base import Strategy

if TYPE_CHECKING:
    from train.loop import Run


class Callbacks:
    """`named` callbacks, each called in turn, and in reverse where an evaluation ends: what the last one did to the model is
    undone first. Their states lie side by side under `callbacks/NAME/`."""

    def __init__(self, named: Mapping[str, Callback]):
        self.named = dict(named)

    @classmethod
    def of(cls, config: Config, data: Data) -> Callbacks:
        """As the config has them, and what data keeps for a resume. Raises ConfigError."""
        named = {name: build(part) for name, part in config.callbacks.items()}
        for name, callback in named.items():
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks.{name} is no callback: derive {type(callback).__name__} from train.callbacks.base.Callback"
                )
        if isinstance(data.train, Stream):
            named["stream"] = Position(data.train)
        return cls(named)

    @property
    def averages(self) -> list[str]:
        """What the names of the weights begin with that evaluation uses in place of the model's; of several the last counts."""
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
        for callback in self.named.values():
            callback.on_eval_begin(run)

    def on_eval_end(self, run: Run, values: dict[str, float]) -> None:
        for callback in reversed(self.named.values()):
            callback.on_eval_end(run, values)

    def on_checkpoint(self, run: Run) -> None:
        for callback in reversed(self.named.values()):
            callback.on_checkpoint(run)

    def on_end(self, run: Run) -> None:
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
