"""The wheel holds the kit a second time, as muster/train (see muster/__init__.py); an editable install does not."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Twice(BuildHookInterface):
    """Adds train/ under another name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is standard or editable."""
        if version == "standard":
            build_data["force_include"]["train"] = "muster/train"
