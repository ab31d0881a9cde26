"""Parse the command line into options and overrides with Hydra's own parsers; override text is never searched."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from muster.errors import ConfigError
from muster.launcher.spec import entry

FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--shell-completion",
    "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip
"""Hydra's long options."""
SHORT = ("-h", "-c", "-p", "-r", "-m", "-sc", "-cp", "-cn", "-cd", "-i")
TAKE_A_VALUE = {
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
    "--experimental-rerun",
}  # fmt: skip


def arranged(words: Sequence[str]) -> list[str]:
    """Return the command line with all overrides before the options, as Hydra expects.

    Raises ConfigError: Hydra does not have an option, an option lacks its value, or an override is empty or shuffles a sweep's values.
    """
    overrides, options = divided(words)
    if wrong := _unknown_option(words):
        raise wrong
    if any(not text.strip() for text in overrides):
        raise ConfigError("one of the overrides is empty: leave it out, or write key=value")
    if drawn := next((each for each in readable(overrides) if _is_shuffled(each)), None):
        raise ConfigError(
            f"{drawn.input_line}: each of several ranks would draw an order of its own; write the values in order"
        )
    line = [*overrides, *options]
    parser = get_args_parser()
    parser.error = _refuse
    parser.parse_args(line)
    return line


def _is_shuffled(override: Override) -> bool:
    """Return whether each of several processes draws a sweep's order of its own."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and bool(getattr(override.value(), "shuffle", False))


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into (overrides, options with their values), in any order."""
    overrides: list[str] = []
    options: list[str] = []
    for place, word in enumerate(words):
        (options if word.startswith("-") or _is_value(words, place) else overrides).append(word)
    return overrides, options


def _is_value(words: Sequence[str], place: int) -> bool:
    return place > 0 and words[place - 1] in TAKE_A_VALUE


def parsed(texts: Iterable[str]) -> list[Override]:
    """Parse overrides with Hydra's parser; each keeps its text in `input_line`. Raises HydraException."""
    found: list[Override] = OverridesParser.create().parse_overrides([*texts])
    return found


def readable(texts: Iterable[str]) -> list[Override]:
    """Parse overrides and skip invalid ones; their errors are reported elsewhere."""
    found = []
    for text in texts:
        try:
            found += parsed([text])
        except HydraException:
            continue
    return found


def given(key: str, default: Any) -> Any:
    """Return the value of `key` in sys.argv, or `default`; for use when the config could not be composed."""
    overrides = readable(divided(sys.argv[1:])[0])
    return next((each.value() for each in reversed(overrides) if each.key_or_group == key), default)


def config_dir() -> str | None:
    words = sys.argv[1:]
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "-cd" or (name.startswith("--config-d") and "--config-dir".startswith(name)):
            return value or next(iter(words[place + 1 :]), None)
    return None


def swept_keys(words: Sequence[str]) -> set[str]:
    """Return the keys with several values in a command line with -m."""
    return {each.key_or_group for each in readable(divided(words)[0]) if each.is_sweep_override()}


def _unknown_option(words: Sequence[str]) -> ConfigError | None:
    if words and words[0].endswith(".py") and "=" not in words[0]:
        return ConfigError(
            f"{words[0]} is not an option: a script comes after --, as in muster launch node -- {words[0]}"
        )
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        is_known = any(flag.startswith(name) for flag in FLAGS) if word.startswith("--") else word.startswith(SHORT)
        if not word.startswith("-") or is_known or _is_value(words, place):
            continue
        values = value.split(",") if value else _values(words[place + 1 :])
        said = values[0] if len(values) == 1 else f"[{','.join(values)}]"
        return ConfigError(
            f"{word} is not an option: write {name.lstrip('-').replace('-', '_')}={said}, without dashes"
        )
    return None


def _values(following: Sequence[str]) -> list[str]:
    """Return the words up to the next override or option: `--gpus 0 2` has two."""
    found: list[str] = []
    for word in following:
        if "=" in word or word.startswith("-"):
            break
        found.append(word)
    return found or ["..."]


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see `python -m {entry()} --help`")
