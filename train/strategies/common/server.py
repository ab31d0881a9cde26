"""A rank that keeps parameters and an optimizer for others, which train and send it gradients by remote calls.

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

from train.config.keys import Config, Precision
from train.dist import rpc as calls
from train.dist.layout import DATA, Layout
from train.errors import ConfigError
from train.strategies.base import Strategy
from train.strategies.common.optimizer_step import OptimizerStep, Stepping

SERVER = 0
_serving: list[Server] = []


@dataclass(frozen=True)
class Answer:
    """What a trainer gets for a gradient. grad_norm: [] that of the update; lr: that of the update."""

    parameters: list[Tensor]
    grad_norm: Tensor
    skipped: bool
    lr: float


@dataclass(frozen=True, eq=False)
class Gradient:
    """What a trainer has sent and waits to have answered.

    tensors: one a parameter, None where it had no part. elsewhere: [] the norm of what is not the server's to apply.
    """

    trainer: int
    step: int
    tensors: list[Tensor | None]
    elsewhere: Tensor | None = None
    answer: Future[Answer] = field(default_factory=Future)


class Server:
    """Keeps the parameters, and steps by every `per_update` gradients, or as many as there are trainers left.

    Gradients of a step wait until it is begun here too: else they could move what is just being saved.
    """

    def __init__(self, optimizer_step: OptimizerStep, *, trainers: Iterable[int], per_update: int):
        self.optimizer_step, self.per_update = optimizer_step, per_update
        self.updates = self.left_out = 0
        self.lost: list[int] = []
        self._done = dict.fromkeys(trainers, -1)  # the last step whose gradient of the trainer's was taken
        self._begun = -1
        self._waiting: list[Gradient] = []
        self._pulls: list[tuple[int, Future[list[Tensor]]]] = []
        self._change = threading.Condition()
        self._last = Answer([], torch.zeros(()), skipped=False, lr=0.0)

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def push(self, trainer: int, step: int, gradient: list[Tensor | None]) -> Future[Answer]:
        """Take a gradient; answered with the update that it is part of."""
        return self.take(Gradient(trainer, step, gradient))

    def take(self, gradient: Gradient) -> Future[Answer]:
        """Take a gradient; answered with the update that it is part of."""
        with self._change:
            self._waiting.append(gradient)
            self._proceed()
        return gradient.answer

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def pull(self, step: int) -> Future[list[Tensor]]:
        """The parameters once every trainer's gradient of `step` has been taken."""
        pull: Future[list[Tensor]] = Future()
        with self._change:
            self._pulls.append((step, pull))
            self._proceed()
        return pull

    def lose(self, trainer: int) -> None:
        """Wait for nothing more from `trainer`, and serve on."""
        with self._change:
            self.lost.append(trainer)
            self._done.pop(trainer, None)
            self._waiting = [gradient for gradient in self._waiting if gradient.trainer != trainer]
            self._proceed()

    def begin(self, step: int) -> None:
        """Take gradients of steps up to `step` from now on."""
        with self._change:
            self._begun = step
            self._proceed()

    def await_first(self, step: int) -> Answer:
        """Until some trainer's gradient of `step` has been taken; the last update. Raises RankLost."""
        return self._await(lambda: max(self._done.values()) >= step)

    def await_all(self, step: int) -> Answer:
        """Until every trainer's gradient of `step` has been taken; the last update. Raises RankLost."""
        return self._await(lambda: self._has_taken(step))

    def parameters(self) -> list[Tensor]:
        """What trainers are to have of the parameters."""
        return [parameter.detach() for parameter in self.optimizer_step.parameters]

    def norm(self, batch: list[Gradient]) -> Tensor:
        """[] of the global gradient, of which the server may have only a part."""
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
        """The gradients of the next update; empty if there are too few yet."""
        due = [gradient for gradient in self._waiting if gradient.step <= self._begun]
        size = min(self.per_update, len(self._done))
        return due[:size] if len(due) >= size else []

    def _update(self, batch: list[Gradient]) -> None:
        """In the order of trainers: sums in the order of arrival would round differently each time."""
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
    """A strategy of which rank 0 serves and takes no samples, and the others train."""

    name: ClassVar[str]
    honours = frozenset({*Stepping.honours, "channels_last"} - {"log.train_metrics"})

    def layout(self, world_size: int) -> Layout:
        """Of the trainers."""
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
                f"precision=fp16 scales the loss by what the optimizer's rank sees, and with strategy={self.name} that is another one: "
                "use precision=bf16 or fp32, or strategy=ddp"
            )
        if config.compile:
            raise ConfigError(
                f"compile=true does not go with strategy={self.name}: use compile=false, or strategy=ddp or single"
            )

    @property
    def data_shard(self) -> tuple[int, int] | None:
        return None if self.world.rank == SERVER else self.layout(self.world.size).shard(self.world.rank - 1)

    def parameters(self) -> dict[str, nn.Parameter]:
        return Strategy.parameters(self)  # between averages and updates every rank has its own

    def close(self) -> None:
        calls.close()


def serve(server: Server, trainers: Iterable[int]) -> None:
    """Let trainers find the server in this process, and it notice when they are gone."""
    _serving[:] = [server]
    for trainer in trainers:
        calls.watch(trainer, server.lose)


def served() -> Server:
    """The server in this process, for a trainer to refer to."""
    return _serving[0]
