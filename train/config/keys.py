"""The kit's own keys: name, type, default, limits, freedom and meaning of each, in one place.

Hydra composes and type-checks them. `--help` and the table in docs/keys.md are generated from them (`muster config`).
The parameters of a part (data, model, ...) are those of its constructor; their values are in its YAML under conf/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from muster.train.config.constraints import FREE, LOCAL, Ge, Gt, Le

# Users type the names of enum members, so the names are the terms of the field.
Precision = Enum("Precision", ["fp32", "bf16", "fp16"])
Backend = Enum("Backend", ["auto", "gloo", "nccl"])
Device = Enum("Device", ["auto", "cpu", "cuda"])
Progress = Enum("Progress", ["auto", "bar", "plain", "none"])
BestMode = Enum("BestMode", ["auto", "min", "max"])
FrozenMode = Enum("FrozenMode", ["eval", "train"])
Hierarchical = Enum("Hierarchical", ["never", "auto", "always"])
NonFinite = Enum("NonFinite", ["stop", "skip"])
BadSample = Enum("BadSample", ["stop", "skip"])

LONGEST_S = 10**9
"""Maximum timeout in seconds: the system's clocks and waits can represent no more."""

GROUPS = ("data", "model", "objective", "optimizer", "scheduler", "strategy")
"""Groups whose part is chosen by name from conf/, or built by import path."""

SEVERAL = ("loggers", "callbacks", "metrics")
"""Groups that hold any number of parts, each under its own name."""


def key(default: Any, meaning: str, *marks: Any) -> Any:
    """Define a key of the kit. `marks`: limits (Ge, Gt, Le) and freedom (FREE, LOCAL), see constraints.py."""
    return field(default=default, metadata={"meaning": meaning, "marks": marks})


def key_of(factory: Any, meaning: str, *marks: Any) -> Any:
    return field(default_factory=factory, metadata={"meaning": meaning, "marks": marks})


def part(meaning: str) -> Any:
    return field(default=MISSING, metadata={"meaning": meaning, "marks": ()})


@dataclass
class Loader:
    num_workers: int | None = key(
        None,
        "number of processes per rank that load samples ahead of training; `null`: on GPUs the cores of the rank, at most 16 and "
        "as far as /dev/shm has room; on the CPU, and for a stream, none",
        Ge(0),
        FREE,
    )
    drop_last: bool = key(False, "drop the last batch of an epoch if it is smaller than `batch_size`")
    collate_fn: Any = key(
        None, "import path of a function that turns a list of samples into a batch; `null`: torch's `default_collate`"
    )
    batch: Any = key(None, "import path of a function that turns a batch into the pair (inputs, targets)")
    on_bad_sample: BadSample = key(
        BadSample.stop, "`stop`: end the run if a sample cannot be read; `skip`: use the next sample in its place"
    )
    max_bad_samples: int = key(10, "maximum number of unreadable samples that `skip` tolerates", Ge(0), FREE)


@dataclass
class Dist:
    backend: Backend = key(Backend.auto, "`gloo` or `nccl`; `auto`: NCCL on GPUs, gloo on the CPU", FREE)
    timeout_s: float = key(
        300.0, "seconds without progress after which a rank is reported as hung and ended", Gt(0), Le(LONGEST_S), FREE
    )
    start_timeout_s: float = key(60.0, "seconds within which all ranks must join", Gt(0), Le(LONGEST_S), FREE)
    shared_memory: bool = key(
        True, "all-reduce in shared memory if all ranks are on the CPUs of one host; otherwise use gloo", FREE
    )
    hierarchical: Hierarchical = key(
        Hierarchical.never,
        "with `virtual_world_size` on several hosts: `always`: the ranks of a host add up first, so that less goes over the "
        "network; `auto`: if each host has 4 ranks and the network is 10 times slower than memory; same bits",
        FREE,
    )
    survive: bool = key(
        True,
        "under torchrun on CPUs with `strategy=ddp`: a rank that dies by a signal is restarted in place, and no step is repeated",
        FREE,
    )
    max_survivals_per_hour: int = key(
        20, "number of times within an hour that a rank is restarted in place; then all ranks restart", Ge(0), FREE
    )
    init_method: str = key(
        "env://",
        "`env://`: rendezvous by MASTER_ADDR and MASTER_PORT; `file:///shared/path`: by files, for ranks started by hand",
        FREE,
        LOCAL,
    )


