"""List and read the options under conf/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra.conf
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from muster.train.config.command_line import config_dir, given

HYDRA = Path(hydra.conf.__file__).parent
"""Folder of Hydra's own groups."""


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
    """Return the sorted option names of a group, also of Hydra's own; empty if the group does not exist."""
    if group in hydra_groups():
        return sorted({*_of_plugins(group), *(path.stem for path in (HYDRA / group).glob("*.yaml"))})
    return sorted({path.stem for folder in folders() for path in (folder / group).glob("*.yaml")})


def hydra_groups() -> list[str]:
    """Return the names of Hydra's own groups: `hydra/launcher`, ..., including those of its plugins."""
    own = {f"hydra/{path.name}" for path in (HYDRA / "hydra").iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    nodes = ConfigStore.instance().repo.get("hydra", {})
    return sorted(own | {f"hydra/{name}" for name, node in nodes.items() if isinstance(node, dict)})


def _of_plugins(group: str) -> list[str]:
    nodes = ConfigStore.instance().repo.get("hydra", {}).get(group.removeprefix("hydra/"), {})
    return [Path(name).stem for name in nodes]


def values(group: str, option: str) -> dict[str, Any]:
    """Return the content of an option's YAML, including `_target_`; empty if it cannot be read."""
    files = [folder / group / f"{option}.yaml" for folder in folders()]
    try:
        read = OmegaConf.to_container(OmegaConf.load(next(filter(Path.is_file, files))))  # ${...} stays unresolved
    except (StopIteration, OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return {}  # a user's own option is read elsewhere if it is chosen
    return {str(key): value for key, value in read.items() if key != "defaults"} if isinstance(read, dict) else {}
