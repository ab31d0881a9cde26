"""Parameter server: rank 0 holds the parameters and the optimizer; the other ranks train and send it gradients.

After every `gradients_per_update` gradients, the server runs one optimizer step and sends the new parameters to the
trainers of those gradients. One gradient of each trainer gives synchronous training; a single gradient gives
HogWild-style asynchronous training.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Recht et al., "Hogwild!",
NeurIPS 2011.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from muster.checkpoint.trained import SavedTensor, own_prefix
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.train.config.constraints import Ge
from muster.train.config.keys import Config, NonFinite
from muster.train.strategies.base import Recipe, StepResult
from muster.train.strategies.replicas.broadcast import begin_alike
from muster.train.strategies.rpc import calls as calls
from muster.train.strategies.rpc.server import SERVER, Answer, Served, Server, serve, served
from muster.train.strategies.state import refuse_extra_state
from muster.train.strategies.step.optimizer_step import OptimizerStep, build_model
from muster.world.group import World
from muster.world.layout import DATA, Layout


class ParameterServer(Served):
    """Rank 0 is the server, the other ranks are trainers.

    gradients_per_update: number of gradients per optimizer step; None: one of each trainer, which is synchronous.
    """

    name = "parameter_server"
    honours = Served.honours

    def __init__(self, *, gradients_per_update: Annotated[int | None, Ge(1)]):
        self.gradients_per_update = gradients_per_update
        self._caveat = ""
        self.server: Server | None = None

    @property
    def caveat(self) -> str:
        """Known after `build`."""
        return self._caveat

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        trainers = self.layout(world_size).world_size
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

    def build(self, recipe: Recipe, world: World) -> None:
        self.world, trainers = world, self.layout(world.size).world_size
        per_update = self.gradients_per_update or trainers
        self._is_synchronous = per_update == trainers
        if not self._is_synchronous:
            self._caveat = (
                "asynchronous updates: a gradient may be of older parameters, and the weights are not reproducible"
            )
        self.model = build_model(recipe, world.device if world.rank != SERVER else torch.device("cpu"))
        refuse_extra_state(self.model, "parameter_server")
        begin_alike(self.model, by=torch.device("cpu"))  # includes frozen parameters, which the server never sends
        group: Any = dist.new_subgroups_by_enumeration([[SERVER], [*range(1, world.size)]])[0]
        # Gradients are of shares of the global mean and the server sums them, so nothing is averaged: one data shard.
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

    @property
    def is_together(self) -> bool:
        return self._is_synchronous

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self._step, self._is_newest = step, self._is_synchronous
        if not self.server:
            return self._train(step, batches)
        self.server.begin(step)
        # If asynchronous, wait only for the fastest trainer: otherwise a stop would have to wait for all trainers.
        last = self.server.await_all(step) if self._is_synchronous else self.server.await_first(step)
        return StepResult(torch.zeros(()), last.grad_norm, last.skipped and self._is_synchronous)

    def _train(self, step: int, batches: list[Batch]) -> StepResult:
        stepping = self.optimizer_step
        self.seed(step)
        stepping.set_training(True)
        before = stepping.buffers.copy() if stepping.leaves_out else []
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

    def has_diverged(self) -> bool:
        """Only the server knows about skipped asynchronous updates; a synchronous step reports it in its StepResult."""
        if self.server:
            self.sync_parameters()
        left_out = self.server is not None and self.server.left_out > 0
        return not self._is_synchronous and self.world.broadcast(left_out, source=SERVER)

    def sync_parameters(self) -> None:
        """Wait for all gradients of the step on the server, then pull its parameters on the trainers."""
        if self._is_newest:
            return
        if self.server:
            self.server.await_all(self._step)
        else:
            self._take(self._ask("pull", self._step))
        self._is_newest = True

    def state(self) -> dict[str, Any]:
        """The full state on the server; only the own buffers on a trainer. Collective."""
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

    def _ask(self, method: str, *args: Any) -> Any:
        return calls.answer(getattr(self._remote.rpc_async(timeout=0), method)(*args), rank=SERVER)

    def _take(self, parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for mine, newest in zip(self.optimizer_step.parameters, parameters, strict=True):
                mine.copy_(newest)

    def _share_buffers(self) -> None:
        """Send the trainers' shared buffers to the server. Collective."""
        shared = {} if self.server else self.optimizer_step.buffers.shared()
        facts = [
            (name, list(buffer.shape), str(buffer.dtype).removeprefix("torch.")) for name, buffer in shared.items()
        ]
        for name, size, dtype in self.world.broadcast(facts, source=SERVER + 1):
            here = shared.get(name)
            value = torch.empty(size, dtype=getattr(torch, dtype)) if here is None else here.cpu().contiguous()
            dist.broadcast(value.flatten().view(torch.uint8), SERVER + 1)  # as bytes: gloo does not support every dtype
            shared[name] = value
        if self.server:
            self.optimizer_step.buffers.put(shared)


def host(tensor: Tensor | None) -> Tensor | None:
    """Copy a tensor to the CPU, because RPC sends CPU tensors only; None stays None."""
    return None if tensor is None else tensor.cpu()
