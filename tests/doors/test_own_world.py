"""What a researcher brings, without an edit of the kit: batches, streams, objectives, optimizers, callbacks, loggers."""

import csv
import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile

import pytest
import torch
from kit import warm
from kit.job import ROOT, environment, evaluated, finish, reached, run, start, wait_for
from kit.until import until
from torch import nn

from muster.train.config.keys import Precision
from muster.train.config.parts import Part
from muster.train.data.shards import Shards
from muster.train.models.prepare import compiled_in_place
from muster.train.optim.build import build_optimizer
from muster.train.optim.schedule import build_schedule

TWO = "model._target_=kit.parts.own.Two"
SMALL = ("model.hidden=[16]", "batch_size=32", "max_steps=12")


def data(name, *more):
    return (f"data._target_=kit.parts.own.{name}", *more)


# Batches


@pytest.mark.nightly(but=["kind0-2"])
@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("kind", [("Dicts",), ("Pairs",), ("Triples", "loader.batch=kit.parts.own.split")])
def test_a_model_gets_its_inputs_by_name_or_by_place(tmp_path, kind, ranks):
    own = run(tmp_path / "own", *data(*kind), TWO, "max_steps=6", "batch_size=16", ranks=ranks)
    same = run(tmp_path / "same", *data("Dicts"), TWO, "max_steps=6", "batch_size=16")
    assert own.losses == pytest.approx(same.losses, rel=1e-5)
    assert own.lines("eval")[-1]["accuracy"] == pytest.approx(same.lines("eval")[-1]["accuracy"])


def test_samples_of_different_lengths_take_a_collate_function(tmp_path):
    line = (*data("Ragged"), "model._target_=kit.parts.own.Length", "max_steps=6")
    assert "loader.collate_fn" in run(tmp_path / "none", *line, ok=False).said[-1]
    run(tmp_path / "own", *line, "loader.collate_fn=kit.parts.own.pad")


@pytest.mark.parametrize(
    "kind, code, says",
    [
        (("Triples",), 3, "3 parts"),
        (("Bare",), 3, "Tensor"),
        (("Triples", "loader.batch=kit.parts.own.keep_three"), 3, "must return a pair"),
        (("Dicts", "+data.more=true"), 2, "no parameter index"),
        (("Dicts", "loader.batch=kit.parts.own.nothing"), 2, "nothing"),
    ],
)
def test_nothing_of_a_sample_is_lost_without_a_word(tmp_path, kind, code, says):
    result = run(tmp_path / "run", *data(*kind), TWO, "max_steps=2", ok=False)
    assert result.code == code and len(result.said) == 1 and says in result.said[0], result.out


# Streams


@pytest.mark.nightly(but=["Stateful"])
@pytest.mark.parametrize("kind", ["Numbers", "Stateful"])
def test_a_stream_gives_the_same_samples_at_every_world_size_and_after_a_resume(tmp_path, kind):
    line = (*data(kind), "virtual_world_size=3", "batch_size=16", "model.hidden=[8]", "checkpoint.every_steps=5")
    alone = run(tmp_path / "alone", *line, "max_steps=16")
    run(tmp_path / "cut", *line, "max_steps=9", ranks=3)
    resumed = run(tmp_path / "cut", *line, "max_steps=16", ranks=2)
    assert resumed.events("resume")[-1]["step"] == 9
    assert resumed.sha256 == alone.sha256


@pytest.mark.parametrize("kind", ["Numbers", "Divided"])
def test_workers_read_a_stream_alike(tmp_path, kind):
    line = (*data(kind), *SMALL)
    one, other = (run(tmp_path / str(n), *line, f"loader.num_workers={n}") for n in (0, 2))
    assert one.sha256 == other.sha256


@pytest.mark.parametrize(
    "more, code, says",
    [
        ("+data.ends=70", 3, "ends after 70"),
        ("+data.more=1", 3, "goes on after 100 samples, which is its length"),
        ("+data.known=false", 2, "__len__"),
    ],
)
def test_a_stream_that_is_not_as_long_as_it_says(tmp_path, more, code, says):
    result = run(tmp_path / "run", *data("Numbers", more), *SMALL, ok=False)
    assert result.code == code and says in result.said[-1], result.out


