"""A run's state is all of it: buffers, losses, optimizers and random numbers, at every world size and over every resume."""

import json

import pytest
import torch
from kit.job import run

from muster.checkpoint.tensor_versions import Changes

MODEL = "model._target_=kit.parts.state."
LINE = ("batch_size=31", "optimizer.lr=0.05", "checkpoint.every_steps=4", "eval.every_steps=6")
V = ("virtual_world_size=7", *LINE)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# Buffers


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_buffer_that_the_model_assigns_is_that_of_one_that_writes_into_it(tmp_path, ranks):
    line = (f"{MODEL}Keeping", *LINE, "max_steps=9")
    plain = run(tmp_path / "in-place", *line, "+model.in_place=true", ranks=ranks)
    whole = run(tmp_path / "whole", *line, ranks=ranks)
    assert whole.weights["running"].abs().sum() > 1
    assert same(whole.weights, plain.weights) and whole.losses == plain.losses
    assert whole.lines("eval") == plain.lines("eval")
    run(tmp_path / "cut", *line, "max_steps=5", ranks=ranks)
    again = run(tmp_path / "cut", *line, ranks=ranks)
    assert again.events("resume")[-1]["step"] == 5
    assert again.sha256 == whole.sha256


@pytest.mark.parametrize("more", [(), ("virtual_world_size=3",)])
def test_a_step_that_is_left_out_leaves_no_trace_in_it(tmp_path, more):
    line = (f"{MODEL}Keeping", "+model.bad=4", "on_nonfinite=skip", *LINE, "max_steps=6", *more)
    result = run(tmp_path / "run", *line)
    assert len(result.events("skipped")) == 1
    assert result.weights["running"].isfinite().all() and result.weights["running"].abs().sum() > 1


@pytest.mark.nightly
def test_a_buffer_that_is_none_until_it_is_needed_is_resumed(tmp_path):
    line = (f"{MODEL}Late", *LINE)
    whole = run(tmp_path / "whole", *line, "max_steps=9")
    run(tmp_path / "cut", *line, "max_steps=5")
    assert run(tmp_path / "cut", *line, "max_steps=9").sha256 == whole.sha256


def test_one_batch_norm_under_two_names_has_one_value(tmp_path):
    weights = run(tmp_path / "run", f"{MODEL}Twice", *LINE, "max_steps=5", ranks=2).weights
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(weights[f"2.{name}"], weights[f"4.{name}"])


@pytest.mark.nightly
def test_what_nobody_trains_stays_and_what_is_counted_is_counted_once_at_every_world_size(tmp_path):
    from kit.parts.state import Counting

    line = (f"{MODEL}Counting", *V, "max_steps=9")
    alone = run(tmp_path / "alone", *line)
    fresh, weights = Counting().state_dict(), alone.weights
    for name in ("mask", "lowest", "table", "wide"):
        assert torch.equal(weights[name], fresh[name]), name
    plain = run(tmp_path / "plain", f"{MODEL}Counting", *LINE, "max_steps=9").weights
    assert weights["bright"] == plain["bright"] > 1000
    assert weights["norm.num_batches_tracked"] == plain["norm.num_batches_tracked"] == 9
    assert weights["met"].any()
    assert weights["running"].isfinite().all() and torch.allclose(weights["running"], plain["running"], atol=1e-2)
    assert run(tmp_path / "three", *line, ranks=3).sha256 == alone.sha256
    for ranks, steps in ((3, 3), (2, 7), (None, 9)):  # one of the running averages is in no state dict
        again = run(tmp_path / "cut", *line, f"max_steps={steps}", ranks=ranks)
    assert again.sha256 == alone.sha256


def test_a_buffer_whose_size_depends_on_the_slice_is_refused(tmp_path):
    result = run(tmp_path / "run", f"{MODEL}Growing", *V, "max_steps=2", ok=False)
    assert result.code == 2 and len(result.said) == 1, result.out
    assert "virtual_world_size=7: the buffer running was [64]" in result.said[0]


