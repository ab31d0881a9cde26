"""Generate the description of keys in `--help` and docs/keys.md from the keys themselves."""

from __future__ import annotations

import re
import textwrap
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from muster.errors import MusterError, Preempted
from muster.launcher.spec import entry
from muster.train.config.choices import conf_folder, options
from muster.train.config.keys import GROUPS, keys

WIDTH = 120
"""Columns of the keys' meanings in `--help`."""

COMMANDS = {
    "torchrun --nproc-per-node=N -m {entry} [overrides]": "train on N processes",
    "python -m {entry} [overrides]": "train in this process",
    "python -m {entry} -m optimizer.lr=0.1,0.01": "sweep: one run per value, each in its own folder",
    "python -m muster TOOL --help": "init, launch, doctor, evaluate, load, export, report, collectives",
}


def help_template() -> str:
    """Return Hydra's help text: choices, meanings of the keys, and `$CONFIG`, which Hydra replaces with the values."""
    rows = [(group, ", ".join(options(group))) for group in GROUPS] + [
        ("+experiment", ", ".join(options("experiment")))
    ]
    choices = "\n".join(f"  {group:<13}{names}" for group, names in rows)
    meanings = "\n".join(_wrapped(key.name, _quoted(key.meaning)) for key in keys() if key.name not in GROUPS)
    commands = "\n".join(f"{line.format(entry=entry()):<52} {meaning}" for line, meaning in COMMANDS.items())
    return (
        f"{commands}\n\nChoices:\n{choices}\nYour own: model._target_=mypackage.Net (the same for the other groups), "
        f"+model.width=64 for its arguments\n\nKeys:\n{meanings}\n\nEvery key and its value (override with key=value):\n\n"
        f"$CONFIG\n{_exit_codes()}\n"
    )


def _wrapped(name: str, meaning: str) -> str:
    indent = " " * 28
    lines = textwrap.wrap(meaning, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"  {name:<25} " + f"\n{indent}".join(lines)


def _quoted(meaning: str) -> str:
    """Replace Markdown's backticks with quotes: without them, a value reads as a word of the sentence."""
    return re.sub("`([^`]*)`", lambda found: f'"{found[1]}"' if "'" in found[1] else f"'{found[1]}'", meaning)


def _exit_codes() -> str:
    known = sorted((kind.exit_code, kind.outcome.replace("_", " ")) for kind in MusterError.__subclasses__())
    codes = ", ".join(f"{code} {words}" for code, words in known if code > 1 and code != Preempted.exit_code)
    return f"Exit codes: 0 done, {codes}, {Preempted.exit_code} preempted: run the same command again"


def markdown() -> str:
    """Return the table in docs/keys.md of keys and choices."""
    chosen = {group: _default_option(group) for group in GROUPS}
    rows = [
        f"| `{group}` | `{chosen[group]}` | {', '.join(f'`{o}`' for o in options(group) if o != chosen[group])} |"
        for group in GROUPS
    ]
    rows += [f"| `{key.name}` | {_plain(key.value)} | {key.meaning} |" for key in keys() if key.name not in GROUPS]
    return "\n".join(["| key | default | |", "|---|---|---|", *rows])


def _default_option(group: str) -> str:
    defaults: Any = OmegaConf.select(OmegaConf.load(conf_folder() / "config.yaml"), "defaults")
    return str(next(entry[group] for entry in defaults if group in entry))


def _plain(value: Any) -> str:
    if value is None:
        return "`null`"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
