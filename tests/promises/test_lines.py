"""What a `train` line shows: the mean over all samples since the last line, exact over a resume; and what an evaluation leaves."""

import itertools
import json
import shutil

import pytest
import torch
from kit.job import finish, hold, pace, reached, run, start, wait_for

from muster.attempt.intervals import Every, Intervals
from muster.attempt.running_means import RunningMeans
from muster.report.history import History
from muster.train.progress import Progress
from muster.world.group import alone

# 1437 samples in batches of 64 leave 29 for the last step of an epoch; lines and checkpoints do not coincide.
LINE = (
    "model.hidden=[16]",
    "max_steps=30",
    "eval.every_steps=off",
    "log.train_metrics=true",
    "checkpoint.every_steps=7",
)
SEVEN, EVERY = "log.every_steps=7", "log.every_steps=1"
METRIC = "+metrics.curve._target_=torchmetrics.AUROC", "+metrics.curve.task=multiclass", "+metrics.curve.num_classes=10"


def numbers(result):
    return {each["step"]: (each["loss"], each["accuracy"]) for each in result.lines("train")}


def weighted(single, steps):
    """Means over the samples of these steps, of a run that has a line for each."""
    lines = [each for each in single.lines("train") if each["step"] in steps]
    before = {each["step"]: each["samples"] for each in single.lines("train")}
    counts = [each["samples"] - before.get(each["step"] - 1, 0) for each in lines]
    return tuple(
        sum(count * each[name] for count, each in zip(counts, lines, strict=True)) / sum(counts)
        for name in ("loss", "accuracy")
    )


def back_to(folder, step):
    """As if the run had been killed after its checkpoint of this step."""
    kept = folder / f"checkpoints/step-{step:08d}"
    for path in (folder / "checkpoints").glob("step-*"):
        if path.name > kept.name:
            shutil.rmtree(path)
    outcome = json.loads((folder / "outcome.json").read_text())
    outcome |= {"outcome": "preempted", "checkpoint": {"step": step, "path": str(kept)}}
    (folder / "outcome.json").write_text(json.dumps(outcome))


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return run(tmp_path_factory.mktemp("every") / "run", *LINE, EVERY)


@pytest.mark.quick
def test_a_line_is_the_mean_over_all_samples_since_the_last(tmp_path, every):
    found = numbers(run(tmp_path / "run", *LINE, SEVEN))
    assert [*found] == [7, 14, 21, 28, 30]
    for step, values in found.items():
        steps = range(29, 31) if step == 30 else range(step - 6, step + 1)
        assert values == pytest.approx(weighted(every, steps), rel=1e-9)


@pytest.mark.nightly(but=["slices1"])
@pytest.mark.parametrize("slices", [(), ("virtual_world_size=3",)])
def test_lines_after_a_resume_are_those_of_an_undisturbed_run(tmp_path, slices):
    line = (*LINE, *slices, SEVEN, "checkpoint.every_steps=10", "checkpoint.keep=9")
    whole = numbers(run(tmp_path / "run", *line, ranks=2))
    back_to(tmp_path / "run", 10)
    resumed = run(tmp_path / "run", *line, ranks=3 if slices else 2)
    assert resumed.events("resume")[-1]["step"] == 10
    assert numbers(resumed) == whole


@pytest.mark.nightly
def test_two_evaluation_batches_are_tried_first_and_leave_no_trace(tmp_path):
    line = (
        "model._target_=kit.parts.models.Stateful",
        "max_steps=12",
        "eval.every_steps=5",
        *METRIC,
        "callbacks=[ema]",
    )
    tried, not_tried = (run(tmp_path / str(n), *line, f"eval.sanity_batches={n}", ranks=2) for n in (2, 0))
    assert tried.sha256 == not_tried.sha256 and tried.losses == not_tried.losses
    same = [[{**each} for each in result.lines("eval")] for result in (tried, not_tried)]
    assert same[0] == same[1]


@pytest.mark.quick
def test_what_cannot_be_evaluated_is_found_before_the_first_step(tmp_path):
    for mistake in (("checkpoint.best=acc",), ("callbacks=[early_stopping]", "callbacks.early_stopping.metric=acc")):
        refused = run(tmp_path / mistake[0].split("=")[0], "max_steps=40", *mistake, ok=False)
        assert refused.code == 2 and "accuracy, loss" in refused.said[-1], refused.out
        assert not refused.lines("train")


@pytest.mark.nightly
def test_a_metric_with_lists_on_ranks_without_samples(tmp_path):
    line = ("max_steps=4", "eval.max_samples=2", "+metrics.rows._target_=kit.parts.metrics.Rows")
    alone, three = (run(tmp_path / str(ranks), *line, ranks=ranks).lines("eval")[-1] for ranks in (1, 3))
    assert three["rows"] == alone["rows"]


def test_a_run_that_is_further_than_it_is_to_go(tmp_path):
    run(tmp_path / "run", "max_steps=9", "eval.every_steps=3")
    back_to(tmp_path / "run", 9)
    again = run(tmp_path / "run", "log.progress=plain", "max_steps=6")
    assert "/6" not in again.out and "the config asks for 6 steps, but 9 are done" in again.out, again.out


@pytest.mark.nightly
def test_metrics_that_a_resume_begins_or_ends_count_their_own_steps_alone(tmp_path):
    line = (*LINE[:3], "checkpoint.every_steps=6", "checkpoint.keep=9", "max_steps=20", "log.every_steps=20")
    run(tmp_path / "run", *line)
    back_to(tmp_path / "run", 18)
    on = run(tmp_path / "run", *line, "log.train_metrics=true")
    single = run(tmp_path / "single", *LINE[:3], "max_steps=20", EVERY, "log.train_metrics=true")
    assert on.lines("train")[-1]["accuracy"] == pytest.approx(weighted(single, (19, 20))[1], rel=1e-9)


def test_two_averages_leave_training_as_it_is(tmp_path):
    line = ("max_steps=12", "eval.every_steps=4", EVERY)
    two = (
        "callbacks=[ema]",
        "callbacks.ema.decay=0.5",
        "+callbacks.slow._target_=muster.train.callbacks.ema.Ema",
        "+callbacks.slow.decay=0.9",
        "+callbacks.slow.every_steps=1",
    )
    assert run(tmp_path / "two", *line, *two).losses == run(tmp_path / "none", *line).losses


def test_a_run_that_a_callback_has_stopped_is_finished(tmp_path):
    stop = ("+callbacks.stop._target_=kit.parts.callbacks.StopAt", "+callbacks.stop.at=4", "eval.every_steps=off")
    first = run(tmp_path / "run", "max_steps=9", *stop)
    before = first.sha256
    again = run(tmp_path / "run", "max_steps=9", *stop)
    assert again.sha256 == before and again.events("done")[-1] | {"time": 0} == {
        "kind": "event", "event": "done", "time": 0, "step": 4, "note": "finished already",
    }  # fmt: skip
    history = History.of(again.folder)
    assert len(history.begins) == history.attempts == 1, "the second has not trained"
    more = run(tmp_path / "run", "max_steps=12", "+callbacks.stop._target_=kit.parts.callbacks.StopAt", "+callbacks.stop.at=11", "eval.every_steps=off")  # fmt: skip
    assert more.events("done")[-1]["step"] == 11


def test_the_last_evaluation_of_a_run_that_goes_on(tmp_path):
    """What was best then is kept as the best, and no step has two lines."""
    line = ("optimizer.lr=0.001", "eval.every_steps=10", "checkpoint.best=accuracy", "checkpoint.keep=1")
    run(tmp_path / "run", *line, "max_steps=21")
    best = json.loads((tmp_path / "run/best.json").read_text())
    assert best["step"] == 21
    more = (*line, "max_steps=60", "checkpoint.every_steps=1", EVERY, *hold(26))  # the next evaluation is at 30
    process = start(tmp_path / "run", *more)
    wait_for(tmp_path / "run", reached(25), process=process)
    process.kill()
    killed = finish(process, tmp_path / "run")
    assert json.loads((tmp_path / "run/best.json").read_text())["step"] == 21
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved[0] == "step-00000021" and saved[-1] > "step-00000022", saved
    assert [each["step"] for each in killed.lines("eval")] == [10, 20]


def test_another_metric_to_watch_is_looked_for_anew(tmp_path):
    line = (
        "optimizer.lr=0.001",
        "eval.every_steps=5",
        "callbacks=[early_stopping]",
        "callbacks.early_stopping.patience=1",
    )
    run(tmp_path / "run", *line, "max_steps=11", "callbacks.early_stopping.metric=accuracy", "checkpoint.best=accuracy")
    on = run(tmp_path / "run", *line, "max_steps=20", "callbacks.early_stopping.metric=loss", "checkpoint.best=loss")
    assert not on.events("stopped") and on.lines("train")[-1]["step"] == 20
    best = json.loads((tmp_path / "run/best.json").read_text())
    assert best["metric"] == "loss" and best["value"] == min(each["loss"] for each in on.lines("eval"))


@pytest.mark.unit
def test_intervals_in_seconds_follow_the_clock_with_few_looks_at_it():
    """A slow first step, then fast ones: each interval is kept to a step or two, and the clock is rarely looked at."""
    now, looks, due = 0.0, 0, {"line": [], "save": []}
    timed, progress = Intervals(clock=lambda: now, line=Every(10, 1.0), save=Every(100, 5.0)), Progress()
    timed.look(alone(torch.device("cpu")), progress)
    for step in range(1, 4001):
        now += 3.0 if step == 1 else 0.005
        progress.step = step
        before = progress.timed
        timed.look(alone(torch.device("cpu")), progress)
        looks += progress.timed is not before
        for name in due:
            if timed.is_due(name, progress):
                due[name].append(now)
    for name, seconds in (("line", 1.0), ("save", 5.0)):
        gaps = [after - before for before, after in itertools.pairwise(due[name])]
        assert gaps and all(abs(gap - seconds) < 0.1 * seconds for gap in gaps), (name, gaps)
    assert looks < 200


@pytest.mark.nightly
def test_intervals_in_seconds_leave_the_run_as_it_is(tmp_path):
    by_clock = ("log.every_s=0.4", "checkpoint.every_s=1", *pace(0.04))
    timed = run(tmp_path / "timed", *LINE, "max_steps=60", *by_clock, ranks=2)
    plain = run(tmp_path / "plain", *LINE, "max_steps=60", ranks=2)
    assert timed.sha256 == plain.sha256
    steps = [line["step"] for line in timed.lines("train")]
    assert 3 <= len(steps) <= timed.seconds / 0.4 + 2 and steps[-1] == 60 and steps == sorted({*steps}), steps
    assert timed.lines("train")[-1]["samples"] == plain.lines("train")[-1]["samples"]
    assert 2 <= len(timed.events("checkpoint")) <= timed.seconds / 1 + 2, timed.out
    refused = run(tmp_path / "refused", "log.every_s=0", ok=False)
    assert refused.code == 2 and "log.every_s" in refused.said[-1], refused.out


def test_checkpoints_at_the_end_of_epochs(tmp_path):
    result = run(tmp_path / "run", "max_steps=60", "eval.every_steps=off", "checkpoint.every_epochs=1")
    assert [event["step"] for event in result.events("checkpoint")] == [23, 46, 60]
    both = run(tmp_path / "both", "checkpoint.every_epochs=1", "checkpoint.every_s=9", ok=False)
    assert both.code == 2 and "choose one interval" in both.said[-1], both.out


@pytest.mark.unit
def test_sums_of_earlier_checkpoints_are_gone_on_with():
    """A trainer's and a Job's, as they were written until 2026-11-29, by the names of then."""
    window = {
        "samples": 64,
        "measured": 64,
        "made": True,
        "sums": {"loss": 3.0, "loss/of": 64.0},
        "logged": {"once": 8.0},
    }
    totals = {"loss": 3.0, "loss\0weight": 64.0}
    for state in ({"loop/window": window}, {"rank-00000/loop/totals": totals, "loop/totals": totals}):
        means = RunningMeans(alone(torch.device("cpu")))
        means.load(state)
        means.add({"loss": torch.tensor(0.5, requires_grad=True)}, times=2)
        assert means.own() == {"loss": 4.0, "loss/of": 64.0} | (
            {"measured/\0counted": 64} if "loop/window" in state else {}
        )
    assert means.take_logged() == {}
