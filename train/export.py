"""`muster export RUN`: write a run's model as a torch.export program and as ONNX, and check what was written."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from muster.code_location import located
from muster.data.inputs_and_targets import TARGETS
from muster.errors import ConfigError, MusterError, one_line, say, tell
from muster.faults import lost_output
from muster.files import replace_file
from muster.train.load import filled, from_data, open_source, parser_of, record_of
from muster.train.models.inputs import Form, described, example
from muster.train.saved_weights import Source
from muster.train.strategies.step.call import Call

TRACED, CHECKED = 2, (1, 3)
"""Samples that a program is traced with, and numbers of samples that its outputs are compared for."""
TOLERANCE = 1e-4
"""Largest difference of an output, relative to the largest output if that is above 1."""
ONNX_BYTES = 2**31
"""Maximum size of one ONNX file, a protocol buffer."""


@dataclass(frozen=True)
class Traced:
    """A model and its program, traced for any number of samples; `form` is that of the inputs that the program takes."""

    model: nn.Module
    form: Form
    program: torch.export.ExportedProgram

    def arguments(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the model for `size` random samples."""
        return arguments(self.model, example(self.form, size=size))


def trace(model: nn.Module, form: Form) -> Traced:
    """Trace `model` with torch.export; the batch dimension is dynamic. Raises ConfigError if it cannot be traced."""
    given, more = (arguments(model, example(form, size=size)) for size in (TRACED, TRACED + 1))
    args_shapes, kwargs_shapes = pytree.tree_map(_batch_dimension, given, more)
    try:
        with _quiet():
            program = torch.export.export(model, *given, dynamic_shapes=kwargs_shapes or args_shapes)
    except Exception as error:
        raise ConfigError(
            f"torch.export cannot trace {type(model).__name__} for any number of samples: {one_line(error)[:200]}; change "
            "its forward, or save its state dict alone"
        ) from error
    return Traced(model, {name: form[name] for name in given[1]} or form, program)


