"""The input check that image models share."""

from __future__ import annotations

from collections.abc import Sequence

from muster.errors import ConfigError


def image_shape(input_shape: Sequence[int], *, model: str) -> tuple[int, int, int]:
    """Return `input_shape` as (C, H, W). Raises ConfigError if the data's inputs are not images."""
    if len(input_shape) != 3:
        raise ConfigError(
            f"model={model} expects images [C, H, W], but the data's inputs are {list(input_shape)}: choose another model or data"
        )
    return input_shape[0], input_shape[1], input_shape[2]
