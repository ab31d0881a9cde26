"""A server rank that holds parameters and an optimizer; trainer ranks send it gradients by RPC.

Source: batching by `rpc.functions.async_execution`, https://docs.pytorch.org/tutorials/intermediate/rpc_async_execution.html
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

from muster.errors import ConfigError
from muster.train.config.keys import Config, Precision
from muster.train.strategies.base import Strategy
from muster.train.strategies.rpc import calls as calls
from muster.train.strategies.step.optimizer_step import OptimizerStep, Stepping
from muster.world.layout import DATA, Layout

SERVER = 0
_serving: list[Server] = []


@dataclass(frozen=True)
class Answer:
    """The server's reply to a gradient. grad_norm: [] the update's gradient norm; lr: the update's learning rate."""

    parameters: list[Tensor]
    grad_norm: Tensor
    skipped: bool
    lr: float


@dataclass(frozen=True, eq=False)
class Gradient:
    """A trainer's gradient and the future of its answer.

    tensors: one per parameter, None where the trainer did not use the parameter.
    elsewhere: [] norm of the gradient of parameters that are not on the server; None if there are none.
    """

    trainer: int
    step: int
    tensors: list[Tensor | None]
    elsewhere: Tensor | None = None
    answer: Future[Answer] = field(default_factory=Future)


class Server:
    """Holds the parameters and updates them from `per_update` gradients, or one per trainer if fewer trainers are left.

    Gradients of a step wait until the server has begun that step, too. Otherwise they could change parameters that are
    just being saved.
    """

    def __init__(self, optimizer_step: OptimizerStep, *, trainers: Iterable[int], per_update: int):
        self.optimizer_step, self.per_update = optimizer_step, per_update
        self.updates = self.left_out = 0
        self.lost: list[int] = []
        self._done = dict.fromkeys(trainers, -1)  # trainer -> step of its last processed gradient
        self._begun = -1
        self._waiting: list[Gradient] = []
        self._pulls: list[tuple[int, Future[list[Tensor]]]] = []
        self._change = threading.Condition()
        self._last = Answer([], torch.zeros(()), skipped=False, lr=0.0)

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def push(self, trainer: int, step: int, gradient: list[Tensor | None]) -> Future[Answer]:
        """RPC: see `take`."""
        return self.take(Gradient(trainer, step, gradient))

    def take(self, gradient: Gradient) -> Future[Answer]:
        """Queue a gradient. The future completes with the update that includes the gradient."""
        with self._change:
            self._waiting.append(gradient)
            self._proceed()
        return gradient.answer

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def pull(self, step: int) -> Future[list[Tensor]]:
        """RPC: the parameters, after the gradients of all trainers for `step` have been processed."""
        pull: Future[list[Tensor]] = Future()
        with self._change:
            self._pulls.append((step, pull))
            self._proceed()
        return pull

    def lose(self, trainer: int) -> None:
        """Remove a lost `trainer` and its queued gradients, and continue to serve the others."""
        with self._change:
            self.lost.append(trainer)
            self._done.pop(trainer, None)
            self._waiting = [gradient for gradient in self._waiting if gradient.trainer != trainer]
            self._proceed()

    def begin(self, step: int) -> None:
        """Start `step`: process gradients of steps up to `step` from now on."""
        with self._change:
            self._begun = step
            self._proceed()

    def await_first(self, step: int) -> Answer:
        """Wait until a gradient of any trainer for `step` is processed; return the last update. Raises RankLost."""
        return self._await(lambda: max(self._done.values()) >= step)

    def await_all(self, step: int) -> Answer:
        """Wait until all trainers' gradients for `step` are processed; return the last update. Raises RankLost."""
        return self._await(lambda: self._has_taken(step))

    def parameters(self) -> list[Tensor]:
        """The parameters that trainers receive."""
        return [parameter.detach() for parameter in self.optimizer_step.parameters]

    def norm(self, batch: list[Gradient]) -> Tensor:
        """[] L2 norm of the global gradient; subclasses may add the part that is not on the server."""
        return self.optimizer_step.norm()

    def _await(self, condition: Callable[[], bool]) -> Answer:
        with self._change:
            self._change.wait_for(lambda: self.lost or condition())
            if self.lost:
                raise calls.gone(self.lost[0])
            return self._last

    def _proceed(self) -> None:
        while batch := self._batch():
            self._waiting = [gradient for gradient in self._waiting if gradient not in batch]
            self._update(sorted(batch, key=lambda gradient: gradient.trainer))
        due = [pull for step, pull in self._pulls if self._has_taken(step)]
        self._pulls = [(step, pull) for step, pull in self._pulls if not self._has_taken(step)]
        for pull in due:
            pull.set_result(self.parameters())
        self._change.notify_all()

    def _batch(self) -> list[Gradient]:
        """The gradients of the next update; empty if there are not enough yet."""
        due = [gradient for gradient in self._waiting if gradient.step <= self._begun]
        size = min(self.per_update, len(self._done))
        return due[:size] if len(due) >= size else []

    def _update(self, batch: list[Gradient]) -> None:
        """Apply an update. Sums in the order of trainers, since the order of arrival would change the rounding."""
        for parameter, *parts in zip(self.optimizer_step.parameters, *(g.tensors for g in batch), strict=True):
            given = [part for part in parts if part is not None]
            parameter.grad = sum(given[1:], given[0]) if given else None
        norm = self.norm(batch)
        skipped = self.optimizer_step.update(max(gradient.step for gradient in batch), norm)
        self.updates += 1
        self.left_out += skipped
        self._last = Answer(self.parameters(), norm, skipped, self.optimizer_step.lr)
        for gradient in batch:
            self._done[gradient.trainer] = gradient.step
            gradient.answer.set_result(self._last)

    def _has_taken(self, step: int) -> bool:
        return min(self._done.values(), default=step) >= step


