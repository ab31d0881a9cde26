"""Optimizers, schedules and averages: their own rates and state, fused steps where they fit, and what a resume begins from."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kit.job import run
from torch import nn

from muster.train.config.compose import compose
from muster.train.config.differences import differences, to_dict
from muster.train.strategies.step.optimizer_step import OptimizerStep

MODELS, OWN = "model._target_=kit.parts.models.", "optimizer._target_=kit.parts.optimizers."
ONE_CYCLE = ("scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "+scheduler.max_lr=0.01")
SHORT = ("max_steps=8", "eval.every_steps=off")


def cut(folder, *line, ranks=None):
    """The same run once whole, and once resumed after five of eight steps."""
    whole = run(folder / "whole", *line, *SHORT, ranks=ranks)
    run(folder / "cut", *line, *SHORT, "max_steps=5", ranks=ranks)
    resumed = run(folder / "cut", *line, *SHORT, ranks=ranks)
    assert resumed.events("resume")[-1]["step"] == 5
    return whole, resumed


def expected_rates(adam_lr, steps):
    """What OneCycleLR does to the rate of an optimizer, stepped by hand."""
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=adam_lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(rates) < steps else None
    return rates


@pytest.mark.parametrize("optimizer", [("optimizer._target_=torch.optim.Adam",), (f"{OWN}own_rate",)])
def test_a_schedule_of_torchs_starts_from_the_optimizers_own_rate(tmp_path, optimizer):
    result = run(tmp_path / "run", *optimizer, *ONE_CYCLE, *SHORT)
    assert [line["lr"] for line in result.lines("train")] == pytest.approx(expected_rates(1e-3, 8))


TORCHS = "scheduler._target_=torch.optim.lr_scheduler."
GROUPS = "optimizer.groups=[{match:'*.bias',weight_decay:0.0},{match:'1',lr:0.01}]"
COSINE_FLOOR = (f"{TORCHS}CosineAnnealingLR", "+scheduler.T_max=6", "+scheduler.eta_min=0.0005")
SEEN = ("+callbacks.groups._target_=kit.parts.callbacks.Groups",)


def expected_groups(optimizer, scheduler, steps, **values):
    """What a scheduler of torch's gives three such groups, stepped by hand."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], **more} for more in ({}, {"lr": 0.01}, {})]
    made = getattr(torch.optim, optimizer)(groups, lr=0.003)
    schedule, found = getattr(torch.optim.lr_scheduler, scheduler)(made, **values), []
    for _ in range(steps):
        found.append(
            [[each["lr"], list(each["betas"]) if "betas" in each else each["momentum"]] for each in made.param_groups]
        )
        made.step()
        schedule.step()
    return found


def seen_groups(folder, rank=0):
    return json.loads((folder / f"groups-{rank}.json").read_text())


@pytest.mark.nightly(but=["one process"])
@pytest.mark.parametrize(
    "more, ranks",
    [((), None), (("strategy=zero",), 2), (("strategy=fsdp",), 2), (("strategy=pipeline",), 2)],
    ids=["one process", "zero", "fsdp", "pipeline"],
)
def test_a_schedule_of_torchs_gives_every_group_what_torch_gives_it(tmp_path, more, ranks):
    line = ("optimizer=adamw", "optimizer.lr=0.003", GROUPS, "model.hidden=[16]", *SEEN, *more)
    cycle = (f"{TORCHS}OneCycleLR", "+scheduler.max_lr=0.01", "+scheduler.total_steps=9")
    run(tmp_path / "run", *line, *cycle, *SHORT, ranks=ranks)
    expected = expected_groups("AdamW", "OneCycleLR", 8, max_lr=0.01, total_steps=9)
    assert expected[0][0][1] == [0.95, 0.999] != expected[3][0][1]
    for rank in range(ranks or 1):
        assert [*seen_groups(tmp_path / "run", rank).values()] == expected


@pytest.mark.nightly
def test_a_floor_of_torchs_schedule_is_that_of_every_group_and_a_resume_is_exact(tmp_path):
    line = ("optimizer=adamw", "optimizer.lr=0.003", GROUPS, *COSINE_FLOOR, *SEEN)
    whole, resumed = cut(tmp_path, *line)
    expected = expected_groups("AdamW", "CosineAnnealingLR", 8, T_max=6, eta_min=0.0005)
    assert [*seen_groups(tmp_path / "whole").values()] == expected
    assert seen_groups(tmp_path / "cut") == {str(step): expected[step - 1] for step in (6, 7, 8)}
    assert resumed.sha256 == whole.sha256


