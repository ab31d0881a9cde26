"""One optimizer step on a model that is already distributed; the data-parallel strategies share it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from muster.checkpoint.trained import SavedTensor, own_prefix
from muster.data.generators import Draws, kept_generators
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.keys import NonFinite, Precision
from muster.train.models.frozen import needs_mode, set_mode
from muster.train.objectives.counted import count_of, weighed
from muster.train.objectives.loss import loss_of
from muster.train.objectives.measure import sums
from muster.train.optim.schedule import follow
from muster.train.strategies import state as flat
from muster.train.strategies.base import Recipe, StepResult, Strategy
from muster.train.strategies.replicas.buffers import Buffers
from muster.train.strategies.step.call import Call
from muster.train.strategies.step.gradient import clip, total_norm
from muster.world.counts import SEEN
from muster.world.dtensor import in_pieces
from muster.world.exposed_communication import Waiting
from muster.world.group import World
from muster.world.layout import Layout

BUFFERS = "buffers/"
"""Prefix of the names of buffers that are in no state dict of the model."""
AUTOCAST = {Precision.fp32: None, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def build_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """Build the recipe's model on `device`, in channels-last memory format if configured or faster."""
    model = recipe.build_model().to(device)
    if recipe.channels_last or (recipe.channels_last is None and _prefers_channels_last(model, recipe, device)):
        model = model.to(memory_format=torch.channels_last)
    return model