def test_the_ranks_common_value_of_a_buffer_is_saved_once_and_their_own_where_they_differ(tmp_path):
    def saved(*line, ranks):
        place = tmp_path / f"{len(line)}-{ranks}"
        run(place, f"{MODEL}Keeping", "max_steps=4", *line, ranks=ranks)
        index = json.loads((place / "checkpoints/step-00000004/index.json").read_text())
        return {name for name in index["tensors"] if name.endswith(("running", "unsaved"))}

    common = {"model/running", "buffers/unsaved"}
    own = {f"rank-{rank:05d}/buffers/{name}" for rank in (0, 1) for name in ("running", "unsaved")}
    assert saved(*LINE, ranks=None) == common
    assert saved(*V, ranks=2) == common
    assert saved(*LINE, ranks=2) == common | own


# Random numbers


@pytest.mark.nightly
def test_functions_of_ones_own_draw_alike_at_every_world_size(tmp_path):
    drawn = ("loader.collate_fn=kit.parts.state.mixup", "loader.batch=kit.parts.state.masked")
    line = (f"{MODEL}Chancy", *V, *drawn, "optimizer._target_=kit.parts.state.Mixed", "+optimizer.noise=0.1")
    alone = run(tmp_path / "alone", *line, "max_steps=9")
    two = run(tmp_path / "two", *line, "max_steps=9", "loader.num_workers=1", ranks=2)
    assert two.sha256 == alone.sha256
    assert two.lines("eval") == alone.lines("eval") and two.losses == alone.losses
    run(tmp_path / "cut", *line, "max_steps=5", ranks=3)
    assert run(tmp_path / "cut", *line, "max_steps=9", ranks=2).sha256 == alone.sha256


@pytest.mark.nightly
@pytest.mark.parametrize(
    "own",
    [("loader.collate_fn=kit.parts.state.mixup_in_training",), ("loader.batch=kit.parts.state.MaskedInTraining",)],
    ids=["function", "class"],
)
def test_functions_that_are_told_leave_the_test_split_alone(tmp_path, own):
    """Nothing is trained: the metrics are those of the weights at the beginning, on the samples as they are."""
    line = ("model.hidden=[8]", "optimizer.lr=0", "max_steps=1")
    plain = run(tmp_path / "plain", *line)
    mixed = run(tmp_path / "mixed", *line, *own)
    two = run(tmp_path / "two", *line, *own, "loader.num_workers=1", ranks=2)
    assert mixed.losses != plain.losses
    for result in (mixed, two):
        for name in ("accuracy", "loss"):
            assert result.lines("eval")[-1][name] == pytest.approx(plain.lines("eval")[-1][name], rel=1e-6)


def test_a_stream_that_shuffles_is_the_same_at_every_world_size(tmp_path):
    line = ("data._target_=kit.parts.state.Shuffled", "model.hidden=[8]", *V, "max_steps=9")
    alone = run(tmp_path / "alone", *line)
    assert run(tmp_path / "three", *line, ranks=3).sha256 == alone.sha256
    run(tmp_path / "cut", *line, "max_steps=5", ranks=2)
    assert run(tmp_path / "cut", *line).sha256 == alone.sha256


def test_an_evaluation_that_draws_leaves_no_trace_in_training(tmp_path):
    line = (f"{MODEL}Chancy", *LINE, "max_steps=9")
    seldom, often = (run(tmp_path / str(n), *line, f"eval.every_steps={n}") for n in (9, 2))
    assert often.sha256 == seldom.sha256
    assert often.lines("eval")[-1] == seldom.lines("eval")[-1]


@pytest.mark.nightly
def test_metrics_that_keep_a_state_have_the_same_digits_at_every_world_size(tmp_path):
    named = [f"+metrics.{name.lower()}._target_=kit.parts.measures.{name}" for name in ("Distance", "Spread")]
    line = ("model.hidden=[8]", *V, *named, "max_steps=12", "eval.max_samples=100")
    alone, two, three = (run(tmp_path / str(ranks), *line, ranks=ranks) for ranks in (None, 2, 3))
    assert alone.lines("eval") == two.lines("eval") == three.lines("eval")
    assert all(line["distance"] > 0 and line["spread"] > 0 for line in alone.lines("eval"))
    plain = run(tmp_path / "plain", *line[:1], *LINE, *named, *line[-2:])
    assert abs(plain.lines("eval")[0]["distance"] - alone.lines("eval")[0]["distance"]) < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("more, ranks", [((), 2), (V[:1], None), ((), None)], ids=["ranks", "slices", "one process"])