def arguments(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model for a batch's inputs, without targets that it does not need."""
    call = Call(model)
    args, kwargs = call.arguments(inputs)
    return args, {name: value for name, value in kwargs.items() if name not in TARGETS or call.needs(name)}


def _batch_dimension(one: Tensor, other: Tensor) -> dict[int, Any]:
    """Return {dimension: batch} for a tensor of inputs, from two of different batch sizes."""
    differs = [
        place for place, (length, longer) in enumerate(zip(one.shape, other.shape, strict=True)) if length != longer
    ]
    return dict.fromkeys(differs, torch.export.Dim("batch"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings and log lines of torch's exporters about their own work."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def write_program(traced: Traced, path: Path) -> None:
    """Write the program as a `.pt2` file, which torch.export.load reads. Raises ConfigError if its outputs differ."""

    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            torch.export.save(traced.program, file)
        with draft.open("rb") as file:
            again = torch.export.load(file).module()
        compare(traced, again, path)

    replace_file(path, write)


def write_onnx(traced: Traced, path: Path) -> None:
    """Write the program as an `.onnx` file. Raises ConfigError if its outputs differ, or it cannot be converted."""
    size = sum(each.numel() * each.element_size() for each in traced.model.state_dict().values())
    if size >= ONNX_BYTES:
        raise ConfigError(f"the model has {size / 1e9:.1f} GB, and an ONNX file at most 2: export it as .pt2")
    try:
        with _quiet():
            converted: Any = torch.onnx.export(traced.program, verbose=False)
    except Exception as error:
        raise ConfigError(
            f"torch.onnx cannot convert {type(traced.model).__name__}: {one_line(error)[:200]}; export it as .pt2"
        ) from error

    def write(draft: Path) -> None:
        converted.save(str(draft), external_data=False)
        compare(traced, _evaluator(draft), path)

    replace_file(path, write)


def _evaluator(path: Path) -> Callable[..., list[Tensor]]:
    """Return the function that the file computes, as ONNX's reference implementation evaluates it."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(path))

    def call(*args: Any, **kwargs: Any) -> list[Tensor]:
        tensors = [leaf.numpy() for leaf in pytree.tree_leaves((args, kwargs))]
        found = evaluator.run(None, dict(zip(evaluator.input_names, tensors, strict=True)))
        return [torch.as_tensor(each) for each in found]

    return call


def compare(traced: Traced, other: Callable[..., Any], path: Path) -> None:
    """Raise ConfigError unless `other` gives the outputs of the model."""
    for size in CHECKED:
        args, kwargs = traced.arguments(size)
        try:
            with torch.no_grad():
                ours, theirs = (_outputs(call(*args, **kwargs)) for call in (traced.model, other))
        except Exception as error:
            raise ConfigError(f"{path} is not written: it fails for {size} random samples: {located(error)}") from error
        if [each.shape for each in ours] != [each.shape for each in theirs]:
            raise _differs(path, f"of shapes {[list(each.shape) for each in theirs]}", size)
        for one, two in zip(ours, theirs, strict=True):
            if (difference := _difference(one, two)) > TOLERANCE:
                raise _differs(path, f"that differ by {difference:.2g}", size)


def _differs(path: Path, how: str, size: int) -> ConfigError:
    return ConfigError(
        f"{path} is not written: for {size} random samples it gives outputs {how} from the model's; let forward depend on "
        "its inputs alone, without random numbers and Python state"
    )


def _outputs(found: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def _difference(one: Tensor, two: Tensor) -> float:
    """Return the largest difference, relative to the largest value if that is above 1; NaN equals NaN."""
    one, two = one.double(), two.double()
    if not torch.equal(one.isfinite(), two.isfinite()):
        return math.inf
    one, two = one.nan_to_num(), two.nan_to_num()
    return float((one - two).abs().max() / one.abs().max().clamp(min=1)) if one.numel() else 0.0


WRITERS: dict[str, Callable[[Traced, Path], None]] = {".pt2": write_program, ".onnx": write_onnx}


def why_no_onnx() -> str | None:
    """Return what ONNX needs and is not installed; None if all is there."""
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        return "ONNX needs onnxscript: pip install onnxscript, or pip install 'torch-muster[onnx]'"
    return None


def export(source: Source, outputs: list[Path]) -> None:
    """Write the model with these weights to each of `outputs`; without any, beside model.pt in all formats that can be.

    Raises ConfigError: an output's suffix is unknown, its format is not available, or the model cannot be exported.
    """
    for path in outputs:
        refuse(path)
    record = record_of(source.run)
    form = record.inputs or from_data(source.run).inputs
    if form is None:
        raise ConfigError(f"the inputs of {record.model.target} are not tensors alone, and cannot be traced")
    name = f"model-{source.saved.step:08d}" if source.saved else "model"
    traced = trace(filled(record.build(), source), form)
    for path in outputs:
        _write(traced, path)
    if not outputs:
        _write_both(traced, source.run / name)


def refuse(path: Path) -> None:
    """Raise ConfigError for a file that cannot be written as its suffix says."""
    if path.suffix not in WRITERS:
        raise ConfigError(f"--output {path} has no known format: end it in .pt2 or .onnx")
    if path.suffix == ".onnx" and (why := why_no_onnx()):
        raise ConfigError(f"--output {path}: {why}")


def _write_both(traced: Traced, path: Path) -> None:
    _write(traced, path.with_name(f"{path.name}.pt2"))
    try:
        if why := why_no_onnx():
            raise ConfigError(why)
        _write(traced, path.with_name(f"{path.name}.onnx"))
    except ConfigError as error:
        say(f"muster: no ONNX file: {error}")


def _write(traced: Traced, path: Path) -> None:
    WRITERS[path.suffix](traced, path)
    print(f"{path}: inputs {described(traced.form)}, checked against the model", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of("export", said=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        action="append",
        default=[],
        help="FILE.pt2 or FILE.onnx, also several times (default: both, beside model.pt)",
    )
    given = parser.parse_args(arguments)
    try:
        export(open_source(given.run, given.checkpoint, storage=given.storage), given.output)
    except MusterError as error:
        tell(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main())
