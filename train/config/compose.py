"""From a command line to one checked config for each run that it names. Hydra's habits stay: --help, --cfg job, -m."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from train.config.check import check
from train.config.command_line import arranged, parsed, swept_keys
from train.config.explain import explain
from train.config.help import help_template
from train.config.keys import GROUPS, Config
from train.config.options import conf_folder
from train.config.parts import TARGET
from train.config.sweeper import quiet_sweeper
from train.errors import ConfigError
from train.redact import redacted

LOOKS = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}
OWN = "own"
"""The option of every group that has no values: what a `_target_` of a user's own begins with."""
LONGEST_NAME = 200
"""Bytes of a folder's name; file systems take 255."""


def run_each(job: Callable[[Config | ConfigError, Mapping[str, str]], int]) -> int:
    """Call `job` with each config that sys.argv leads to, or with what is wrong with it; give back the highest code.

    Its second argument has the values of a sweep's job, key by key; it is empty where nothing is swept.

    `job` is not called where the command line only asks for help or to see a config.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's own handler prints a traceback and exits 1: let its errors reach us
    if LOOKS & {*sys.argv} and os.environ.get("RANK", "0") != "0":
        return 0
    try:
        sys.argv[1:] = arranged(sys.argv[1:])
    except ConfigError as error:
        return job(error, {})
    register()
    quiet_sweeper()
    swept = swept_keys(sys.argv[1:])
    codes: list[int] = []
    is_composing = True

    @hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")  # type: ignore[untyped-decorator]
    def compose_and_do(composed: DictConfig) -> None:
        nonlocal is_composing
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
        return job(explain(error), {})
    return max(codes, default=0)


@contextlib.contextmanager
def _shown_without_secrets() -> Iterator[None]:
    """What Hydra prints of a config, at the end and without the secrets of URLs."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        sys.stdout.write(redacted(shown.getvalue()))
        sys.stdout.flush()


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
    except ConfigError:
        raise
    except Exception as error:
        raise explain(error, overrides) from None


def of_run(folder: Path, overrides: list[str]) -> Config:
    """The config of the run in `folder`, changed by `overrides` (`key=value`). Raises ConfigError."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is no run's folder: there is no config.yaml in it")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        assert isinstance(merged, DictConfig)
        for each in parsed(overrides):
            if each.is_delete() or each.is_sweep_override():
                raise ConfigError(f"{each.input_line} is not understood: write overrides as key=value")
            OmegaConf.update(merged, each.key_or_group, each.value(), force_add=True)
        return check(merged)
    except ConfigError:
        raise
    except Exception as error:
        raise explain(error, overrides) from None


def register() -> None:
    """Give Hydra the kit's keys, the option of a group that has no values, and the help text."""
    store = ConfigStore.instance()
    store.store(name="keys", node=Config)
    for group in GROUPS:
        store.store(group=group, name=OWN, node={TARGET: MISSING})
    store.store(group="hydra/help", name="muster", node={"app_name": "python -m train", "template": help_template()})


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
    """The overrides of this job as they were given: OmegaConf would resolve `${...}` in their texts."""
    texts = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(text) for text in texts] if isinstance(texts, list) else []


def only_what_was_given(
    composed: DictConfig, choices: Mapping[str, Any], overrides: list[str], *, name: str = "config"
) -> DictConfig:
    """The same config, in which a `_target_` that replaced an option's has none of that option's values.

    Compose again with the option that has none: what is then there was given for the new target, in a yaml or by hand.
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
    """The override for a composition in which the groups `replaced` have no values yet."""
    text, key = str(override.input_line), override.key_or_group
    if key in replaced and not isinstance(override.value(), dict):
        return []  # the choice that was replaced
    if key.partition(".")[0] not in replaced:
        return [text]
    if override.is_delete():  # of what an option had, or a yaml gives
        return [f"++{key}=0", f"~{key}"]
    return [f"++{text.lstrip('+')}"]


def _swept_values(swept: set[str]) -> dict[str, str]:
    """What this job of a sweep has for each key that is swept, without secrets."""
    each = {parsed([text])[0].key_or_group: redacted(text).partition("=")[2] for text in _task()} if swept else {}
    return {key: value for key, value in each.items() if key in swept}


def _own_folder(config: Config, swept: set[str]) -> Config:
    """Each job of a sweep is a run, and each run has a folder of its own, named by what is swept."""
    job = HydraConfig.get()
    if swept & {"name", "output_dir"}:  # they have one already
        return config
    given = [redacted(text) for text in _task() if parsed([text])[0].key_or_group in swept]
    name = folder_name(",".join(given) or str(job.job.num))
    storage = config.checkpoint.storage
    checkpoint = replace(config.checkpoint, storage=storage and f"{storage.rstrip('/')}/{name}")
    return replace(config, output_dir=str(Path(config.output_dir) / name), checkpoint=checkpoint)


def folder_name(text: str) -> str:
    """`text` as the name of one folder, and of no other text's: a digest stands for what a name cannot hold."""
    plain = re.sub(r"[^\w.=,+-]+", "_", text)
    if len(plain.encode()) < LONGEST_NAME and not re.search(r"[^\w.=,+\[\]-]", text):
        return plain
    short = plain.encode()[:LONGEST_NAME].decode(errors="ignore")
    return f"{short}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:6]}"
