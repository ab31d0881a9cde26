"""`muster load RUN`: show a run's model, and the lines that load it in a script or a notebook."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn

from muster.checkpoint.schemas import read_best
from muster.errors import ConfigError, MusterError, tell
from muster.faults import lost_output
from muster.job.bootstrap import await_saved
from muster.job.tracked_state import unwrapped
from muster.loggers import jsonl
from muster.train.data.load import load as load_data
from muster.train.models.inputs import described
from muster.train.models.model_json import ModelRecord
from muster.train.saved_weights import Source, chosen_run, config_of, is_of_job
from muster.world.dtensor import in_pieces
from muster.world.group import alone

CPU = torch.device("cpu")
T = TypeVar("T", bound=nn.Module | Mapping[str, nn.Module])


@overload
def load(
    folder: str | Path, *, checkpoint: str | int | None = ..., device: Any = ..., storage: str | None = ...
) -> nn.Module: ...
@overload
def load(
    folder: str | Path, *, into: T, checkpoint: str | int | None = ..., device: Any = ..., storage: str | None = ...
) -> T: ...
def load(
    folder: str | Path,
    *,
    into: Any = None,
    checkpoint: str | int | None = None,
    device: Any = None,
    storage: str | None = None,
) -> Any:
    """Return the model of a run with its weights, in evaluation mode. Needs no process group and no data set.

    The weights are those that the run evaluates with: the average, if it has one. Those of any strategy and any number
    of ranks make one model.

        model = muster.load("runs/first", checkpoint="best")
        gan = muster.load("runs/gan", into={"generator": Generator(), "discriminator": Discriminator()})

    Args:
        folder: the run's folder, or a sweep's: then its best run.
        into: a module to fill instead of building the model, or modules by the names that a `muster.Job` tracks them
            by. Names and shapes must be equal. A job's run needs it, because the model is built in the user's script.
        checkpoint: a step, `newest` or `best`; None: `model.pt` if the run is done, else the newest checkpoint. In a job that is open, what it
            has saved so far.
        device: the device to move the model to; None: the CPU, or where `into` is.
        storage: where the checkpoints are; None: as config.yaml says, in which secrets of URLs are left out.

    Raises:
        ConfigError: the folder or the checkpoint does not exist, or the weights do not fit the model.
        StorageError: the weights are damaged or cannot be read.
    """
    source = open_source(Path(folder), None if checkpoint is None else str(checkpoint), storage=storage)
    return filled(record_of(source.run).build() if into is None else into, source, device=device)


def filled(modules: Any, source: Source, *, device: Any = None) -> Any:
    """Return the module, or the modules by name, with their weights, in evaluation mode. Raises as `load` does."""
    if isinstance(modules, Mapping):
        for name, module in modules.items():
            source.fill_module(_whole(module), name)
    else:
        whole = _whole(modules)
        source.fill(whole, alone(next((each.device for each in whole.parameters()), CPU)))
    for module in modules.values() if isinstance(modules, Mapping) else [modules]:
        module.eval()
        if device is not None:
            module.to(device)
    return modules


def open_source(folder: Path, checkpoint: str | None, *, storage: str | None = None) -> Source:
    """Return the weights of the run in `folder`. Raises ConfigError if there is no run, or no such checkpoint."""
    await_saved(folder, checkpoint)
    folder, checkpoint = chosen_run(folder, checkpoint)
    config = config_of(folder)
    settings = config if is_of_job(config) else config.get("checkpoint") or {}
    return Source(folder, checkpoint, storage=storage or settings.get("storage"))


def record_of(folder: Path) -> ModelRecord:
    """Return how the run's model is built: from model.json, or else from the config and the data set of the run.

    Raises ConfigError: it is the run of a job. Raises DataError: model.json is missing and the data set cannot be read.
    """
    if is_of_job(config_of(folder)):
        raise ConfigError(
            f"{folder} is a run of muster.Job, whose model is built by its own script: give the module, "
            f"muster.load({str(folder)!r}, into=model)"
        )
    return ModelRecord.read(folder) or from_data(folder)


def from_data(folder: Path) -> ModelRecord:
    """Return the record of a run's model from its config and its data set. Raises ConfigError, DataError."""
    from muster.train.config.compose import of_run  # imported here: Hydra takes a second, and most runs have model.json

    config = of_run(folder, [])
    return ModelRecord.of(config, load_data(config, alone(CPU)))