@dataclass
class Checkpoint:
    every_steps: int = key(100, "save a checkpoint every N steps", Ge(1), FREE)
    every_s: float | None = key(
        None, "save a checkpoint every N seconds of training, in place of `every_steps`; `null`: off", Gt(0), FREE
    )
    every_epochs: int | None = key(
        None, "save a checkpoint after every N epochs, in place of `every_steps`; `null`: off", Ge(1), FREE
    )
    keep: int = key(3, "number of newest checkpoints to keep", Ge(1), FREE)
    resume: str = key(
        "auto",
        "`auto` resumes from the newest valid checkpoint; `never` starts over at each launch and moves the old run to "
        "`previous-N/`; a path or URL: the checkpoint to start from while the run has none of its own",
        FREE,
    )
    storage: str | None = key(
        None,
        "folder or fsspec URL for the checkpoints of this run alone: `s3://bucket/run` (`pip install s3fs`; tested), "
        "`gs://bucket/run` (gcsfs; tested with an emulator only); `null`: `checkpoints/` in the run's folder",
        FREE,
    )
    best: str | None = key(
        None,
        "name of an evaluation metric, such as `accuracy`: also keep the checkpoint with its best value; `best.json` names it",
        FREE,
    )
    best_mode: BestMode = key(
        BestMode.auto,
        "`min` if less of `best` is better, `max` if more is; `auto`: as the metric or its name says (`loss`, `mae`, `accuracy`)",
        FREE,
    )
    accept_changes: bool = key(False, "resume even if the config or the data differ from the checkpoint's", FREE)


@dataclass
class Log:
    every_steps: int = key(10, "write a `train` record every N steps", Ge(1), FREE)
    every_s: float | None = key(
        None, "write a `train` record every N seconds, in place of `every_steps`; `null`: off", Gt(0), FREE
    )
    progress: Progress = key(
        Progress.auto, "`bar`, `plain` or `none`; `auto`: `bar` in a terminal, otherwise `plain`", FREE
    )
    train_metrics: bool = key(False, "also compute the objective's metrics on training batches", FREE)
    tensorboard: bool = key(True, "write `tensorboard/`", FREE)
    report: bool = key(True, "write `report.html` at the end", FREE)


@dataclass
class Eval:
    every_steps: int | str | None = key(
        None,
        "evaluate every N steps and after the last step; `null`: after every epoch; `off`: never",
        Ge(1),
        FREE,
    )
    sanity_batches: int = key(
        2, "number of evaluation batches to try before the first step, without side effects; 0: none", Ge(0), FREE
    )
    max_samples: int | None = key(None, "evaluate only the first N test samples; `null`: all", Ge(1), FREE)