@pytest.mark.nightly(but=["numpy"])
@pytest.mark.parametrize("kind", ["numpy", "old", "random", "torch", "late"])
def test_a_generator_of_the_data_s_own_is_seeded_by_sample(tmp_path, kind):
    """The same samples at one and two ranks, with workers, and after a resume; nothing is left to note."""
    own = data("Drawing", f"+data.kind={kind}", "eval.every_steps=off", "virtual_world_size=2", "batch_size=8")
    line = (*own, "model.hidden=[8]", "loader.num_workers=0")
    whole = run(tmp_path / "whole", *line, "max_steps=8")
    assert not any("draws from a generator" in note["text"] for note in whole.events("note"))
    assert run(tmp_path / "two", *line, "max_steps=8", ranks=2).sha256 == whole.sha256
    assert run(tmp_path / "workers", *line, "max_steps=8", "loader.num_workers=2").sha256 == whole.sha256
    run(tmp_path / "cut", *line, "max_steps=3")
    assert run(tmp_path / "cut", *line, "max_steps=8").sha256 == whole.sha256


def test_samples_that_are_drawn_by_weights_are_the_same_at_every_world_size(tmp_path):
    more = ("eval.every_steps=off", "virtual_world_size=2", "batch_size=8", "model.hidden=[8]")
    line = data("Weighted", *more)
    whole = run(tmp_path / "whole", *line, "max_steps=8")
    run(tmp_path / "cut", *line, "max_steps=3", ranks=2)
    assert run(tmp_path / "cut", *line, "max_steps=8").sha256 == whole.sha256
    other = run(tmp_path / "cut", *line, "max_steps=9", env={"MODULUS": "2"}, ok=False)
    assert other.code == 3 and "the training data has changed" in other.said[0]
    refused = run(tmp_path / "refused", *data("Misweighted", *more), ok=False)
    assert refused.outcome["exit_code"] == 3
    assert "sample_weights of the data set (own.py:" in refused.said[0] and "has shape [2]" in refused.said[0]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_compiled_layer_leaves_no_trace_in_names(tmp_path, strategy):
    line = (*data("Dicts"), "model._target_=kit.parts.own.Compiling", "batch_size=16", f"strategy={strategy}")
    plain = run(tmp_path / "plain", *line, "max_steps=6", ranks=2)
    run(tmp_path / "cut", *line, "max_steps=2", env={"COMPILED": "1"}, ranks=2)
    for steps, env in ((4, {}), (6, {"COMPILED": "1"})):
        resumed = run(tmp_path / "cut", *line, f"max_steps={steps}", env=env, ranks=2)
        assert steps < 6 or (resumed.sha256 == plain.sha256 and resumed.weights.keys() == plain.weights.keys())


@pytest.mark.unit
def test_a_compiled_layer_with_hooks_of_its_own_keeps_them():
    layer = torch.compile(nn.Linear(2, 2), backend="eager")
    layer.register_forward_hook(lambda module, inputs, output: output * 10)
    model, inputs = nn.Sequential(layer), torch.ones(1, 2)
    before = model(inputs)
    assert torch.equal(compiled_in_place(model)(inputs), before)


def make_shards(root):
    for split, number in (("train", 3), ("val", 1)):
        (root / split).mkdir(parents=True)
        for shard in range(number):
            with tarfile.open(root / split / f"{shard:03d}.tar", "w") as tar:
                for sample in range(20):
                    name, vector = f"{shard}-{sample}", torch.randn(6, generator=torch.Generator().manual_seed(sample))
                    _add(tar, root, f"{name}.npy", lambda path, v=vector: __import__("numpy").save(path, v.numpy()))
                    _add(tar, root, f"{name}.cls", lambda path, v=vector: path.write_text(str(int(v.sum() > 0))))


def _add(tar, root, name, write):
    path = root / name
    write(path)
    tar.add(path, arcname=name)
    path.unlink()


@pytest.mark.nightly
def test_shards_have_an_index_and_any_world_size_reads_the_same(tmp_path):
    make_shards(tmp_path / "shards")
    line = ("data=shards", "data.root=shards", "data.input=npy", "data.num_classes=2", "virtual_world_size=2", *SMALL)
    one, two = run(tmp_path / "one", *line), run(tmp_path / "two", *line, ranks=2)
    assert one.sha256 == two.sha256 and (tmp_path / "shards/train/muster-index.json").exists()
    missing = run(tmp_path / "x", *line, "data.target=json", ok=False)
    assert missing.code == 3 and "has no .json: it has npy, cls" in missing.said[-1]
    with (tmp_path / "shards/val/000.tar").open("r+b") as file:
        file.truncate(700)
    torn = run(tmp_path / "y", *line, ok=False)
    assert torn.code == 3 and "val/000.tar" in torn.said[-1], torn.out


