"""Detect the substrate by the environment variables that only it sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muster.errors import ConfigError
from muster.launcher import compose, kubernetes, slurm, verdict
from muster.launcher.spec import Spec
from muster.launcher.verdict import Policy


def no_overrides(_env: Mapping[str, str]) -> list[str]:
    """Return no overrides."""
    return []


@dataclass(frozen=True)
class Substrate:
    """A substrate. `marks`: variables that are all set on it, and not together on any earlier one in the list."""

    name: str
    marks: tuple[str, ...]
    spec: Callable[[Mapping[str, str]], Spec]
    policy: Policy
    overrides: Callable[[Mapping[str, str]], list[str]] = no_overrides
    """Returns the overrides that come by the environment instead of the command line."""


# TrainJob comes before Indexed Job: JobSet's pods have a completion index too.
SUBSTRATES = (
    Substrate("Slurm", ("SLURM_JOB_ID",), slurm.spec, verdict.SLURM),
    Substrate("PyTorchJob", ("PET_RDZV_ENDPOINT",), kubernetes.pytorchjob, verdict.PYTORCHJOB),
    Substrate("TrainJob", ("PET_MASTER_ADDR",), kubernetes.trainjob, verdict.TRAINJOB),
    Substrate("Indexed Job", ("JOB_COMPLETION_INDEX",), kubernetes.indexed_job, verdict.INDEXED_JOB),
    Substrate("compose", ("NODES", "NPROC", "RUN", "ARGS"), compose.spec, verdict.COMPOSE, compose.overrides),
)


def find(env: Mapping[str, str]) -> Substrate | None:
    """Return the first substrate whose variables are set; None if there is none."""
    return next((kind for kind in SUBSTRATES if all(name in env for name in kind.marks)), None)


def here(env: Mapping[str, str]) -> Substrate:
    """Return the substrate of this process. Raises ConfigError if no substrate started it."""
    if kind := find(env):
        return kind
    known = ", ".join(f"{kind.name} ({' '.join(kind.marks)})" for kind in SUBSTRATES)
    raise ConfigError(
        f"no launcher's variables are set; known: {known}; on one machine use torchrun --standalone --nproc-per-node=N -m train"
    )
