"""A user's own training script in place of the trainer: `-- my.py --lr 1e-3` or `-- -m package.module --lr 1e-3`.

Its exit code says how it ended: 0 done, 75 run me again, any other failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from muster.errors import ConfigError

MARK = "--"


@dataclass(frozen=True)
class Script:
    """The words after a first bare `--`."""

    words: tuple[str, ...]

    @property
    def is_module(self) -> bool:
        return self.words[0] == "-m"

    @property
    def name(self) -> str:
        return self.words[1 if self.is_module else 0]

    @property
    def given(self) -> list[str]:
        return [MARK, *self.words]

    @property
    def for_torchrun(self) -> list[str]:
        """The words, behind a `--`: torchrun would take an argument that begins as an option of its own does, as `--log`, for that."""
        at = int(self.is_module)
        return [*self.words[:at], MARK, *self.words[at:]]

    def check(self) -> None:
        """Look for the script, without importing it. Raises ConfigError."""
        if self.is_module:
            top = self.name.partition(".")[0]
            if find_spec(top) is None and PathFinder.find_spec(top, [str(Path.cwd())]) is None:
                raise ConfigError(f"there is no module {self.name} in {Path.cwd()} or on PYTHONPATH: give one after -m")
        elif not Path(self.name).is_file():
            raise ConfigError(
                f"{self.name} is not a file in {Path.cwd()}: after -- give the path of a script, or -m and a module"
            )


def script_of(given: Sequence[str]) -> Script | None:
    """Return the script in a command line; None for overrides of the trainer. Raises ConfigError."""
    if MARK not in given:
        return None
    at = given.index(MARK)
    before, words = given[:at], tuple(given[at + 1 :])
    if before:
        raise ConfigError(
            f"{before[0]} stands before --, where nothing reads it: a script takes the trainer's place, and its arguments follow its name"
        )
    name = words[1:2] if words[:1] == ("-m",) else words[:1]
    if not name or name[0].startswith("-"):
        raise ConfigError(
            f"-- is followed by {' '.join(words[:2]) or 'nothing'}: give a script, as -- my.py --lr 1e-3, or a module, as -- -m package.module"
        )
    return Script(words)
