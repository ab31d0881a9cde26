"""Samples that are left out of a batch do not count: the loss and the metrics are means over those that are in it."""

import copy
from collections import UserDict

import numpy as np
import pytest
import torch
import torchmetrics
from kit.job import evaluated, run
from kit.parts.holes import Holes, Line, Squares, filled, left_out
from kit.ranks import on_ranks

from muster.data.fetch import Fetch, unsplit
from muster.sample_plan import MicroBatch
from muster.train.objectives.classification import Classification
from muster.train.objectives.measure import Measures

PARTS = "kit.parts.holes"
LINE = (
    f"data._target_={PARTS}.Holes", f"model._target_={PARTS}.Line", f"objective._target_={PARTS}.Squares",
    "batch_size=12", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0", "scheduler=constant",
)  # fmt: skip


def after_a_step(model):
    """The loss of plain PyTorch's step with the points that are there, and the weights after it."""
    points, sums = Holes().whole()
    loss = Squares()(model(points), sums)
    loss.backward()
    return float(loss.detach()), {name: value.detach() - 0.1 * value.grad for name, value in model.named_parameters()}


@torch.no_grad()
def right(weights):
    """The metrics over the points of the test split that are there."""
    model = Line()
    model.load_state_dict(weights)
    points, sums = Holes(False).whole()
    return {name: float(value) / len(points) for name, value in Squares().metrics(model(points), sums).items()}


@pytest.mark.unit
@pytest.mark.parametrize(
    "collate, left",
    [
        (left_out, 8),
        (filled, 12),
        (lambda samples: tuple(zip(*(torch.zeros(12, 5) if one else one for one in samples if one), strict=True)), 8),
        (lambda samples: UserDict(x=torch.zeros(8, 3)), 8),
        (lambda samples: "something else", 8),
    ],
)
def test_what_is_left_is_counted_whatever_a_batch_is_made_of(collate, left):
    fetch = Fetch(Holes(), seed=0, collate=collate, adapter=unsplit)
    assert fetch.__getitems__(MicroBatch(0, np.arange(12), 12))[2] == left


def test_ranks_that_step_alone_weigh_what_is_left_to_them(tmp_path):
    """Of eight samples a rank has six and one four: by its own mean each moves a bias whose gradient is 1 by the rate."""
    line = (
        *LINE[:1],
        f"model._target_={PARTS}.Line",
        f"objective._target_={PARTS}.rises",
        f"loader.collate_fn={PARTS}.left_out",
    )
    alone = ("strategy=local_sgd", "strategy.warm_up_steps=0", "strategy.every_steps=1", "seed=2")
    more = (*LINE[3:], *alone, "max_steps=1", "eval.every_steps=off")
    first, moved = (run(tmp_path / rate, *line, *more, f"optimizer.lr={rate}", ranks=2).weights for rate in ("0", "1"))
    assert float(first["bias"] - moved["bias"]) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.nightly(but=["None-more0"])
@pytest.mark.parametrize("ranks, more", [(None, ()), (2, ("micro_batch_size=5",))])
def test_a_collate_function_may_leave_out_what_is_none(tmp_path, ranks, more):
    line = (*LINE, f"loader.collate_fn={PARTS}.left_out", "max_steps=1", *more)
    first = run(tmp_path / "first", *line, "optimizer.lr=0", ranks=ranks).weights
    result = run(tmp_path / "run", *line, ranks=ranks)
    model = Line()
    model.load_state_dict(first)
    loss, expected = after_a_step(model)
    assert result.losses[1] == pytest.approx(loss, rel=1e-6)
    assert max(float((result.weights[name] - value).abs().max()) for name, value in expected.items()) < 1e-6
    found = {name: value for name, value in result.lines("eval")[-1].items() if name in ("loss", "near")}
    assert found == pytest.approx(right(result.weights), rel=1e-6)
    near = run(tmp_path / "train", *line, "optimizer.lr=0", "log.train_metrics=true", ranks=ranks).lines("train")[0][
        "near"
    ]
    model.load_state_dict(first)
    points, sums = Holes().whole()
    assert near == pytest.approx(float(Squares().metrics(model(points), sums)["near"]) / len(points))