@dataclass
class Config:
    """None means unlimited or chosen automatically, as the key's meaning says."""

    name: str = key("run", "name of the run", FREE)
    output_dir: str = key("runs/${name}", "folder of the run; each run needs its own", FREE)
    seed: int = key(0, "seed of the initial weights, the order of samples and all random numbers", Ge(0), Le(2**64 - 1))
    epochs: int = key(10, "number of passes over the training data", Ge(1), FREE)
    max_steps: int | None = key(None, "number of optimizer steps; overrides `epochs`", Ge(1), FREE)
    batch_size: int = key(64, "global batch size: samples per optimizer step over all ranks, at any world size", Ge(1))
    micro_batch_size: int | None = key(
        None,
        "maximum number of samples per forward pass on a rank; gradients are accumulated over micro-batches",
        Ge(1),
        FREE,
    )
    virtual_world_size: int | None = key(
        None,
        "compute gradients as N ranks would: bitwise equal weights at every world size up to N",
        Ge(1),
    )
    precision: Precision = key(Precision.fp32, "`fp32`, `bf16`, or `fp16` with loss scaling")
    tf32: bool | None = key(
        None,
        "round the factors of fp32 products on GPUs to 10 bits (TF32), which is several times faster; `null`: unless "
        "`deterministic` or `virtual_world_size` is set",
        FREE,
    )
    device: Device = key(Device.auto, "`cpu` or `cuda`; `auto`: GPUs if the host has any", FREE)
    gpus: Any = key(
        None, "GPUs of local ranks 0, 1, ... by index: `[0,2]`, or `0` for `[0]`; `null`: all, in order", FREE, LOCAL
    )
    compile: bool = key(False, "compile the model with torch.compile", FREE)
    channels_last: bool | None = key(
        None,
        "use the channels-last memory format; `null`: for convolutions on GPUs, unless in `fp32` without `tf32`",
        FREE,
    )
    grad_clip: float | None = key(None, "maximum L2 norm of the global gradient; `null`: no clipping", Gt(0))
    on_nonfinite: NonFinite = key(
        NonFinite.stop,
        "`stop`: end the run if the loss or the gradient is not finite, at the next log line, evaluation or save; `skip`: skip the step",
        FREE,
    )
    max_skipped_steps: int = key(10, "maximum number of consecutive skipped steps", Ge(1), FREE)
    max_idle_attempts: int = key(
        3, "consecutive failed attempts without progress to tolerate; one more ends with exit code 7", Ge(0), FREE
    )
    max_idle_preemptions: int = key(
        100, "consecutive preemptions without progress to tolerate; one more ends with exit code 7", Ge(0), FREE
    )
    deterministic: bool = key(False, "use deterministic kernels only", FREE)
    keep_memory: bool = key(
        True,
        "keep the host's memory that a step frees for the next one, in place of giving it back to the system; an evaluation gives it back (glibc)",
        FREE,
    )
    data: Any = part("training and test data")
    model: Any = part("model to train")
    objective: Any = part("loss and metrics")
    optimizer: Any = part("optimizer of the weights")
    scheduler: Any = part("learning rate schedule")
    strategy: Any = part("execution of a step across ranks")
    loader: Loader = field(default_factory=Loader)
    dist: Dist = field(default_factory=Dist)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    eval: Eval = field(default_factory=Eval)
    metrics: dict[str, Any] = key_of(
        lambda: {"port": None, "host": "127.0.0.1"},
        "additional metrics, objects with update, compute and reset: `+metrics.f1._target_=torchmetrics.F1Score`, "
        "`+metrics.f1.of=logits` for one entry of the model's outputs; "
        "`metrics.port=9400`: serve Prometheus on rank 0 at `metrics.host`",
        FREE,
    )
    callbacks: dict[str, Any] = key_of(
        dict, "callbacks: names from conf/callbacks, or your own as `+callbacks.mine._target_=your.Own`", FREE
    )
    doctor: bool = key(False, "run the doctor's quick checks of the cluster first (`muster doctor --quick`)", FREE)
    profile: bool = key(False, "write a torch.profiler trace of a few steps of each rank to `profile/`", FREE)
    own: dict[str, Any] = key_of(
        dict, "your own values (`+own.width=64`); other YAML refers to them as own.width", FREE
    )
    freeze: list[str] = key_of(list, "name patterns of parameters that are not trained: `[features, '*.bias']`")
    frozen_mode: FrozenMode = key(
        FrozenMode.eval,
        "mode, while the others train, of a module whose parameters are all frozen by `freeze`: `eval`: its batch norm keeps its "
        "statistics and its dropout drops nothing; `train`: as the others",
        FREE,
    )
    init_from: str | None = key(
        None, "initial weights: a file, a URL, or a run's folder (its `model.pt`, else its newest checkpoint)"
    )
    init_ignore: list[str] = key_of(
        list, "name patterns of weights not to load from `init_from`, such as a new head: `[head]`"
    )
    loggers: dict[str, Any] = key_of(
        dict, "loggers: names from conf/loggers, or your own as `+loggers.mine._target_=your.Own`", FREE
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
