"""Every mistake gives one line that says what was given, what is valid and what to do, and the contract's exit code."""

import errno
import os
import re
import socket
import subprocess
import sys

import pytest
import test_checkpoint
import test_mistakes
from kit.job import ROOT, environment, finish, free_port, run, start

from muster.errors import storage_error

MISTAKES = {
    "unknown key": (["epoch=3"], 2, "epoch", "epochs"),
    "key of another place": (["lr=3"], 2, "lr", "optimizer.lr"),
    "nested key": (["optimizer.lrr=3"], 2, "lrr", "lr"),
    "unknown model": (["model=resnt18"], 2, "resnt18", "resnet18"),
    "unknown group": (["modell=mlp"], 2, "modell", "model"),
    "unknown experiment": (["+experiment=mnist"], 2, "mnist", "mnist_mlp"),
    "wrong type": (["epochs=many"], 2, "many", "epochs"),
    "wrong choice": (["precision=fp8"], 2, "fp8", "bf16"),
    "negative batch": (["batch_size=-8"], 2, "batch_size=-8", "at least 1"),
    "a rate that is not a number": (["optimizer.lr=nan"], 2, "optimizer.lr=nan", "not a finite number"),
    "no such folder of yaml files": (["+experiment=mine", "--config-dir", "nowhere"], 2, "nowhere", "give the folder"),
    "impossible value": (["batch_size=0"], 2, "batch_size=0", "at least 1"),
    "impossible in a component": (["strategy.bucket_cap_mb=-1"], 2, "bucket_cap_mb", "above 0"),
    "no such module": (["model._target_=nowhere.Net"], 2, "nowhere", "install"),
    "no such class": (["model._target_=kit.parts.models.Statefull"], 2, "Statefull", "Stateful"),
    "no such parameter": (["model._target_=kit.parts.models.Stateful", "+model.width=3"], 2, "width", "input_shape"),
    "not an override": (["epochs"], 2, "epochs", "key=value"),
    "no such device": (["device=cuda"], 2, "device=cuda", "device=cpu"),
    "another option's key": (
        ["model=resnet18", "model.num_layers=3"],
        2,
        "a key of model=gpt or model=vit",
        "+model.num_layers",
    ),
    "no such gpu": (["gpus=[0]"], 2, "gpus=[0]", "device=cpu"),
    "backend for another device": (["dist.backend=nccl"], 2, "nccl", "gloo"),
    "model for other data": (["model=gpt"], 2, "gpt", "data=text"),
    "objective for another model": (["data=text", "model=gpt"], 2, "classification", "language_modeling"),
    "nothing to train": (["model._target_=kit.parts.models.Frozen"], 2, "no trainable parameter", ""),
    "warm-up past the end": (
        ["scheduler=cosine", "scheduler.warmup_steps=50", "max_steps=5"],
        2,
        "warmup_steps=50",
        "5 steps",
    ),
    "missing folder": (["data=imagefolder", "data.root=/nowhere"], 3, "/nowhere/train", "data.root"),
    "no text": (["data=text", "data.root=/nowhere"], 3, "nowhere", "data.root"),
    "no network": (["data=mnist", "data.root=empty"], 3, "place the files", "data.root"),
    "no checkpoint there": (["checkpoint.resume=/nowhere"], 2, "/nowhere", "auto, never"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(tmp_path, name):
    overrides, code, given, remedy = MISTAKES[name]
    result = run(tmp_path / "run", *overrides, ok=False)
    assert result.code == code, result.out
    assert len(result.said) == 1 and given in result.said[0] and remedy in result.said[0], result.out
    assert "Traceback" not in result.out
    assert result.out.splitlines()[-1] == result.said[0], "something comes after it"
    assert result.seconds < 40


@pytest.mark.parametrize("name", ["unknown model", "no such device", "no network", "no such class"])
def test_it_is_said_once_for_all_ranks(tmp_path, name):
    overrides, code, given, remedy = MISTAKES[name]
    result = run(tmp_path / "run", *overrides, ranks=3, ok=False)
    assert len(result.said) == 1 and given in result.said[0] and remedy in result.said[0], result.out
    assert len(re.findall(rf"exitcode  : {code} ", result.out)) == 3, result.out
    assert 'File "' not in "".join(
        line for line in result.out.splitlines() if "site-packages" not in line and "runpy" not in line
    )
    assert result.seconds < 60, "somebody waited for something"


def test_an_unwritable_folder(tmp_path):
    """Root may write anywhere, so a file stands where the folder should be."""
    (tmp_path / "file").write_text("")
    result = run(tmp_path / "file" / "run", "max_steps=2", ranks=2, ok=False, cwd=tmp_path)
    assert len(result.said) == 1 and "storage error" in result.said[0] and str(tmp_path / "file") in result.said[0], (
        result.out
    )
    assert "exitcode  : 5 " in result.out


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
def test_a_read_only_folder(tmp_path):
    mount = f"mount -t tmpfs -o ro none '{tmp_path}' && exec \"$@\""
    line = [
        "unshare",
        "-m",
        "sh",
        "-c",
        mount,
        "sh",
        sys.executable,
        "-m",
        "train",
        f"output_dir={tmp_path / 'run'}",
        "max_steps=2",
    ]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 5, done.stderr
    assert "Read-only file system" in done.stderr and "Traceback" not in done.stderr
    assert f"cannot use output_dir: {tmp_path / 'run'}: " in done.stderr


@pytest.mark.unit
def test_an_error_of_storage_names_what_the_user_knows(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    draft = OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / ".draft-12.claim-2"))
    for error in (full, draft):
        said = str(storage_error("use output_dir:", error, tmp_path))
        assert said.startswith(f"cannot use output_dir: {tmp_path}: {error.strerror};"), said
    assert str(storage_error("write timing.jsonl:", full)).startswith("cannot write timing.jsonl: No space")
    assert str(storage_error("read:", OSError(2, "No such file", "x"))).startswith("cannot read: x: No such file")


def bare_rank(folder, rank, world_size, port, *overrides):
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return start(folder, *overrides, env=env)


def test_too_few_processes(tmp_path):
    port = free_port()
    ranks = [bare_rank(tmp_path / "run", rank, 3, port, "dist.start_timeout_s=20") for rank in (0, 2)]
    results = [finish(process, tmp_path / "run", timeout_s=55) for process in ranks]
    assert [result.code for result in results] == [2, 2]
    assert "2 of 3 ranks arrived" in results[0].said[0] and "missing: 1" in results[0].said[0]
    assert not results[1].said


def test_ranks_that_disagree(tmp_path):
    port = free_port()
    ranks = [bare_rank(tmp_path / "run", rank, 2, port, f"optimizer.lr={lr}") for rank, lr in enumerate((0.1, 0.2))]
    results = [finish(process, tmp_path / "run", timeout_s=60) for process in ranks]
    assert [result.code for result in results] == [2, 2]
    assert "optimizer.lr=0.2 (rank 0: 0.1)" in results[0].said[0] and "rank 1" in results[0].said[0]
    assert not results[1].said


def test_a_mistake_on_one_rank_alone_ends_all(tmp_path):
    port = free_port()
    ranks = [bare_rank(tmp_path / "run", rank, 2, port, override) for rank, override in enumerate(("seed=1", "sead=1"))]
    results = [finish(process, tmp_path / "run", timeout_s=60) for process in ranks]
    assert [result.code for result in results] == [2, 2]
    assert "rank 1" in results[0].said[0] and "sead" in results[0].said[0]


def test_a_master_that_does_not_resolve(tmp_path):
    """At once: there is nothing to wait for."""
    env = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "no-such-host.invalid",
        "MASTER_PORT": "29500",
    }
    started = start(tmp_path / "run", "dist.start_timeout_s=300", env=env)
    result = finish(started, tmp_path / "run", timeout_s=30)
    assert result.code == 2 and "no-such-host.invalid" in result.said[0], result.out


