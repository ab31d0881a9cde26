"""DDP combined with RPC: the dense part is replicated on the trainers, an embedding table is on the server, rank 0.

Trainers look up rows by RPC. Distributed autograd sends the gradients of those rows back to the table, so that neither
the full table nor its full gradient is transferred.

Source: https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from muster.checkpoint.trained import SavedTensor
from muster.data.loader import Batch, to
from muster.errors import ConfigError, nearest
from muster.train.config.keys import Config, NonFinite
from muster.train.models.frozen import set_mode
from muster.train.strategies.base import Recipe, StepResult
from muster.train.strategies.rpc import calls as calls
from muster.train.strategies.rpc.server import SERVER, Answer, Gradient, Served, Server, serve, served
from muster.train.strategies.state import refuse_extra_state
from muster.train.strategies.step.gradient import total_norm
from muster.train.strategies.step.optimizer_step import OptimizerStep, build_model
from muster.world.group import World
from muster.world.layout import DATA, Layout


class Table(Server):
    """The server of the remote submodule: computes its forward for trainers and updates it by their gradients."""

    def __init__(self, module: nn.Module, optimizer_step: OptimizerStep, *, trainers: range):
        super().__init__(optimizer_step, trainers=trainers, per_update=len(trainers))
        self.module = module
        self._expected: dict[int, tuple[int, Tensor]] = {}
        self._announced: list[tuple[int, Future[None]]] = []

    def forward(self, training: bool, *inputs: Any) -> Tensor:
        """RPC: run the submodule's forward in training or evaluation mode."""
        set_mode(self.module, training)
        output: Tensor = self.module(*inputs)
        return output

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def push_context(self, trainer: int, step: int, context: int, elsewhere: Tensor) -> Future[Answer]:
        """RPC: queue the gradients that a backward pass in `context` left here. elsewhere: [] norm of the trainer's dense gradient."""
        left = dist_autograd.get_gradients(context)
        parts = [left.get(parameter) for parameter in self.optimizer_step.parameters]
        return self.take(Gradient(trainer, step, parts, elsewhere))

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        """RPC: RRefs to the parameters, for torch's DistributedOptimizer."""
        return [rpc.RRef(parameter) for parameter in self.optimizer_step.parameters]

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def expect(self, trainer: int, step: int, elsewhere: Tensor) -> Future[None]:
        """RPC: announce the next gradient of `trainer`; elsewhere: as for `push_context`. The future completes when it may be applied."""
        announced: Future[None] = Future()
        with self._change:
            self._expected[trainer] = (step, elsewhere)
            self._announced.append((step, announced))
            self._proceed()
        return announced

    def apply(self, trainer: int) -> None:
        """Update the table by the gradients that the parameters hold, which are the trainer's."""
        step, elsewhere = self._expected[trainer]
        with self._change:
            norm = self.optimizer_step.norm()
            skipped = self.optimizer_step.update(step, norm)
            self.updates += 1
            self.left_out += skipped
            self._done[trainer] = step
            self._last = Answer([], torch.hypot(norm, elsewhere), skipped, self.optimizer_step.lr)
            self._proceed()

    def parameters(self) -> list[Tensor]:
        """Empty: trainers receive no parameters of the table."""
        return []

    def _proceed(self) -> None:
        due = [announced for step, announced in self._announced if step <= self._begun]
        self._announced = [(step, announced) for step, announced in self._announced if step > self._begun]
        for announced in due:
            announced.set_result(None)
        super()._proceed()

    def norm(self, batch: list[Gradient]) -> Tensor:
        own = super().norm(batch)
        return torch.hypot(own, batch[0].elsewhere) if batch[0].elsewhere is not None else own


class SharedOptimizer:
    """What DistributedOptimizer creates on the server for each trainer: it forwards to the one optimizer, which checkpoints save."""

    def __init__(self, _parameters: list[Tensor], *, trainer: int):
        self.trainer = trainer

    def step(self) -> None:
        table = served()
        assert isinstance(table, Table)
        table.apply(self.trainer)


