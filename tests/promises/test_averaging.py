"""DDP and what stands in for its all-reduce: compressed gradients, averaged parameters, devices of one process."""

import copy
import shutil

import pytest
import torch
from kit.job import Result, run
from kit.ranks import on_ranks

SGD = ("optimizer=sgd", "optimizer.momentum=0", "batch_size=31", "model.hidden=[24]", "device=cpu")
LOCAL = ("strategy=local_sgd",)
CASES = {
    "ddp": (),
    "bf16": ("strategy.compression=bf16",),
    "fp16": ("strategy.compression=fp16",),
    "powersgd": ("strategy.compression=powersgd", "strategy.powersgd_warm_up_steps=3"),
    "model_parallel": ("strategy=model_parallel", "strategy.split=['3']"),
    "every step": (*LOCAL, "strategy.every_steps=1"),
    "post-local": (*LOCAL, "strategy.warm_up_steps=4", "strategy.every_steps=3"),
    "seldom": (*LOCAL, "strategy.every_steps=5"),
    "plain outer": (*LOCAL, "strategy.every_steps=5", "strategy.outer=nesterov", "strategy.outer_lr=1", "strategy.outer_momentum=0"),
    "nesterov": (*LOCAL, "strategy.every_steps=5", "strategy.outer=nesterov"),
}  # fmt: skip


def compare():
    """On two ranks: losses and weights of every case, of a resume from PowerSGD's state, and of a bad gradient."""
    from kit.stepping import Trained, world

    here, told = world(), {}
    for name, overrides in CASES.items():
        case = Trained(here, *SGD, *overrides)
        case.steps(range(10))
        told[name] = {"losses": case.losses, "weights": case.weights}
    told["resumed"] = {
        "with": resumed(here, "powersgd", "powersgd"),
        "without": resumed(here, "powersgd", "powersgd", forget="rank-"),
        "elsewhere": resumed(here, "model_parallel", "ddp"),
    }
    told["bad"] = {policy: bad(here, policy) for policy in ("skip", "stop")}
    here.close()
    return told


def resumed(here, one, other, *, forget="nothing"):
    """The weights after six steps of one case and four of another, from the state less what is to be forgotten."""
    from kit.stepping import Trained

    first, second = (Trained(here, *SGD, *CASES[name]) for name in (one, other))
    first.steps(range(6))
    state = copy.deepcopy(first.strategy.state())
    second.resume({name: value for name, value in state.items() if not name.startswith(forget)})
    second.steps(range(6, 10))
    return second.weights


def bad(here, policy):
    """Rank 1 alone has a gradient that is not finite, in step 2: what each rank is told of steps 0 to 5."""
    from kit.stepping import Trained

    case = Trained(here, *SGD, *LOCAL, "strategy.every_steps=4", f"on_nonfinite={policy}")

    def spoil(step, micro_batches):
        if step == 2 and here.rank == 1:
            micro_batches[0].inputs.fill_(float("nan"))

    results = case.steps(range(5), alter=spoil)
    return [result.skipped for result in results], case.strategy.optimizer_step.is_finite()


def alone():
    """One process: the same batches, through one device and through three."""
    from kit.stepping import Trained, world

    here, told = world(), {}
    for name, overrides in {"single": (), "data_parallel": ("strategy.devices=3",)}.items():
        case = Trained(here, *SGD, f"strategy={name}", *overrides)
        case.steps(range(10))
        told[name] = {"losses": case.losses, "weights": case.weights}
    here.close()
    return told


@pytest.fixture(scope="module")
def cases():
    ranks = on_ranks(compare, 2)
    for name in CASES:
        assert ranks[0][name] == ranks[1][name], "all ranks would save the same"
    return [*ranks, *on_ranks(alone, 1)]


def close(one, other, *, rel):
    return one["losses"] == pytest.approx(other["losses"], rel=rel)


@pytest.mark.nightly
def test_one_process_and_two_give_the_same_losses(cases):
    assert close(cases[0]["ddp"], cases[2]["single"], rel=1e-5)


def test_data_parallel_gives_the_losses_of_one_device(cases):
    assert close(cases[2]["data_parallel"], cases[2]["single"], rel=1e-5)


