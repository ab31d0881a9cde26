"""The kit's own keys: name, type, default, limits, freedom and meaning of each, in one place.

Hydra composes and type-checks them. `--help` and the README's table are generated from them (`python -m train.config`).
The parameters of a part (data, model, ...) are those of its constructor; their values are in its YAML under conf/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from train.config.marks import FREE, LOCAL, Ge, Gt, Le

# Users type the names of enum members, so the names are the terms of the field.
Precision = Enum("Precision", ["fp32", "bf16", "fp16"])
Backend = Enum("Backend", ["auto", "gloo", "nccl"])
Device = Enum("Device", ["auto", "cpu", "cuda"])
Progress = Enum("Progress", ["auto", "bar", "plain", "none"])
NonFinite = Enum("NonFinite", ["stop", "skip"])
BadSample = Enum("BadSample", ["stop", "skip"])

LONGEST_S = 10**9
"""Maximum timeout in seconds: the system's clocks and waits can represent no more."""

GROUPS = ("data", "model", "objective", "optimizer", "scheduler", "strategy")
"""Groups whose part is chosen by name from conf/, or built by import path."""

SEVERAL = ("loggers", "callbacks", "metrics")
"""Groups that hold any number of parts, each under its own name."""


def key(default: Any, meaning: str, *marks: Any) -> Any:
    """Define a key of the kit. `marks`: limits (Ge, Gt, Le) and freedom (FREE, LOCAL), see marks.py."""
    return field(default=default, metadata={"meaning": meaning, "marks": marks})


def key_of(factory: Any, meaning: str, *marks: Any) -> Any:
    """Define a key whose default is created by `factory` each time."""
    return field(default_factory=factory, metadata={"meaning": meaning, "marks": marks})


def part(meaning: str) -> Any:
    """Define a group, whose chosen part is built with its own constructor."""
    return field(default=MISSING, metadata={"meaning": meaning, "marks": ()})


@dataclass
class Loader:
    """Keys of `loader`: how samples are read and batched."""

    num_workers: int = key(0, "processes that read samples ahead, a rank", Ge(0), FREE)
    drop_last: bool = key(False, "leave out the last, smaller batch of an epoch")
    collate_fn: Any = key(None, "function of your own, by import path: a list of samples to a batch")
    batch: Any = key(None, "function of your own, by import path: a batch to the pair (inputs, targets)")
    on_bad_sample: BadSample = key(BadSample.stop, "`skip`: a sample that cannot be read gives its place to the next")
    max_bad_samples: int = key(10, "how many samples `skip` tolerates", Ge(0), FREE)


@dataclass
class Dist:
    """Keys of `dist`: how ranks communicate."""

    backend: Backend = key(Backend.auto, "`gloo` or `nccl`; `auto`: by device", FREE)
    timeout_s: float = key(300.0, "a rank that has stood still for so long is ended", Gt(0), Le(LONGEST_S), FREE)
    start_timeout_s: float = key(60.0, "by then all ranks must have arrived", Gt(0), Le(LONGEST_S), FREE)
    shared_memory: bool = key(True, "CPU ranks of one host add up gradients in memory; else by gloo", FREE)
    init_method: str = key(
        "env://",
        "by MASTER_ADDR and MASTER_PORT; `file:///shared/path`: ranks started by hand meet through files, without a port",
        FREE,
        LOCAL,
    )


@dataclass
class Checkpoint:
    """Keys of `checkpoint`: when and where checkpoints are saved, and how a run resumes."""

    every_steps: int = key(100, "steps between two checkpoints", Ge(1), FREE)
    keep: int = key(3, "how many of the newest are kept", Ge(1), FREE)
    resume: str = key(
        "auto",
        "`never` starts over, at each launch, and moves the old run to `previous-N/`; or a path or URL to start from",
        FREE,
    )
    storage: str | None = key(
        None,
        "in place of `checkpoints/` in the run's folder: a folder, or an fsspec URL, of this run alone: `s3://bucket/run` "
        "(`pip install s3fs`; tested), `gs://bucket/run` (gcsfs; tried with an emulator only)",
        FREE,
    )
    best: str | None = key(
        None,
        "a value of the evaluations, `accuracy`: the checkpoint with the best is kept beside the newest, see `best.json`",
        FREE,
    )
    accept_changes: bool = key(False, "resume although config or data differ from the checkpoint's", FREE)


@dataclass
class Log:
    """Keys of `log`: which outputs are written, and how often."""

    every_steps: int = key(10, "steps between two `train` lines", Ge(1), FREE)
    progress: Progress = key(Progress.auto, "`bar`, `plain` or `none`", FREE)
    train_metrics: bool = key(False, "measure the objective's metrics on training batches, too", FREE)
    tensorboard: bool = key(True, "write `tensorboard/`", FREE)
    report: bool = key(True, "write `report.html` at the end", FREE)


