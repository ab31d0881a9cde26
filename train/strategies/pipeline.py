"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through the ranks in turn.

Sources: Huang et al., "GPipe", 2018; Narayanan et al., "PipeDream", SOSP 2019 (1F1B), and "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", 2021 (interleaved).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils import _pytree as pytree

from muster.checkpoint.trained import SavedTensor
from muster.data.generators import kept_generators
from muster.data.loader import Batch, ratio
from muster.errors import ConfigError
from muster.train.config.constraints import FREE, Ge
from muster.train.config.keys import Config
from muster.train.objectives.counted import counted, weighed
from muster.train.objectives.loss import loss_of
from muster.train.objectives.measure import sums
from muster.train.strategies.base import Recipe
from muster.train.strategies.partition.stages import Stages, move, subset
from muster.train.strategies.replicas.broadcast import begin_alike
from muster.train.strategies.state import refuse_extra_state
from muster.train.strategies.step.gradient import average, complete, total_norm
from muster.train.strategies.step.optimizer_step import OptimizerStep, Stepping
from muster.train.strategies.supported_keys import refuse
from muster.world.group import World
from muster.world.layout import DATA, Layout

STAGES = "stages"
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
MICRO_BATCHES_PER_STAGE = 4  # ranks then idle for about a fifth of a step, as advised in GPipe


class Pipeline(Stepping):
    """The layers are divided in order over `stages` ranks, the samples over the remaining dimension.

    Args:
        stages_per_rank: 2 or more for the interleaved schedule, 1 for the others; None: 2 or 1 accordingly.
        num_micro_batches: wanted per step, see `Flow.of`; None: 4 * `stages`. `micro_batch_size` may require more.
        split: names of the layers at which the second and later stages begin; None: cut evenly by parameter count.
    """

    honours = frozenset({*Stepping.honours} - {"log.train_metrics"})

    def __init__(
        self,
        *,
        stages: Annotated[int, Ge(2), FREE],
        schedule: Annotated[Literal["gpipe", "1f1b", "interleaved"], FREE],
        stages_per_rank: Annotated[int | None, Ge(1), FREE],
        num_micro_batches: Annotated[int | None, Ge(1), FREE],
        split: Annotated[list[str] | None, FREE],
    ):
        self.stages, self.schedule, self.split = stages, schedule, [str(name) for name in split] if split else None
        self.stages_per_rank = stages_per_rank or (2 if schedule == "interleaved" else 1)
        self.num_micro_batches = num_micro_batches or MICRO_BATCHES_PER_STAGE * stages

    @property
    def number(self) -> int:
        """Total number of stages."""
        return self.stages * self.stages_per_rank

    def layout(self, world_size: int) -> Layout:
        return Layout.of(world_size, data=-1, stages=self.stages)

    def check(self, config: Config, world_size: int) -> None:
        if world_size == 1:
            raise ConfigError("strategy=pipeline takes two processes or more, and there is one: use strategy=single")
        super().check(config, world_size)
        if (self.schedule == "interleaved") != (self.stages_per_rank > 1):
            valid = "use 2 or more" if self.schedule == "interleaved" else "use 1, or strategy.schedule=interleaved"
            raise ConfigError(
                f"strategy.stages_per_rank={self.stages_per_rank} cannot be combined with strategy.schedule={self.schedule}: {valid}"
            )
        if self.split and len(self.split) != self.number - 1:
            raise ConfigError(
                f"strategy.split={self.split} makes {len(self.split) + 1} stages of the model, and there are {self.number}: name {self.number - 1} layers"
            )
        refuse(config, "pipeline")

    def build(self, recipe: Recipe, world: World) -> None:
        """Build the model on the host, cut it, and move this rank's stages to its device. Raises ConfigError: it cannot be cut as configured."""
        self.world, layout = world, self.layout(world.size)
        mesh = layout.mesh(world.device.type)
        model = recipe.build_model()  # on the host: no device ever holds the full model
        refuse_extra_state(model, "pipeline")
        begin_alike(model)
        stages = Stages(model, number=self.number, split=self.split)
        self.part = OwnStages(
            model, stages, line=mesh[STAGES].get_group(), data=mesh[DATA].get_group(), device=world.device
        )
        self.optimizer_step = PipelineStep(
            recipe,
            world=world,
            layout=layout,
            part=self.part,
            schedule=self.schedule,
            num_micro_batches=self.num_micro_batches,
        )

    def divides(self, world_size: int) -> int:
        """At least two micro-batches pass through the stages."""
        return super().divides(world_size) * max(2, self.num_micro_batches)

    def weights(self) -> dict[str, Tensor | Callable[[], Tensor]]:
        own = self.optimizer_step.weights()
        return {name: partial(self._fetch, name, own.get(name)) for name in self.part.whole}

    def _fetch(self, name: str, value: Tensor | None) -> Tensor:
        """Send a tensor from the first rank that holds it to rank 0; returns the tensor there. Collective."""
        facts, source, rank = self.part.whole[name], self.part.first_with[name], self.world.rank
        if rank == source and value is not None:
            if rank:
                dist.send(value.detach().cpu().contiguous().flatten().view(torch.uint8), 0)
            return value
        whole = torch.empty(facts.size, dtype=facts.dtype) if rank == 0 else torch.empty(0)
        if rank == 0:
            dist.recv(whole.flatten().view(torch.uint8), source)
        return whole