class OptimizerStep:
    """One optimizer step: gradient accumulation, precision, loss scaling, clipping, update, and skipping a step.

    Args:
        layout: how the model and the samples are distributed. Gradients are averaged over the ranks that divide the samples.
        model: the model, distributed over the ranks as in `layout`; the optimizer is built over its parameters.
        forward: the callable for training, if the model is wrapped; None: the model itself.
        no_sync: context manager for every forward and backward pass of a step except the last.
        trainers: process group of the ranks that share the model's buffers; None: all ranks.
        has_loss: whether this rank computes the loss and so holds the objective's state.
        elsewhere: name -> size of the entries of the full model's state that only other ranks hold.
    """

    everywhere: flat.Groups | None = None
    """The optimizer's groups with the parameters of all ranks; None if this rank holds all of them."""
    before_sum: Callable[[int, Tensor | None, Mapping[str, Tensor]], None] | None = None
    """Called with the step, this rank's share of the loss (None: the sum tells it) and of the metrics, before the rank's
    part of the sum over the ranks is complete."""

    before_forward: Callable[[int], None] | None = None
    """Called with the step before anything of it is done."""

    after_update: Callable[[int], None] | None = None
    """Called with the step after its update."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        world: World,
        layout: Layout,
        model: nn.Module,
        forward: Callable[..., Any] | None = None,
        no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        trainers: ProcessGroup | None = None,
        has_loss: bool = True,
        elsewhere: Mapping[str, torch.Size] | None = None,
    ):
        self.recipe, self.world, self.model, self.no_sync = recipe, world, model, no_sync
        self.forward, self._call, self._elsewhere = forward or model, Call(model), elsewhere or {}
        self._shards, self._speaks = layout.shard(world.rank)[1], layout.speaks(world.rank)
        self.count = count_of(recipe.objective, model)
        """What the objective counts in a micro-batch; None: its samples."""
        self._objective = recipe.objective if has_loss and isinstance(recipe.objective, nn.Module) else None
        self.buffers = Buffers(model, world, objective=self._objective, group=trainers)
        self.optimizer = recipe.build_optimizer(model.named_parameters(), elsewhere=tuple(self._elsewhere))
        self._follow_schedule = follow(recipe.schedule, self.optimizer)
        self._built = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
        self._seen = False
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=recipe.precision is Precision.fp16)
        self.waiting = Waiting(world, self.parameters)
        self.lr = 0.0
        self._measured: dict[str, Tensor] = {}
        self._own = f"{own_prefix(world.rank)}buffers/"
        self.leaves_out = recipe.on_nonfinite is NonFinite.skip or self.scaler.is_enabled()

    @property
    def parameters(self) -> list[Any]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        """Run the optimizer step of global step `step`. Collective.

        Raises ConfigError: after the first backward pass, the model trains parameters that the optimizer does not have.
        """
        if self.before_forward:
            self.before_forward(step)
        self.set_training(True)
        self._drop_gradients()  # only here: StepResult.grad_norm may read the last step's gradients until now
        self._measured = {}
        before = self.buffers.copy() if self.leaves_out else []
        self.waiting.begin()
        loss = self.backward(step, batches)
        self.waiting.end()
        if not self._seen:
            self.see_parameters()
        self.buffers.forget()
        self.scaler.unscale_(self.optimizer)  # clipping needs the unscaled gradient
        clips = self.recipe.grad_clip is not None
        norm = self.norm() if clips or self.leaves_out else None
        skipped = self.update(step, norm)
        if skipped:
            self.buffers.put_back(before)
        if self.after_update:
            self.after_update(step)
        return StepResult(loss, self.norm if norm is None else norm, skipped, self._measured)

    def update(self, step: int, norm: Tensor | None) -> bool:
        """Update the parameters by their reduced gradients; return True if skipped. norm: [] L2 norm of the global gradient, if known."""
        self._set_lr(step)
        if norm is not None and self._must_skip(norm):
            self.scaler.update()
            return True
        if norm is not None and self.recipe.grad_clip is not None:
            clip(self.parameters, self.recipe.grad_clip, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return False

    def norm(self) -> Tensor:
        """[] L2 norm of the global gradient, the same on every rank. Collective."""
        return total_norm(p.grad for p in self.parameters if p.grad is not None)

    def _drop_gradients(self) -> None:
        """Do what the optimizer's `zero_grad` does: torch's own, for a small model, takes longer than a layer."""
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(self.optimizer):
            return self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def warm_up(self, batches: list[Batch]) -> None:
        """Run a forward and backward pass, drop the gradient, restore buffers and generators. Collective."""
        before = self.buffers.copy()
        self.set_training(True)
        told, self.before_sum = self.before_sum, None
        with kept_generators(on_device=True):
            self.backward(0, batches[-1:])
        self.before_sum = told
        self.optimizer.zero_grad()
        self.buffers.put_back(before)

    def backward(self, step: int, batches: list[Batch]) -> Tensor:
        """Accumulate the gradient of the global batch's mean loss; return this rank's share of that loss, []."""
        shares: list[Tensor] = []

        def tell(share: Tensor) -> None:
            if self.before_sum:
                self.before_sum(step, self._sum_of([*shares, share], batches), self._measured)

        for batch in batches:
            last = batch is batches[-1]
            shares.append(self._share(batch, last=last, times=self._shards, tell=tell if last else None))
        return self._sum_of(shares, batches)

    def _sum_of(self, shares: list[Tensor], batches: list[Batch]) -> Tensor:
        """Return the sum of the shares of the loss of those micro-batches whose loss this rank reports, []."""
        counts = [batch.count if self._speaks else 0 for batch in batches]
        if len(shares) == 1 and counts[0]:
            return shares[0]
        counted = zip(shares, counts, strict=True)
        return torch.stack([share if count else torch.zeros_like(share) for share, count in counted]).sum()

    def _share(
        self, batch: Batch, *, last: bool, times: int = 1, tell: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Run forward and backward on one micro-batch; return its share of the global loss, [].

        times: factor on the gradient. tell: called with the share between forward and backward.
        """
        before = None if batch.count else self.buffers.copy()
        with contextlib.nullcontext() if last else self.no_sync():
            with self._autocast():
                outputs = self._call(self.forward, batch.inputs)
                loss = loss_of(self.recipe.objective, outputs, batch.targets, model=self.model)
            if self.recipe.train_metrics:
                self._measure(outputs, batch, loss.detach())
            # Ranks may hold unequal shares of the global batch. `times` cancels a later mean over ranks.
            share = weighed(loss, batch.share, outputs)
            if tell:
                tell(share.detach())
            self.scaler.scale(share if times == 1 else share * times).backward()  # type: ignore[no-untyped-call]
        if (
            before is not None
        ):  # after the backward pass, which may use them: a sample that does not count moves no statistics
            self.buffers.put_back(before)
        detached: Tensor = share.detach()
        return detached

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Metrics of one micro-batch, summed over its samples. Collective."""
        self.set_training(False)
        with self.buffers.in_use(), torch.no_grad(), self._autocast():
            outputs = self._call(self.model, batch.inputs)
            measured = self._sums(outputs, batch)
        if batch.count and self._speaks:
            self.recipe.measures.update(outputs, batch.targets, slice=batch.slice)
        return {name: value * bool(batch.count and self._speaks) for name, value in measured.items()}

    def _measure(self, outputs: Any, batch: Batch, loss: Tensor) -> None:
        with torch.no_grad():
            found = {**self._sums(outputs, batch, loss), SEEN: torch.tensor(batch.count)}
        for name, value in found.items() if batch.count and self._speaks else ():
            key = f"{batch.slice:08d}/{name}" if self.recipe.slices else name
            self._measured[key] = self._measured.get(key, 0) + value.detach().double()

    def _sums(self, outputs: Any, batch: Batch, loss: Tensor | None = None) -> dict[str, Tensor]:
        how: Any = {"model": self.model, "inputs": batch.inputs, "loss": loss, "counts": self.count}
        return sums(self.recipe.objective, outputs, batch.targets, batch.count, **how)

    def is_finite(self) -> bool:
        """Return True if the parameters of all ranks are finite. Synchronizes with the device. Collective."""
        finite = bool(torch.isfinite(total_norm(parameter.detach() for parameter in self.parameters)))
        return self.world.lowest(not finite) is None

    def weights(self) -> dict[str, Any]:
        """The model's state dict with the buffers that all ranks share. Collective.

        Raises ConfigError: the optimizer lacks a trained parameter, buffers differ in size between ranks, or extra state differs between ranks
        or cannot be loaded with `weights_only=True`.
        """
        self.see_parameters()
        weights, shared = self.model.state_dict(), self.buffers.shared()
        flat.check_extra(weights, self.world)
        return {name: shared.get(name, value) for name, value in weights.items()}

    def state(self) -> dict[str, Any]:
        """State under flat names for a resume at any world size, with this rank's own buffers if they differ between ranks. Collective."""
        weights, shared = self.weights(), self.buffers.shared()
        model = flat.of_model(weights)
        optimizer = flat.of_optimizer(self.optimizer, self.model, everywhere=self.everywhere)
        beside = {f"{BUFFERS}{name}": buffer for name, buffer in shared.items() if name not in weights}
        own = {} if self.buffers.agree else {f"{self._own}{name}": each for name, each in self.buffers.own.items()}
        return {**model, **optimizer, "scaler": self.scaler.state_dict(), **beside, **own}

    def replica(self) -> dict[str, Any]:
        """This replica's state under the names of `state`, without communication; buffers are this rank's own."""
        weights, own = self.model.state_dict(), self.buffers.own
        beside = {f"{BUFFERS}{name}": buffer for name, buffer in own.items() if name not in weights}
        optimizer = flat.of_optimizer(self.optimizer, self.model, everywhere=self.everywhere)
        return {**flat.of_model(weights), **optimizer, "scaler": self.scaler.state_dict(), **beside}

    def stand_at(self, step: int) -> None:
        """Set the learning rate that step number `step` - 1 has used."""
        self._set_lr(max(0, step - 1))

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Tensors to read the `saved` ones into: model, optimizer, shared buffers and this rank's own buffers.

        Raises ConfigError: the saved model differs from this model in names or sizes.
        """
        self.buffers.make_room(saved, prefix=flat.MODEL)
        return {
            **flat.targets(self.model, self.optimizer, saved, elsewhere=self._elsewhere),
            **self.buffers.targets(saved, prefix=BUFFERS),
            **self.buffers.targets(saved, prefix=self._own),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Raises ConfigError if it does not fit."""
        flat.load(
            self.model, self.optimizer, state, configured=self.recipe.optimizer_options, everywhere=self.everywhere
        )
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        for prefix in (BUFFERS, self._own):
            here = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            self.buffers.put(here)
        self.buffers.forget()

    def set_training(self, mode: bool) -> None:
        """Set training or evaluation mode on the model, and on the objective if it is a module; see `frozen_mode`."""
        for root in (self.model, self._objective):
            if root is not None and needs_mode(root, mode):
                set_mode(root, mode)

    def see_parameters(self) -> None:
        """Raise ConfigError if the model trains parameters that the optimizer does not have."""
        self._seen = True
        for name, parameter in self.model.named_parameters():
            built, trained = self._built.get(name, (None, False))
            if in_pieces(parameter) or in_pieces(built):  # sharding replaces parameters on purpose
                continue
            if built is not parameter:
                raise ConfigError(
                    f"the model has replaced the parameter {name} since it was built, and the optimizer trains "
                    f"the old one: change its values in place, with torch.no_grad(): {name}.copy_(...)"
                )
            if parameter.requires_grad and not trained:
                raise ConfigError(
                    f"{name} requires a gradient now and did not when the optimizer was built, so it is not trained: let it "
                    "require one from the start, and set its group's lr or its gradient to zero until then"
                )

    def _must_skip(self, norm: Tensor) -> bool:
        """Return True if the step must be skipped, because the norm is not finite.

        The norm is that of the reduced gradient, so all ranks decide alike without communication. Reading it on CUDA
        synchronizes with the device, so it is read there only if steps may be skipped (under fp16 the scaler
        synchronizes anyway). Any other non-finite value shows in the parameters, which are checked before they are
        saved.
        """
        return (self.leaves_out or self.world.device.type != "cuda") and not bool(torch.isfinite(norm))

    def _set_lr(self, step: int) -> None:
        self._follow_schedule(step)
        rate = self.optimizer.param_groups[0].get("lr")
        self.lr = math.nan if rate is None else float(rate)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AUTOCAST[self.recipe.precision]
        return torch.autocast(self.world.device.type, dtype=dtype) if dtype else contextlib.nullcontext()


