"""Compose one checked config for each run that a command line names. Hydra's --help, --cfg job and -m keep working."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from muster.errors import ConfigError
from muster.redact import redacted
from muster.train.config.check import check
from muster.train.config.choices import conf_folder
from muster.train.config.command_line import arranged, parsed, swept_keys
from muster.train.config.error_messages import explain, no_folder
from muster.train.config.help import help_template
from muster.train.config.keys import GROUPS, Config
from muster.train.config.parts import TARGET
from muster.train.config.sweeper import folder_of, quick_mode, quiet_sweeper

LOOKS = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}
OWN = "own"
"""Name of each group's empty option, to which the `_target_` of a user's own class is added."""


def run_each(job: Callable[[Config | ConfigError, Mapping[str, str]], int]) -> int:
    """Call `job` for each config that sys.argv describes, and return the highest exit code.

    If a config is invalid, `job` gets its ConfigError instead. The second argument of `job` maps each swept key to its value in
    this job of a sweep; it is empty without a sweep. If the command line only asks for help or a printed config, there is no call.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors propagate: Hydra's own handler prints a traceback and exits 1
    if LOOKS & {*sys.argv} and os.environ.get("RANK", "0") != "0":
        return 0
    try:
        sys.argv[1:] = arranged(sys.argv[1:])
    except ConfigError as error:
        return job(error, {})
    register()
    quiet_sweeper()
    quick_mode()
    codes: list[int] = []
    is_composing = True

    @hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")  # type: ignore[untyped-decorator]
    def compose_and_do(composed: DictConfig) -> None:
        nonlocal is_composing
        swept = swept_keys(sys.argv[1:]) | {*(HydraConfig.get().sweeper.get("params") or {})}
        config = _typed(composed, swept)
        is_composing = False
        codes.append(job(config, _swept_values(swept)))
        is_composing = True

    try:
        with _shown_without_secrets() if LOOKS & {*sys.argv} else contextlib.nullcontext():
            compose_and_do()
    except Exception as error:
        if not is_composing:
            raise
        codes.append(job(error if isinstance(error, ConfigError) else explain(error), {}))
    return max(codes, default=0)


@contextlib.contextmanager
def _shown_without_secrets() -> Iterator[None]:
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        sys.stdout.write(redacted(shown.getvalue()))
        sys.stdout.flush()


def compose(overrides: list[str], *, config_dir: Path | None = None) -> Config:
    """Compose and check the config of one run from `overrides`, without a command line. Raises ConfigError.

    `config_dir`: a folder of the user's own options, as `--config-dir` names it.
    """
    register()
    overrides = [*overrides, *searched(config_dir)]
    try:
        with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = hydra.compose("config", overrides=overrides, return_hydra_config=True)
            choices = composed.hydra.runtime.choices
            with open_dict(composed):
                del composed["hydra"]
            return check(only_what_was_given(composed, choices, overrides))
    except ConfigError:
        raise
    except Exception as error:
        raise explain(error, overrides) from None


def searched(config_dir: Path | None) -> list[str]:
    """Return the override for Hydra's compose API that stands for `--config-dir`. Raises ConfigError."""
    if config_dir is None:
        return []
    if not config_dir.is_dir():
        raise ConfigError(no_folder(str(config_dir)))
    return [f"hydra.searchpath=[{QuotedString(f'file://{config_dir.absolute()}', Quote.single).with_quotes()}]"]


def of_run(folder: Path, overrides: list[str]) -> Config:
    """Load the config of the run in `folder` and apply `overrides` (`key=value`). Raises ConfigError."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run's folder: it has no config.yaml")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        assert isinstance(merged, DictConfig)
        _apply(overrides, merged)
        return check(merged)
    except ConfigError:
        raise
    except Exception as error:
        raise explain(error, overrides) from None


def _apply(overrides: list[str], config: DictConfig) -> None:
    for each in parsed(overrides):
        if each.is_delete() or each.is_sweep_override():
            raise ConfigError(f"{each.input_line} is not understood: write overrides as key=value")
        OmegaConf.update(config, each.key_or_group, each.value(), force_add=True)


def register() -> None:
    """Register the kit's keys, each group's empty option and the help text with Hydra.

    The help text reads all options; it stays empty if the command line has no option that could print it.
    """
    store = ConfigStore.instance()
    store.store(name="keys", node=Config)
    for group in GROUPS:
        store.store(group=group, name=OWN, node={TARGET: MISSING})
    prints = any(word.startswith("-") and word not in ("-m", "--multirun") for word in sys.argv[1:])
    template = help_template() if prints else ""
    store.store(group="hydra/help", name="muster", node={"app_name": "python -m train", "template": template})


def _typed(composed: DictConfig, swept: set[str]) -> Config | ConfigError:
    job, overrides = HydraConfig.get(), _task()
    try:
        config = check(only_what_was_given(composed, job.runtime.choices, overrides, name=job.job.config_name))
    except ConfigError as error:
        return error
    except Exception as error:
        return explain(error, overrides)
    return _own_folder(config, swept) if job.mode == RunMode.MULTIRUN else config


def _task() -> list[str]:
    """Return the overrides of this job as they were given: OmegaConf would resolve `${...}` in their texts."""
    texts = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(text) for text in texts] if isinstance(texts, list) else []


def only_what_was_given(
    composed: DictConfig, choices: Mapping[str, Any], overrides: list[str], *, name: str = "config"
) -> DictConfig:
    """Drop an option's defaults when its `_target_` is overridden.

    Such groups are composed again with the empty option: only values given for the new target remain, from YAML or command line.
    """
    loader = GlobalHydra.instance().config_loader()
    replaced = [
        group
        for group in GROUPS
        if isinstance(composed.get(group), DictConfig)
        and (option := loader.repository.load_config(f"{group}/{choices.get(group)}")) is not None
        and OmegaConf.select(option.config, TARGET) != OmegaConf.select(composed, f"{group}.{TARGET}")
    ]
    if not replaced:
        return composed
    kept = [text for each in parsed(overrides) for text in _again(each, replaced)]
    again: DictConfig = hydra.compose(name, overrides=[*kept, *(f"{group}={OWN}" for group in replaced)])
    return again


def _again(override: Override, replaced: list[str]) -> list[str]:
    """Return the override for a composition in which the groups `replaced` have no values yet."""
    text, key = str(override.input_line), override.key_or_group
    if key in replaced and not isinstance(override.value(), dict):
        return []  # the replaced choice
    if key.partition(".")[0] not in replaced:
        return [text]
    if override.is_delete():  # deletes a value of an option or a YAML file; the key may not exist now
        return [f"++{key}=0", f"~{key}"]
    return [f"++{text.lstrip('+')}"]


def _swept_values(swept: set[str]) -> dict[str, str]:
    each = {parsed([text])[0].key_or_group: redacted(text).partition("=")[2] for text in _task()} if swept else {}
    return {key: value for key, value in each.items() if key in swept}


def _own_folder(config: Config, swept: set[str]) -> Config:
    """Give each job of a sweep, which is a run, its own folder, named after the swept values."""
    job, others = HydraConfig.get(), swept - {"name", "output_dir"}
    if swept and not others:  # the swept values already set the folder
        return config
    given = [text for text in _task() if parsed([text])[0].key_or_group in others]
    name = folder_of(given) or str(job.job.num)
    storage = config.checkpoint.storage
    checkpoint = replace(config.checkpoint, storage=storage and f"{storage.rstrip('/')}/{name}")
    return replace(config, output_dir=str(Path(config.output_dir) / name), checkpoint=checkpoint)
