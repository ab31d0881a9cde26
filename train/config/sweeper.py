"""Hydra's basic sweeper without its multirun.yaml."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins

from muster.errors import ConfigError
from muster.redact import redacted
from muster.train.config.choices import conf_folder
from muster.train.config.command_line import parsed

ITS_OWN = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
LONGEST_NAME = 200
"""Maximum length of a folder name in bytes; file systems allow 255."""
SET_NOTHING = {"pkg://hydra.conf", "structured://"}
"""Places of Hydra's search path in which `hydra.mode` is null."""
composed_mode = Hydra.get_mode


def elsewhere(given: str) -> str:
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


def folder_of(overrides: Sequence[str]) -> str:
    """Return a folder name for the job of a sweep with these swept overrides; empty if there are none.

    `optimizer.lr=0.1` and `model.hidden=[64,32]` give `lr-0.1_hidden-64-32`. Keys whose last parts are equal stand whole.
    """
    keys = [str(each.key_or_group) for each in parsed(overrides)]
    last = [key.rpartition(".")[2] for key in keys]
    values = [_plain(redacted(text).partition("=")[2]) for text in overrides]
    names = [key if last.count(short) > 1 else short for key, short in zip(keys, last, strict=True)]
    return folder_name("_".join(f"{name}-{value}" for name, value in zip(names, values, strict=True)))


def folder_name(text: str) -> str:
    """Return a folder name that is unique for `text`; a digest stands for characters that a plain name cannot have."""
    plain = re.sub(r"[^\w.+-]+", "_", text, flags=re.ASCII)
    if plain == text and len(plain) < LONGEST_NAME:
        return plain
    return f"{plain[:LONGEST_NAME]}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:6]}"


def _plain(value: str) -> str:
    """Return a value without its quotes; a list as its items."""
    if value[:1] == "[" and value[-1:] == "]":
        return re.sub(r"\s*,\s*", "-", value[1:-1].strip())
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def quick_mode() -> None:
    """Stop Hydra from composing the config twice, first only to read `hydra.mode`: a third of a start without imports."""
    Hydra.get_mode = mode


def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Return `hydra.mode`; None if no override and no YAML of the search path can set it. Replaces Hydra.get_mode."""
    places = {
        each.path.removeprefix("file://") for each in self.config_loader.get_search_path().get_path()
    } - SET_NOTHING
    is_set = any("hydra" in each for each in overrides) or places != {str(conf_folder())}
    if is_set or any(map(_may_set, conf_folder().rglob("*.yaml"))):
        return composed_mode(self, config_name, overrides)
    return None


def _may_set(path: Path) -> bool:
    text = path.read_text(errors="replace", encoding="utf-8")
    return "hydra" in text and "mode" in text.replace("model", "")