@pytest.mark.unit
def test_an_index_of_shards_that_does_not_fit_them_is_made_anew(tmp_path):
    """One offset that was changed, and shards of the same size with other samples: both gave other bytes without a word."""
    root = tmp_path / "shards"
    make_shards(root)
    Shards.prepare(str(root))
    kept = root / "train/muster-index.json"

    def samples():
        shards = Shards(True, root=str(root), input="npy", target="cls", image_size=None, num_classes=2)
        return [(vector.tolist(), label) for vector, label in shards]

    before, found = samples(), json.loads(kept.read_text())
    shard, files = found["samples"][5]
    kept.write_text(
        json.dumps(
            {
                **found,
                "samples": [
                    *found["samples"][:5],
                    [shard, files | {"npy": found["samples"][6][1]["npy"]}],
                    *found["samples"][6:],
                ],
            }
        )
    )
    assert samples() == before
    for text in ("", "[]", json.dumps({**found, "samples": None}), kept.read_text()[:-40]):
        kept.write_text(text)
        assert samples() == before
    Shards.prepare(str(root))
    first, second = root / "train/000.tar", root / "train/001.tar"
    assert first.stat().st_size == second.stat().st_size
    with tarfile.open(second) as tar:
        turned = list(reversed(tar.getmembers()))
        contents = [tar.extractfile(member).read() for member in turned]
    with tarfile.open(first, "w") as tar:
        for member, content in zip(turned, contents, strict=True):
            tar.addfile(member, io.BytesIO(content))
    assert first.stat().st_size == found["shards"]["000.tar"][0]
    now = samples()
    Shards.prepare(str(root))
    assert now == samples() and now != before and sorted(now[:20]) == sorted(before[20:40])


# Objectives, optimizers, schedules


def test_an_objective_may_be_a_function(tmp_path):
    own = run(tmp_path / "own", "objective._target_=kit.parts.own.squared", *SMALL)
    assert own.lines("eval")[-1].keys() == {"kind", "step", "epoch", "loss"}
    run(tmp_path / "torch", "objective._target_=torch.nn.functional.cross_entropy", *SMALL)


@pytest.mark.nightly
def test_metrics_of_ones_own_are_exact_over_ranks(tmp_path):
    f1 = ("+metrics.f1._target_=torchmetrics.F1Score", "+metrics.f1.task=multiclass", "+metrics.f1.num_classes=10")
    line = (*f1, "+metrics.f1.average=macro", "virtual_world_size=3", "epochs=1")
    one, three = (run(tmp_path / str(n), *line, ranks=n).lines("eval")[-1] for n in (1, 3))
    assert one == three and 0.5 < one["f1"] < 1


def test_training_batches_are_measured_where_asked(tmp_path):
    lines = run(tmp_path / "run", *SMALL, "log.train_metrics=true", "log.progress=plain", ranks=2).lines("train")
    assert all(0 <= line["accuracy"] <= 1 for line in lines) and lines[-1]["accuracy"] > lines[0]["accuracy"]


@pytest.mark.unit
def test_groups_of_parameters_have_values_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"match": "*.bias", "weight_decay": 0.0}, {"match": ["1"], "lr": 0.5}]
    part = Part("optimizer", "torch.optim.AdamW", {"lr": 0.1, "weight_decay": 0.2}, {"groups": groups})
    optimizer = build_optimizer(part, model.named_parameters(), precision=Precision.fp32)
    found = [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(2, 0.1, 0.0), (1, 0.5, 0.2), (1, 0.1, 0.2)]


@pytest.mark.nightly
def test_groups_are_in_checkpoints_and_follow_the_schedule(tmp_path):
    line = (
        *SMALL,
        "optimizer=adamw",
        "optimizer.groups=[{match:'*.bias',weight_decay:0.0,lr:0.01}]",
        "scheduler=cosine",
    )
    whole = run(tmp_path / "whole", *line)
    run(tmp_path / "cut", *line, "max_steps=12", "checkpoint.every_steps=5", ranks=2)
    shutil.rmtree(tmp_path / "cut/checkpoints/step-00000012")
    outcome = json.loads((tmp_path / "cut/outcome.json").read_text())
    outcome["checkpoint"] = {"step": 10, "path": str(tmp_path / "cut/checkpoints/step-00000010")}
    (tmp_path / "cut/outcome.json").write_text(json.dumps(outcome))
    assert run(tmp_path / "cut", *line).losses == pytest.approx(whole.losses, rel=1e-4)
    refused = run(tmp_path / "no", *SMALL, "optimizer.groups=[{match:heads,lr:0.1}]", ok=False)
    assert refused.code == 2 and "heads" in refused.said[-1]


def test_a_factory_may_want_the_names_of_parameters(tmp_path):
    run(tmp_path / "run", *SMALL, "optimizer._target_=kit.parts.own.factory", "optimizer.lr=0.1")


