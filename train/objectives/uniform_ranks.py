"""Stand for several ranks that all have the same, in one process: torch's own FakeProcessGroup is the group.

For a trial of a user's metric; torch uses it for tests (torch.testing._internal.distributed.fake_pg).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

SAME_ON_ALL = {
    "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_",
    "broadcast_", "barrier", "gather_",
}  # fmt: skip
"""What torch's FakeProcessGroup does as among ranks that all have the same tensors."""


class Untried(Exception):
    """A metric communicates in a way that `uniform_ranks` does not stand for."""


class OnlyUniform(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets nothing communicate but with the ranks that are not there, of the group `name`. Raises Untried."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.calls = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.calls += 1
            groups = [dist.ProcessGroup.unbox(each) for each in args if _is_group(each)]
            if func.overloadpacket.__name__ not in SAME_ON_ALL or [each.group_name for each in groups] != [self.name]:
                raise Untried
        return func(*args, **(kwargs or {}))


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith(".ProcessGroup")


@contextlib.contextmanager
def uniform_ranks(size: int) -> Iterator[OnlyUniform]:
    """Stand for `size` ranks that all do and have the same as this one, which is rank 0, in torch.distributed.

    Raises Untried: something communicates otherwise, or this version of torch cannot.
    """
    from torch.distributed import distributed_c10d as c10d

    try:
        from torch._C._distributed_c10d import FakeProcessGroup

        options = FakeProcessGroup.Options()
        options.simulate_uniform_ranks = True
        group, store = dist.ProcessGroup(dist.HashStore(), 0, size), dist.HashStore()
        backend = FakeProcessGroup._create_internal(0, size, options)
        for kind in ("cpu", "cuda"):
            group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, backend)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        name = f"uniform-{size}"
        group._set_group_name(c10d.GroupName(name))
        facts = {
            "pg_map": ("fake", store), "pg_names": name, "pg_group_ranks": {rank: rank for rank in range(size)},
            "pg_backend_config": "cpu:fake,cuda:fake",
        }  # fmt: skip
        known = [(getattr(c10d._world, each), fact) for each, fact in facts.items()]
        before = c10d._world.default_pg
    except (AttributeError, ImportError, TypeError) as error:
        raise Untried from error
    for each, fact in known:
        each[group] = fact
    c10d._update_default_pg(group)
    try:
        with OnlyUniform(name) as collectives:
            yield collectives
    finally:
        c10d._update_default_pg(before)
        for each, _ in known:
            each.pop(group, None)
