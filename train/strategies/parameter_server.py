"""A parameter server: rank 0 keeps the parameters and the optimizer, the others train and send it their gradients.

Every `gradients_per_update` gradients the server makes one optimizer step and answers those who sent them with the new
parameters. One gradient of each trainer is synchronous training; one gradient is HogWild-style asynchronous training.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Recht et al., "Hogwild!",
NeurIPS 2011; batching by `rpc.functions.async_execution`,
https://docs.pytorch.org/tutorials/intermediate/rpc_async_execution.html
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from train.config.keys import Config, NonFinite, Precision
from train.config.marks import Ge
from train.data.loader import Batch
from train.dist import rpc as calls
from train.dist.layout import DATA, Layout
from train.dist.world import World
from train.errors import ConfigError
from train.strategies.base import Recipe, SavedTensor, StepResult, own_prefix
from train.strategies.optimizer_step import OptimizerStep, Stepping, build_model

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

    def norm(self, batch: list[Gradient]) -> Tensor | None:
        """[] of the global gradient, where the server has only a part of it."""
        return None

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
        norm, skipped = self.optimizer_step.update(max(gradient.step for gradient in batch), norm=self.norm(batch))
        self.updates += 1
        self.left_out += skipped
        self._last = Answer(self.parameters(), norm, skipped, self.optimizer_step.lr)
        for gradient in batch:
            self._done[gradient.trainer] = gradient.step
            gradient.answer.set_result(self._last)

    def _has_taken(self, step: int) -> bool:
        return min(self._done.values(), default=step) >= step


class ParameterServer(Stepping):
    """Rank 0 serves, the others train.

    gradients_per_update: None for one of each trainer, which is synchronous.
    """

    def __init__(self, *, gradients_per_update: Annotated[int | None, Ge(1)]):
        self.gradients_per_update = gradients_per_update
        self._caveat = ""
        self.server: Server | None = None

    @property
    def caveat(self) -> str:
        return self._caveat

    def layout(self, world_size: int) -> Layout:
        """Of the trainers: the server takes no samples."""
        if world_size < 2:
            raise ConfigError(
                f"strategy=parameter_server takes at least 2 processes, a server and a trainer, and was started with {world_size}: "
                "use torchrun --nproc-per-node=2 or more, or strategy=ddp"
            )
        return Layout({DATA: world_size - 1})

    def check(self, config: Config, world_size: int) -> None:
        trainers = self.layout(world_size).world_size
        refuse(config, "parameter_server")
        batch = self.gradients_per_update or trainers
        if trainers % batch:
            valid = ", ".join(str(number) for number in range(1, trainers + 1) if trainers % number == 0)
            raise ConfigError(
                f"strategy.gradients_per_update={batch} must divide the number of trainers, {trainers} (world size {world_size} less the server): "
                f"use one of {valid}"
            )
        if batch < trainers and config.on_nonfinite is NonFinite.skip:
            raise ConfigError(
                f"on_nonfinite=skip needs a step that all trainers share, and strategy.gradients_per_update={batch} has none: "
                "use on_nonfinite=stop, or strategy.gradients_per_update=null"
            )

    @property
    def shard(self) -> tuple[int, int] | None:
        return None if self.world.rank == SERVER else self.layout(self.world.size).shard(self.world.rank - 1)

    def build(self, recipe: Recipe, world: World) -> None:
        self.world, trainers = world, self.layout(world.size).world_size
        per_update = self.gradients_per_update or trainers
        self._is_synchronous = per_update == trainers
        if not self._is_synchronous:
            self._caveat = (
                "asynchronous updates: a gradient may be of older parameters, and no run gives the same weights again"
            )
        self.model = build_model(recipe, world.device if world.rank != SERVER else torch.device("cpu"))
        group: Any = dist.new_subgroups_by_enumeration([[SERVER], [*range(1, world.size)]])[0]
        # Shares of the global mean, which the server adds up: there is nothing to average.
        one = Layout({DATA: 1})
        self.optimizer_step = OptimizerStep(recipe, world=world, layout=one, model=self.model, trainers=group)
        self._step = -1
        self._is_newest = True
        calls.start(world)
        if world.rank == SERVER:
            self.server = Server(self.optimizer_step, trainers=range(1, world.size), per_update=per_update)
            serve(self.server, range(1, world.size))
        world.barrier()
        if world.rank != SERVER:
            self._remote = rpc.remote(calls.name(SERVER), served, timeout=0)
            self._take(self._ask("pull", -1))

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self._step, self._is_newest = step, self._is_synchronous
        if not self.server:
            return self._train(step, batches)
        self.server.begin(step)
        # Asynchronously as far as the fastest trainer: not further, or a stop would have to wait until all are there.
        last = self.server.await_all(step) if self._is_synchronous else self.server.await_first(step)
        return StepResult(torch.zeros(()), last.grad_norm, last.skipped and self._is_synchronous)

    def _train(self, step: int, batches: list[Batch]) -> StepResult:
        stepping = self.optimizer_step
        self.model.train()
        before = stepping.buffers.copy() if stepping.leaves_out else {}
        loss = stepping.backward(step, batches)
        stepping.buffers.forget()
        answer: Answer = self._ask("push", self.world.rank, step, [host(p.grad) for p in stepping.parameters])
        stepping.optimizer.zero_grad()
        self._take(answer.parameters)
        stepping.lr, skipped = answer.lr, answer.skipped and self._is_synchronous
        if skipped:
            stepping.buffers.put_back(before)
        return StepResult(loss, answer.grad_norm, skipped)

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        self.sync_parameters()
        return super().evaluate(batch)

    def is_finite(self) -> bool:
        """One that was not is left out by the server; with a step in common, the loop has heard of it there and then."""
        if self.server:
            self.sync_parameters()
        left_out = self.server is not None and self.server.left_out > 0
        return self._is_synchronous or not self.world.broadcast(left_out, source=SERVER)

    def sync_parameters(self) -> None:
        """The server has all gradients of the step in; trainers take what it has then."""
        if self._is_newest:
            return
        if self.server:
            self.server.await_all(self._step)
        else:
            self._take(self._ask("pull", self._step))
        self._is_newest = True

    def state(self) -> dict[str, Any]:
        """The server's, and each trainer's own buffers."""
        self._share_buffers()
        state = self.optimizer_step.state()
        own = own_prefix(self.world.rank)
        return state if self.server else {name: value for name, value in state.items() if name.startswith(own)}

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        targets = self.optimizer_step.targets(saved)
        return {name: target for name, target in targets.items() if self.server or not name.startswith("optimizer/")}

    def weights(self) -> dict[str, Any]:
        self._share_buffers()
        return self.optimizer_step.weights()

    def close(self) -> None:
        calls.close()

    def _ask(self, method: str, *args: Any) -> Any:
        return calls.answer(getattr(self._remote.rpc_async(timeout=0), method)(*args), rank=SERVER)

    def _take(self, parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for mine, newest in zip(self.optimizer_step.parameters, parameters, strict=True):
                mine.copy_(newest)

    def _share_buffers(self) -> None:
        """Give the server the trainers' buffers. Collective."""
        shared = self.optimizer_step.buffers.own if self.server else self.optimizer_step.buffers.shared()
        for buffer in shared.values():
            raw = buffer.cpu().flatten().view(torch.uint8)  # gloo does not know every type
            dist.broadcast(raw, SERVER + 1)
            if self.server:
                buffer.copy_(raw.view(buffer.dtype).view(buffer.shape))


def refuse(config: Config, strategy: str) -> None:
    """Raise ConfigError for what goes with no strategy on a server, with what does."""
    if config.precision is Precision.fp16:
        raise ConfigError(
            f"precision=fp16 scales the loss by what the optimizer's rank sees, and with strategy={strategy} that is another one: "
            "use precision=bf16 or fp32, or strategy=ddp"
        )
    if config.compile:
        raise ConfigError(
            f"compile=true does not go with strategy={strategy}: use compile=false, or strategy=ddp or single"
        )


def serve(server: Server, trainers: Iterable[int]) -> None:
    """Let trainers find the server in this process, and it notice when they are gone."""
    _serving[:] = [server]
    for trainer in trainers:
        calls.watch(trainer, server.lose)


def served() -> Server:
    """The server in this process, for a trainer to refer to."""
    return _serving[0]


def host(tensor: Tensor | None) -> Tensor | None:
    """RPC goes from memory to memory."""
    return None if tensor is None else tensor.cpu()
