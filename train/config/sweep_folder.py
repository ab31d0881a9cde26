"""Names for the folders of a sweep's jobs, which need no quotes in a shell or in an override."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from muster.redact import redacted
from muster.train.config.command_line import parsed

LONGEST_NAME = 200
"""Maximum length of a folder name in bytes; file systems allow 255."""


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