@pytest.mark.nightly
def test_a_momentum_that_torchs_schedule_cycles_is_cycled_and_resumed(tmp_path):
    """Also where the optimizer was built with none, and has a dampening that fused steps do not take."""
    line = ("optimizer.momentum=0", "+optimizer.dampening=0.1", "optimizer.lr=0.003", GROUPS, *ONE_CYCLE[:1], *SEEN)
    whole, resumed = cut(tmp_path, *line, "+scheduler.max_lr=0.01", "+scheduler.total_steps=9")
    expected = expected_groups("SGD", "OneCycleLR", 8, max_lr=0.01, total_steps=9)
    assert [*seen_groups(tmp_path / "whole").values()] == expected
    assert resumed.sha256 == whole.sha256


def test_an_optimizer_without_momentum_has_none_to_cycle(tmp_path):
    adagrad = ("optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.01")
    run(tmp_path / "run", *adagrad, *ONE_CYCLE, *SHORT)
    refused = run(tmp_path / "no", *adagrad, *ONE_CYCLE, "+scheduler.cycle_momentum=true", *SHORT, ok=False)
    assert refused.code == 2 and "cycle_momentum" in refused.said[0]


@pytest.mark.parametrize(
    "line, says",
    [
        ((*ONE_CYCLE, "+scheduler.total_steps=4"), "write scheduler.total_steps=8, or leave out total_steps"),
        ((*ONE_CYCLE, "+scheduler.epochs=2", "+scheduler.steps_per_epoch=3"), "leave out epochs and steps_per_epoch"),
        (("scheduler._target_=kit.parts.optimizers.FewRates",), "ends after 3 steps, and the run has 8"),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_refused_at_the_start(tmp_path, line, says):
    result = run(tmp_path / "run", *line, *SHORT, ok=False)
    assert result.code == 2 and len(result.said) == 1 and says in result.said[0], result.out
    assert not result.folder.joinpath("metrics.jsonl").exists() or not result.lines("train")


@pytest.mark.nightly
def test_an_optimizer_may_have_no_rate_and_state_of_no_parameter(tmp_path):
    whole, resumed = cut(tmp_path, f"{OWN}NoRate")
    assert resumed.sha256 == whole.sha256 and resumed.losses == whole.losses
    assert {line["lr"] for line in whole.lines("train")} == {None}


@pytest.mark.nightly
def test_the_divided_state_of_such_an_optimizer(tmp_path):
    whole, resumed = cut(tmp_path, f"{OWN}NoRate", "strategy=zero", ranks=2)
    assert resumed.sha256 == whole.sha256


@pytest.mark.parametrize(
    "line, says",
    [
        ((f"{OWN}NoRate", "scheduler=cosine"), "NoRate has none: use scheduler=constant"),
        ((f"{OWN}NoRate", *ONE_CYCLE), "NoRate has no learning rate"),
        ((f"{OWN}nothing",), "returns NoneType, which has no param_groups"),
        (("optimizer.lr=0", *ONE_CYCLE), "a learning rate of 0"),
        (("+optimizer.foreach=true", "+optimizer.fused=true"), "cannot be `True` together"),
        (("+optimizer.fused=true", "precision=fp16"), "cannot be combined with precision=fp16"),
        ((f"{MODELS}Complex", "+optimizer.fused=true"), "floating-point parameters"),
        ((f"{MODELS}Sparse", "optimizer=adamw"), "does not support sparse gradients"),
        ((f"{MODELS}Sparse", "strategy=fsdp"), "table has sparse gradients"),
        ((f"{MODELS}Sparse", "virtual_world_size=2"), "table has sparse gradients"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, line, says):
    result = run(tmp_path / "run", *line, *SHORT, ok=False)
    assert result.code == 2 and len(result.said) == 1 and says in result.said[0], result.out
    assert "Traceback" not in result.out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model, more, ranks",
    [
        ("Sparse", ("optimizer.momentum=0",), None),
        ("Sparse", ("grad_clip=1", "optimizer.weight_decay=0.1"), 2),
        ("Sparse", ("+optimizer.fused=true",), None),
        ("Complex", (), 2),
        ("LateGradient", ("strategy.find_unused_parameters=true",), 2),
    ],
)
def test_a_step_is_fused_only_where_that_fits(tmp_path, model, more, ranks):
    """The numbers are those of the step that is never fused, and a resume is exact."""
    whole, resumed = cut(tmp_path, f"{MODELS}{model}", *more, ranks=ranks)
    assert resumed.sha256 == whole.sha256
    plain = [each for each in more if "fused" not in each]
    expected = run(tmp_path / "plain", f"{MODELS}{model}", *plain, *SHORT, "+optimizer.foreach=false", ranks=ranks)
    assert whole.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.weights.items():
        torch.testing.assert_close(whole.weights[name], value, rtol=1e-4, atol=1e-6)


def test_sparse_and_dense_gradients_train_alike(tmp_path):
    sparse, dense = (run(tmp_path / str(is_sparse), f"{MODELS}Sparse", f"+model.sparse={is_sparse}", *SHORT) for is_sparse in (True, False))  # fmt: skip
    assert sparse.losses == pytest.approx(dense.losses, rel=1e-5)


def test_a_choice_of_ones_own_is_respected(tmp_path):
    run(tmp_path / "run", "+optimizer.foreach=true", "optimizer=adamw", *SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [None, 2])
def test_an_average_that_is_added_at_a_resume_begins_from_the_restored_weights(tmp_path, ranks):
    run(tmp_path / "run", *SHORT, "max_steps=7", ranks=ranks)
    before = torch.load(tmp_path / "run/model.pt", weights_only=True)
    ema = ("callbacks=[ema]", "callbacks.ema.decay=0.5", "callbacks.ema.warmup=false")
    averaged = run(tmp_path / "run", *SHORT, *ema, ranks=ranks).weights
    after = run(tmp_path / "plain", *SHORT, ranks=ranks).weights
    for name, weight in after.items():
        torch.testing.assert_close(averaged[name], (before[name] + weight) / 2)


@pytest.mark.nightly
def test_the_decay_of_an_average_warms_up_also_across_a_resume(tmp_path):
    weights = {steps: run(tmp_path / str(steps), *SHORT, f"max_steps={steps}").weights for steps in (6, 7, 8)}
    run(tmp_path / "run", *SHORT, "max_steps=6")
    run(tmp_path / "run", *SHORT, "max_steps=7", "callbacks=[ema]")
    averaged = run(tmp_path / "run", *SHORT, "callbacks=[ema]").weights
    for name, average in averaged.items():
        first = 0.1 * weights[6][name] + 0.9 * weights[7][name]
        torch.testing.assert_close(average, 2 / 11 * first + 9 / 11 * weights[8][name])


def test_an_average_of_a_short_run_is_of_what_was_trained(tmp_path):
    result = run(tmp_path / "run", "max_steps=40", "callbacks=[ema]")
    plain = run(tmp_path / "plain", "max_steps=40")
    assert result.losses == plain.losses
    assert result.lines("eval")[-1]["loss"] < 2 * plain.lines("eval")[-1]["loss"]


@pytest.mark.nightly
def test_an_average_that_was_saved_without_a_count_goes_on_without_a_warm_up(tmp_path):
    before, after = (run(tmp_path / str(n), *SHORT, f"max_steps={n}").weights for n in (7, 8))
    old = (
        "+callbacks.ema._target_=kit.parts.callbacks.Uncounted",
        "+callbacks.ema.decay=0.5",
        "+callbacks.ema.every_steps=7",
    )
    run(tmp_path / "run", *SHORT, *old, "max_steps=7")
    start = run(tmp_path / "run", *SHORT, *old, "max_steps=7").weights
    now = ("callbacks=[ema]", "callbacks.ema.decay=0.5", "checkpoint.accept_changes=true")
    averaged = run(tmp_path / "run", *SHORT, *now).weights
    for name, weight in after.items():
        assert not torch.equal(start[name], before[name])
        torch.testing.assert_close(averaged[name], (start[name] + weight) / 2)


def test_a_run_of_before_the_warm_up_is_the_same_run():
    config = compose(["callbacks=[ema]"])
    before = to_dict(config)
    assert before["callbacks"]["ema"].pop("warmup") is True
    assert differences(before, config) == []


@pytest.mark.unit
def test_modes_are_set_as_by_torch_whatever_a_model_does_with_them():
    """A step sets them only where one is wrong: of modules that came later, too; and always calls a `train` of one's own."""

    def mode_of(model, objective=None):
        step = SimpleNamespace(model=model, _objective=objective)
        return partial(OptimizerStep.set_training, step)

    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    model, called = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), []
    turn = mode_of(model, objective := nn.Dropout())
    turn(False)
    model.append(nn.Dropout())  # in training mode
    turn(False)
    assert not any(each.training for each in model.modules()) and not objective.training
    turn(True)
    model[1].eval()
    turn(True)
    assert all(each.training for each in model.modules()) and objective.training
    model[0].train = lambda mode=True: called.append(mode)
    turn(True)
    turn(True)
    assert called == [True, True]
    model = nn.Sequential(Frozen(2), nn.Dropout())
    mode_of(model)(True)
    assert [each.training for each in model] == [False, True]