def _whole(module: Any) -> nn.Module:
    """Return the module inside DDP and torch.compile. Raises ConfigError: it is sharded, or no module."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"into={type(module).__name__} is not a torch.nn.Module: give one, or {{name: module}}")
    if any(map(in_pieces, module.parameters())):
        raise ConfigError("into= is a sharded module: load the weights before fully_shard")
    return unwrapped(module)


def summary(source: Source) -> list[str]:
    """Return the lines about a run's model and its weights. Raises MusterError."""
    of_model = _of_job(source) if is_of_job(config_of(source.run)) else _of_trainer(source)
    where = source.saved.path if source.saved else str(source.run / "model.pt")
    lines = [*of_model, f"weights     {where}{'' if source.step is None else f', step {source.step}'}"]
    values = _values(source)
    return [*lines, f"metrics     {'  '.join(values)}"] if values else lines


def _of_trainer(source: Source) -> list[str]:
    record = record_of(source.run)
    parameters = [*filled(record.build(), source).parameters()]
    number = f"{sum(each.numel() for each in parameters):,} in {len(parameters)} tensors"
    lines = [f"model       {record}", f"parameters  {number}"]
    return [*lines, f"inputs      {described(record.inputs)}"] if record.inputs else lines


def _of_job(source: Source) -> list[str]:
    return [f"modules     {', '.join(source.modules())}, built by the script of the run (muster.Job)"]


def _values(source: Source) -> list[str]:
    """Return what the evaluations of these weights have measured; of two with one name, the last, or that which was the best."""
    known, values = ("kind", "step", "epoch", "time", "seconds"), dict[str, Any]()
    here = [
        line for line in jsonl.read(source.run / jsonl.NAME) if line["kind"] == "eval" and line["step"] == source.step
    ]
    if (best := read_best(source.run)) and best.step == source.step:
        here.sort(key=lambda line: line.get(best.metric) == best.value)
    for line in here:
        values |= {name: value for name, value in line.items() if name not in known}
    return [f"{name} {value:.6g}" for name, value in values.items() if isinstance(value, float | int)]


def call_of(source: Source, checkpoint: str | None) -> str:
    """Return the call of `muster.load` for these weights, to paste into a script."""
    words, given = [json.dumps(str(source.run))], "model"
    if is_of_job(config_of(source.run)):
        names = source.modules()
        each = ", ".join(
            f'"{name}": {name}' for name in names
        )  # the run does not say which one an evaluation has measured
        words.append("into=model" if len(names) == 1 else f"into={{{each}}}")
        given = "model" if len(names) == 1 else "modules"
    words += [f"checkpoint={json.dumps(checkpoint)}"] if checkpoint else []
    return f"{given} = muster.load({', '.join(words)})"


def parser_of(tool: str, *, said: str | None) -> argparse.ArgumentParser:
    """Return the parser of a tool whose arguments name the weights of a run."""
    parser = argparse.ArgumentParser(prog=f"muster {tool}", description=said)
    parser.add_argument("run", type=Path, help="a run's folder, or a sweep's: then its best run")
    parser.add_argument(
        "--checkpoint", help="a step, newest or best (default: model.pt if the run is done, else newest)"
    )
    parser.add_argument("--storage", help="where the checkpoints are, if config.yaml leaves out a secret of the URL")
    return parser


def main(arguments: list[str] | None = None) -> int:
    given = parser_of("load", said=__doc__).parse_args(arguments)
    try:
        run, checkpoint = chosen_run(given.run, given.checkpoint)
        source = open_source(run, checkpoint, storage=given.storage)
        lines = [*summary(source), "", "import muster", call_of(source, checkpoint)]
    except MusterError as error:
        tell(error)
        return error.exit_code
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main())