class Served(Stepping):
    """Base class of strategies in which rank 0 is the server, without samples, and the other ranks are trainers."""

    name: ClassVar[str]
    honours = frozenset({*Stepping.honours, "channels_last"} - {"log.train_metrics"})

    def layout(self, world_size: int) -> Layout:
        """The grid of the trainers, without the server."""
        if world_size < 2:
            raise ConfigError(
                f"strategy={self.name} takes at least 2 processes, a server and a trainer, and was started with {world_size}: "
                "use torchrun --nproc-per-node=2 or more, or strategy=ddp"
            )
        return Layout({DATA: world_size - 1})

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if config.precision is Precision.fp16:
            raise ConfigError(
                f"precision=fp16 adapts the loss scale on the optimizer's rank, and with strategy={self.name} other ranks compute the loss: "
                "use precision=bf16 or fp32, or strategy=ddp"
            )
        if config.compile:
            raise ConfigError(
                f"compile=true cannot be combined with strategy={self.name}: use compile=false, or strategy=ddp or single"
            )

    @property
    def data_shard(self) -> tuple[int, int] | None:
        return None if self.world.rank == SERVER else self.layout(self.world.size).shard(self.world.rank - 1)

    @property
    def speaks(self) -> bool:
        """Each trainer has samples of its own."""
        return True

    def parameters(self) -> dict[str, nn.Parameter]:
        """Raise ConfigError: between two updates, the parameters differ between ranks."""
        return Strategy.parameters(self)

    def close(self) -> None:
        calls.close()


def serve(server: Server, trainers: Iterable[int]) -> None:
    """Register the server of this process for RPC, and watch the `trainers` for loss."""
    _serving[:] = [server]
    for trainer in trainers:
        calls.watch(trainer, server.lose)


def served() -> Server:
    """Return the server of this process; trainers call it by RPC to get a reference."""
    return _serving[0]
