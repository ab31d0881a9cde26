"""What a build adds to the package `muster`: the trainer, its YAML, and the templates that users edit and submit.

In a clone they lie beside the package, in train/, conf/, slurm/, docker/ and k8s/. Every file is named here, because
hatchling skips a folder that it has reached by a link before.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACES = {
    "train": "muster/train",
    "conf": "muster/train/conf",
    "slurm": "muster/templates/slurm",
    "docker": "muster/templates/docker",
    "k8s": "muster/templates/k8s",
}
NOT_SHIPPED = {"__pycache__", "logs"}


class Inside(BuildHookInterface):
    """Puts everything into one top-level package. An editable install also has the clone's own name, `train`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is standard or editable."""
        if version == "editable":
            build_data["force_include_editable"]["train/__init__.py"] = "train/__init__.py"
        elif self.target_name == "sdist":
            build_data["force_include"] |= self.files("train", "train")
        else:
            for folder, place in PLACES.items():
                build_data["force_include"] |= self.files(folder, place)

    def files(self, folder: str, place: str) -> dict[str, str]:
        """Return the files in `folder`, without those behind links to folders, and their paths in `place`."""
        found = [path for path in Path(self.root, folder).rglob("*") if path.is_file()]
        inside = {str(path): path.relative_to(Path(self.root, folder)) for path in found}
        return {path: f"{place}/{name.as_posix()}" for path, name in inside.items() if not NOT_SHIPPED & {*name.parts}}
