"""What a user's `count` may return: how much of what the mean over all ranks is over a micro-batch has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from muster.errors import ConfigError


def counted(found: Any, said: str, *, waits: bool = True) -> Any:
    """Return a count as a number, or as a tensor [] in float64 if it is one and is not to be waited for; NaN if it is below 0 then.

    said: what has returned `found`, for the message.

    Raises:
        ConfigError: it is no number, or is below 0 or not finite.
    """
    is_one = (isinstance(found, Tensor) and found.numel() == 1) or isinstance(found, int | float)
    if not is_one or isinstance(found, bool):
        kind = f"{type(found).__name__}{list(found.shape) if isinstance(found, Tensor) else ''}"
        raise ConfigError(f"{said} returns {kind}: return what the mean loss is over, a number or a tensor []")
    if isinstance(found, Tensor) and not waits:
        given = found.detach().double().reshape(())
        return torch.where(given >= 0, given, math.nan)
    if not (math.isfinite(count := float(found)) and count >= 0):
        raise ConfigError(f"{said} returns {count:g}: return what the mean loss is over, a number of at least 0")
    return count