@dataclass
class Eval:
    """Keys of `eval`: how often and on how many samples the model is evaluated."""

    every_steps: int | str | None = key(
        None,
        "steps between two evaluations, the last after the last step; `null`: every epoch; `off`: never",
        Ge(1),
        FREE,
    )
    sanity_batches: int = key(
        2, "evaluation batches tried before a run's first step, without a trace; 0: none", Ge(0), FREE
    )
    max_samples: int | None = key(None, "the first so many test samples are measured; `null`: all", Ge(1), FREE)


@dataclass
class Config:
    """Configuration of one run. None means unlimited or chosen automatically, as the key's meaning says."""

    name: str = key("run", "the run's name", FREE)
    output_dir: str = key("runs/${name}", "one run, one folder", FREE)
    seed: int = key(0, "of the weights, the order of samples and all that is random", Ge(0), Le(2**64 - 1))
    epochs: int = key(10, "passes over the training data", Ge(1), FREE)
    max_steps: int | None = key(None, "optimizer steps; where given, in place of `epochs`", Ge(1), FREE)
    batch_size: int = key(64, "samples per optimizer step over the whole world, whatever its size", Ge(1))
    micro_batch_size: int | None = key(
        None, "the most samples that a rank puts through the model at once; accumulation does the rest", Ge(1), FREE
    )
    virtual_world_size: int | None = key(
        None,
        "the gradient is computed as so many ranks would: the same weights, bit for bit, at any world size up to it",
        Ge(1),
    )
    precision: Precision = key(Precision.fp32, "`bf16`, or `fp16` with loss scaling")
    device: Device = key(Device.auto, "`cpu`, `cuda`; `auto`: GPUs where there are any", FREE)
    gpus: Any = key(None, "`[0,2]` gives local rank 1 device 2, `0` is `[0]`; `null`: all", FREE, LOCAL)
    compile: bool = key(False, "torch.compile the model", FREE)
    channels_last: bool | None = key(None, "memory layout of images; `null`: by device and precision", FREE)
    grad_clip: float | None = key(None, "the most that the L2 norm of the global gradient may be", Gt(0))
    on_nonfinite: NonFinite = key(NonFinite.stop, "`skip` leaves out steps whose loss or gradient is not finite", FREE)
    max_skipped_steps: int = key(10, "how many such steps in a row are tolerated", Ge(1), FREE)
    max_idle_attempts: int = key(3, "attempts in a row that come no further, before exit code 7", Ge(0), FREE)
    max_idle_preemptions: int = key(100, "clean stops in a row that come no further, before exit code 7", Ge(0), FREE)
    deterministic: bool = key(False, "deterministic kernels only", FREE)
    data: Any = part("what is trained on")
    model: Any = part("what is trained")
    objective: Any = part("what is minimised and measured")
    optimizer: Any = part("how weights are changed")
    scheduler: Any = part("how the learning rate changes")
    strategy: Any = part("how a step is carried out across ranks")
    loader: Loader = field(default_factory=Loader)
    dist: Dist = field(default_factory=Dist)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    eval: Eval = field(default_factory=Eval)
    metrics: dict[str, Any] = key_of(
        lambda: {"port": None, "host": "127.0.0.1"},
        "what else is measured: `+metrics.f1._target_=torchmetrics.F1Score`, any with update, compute and reset; "
        "`metrics.port=9400`: rank 0 answers Prometheus there, on `metrics.host`",
        FREE,
    )
    callbacks: dict[str, Any] = key_of(
        dict, "what happens beside the loop: names from conf/callbacks, `+callbacks.mine._target_=your.Own`", FREE
    )
    doctor: bool = key(False, "look first whether this cluster can train (`python -m train.doctor --quick`)", FREE)
    profile: bool = key(False, "write a torch.profiler trace of some steps of each rank to `profile/`", FREE)
    own: dict[str, Any] = key_of(
        dict, "values of your own (`+own.width=64`), for YAML elsewhere to refer to as own.width", FREE
    )
    freeze: list[str] = key_of(list, "patterns of parameters' names that are not trained: `[features, '*.bias']`")
    init_from: str | None = key(
        None, "weights to begin with: a file, a URL, or a run's folder (its `model.pt`, else its newest checkpoint)"
    )
    init_ignore: list[str] = key_of(
        list, "patterns of names that `init_from` need not have, or that do not fit: `[head]`"
    )
    loggers: dict[str, Any] = key_of(
        dict, "what else keeps the records: names from conf/loggers, `+loggers.mine._target_=your.Own`", FREE
    )


@dataclass(frozen=True)
class Key:
    """A key of the kit by its full name (`checkpoint.keep`), with its value in a config."""

    name: str
    value: Any
    meaning: str
    marks: tuple[Any, ...]


def keys(config: Any = None, prefix: str = "") -> Iterator[Key]:
    """Yield the kit's keys in order, with their values in `config`, or their defaults."""
    config = config or Config()
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value) and "meaning" not in each.metadata:
            yield from keys(value, f"{prefix}{each.name}.")
        else:
            yield Key(prefix + each.name, value, each.metadata["meaning"], each.metadata["marks"])
