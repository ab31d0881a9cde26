"""Test for and unwrap DTensors, whose pieces lie on several ranks.

This module does not import torch.distributed.tensor, which takes a second because it imports sympy. If a DTensor
exists, the module has been imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def in_pieces(value: Any) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def own_piece(tensor: Tensor) -> Tensor:
    return tensor.to_local() if in_pieces(tensor) else tensor