def test_a_metric_that_does_not_add_up_its_states_is_refused_where_there_are_several(tmp_path, more, ranks):
    metric = ("+metrics.right._target_=torchmetrics.classification.MulticlassAccuracy", "+metrics.right.num_classes=10")
    flags = ("+metrics.right.average=micro", "+metrics.right.sync_on_compute=false")
    line = ("model.hidden=[8]", *LINE, *metric, *flags, *more, "max_steps=1")
    result = run(tmp_path / "run", *line, ranks=ranks, ok=False)
    if not ranks and not more:
        last = result.lines("eval")[-1]
        assert result.code == 0 and last["right"] == pytest.approx(last["accuracy"])
        return
    assert result.outcome["outcome"] == "config_error", result.out
    assert result.said and all("sync_on_compute=false" in line for line in result.said), result.out


# What a resume at the same size needs


@pytest.mark.nightly(but=["optimizer"])
@pytest.mark.parametrize(
    "more",
    [
        ("loader.collate_fn=kit.parts.state.mixup", "loader.num_workers=1"),
        ("optimizer._target_=kit.parts.state.Mixed",),
        ("objective._target_=kit.parts.state.Centred", "log.train_metrics=true"),
    ],
    ids=["collate_fn", "optimizer", "objective"],
)
def test_a_resume_is_bit_identical(tmp_path, more):
    line = ("model.hidden=[8]", *LINE, *more)
    whole = run(tmp_path / "whole", *line, "max_steps=9")
    run(tmp_path / "cut", *line, "max_steps=5")
    again = run(tmp_path / "cut", *line, "max_steps=9")
    assert again.sha256 == whole.sha256 and again.lines("eval")[-1] == whole.lines("eval")[-1]


@pytest.mark.nightly
def test_the_state_of_a_loss_is_the_runs(tmp_path):
    line = ("model.hidden=[8]", "objective._target_=kit.parts.state.Centred", *V, "max_steps=9")
    alone = run(tmp_path / "alone", *line)
    measured = run(tmp_path / "measured", *line, "log.train_metrics=true", "eval.every_steps=2")
    assert measured.sha256 == alone.sha256, "to look at it changes nothing"
    run(tmp_path / "cut", *line, "max_steps=5", ranks=3)
    assert run(tmp_path / "cut", *line, ranks=2).sha256 == alone.sha256


# The optimizer's, by name


LAYERS = ("model.hidden=[64,64]", "eval.every_steps=off", "checkpoint.accept_changes=true")
ONE, TWO, REST = "{match:1.weight,weight_decay:0.0}", "{match:3.weight,weight_decay:0.0}", "{match:'*.bias'}"


@pytest.mark.nightly
@pytest.mark.parametrize("strategy, ranks", [("single", None), ("zero", 2), ("fsdp", 2), ("pipeline", 2)])
def test_an_optimizers_state_follows_the_names_into_groups_in_another_order_split_and_merged(tmp_path, strategy, ranks):
    line = (*LAYERS, f"strategy={strategy}", "optimizer.momentum=0.9")
    run(tmp_path / "first", *line, f"optimizer.groups=[{ONE},{TWO}]", "max_steps=4", ranks=ranks)
    line = (*line, f"checkpoint.resume={tmp_path / 'first'}", "max_steps=6")
    kept = run(tmp_path / "kept", *line, f"optimizer.groups=[{ONE},{TWO}]", ranks=ranks)
    for name, groups in {"swapped": [TWO, ONE], "split": [REST, TWO, ONE], "merged": []}.items():
        other = run(
            tmp_path / name,
            *line,
            f"optimizer.groups=[{','.join(groups)}]" if groups else "optimizer.groups=null",
            ranks=ranks,
        )
        assert other.losses == kept.losses, name
        assert all(torch.equal(weight, other.weights[key]) for key, weight in kept.weights.items()), name


