"""Pictures as RGB of 8 bits a channel."""

from __future__ import annotations

import numpy as np
from PIL import Image


def rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in mode RGB; one of 16 bits is scaled, where `convert` would cut its values off at 255.

    Raises:
        ValueError: nothing says what range its values have.
    """
    if picture.mode.startswith("I;16"):
        picture = Image.fromarray((np.asarray(picture).astype(np.uint32) // 257).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise ValueError(f"its pixels are of PIL's mode {picture.mode}, whose range nothing says: store 8 or 16 bits")
    return picture.convert("RGB")


def read_rgb(path: str) -> Image.Image:
    """Return the picture in a file in mode RGB. Raises OSError, SyntaxError, ValueError."""
    with Image.open(path) as picture:
        return rgb(picture)
