"""Turn an error of Hydra or OmegaConf into a one-line message with the nearest valid name."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from muster.code_location import located
from muster.errors import ConfigError, nearest, one_line
from muster.launcher.spec import entry
from muster.train.config.choices import hydra_groups, options, values
from muster.train.config.command_line import divided, given, readable
from muster.train.config.differences import to_dict
from muster.train.config.keys import GROUPS, SEVERAL, Config, keys
from muster.train.config.parts import TARGET
from muster.train.config.sweeper import elsewhere

YOURS = "give the folder that holds your model/, data/ or experiment/ with their yaml files"


def explain(error: Exception, overrides: Sequence[str] | None = None) -> ConfigError:
    """Convert an error of Hydra, OmegaConf or a YAML reader; `overrides`: those that were composed; None: those of sys.argv."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(error)
    if said := _of_file(error) or _of_option(text) or _of_choice(error, divided(overrides or sys.argv[1:])[0]):
        return ConfigError(said)
    if match := re.search(r"Could not (?:override|delete from config) '([^']+)'", text):
        return unknown_key(match[1])
    if match := re.search(r"An item is already at '([^']+)'.*?prefix: '([^']+)'", text, re.S):
        return ConfigError(f"{match[1]} exists already: write {match[2]}, without +")
    if match := re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text):
        group, option = match[1], match[2]
        there = options(group)
        if group == "hydra/launcher":
            return ConfigError(elsewhere(f"{group}={option}"))
        if not there:
            return _no_group(f"{group}={option}", group)
        own = f", or {group}._target_=your.Own" if group in GROUPS else ""
        return ConfigError(f"{group}={option} is unknown; {nearest(option, there)}{own}")
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*?)'\s*1\.", text, re.S):
        return ConfigError(
            f"{match[1]}={match[2]} has several values: write {match[1]}=[{match[2]}] for a list, {match[1]}=\"'{match[2]}'\" "
            "for one string with a comma, or add -m for one run per value"
        )
    if key := getattr(cause, "full_key", None):
        reason = one_line(cause).split(" full_key:")[0]
        if "Interpolation" in type(cause).__name__ or "nterpolation" in reason:
            return ConfigError(f"{key}: {reason}")
        if whole := re.search(r"Value '(-?\d+)\.0' of type 'float' could not be converted to Integer", reason):
            return ConfigError(f"{key}: {reason}; write {key}={whole[1]}")
        return ConfigError(f"{key}: {reason}; see `python -m {entry()} --help` for its type")
    if (
        override := getattr(error, "override", None)
        or (re.findall(r"Error parsing override '(.*)'", text, re.S) or [None])[0]
    ):
        return ConfigError(
            f"cannot read the override {override!r}: write key=value, with quotes around a value that has = or blanks in it: key=\"'a=b'\""
        )
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return ConfigError(one_line(error))
    return ConfigError(f"the config cannot be composed: {located(error)}")


