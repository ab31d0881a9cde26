"""Whether a loss is a sum over its samples, by the operation that has made it: on several ranks its gradient is a part of the whole.

And whether a line weighs a loss or a number alone.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from types import FrameType
from typing import Any

SUM = 2
"""`reduction="sum"` in the nodes of torch's losses (torch.nn._reduction.get_enum)."""
BACKWARD = "(loss * job.weight).backward() if the loss is a mean, and (loss * job.world_size * (job.weight > 0)).backward() if it is a sum"
SUMMED = (
    "step(loss=...) has a sum in it. If that is over this rank's samples, its gradient is too small, as DistributedDataParallel makes the mean of the ranks' "
    "gradients: use (loss * job.world_size * (job.weight > 0)).backward(), and log the mean, as loss / len(x). A sum over something else, or one with weights "
    "that make it a mean, is right as it is"
)
OF_SEVERAL = ("AddBackward", "SubBackward", "NegBackward")
OF_A_LIST = ("StackBackward", "CatBackward")


def is_sum(loss: Any) -> bool:
    """Return True for the sum of a tensor's elements, also beside other summands.

    False for a sum of means, of a list of losses, or over a parameter, as in a penalty; and without a graph, or with one whose
    nodes do not say what they have saved, as torch promises no names for that.
    """
    seen, left = set[Any](), [getattr(loss, "grad_fn", None)]
    while left:
        if (node := left.pop()) is None or node in seen:
            continue
        seen.add(node)
        within, name = [each for each, _ in node.next_functions], node.name()
        if name.startswith(OF_SEVERAL):
            left += within
        elif getattr(node, "_saved_reduction", None) == SUM:
            return True
        elif name == "SumBackward0" and within[0] and not within[0].name().startswith((*OF_A_LIST, "MeanBackward")):
            shape = getattr(node, "_saved_self_sym_sizes", None)
            if shape is not None and not _is_of_parameter(within[0], shape):
                return True
    return False


def is_for_a_number(frame: FrameType) -> bool:
    """Return whether the line at which `frame` stands takes a loss as a number, as in `loss.item() * job.weight`, and makes no gradient."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return re.search(r"\.(item|detach)\(|\bfloat\((?!\w+\.weight\))", line) is not None and "backward" not in line


def _is_of_parameter(node: Any, shape: Sequence[int]) -> bool:
    """Return whether elements of this shape are those of a parameter, each by itself."""
    while within := [each for each, _ in node.next_functions if each]:
        if len(within) > 1:
            return False
        node = within[0]
    return hasattr(node, "variable") and tuple(node.variable.shape) == tuple(shape)
