"""One process: accumulation, precision, clipping and the optimizer step, which data-parallel strategies build on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from train.config.keys import NonFinite, Precision
from train.data.loader import Batch
from train.dist.world import World
from train.errors import ConfigError
from train.objectives.measure import sums
from train.strategies.base import Recipe, StepResult, Strategy

AUTOCAST = {Precision.fp32: None, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


class Single(Strategy):
    """Train in one process. Raises ConfigError if there are more."""

    def __init__(self, *, world: World):
        if world.size > 1:
            raise ConfigError(f"strategy=single takes one process and was started with {world.size}: use strategy=ddp")
        self.world = world

    def build(self, recipe: Recipe) -> None:
        self.recipe = recipe
        model = recipe.build_model().to(self.world.device)
        if recipe.channels_last or (recipe.channels_last is None and self._prefers_channels_last(model)):
            model = model.to(memory_format=torch.channels_last)
        self.model: nn.Module = self.prepare(model)
        self.buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        if recipe.compile:
            self.model.compile()
        self.forward = self.wrap(self.model)
        self.optimizer = recipe.build_optimizer(self.model.parameters())
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=recipe.precision is Precision.fp16)

    def prepare(self, model: nn.Module) -> nn.Module:
        """A chance to change layers before the optimizer sees the parameters."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """What training calls instead of the model: the model itself, or what synchronises it."""
        return model

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """The context of every backward pass but a step's last."""
        return contextlib.nullcontext()

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self._set_lr(step)
        self.model.train()
        before = [buffer.clone() for buffer in self.buffers] if self.recipe.on_nonfinite is NonFinite.skip else []
        loss = self._backward(batches)
        self.scaler.unscale_(self.optimizer)  # clipping is defined on the true gradient
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self._must_skip(norm):
            for buffer, value in zip(self.buffers, before, strict=False):
                buffer.copy_(value)
            self.optimizer.zero_grad()
            return StepResult(loss, norm, skipped=True)
        if self.recipe.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.recipe.grad_clip, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return StepResult(loss, norm)

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            outputs = self.model(batch.inputs)
        targets = batch.targets
        return {
            name: value * bool(batch.count) for name, value in sums(self.recipe.objective, outputs, targets).items()
        }

    def agree(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def rank_state(self) -> dict[str, Any]:
        return {"buffers": dict(self.model.named_buffers())}

    def load(self, state: dict[str, Any], rank_state: dict[str, Any] | None) -> None:
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the checkpoint does not fit this model and optimizer: {error}") from error
        for group, configured in zip(self.optimizer.param_groups, options, strict=True):
            group.update(configured)  # the config decides, also where it was changed on purpose
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        own = dict(self.model.named_buffers())
        for name, value in (rank_state or {}).get("buffers", {}).items():
            own[name].copy_(value)

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def _backward(self, batches: list[Batch]) -> Tensor:
        """Accumulate the gradient of the global batch's mean loss; give back this rank's share of that loss."""
        shares = []
        for batch in batches:
            last = batch is batches[-1]
            with contextlib.nullcontext() if last else self.no_sync():
                with self._autocast():
                    loss = self.recipe.objective(self.forward(batch.inputs), batch.targets)
                # A mean over ranks follows, and ranks hold unequal shares: weigh by the true count.
                share = loss * (batch.count / batch.total)
                self.scaler.scale(share * self.world.size).backward()
            shares.append(share.detach() if batch.count else torch.zeros_like(share))
        return torch.stack(shares).sum()

    def _must_skip(self, norm: Tensor) -> bool:
        """The norm is of the reduced gradient, so every rank decides alike without asking.

        On CUDA this waits for the device, so there it is only done when it was asked for; under fp16 the scaler
        skips by itself what overflowed.
        """
        if self.scaler.is_enabled() or (self.recipe.on_nonfinite is NonFinite.stop and norm.is_cuda):
            return False
        return not bool(torch.isfinite(norm))

    def _set_lr(self, step: int) -> None:
        factor = self.recipe.schedule(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self.lr = float(self.optimizer.param_groups[0]["lr"])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AUTOCAST[self.recipe.precision]
        return torch.autocast(self.world.device.type, dtype=dtype) if dtype else contextlib.nullcontext()

    def _prefers_channels_last(self, model: nn.Module) -> bool:
        """Tensor cores convolve in channels-last; elsewhere it gains nothing worth a changed layout."""
        reduced = self.recipe.precision is not Precision.fp32
        return self.world.device.type == "cuda" and reduced and any(isinstance(m, nn.Conv2d) for m in model.modules())