def test_an_exception_in_one_rank_is_the_first_cause(tmp_path):
    result = run(tmp_path / "run", "model._target_=kit.parts.models.Crashing", "max_steps=5", ranks=2, ok=False)
    outcome = result.outcome
    assert outcome["outcome"] == "failed" and outcome["rank"] == 1
    assert "the user's own mistake" in outcome["error"] and "parts/models.py" in outcome["traceback"]
    assert outcome["failed_host"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_not_a_number_stops_the_run(tmp_path, ranks):
    result = run(
        tmp_path / "run",
        "model._target_=kit.parts.models.Exploding",
        "checkpoint.every_steps=1",
        "max_steps=9",
        ranks=ranks,
        ok=False,
    )
    assert result.outcome["outcome"] == "diverged" and result.outcome["exit_code"] == 6
    assert len(result.said) == 1 and "step 4" in result.said[0], result.out
    assert sorted(path.name for path in (result.folder / "checkpoints").iterdir())[-1] == "step-00000003"


@pytest.mark.nightly
def test_not_a_number_stops_the_run_at_an_evaluation_too(tmp_path):
    line = ("optimizer.lr=1e30", "log.every_steps=1000", "eval.every_steps=7", "checkpoint.every_steps=1000")
    result = run(tmp_path / "run", *line, "max_steps=400", ranks=2, ok=False)
    assert result.outcome["exit_code"] == 6 and "at step 7:" in result.outcome["error"], result.out


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_finds_is_told_as_that_rank_s(tmp_path, rank):
    """All ranks raise it; whichever is first to say so names the rank and the host on which it is."""
    line = ("data._target_=kit.parts.mistakes.MissingOn", f"+data.rank={rank}", "max_steps=4")
    for number in range(3):
        result = run(tmp_path / f"run{number}", *line, ranks=2, ok=False)
        outcome = result.outcome
        assert (outcome["exit_code"], outcome["rank"]) == (3, rank), result.out
        assert outcome["error"].startswith("/nonexistent is not a folder"), outcome
        assert "failed first: rank" not in result.out, result.out


def test_not_a_number_can_be_left_out(tmp_path):
    result = run(
        tmp_path / "run", "model._target_=kit.parts.models.Exploding", "on_nonfinite=skip", "max_steps=9", ranks=2
    )
    assert [event["step"] for event in result.events("skipped")] == [4]
    assert all(weight.isfinite().all() for weight in result.weights.values())
    assert result.losses[4] is None and result.losses[9] is not None


SPOILED = ("checkpoint.every_steps=3", "log.every_steps=50", "+callbacks.spoil._target_=kit.parts.callbacks.Spoil")


@pytest.mark.nightly(but=["ddp", "fsdp"])
@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "zero", "fsdp", "local_sgd,every_steps=20", "ddp virtual_world_size=4"]
)
def test_weights_that_are_not_finite_are_never_committed(tmp_path, strategy):
    """Whoever writes them sees it, on whatever rank; what was saved before stays."""
    name, *more = strategy.replace(",", " strategy.").split()
    line = (f"strategy={name}", *more, *SPOILED, "+callbacks.spoil.at=6", "max_steps=12")
    result = run(tmp_path / "run", *line, ranks=1 if name == "single" else 2, ok=False)
    assert result.outcome["exit_code"] == 6 and "step-00000006 is not saved: model/" in result.outcome["error"], (
        result.out
    )
    assert "is not finite: lower the learning rate" in result.outcome["error"]
    assert [each.name for each in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000003"]


@pytest.mark.nightly
def test_the_last_weights_are_not_committed_if_they_are_not_finite(tmp_path):
    result = run(tmp_path / "run", *SPOILED, "+callbacks.spoil.at=7", "max_steps=7", ranks=2, ok=False)
    assert result.outcome["exit_code"] == 6 and "step-00000007 is not saved" in result.outcome["error"], result.out
    assert not (tmp_path / "run/model.pt").exists()


def test_leaving_out_is_bounded(tmp_path):
    overrides = (
        "model._target_=kit.parts.models.Exploding",
        "+model.bad_steps=[2,3,4,5,6,7]",
        "on_nonfinite=skip",
        "max_skipped_steps=3",
    )
    result = run(tmp_path / "run", *overrides, "max_steps=9", ok=False)
    assert result.code == 6 and "4 in a row" in result.said[0], result.out


def test_a_crash_loop_ends_and_shows_the_first_cause(tmp_path):
    """torchrun would restart ten times; three attempts without progress are enough."""
    crashing = ("model._target_=kit.parts.models.Crashing", "+model.at=3", "+model.anew=true", "max_steps=9")
    result = run(tmp_path / "run", *crashing, ranks=2, torchrun=("--max-restarts=10",), ok=False, timeout_s=200)
    assert result.outcome["outcome"] == "crash_loop" and result.outcome["exit_code"] == 7, result.out
    assert "the user's own mistake" in result.outcome["error"]
    assert 4 <= len(result.events("start") + result.events("resume")) <= 5


def test_a_mistake_is_not_restarted(tmp_path):
    result = run(
        tmp_path / "run",
        "data=mnist",
        "data.root=empty",
        ranks=2,
        torchrun=("--max-restarts=10",),
        ok=False,
        timeout_s=60,
    )
    assert result.outcome["exit_code"] == 3
    assert len(result.said) == 1, result.out


def test_lines_of_several_processes_stay_whole():
    """Ranks and loader workers share a log, and PYTHONUNBUFFERED (as in the image) makes `print` write the newline by itself."""
    code = "from muster.errors import say\nfor _ in range(3000): say('muster: ' + 'x' * 60)"
    read, write = os.pipe()
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stderr=write, env=environment(), cwd=ROOT) for _ in range(3)
    ]
    os.close(write)
    with os.fdopen(read) as pipe:
        lines = pipe.read().splitlines()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(lines) == 9000 and set(lines) == {"muster: " + "x" * 60}


