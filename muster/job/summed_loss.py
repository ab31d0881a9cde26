"""Whether a loss is a sum over its samples, by the operation that has made it: on several ranks its gradient is a part of the whole."""

from __future__ import annotations

from typing import Any

SUM = 2
"""`reduction="sum"` in the nodes of torch's losses (torch.nn._reduction.get_enum)."""
BACKWARD = "(loss * job.weight).backward() if the loss is a mean, and (loss * job.world_size * (job.weight > 0)).backward() if it is a sum"
SUMMED = (
    "step(loss=...) has a sum in it. If that is over this rank's samples, its gradient is too small, as DistributedDataParallel makes the mean of the ranks' "
    "gradients: use (loss * job.world_size * (job.weight > 0)).backward(), and log the mean, as loss / len(x). A sum over anything else, as a penalty on the "
    "weights, or one that is divided by what all ranks have counted, is right as it is"
)
OF_SEVERAL = ("AddBackward", "SubBackward", "NegBackward")
OF_A_LIST = ("StackBackward", "CatBackward")


def is_sum(loss: Any) -> bool:
    """Return True for the sum of a tensor's elements, also beside other summands; False for one of a list of losses, or without a graph."""
    seen, left = set[Any](), [getattr(loss, "grad_fn", None)]
    while left:
        if (node := left.pop()) is None or node in seen:
            continue
        seen.add(node)
        within, name = [each for each, _ in node.next_functions], node.name()
        is_of_list = bool(within and within[0]) and within[0].name().startswith(OF_A_LIST)
        if name.startswith(OF_SEVERAL):
            left += within
        elif getattr(node, "_saved_reduction", None) == SUM or (name == "SumBackward0" and not is_of_list):
            return True
    return False