def test_torchs_schedules_are_functions_of_the_step(tmp_path):
    part = Part("scheduler", "torch.optim.lr_scheduler.OneCycleLR", {"max_lr": 0.4})
    ours = build_schedule(part, lr=0.1, total_steps=20, steps_per_epoch=5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step() if len(expected) < 20 else None
    assert [0.1 * ours(step) for step in (19, *range(20))] == pytest.approx([expected[19], *expected])
    line = ("scheduler._target_=torch.optim.lr_scheduler.ExponentialLR", "+scheduler.gamma=0.5", *SMALL)
    assert [each["lr"] for each in run(tmp_path / "run", *line).lines("train")[:3]] == pytest.approx([0.1, 0.05, 0.025])
    own = run(tmp_path / "own", "scheduler._target_=kit.parts.own.halve", *SMALL)
    assert own.lines("train")[2]["lr"] == pytest.approx(0.025)


# Callbacks


def test_an_average_is_evaluated_saved_and_resumed_exactly(tmp_path):
    line = (
        "callbacks=[ema]",
        "callbacks.ema.decay=0.9",
        "eval.every_steps=5",
        "max_steps=20",
        "checkpoint.every_steps=7",
    )
    whole = run(tmp_path / "whole", *line, ranks=2)
    run(tmp_path / "cut", *line, "max_steps=9", ranks=2)
    resumed = run(tmp_path / "cut", *line, ranks=2)
    assert resumed.sha256 == whole.sha256
    plain = run(tmp_path / "plain", *line[2:], ranks=2)
    assert plain.losses == whole.losses and plain.sha256 != whole.sha256  # training itself goes on undisturbed
    assert evaluated(tmp_path / "whole")["accuracy"] == whole.lines("eval")[-1]["accuracy"]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp", "zero"])
def test_an_average_of_sharded_weights(tmp_path, strategy):
    line = ("callbacks=[ema]", "callbacks.ema.decay=0.9", "max_steps=8", "optimizer=adamw", "grad_clip=null")
    plain = run(tmp_path / "ddp", *line)
    sharded = run(tmp_path / "own", *line, f"strategy={strategy}", ranks=2)
    for name, value in plain.weights.items():
        torch.testing.assert_close(sharded.weights[name], value, rtol=1e-3, atol=1e-5)


def test_an_average_is_refused_where_ranks_differ(tmp_path):
    refused = run(tmp_path / "run", "callbacks=[ema]", "strategy=local_sgd", "max_steps=4", ranks=2, ok=False)
    assert refused.code != 0 and "callbacks" in refused.out


def test_a_preemption_in_the_middle_of_an_evaluation_saves_the_weights_and_not_their_average(tmp_path):
    line = ("callbacks=[ema]", "callbacks.ema.decay=0.9", "eval.every_steps=4", "max_steps=9")
    slow = ("objective._target_=kit.parts.objectives.SlowToMeasure",)
    whole = run(tmp_path / "whole", *line)
    process = start(tmp_path / "cut", *line, *slow, "checkpoint.accept_changes=true")
    wait_for(tmp_path / "cut", reached(4), process=process)
    process.send_signal(signal.SIGTERM)
    assert finish(process, tmp_path / "cut").code == 75
    resumed = run(tmp_path / "cut", *line, "checkpoint.accept_changes=true")
    assert resumed.losses == whole.losses and resumed.sha256 == whole.sha256


def test_training_stops_when_it_gets_no_better(tmp_path):
    line = ("callbacks=[early_stopping]", "callbacks.early_stopping.patience=2", "eval.every_steps=5", "optimizer.lr=0")
    stopped = run(tmp_path / "run", *line, "max_steps=100", ranks=2)
    assert [each["step"] for each in stopped.lines("eval")] == [5, 10, 15] and stopped.outcome["outcome"] == "done"
    again = run(tmp_path / "run", *line, "max_steps=100", ranks=2)
    assert again.outcome["outcome"] == "done" and again.lines("train")[-1]["step"] == 15
    more = run(tmp_path / "run", *line, "max_steps=100", "callbacks.early_stopping.patience=4")
    assert more.lines("train")[-1]["step"] == 25
    refused = run(tmp_path / "no", *line, "callbacks.early_stopping.metric=acc", "max_steps=9", ok=False)
    assert refused.code == 2 and "accuracy, loss" in refused.said[-1]


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    line = ("checkpoint.best=loss", "checkpoint.keep=1", "checkpoint.every_steps=10", "eval.every_steps=5")
    result = run(tmp_path / "run", *line, "max_steps=40", "optimizer.lr=2", "scheduler._target_=kit.parts.own.halve")
    values = {each["step"]: each["loss"] for each in result.lines("eval")}
    best = json.loads((tmp_path / "run/best.json").read_text())
    assert values[best["step"]] == min(values.values()) == best["value"]
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{best['step']:08d}", "step-00000040"})
    assert evaluated(tmp_path / "run", "--checkpoint", "best")["loss"] == pytest.approx(best["value"])


def test_a_profile_is_a_trace_of_each_rank(tmp_path):
    run(tmp_path / "run", "profile=true", *SMALL, ranks=2)
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"run/profile/rank-{rank:05d}-step-5.json").read_text())
        assert any("sgd" in event.get("name", "").lower() for event in trace["traceEvents"])