@pytest.mark.unit
def test_a_node_whose_gpus_do_not_answer_is_named():
    """device=auto is the CPU there, and ranks of both kinds would wait for each other. (No front door without a GPU.)"""
    from muster.world.rendezvous.meeting import difference, judge

    facts = {"torch": "2", "code": "c"}
    first, other = {**facts, "host": "n1", "device": "cuda"}, {**facts, "host": "n2", "device": "cpu"}
    hellos = {rank: {"error": None, "differs": None} for rank in (0, 1)}
    assert judge(hellos, 2, timeout_s=60) is None
    hellos[1]["differs"] = difference(first, other, {}, {}, rank=1)
    code, message = judge(hellos, 2, timeout_s=60)
    assert code == 2 and "rank 1 on n2 would train on cpu, rank 0 on n1 on cuda" in message
    assert difference(first, first, {}, {}, rank=1) is None


@pytest.mark.unit
def test_a_folder_of_another_run_is_refused_with_the_word_to_add(tmp_path):
    from types import SimpleNamespace

    from muster.train.config.compose import compose
    from muster.train.config.differences import to_dict
    from muster.train.resume import refuse_changes

    saved = SimpleNamespace(manifest={"config": to_dict(compose([])), "fingerprint": "x"}, path="")
    for given, word in (
        ([], "Add name=convnet,"),
        (["name=other"], "Add name=convnet,"),
        (["batch_size=9"], "Add name=convnet,"),
    ):
        config = compose(["model=convnet", *given, f"output_dir={tmp_path}/${{name}}"])
        assert word in str(refuse_changes(config, saved, fingerprint="x", total_steps=1))
    (tmp_path / "convnet").mkdir()
    assert "Add name=convnet-2," in str(refuse_changes(config, saved, fingerprint="x", total_steps=1))
    same_model = compose(["batch_size=9", f"output_dir={tmp_path}/${{name}}"])
    assert "Add name=run-new," in str(refuse_changes(same_model, saved, fingerprint="x", total_steps=1))
    elsewhere = compose(["batch_size=9", f"output_dir={tmp_path}/x"])
    assert "Give another output_dir," in str(refuse_changes(elsewhere, saved, fingerprint="x", total_steps=1))


