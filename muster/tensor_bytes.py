"""The bytes of a tensor in host memory, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Any:
    """Return the elements of a tensor in host memory as a buffer, in row-major order."""
    return np.asarray(_Octets(tensor.contiguous().flatten().view(torch.uint8))) if tensor.numel() else b""


class _Octets:
    """What NumPy reads bytes from. After `Tensor.numpy()` torch would refuse to resize a tensor, as a fake-quantizer does to its buffers."""

    def __init__(self, octets: Tensor):
        self.__array_interface__ = {
            "data": (octets.data_ptr(), True),
            "shape": (len(octets),),
            "typestr": "|u1",
            "version": 3,
        }
        self._octets = octets  # must live as long
