"""Hydra's choice between one run and a sweep, without a composition of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra

from muster.train.config.choices import conf_folder

SET_NOTHING = {"pkg://hydra.conf", "structured://"}
"""Places of Hydra's search path in which `hydra.mode` is null."""
composed_mode = Hydra.get_mode


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
    text = path.read_text(errors="replace")
    return "hydra" in text and "mode" in text.replace("model", "")