@pytest.mark.nightly
def test_parameters_of_groups_that_differ_in_what_no_config_sets_do_not_become_one_group(tmp_path):
    line = (*LAYERS, "optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.1")
    run(tmp_path / "first", *line, "+optimizer.groups=[{match:1.weight,lr_decay:0.5}]", "max_steps=2")
    line = (*line, f"checkpoint.resume={tmp_path / 'first'}", "max_steps=3")
    refused = run(tmp_path / "none", *line, ok=False)
    assert refused.code == 2 and len(refused.said) == 1, refused.out
    assert "1.weight has lr_decay=0.5 and 1.bias has lr_decay=0" in refused.said[0]
    run(tmp_path / "set", *line, "+optimizer.lr_decay=0.5")


# What is refused, and what is no tensor


@pytest.mark.parametrize(
    "line, says",
    [
        (("objective._target_=kit.parts.state.Weighted",), "a trainable parameter, temperature"),
        (("objective._target_=kit.parts.state.Remembering",), "Remembering has _extra_state (get_extra_state), and"),
        ((f"{MODEL}Replacing",), "has replaced the parameter weight"),
        ((f"{MODEL}Replacing", "+model.at=3"), "has replaced the parameter weight"),
        ((f"{MODEL}Thawing",), "body.weight requires a gradient now"),
        (
            (f"{MODEL}Extra", "+model.plain=false"),
            "get_extra_state()['calls'] is of type random.Random, which torch.load does not read",
        ),
    ],
)
def test_what_would_be_lost_without_a_word_is_refused(tmp_path, line, says):
    result = run(tmp_path / "run", *line, "max_steps=4", ok=False)
    assert result.code == 2 and len(result.said) == 1 and says in result.said[0], result.out
    assert "Traceback" not in result.out and not (tmp_path / "run/model.pt").exists()


def test_a_modules_extra_state_that_differs_by_rank_is_refused(tmp_path):
    line = (f"{MODEL}SamplesSeen", "batch_size=31", "max_steps=4")
    refused = run(tmp_path / "run", *line, ranks=2, ok=False)
    assert refused.code and not (tmp_path / "run/model.pt").exists(), refused.out
    assert any(
        "get_extra_state() of the model differs between the ranks, and a checkpoint has one" in line
        for line in refused.said
    )
    run(tmp_path / "alike", *line, "batch_size=32", ranks=2)


@pytest.mark.nightly
def test_a_modules_extra_state_may_be_a_dict(tmp_path):
    line = (f"{MODEL}Extra", *LINE)
    run(tmp_path / "run", *line, "max_steps=5")
    result = run(tmp_path / "run", *line, "max_steps=9")
    assert result.weights["_extra_state"] == {"calls": 9, "last": torch.tensor([9])}
    refused = run(tmp_path / "refused", *line, "strategy=parameter_server", "max_steps=2", ranks=2, ok=False)
    assert refused.code != 0 and any("get_extra_state" in line for line in refused.said), refused.out


@pytest.mark.unit
def test_what_has_changed_is_seen_wherever_an_optimizer_keeps_it():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    history, mean = [torch.zeros(2)], torch.zeros(2)
    optimizer.state[weight] = {"history": history, "step": 3}
    optimizer.state["mean"], optimizer.state["steps"] = mean, 4  # of an optimizer of one's own: not of a parameter
    changes = Changes([("weight", weight)], [optimizer])
    changes.look()
    assert not changes.changed() and not changes.changed_unseen()
    weight.data.add_(1)
    assert not changes.changed() and changes.changed_unseen() == "weight"
    for tensor, name in ((history[0], "the optimizer's state"), (mean, "the optimizer's state"), (weight, "weight")):
        changes.look()
        assert not changes.changed()
        with torch.no_grad():
            tensor.add_(1)
        assert changes.changed() == name
    changes.look()
    del optimizer.state["mean"]
    assert changes.changed() == "the optimizer's state"
