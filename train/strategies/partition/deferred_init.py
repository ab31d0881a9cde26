"""The weights of a model that is to be sharded: rank 0 alone builds them, and the others get them unit by unit.

So no host but rank 0's ever holds the whole model, and each rank has its shards and one unit at most. The other ranks run
the same constructor, in which each parameter loses its storage (device `meta`) as it is registered, and numbers that are
drawn for it are dropped: what else a constructor draws, and wherever it puts it, is as on rank 0. All ranks build the whole
model instead if a constructor reads a parameter, or if anything that can be seen of the models differs.

Source: the device `meta` of PyTorch's documentation.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from muster.data.generators import kept_generators
from muster.train.strategies.replicas.broadcast import broadcast
from muster.world.dtensor import in_pieces
from muster.world.group import World

DRAWING = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"}
)
"""Methods of tensors that draw their values; the functions of torch.nn.init do, too."""
OWN = frozenset(vars(nn.Module()))
"""What each module has: parameters, buffers, modules and hooks among them."""


class FirstBuilds:
    """A model whose weights rank 0 has. Collective: every rank must make it, and `fill` the same modules."""

    def __init__(self, build: Callable[[], nn.Module], world: World):
        self.model, self._is_alone = _built(build, world), world.size == 1
        self._filled: set[int] = set()

    def fill(self, module: nn.Module) -> None:
        """Give the parameters and buffers in `module` storage and rank 0's values, but those that have them. Collective."""
        for tensor in () if self._is_alone else (*module.parameters(), *module.buffers()):
            if id(tensor) in self._filled or in_pieces(tensor):
                continue
            self._filled.add(id(tensor))
            if tensor.is_meta:
                _become(tensor, torch.empty_like(tensor, device="cpu"))
            broadcast([tensor])


def _built(build: Callable[[], nn.Module], world: World) -> nn.Module:
    """Return the model, without storage on ranks other than 0 if it is the same in all else. The generators stay as they were."""
    if world.size == 1:
        with kept_generators():
            return build()
    with kept_generators():
        model, own = _whole(build) if world.is_first else _hollow(build)
    if world.lowest(own != world.broadcast(own)) is not None:
        with kept_generators():
            model = build()  # also on rank 0: a constructor that counts its calls gives all ranks the same
    assert model is not None
    return model


def _whole(build: Callable[[], nn.Module]) -> tuple[nn.Module | None, str]:
    model = build()
    return model, _digest(model)


def _hollow(build: Callable[[], nn.Module]) -> tuple[nn.Module | None, str]:
    """Return the model without storage, and its digest; else None, and why it cannot be."""
    try:
        with _without_storage(), Watched() as watched:
            model = build()
        return (None, watched.reads) if watched.reads else (model, _digest(model))
    except Exception as error:  # with storage it raises what is wrong
        return None, str(error)


class Watched(TorchFunctionMode):
    """Draws for parameters without storage as for others, and notes in `reads` what would see that they have none."""

    reads = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        before = [each.is_meta for each in given]
        if not any(before):
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if before[0] and (name in DRAWING or getattr(func, "__module__", "") == nn.init.__name__):
            like, real = given[0], _like(given[0])
            args, kwargs = tree_map(lambda each: real if each is like else each, (args, kwargs or {}))
            func(*args, **kwargs)
            return like
        try:
            made = func(*args, **(kwargs or {}))
        except Exception:  # which the constructor may catch
            self.reads = f"{func}"
            raise
        is_in_place = name.endswith("_") and not before[0]
        if is_in_place or (isinstance(made, Tensor) and not made.is_meta):
            self.reads = f"{func}"
        return made


@contextlib.contextmanager
def _without_storage() -> Iterator[None]:
    """Free the storage of each parameter as a module registers it."""
    register = nn.Module.register_parameter

    def hollow(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and not isinstance(param, UninitializedParameter):
            with contextlib.suppress(RuntimeError):  # it has a view, and keeps its storage
                _become(param, torch.empty_like(param, device="meta"))
        register(self, name, param)

    with contextlib.ExitStack() as patched:
        patched.enter_context(_replaced(nn.Module, "register_parameter", hollow))
        for name, function in [*vars(nn.init).items()]:
            if name.endswith("_") and not name.startswith("__") and callable(function):
                patched.enter_context(_replaced(nn.init, name, partial(_initialize, function)))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _initialize(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch.nn.init, some of which draw nothing for a tensor without storage."""
    if not tensor.is_meta:
        return function(tensor, *args, **kwargs)
    function(_like(tensor), *args, **kwargs)
    return tensor


def _like(tensor: Tensor) -> Tensor:
    """Return new memory of the tensor's form, in which a draw takes as many numbers."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def _become(tensor: Tensor, other: Tensor) -> None:
    """Give `tensor` the storage of `other`; it stays the same object, so modules that share it still do."""
    new = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    new.__dict__.update(tensor.__dict__)
    new.__class__ = type(tensor)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


def _digest(model: nn.Module) -> str:
    """Return a digest of a model's names and shapes, and of what its modules hold beside them; else why there is none."""
    drawn = torch.default_generator.get_state().numpy().tobytes()  # alike if all have drawn alike
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found, known = hashlib.sha256(drawn), {*map(id, model.modules()), *map(id, tensors.values())}
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        if tensor.is_meta and weakref.getweakrefs(tensor):  # swap_tensors refuses it
            return f"{name} has a weak reference"
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in OWN:
                found.update(f"{name}.{key}".encode())
                if not _add(value, found, known):
                    return f"{name}.{key} has no storage"
    return found.hexdigest()


def _add(value: Any, found: Any, known: set[int]) -> bool:
    """Add plain values and tensors, also in containers, to `found`; return False for a tensor without storage.

    known: the ids of what the model has registered, which gets its storage.
    """
    if id(value) in known:
        return True
    if isinstance(value, nn.Module):
        return not any(each.is_meta for each in (*value.parameters(), *value.buffers()))
    if isinstance(value, Tensor):
        if value.is_meta:
            return False
        found.update(str((value.dtype, tuple(value.shape))).encode())
        # Sparse tensors and others of classes of their own have no bytes; what was drawn for them was drawn alike.
        with contextlib.suppress(Exception):
            found.update(value.detach().cpu().resolve_conj().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        found.update(str((value.dtype, value.shape)).encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | complex | None):
        found.update(repr(value).encode())
    elif isinstance(value, torch.Generator):
        found.update(value.get_state().numpy().tobytes())
    elif isinstance(value, set | frozenset):
        return all(_add(each, found, known) for each in sorted(value, key=repr))
    elif isinstance(value, dict):
        known = known | {id(value)}  # it may hold itself
        return all(_add(each, found, known) for pair in value.items() for each in pair)
    elif isinstance(value, list | tuple):
        known = known | {id(value)}
        return all(_add(each, found, known) for each in value)
    return True
