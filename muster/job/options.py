"""The settings of a `Job`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from muster.errors import ConfigError
from muster.lease.open_folder import RunOptions
from muster.loggers.base import Logger
from muster.redact import redacted_all
from muster.world.group_options import GroupOptions

COUNTS = ("save_every", "keep", "log_every", "seed", "max_idle_attempts", "max_survivals_per_hour")
SECONDS = ("timeout_s", "start_timeout_s")
NOT_NEGATIVE = {"seed": 0, "max_idle_attempts": 0, "max_survivals_per_hour": 0}
TOO_LARGE = 2**63
DEVICES = ("auto", "cpu", "cuda")
NOT_PLAIN = ("loggers", "own")
"""Fields whose values need not be plain, nor equal on all ranks."""


@dataclass(eq=False)
class JobOptions:
    """Settings of a `Job`.

    Args:
        folder: the run's folder, which all nodes must share. One run has one folder.
        save_every: save a checkpoint every N steps, and after the last one.
        keep: number of newest checkpoints to keep.
        log_every: write a `train` record every N steps.
        seed: seed of the order of samples and of the random number generators of Python, NumPy and torch.
        device_type: `auto` (CUDA if the host has a device), `cpu` or `cuda`.
        storage: folder or fsspec URL for the checkpoints of this run alone; None: `checkpoints/` in `folder`.
        resume: `auto` resumes from the newest valid checkpoint; `never` starts over at each launch and moves the old
            run to `previous-N/`; a path or URL: the checkpoint to start from while the run has none of its own.
        timeout_s: seconds without progress after which a rank is reported as hung and ended, as in one collective; what may compile,
            the first steps and evaluations, has 600.
        start_timeout_s: seconds within which all ranks must join.
        keep_memory: keep the host's memory that a step frees for the next one, in place of giving it back to the system; an evaluation gives
            it back (glibc).
        survive: whether a rank that a signal kills is restarted in place, in a loop that `Job.run` calls.
        max_survivals_per_hour: the most times that a rank is restarted in place within an hour; once more restarts all ranks.
        max_idle_attempts: consecutive failed attempts without progress to tolerate; one more ends with exit code 7.
        tensorboard: write `tensorboard/`.
        metrics_port: port at which rank 0 serves Prometheus; None: it does not.
        loggers: callables that create further loggers on rank 0 (`muster.loggers.base.Logger`); they get `folder`,
            `name`, `step` and `total_steps` as keywords.
        own: values of the script to keep in config.yaml, such as `vars(args)`.
    """

    folder: str | Path
    _: KW_ONLY
    save_every: int = 100
    keep: int = 3
    log_every: int = 10
    seed: int = 0
    device_type: str = "auto"
    storage: str | None = None
    resume: str = "auto"
    timeout_s: float = 300.0
    start_timeout_s: float = 60.0
    keep_memory: bool = True
    survive: bool = True
    max_survivals_per_hour: int = 20
    max_idle_attempts: int = 3
    tensorboard: bool = True
    metrics_port: int | None = None
    loggers: Sequence[Callable[..., Logger]] = ()
    own: Mapping[str, Any] = field(default_factory=dict)


def check_options(options: JobOptions) -> None:
    """Raise ConfigError for a value out of range."""
    for name in (*COUNTS, *SECONDS):
        kind, of = (int, "whole number") if name in COUNTS else (int | float, "number")
        value, least = getattr(options, name), NOT_NEGATIVE.get(name, 1e-9)
        if not isinstance(value, kind) or isinstance(value, bool) or not least <= value < TOO_LARGE:
            raise ConfigError(f"Job({name}={value!r}): give a {of} {'of at least 0' if least == 0 else 'above 0'}")
    if not isinstance(options.resume, str):
        raise ConfigError(f"Job(resume={options.resume!r}): give auto, never, a path or a URL")
    if not isinstance(options.own, Mapping):
        raise ConfigError(f"Job(own={options.own!r}): give a dict of values, such as vars(args)")
    if options.device_type not in DEVICES:
        raise ConfigError(f"Job(device_type={options.device_type!r}): valid: {', '.join(DEVICES)}")


def as_yaml(options: JobOptions, **facts: Any) -> str:
    """Return the text of config.yaml: the settings, `facts` of the loop, and the script's own values."""
    return yaml.safe_dump({**_plain(options), **facts, "own": own_of(options)}, sort_keys=False)


def own_of(options: JobOptions) -> dict[str, Any]:
    """Return the script's own values as config.yaml and manifests have them, without the secrets of URLs."""
    return {str(name): redacted_all(_readable(value)) for name, value in options.own.items()}


def own_before(options: JobOptions, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a checkpoint's manifest, or the attempt before's, in config.yaml, if it has none; empty without either."""
    if isinstance(of_checkpoint := manifest.get("own"), dict):  # from 2026-11-30 on
        return of_checkpoint
    try:
        found = yaml.safe_load((Path(options.folder) / "config.yaml").read_text(encoding="utf-8"))["own"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def run_options_of(options: JobOptions) -> RunOptions:
    return RunOptions(
        Path(options.folder),
        storage=options.storage,
        resume=options.resume,
        timeout_s=options.timeout_s,
        max_idle_attempts=options.max_idle_attempts,
    )


def group_options_of(options: JobOptions) -> GroupOptions:
    return GroupOptions(
        device=options.device_type,
        timeout_s=options.timeout_s,
        start_timeout_s=options.start_timeout_s,
        alike=_plain(options),
    )


def _plain(options: JobOptions) -> dict[str, Any]:
    """Return the settings that every rank must have in common, as plain values."""
    names = [each.name for each in dataclasses.fields(JobOptions) if each.name not in ("folder", *NOT_PLAIN)]
    return {"folder": str(options.folder), **{name: _readable(getattr(options, name)) for name in names}}


def _readable(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def loggers_of(options: JobOptions) -> dict[str, Callable[..., Logger]]:
    """Return name -> callable that creates the logger; the names are those that users know."""
    makers: dict[str, Callable[..., Logger]] = {}
    if options.metrics_port is not None:
        makers["metrics_port"] = partial(_prometheus, options.metrics_port)
    if options.tensorboard:
        makers["tensorboard"] = _tensorboard
    return makers | {f"loggers[{number}]": make for number, make in enumerate(options.loggers)}


def _tensorboard(*, folder: Path, step: int, **_: Any) -> Logger:
    from muster.loggers.tensorboard import TensorBoard  # imported here: it takes seconds

    return TensorBoard(folder, step)


def _prometheus(port: int, *, name: str, step: int, total_steps: int, **_: Any) -> Logger:
    from muster.loggers.prometheus import Prometheus

    class OfJob(Prometheus):
        key = "metrics_port"

    return OfJob(name, step, total_steps, port=port)
