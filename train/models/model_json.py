"""model.json: how to build a run's model again without its data set."""

from __future__ import annotations

import contextlib
import inspect
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from muster.code_location import defined
from muster.data.stream import Stream
from muster.errors import ConfigError, MusterError
from muster.files import replace_file
from muster.train.config.differences import to_dict
from muster.train.config.keys import Config
from muster.train.config.parts import Part, build, locate, signature
from muster.train.data.batches import first_inputs
from muster.train.data.load import Data
from muster.train.models.inputs import Form, form_of

NAME = "model.json"
SAMPLES = 2
"""Number of samples that the form of the inputs is taken from: with one, a dimension of size 1 may be the batch's."""


@dataclass(frozen=True)
class ModelRecord:
    """A run's model, as its constructor is called.

    model: the class or function, with its values from the config.
    filled_in: the values that the data set gave: `input_shape`, `num_classes`.
    inputs: the form of a batch's inputs (see `inputs.py`); None if it is unknown.
    """

    model: Part
    filled_in: dict[str, Any] = field(default_factory=dict)
    inputs: Form | None = None

    def build(self) -> nn.Module:
        """Build the model with new weights. Raises ConfigError."""
        model: nn.Module = build(self.model, **{name: _fixed(value) for name, value in self.filled_in.items()})
        return model

    def __str__(self) -> str:
        values = {**self.filled_in, **self.model.values}
        return f"{self.model.target}({', '.join(f'{name}={value}' for name, value in values.items())})"

    def to_json(self) -> str:
        plain = {"model": to_dict(self.model), "filled_in": self.filled_in, "inputs": self.inputs}
        return json.dumps(plain, indent=1, default=str) + "\n"

    @classmethod
    def of(cls, config: Config, data: Data) -> ModelRecord:
        """Return the record of a run's model; reads the first samples for the inputs. Raises DataError, ConfigError."""
        record = cls(config.model, filled_in(config.model, data))
        with contextlib.suppress(Exception):  # what cannot be read ends the run elsewhere, or is skipped there
            inputs = first_inputs(config, data.train, size=SAMPLES)
            record = replace(record, inputs=form_of(inputs, size=min(SAMPLES, len(data.train))))
        return record

    @classmethod
    def read(cls, folder: Path) -> ModelRecord | None:
        """Read model.json in a run's folder; None if it is missing or damaged."""
        try:
            plain = json.loads((folder / NAME).read_bytes())
            return cls(Part.of("model", plain["model"]), dict(plain["filled_in"]), plain["inputs"])
        except (OSError, ValueError, KeyError, TypeError, MusterError):
            return None


def filled_in(part: Part, data: Data) -> dict[str, Any]:
    """Return the values of the data set that the model's constructor takes and the config does not set.

    Raises ConfigError: the constructor needs a number of classes, which the data set does not have.
    """
    parameters = signature(locate(part))
    wanted = parameters.keys() - part.values.keys()
    found: dict[str, Any] = {}
    if "num_classes" in wanted and data.num_classes:
        found["num_classes"] = data.num_classes
    elif "num_classes" in wanted and parameters["num_classes"].default is inspect.Parameter.empty:
        raise ConfigError(
            f"model: {part.target} needs num_classes, which the data set {type(data.train).__name__}{defined(data.train)} does "
            "not have: write self.num_classes = ... there, or +model.num_classes=..."
        )
    if "input_shape" in wanted:  # reading `data.input_shape` may load a sample
        found["input_shape"] = data.input_shape
    return found


def note_model(folder: Path, config: Config, data: Data) -> None:
    """Write model.json, unless it has this model already. Rank 0 only. Raises StorageError.

    The inputs are left out if reading samples at the start may be more than the data set expects.
    """
    before, now = ModelRecord.read(folder), ModelRecord(config.model, filled_in(config.model, data))
    if before and _is_same(before, now):
        return
    text = (ModelRecord.of(config, data) if _is_read_at_start(data.train) else now).to_json()
    replace_file(folder / NAME, lambda draft: draft.write_text(text, encoding="utf-8"))


def _is_read_at_start(dataset: Any) -> bool:
    """Return True if the fingerprint reads samples, or if they are the kit's own."""
    own = dataset.dataset if isinstance(dataset, Stream) else dataset
    return not hasattr(own, "fingerprint") or type(own).__module__.startswith("muster.train.data.")


def _is_same(one: ModelRecord, other: ModelRecord) -> bool:
    return replace(one, inputs=None).to_json() == replace(other, inputs=None).to_json()


def _fixed(value: Any) -> Any:
    """Return a list of model.json as the tuple that the data set gave."""
    return tuple(value) if isinstance(value, list) else value
