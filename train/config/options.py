"""What conf/ offers: the options of each group, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.config.command_line import config_dir, given


def conf_folder() -> Path:
    """conf/ of the checkout, which the package holds a link to, or the copy of it inside an installed package."""
    return Path(__file__).resolve().parent.parent / "conf"


def folders() -> list[Path]:
    """Where Hydra looks for options: the kit's conf/, then what `--config-dir` and `hydra.searchpath` of sys.argv bring."""
    found = given("hydra.searchpath", None)
    places = [str(each) for each in found] if isinstance(found, list) else []
    own = [
        config_dir(),
        *(place.removeprefix("file://") for place in places if "://" not in place.removeprefix("file://")),
    ]
    return [conf_folder(), *(Path(place).absolute() for place in own if place)]


def options(group: str) -> list[str]:
    """The names that a group's key takes, sorted; empty if there is no such group."""
    return sorted({path.stem for folder in folders() for path in (folder / group).glob("*.yaml")})


def values(group: str, option: str) -> dict[str, Any]:
    """What an option's yaml holds, `_target_` included."""
    files = [folder / group / f"{option}.yaml" for folder in folders()]
    try:
        read = OmegaConf.to_container(OmegaConf.load(next(filter(Path.is_file, files))))  # ${...} as it stands
    except (StopIteration, OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return {}  # a user's own, which is read elsewhere if it is chosen
    return {str(key): value for key, value in read.items() if key != "defaults"} if isinstance(read, dict) else {}