# Loggers


@pytest.mark.nightly
def test_other_tools_loggers_go_on_with_the_same_run(tmp_path):
    line = (
        "loggers=[csv,wandb,mlflow]",
        "loggers.wandb.mode=offline",
        "checkpoint.every_steps=4",
        "eval.every_steps=4",
        *SMALL,
    )
    for steps in (6, 12):
        result = run(tmp_path / "run", *line, f"max_steps={steps}")
        assert "continues without it" not in result.out, result.out
    rows = list(csv.DictReader((tmp_path / "run/train.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [float(row["loss"]) for row in rows] == list(result.losses.values())
    mlflow = pytest.importorskip("mlflow.tracking").MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    kept = (tmp_path / "run/mlflow-run-id").read_text()
    points = mlflow.get_metric_history(kept, "train/loss")
    assert [point.step for point in points] == list(range(1, 13)) and mlflow.get_run(kept).info.status == "FINISHED"
    runs = [path.name for path in (tmp_path / "run/wandb").glob("offline-run-*")]
    assert len(runs) == 2 and len({name.rpartition("-")[2] for name in runs}) == 1  # one run there, in two parts


@pytest.mark.nightly
def test_a_logger_that_cannot_begin_does_not_end_the_run(tmp_path):
    result = run(tmp_path / "run", "loggers=[mlflow]", "loggers.mlflow.uri=sqlite:////dev/null/x.db", *SMALL)
    assert "loggers.mlflow cannot start" in result.out and result.outcome["outcome"] == "done"


@pytest.mark.nightly
def test_mlflows_store_of_files_is_refused_in_one_line(tmp_path):
    pytest.importorskip("mlflow.tracking")
    uri = f"loggers.mlflow.uri=file:{tmp_path}/mlruns"
    result = run(tmp_path / "run", "loggers=[mlflow]", uri, *SMALL, ok=False)
    [told] = result.said
    assert result.code == 2 and "use loggers.mlflow.uri=sqlite:///PATH/mlflow.db, or leave it out" in told, told


# Modes


def test_a_run_is_measured_again(tmp_path):
    trained = run(tmp_path / "run", "epochs=2", "checkpoint.every_steps=10", "checkpoint.keep=9")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = evaluated(tmp_path / "run")
    assert again["accuracy"] == trained.lines("eval")[-1]["accuracy"]
    assert evaluated(tmp_path / "run", ranks=2)["accuracy"] == again["accuracy"]
    early = evaluated(tmp_path / "run", "--checkpoint", "10", "--split", "train", "eval.max_samples=200")
    assert early["weights"].endswith("step-00000010") and early["split"] == "train"
    assert (again["samples"], early["samples"]) == (360, 200)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


@pytest.mark.nightly(but=["buffers", "average"])
@pytest.mark.parametrize(
    "parts",
    [
        ("model._target_=kit.parts.state.Keeping",),
        ("model._target_=kit.parts.state.Late",),
        ("model._target_=kit.parts.state.Recalling",),
        ("model._target_=kit.parts.state.Recalling", "+model.bare=true"),
        ("objective._target_=kit.parts.state.Centred",),
        ("model._target_=kit.parts.state.Tied", "callbacks=[ema]", "callbacks.ema.decay=0.9"),
        ("scheduler=cosine", "scheduler.warmup_steps=2"),
    ],
    ids=["buffers", "late buffers", "extra state", "extra tensor", "objective", "average", "warm-up"],
)
def test_a_run_is_measured_again_with_all_that_it_evaluated_with(tmp_path, parts):
    """In the end, and at a checkpoint of before: not with the parameters alone."""
    trained = run(tmp_path / "run", *parts, "max_steps=8", "eval.every_steps=4", "checkpoint.every_steps=4")
    then, now = (each["loss"] for each in trained.lines("eval"))
    assert evaluated(tmp_path / "run")["loss"] == pytest.approx(now, rel=1e-6)
    assert evaluated(tmp_path / "run", "--checkpoint", "4")["loss"] == pytest.approx(then, rel=1e-6)


@pytest.mark.nightly
def test_weights_that_are_not_the_whole_are_measured_with_a_word(tmp_path):
    """What `model.pt` lacks is in the newest checkpoint; where that is gone, a line says what is missing."""
    run(tmp_path / "run", "model._target_=kit.parts.state.Keeping", "max_steps=4")
    assert evaluated(tmp_path / "run", ranks=2)["weights"].endswith("step-00000004")
    shutil.rmtree(tmp_path / "run/checkpoints")
    line = [sys.executable, "-m", "train.evaluate", str(tmp_path / "run")]
    done = warm.completed(line, env=environment(), cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count("model.pt has no unsaved") == 1, done.stderr


def test_what_was_left_out_of_anothers_weights_is_measured_as_it_was_trained(tmp_path):
    first = run(tmp_path / "first", *SMALL)
    tuned = run(tmp_path / "tuned", *SMALL, f"init_from={first.folder}", "init_ignore=['3']")
    assert evaluated(tmp_path / "tuned")["loss"] == pytest.approx(tuned.lines("eval")[-1]["loss"], rel=1e-6)


@pytest.mark.nightly
def test_checkpoints_are_measured_where_they_were_saved(tmp_path):
    """Of a run that has moved to another storage, not those of before."""
    line = (*SMALL, "checkpoint.every_steps=4", "eval.every_steps=4", "checkpoint.best=loss", "checkpoint.keep=9")
    run(tmp_path / "run", *line, "max_steps=4")
    shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "store")
    trained = run(tmp_path / "run", *line, f"checkpoint.storage={tmp_path}/store", "checkpoint.accept_changes=true")
    values = {each["step"]: each["loss"] for each in trained.lines("eval")}
    for checkpoint, step in (("newest", 12), ("8", 8), ("best", min(values, key=values.get))):
        again = evaluated(tmp_path / "run", "--checkpoint", checkpoint)
        assert again["weights"] == f"{tmp_path}/store/step-{step:08d}"
        assert again["loss"] == pytest.approx(values[step], rel=1e-6)


def test_training_begins_with_the_average_of_another(tmp_path):
    """Of a checkpoint as of `model.pt`: with what was evaluated there."""
    first = run(tmp_path / "first", *SMALL, "callbacks=[ema]", "callbacks.ema.decay=0.9")
    (first.folder / "model.pt").rename(tmp_path / "model.pt")
    same = run(tmp_path / "same", *SMALL, f"init_from={first.folder}", "optimizer.lr=0")
    for name, value in torch.load(tmp_path / "model.pt", weights_only=True).items():
        assert torch.equal(same.weights[name], value)


FROZEN = ("model._target_=kit.parts.models.Backbone", "freeze=[backbone]", "batch_size=32", "eval.every_steps=1")


@pytest.mark.nightly(but=["ddp"])
@pytest.mark.parametrize(
    "how, ranks",
    [((), 2), (("virtual_world_size=2",), None), (("strategy=fsdp",), 2), (("strategy=pipeline",), 2)],
    ids=["ddp", "slices", "fsdp", "pipeline"],
)
def test_frozen_modules_stay_in_evaluation_mode(tmp_path, how, ranks):
    whole = run(tmp_path / "whole", *FROZEN, *how, "max_steps=4", "+model.drop=0", ranks=ranks)
    run(tmp_path / "cut", *FROZEN, *how, "max_steps=2", ranks=ranks)
    cut = run(tmp_path / "cut", *FROZEN, *how, "max_steps=4", ranks=ranks)
    assert cut.losses == whole.losses, "dropout drops nothing, also after a resume"
    assert not cut.weights["backbone.1.running_mean"].any() and not cut.weights["backbone.1.num_batches_tracked"]
    said = [note["text"] for note in whole.events("note") if "frozen_mode" in note["text"]]
    assert said == ["frozen modules stay in evaluation mode: backbone; frozen_mode=train trains them as the others"]


def test_frozen_modules_train_where_that_is_asked_for_and_those_that_train_in_part_always_do(tmp_path):
    for name, more in (("asked", ("frozen_mode=train",)), ("part", ("freeze=[backbone.0]",))):
        result = run(tmp_path / name, *FROZEN, *more, "max_steps=2")
        assert result.weights["backbone.1.running_mean"].any(), name
        assert not any("frozen_mode" in note["text"] for note in result.events("note"))


@pytest.mark.nightly
def test_training_begins_with_the_weights_of_another(tmp_path):
    first = run(tmp_path / "first", *SMALL)
    tuned = run(tmp_path / "tuned", *SMALL, f"init_from={first.folder}", "freeze=['1']", "optimizer.lr=0.01", ranks=2)
    assert torch.equal(tuned.weights["1.weight"], first.weights["1.weight"])
    assert not torch.equal(tuned.weights["3.weight"], first.weights["3.weight"])
    kept = first.weights
    (first.folder / "model.pt").unlink()  # then of its newest checkpoint
    same = run(tmp_path / "same", *SMALL, f"init_from={first.folder}", "optimizer.lr=0")
    assert torch.equal(same.weights["1.weight"], kept["1.weight"])
    wider = ("model.hidden=[16,8]", "batch_size=32", "max_steps=3")
    refused = run(tmp_path / "no", *wider, f"init_from={tuned.folder}", ok=False)
    assert refused.code == 2 and "init_ignore=[3,5]" in refused.said[-1], refused.out
    yes = run(tmp_path / "yes", *wider, f"init_from={tuned.folder}", "init_ignore=['3','5']")
    assert evaluated(yes.folder)["loss"] == yes.lines("eval")[-1]["loss"], "all weights of the run are its own"


def test_weights_that_do_not_fit_are_named_and_never_left_out_of_an_evaluation(tmp_path):
    trained = run(tmp_path / "run", *SMALL)
    line = [sys.executable, "-m", "train.evaluate", str(trained.folder), "model.hidden=[8]"]
    done = warm.completed(line, cwd=tmp_path, env=environment())
    said = done.stderr.splitlines()
    assert done.returncode == 2 and len(said) == 1 and "init_" not in said[0], done.stderr
    assert "1.weight is [16, 64] there and [8, 64] in this model (3 such names), in 1, 3" in said[0]


@pytest.mark.nightly
def test_weights_by_url_are_read_once_for_a_host(tmp_path):
    first = run(tmp_path / "first", *SMALL)
    env = {"TORCH_HOME": str(tmp_path / "home")}
    url = (first.folder / "model.pt").as_uri()
    tuned = run(tmp_path / "tuned", *SMALL, f"init_from={url}", "freeze=['1','3.bias']", ranks=2, env=env, cold=True)
    assert torch.equal(tuned.weights["1.weight"], first.weights["1.weight"])


# A name of its own


@pytest.mark.nightly
def test_muster_runs_the_kit_where_a_project_has_a_train_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('theirs')\n")
    (tmp_path / "mine.py").write_text("from kit.parts.own import Dicts, Two\n")
    line = ["muster", "output_dir=run", "max_steps=2", "data._target_=mine.Dicts", "model._target_=mine.Two"]
    for launcher in ([], ["torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m"]):
        done = subprocess.run(
            [sys.executable, "-m", *launcher, *line],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and "theirs" not in done.stdout + done.stderr, done.stderr
    tool = [sys.executable, "-m", "muster", "evaluate", "run"]
    done = warm.completed(tool, cwd=tmp_path, env=environment())
    assert done.returncode == 0 and "accuracy" in done.stdout, done.stderr


@pytest.mark.nightly
def test_a_sweep_ends_with_a_table_of_its_jobs(tmp_path):
    line = [sys.executable, "-m", "train", "-m", "name=grid", "optimizer.lr=0.1,0.2", "max_steps=3", "+own.width=8"]
    line += ["model.hidden=[${own.width}]", "log.progress=none"]
    env = environment(COLUMNS="120")
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rate in ("0.1", "0.2"):
        assert f"│ {rate} " in done.stdout and "accuracy" in done.stdout and "runs: runs/grid" in done.stdout
        assert torch.load(tmp_path / f"runs/grid/lr-{rate}/model.pt")["1.weight"].shape == (8, 64)


# Mistakes


@pytest.mark.parametrize(
    "line, code, says",
    [
        (("optimizer.lr=-1",), 2, "Invalid learning rate"),
        (data("Labels", "+data.kind=far"), 3, "label 7"),
        (data("Labels", "+data.kind=wide"), 3, "[64, 3]"),
        (data("Labels", "+data.kind=float"), 3, "float32"),
        (data("Labels", "+data.kind=broken"), 3, "cannot parse line 7 (own.py:"),
        (("model._target_=breaks.Net",), 2, "importing breaks failed: KeyError: 'HOME_OF_DATA' (breaks.py:1)"),
        (("--epochs", "5"), 2, "write epochs=5"),
        (("--optimizer.lr=5",), 2, "write optimizer.lr=5"),
        (("name=",), 2, "name is empty"),
        (("+optimizer.lr=1",), 2, "write optimizer.lr=1"),
        (("optimizer._target_=torch.optim.LBFGS",), 2, "closure"),
        (("scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",), 2, "a function of the step"),
        (("callbacks.mine._target_=kit.parts.own.Two",), 2, "callbacks"),
        (("+callbacks.mine._target_=kit.parts.own.Two",), 2, "is not a callback"),
        (("freeze=[heads]",), 2, "freeze=heads matches no parameter"),
        (("init_from=nowhere.pt",), 2, "nowhere.pt does not exist"),
        (("checkpoint.best=acc",), 2, "accuracy, loss"),
        (("objective=model_loss",), 2, "model's own loss"),
    ],
)
def test_mistakes_are_one_line(tmp_path, line, code, says):
    (tmp_path / "breaks.py").write_text("raise KeyError('HOME_OF_DATA')\n")
    result = run(tmp_path / "run", "max_steps=2", *line, ok=False)
    assert result.code == code and len(result.said) == 1 and says in result.said[0], result.out
    assert "Traceback" not in result.out


@pytest.mark.nightly
def test_a_parameter_that_gets_no_gradient_is_named(tmp_path):
    line = (*data("Labels", "+data.kind=good"), "model._target_=kit.parts.own.Unused", "max_steps=4")
    result = run(tmp_path / "run", *line, ranks=2, ok=False)
    assert "unused.weight, unused.bias got no gradient" in result.out and "find_unused_parameters=true" in result.out
    run(tmp_path / "yes", *line, "strategy.find_unused_parameters=true", ranks=2)


def test_a_batch_larger_than_the_data_is_said(tmp_path):
    result = run(tmp_path / "run", "batch_size=5000", "max_steps=1")
    assert "batch_size=5000 is more than the 1437 training samples: a step takes all of them" in result.out
    assert result.events("note") and not result.said


def test_the_same_error_at_the_same_step_is_not_tried_again(tmp_path):
    line = ("model._target_=kit.parts.own.Buggy", "max_steps=9")
    result = run(tmp_path / "run", *line, ranks=1, torchrun=("--max-restarts=9",), ok=False)
    assert len(result.events("start")) == 2 and result.outcome["exit_code"] == 7, result.out
    assert "AttributeError: no such thing: the same error at the same place" in result.outcome["error"]
    assert "in forward" in result.outcome["traceback"]


def test_a_run_whose_folder_is_deleted_ends(tmp_path):
    line = ("max_steps=100000", "checkpoint.every_steps=50", "eval.every_steps=off", "log.every_steps=10")
    process = start(tmp_path / "run", *line)
    wait_for(tmp_path / "run", reached(20), process=process)

    def is_deleted():  # a checkpoint that is being written may put a file where one was just deleted
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return not (tmp_path / "run").exists()

    until(is_deleted, "end of the folder", timeout_s=30)
    ended = finish(process, tmp_path / "run", timeout_s=60)
    assert ended.code == 5 and "no longer exists" in ended.said[-1], ended.out


@pytest.mark.nightly
def test_submit_without_slurm(tmp_path):
    line = [sys.executable, str(ROOT / "slurm/submit.py"), "cluster.nodes=2"]
    env = {**environment(), "PATH": "/nowhere"}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("muster: config error: ") and "cluster=local" in done.stderr
    assert "Traceback" not in done.stderr


# Examples


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, experiment, measured",
    [
        ("huggingface", "gpt2", lambda line: line["loss"] < 3.5),
        ("segmentation", "segmentation", lambda line: line["iou"] > 0.85 and line["pixels"] > 0.95),
        ("stream", "stream", lambda line: line["accuracy"] > 0.9),
        ("gan", "gan", lambda line: line["loss"] < 0.25),
    ],
)
def test_an_example_is_a_project_of_its_own(tmp_path, name, experiment, measured):
    """Two ranks, cut short and resumed."""
    shutil.copytree(ROOT / "examples" / name, tmp_path / "project")
    line = (f"+experiment={experiment}", "--config-dir", "conf")
    project = {"cwd": tmp_path / "project"}
    whole = run(tmp_path / "whole", *line, ranks=2, **project)
    assert measured(whole.lines("eval")[-1]), whole.lines("eval")
    run(tmp_path / "cut", *line, "max_steps=25", ranks=2, **project)
    resumed = run(tmp_path / "cut", *line, "max_steps=30", "checkpoint.accept_changes=true", ranks=2, **project)
    assert resumed.events("resume")[-1]["step"] == 25 and resumed.lines("train")[-1]["step"] == 30
