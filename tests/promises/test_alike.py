"""Ranks of one model: they begin with the same weights, and what only some of them use in a step is not lost or mixed up."""

import pytest
import torch
from kit.job import run
from kit.ranks import on_ranks
from torch.distributed.tensor import DTensor

from muster.errors import ConfigError

COMMON = ("optimizer=adamw", "optimizer.lr=0.01", "batch_size=4", "device=cpu", "dist.timeout_s=20")
PLAN = "strategy.plan={stem: colwise, mid: rowwise}"
TENSOR = ("strategy=tensor_parallel", PLAN)
STAGES = ("strategy=pipeline",)
CHANCY, CHANCY_STAGES = "model._target_=kit.parts.models.Chancy", "model._target_=kit.parts.models.ChancyStages"
ROUTED, ROUTED_STAGES = "model._target_=kit.parts.models.Routed", "model._target_=kit.parts.models.RoutedStages"
DRAWN = "objective._target_=kit.parts.objectives.Drawn"
DEPTH = "model._target_=kit.parts.models.Depth"
SCALES = (ROUTED, "+model.layout=parameters")


def begun(here, *overrides):
    """How far the model and the objective of a strategy are from those of rank 0, in any rank's view or in model.pt."""
    from kit.parts.models import Chancy
    from kit.parts.objectives import Drawn
    from kit.stepping import Trained

    strategy = Trained(here, *overrides).strategy
    drawn = {name: torch.tensor(value) for name, value in here.broadcast(Chancy.drawn).items()}
    far = 0.0
    model = strategy.optimizer_step.model
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        far = max(far, float((whole.detach() - drawn[name]).abs().max()))
    for name, value in strategy.weights().items():
        whole = value() if callable(value) else value
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if here.is_first:
            far = max(far, float((whole - drawn[name]).abs().max()))
    objective, drawn = strategy.optimizer_step.recipe.objective, here.broadcast(Drawn.drawn)
    for name, value in objective.state_dict().items():
        far = max(far, float((value - torch.tensor(drawn[name])).abs().max()))
    strategy.close()
    return far


def begin(cases):
    from kit.stepping import world

    here = world()
    far = {name: begun(here, *COMMON, DRAWN, *overrides) for name, overrides in cases.items()}
    here.barrier()
    return far


TWO = {
    "ddp": (CHANCY,),
    "slices": (CHANCY, "virtual_world_size=2"),
    "zero": (CHANCY, "strategy=zero"),
    "fsdp": (CHANCY, "strategy=fsdp"),
    "hybrid, replicas": (CHANCY, "strategy=hybrid", "strategy.shard=1"),
    "hybrid, one group": (CHANCY, "strategy=hybrid", "strategy.shard=2"),
    "local_sgd": (CHANCY, "strategy=local_sgd"),
    "model_parallel": (CHANCY, "strategy=model_parallel", "strategy.split=[head]"),
    "tensor": (CHANCY, *TENSOR),
    "tensor, replicas": (CHANCY, *TENSOR, "strategy.tensor=1"),
    "pipeline": (CHANCY_STAGES, *STAGES),
}
THREE = {"parameter_server": (CHANCY, "strategy=parameter_server")}


@pytest.mark.nightly(but=["collectives"])
@pytest.mark.parametrize("ranks, cases", [(2, TWO), (3, THREE)], ids=["collectives", "server"])
def test_all_ranks_begin_with_the_weights_and_the_objective_of_rank_0_whatever_they_are_drawn_from(ranks, cases):
    assert on_ranks(begin, ranks, cases) == [dict.fromkeys(cases, 0.0)] * ranks


def train(cases, steps=5):
    """The weights that each case ends with, or in a line why it does not."""
    from kit.stepping import Trained, world

    here, ends = world(), {}
    for name, overrides in cases.items():
        trained = Trained(here, *COMMON, *overrides)
        trained.steps(range(steps))
        whole = {key: value() if callable(value) else value for key, value in trained.strategy.weights().items()}
        whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in whole.items()}
        ends[name] = {key: value.tolist() for key, value in whole.items()}
    here.barrier()
    return ends


