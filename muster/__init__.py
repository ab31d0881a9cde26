"""Muster: train with PyTorch on any cluster, exactly resumable.

The packages in it are the runtime, which holds any training job together. `muster.train` is the Hydra-configured
trainer, the runtime's first user; `muster [overrides]` runs it.

Public names:
    Job: exact resume, one writer, preemption and records for a training loop of one's own.
    launch: start processes on this machine from a script or a notebook, without a launcher.
    load: a run's model with its weights, in a script or a notebook.
    submit: submit a run to Slurm through submitit, as slurm/submit.py does.
    callbacks: hooks beside the trainer's loop; `callbacks.Callback` is the base class.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.job.job import Job as Job
    from muster.launcher.spawn import launch as launch
    from muster.train import callbacks as callbacks
    from muster.train.load import load as load
    from muster.train.submit import submit as submit

PUBLIC = {
    "Job": "muster.job.job:Job",
    "callbacks": "muster.train.callbacks",
    "launch": "muster.launcher.spawn:launch",
    "load": "muster.train.load:load",
    "submit": "muster.train.submit:submit",
}
"""The public names. Each is imported on first use, because most processes need none of them."""

__all__ = ["Job", "callbacks", "launch", "load", "submit"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("torch-muster")
    if name not in PUBLIC:
        raise AttributeError(f"module 'muster' has no attribute {name!r}; public names: {', '.join(PUBLIC)}")
    return pkgutil.resolve_name(PUBLIC[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
