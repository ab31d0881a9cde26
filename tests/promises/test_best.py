"""`checkpoint.best` keeps the best evaluation, whichever direction is the better one, and metrics are those of all samples."""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from kit import warm
from kit.job import ROOT, environment, finish, run
from kit.job import evaluated as measured_again
from kit.loops.chooses import TEST
from torch import nn
from torch.nn.functional import cross_entropy

import muster
from muster.checkpoint.schemas import direction, is_better
from muster.errors import ConfigError
from muster.report.history import History, ranked
from muster.report.results import Result, best_in
from muster.report.results import ranked as ranked_results
from muster.train.callbacks.early_stopping import EarlyStopping
from muster.train.objectives.measure import Measures

OWN = "kit.parts.measures"
LINE = ("max_steps=12", "eval.every_steps=3", "optimizer.lr=0.02", "checkpoint.every_steps=100")


@pytest.mark.unit
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_finite_is_worse_than_any_number(mode):
    for strange in map(float, ("nan", "inf", "-inf")):
        assert is_better(0.5, strange, mode=mode) and not is_better(strange, 0.5, mode=mode)
        assert not is_better(strange, float("nan"), mode=mode)


@pytest.mark.unit
def test_a_name_says_whether_less_or_more_is_better_or_nothing_is_guessed():
    less = "loss val_loss mae amp_mae rmse perplexity word_error log_loss regret valloss dice_loss map_error top_error"
    more = "accuracy top1_accuracy f1 f2 auroc mean_iou dice r2 psnr iou acc1 top3 mAP50 exact_match bleu4 valAcc BinaryAUROC"
    asks = "spread amp quux time score crps_score energy_score neg_mse mse_improvement loss_reduction 1-wer error_free acc_mae"
    for names, said in ((less, "min"), (more, "max"), (asks, "")):
        assert {name: direction(name) for name in names.split()} == dict.fromkeys(names.split(), said)


@pytest.mark.unit
def test_a_metric_s_own_word_counts_more_than_its_name_and_the_user_s_more_than_both():
    class Less:
        higher_is_better = False

    class More:
        higher_is_better = True

    measures = Measures({"score": Less(), "spread": object(), "val": More(), "top": More(), "top_error": Less()})
    given = {"key": "checkpoint.best", "mode_key": "checkpoint.best_mode"}
    assert measures.direction("score", **given) == "min" and measures.direction("score", mode="max", **given) == "max"
    assert measures.direction("val_loss", **given) == measures.direction("top_error", **given) == "min", (
        "not of another's"
    )
    assert measures.direction("spread", recorded="max", **given) == "max", "a run of before goes on"
    with pytest.raises(ConfigError, match=r"checkpoint.best=spread: .* write checkpoint.best_mode=min, or max"):
        measures.direction("spread", **given)
    with pytest.raises(ConfigError, match=r"checkpoint.best=accuracyy: did you mean accuracy\?"):
        measures.direction("accuracyy", **given)


@pytest.mark.nightly(but=["mae-more0-min"])
@pytest.mark.parametrize(
    ("metric", "more", "mode"),
    [
        ("mae", ("+metrics.mae._target_=kit.parts.measures.Summed",), "min"),
        ("gap", ("+metrics.gap._target_=kit.parts.measures.Downward",), "min"),
        ("spread", ("+metrics.spread._target_=kit.parts.measures.Summed", "checkpoint.best_mode=min"), "min"),
        ("accuracy", (), "max"),
    ],
)
def test_the_best_checkpoint_is_the_best_at_any_world_size(tmp_path, metric, more, mode):
    result = run(tmp_path / "run", *LINE, *more, f"checkpoint.best={metric}", ranks=2)
    values = {line["step"]: line[metric] for line in result.lines("eval")}
    best = json.loads((result.folder / "best.json").read_text())
    assert len(set(values.values())) > 1, values
    assert best["value"] == values[best["step"]] == (min if mode == "min" else max)(values.values())
    assert best["mode"] == mode


