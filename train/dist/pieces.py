"""Tensors that lie in pieces on several ranks (torch's DTensor), for those who have to treat them apart.

torch.distributed.tensor takes a second to import, sympy and all; whoever has a DTensor has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def in_pieces(value: Any) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def own_piece(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if in_pieces(tensor) else tensor
