"""What conf/ offers: the options of each group, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def conf_folder() -> Path:
    """conf/ of the checkout, which the package holds a link to, or the copy of it inside an installed package."""
    return Path(__file__).resolve().parent.parent / "conf"


def options(group: str) -> list[str]:
    """The names that a group's key takes, sorted; empty if there is no such group."""
    folder = conf_folder() / group
    return sorted(path.stem for path in folder.glob("*.yaml")) if folder.is_dir() else []


def values(group: str, option: str) -> dict[str, Any]:
    """What an option's yaml holds, `_target_` included."""
    read = OmegaConf.to_container(OmegaConf.load(conf_folder() / group / f"{option}.yaml"))  # ${...} as it stands
    return {str(key): value for key, value in read.items()} if isinstance(read, dict) else {}
