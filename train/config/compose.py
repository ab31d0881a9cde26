"""From a command line to one checked config for each run that it names. Hydra's habits stay: --help, --cfg job, -m."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from train.config.check import check
from train.config.explain import explain
from train.config.help import help_template
from train.config.keys import GROUPS, Config
from train.config.options import conf_folder
from train.config.parts import TARGET
from train.errors import ConfigError

LOOKS = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}
FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--shell-completion",
    "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip
"""Hydra's own."""
TAKE_A_VALUE = {
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
    "--experimental-rerun",
}  # fmt: skip
OWN = "own"
"""The option of every group that has no values: what a `_target_` of a user's own begins with."""


def run_each(job: Callable[[Config | ConfigError], int]) -> int:
    """Call `job` with each config that sys.argv leads to, or with what is wrong with it; give back the highest code.

    `job` is not called where the command line only asks for help or to see a config.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's own handler prints a traceback and exits 1: let its errors reach us
    if LOOKS & {*sys.argv} and os.environ.get("RANK", "0") != "0":
        return 0
    if wrong := unknown_flag(sys.argv[1:]):
        return job(wrong)
    sys.argv[1:] = overrides_first(sys.argv[1:])
    register()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")  # type: ignore[untyped-decorator]
    def compose_and_do(composed: DictConfig) -> None:
        codes.append(job(_typed(composed)))

    try:
        compose_and_do()
    except BrokenPipeError:  # `--help | head`
        sys.stdout = open(os.devnull, "w")
        return 0
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        return job(explain(error))
    return max(codes, default=0)


def unknown_flag(words: list[str]) -> ConfigError | None:
    """What is wrong with a word that begins as an option and is none of Hydra's, if there is one."""
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if not word.startswith("--") or any(flag.startswith(name) for flag in FLAGS):
            continue
        following = words[place + 1] if place + 1 < len(words) else ""
        value = value or ("..." if "=" in following or following.startswith("-") else following) or "..."
        key = name.lstrip("-").replace("-", "_")
        return ConfigError(f"{word} is no option: write {key}={value}, without dashes")
    return None


def overrides_first(words: list[str]) -> list[str]:
    """The same command line; Hydra takes overrides in one piece only, and wherever options stand is right for people."""
    overrides: list[str] = []
    options: list[str] = []
    for place, word in enumerate(words):
        is_value = place > 0 and words[place - 1] in TAKE_A_VALUE
        (options if word.startswith("-") or is_value else overrides).append(word)
    return [*overrides, *options]


def compose(overrides: list[str]) -> Config:
    """The checked config of one run, for tools that have no command line of a run. Raises ConfigError."""
    register()
    try:
        with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = hydra.compose("config", overrides=overrides, return_hydra_config=True)
            choices = composed.hydra.runtime.choices
            with open_dict(composed):
                del composed["hydra"]
            return check(only_what_was_given(composed, choices, overrides))
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        raise explain(error) from None


def of_run(folder: Path, overrides: list[str]) -> Config:
    """The config of the run in `folder`, changed by `overrides` (`key=value`). Raises ConfigError."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is no run's folder: there is no config.yaml in it")
    if wrong := next((text for text in overrides if "=" not in text), None):
        raise ConfigError(f"{wrong} is not understood: write overrides as key=value")
    try:
        changes = OmegaConf.from_dotlist([text.lstrip("+") for text in overrides])
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path), changes)
        assert isinstance(merged, DictConfig)
        return check(merged)
    except OmegaConfBaseException as error:
        raise explain(error) from None


def as_given(key: str, default: str) -> str:
    """What the command line says of `key`, for where it could not be composed."""
    return next((text.partition("=")[2] for text in reversed(sys.argv) if text.startswith(f"{key}=")), default)


def register() -> None:
    """Give Hydra the kit's keys, the option of a group that has no values, and the help text."""
    store = ConfigStore.instance()
    store.store(name="keys", node=Config)
    for group in GROUPS:
        store.store(group=group, name=OWN, node={TARGET: MISSING})
    store.store(group="hydra/help", name="muster", node={"app_name": "python -m train", "template": help_template()})


def _typed(composed: DictConfig) -> Config | ConfigError:
    job = HydraConfig.get()
    try:
        config = check(only_what_was_given(composed, job.runtime.choices, list(job.overrides.task)))
    except ConfigError as error:
        return error
    except (HydraException, OmegaConfBaseException) as error:
        return explain(error)
    return _own_folder(config) if job.mode == RunMode.MULTIRUN else config


def only_what_was_given(composed: DictConfig, choices: Mapping[str, Any], overrides: list[str]) -> DictConfig:
    """The same config, in which a `_target_` that replaced an option's has none of that option's values.

    Compose again with the option that has none: what is then there was given for the new target, in a yaml or by hand.
    """
    loader = GlobalHydra.instance().config_loader()
    replaced = [
        group
        for group in GROUPS
        if isinstance(composed[group], DictConfig)
        and (option := loader.repository.load_config(f"{group}/{choices.get(group)}")) is not None
        and OmegaConf.select(option.config, TARGET) != OmegaConf.select(composed, f"{group}.{TARGET}")
    ]
    if not replaced:
        return composed
    chosen = re.compile(rf"({'|'.join(replaced)})=")
    inner = re.compile(rf"\+{{0,2}}(?=({'|'.join(replaced)})\.)")
    kept = [inner.sub("++", text, count=1) for text in overrides if not chosen.match(text.lstrip("+"))]
    again: DictConfig = hydra.compose("config", overrides=[*kept, *(f"{group}={OWN}" for group in replaced)])
    return again


def _own_folder(config: Config) -> Config:
    """Each job of a sweep is a run, and each run has a folder of its own, named by what is swept."""
    job = HydraConfig.get()
    given = OverridesParser.create().parse_overrides([text for text in sys.argv[1:] if re.match(r"[^-][^=]*=", text)])
    swept_keys = {override.key_or_group for override in given if override.is_sweep_override()}
    if swept_keys & {"name", "output_dir"}:  # they have one already
        return config
    swept = [text for text in job.overrides.task if text.lstrip("+").split("=")[0] in swept_keys]
    name = re.sub(r"[^\w.=,+-]+", "_", ",".join(swept) or str(job.job.num))
    storage = config.checkpoint.storage
    checkpoint = replace(config.checkpoint, storage=storage and f"{storage.rstrip('/')}/{name}")
    return replace(config, output_dir=str(Path(config.output_dir) / name), checkpoint=checkpoint)
