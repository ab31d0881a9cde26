"""Hydra's basic sweeper without its multirun.yaml."""

from __future__ import annotations

from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins

from muster.errors import ConfigError

ITS_OWN = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def elsewhere(given: str) -> str:
    """Return the message for a launcher other than Hydra's basic one."""
    return (
        f"{given}: a sweep's runs start one after another here (hydra/launcher=basic); to start each as a job of its own, "
        "write `python slurm/submit.py -m`, with cluster=local without Slurm (`muster init slurm` writes slurm/submit.py)"
    )


def quiet_sweeper() -> None:
    """Stop Hydra's own sweeper from writing multirun.yaml, which every rank would write into the current folder."""
    own: Any = Plugins.instance().class_name_to_class[ITS_OWN]
    own.sweep = sweep  # Hydra loads no sweeper from a package of this name


def sweep(self: Any, arguments: list[str]) -> Any:
    """Run the jobs of a sweep one after another; replaces BasicSweeper.sweep. Raises ConfigError for other launchers."""
    if type(self.launcher).__name__ != "BasicLauncher":  # it would pickle the job and run it in a process without ranks
        raise ConfigError(elsewhere(f"hydra/launcher={type(self.launcher).__name__}"))
    given = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
    parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
    self.overrides = self.split_arguments(parser.parse_overrides(given), self.max_batch_size)
    found: list[Any] = []
    while not self.is_done():
        batch = self.get_job_batch()
        self.validate_batch_is_legal(batch)
        found.append(self.launcher.launch(batch, initial_job_idx=sum(map(len, found))))
        _ = [each.return_value for each in found[-1]]  # re-raises a job's exception
    return found