class Remote(nn.Module):
    """Replaces the remote submodule in a trainer's model.

    Its output is a leaf of the local graph, because DDP does not support distributed autograd, which takes over there.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.table: rpc.RRef[Table] | None = None
        self._outputs: list[tuple[Tensor, Tensor]] = []

    def forward(self, *inputs: Any) -> Tensor:
        assert self.table
        # Not rpc_async: if the RRef's type is unknown yet, it calls from another thread, outside the autograd context.
        call = partial(self.table.rpc_sync(timeout=0).forward, self.training, *to(torch.device("cpu"), inputs))
        output: Tensor = calls.attempt(call, rank=SERVER)
        here = output.detach().to(self.device)
        if torch.is_grad_enabled():
            assert output.grad_fn is not None, "distributed autograd has not seen the call"
            self._outputs.append((output, here.requires_grad_()))
        return here

    def backward(self, context: int, scale: float) -> None:
        """Send the gradients of all outputs since the last call back to the table, multiplied by `scale`."""
        roots = [(output * (scale * here.grad.cpu())).sum() for output, here in self._outputs if here.grad is not None]
        self._outputs.clear()
        calls.attempt(lambda: dist_autograd.backward(context, roots), rank=SERVER)

    def forget(self) -> None:
        self._outputs.clear()


class DdpRpc(Served):
    """Rank 0 holds the submodule `remote`; the other ranks train the rest of the model under DDP.

    asynchronous: update the table by each trainer's gradient on arrival, not once by the gradients of all trainers.
    """

    name = "ddp_rpc"
    honours = Served.honours

    def __init__(self, *, remote: str, asynchronous: bool):
        self.remote, self.asynchronous = remote, asynchronous
        self.table: Table | None = None

    @property
    def caveat(self) -> str:
        told = "each trainer's gradient steps the table as it comes: the weights are not reproducible"
        return told if self.asynchronous else ""

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.asynchronous and (config.grad_clip is not None or config.on_nonfinite is NonFinite.skip):
            given = "on_nonfinite=skip" if config.grad_clip is None else f"grad_clip={config.grad_clip:g}"
            raise ConfigError(
                f"{given} needs the global gradient, and with strategy.asynchronous=true no rank has it: "
                "use grad_clip=null and on_nonfinite=stop, or strategy.asynchronous=false"
            )

    @property
    def is_together(self) -> bool:
        return not self.asynchronous

    def build(self, recipe: Recipe, world: World) -> None:
        """Also starts the server. Raises ConfigError: `remote` is no submodule with parameters, or the optimizer has several parameter groups."""
        self.world, self.trainers = world, range(1, world.size)
        self.warmed_up = len(self.trainers) < 3  # see Replicas.needs_warm_up
        whole = build_model(recipe, world.device if world.rank != SERVER else torch.device("cpu"))
        refuse_extra_state(whole, "ddp_rpc")
        self.plain = {name: value.to("meta") for name, value in whole.state_dict().items()}
        trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
        kept = find(whole, self.remote)
        group: Any = dist.new_subgroups_by_enumeration([[SERVER], [*self.trainers]])[0]
        calls.start(world)
        if world.rank == SERVER:
            self.optimizer_step = OptimizerStep(
                recipe,
                world=world,
                layout=Layout({DATA: 1}),
                model=alone(kept, self.remote),
                trainers=group,
                has_loss=False,
            )
            self.table = Table(kept, self.optimizer_step, trainers=self.trainers)
            serve(self.table, self.trainers)
        else:
            self.stand_in = Remote(world.device)
            whole.set_submodule(self.remote, self.stand_in)
            self._replicate(recipe, whole, group)
        self.model = self.optimizer_step.model
        if len(self.optimizer_step.optimizer.param_groups) != 1:
            raise ConfigError("strategy=ddp_rpc takes an optimizer of one parameter group: use one, or strategy=ddp")
        self.optimizer_step.everywhere = [trained]
        world.barrier()
        if not self.table:
            self.stand_in.table = rpc.remote(calls.name(SERVER), served, timeout=0)
        if not self.table and self.asynchronous:
            self.table_optimizer = self._refer()

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        if self.table:
            self.table.begin(step)
            last = self.table.await_all(step)
            return StepResult(torch.zeros(()), last.grad_norm, last.skipped and not self.asynchronous)
        if not self.warmed_up:
            self.warmed_up = True
            self.optimizer_step.warm_up(batches)
            self.stand_in.forget()
        return self._train(step, batches)

    def has_diverged(self) -> bool:
        """Only the server knows about skipped asynchronous updates."""
        left_out = self.table is not None and self.table.left_out > 0
        return self.asynchronous and self.world.broadcast(left_out, source=SERVER)

    def targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        targets, failure = dict[str, Tensor](), None
        try:
            targets = self.optimizer_step.targets(self._mine(saved))
        except ConfigError as error:
            failure = error
        self.world.together(failure)
        return targets

    def load(self, state: dict[str, Any]) -> None:
        failure = None
        try:
            super().load(self._mine(state))
        except ConfigError as error:
            failure = error
        self.world.together(failure)  # no rank may look up rows while the table still loads

    def weights(self) -> dict[str, Tensor | Callable[[], Tensor]]:
        held = self.optimizer_step.weights()
        return {name: partial(self._whole, name, held.get(name)) for name in self.plain}

    def _replicate(self, recipe: Recipe, model: nn.Module, group: Any) -> None:
        device_ids = [self.world.device] if self.world.device.type == "cuda" else None
        ddp = DistributedDataParallel(model, device_ids=device_ids, process_group=group)
        self.optimizer_step = OptimizerStep(
            recipe,
            world=self.world,
            layout=self.layout(self.world.size),
            model=model,
            forward=ddp,
            no_sync=ddp.no_sync,
            trainers=group,
        )

    def _train(self, step: int, batches: list[Batch]) -> StepResult:
        stepping = self.optimizer_step
        self.seed(step)
        stepping.set_training(True)
        stepping.optimizer.zero_grad()
        before = stepping.buffers.copy() if stepping.leaves_out else []
        with dist_autograd.context() as context:
            loss = stepping.backward(step, batches)
            self.stand_in.backward(context, 1 / len(self.trainers))  # DDP averages the dense gradients
            dense = total_norm(p.grad for p in stepping.parameters if p.grad is not None).cpu()
            norm = self._push(step, context, dense)
        stepping.buffers.forget()
        skipped = stepping.update(step, norm)
        if skipped:
            stepping.buffers.put_back(before)
        return StepResult(loss, norm, skipped)

    def _push(self, step: int, context: int, dense: Tensor) -> Tensor:
        """Make the server update the table; return the gradient norm for the dense part's update, []."""
        if not self.asynchronous:
            answer: Answer = self._ask("push_context", step, context, dense)
            return answer.grad_norm
        self._ask("expect", step, dense)
        calls.attempt(lambda: self.table_optimizer.step(context), rank=SERVER)
        return dense

    def _ask(self, method: str, *args: Any) -> Any:
        assert self.stand_in.table
        call = getattr(self.stand_in.table.rpc_async(timeout=0), method)
        return calls.answer(call(self.world.rank, *args), rank=SERVER)

    def _refer(self) -> Any:
        from torch.distributed.optim import DistributedOptimizer  # imports torch._dynamo

        logging.getLogger("torch.distributed.optim.optimizer").setLevel(
            logging.ERROR
        )  # it would warn about SharedOptimizer
        assert self.stand_in.table
        references = calls.answer(self.stand_in.table.rpc_async(timeout=0).references(), rank=SERVER)
        return DistributedOptimizer(SharedOptimizer, references, trainer=self.world.rank)  # type: ignore[no-untyped-call]

    def _mine(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of `named` without those that belong to other ranks."""
        others = self.plain.keys() - self.model.state_dict().keys()
        return {name: value for name, value in named.items() if owner(name) not in others}

    def _whole(self, name: str, held: Any) -> Tensor:
        """Return a tensor of the plain model, valid on rank 0. Collective."""
        like = self.plain[name]
        value: Tensor = torch.empty(like.shape, dtype=like.dtype) if held is None else held.cpu().contiguous()
        if not name.startswith(f"{self.remote}."):
            dist.broadcast(value.flatten().view(torch.uint8), SERVER + 1)
        return value


def find(model: nn.Module, name: str) -> nn.Module:
    """Return the submodule that `strategy.remote` names. Raises ConfigError if it is unknown or has no parameters."""
    names: dict[str, nn.Module] = dict(model.named_modules())
    names.pop("")
    module: nn.Module | None = names.get(name)
    if module is None:
        raise ConfigError(f"strategy.remote={name} names no submodule of the model; {nearest(name, names)}")
    if not list(module.parameters()):
        raise ConfigError(f"strategy.remote={name} has no parameters to keep on the server: name a submodule that has")
    return module


def alone(module: nn.Module, name: str) -> nn.Module:
    """Wrap the module in a model that contains only this module, under the same name."""
    for part in reversed(name.split(".")):
        holder = nn.Module()
        holder.add_module(part, module)
        module = holder
    return module


def owner(name: str) -> str:
    """Return the name of the model's state dict entry that a flat name belongs to."""
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest
