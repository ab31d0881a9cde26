"""What a strategy keeps: the optimizer's own state, one value of every buffer, and no gradient that is not finite."""

import pytest
import torch
from kit.job import run

STATEFUL = ("model._target_=kit.parts.models.Stateful", "batch_size=31", "max_steps=12")


@pytest.mark.nightly
def test_what_an_optimizer_keeps_in_its_groups_is_resumed(tmp_path):
    line = (
        "optimizer._target_=kit.parts.optimizers.Fading",
        "optimizer.lr=0.1",
        "checkpoint.every_steps=4",
        "max_steps=9",
    )
    whole = run(tmp_path / "whole", *line)
    run(tmp_path / "parts", *line, "max_steps=5")
    parts = run(tmp_path / "parts", *line)
    assert parts.events("resume")[0]["step"] == 5
    assert parts.losses == whole.losses


def test_the_accuracy_that_is_reported_is_that_of_model_pt(tmp_path):
    from kit.parts.models import Stateful

    from muster.train.data.digits import Digits

    result = run(tmp_path / "run", *STATEFUL, ranks=3)
    model = Stateful((1, 8, 8), 10)
    model.load_state_dict(result.weights)
    model.eval()
    test = Digits(train=False, augment=False)
    samples = [test[index] for index in range(len(test))]
    with torch.no_grad():
        outputs = model(torch.stack([torch.as_tensor(image).float() for image, _ in samples]))
    right = (outputs.argmax(-1) == torch.tensor([int(label) for _, label in samples])).float().mean()
    assert abs(result.lines("eval")[-1]["accuracy"] - float(right)) < 1e-6


@pytest.mark.quick
def test_saving_and_evaluating_more_often_changes_no_weight(tmp_path):
    seldom = run(tmp_path / "seldom", *STATEFUL, "checkpoint.every_steps=1000", ranks=3)
    often = run(tmp_path / "often", *STATEFUL, "checkpoint.every_steps=3", "eval.every_steps=2", ranks=3)
    assert often.losses == seldom.losses
    assert all(torch.equal(weight, often.weights[name]) for name, weight in seldom.weights.items())


def test_fp16_leaves_out_what_is_not_finite_with_its_statistics(tmp_path):
    line = ("precision=fp16", "model._target_=kit.parts.models.Exploding", "max_steps=8", "on_nonfinite=skip")
    result = run(tmp_path / "run", *line, "+model.bad_steps=[3]", ranks=2)
    assert 4 in [event["step"] for event in result.events("skipped")]
    assert all(torch.isfinite(weight.float()).all() for weight in result.weights.values())


def test_fp16_with_gradients_that_are_never_finite_ends(tmp_path):
    bad = f"+model.bad_steps={list(range(3, 40))}".replace(" ", "")
    line = ("precision=fp16", "model._target_=kit.parts.models.Exploding", "max_steps=40", "max_skipped_steps=5")
    result = run(tmp_path / "run", *line, bad, "log.every_steps=100", ok=False)
    assert result.code == 6 and "6 in a row" in result.said[0], result.out