@pytest.mark.nightly
def test_early_stopping_waits_while_an_error_of_torchmetrics_falls_also_after_a_resume(tmp_path):
    """It says itself that less of it is better: in the other direction, the run would end at step 9."""
    stops = ("callbacks=[early_stopping]", "callbacks.early_stopping.metric=gap", "callbacks.early_stopping.patience=2")
    line = (*LINE, "+metrics.gap._target_=kit.parts.measures.Downward", "checkpoint.best=gap", *stops)
    run(tmp_path / "run", *line, "max_steps=6")
    result = run(tmp_path / "run", *line)
    values = {line["step"]: line["gap"] for line in result.lines("eval")}
    assert [*values] == [3, 6, 9, 12] and values[12] < values[9] < values[6] < values[3], values
    assert measured_again(result.folder, "--checkpoint", "best")["gap"] == pytest.approx(min(values.values()))


def test_a_class_with_update_compute_and_reset_is_a_metric(tmp_path):
    result = run(tmp_path / "run", f"+metrics.own._target_={OWN}.Plain", "max_steps=2")
    assert measured_again(result.folder)["own"] == result.lines("eval")[-1]["own"] > 0


@pytest.mark.nightly
def test_what_is_better_is_asked_for_before_training(tmp_path):
    line = ("+metrics.spread._target_=kit.parts.measures.Summed", "max_steps=3")
    for key in ("checkpoint.best=spread", "callbacks=[early_stopping] callbacks.early_stopping.metric=spread"):
        result = run(tmp_path / "run", *line, *key.split(), ok=False)
        asked = "checkpoint.best_mode" if "best" in key else "callbacks.early_stopping.mode"
        assert result.code == 2 and len(result.said) == 1 and f"write {asked}=min, or max" in result.said[0], result.out


def test_another_direction_starts_the_search_anew(tmp_path):
    line = ("eval.every_steps=3", "checkpoint.every_steps=3", "checkpoint.best=accuracy")
    run(tmp_path / "run", *line, "max_steps=6")
    again = run(tmp_path / "run", *line, "max_steps=12", "checkpoint.best_mode=min")
    assert "accuracy (min) was max accuracy: the search for the best starts again at step 6" in again.out
    best, values = json.loads((again.folder / "best.json").read_text()), again.lines("eval")
    assert best["mode"] == "min" and best["value"] == min(line["accuracy"] for line in values if line["step"] > 6)


@pytest.mark.nightly
@pytest.mark.parametrize("metric", ["Plain", "Forgetful", "Summed", "OnFirst"])
def test_a_metric_of_one_rank_s_samples_is_refused_and_one_of_all_is_exact(tmp_path, metric):
    line = (f"+metrics.own._target_={OWN}.{metric}", "max_steps=3", "eval.every_steps=3")
    alone = run(tmp_path / "alone", *line)
    two = run(tmp_path / "two", *line, ranks=2, ok=False)
    if metric in ("Summed", "OnFirst"):
        assert two.code == 0 and two.lines("eval")[-1]["own"] == pytest.approx(alone.lines("eval")[-1]["own"], rel=1e-3)
        return
    assert len(two.said) == 1 and "(measures.py:" in two.said[0], two.out
    words = ("gives own ", " on rank 0 and ", "each of the samples of its own rank", "dist_reduce_fx")
    for said in words if metric == "Plain" else ("metrics.own: Forgetful keeps seen without add_state",):
        assert said in two.said[0]
    assert not two.lines("train"), "found before the first step"


@pytest.mark.nightly
@pytest.mark.parametrize("metric", ["Seen", "Undefined", "Constant"])
def test_ranks_that_agree_by_chance_have_added_nothing_up(tmp_path, metric):
    """Equal numbers of samples, or no number on the other rank; a value that no sample changes is everybody's."""
    line = (f"+metrics.own._target_={OWN}.{metric}", "max_steps=2", "eval.every_steps=2")
    result = run(tmp_path / "run", *line, ranks=2, ok=False)
    if metric == "Constant":
        assert result.code == 0 and result.lines("eval")[-1]["own"] == 7, result.out
    else:
        said = "on 3 ranks and 96 for the same on one" if metric == "Seen" else "each of the samples of its own rank"
        assert len(result.said) == 1 and said in result.said[0], result.out
        assert not result.lines("train"), "found before the first step"


@pytest.mark.nightly
def test_a_number_that_slices_do_not_put_together_is_refused(tmp_path):
    line = (f"+metrics.own._target_={OWN}.Counting", "max_steps=2", "eval.every_steps=2")
    assert run(tmp_path / "whole", *line).lines("eval")[-1]["own"] <= 1
    result = run(tmp_path / "run", *line, "virtual_world_size=2", ok=False)
    assert result.code == 2 and "Counting keeps right without add_state (measures.py:" in result.said[0], result.out