ALONE = {
    "modules": (ROUTED, "strategy=single"),
    "scales": (*SCALES, "strategy=single"),
    "stages": (ROUTED_STAGES, "strategy=single"),
    "depth": (DEPTH, "+model.alone=false", "strategy=single"),
}
IN_ONE = "strategy.units=[Experts]"
FOUR = {
    "modules": (ROUTED, *TENSOR),
    "stages": (ROUTED_STAGES, *STAGES),
    "scales, tensor, sharded": (*SCALES, *TENSOR, "strategy.shard=true"),
    "modules, hybrid": (ROUTED, "strategy=hybrid", "strategy.shard=2", IN_ONE),
}
PAIR = {
    "modules": (ROUTED, "strategy=zero", "strategy.find_unused_parameters=true"),
    "scales": (*SCALES, *TENSOR, "strategy.tensor=1"),
    "modules, fsdp": (ROUTED, "strategy=fsdp", IN_ONE),
    "modules, fsdp, micro-batches": (ROUTED, "strategy=fsdp", IN_ONE, "micro_batch_size=1"),
    "modules, replicas": (ROUTED, "strategy=hybrid", "strategy.shard=1", IN_ONE),
    "scales, fsdp": (*SCALES, "strategy=fsdp"),
    "depth, fsdp": (DEPTH, "+model.alone=false", "strategy=fsdp"),
}


@pytest.fixture(scope="module")
def alone():
    return on_ranks(train, 1, ALONE)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks, cases", [(2, PAIR), (4, FOUR)], ids=["two", "four"])
def test_ranks_that_use_different_parameters_train_as_one_process_does(alone, ranks, cases):
    """One that no rank uses in a step is left alone, as there: AdamW would move it by a gradient of zeros."""
    ends = on_ranks(train, ranks, cases)[0]
    for name, weights in ends.items():
        for key, weight in alone[name.partition(",")[0]].items():
            torch.testing.assert_close(
                torch.tensor(weights[key]), torch.tensor(weight), rtol=0, atol=1e-5, msg=f"{name} {key}"
            )


def refusals(cases):
    """In a new world for each case, how its first steps end."""
    from kit.stepping import Trained, world

    here, ends = world(), {}
    for name, overrides in cases.items():
        try:
            Trained(here, *COMMON, *overrides).steps(range(5))
        except ConfigError as error:
            ends[name] = str(error)
        here.barrier()
    return ends


REFUSED = {
    "modules, fsdp": (ROUTED, "strategy=fsdp"),
    "modules, replicas": (ROUTED, "strategy=hybrid", "strategy.shard=1"),
    "modules, tensor, sharded": (ROUTED, *TENSOR, "strategy.tensor=1", "strategy.shard=true"),
    "depth, fsdp": (DEPTH, "strategy=fsdp"),
}


@pytest.mark.nightly
def test_units_that_only_some_ranks_call_are_refused_on_all_of_them_in_the_same_line():
    ends = on_ranks(refusals, 2, REFUSED)
    assert ends[0] == ends[1] and ends[0].keys() == REFUSED.keys()
    assert all(" has reached " in line and "\n" not in line for line in ends[0].values())


def test_a_run_whose_ranks_call_different_units_ends_with_2_and_one_line(tmp_path):
    over = (*COMMON, DEPTH, "strategy=fsdp", "max_steps=9", "max_idle_attempts=1")
    ended = run(tmp_path / "run", *over, ranks=2, ok=False)
    assert "of blocks.1" in ended.said[-1] and len(ended.said) == 1, ended.out
    assert ended.out.count("exitcode  : 2 ") == 2, ended.out  # what torchrun tells of both ranks
    assert ended.outcome["exit_code"] == 2, ended.outcome


@pytest.mark.nightly
def test_a_parameter_that_is_frozen_while_training_is_named(tmp_path):
    freeze = ("+callbacks.f._target_=kit.parts.callbacks.FreezeAt", "+callbacks.f.at=2", "+callbacks.f.prefix='1.'")
    line = ("model.hidden=[16]", "batch_size=32", "max_steps=4", "eval.every_steps=off", *freeze)
    result = run(tmp_path / "run", *line, ranks=2, ok=False)
    assert result.outcome["outcome"] == "config_error" and "1.weight got no gradient" in result.said[0], result.out
    run(tmp_path / "unused", *line, "strategy.find_unused_parameters=true", ranks=2)
