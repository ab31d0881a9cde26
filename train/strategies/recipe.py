"""The recipe of a run: how its model, objective and optimizer are built, for the strategy to do in its own order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from muster.sample_plan import Plan
from muster.train.config.keys import Config, FrozenMode
from muster.train.config.parts import build
from muster.train.data.load import Data
from muster.train.models.model_json import filled_in
from muster.train.models.prepare import prepared
from muster.train.objectives.build import build_objective
from muster.train.objectives.measure import Measures
from muster.train.optim.build import Named, build_optimizer, grouped_options
from muster.train.optim.schedule import adapt, build_schedule
from muster.train.strategies.base import Recipe
from muster.train.strategies.replicas.broadcast import begin_alike
from muster.world.group import World


def recipe(
    config: Config,
    data: Data,
    plan: Plan,
    total_steps: int,
    world: World,
    *,
    measures: Measures | None = None,
    weights: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return the recipe of the model, the objective and the optimizer. Collective.

    weights: the model's first weights, of which names that match `init_ignore` are left out.
    """
    schedule = build_schedule(
        config.scheduler,
        lr=config.optimizer.values.get("lr"),
        total_steps=total_steps,
        steps_per_epoch=plan.steps_per_epoch,
    )
    objective = build_objective(config.objective, device=world.device)
    if isinstance(objective, nn.Module):
        begin_alike(objective)
    elif config.compile and hasattr(objective, "compile_loss"):
        objective.compile_loss()

    def new_optimizer(named: Iterable[Named], **options: Any) -> torch.optim.Optimizer:
        based = partial(adapt, schedule, total_steps=total_steps)
        return build_optimizer(config.optimizer, named, precision=config.precision, adapt=based, **options)

    in_evaluation = list[str]()
    return Recipe(
        build_model=partial(
            prepared,
            partial(build, config.model, **filled_in(config.model, data)),
            weights=weights,
            ignore=config.init_ignore,
            freeze=config.freeze,
            in_evaluation=in_evaluation if config.frozen_mode is FrozenMode.eval else None,
        ),
        in_evaluation=in_evaluation,
        build_optimizer=new_optimizer,
        objective=objective,
        schedule=schedule,
        precision=config.precision,
        grad_clip=config.grad_clip,
        compile=config.compile,
        channels_last=config.channels_last,
        on_nonfinite=config.on_nonfinite,
        seed=config.seed,
        slices=config.virtual_world_size,
        measures=measures or Measures({}),
        train_metrics=config.log.train_metrics,
        collates=config.loader.collate_fn is not None,
        optimizer_options=frozenset(grouped_options(config.optimizer)),
    )
