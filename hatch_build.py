"""What a build adds to the package `muster`: the trainer, its YAML, and the templates that users edit and submit; and to its
metadata: README.md and the project's addresses.

In a clone they lie beside the package, in train/, conf/, slurm/, docker/ and k8s/. Every file is named here, because
hatchling skips a folder that it has reached by a link before.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

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
            build_data["force_include"]["constraints.txt"] = "muster/templates/docker/constraints.txt"

    def files(self, folder: str, place: str) -> dict[str, str]:
        """Return the files in `folder`, without those behind links to folders, and their paths in `place`."""
        found = [path for path in Path(self.root, folder).rglob("*") if path.is_file()]
        inside = {str(path): path.relative_to(Path(self.root, folder)) for path in found}
        return {path: f"{place}/{name.as_posix()}" for path, name in inside.items() if not NOT_SHIPPED & {*name.parts}}


class Addresses(MetadataHookInterface):
    """Adds README.md, and with MUSTER_URL, the repository's address, the project's URLs and links that work elsewhere.

    A package index shows the README without the files beside it. MUSTER_REF is the release's tag (`main`).
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        url, ref = os.environ.get("MUSTER_URL", "").rstrip("/"), os.environ.get("MUSTER_REF", "main")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, url, ref) if url else text}
        metadata["urls"] = {name: f"{url}/{path}".rstrip("/") for name, path in pages(ref).items()} if url else {}


def pages(ref: str) -> dict[str, str]:
    """Return the project's pages, by name, under its repository's address."""
    return {
        "Repository": "",
        "Documentation": f"blob/{ref}/docs/index.md",
        "Changelog": f"blob/{ref}/CHANGELOG.md",
        "Issues": "issues",
    }


def absolute(markdown: str, url: str, ref: str) -> str:
    """Return the text with its relative links and pictures under `url`, at `ref`."""

    def target(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith((".png", ".svg")) else "blob"
        return f"]({url}/{kind}/{ref}/{link[1]})"

    return re.sub(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)", target, markdown)
