"""A model's outputs may have several entries: a metric takes one of them, scalars are logged, and callbacks log what they like."""

import pytest
from kit.job import run

OWN = "kit.parts.structured"
F1 = ("+metrics.f1._target_=torchmetrics.F1Score", "+metrics.f1.task=multiclass", "+metrics.f1.num_classes=10")
BASE = (f"objective._target_={OWN}.loss", "max_steps=12", "log.every_steps=6")


def net(name="Net", *more):
    return (f"model._target_={OWN}.{name}", *more, *BASE)


@pytest.mark.nightly
def test_scalars_among_the_outputs_are_means_and_a_metric_takes_logits_at_any_world_size(tmp_path):
    line = (*net(), *F1, "log.train_metrics=true", "batch_size=50")
    one, two = (run(tmp_path / str(n), *line, ranks=n) for n in (1, 2))
    last = one.lines("eval")[-1]
    assert last["kl"] == pytest.approx(0.25) and last["rec"] > 0 and last["f1"] > 0.3, last
    assert {**two.lines("eval")[-1], "kind": 0} == pytest.approx({**last, "kind": 0}, rel=1e-5)
    trained = [[line["kl"], line["rec"]] for line in one.lines("train")]
    assert trained[-1] == pytest.approx([0.25, one.lines("train")[-1]["rec"]]) and trained[-1][1] > 0
    assert two.lines("train")[-1]["rec"] == pytest.approx(trained[-1][1], rel=1e-5)


@pytest.mark.nightly(but=["of0"])
@pytest.mark.parametrize(
    "of", [("Net", "+model.attributes=false", "+metrics.f1.of=logits"), ("Pair", "+metrics.f1.of=1")]
)
def test_a_metric_takes_the_entry_that_is_named(tmp_path, of):
    last = run(tmp_path / "run", *net(*of), *F1).lines("eval")[-1]
    assert last["f1"] > 0.3, last


@pytest.mark.nightly(but=["of0-valid: logits, features, rec, kl"])
@pytest.mark.parametrize(
    "of, says",
    [
        (("Net", "+model.attributes=false", "+metrics.f1.of=logit"), "valid: logits, features, rec, kl"),
        (("Net", "+model.attributes=false"), "write +metrics.f1.of=logits"),
        (("Pair", "+metrics.f1.of=2"), "valid: 0 to 1"),
    ],
)
def test_an_entry_that_there_is_not_is_one_line(tmp_path, of, says):
    result = run(tmp_path / "run", *net(*of), *F1, ok=False)
    assert result.code == 2 and len(result.said) == 1, result.out
    assert "metrics.f1" in result.said[0] and says in result.said[0], result.said[0]


def test_what_a_callback_logs_is_in_the_next_line_and_is_not_lost_at_a_resume(tmp_path):
    line = (*net(), f"+callbacks.a._target_={OWN}.Logs", "eval.every_steps=6")
    whole = run(tmp_path / "whole", *line)
    first, second = whole.lines("train")
    assert [first["at"], second["at"]] == [6, 12] and first["weight_norm"] != second["weight_norm"]
    evaluations = whole.lines("eval")
    assert "twice" not in first and second["twice"] == pytest.approx(2 * evaluations[0]["loss"])
    assert whole.events("logged")[0]["twice"] == pytest.approx(2 * evaluations[1]["loss"])

    sparse = (*line, "log.every_steps=12")
    stopped = run(tmp_path / "parts", *sparse, "+callbacks.a.preempted_at=8", ok=False)
    assert stopped.code == 75 and not stopped.lines("train"), stopped.out
    [resumed] = run(tmp_path / "parts", *sparse).lines("train")
    assert resumed["twice"] == second["twice"] and resumed["weight_norm"] == second["weight_norm"]


@pytest.mark.parametrize(
    "given, says",
    [
        ((), "run.log() has the name loss"),
        (("+callbacks.a.name=event",), "the name event"),
        ([f.replace("f1", "step") for f in F1], "a metric has the name step"),
        (("+callbacks.a.name=x", "+callbacks.a.value=null"), "is not a number"),
    ],
)
def test_what_cannot_be_logged_is_one_line(tmp_path, given, says):
    own = f"+callbacks.a._target_={OWN}.Refused"
    result = run(tmp_path / "run", *net(), *([] if "+metrics" in str(given) else [own]), *given, ok=False)
    assert result.code == 2 and len(result.said) == 1 and says in result.said[0], result.out