def test_an_object_without_a_metric_s_methods_is_refused_with_its_name(tmp_path):
    result = run(tmp_path / "run", "+metrics.own._target_=kit.parts.mistakes.NoLength", "max_steps=1", ok=False)
    assert result.code == 2 and "metrics.own: NoLength has no update (mistakes.py:" in result.said[0], result.out


def evaluated(folder, **values):
    folder.mkdir(parents=True)
    lines = [
        {"kind": "eval", "step": step, "epoch": 0, **dict(zip(values, row, strict=True))}
        for step, row in enumerate(zip(*values.values(), strict=True), 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.unit
def test_the_page_and_the_table_call_the_same_run_of_a_sweep_the_best(tmp_path):
    first = evaluated(tmp_path / "sweep/a", mae=(0.1, 0.4))
    second = evaluated(tmp_path / "sweep/b", mae=(0.3, 0.2))
    for folder, value, step in ((first, 0.1, 1), (second, 0.2, 2)):
        best = {"metric": "mae", "value": value, "step": step, "mode": "min"}
        (folder / "best.json").write_text(json.dumps(best))
        (folder / "config.yaml").write_text("checkpoint: {best: mae}\n")
    chosen, _ = best_in(tmp_path / "sweep")
    assert chosen.folder == first == ranked([History.of(second), History.of(first)])[0].folder


@pytest.mark.unit
def test_a_best_json_of_before_is_read_by_the_rule_of_before(tmp_path):
    for name, metric, mode in (("a", "mae", "max"), ("b", "val_loss", "min"), ("c", "accuracy", "max")):
        folder = evaluated(tmp_path / name, **{metric: (1.0, 2.0)})
        (folder / "best.json").write_text(json.dumps({"metric": metric, "value": 2.0, "step": 2}))
        assert Result.of(folder).mode == mode


@pytest.mark.nightly
def test_a_run_of_before_is_resumed_in_the_right_direction(tmp_path):
    """It kept the largest error; from here on the smallest one is looked for."""
    line = ("+metrics.mae._target_=kit.parts.measures.Summed", "eval.every_steps=3", "checkpoint.every_steps=3")
    first = run(tmp_path / "run", *line, "max_steps=6", "checkpoint.best=mae", "checkpoint.best_mode=max")
    again = run(tmp_path / "run", *line, "max_steps=12", "checkpoint.best=mae")
    assert "mae (min) was max mae: the search for the best starts again at step 6" in again.out, again.out
    best = json.loads((again.folder / "best.json").read_text())
    assert best["value"] == min(line["mae"] for line in again.lines("eval") if line["step"] > 6)
    assert first.code == 0


@pytest.mark.unit
def test_early_stopping_forgets_what_it_waited_for_in_the_other_direction():
    class Run:
        measures = Measures({})
        said, is_evaluated_again = (), False

        def stop(self, why):
            self.said = (*self.said, why)

    made = {"metric": "gap", "patience": 2, "min_delta": 0.0}
    one, run = EarlyStopping(**made, mode="max"), Run()
    for value in (3.0, 2.0, 1.0):
        one.on_eval_end(run, {"gap": value})  # also without on_start, as in a subclass
    assert run.said and one.state()["waited"] == 2
    other, run = EarlyStopping(**made, mode="min"), Run()
    other.load(one.state())
    other.on_start(run)
    assert not run.said
    other.on_eval_end(run, {"gap": 5.0})
    assert other.state() == {"metric": "gap", "best": 5.0, "waited": 0, "mode": "min"}


@pytest.mark.unit
def test_a_sweep_without_a_loss_asks_for_what_to_compare_by(tmp_path):
    for name in ("a", "b"):
        evaluated(tmp_path / "sweep" / name, amp_mae=(0.1,), accuracy=(0.5,))
    with pytest.raises(ConfigError, match=r"measure accuracy, amp_mae and no loss: .*checkpoint.best=accuracy"):
        best_in(tmp_path / "sweep")
    assert Result.of(tmp_path / "sweep/a").values == {"amp_mae": 0.1, "accuracy": 0.5}


@pytest.mark.unit
def test_a_run_that_failed_is_behind_and_equal_ones_are_in_the_order_of_their_numbers(tmp_path):
    for name, outcome, loss in (("seed-1", "diverged", 0.1), ("seed-10", "done", 0.3), ("seed-2", "done", 0.3)):
        folder = evaluated(tmp_path / name, loss=(loss,))
        (folder / "outcome.json").write_text(json.dumps({"outcome": outcome}))
    results = [Result.of(tmp_path / name) for name in ("seed-1", "seed-10", "seed-2")]
    assert [each.folder.name for each in ranked_results(results)] == ["seed-2", "seed-10", "seed-1"]
    assert best_in(tmp_path)[0].folder.name == "seed-2"


@pytest.mark.nightly
def test_the_best_checkpoint_stays_if_a_later_attempt_does_not_look_for_one(tmp_path):
    line = ("eval.every_steps=2", "checkpoint.every_steps=2", "checkpoint.keep=2", "optimizer.lr=0.1")
    run(tmp_path / "run", *line, "max_steps=2", "checkpoint.best=loss")
    longer = run(tmp_path / "run", *line, "max_steps=12")
    best = json.loads((longer.folder / "best.json").read_text())
    assert best["step"] == 2 and Path(best["path"]).is_dir() and longer.events("resume"), longer.out
    again = run(tmp_path / "run", *line, "max_steps=14", "checkpoint.best=accuracy")
    assert "checkpoint.best=accuracy (max) was min loss: the search for the best starts again at step 12" in again.out
    assert json.loads((again.folder / "best.json").read_text())["metric"] == "accuracy"


def test_another_run_s_best_evaluation_is_not_this_run_s(tmp_path):
    line = ("eval.every_steps=2", "checkpoint.every_steps=2", "checkpoint.best=loss")
    first = run(tmp_path / "first", *line, "max_steps=6")
    other = run(
        tmp_path / "other", *line, "max_steps=10", f"checkpoint.resume={first.folder}/checkpoints/step-00000006"
    )
    assert [line["step"] for line in other.lines("eval")] == [6, 8, 10], "the first is this run's own"
    best = json.loads((other.folder / "best.json").read_text())
    assert "the search for the best starts again at step 6" in other.out
    assert best["step"] > 6 and Path(best["path"]).is_dir() and str(other.folder) in best["path"], other.out


@pytest.mark.nightly
def test_an_evaluation_that_is_made_again_costs_no_patience(tmp_path):
    line = (
        "callbacks=[early_stopping]",
        "callbacks.early_stopping.metric=accuracy",
        "callbacks.early_stopping.patience=1",
    )
    line += ("eval.every_steps=4", "checkpoint.every_steps=4", "checkpoint.best=accuracy", "optimizer.lr=0.001")
    first = run(tmp_path / "first", *line, "max_steps=4")
    other = run(tmp_path / "other", *line, "max_steps=8", f"checkpoint.resume={first.folder}/checkpoints/step-00000004")
    assert [line["step"] for line in other.lines("eval")] == [4, 8] and not other.events("stopped"), other.out
    plain = run(
        tmp_path / "plain", "eval.every_steps=4", "checkpoint.every_steps=4", "optimizer.lr=0.001", "max_steps=4"
    )
    line = (
        *line,
        "callbacks.early_stopping.min_delta=1",
        f"checkpoint.resume={plain.folder}/checkpoints/step-00000004",
    )
    counts = run(tmp_path / "counts", *line, "max_steps=20")
    assert [line["step"] for line in counts.lines("eval")] == [4, 8], "nothing had counted the first"


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_of_a_run_that_goes_on_from_another_one_is_its_own(tmp_path, ranks):
    """Also at the other run's last step, whose evaluation came after its last checkpoint and is made again here."""
    line = ("eval.every_steps=2", "checkpoint.every_steps=2", "checkpoint.keep=1")
    first = run(tmp_path / "first", *line, "max_steps=4")
    worse = ("checkpoint.accept_changes=true", "optimizer.lr=3", "max_steps=8", "checkpoint.best=loss")
    other = run(tmp_path / "other", *line, *worse, f"checkpoint.resume={first.folder}", ranks=ranks)
    best = json.loads((other.folder / "best.json").read_text())
    assert best["step"] == 4 and Path(best["path"]).is_dir() and str(other.folder) in best["path"], other.out
    refused = run(tmp_path / "third", *line, "optimizer.lr=3", f"checkpoint.resume={first.folder}", ok=False)
    assert refused.code == 2 and "step-00000004 is of another run: optimizer.lr" in refused.said[0], refused.out


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_best_evaluation_whose_checkpoint_could_not_be_written_does_not_count(tmp_path, ranks):
    """Values 1, 5, 9, 3, 6 and 1: the checkpoint of the 9 fails. The one of the 5 stays until there is that of the 6."""
    line = ("max_steps=12", "eval.every_steps=2", "checkpoint.every_steps=2", "checkpoint.keep=1", "checkpoint.best=m")
    part = ("+metrics.m._target_=kit.parts.measures.Given", "eval.sanity_batches=0")
    full = ("+callbacks.full._target_=kit.parts.callbacks.Full", "+callbacks.full.step=6")
    result = run(tmp_path / "run", *line, *part, "+metrics.m.values=[1,5,9,3,6,1]", *full, ranks=ranks)
    best = json.loads((result.folder / "best.json").read_text())
    assert len(result.events("checkpoint_failed")) == 1
    assert (best["step"], best["value"]) == (10, 6.0) and Path(best["path"]).is_dir(), result.out
    lower = run(tmp_path / "lower", *line, *part, "+metrics.m.values=[1,5,9,3,2,1]", *full, ranks=ranks)
    best = json.loads((lower.folder / "best.json").read_text())
    assert (best["step"], best["value"]) == (4, 5.0) and Path(best["path"]).is_dir(), lower.out


@pytest.mark.nightly
def test_init_from_a_sweep_starts_from_the_weights_that_it_names_or_is_refused(tmp_path):
    line = (
        "max_steps=6",
        "eval.every_steps=2",
        "checkpoint.every_steps=2",
        "checkpoint.best=m",
        "eval.sanity_batches=0",
    )
    part = ("+metrics.m._target_=kit.parts.measures.Given", "+metrics.m.values=[1,9,2]")
    (tmp_path / "sweep").mkdir()
    there = f"checkpoint.storage={tmp_path}/elsewhere"
    run(tmp_path / "sweep/a", *line, *part, there)
    best = evaluated_with(tmp_path, f"init_from={tmp_path}/elsewhere/step-00000004")
    assert evaluated_with(tmp_path, f"init_from={tmp_path}/sweep") == best
    assert evaluated_with(tmp_path, f"init_from={tmp_path}/elsewhere/step-00000006") != best
    shutil.rmtree(tmp_path / "elsewhere/step-00000004")
    refused = run(tmp_path / "refused", f"init_from={tmp_path}/sweep", "max_steps=1", ok=False)
    assert refused.code == 2 and "the best checkpoint, of step 4, is not in" in refused.said[1], refused.out


def evaluated_with(folder, first):
    """The loss after a step that changes nothing."""
    line = ("max_steps=1", "optimizer.lr=1e-12")
    return run(folder / f"init-{time.monotonic_ns()}", first, *line).lines("eval")[-1]["loss"]


@pytest.mark.unit
def test_a_run_that_failed_has_no_word_in_what_a_sweep_is_compared_by(tmp_path):
    for name, accuracy, loss in (("a", 0.9, 0.5), ("b", 0.8, 0.4), ("c", 0.1, None)):
        folder = evaluated(tmp_path / name, accuracy=(accuracy,), loss=(loss,))
        (folder / "outcome.json").write_text(json.dumps({"outcome": "done" if loss else "diverged"}))
        if loss:
            best = {"metric": "accuracy", "value": accuracy, "step": 1, "mode": "max"}
            (folder / "best.json").write_text(json.dumps(best))
    assert best_in(tmp_path)[0].folder.name == "a"


def chosen(folder, *, ranks=1, **env):
    """Return a run of kit/loops/chooses.py."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests/kit/loops/chooses.py", folder)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    line = [sys.executable, *torchrun, "-m", "chooses", "run"]
    return finish(warm.Popen(line, env=environment(**env), cwd=folder), folder / "run")


def is_of_its_lowest_loss(done):
    """Whether best.json names the evaluation with the lowest loss, whose checkpoint is there beside the newest one."""
    best, losses = json.loads((done.folder / "best.json").read_text()), done.lines("eval")
    lowest = min(losses, key=lambda line: line["loss"])
    there = {int(each.name[5:]) for each in (done.folder / "checkpoints").glob("step-*")}
    return (best["step"], best["value"]) == (lowest["step"], lowest["loss"]) and there == {
        best["step"],
        done.outcome["step"],
    }


def test_a_loop_keeps_its_best_evaluation_over_attempts_and_stops_early(tmp_path):
    whole = chosen(tmp_path / "whole")
    last = whole.outcome["step"]
    assert whole.code == 0 and last < 48 and is_of_its_lowest_loss(whole), whole.out
    found = json.loads((whole.folder / "best.json").read_text())
    best = found["step"]
    assert best == last - 16 and f"best: step {best} of {last}" in whole.out
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    inputs, targets = TEST.tensors
    loss = cross_entropy(muster.load(whole.folder, into=net, checkpoint="best")(inputs), targets)
    assert loss.item() == pytest.approx(found["value"], abs=1e-6)

    folder = tmp_path / "stopped"
    assert chosen(folder, STOP_AT="6").code == 75
    alone = chosen(folder, FORM="alone")
    losses = [line["loss"] for line in alone.lines("eval")]
    assert alone.code == 0 and losses[1] < losses[0], "a lower loss than at step 4, between two evaluations of the run"
    assert json.loads((folder / "run/best.json").read_text())["step"] == 4
    assert chosen(folder, STOP_AT=str(last - 8)).code == 75
    assert chosen(folder).sha256 == whole.sha256 and is_of_its_lowest_loss(chosen(folder))


def test_an_evaluation_after_the_checkpoint_of_its_step_is_the_best_one_after_a_death_too(tmp_path):
    whole = chosen(tmp_path / "whole", FORM="own", SAVE_EVERY="4")
    assert is_of_its_lowest_loss(whole), whole.out
    best = json.loads((whole.folder / "best.json").read_text())["step"]
    assert chosen(tmp_path / "killed", FORM="own", SAVE_EVERY="4", FAULTS=f"evaluated@{best}:0").code == -9
    again = chosen(tmp_path / "killed", FORM="own", SAVE_EVERY="4")
    assert again.events("resume")[-1]["step"] == best, again.out
    assert again.sha256 == whole.sha256 and f"best: step {best} of {whole.outcome['step']}" in again.out, again.out
    assert is_of_its_lowest_loss(again)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (
            "other",
            "best chooses by accuracy (max), and has chosen by loss (min): one evaluation of a job",
        ),
        ("twice", "at step 4: one evaluation of a job chooses the best"),
        ("score", "best=score: its name does not say whether less or more of it is better"),
    ],
)
def test_a_choice_that_is_not_clear_is_refused(tmp_path, form, said):
    done = chosen(tmp_path / "job", FORM=form)
    assert done.outcome["exit_code"] == 2 and said in done.outcome["error"], done.out


def test_a_value_on_other_data_is_not_compared_with_the_best_so_far(tmp_path):
    chosen(tmp_path / "data", STOP_AT="14")
    again = chosen(tmp_path / "data", FORM="fewer", STOP_AT="22")
    [note] = [line["text"] for line in again.events("note")]
    assert re.fullmatch(
        r"evaluate\(\): best=loss \(min\) was measured on other data at step \d+: the search .* again at step 16", note
    )
    best = json.loads((again.folder / "best.json").read_text())
    assert best["value"] == min(line["loss"] for line in again.lines("eval") if line["step"] > 14)


def test_values_on_other_data_each_time_are_compared_over_a_death_and_a_resume(tmp_path):
    whole = chosen(tmp_path / "whole", FORM="rollouts", ranks=2)
    best = json.loads((whole.folder / "best.json").read_text())
    killed = chosen(tmp_path / "killed", FORM="rollouts", ranks=2, FAULTS="stepped@7:1")
    assert killed.events("survived"), killed.out
    chosen(tmp_path / "stopped", FORM="rollouts", ranks=2, STOP_AT="14")
    again = chosen(tmp_path / "stopped", FORM="rollouts", ranks=2)
    assert again.events("resume"), again.out
    for each in (whole, killed, again):
        assert each.code == 0 and not [
            line for line in each.events("note") if "the search for the best" in line["text"]
        ]
        found = json.loads((each.folder / "best.json").read_text())
        assert (found["step"], found["value"], each.outcome["step"]) == (
            best["step"],
            best["value"],
            whole.outcome["step"],
        )
