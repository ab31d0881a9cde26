"""The evaluation of a model on a test split, every sample exactly once at any world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from muster.attempt.evaluation import sums_over
from muster.checkpoint.schemas import direction_before
from muster.code_location import defined
from muster.data.loader import Batch
from muster.errors import ConfigError
from muster.loggers.metrics import check_names
from muster.sample_plan import Plan
from muster.train.config.keys import Config
from muster.train.config.parts import locate
from muster.train.data.batches import micro_batches
from muster.train.data.load import Data
from muster.train.objectives.measure import Measures, means_of_slices
from muster.train.strategies.base import Strategy
from muster.world.counts import SEEN
from muster.world.group import World

EVAL_BATCH = 256


def measure(
    config: Config,
    test: Any,
    strategy: Strategy,
    world: World,
    measures: Measures,
    *,
    begin: Callable[[], bool],
    most: int | None = None,
    trained_in: int = 1,
) -> dict[str, float] | None:
    """Return the means over the samples of `test`; None if the ranks stopped before the end. Collective.

    `measures` are reset. `begin` is called before each batch and before the results are added up; False means to stop there.
    `most`: the number of batches, which are then as large as those of training; None: all. `trained_in`: the ranks or slices over
    which training divided its batches, if they were more than here.
    """
    slices = config.virtual_world_size
    size = samples_of(config, test)
    ranks = strategy.data_shard[1] if strategy.data_shard else 1
    parts = slices or ranks
    batch_size = (
        config.batch_size if most else parts * samples_at_once(config, world.device, parts=max(parts, trained_in))
    )
    plan = Plan(size, batch_size=min(size, batch_size), shuffle=False)
    steps = range(min(plan.steps_per_epoch, most or plan.steps_per_epoch))
    batches = micro_batches(config, test, plan, steps, shard=strategy.data_shard, device=world.device, train=False)

    def sums_of(batch: Batch) -> dict[str, Any]:
        part = f"{batch.slice:08d}" if slices else ""  # sums are added in the order of slices, not of ranks
        sums = {f"{part}/{name}": value.double() for name, value in strategy.evaluate(batch).items()}
        return {SEEN: batch.count * strategy.speaks, **sums}

    sums = sums_over(batches, sums_of, world=world, seed=config.seed, begin=begin)
    if sums is None:
        return None
    values = means_of_slices(sums) | measures.compute(world)
    check_names(values, "a metric")
    return values


def samples_of(config: Config, test: Any) -> int:
    """Return the number of samples of `test` that an evaluation takes: the first `eval.max_samples`."""
    return min(len(test), config.eval.max_samples or len(test))


def samples_at_once(config: Config, device: torch.device, *, parts: int) -> int:
    """Return the most samples of an evaluation's batch on a rank or for a slice; training divides its batches into `parts`.

    On a GPU it is no more than in training, whose batches are known to fit: 256 samples of 1,024 tokens, for example, give
    logits of 50 GB. `micro_batch_size` limits it further.
    """
    in_training = -(-config.batch_size // parts)
    return min(EVAL_BATCH, in_training) if device.type == "cuda" else EVAL_BATCH


def refuse_unevaluated(config: Config, data: Data) -> None:
    """Raise ConfigError if `checkpoint.best` or a callback needs evaluations and the run makes none."""
    needs = [f"checkpoint.best={config.checkpoint.best}"] if config.checkpoint.best else []
    needs += [part.key for part in config.callbacks.values() if getattr(locate(part), "needs_evaluations", False)]
    if needs and (why := never_evaluated(config, data)):
        raise ConfigError(f"{needs[0]} needs evaluations, but the run makes none: {why}; or leave {needs[0]} out")


def best_mode(config: Config, measures: Measures, best: dict[str, Any] | None = None) -> str:
    """Return `min` or `max`: which value of `checkpoint.best` is the best; empty without it. Raises ConfigError.

    `best`: the best evaluation so far, of this attempt or of a checkpoint.
    """
    metric, given = config.checkpoint.best, config.checkpoint.best_mode.name
    key, mode_key = "checkpoint.best", "checkpoint.best_mode"
    if not metric:
        return ""
    recorded = (best.get("mode") or direction_before(metric)) if best and best["metric"] == metric else ""
    return measures.direction(metric, key=key, mode_key=mode_key, mode=given, recorded=recorded)


def never_evaluated(config: Config, data: Data) -> str | None:
    """Return why the run makes no evaluation, and how to enable it; None if it evaluates."""
    if config.eval.every_steps == "off":
        return "eval.every_steps=off disables them: leave it out"
    if data.test is None:
        return (
            f"data._target_={config.data.target} has no parameter train{defined(data.train)}: add one to its "
            "constructor, True for the training split and False for the test split"
        )
    return None