class PipelineStep(OptimizerStep):
    """An optimizer step with micro-batches that pass through the stages; gradients are averaged once, at the end.

    schedule: key of SCHEDULES. num_micro_batches: wanted per step, see `Flow.of`.
    Raises ConfigError: the number of the optimizer's parameter groups differs between stages.
    """

    def __init__(
        self, recipe: Recipe, *, world: World, layout: Layout, part: OwnStages, schedule: str, num_micro_batches: int
    ):
        super().__init__(
            recipe,
            world=world,
            layout=layout,
            model=part.module,
            trainers=part.data,
            has_loss=part.has_last,
            elsewhere=part.elsewhere,
        )
        self._part, self._schedule, self._num_micro_batches = part, schedule, num_micro_batches
        self._schedules: dict[Any, Any] = {}
        named = {parameter: name for name, parameter in part.module.named_parameters()}
        mine = [[named[p] for p in group["params"]] for group in self.optimizer.param_groups]
        everyones = world.gather(mine)
        if len({len(groups) for groups in everyones}) > 1:
            raise ConfigError(
                "the optimizer has more groups of parameters for some stages than for others: strategy=pipeline takes as many for each"
            )
        theirs = [set().union(*names) for names in zip(*everyones, strict=True)]
        self.everywhere = [[name for name in part.whole if name in names] for names in theirs]

    def backward(self, step: int, batches: list[Batch]) -> Tensor:
        """Return this rank's share of the loss, [], 0 except on the last stage."""
        self._flow = Flow.of(batches, number=self._num_micro_batches, stages=self._part.line.size())
        losses: list[Tensor] = []
        self._run(
            self._flow, loss=self._loss, losses=losses, target=torch.arange(self._flow.number), return_outputs=False
        )
        used = complete(self._part.trained, self.world, names=self._part.names)
        if self._part.data.size() > 1:
            average((p.grad for p in self.parameters if p.grad is not None), group=self._part.data)
        self._part.add_tied(used)
        if not self._part.has_last:
            return torch.zeros((), device=self.world.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / self._shards

    def norm(self) -> Tensor:
        """Shared parameters count once."""
        own = total_norm(p.grad for p in self._part.counted if p.grad is not None).to(self.world.device)
        squared = own.double().square()
        dist.all_reduce(squared, group=self._part.line)
        return squared.sqrt().to(own.dtype)

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        self.set_training(False)
        flow = Flow.of([batch], number=self._part.line.size(), stages=self._part.line.size())
        with self.buffers.in_use(), torch.no_grad():
            outputs = self._run(flow)
        if not self._part.has_last:
            return {}
        outputs = pytree.tree_map(lambda t: t[: flow.samples], outputs)
        objective = self.recipe.objective
        measured = sums(objective, outputs, flow.targets, flow.samples, model=self.model, counts=self.count)
        if batch.count:
            self.recipe.measures.update(outputs, flow.targets, slice=batch.slice)
        return {name: value * bool(batch.count) for name, value in measured.items()}

    def state(self) -> dict[str, Any]:
        """Raises ConfigError also if optimizer state is not a tensor."""
        state = super().state()
        for name, value in state.items():
            if name.startswith("optimizer/") and name != "optimizer/groups" and not isinstance(value, Tensor):
                raise ConfigError(
                    f"the optimizer keeps {name.rpartition('/')[2]} as {type(value).__name__}: strategy=pipeline saves tensors only"
                )
        return state

    def _run(self, flow: Flow, *, loss: Callable[[Any, Tensor], Tensor] | None = None, **options: Any) -> Any:
        """Run the micro-batches through the stages; returns the outputs on the last stage. Collective."""
        key = loss is not None, flow.number, flow.inputs.shape, flow.inputs.dtype
        if key not in self._schedules:
            self._schedules[key] = self._new_schedule(flow.number, loss)
        given = (flow.inputs,) if self._part.has_first else ()
        return self._schedules[key].step(*given, **options)

    def _new_schedule(self, number: int, loss: Callable[[Any, Tensor], Tensor] | None) -> Any:
        part, kind = self._part, SCHEDULES[self._schedule]
        stages = [
            PipelineStage(Autocast(module, self._autocast), index, part.number, self.world.device, group=part.line)
            for index, module in part.stages.items()
        ]
        what: Any = stages if kind is ScheduleInterleaved1F1B else stages[0]
        return kind(what, n_microbatches=number, loss_fn=loss, scale_grads=False)

    def _loss(self, outputs: Any, index: Tensor) -> Tensor:
        """Return a micro-batch's share of the mean loss, scaled for the later mean over replicas."""
        flow = self._flow
        first, count = int(index) * flow.size, flow.count(int(index))
        some = max(count, 1)
        targets = pytree.tree_map(lambda t: t[min(first, flow.samples - 1) :][:some], flow.targets)
        with self._autocast():
            outputs = pytree.tree_map(lambda t: t[:some], outputs)
            loss = loss_of(self.recipe.objective, outputs, targets, model=self.model)
        weight: Any = count / flow.total
        if flow.whole is not None:
            objective = self.recipe.objective
            waits = self.world.device.type == "cpu"
            of = counted(self.count, None, targets, count, objective=objective, waits=waits) if count else 0.0
            weight = ratio(of, flow.whole())
        return weighed(loss, weight * self._shards, outputs)


class OwnStages:
    """This rank's stages of `model`, the only part of it that is moved to `device`.

    line: process group of the ranks of one pipeline. data: that of the ranks that hold the same stages.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        *,
        line: dist.ProcessGroup,
        data: dist.ProcessGroup,
        device: torch.device,
    ):
        self.line, self.data, self.device, self.number = line, data, device, stages.number
        state = model.state_dict(keep_vars=True)
        self.whole = {name: SavedTensor(value.shape, value.dtype) for name, value in state.items()}
        held = [_names(state, stages, at, line.size()) for at in range(line.size())]
        self.first_with = {name: next(at for at, names in enumerate(held) if name in names) for name in self.whole}
        here, at = held[line.rank()], line.rank()
        first_name = {parameter: name for name, parameter in model.named_parameters()}
        holders = {
            p: [n for n, names in enumerate(held) if any(state[name] is p for name in names)] for p in first_name
        }
        aliases = [name for p, name in first_name.items() if at in holders[p] and name not in here]
        targets = [
            *aliases,
            *(target for stage in range(at, self.number, line.size()) for target in stages.targets(stage)),
        ]
        move(model, targets, device)
        self.stages = {stage: stages.stage(stage) for stage in range(at, self.number, line.size())}
        self.module = subset(model, targets)
        self.elsewhere = {
            name: facts.size for name, facts in self.whole.items() if name not in self.module.state_dict()
        }
        self.counted = [p for p, ranks in holders.items() if ranks[0] == at]
        trained = {name: p for p, name in first_name.items() if p.requires_grad}
        self.names = list(trained)
        self.trained = {name: p for name, p in trained.items() if at in holders[p]}
        self._tied = {
            name: p if at in holders[p] else torch.empty_like(p, device="meta")
            for name, p in trained.items()
            if len(holders[p]) > 1
        }

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return self.number - 1 in self.stages

    def add_tied(self, used: set[str]) -> None:
        """All-reduce the gradients of parameters that several ranks of the pipeline hold, if on any rank they are `used`. Collective."""
        for name, parameter in self._tied.items():
            if name not in used:
                continue
            gradient = parameter.grad if name in self.trained else None
            if gradient is None:
                gradient = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.device)
            dist.all_reduce(gradient, group=self.line)
            if name in self.trained:
                parameter.grad = gradient


@dataclass(frozen=True)
class Flow:
    """A step's samples as micro-batches of equal size; the last ones may be padded, in part or fully.

    inputs: [number * size, ...]. targets: a pytree of [samples, ...].
    number: number of micro-batches. size: samples per micro-batch.
    samples: number of samples without padding.
    counted: number of them that count: all, or 0 on a rank without samples, which gets one sample as a placeholder.
    total: number of the step's samples on all replicas. whole: returns what the objective counts in them, if it is not samples.
    """

    inputs: Tensor
    targets: Any
    number: int
    size: int
    samples: int
    counted: int
    total: int
    whole: Callable[[], Any] | None = None

    @classmethod
    def of(cls, batches: list[Batch], *, number: int, stages: int) -> Flow:
        """Divide the samples of `batches` into micro-batches.

        About `number` of them, or as many as `batches` if these are more: fewer if the size, which is rounded up, needs fewer. Their number is a
        multiple of `stages`, and none is larger than a batch. Raises ConfigError: the input of a sample is not a single tensor.
        """
        full = [batch for batch in batches if batch.count] or batches[:1]
        if not all(isinstance(batch.inputs, Tensor) for batch in full):
            raise ConfigError(
                f"strategy=pipeline takes samples whose input is one tensor, and these are {type(full[0].inputs).__name__}"
            )
        inputs = torch.cat([batch.inputs for batch in full])
        targets = pytree.tree_map(
            lambda *parts: torch.cat(parts), full[0].targets, *(batch.targets for batch in full[1:])
        )
        samples = len(inputs)
        wanted = stages * -(-min(max(number, len(batches)), samples) // stages)
        size = -(-samples // wanted)
        used = stages * -(-samples // (size * stages))
        filled = (
            torch.arange(used * size, device=inputs.device) % samples
        )  # not one sample repeated: batch norm sees the padding
        mine = sum(batch.count for batch in full)
        return cls(inputs[filled], targets, used, size, samples, mine, full[0].total, full[0].of)

    def count(self, index: int) -> int:
        """Number of samples of micro-batch `index` that count."""
        return min(max(self.counted - index * self.size, 0), self.size)


class Autocast(nn.Module):
    """Runs a stage's forward under the run's autocast; its backward runs outside, as autocast requires.

    torch 2.11 runs a stage once more in the first step of each process, for the shapes of its outputs: without gradients,
    but as in training. That leaves generators and buffers as they were, or the step would differ after a resume.
    """

    def __init__(self, stage: nn.Module, autocast: Callable[[], contextlib.AbstractContextManager[Any]]):
        super().__init__()
        self.stage, self.autocast = stage, autocast

    def forward(self, *inputs: Any) -> Any:
        is_for_shapes = self.stage.training and not torch.is_grad_enabled()
        with self.autocast(), self._untouched() if is_for_shapes else contextlib.nullcontext():
            return self.stage(*inputs)

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        before = [(buffer, buffer.detach().clone()) for buffer in self.stage.buffers()]
        with kept_generators(on_device=True):
            yield
        for buffer, value in before:
            buffer.copy_(value)


def _names(state: Mapping[str, Any], stages: Stages, rank: int, ranks: int) -> set[str]:
    """The names of the state dict entries that a rank of the pipeline holds."""
    return {name for stage in range(rank, stages.number, ranks) for name in stages.names(stage)}