def test_a_port_in_use_is_one_line_with_what_to_give(tmp_path):
    """The page for Prometheus is not worth a run; a store of rank 0's is."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(tmp_path / "run", "max_steps=1", f"metrics.port={port}")
    assert len(result.said) == 1 and result.lines("train"), result.out
    assert f"metrics.port={port} on 127.0.0.1: Address already in use; give another port" in result.said[0]
    beyond = run(tmp_path / "beyond", "max_steps=1", "metrics.port=70000")
    assert "metrics.port=70000 on 127.0.0.1: bind(): port must be 0-65535" in beyond.said[0], beyond.out


def test_a_store_s_port_in_use_is_one_line_with_what_to_give(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = finish(bare_rank(tmp_path / "run", 0, 2, port), tmp_path / "run", timeout_s=60)
    assert result.code == 2 and len(result.said) == 1 and str(port) in result.said[0], result.out
    assert "MASTER_PORT" in result.said[0] and result.out.splitlines()[-1] == result.said[0], result.out


# Fifteen typical mistakes, and the test that holds each to one line, with what to do, and nothing after it.
FIFTEEN = {
    "typo": ("errors", "unknown key"),
    "wrong import path": ("errors", "no such module"),
    "NaN rate": ("errors", "a rate that is not a number"),
    "negative batch": ("errors", "negative batch"),
    "GPU on a CPU machine": ("errors", "no such device"),
    "missing YAML": ("errors", "no such folder of yaml files"),
    "wrong shape": ("mistakes", "wrong shape"),
    "forgotten num_classes": ("mistakes", "no number of classes"),
    "PIL images": ("mistakes", "pictures"),
    "labels out of range": ("mistakes", "labels out of range"),
    "dict without adapter": ("mistakes", "dict"),
    "vector loss": ("mistakes", "vector"),
    "forgotten return": ("mistakes", "forgotten return"),
    "port in use": ("errors", test_a_store_s_port_in_use_is_one_line_with_what_to_give),
    "two terminals": ("checkpoint", test_checkpoint.test_two_jobs_in_one_folder),
}
"""`mistakes`: with the user's own file and line, too; what is typed has none."""


@pytest.mark.unit
def test_fifteen_typical_mistakes_are_held_to_one_line():
    tables = {"errors": MISTAKES, "mistakes": test_mistakes.MISTAKES}
    assert len(FIFTEEN) == 15
    for name, (table, row) in FIFTEEN.items():
        assert callable(row) or row in tables[table], name
        assert callable(row) or all(tables[table][row][2:]), f"{name}: what was given and what to do"
