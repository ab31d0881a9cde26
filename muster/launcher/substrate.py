"""Detect the substrate by the environment variables that only it sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.errors import ConfigError
from muster.launcher import compose, kubernetes, loopback, slurm, verdict
from muster.launcher.spec import NUMA_BINDINGS, Spec
from muster.launcher.variables import one_of
from muster.launcher.verdict import Policy


def as_given(_env: Mapping[str, str], given: Sequence[str] = ()) -> list[str]:
    return [*given]


@dataclass(frozen=True)
class Substrate:
    """`marks`: variables that are all set on it, and not together on any earlier one in SUBSTRATES."""

    name: str
    marks: tuple[str, ...]
    own_spec: Callable[[Mapping[str, str]], Spec]
    policy: Policy
    overrides: Callable[[Mapping[str, str], Sequence[str]], list[str]] = as_given
    """Adds the words from the environment to those of the command line."""
    end_of_script: Callable[[Mapping[str, str]], Path] | None = None
    """The file that a node writes when a user's own script has ended."""

    def spec(self, env: Mapping[str, str]) -> Spec:
        """Raises ConfigError."""
        return replace(self.own_spec(env), numa_binding=one_of(env, "NUMA_BINDING", NUMA_BINDINGS))


THIS_MACHINE = Substrate("this machine", ("NPROC",), loopback.this_machine, verdict.THIS_MACHINE)
# TrainJob comes before Indexed Job: JobSet's pods have a completion index too.
SUBSTRATES = (
    Substrate("Slurm", ("SLURM_JOB_ID",), slurm.spec, verdict.SLURM),
    Substrate("PyTorchJob", ("PET_RDZV_ENDPOINT",), kubernetes.pytorchjob, verdict.PYTORCHJOB),
    Substrate("TrainJob", ("PET_MASTER_ADDR", "JOB_COMPLETION_INDEX"), kubernetes.static, verdict.TRAINJOB),
    # Master and Worker without an elasticPolicy: its pods are the operator's, which restarts them by their exit codes.
    Substrate("PyTorchJob", ("PET_MASTER_ADDR",), kubernetes.static, verdict.PYTORCHJOB),
    Substrate("Indexed Job", ("JOB_COMPLETION_INDEX",), kubernetes.indexed_job, verdict.INDEXED_JOB),
    Substrate(
        "compose",
        ("NODES", "NPROC", "RUN", "ARGS"),
        compose.spec,
        verdict.COMPOSE,
        compose.overrides,
        compose.end_of_script,
    ),
    THIS_MACHINE,
)


def find(env: Mapping[str, str]) -> Substrate | None:
    return next((kind for kind in SUBSTRATES if all(name in env for name in kind.marks)), None)


def here(env: Mapping[str, str]) -> Substrate:
    """Raises ConfigError: no substrate started this process."""
    if kind := find(env):
        return kind
    known = ", ".join(f"{kind.name} ({' '.join(kind.marks)})" for kind in SUBSTRATES)
    raise ConfigError(
        f"no launcher's variables are set; known: {known}; on one machine set NPROC=N, or use torchrun --standalone --nproc-per-node=N"
    )
