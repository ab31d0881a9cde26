"""List and read the options under conf/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from muster.train.config.command_line import config_dir, given


def conf_folder() -> Path:
    """Return conf/ of the checkout, to which the package holds a link, or its copy in an installed package."""
    return Path(__file__).resolve().parent.parent / "conf"


def folders() -> list[Path]:
    """Return the folders of options: the kit's, then those of `--config-dir` and `hydra.searchpath` in sys.argv."""
    found = given("hydra.searchpath", None)
    places = [str(each) for each in found] if isinstance(found, list) else []
    own = [
        config_dir(),
        *(place.removeprefix("file://") for place in places if "://" not in place.removeprefix("file://")),
    ]
    return [conf_folder(), *(Path(place).absolute() for place in own if place)]


def options(group: str) -> list[str]:
    """Return the sorted option names of a group; empty if the group does not exist."""
    return sorted({path.stem for folder in folders() for path in (folder / group).glob("*.yaml")})


def values(group: str, option: str) -> dict[str, Any]:
    """Return the content of an option's YAML, including `_target_`; empty if it cannot be read."""
    files = [folder / group / f"{option}.yaml" for folder in folders()]
    try:
        read = OmegaConf.to_container(OmegaConf.load(next(filter(Path.is_file, files))))  # ${...} stays unresolved
    except (StopIteration, OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return {}  # a user's own option is read elsewhere if it is chosen
    return {str(key): value for key, value in read.items() if key != "defaults"} if isinstance(read, dict) else {}
