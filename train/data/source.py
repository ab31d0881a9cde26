"""The place of the user code that makes samples, for errors."""

from __future__ import annotations

from typing import Any

from muster.origin import defined
from muster.train.config.keys import Config
from muster.train.config.parts import callable_of


def origin_of_samples(config: Config, dataset: Any) -> str:
    """Return where user code makes, collates and splits samples (file and line); empty if no user code does."""
    loader = config.loader
    own = {name: callable_of(f"loader.{name}", getattr(loader, name)) for name in ("collate_fn", "batch")}
    through = [f"loader.{name}{where}" for name, each in own.items() if (where := defined(each, "__call__"))]
    made = defined(dataset, "__getitem__", "__iter__").strip(" ()")
    if not through:
        return made
    return f"{made or config.data.target} through {' and '.join(through)}"