class Stepping(Strategy):
    """Base class of strategies that run an OptimizerStep; `build` must set it as `optimizer_step`."""

    optimizer_step: OptimizerStep
    honours: ClassVar[Collection[str]] = frozenset(
        {"grad_clip", "precision", "on_nonfinite", "log.train_metrics", "scheduler", "metrics"}
    )

    @property
    def lr(self) -> float:
        return self.optimizer_step.lr

    @cached_property
    def draws(self) -> Draws:
        """The generators' seeds in each step, of step and rank: so a rank that is restarted in place draws alike."""
        return Draws()

    @property
    def draws_as(self) -> int:
        """The rank whose numbers this rank draws in a step: its own."""
        return self.world.rank

    def seed(self, step: int) -> None:
        """Seed the generators for this rank's part of a step; with virtual slices, each slice does."""
        recipe = self.optimizer_step.recipe
        if not recipe.slices:
            self.draws.seed(recipe.seed, step, self.draws_as)

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self.seed(step)
        return self.optimizer_step.step(step, batches)

    def waited_s(self) -> float:
        return self.optimizer_step.waiting.read()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return self.optimizer_step.waiting.within()

    def gradients_computed(self) -> int:
        return self.optimizer_step.waiting.computed()

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        return self.optimizer_step.evaluate(batch)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.optimizer_step.model.named_parameters())

    def finite(self) -> Collection[str]:
        trained, model = set(self.optimizer_step.parameters), self.optimizer_step.model
        return {
            f"{flat.MODEL}{name}" for name, each in model.named_parameters(remove_duplicate=False) if each in trained
        }

    def sync_parameters(self) -> None:
        """Do nothing: the parameters are equal after every step."""

    def state(self) -> dict[str, Any]:
        return self.optimizer_step.state()

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        return self.optimizer_step.targets(saved)

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer_step.load(state)

    def weights(self) -> dict[str, Tensor | Callable[[], Tensor]]:
        return self.optimizer_step.weights()


def _prefers_channels_last(model: nn.Module, recipe: Recipe, device: torch.device) -> bool:
    """True for convolutions on tensor cores (CUDA, reduced precision or TF32); elsewhere channels-last gains too little."""
    reduced = recipe.precision is not Precision.fp32 or torch.backends.cudnn.allow_tf32
    return device.type == "cuda" and reduced and any(isinstance(module, nn.Conv2d) for module in model.modules())