def _of_file(error: Exception) -> str | None:
    """Describe an error in a YAML file, with its line; None for other errors."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else "a YAML file"
        return f"{where}: {' '.join(str(error.problem or error.context).split())}: fix the YAML"
    if isinstance(error, (yaml.YAMLError, UnicodeDecodeError)):
        return f"{_read_there(error)} is not UTF-8 text ({one_line(error)[:100]}): save it as UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot read {error.filename or 'a file of the config'}: {error.strerror}; fix this"
    text = one_line(error)
    if match := re.search(r"In '([^']+)': \w+ raised while composing config: (.*?) full_key: (\S+)", text):
        file, reason, key = match.groups()
        own = ": begin the file with `# @package _global_`" if file.startswith(f"{key}/") else ""
        return f"{file}.yaml: {key}: {reason}{own}"
    if match := re.search(r"Invalid loaded object type: (\w+)", text):
        return f"{_read_there(error)} holds a {match[1]}: write key: value into it"
    return None


def _read_there(error: Exception) -> str:
    """Return the file that Hydra was reading when it raised the error."""
    paths = [frame.f_locals.get("full_path") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((str(path) for path in paths if path), "a YAML file")


def _of_option(text: str) -> str | None:
    """Describe an error in the value of a command-line option; None for other errors."""
    if match := re.search(r"Additional config directory '(.+)' not found", text, re.S):
        return no_folder(match[1])
    if match := re.search(r"Primary config directory not found.*?'(.+)'", text, re.S):
        return f"--config-path {match[1]}: {_missing(match[1])}; leave it out, or use --config-dir: {YOURS}"
    if match := re.search(r"Cannot find primary config '([^']+)'", text):
        return f"--config-name {match[1]}: there is no {match[1]}.yaml; leave it out, or {YOURS} by --config-dir"
    if match := re.search(r"The (--\S+) flag can only be used .*", text):
        return one_line(Exception(text))
    return None


def no_folder(path: str) -> str:
    return f"--config-dir {path}: {_missing(path)}; {YOURS}"


def _missing(folder: str) -> str:
    return "it is not a folder" if Path(folder).exists() else "it does not exist"


def _of_choice(error: Exception, overrides: Sequence[str]) -> str | None:
    """Describe an override that chooses an option by something other than a name; None if there is none."""
    for each in readable(overrides):
        key, value = each.key_or_group, each.value()
        names = value if isinstance(value, list) else [value]
        if key not in (*GROUPS, "loggers", "callbacks", "experiment") or each.is_delete() or each.is_sweep_override():
            continue
        if isinstance(value, dict) and f"'{key}'" in str(error):
            return f"{each.input_line}: {key} takes a name; write your own as {key}._target_=your.Own +{key}.key=value"
        if not isinstance(value, dict) and not all(isinstance(name, str) for name in names):
            return f"{each.input_line}: {key} is chosen by name; valid: {', '.join(options(key))}"
    return None


def unknown_key(key: str) -> ConfigError:
    if key.startswith("hydra/"):
        return _no_group(key, key)
    if elsewhere := said_elsewhere(key):
        return ConfigError(f"unknown key {key}: {elsewhere}")
    parent, _, last = key.rpartition(".")
    if parent.partition(".")[0] in ("own", *SEVERAL):
        return ConfigError(f"{key} does not exist yet: write +{key}=...")
    names = known_keys(parent)
    own = f"; for a parameter of your own class write +{key}=..." if parent in GROUPS else ""
    if theirs := [f"{parent}={each}" for each in options(parent) if last in values(parent, each)] if own else []:
        return ConfigError(f"{key} is a key of {' or '.join(theirs)}, not of the {parent} chosen{own}")
    if named_alike := [known for known in all_keys() if known.endswith(f".{last}")]:
        return ConfigError(f"unknown key {key}; did you mean {' or '.join(named_alike[:3])}?")
    if names is None:
        return ConfigError(f"unknown key {key}; {nearest(key.split('.')[0], known_keys('') or [])}")
    return ConfigError(f"unknown key {key}; {nearest(last, names)}{own}")


def _no_group(given: str, group: str) -> ConfigError:
    valid = hydra_groups() if group.startswith("hydra/") else GROUPS
    return ConfigError(f"{given}: there is no config group {group}; {nearest(group, valid)}")


def known_keys(parent: str) -> list[str] | None:
    """Return the keys below `parent`; for a group, those of all its options. None if `parent` does not exist."""
    if parent in GROUPS:
        return sorted({key for option in options(parent) for key in values(parent, option)})
    tree: Any = to_dict(Config())
    for part in parent.split(".") if parent else []:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return sorted(tree) if isinstance(tree, dict) else None


def all_keys() -> list[str]:
    """Return the full names of all keys, including those of all options."""
    parts = [f"{group}.{key}" for group in GROUPS for key in known_keys(group) or [] if key != TARGET]
    return sorted({*parts, *(key.name for key in keys())})


PER_RANK = {
    "batch_size_per_rank",
    "batch_size_per_gpu",
    "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu",
}
NAMES = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "gradient_clip_val": "grad_clip",
    "max_grad_norm": "grad_clip",
    "mixed_precision": "precision",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
    "torch_compile": "compile=true",
    "log_every_n_steps": "log.every_steps",
    "logging_steps": "log.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "check_val_every_n_epoch": "eval.every_steps",
    "eval_steps": "eval.every_steps",
    "resume_from_checkpoint": "checkpoint.resume",
    "limit_val_batches": "eval.max_samples",
    "dataloader_num_workers": "loader.num_workers",
}
"""Names of Lightning, Accelerate and Hugging Face's Trainer -> keys."""
ACCUMULATION = {"accumulate_grad_batches", "gradient_accumulation_steps"}
LAUNCH = {"num_nodes", "nnodes", "nproc_per_node", "devices", "num_processes"}


def said_elsewhere(key: str) -> str | None:
    """Return what to write for a key of another trainer; None if it is not known as one."""
    if key in PER_RANK:
        return f"batch_size counts the samples of a step over all ranks: {_global_batch(key)}"
    if key in ACCUMULATION:
        return "batch_size is that of the whole step: micro_batch_size is the most that a rank computes at once"
    if key in LAUNCH:
        return f"the number of ranks is the launcher's: torchrun --nnodes=2 --nproc-per-node=4 -m {entry()}"
    return f"write {NAMES[key]}" if key in NAMES else None


def _global_batch(key: str) -> str:
    value, ranks = given(key, None), int(os.environ.get("WORLD_SIZE", "1"))
    if not isinstance(value, int):
        return "write batch_size"
    return f"for {value} on each of {ranks} write batch_size={value * ranks}"
