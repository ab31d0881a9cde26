"""What a user's loop is in the middle of when it saves: a pass, an optimizer's step not yet counted, gradients not yet used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muster.errors import ConfigError
from muster.job.step_mark import StepMark
from muster.world.dtensor import in_pieces


class Accumulation:
    """Follows the optimizers' steps between two calls of `Job.step`, and whether the loop needs the gradients that are left.

    It needs those of an optimizer that made no step. It may need those left after a step: another optimizer's loss has added to
    them, they belong to the next step, or the loop adds to them for ever. Most loops throw them away. The next backward pass, or the
    optimizer's next step, shows it. Until then, a loop that has ever needed them counts as needing them.

    names: parameter -> its name in checkpoints. modules, others: see `StepMark`.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        names: Mapping[Tensor, str],
        modules: Mapping[str, nn.Module],
        others: Mapping[str, Any],
    ):
        self._optimizers, self._names = optimizers, names
        self._gradients: dict[int, tuple[Callable[[], Any], int]] = {}
        """By id of a parameter, its gradient and the version of this between two steps."""
        self._zero = set[int]()
        """Those that were zero."""
        self._is_counted = False
        """True once the step is counted, until its body has ended: what is there then belongs to it."""
        self._is_aside = False
        self._stepped, self._begun = set[str](), set[str]()
        """The optimizers that have made a step since the last count, or end of a body, and those that are within one."""
        self._idle = set[str]()  # a fresh or restored optimizer has no gradients
        """Those that have made no step in the last body."""
        self.habits: dict[str, bool] = {}
        """By optimizer, whether the loop has ever needed the gradients that were left; not there until it is seen."""
        self._left: dict[str, list[tuple[Any, Any]]] = {}
        """By optimizer, the parameters with gradients after the last step, and these."""
        self._is_needed: dict[str, bool] = {}
        """What has been seen since then."""
        self._first: dict[str, Any] = {}
        """By optimizer, the parameter that gets its gradient first in a backward pass."""
        self._hooks: dict[str, list[Any]] = {}
        stepped = {id(each) for name, parameters in self._parameters().items() for each in parameters if name}
        followers = {name: each for each, name in names.items() if id(each) not in stepped}
        self.state = StepMark(followers, modules, others)
        for name, optimizer in optimizers.items():
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # wrappers of other libraries have none
                optimizer.register_step_pre_hook(partial(self._begin, name))
                optimizer.register_step_post_hook(partial(self._end, name))

    def count(self) -> None:
        """Count a step of the job."""
        self._idle, self._is_counted = self._optimizers.keys() - self._stepped, True
        self._stepped, self._zero = set(), set()

    def end_step(self) -> None:
        """Note the gradients that are left at the end of the loop's body."""
        self._is_needed, gradients = {}, list[tuple[Any, Any]]()
        self._idle, self._stepped = self._idle - self._stepped, set()
        for name, parameters in self._parameters().items():
            there = [(each, gradient) for each in parameters if (gradient := each.grad) is not None]
            gradients += there
            self._left[name] = left = [(each, ref(gradient)) for each, gradient in there]
            if name not in self._hooks:
                found = [each for each, _ in left if each.requires_grad and not in_pieces(each)]
                first = self._first.get(name)
                watched: list[Any] = [each for each in found if each is first] or found
                self._hooks[name] = [each.register_hook(partial(self._see, name, ref(each))) for each in watched]
        self._mark(gradients)

    def mark(self) -> None:
        """Note that no step has begun. Gradients of zero are as good as none: what is added to them is of the next step."""
        there = [(each, each.grad) for each in self._names if each.grad is not None]
        self._mark(there)
        self._zero = {id(each) for each, gradient in there if not _some([gradient])}

    def _mark(self, gradients: Iterable[tuple[Any, Any]]) -> None:
        self._gradients = {id(each): (ref(gradient), gradient._version) for each, gradient in gradients}
        self._is_counted, self._zero = False, set()
        self.state.set()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Put gradients aside in this context, as of an evaluation, whose own passes must not add to them.

        One that is a view of a bucket of DistributedDataParallel's (`gradient_as_bucket_view`) would be overwritten in it.
        """
        kept = [(each, each.grad, _copy_of_view(each.grad)) for each in self._names]
        for each, _, _ in kept:
            each.grad = None
        self._is_aside = True
        try:
            with self.state.aside():
                yield
        finally:
            self._is_aside = False
            for each, gradient, values in kept:
                each.grad = gradient
                if gradient is not None and values is not None:
                    gradient.data.copy_(values)  # no change that counts

    def begun(self, *, ends_with_count: bool) -> str:
        """Return what the next step has changed of what a checkpoint holds, and would change again after a resume; empty if nothing.

        Gradients where none was left are its own: a checkpoint leaves them out. ends_with_count: a step ends with its count, and not with
        the loop's body, so that all else may be changed for the last step, unless there has been a backward pass.
        """
        if self._is_counted:
            return ""
        if self._stepped:
            return "the weights"
        has_pass = False
        for name, parameters in self._parameters().items():
            for each in parameters:
                grad, version = self._gradients.get(id(each), (None, 0))
                is_same = each.grad is None or (grad and each.grad is grad() and each.grad._version == version)
                if is_same or (has_pass and not grad) or not _some([each.grad]):
                    continue
                if grad and id(each) not in self._zero and self._may_need(name):
                    return f"the gradient of {self._names[each]}"
                has_pass = True
        if ends_with_count and not has_pass:
            return ""
        return self.state.changed()

    def _may_need(self, name: str) -> bool:
        return name in self._idle or self.habits.get(name, True)

    def _is_of_pass(self, parameter: Tensor) -> bool:
        """Return True for a gradient that a pass of the next step has made."""
        return not self._is_counted and id(parameter) not in self._gradients

    def _see(self, name: str, first: Callable[[], Any], _: Tensor) -> None:
        """Note whether the loop has thrown away the gradients left, before a backward pass adds to the first one."""
        if self._is_aside:
            return
        self._unhook(name)
        self._first[name] = there = first()
        same = [each.grad for each, grad in self._left[name] if each.grad is grad()]  # others may be of this pass
        self._note(name, is_needed=_some([there.grad, *same]))

    def _note(self, name: str, *, is_needed: bool) -> None:
        if name not in self._is_needed and self._left.get(name):
            self._is_needed[name] = is_needed
            self.habits[name] = is_needed or self.habits.get(name, False)

    def _unhook(self, name: str) -> None:
        for hook in self._hooks.pop(name, ()):
            hook.remove()

    def _begin(self, name: str, _: object, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if any(map(callable, (*given[1:], *named.values()))):
            return  # a closure, which makes the pass of the step, before any change
        is_unused = bool(self._hooks.get(name)) and name not in self._first  # no pass has come to any of them
        if self._hooks.get(name):
            self._first.pop(name, None)
        self._unhook(name)
        same = (each.grad is not None and each.grad is grad() for each, grad in self._left.get(name, ()))
        self._note(name, is_needed=is_unused or any(same))  # hooks on parameters in pieces are never called
        self._begun.add(name)

    def _end(self, name: str, *_: object) -> None:
        self._begun.discard(name)
        self._stepped.add(name)

    def is_within(self) -> bool:
        """Return True in an optimizer's step, which may have collectives, or after one that the job has not counted."""
        return bool(self._stepped or self._begun)

    def early(self) -> str:
        """Return a line after an optimizer's step in a micro-batch that does not end its step; empty if there was none.

        Raises ConfigError: all optimizers have made one; that of one may be meant, as a critic's.
        """
        if not self._stepped:
            return ""
        text = f"{min(self._stepped)}.step() came before the step's last micro-batch: add up gradients, and call it if job.ends_step"
        if self._stepped >= self._optimizers.keys():
            raise ConfigError(text)
        return text

    def uncounted(self) -> str:
        """Return an optimizer's step of the next step of the job, as `optimizer.step()`; empty if there is none."""
        return f"{min(self._stepped)}.step()" if self._stepped and not self._is_counted else ""

    def refuse(self, what: str) -> None:
        """Raise ConfigError after an optimizer's step that the job has not counted: weights and position do not fit."""
        if name := self.uncounted():
            raise ConfigError(
                f"{what} came after {name} and before job.step(): call it after job.step(), which counts the optimizer's step"
            )

    def with_gradients(self) -> list[str]:
        """Return the optimizers that have gradients other than zero."""
        return [name for name, found in self._parameters().items() if _some([each.grad for each in found])]

    def needs(self, name: str) -> bool:
        """Return whether the loop needs, in this step, the gradients that an optimizer had before, as far as can be told."""
        return name in self._idle or self._is_needed.get(name, self.habits.get(name, True))

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that the next step may need, by parameter; without zero ones, unless they are DTensors."""
        return {
            self._names[each]: each.grad
            for name, parameters in self._parameters().items()
            if self._may_need(name)
            for each in parameters
            if each.grad is not None
            and not (self._is_of_pass(each) or id(each) in self._zero)
            and (in_pieces(each.grad) or _some([each.grad]))
        }

    def zeroed(self, kept: Collection[str] = ()) -> list[str]:
        """Return the parameters that have a dense gradient and are not `kept`.

        An optimizer skips a parameter without a gradient, but not one whose gradient a loop has set to zero.
        """
        there = {
            name
            for each, name in self._names.items()
            if each.grad is not None and not each.grad.is_sparse and not self._is_of_pass(each)
        }
        return sorted(there.difference(kept))

    def restore(self, gradients: Mapping[str, Any], zeroed: Collection[str] = ()) -> None:
        for parameter, name in self._names.items():
            if name in gradients:
                parameter.grad = _like(parameter, gradients[name])
            elif name in zeroed:
                parameter.grad = torch.zeros_like(parameter)
        found = self._parameters()
        self._idle = {name for name, each in found.items() if any(self._names[one] in gradients for one in each)}

    def _parameters(self) -> dict[str, list[Any]]:
        """Return the parameters by optimizer; by "" those of no tracked torch optimizer."""
        found: dict[str, list[Any]] = {
            name: [each for group in optimizer.param_groups for each in group["params"]]
            for name, optimizer in self._optimizers.items()
        }
        known = {each for parameters in found.values() for each in parameters}
        if len(known) < len(self._names):
            found[""] = [each for each in self._names if each not in known]
        return found


def _some(gradients: list[Any]) -> bool:
    """Return whether any gradient is not zero, as far as this rank's pieces show."""
    found = [each.to_local() if in_pieces(each) else each for each in gradients if each is not None]
    plain = [each._values() if each.is_sparse else each for each in found]
    return any(bool(each.any()) for each in sorted(plain, key=Tensor.numel))  # one element of a small one is enough


def _copy_of_view(gradient: Tensor | None) -> Tensor | None:
    return gradient.clone() if gradient is not None and gradient._is_view() else None


def _like(parameter: Tensor, saved: Any) -> Tensor:
    if in_pieces(saved):
        return saved
    if isinstance(saved, Mapping):  # see `packed`
        return torch.sparse_coo_tensor(saved["indices"], saved["values"], parameter.shape, device=parameter.device)
    local: Tensor = saved.to(parameter.device)
    if not in_pieces(parameter):
        return local
    from torch.distributed.tensor import DTensor, distribute_tensor

    like: Any = parameter
    if local.shape == like.shape:  # it was in one piece when it was saved
        return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def packed(gradient: Tensor) -> Any:
    """Return a gradient as a checkpoint holds it: a sparse one in two tensors."""
    if gradient.is_sparse:
        return {"indices": gradient._indices(), "values": gradient._values()}
    return gradient