def test_a_sample_that_does_not_count_moves_no_statistics(tmp_path):
    """Of three samples in micro-batches of one, the second rank has one, and one that does not count."""
    line = (
        *LINE[:1],
        f"model._target_={PARTS}.Normed",
        *LINE[2:],
        f"loader.collate_fn={PARTS}.filled",
        "batch_size=3",
        "micro_batch_size=1",
    )
    result = run(tmp_path / "run", *line, "max_steps=1", "eval.every_steps=off", "seed=1", ranks=2)
    assert result.weights["seen"] == 1.5, "the mean over the ranks of what each has seen"


def trained(folder, micro):
    import muster

    torch.manual_seed(0)
    with muster.Job(folder, tensorboard=False, log_every=1) as job:
        model = torch.nn.parallel.DistributedDataParallel(Line())
        first = copy.deepcopy(model.module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.track(model=model, optimizer=optimizer)
        for points, sums in job.batches(
            Holes(), batch_size=12, micro_batch_size=micro, epochs=1, shuffle=False, collate_fn=left_out
        ):
            loss = Squares()(model(points), sums)
            (loss * job.weight).backward()
            if job.ends_step:
                optimizer.step()
            job.step(loss=loss)
        ends = copy.deepcopy(model.module.state_dict())
        measure = lambda batch: {"loss": ((model.module(batch[0]) - batch[1]) ** 2)[:, 0]}  # noqa: E731
        found = job.evaluate(Holes(False), measure, batch_size=7, collate_fn=left_out)["loss"]
    loss, expected = after_a_step(first)
    return (
        loss,
        found,
        right(ends)["loss"],
        max(float((ends[name] - value).abs().max()) for name, value in expected.items()),
    )


@pytest.mark.nightly(but=["2-None"])
@pytest.mark.parametrize("ranks, micro", [(1, 5), (2, None)])
def test_in_a_loop_of_ones_own_too(tmp_path, ranks, micro):
    import json

    loss, found, expected, distance = on_ranks(trained, ranks, str(tmp_path / "run"), micro)[0]
    assert distance < 1e-6 and found == pytest.approx(expected, rel=1e-6)
    lines = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [each["loss"] for each in lines if each["kind"] == "train"] == [pytest.approx(loss, rel=1e-6)]


def test_an_evaluation_leaves_out_what_cannot_be_read(tmp_path):
    """In training the next sample takes its place; in an evaluation it would count twice."""
    result = run(tmp_path / "run", *LINE, "+data.bad=true", "loader.on_bad_sample=skip", "max_steps=1", ranks=2)
    assert "sample 4 cannot be read, it is left out" in result.out
    for ranks, more in ((2, ()), (1, ("micro_batch_size=1",))):
        found = evaluated(result.folder, *more, ranks=ranks)
        assert {name: found[name] for name in ("loss", "near")} == pytest.approx(right(result.weights), rel=1e-6)


@pytest.mark.unit
def test_metrics_tell_outputs_apart_that_a_sigmoid_in_16_bits_makes_equal():
    area = torchmetrics.classification.BinaryAUROC()
    logits, targets = torch.linspace(7, 9, 8).bfloat16(), torch.arange(8) % 3 == 0
    Measures({"area": area}).update(logits, targets, slice=0)
    expected = torchmetrics.classification.BinaryAUROC()
    assert area.compute() == expected(logits.float(), targets)
    assert expected(logits.sigmoid().float(), targets) != area.compute()


@pytest.mark.unit
def test_the_accuracy_of_soft_labels_is_that_of_the_likeliest_class():
    """One sample of four classes: its labels and its prediction would else be compared with each other's every entry."""
    outputs, targets = torch.tensor([[0.0, 3, 1, 2]]), torch.tensor([[0.1, 0.6, 0.2, 0.1]])
    right, count = Classification(0.0).metrics(outputs, targets)["accuracy"]
    assert (int(right), int(count)) == (1, 1)