def test_a_model_on_two_devices_trains_as_ddp_does(cases):
    assert cases[0]["model_parallel"] == cases[0]["ddp"]
    assert cases[0]["resumed"]["elsewhere"] == cases[0]["ddp"]["weights"]


def test_averaging_parameters_every_step_is_ddp(cases):
    assert close(cases[0]["every step"], cases[0]["ddp"], rel=1e-5)


def test_post_local_sgd_is_ddp_first_and_then_no_more(cases):
    ours, ddp = cases[0]["post-local"]["losses"], cases[0]["ddp"]["losses"]
    assert ours[:5] == ddp[:5]  # the loss of a step is of the weights before it
    assert ours[6:] != ddp[6:] and ours == pytest.approx(ddp, rel=0.1)


def test_an_outer_optimizer_of_learning_rate_one_is_the_average(cases):
    assert close(cases[0]["plain outer"], cases[0]["seldom"], rel=1e-5)
    assert cases[0]["nesterov"]["losses"][5:] != pytest.approx(cases[0]["seldom"]["losses"][5:], rel=1e-3)


@pytest.mark.parametrize("hook, near, differs", [("bf16", 1e-2, 1e-6), ("fp16", 1e-3, 1e-8), ("powersgd", 0.3, 1e-3)])
def test_compressed_gradients_are_nearly_the_same_and_not_the_same(cases, hook, near, differs):
    ours, ddp = cases[0][hook]["losses"], cases[0]["ddp"]["losses"]
    assert ours == pytest.approx(ddp, rel=near)
    assert ours[4:] != pytest.approx(ddp[4:], rel=differs)
    assert ours[-1] < ours[0]


def test_powersgd_resumes_exactly_and_only_with_its_memory(cases):
    for rank in (0, 1):
        assert cases[rank]["resumed"]["with"] == cases[rank]["powersgd"]["weights"]
        assert cases[rank]["resumed"]["without"] != cases[rank]["powersgd"]["weights"]


def test_a_bad_gradient_on_one_rank_is_answered_by_all_alike(cases):
    for rank in (0, 1):
        assert cases[rank]["bad"]["skip"] == ([False, False, True, False, False], True)
        assert cases[rank]["bad"]["stop"] == ([False, False, False, True, False], False)


WHOLE = (
    "strategy=local_sgd", "strategy.every_steps=4", "strategy.outer=nesterov", "model._target_=kit.parts.models.Stateful",
    "optimizer=adamw", "batch_size=31",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Ten steps at once; six and four, with saving and evaluating amid the periods; what was there after the six."""
    folder = tmp_path_factory.mktemp("local")
    whole = run(folder / "whole", *WHOLE, "max_steps=10", "eval.every_steps=off", ranks=2)
    often = (*WHOLE, "checkpoint.every_steps=1", "eval.every_steps=2")
    first = run(folder / "parts", *often, "max_steps=6", ranks=2)
    shutil.copytree(first.folder, folder / "alone")
    shutil.copy(first.folder / "model.pt", folder / "alone/first.pt")
    return whole, run(folder / "parts", *often, "max_steps=10", ranks=2), folder / "alone"


def test_a_resume_amid_a_period_is_exact_and_looking_changes_nothing(runs):
    whole, parts, _ = runs
    assert parts.events("resume")[0]["step"] == 6
    assert parts.losses == whole.losses
    assert all(torch.equal(weight, parts.weights[name]) for name, weight in whole.weights.items())


def test_another_world_starts_from_the_average_which_is_what_was_measured(runs):
    folder = runs[-1]
    (folder / "model.pt").unlink()
    measured = Result(0, "", folder, 0).lines("eval")[-1]  # of the run's end: one that goes on has its own
    alone = run(folder, *WHOLE[3:], "strategy=single", "checkpoint.accept_changes=true", "max_steps=6")
    assert alone.events("resume")[-1]["step"] == 6
    for name, weight in alone.weights.items():  # those of the end of the first part, which had six steps too
        assert torch.equal(weight, torch.load(folder / "first.pt", weights_only=True)[name]), name
    again = alone.lines("eval")[-1]
    assert measured["step"] == again["step"] == 6 and again["loss"] == pytest.approx(measured["loss"], rel=1e-5)


def test_the_start_says_what_does_not_hold(runs):
    assert any("another world size starts all ranks from the average" in line for line in runs[0].said)
