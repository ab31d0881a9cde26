"""Checkpoints are whole or not there, and nothing else is ever taken for one."""

import json
import os
import shutil
import signal

import pytest
import torch
from kit.faults import fail_at
from kit.job import finish, hold, reached, run, start, wait_for

SAVING = ("checkpoint.every_steps=5", "max_steps=20")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 20 steps with checkpoints at 10, 15 and 20."""
    return run(tmp_path_factory.mktemp("trained") / "run", *SAVING, ranks=2)


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained.folder, tmp_path / "run")


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_are_kept(trained):
    assert names(trained.folder) == ["step-00000010", "step-00000015", "step-00000020"]
    assert [event["step"] for event in trained.events("checkpoint")] == [5, 10, 15, 20]


SPOILS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "bit flipped": lambda path: path.write_bytes(
        path.read_bytes()[:1000] + bytes([path.read_bytes()[1000] ^ 1]) + path.read_bytes()[1001:]
    ),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.nightly(
    but=["rank-00000.bin-truncated", "rank-00001.bin-bit flipped", "index.json-missing", "manifest.json-bit flipped"]
)
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("name", ["rank-00000.bin", "rank-00001.bin", "index.json", "manifest.json"])
def test_a_bad_checkpoint_is_quarantined_and_the_one_before_is_used(trained, copy, spoil, name):
    if (spoil, name) == ("bit flipped", "manifest.json"):
        (copy / "checkpoints/step-00000020/manifest.json").write_text("{")
    else:
        SPOILS[spoil](copy / "checkpoints/step-00000020" / name)
    os.remove(copy / "outcome.json")
    result = run(copy, *SAVING)
    assert result.events("resume")[-1]["step"] == 15
    assert "quarantined a bad checkpoint" in result.out and "step-00000020" in result.out
    assert any(name.startswith("bad-step-00000020") for name in names(copy))
    assert "step-00000020" in names(copy)


def test_all_bad_is_never_a_start_from_zero(copy):
    for folder in (copy / "checkpoints").iterdir():
        SPOILS["bit flipped"](folder / "rank-00000.bin")
    for _ in range(2):  # the second time they are all quarantined already
        result = run(copy, *SAVING, "max_steps=30", ok=False)
        assert result.code == 4, result.out
        assert "no valid checkpoint" in result.said[0] and "resume=never" in result.said[0]
    assert run(copy, *SAVING, "checkpoint.resume=never").events("start")


def test_a_draft_is_no_checkpoint(copy):
    draft = copy / "checkpoints" / ".step-00000099.abc"
    shutil.copytree(copy / "checkpoints/step-00000020", draft)
    result = run(copy, *SAVING)
    assert result.events("done")[-1]["step"] == 20
    assert not draft.exists()


@pytest.mark.nightly(but=["write", "rename", "prune"])
@pytest.mark.parametrize("point", ["write", "index", "manifest", "rename", "committed", "prune"])
def test_killed_anywhere_in_the_protocol_there_is_a_valid_one(tmp_path, point):
    saving = (*SAVING, "checkpoint.keep=2", "model.hidden=[64]")
    whole = run(tmp_path / "whole", *saving)
    killed = run(tmp_path / "run", *saving, ok=False, env={"FAULTS": fail_at(0, 15, point)}, module="kit.killer")
    assert killed.code == -signal.SIGKILL, killed.out
    result = run(tmp_path / "run", *saving)
    assert result.events("resume")[-1]["step"] == (15 if point in ("committed", "prune") else 10)
    assert result.losses == whole.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in whole.weights.items())
    assert not [name for name in names(result.folder) if name.startswith(".")]


@pytest.mark.quick
def test_another_config_in_the_same_folder_is_refused(copy):
    result = run(copy, *SAVING, "optimizer.lr=0.5", "model.hidden=[16]", ranks=2, ok=False)
    assert len(result.said) == 1, result.out
    assert "lr: 0.1" in (copy / "config.yaml").read_text(), "the run's own config was overwritten"
    assert "optimizer.lr: 0.1 -> 0.5" in result.said[0] and "model.hidden: [512] -> [16]" in result.said[0]
    assert "exitcode  : 2 " in result.out


def test_what_may_change_may_change(copy):
    result = run(copy, *SAVING, "max_steps=25", "log.every_steps=5", "checkpoint.keep=1", "micro_batch_size=16")
    assert result.events("resume")[-1]["step"] == 20
    assert names(copy) == ["step-00000025"]


def test_going_on_with_another_learning_rate_when_told_to(copy):
    result = run(copy, *SAVING, "max_steps=25", "optimizer.lr=0.01", "checkpoint.accept_changes=true")
    assert result.events("resume")[-1]["step"] == 20
    assert result.lines("train")[-1]["lr"] == pytest.approx(0.01)


def test_changed_data_is_noticed(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("to be or not to be, " * 200)
    overrides = (
        "data=text",
        f"data.root={text}",
        "data.pattern=*.txt",
        "data.block_size=16",
        "model=gpt",
        "objective=language_modeling",
        "batch_size=8",
    )
    run(tmp_path / "run", *overrides, "max_steps=2")
    (text / "a.txt").write_text("that is a question, " * 200)
    result = run(tmp_path / "run", *overrides, "max_steps=4", ok=False)
    assert result.code == 3 and "has changed" in result.said[0], result.out


def test_resume_never_sets_the_old_run_aside(copy):
    result = run(copy, *SAVING, "checkpoint.resume=never", "optimizer.lr=0.2")
    assert result.events("start") and not result.events("resume")
    assert (copy / "previous-1/checkpoints/step-00000020/manifest.json").exists()


@pytest.mark.quick
def test_resume_from_a_path(trained, tmp_path):
    from_run = run(tmp_path / "a", *SAVING, "max_steps=22", f"checkpoint.resume={trained.folder}")
    assert from_run.events("resume")[0]["step"] == 20
    from_step = run(
        tmp_path / "b", *SAVING, "max_steps=22", f"checkpoint.resume={trained.folder}/checkpoints/step-00000015"
    )
    assert from_step.events("resume")[0]["step"] == 15


@pytest.mark.quick
def test_model_pt_is_the_plain_model(trained):
    from muster.train.models.mlp import Mlp

    model = Mlp(input_shape=(1, 8, 8), num_classes=10, hidden=[512])
    model.load_state_dict(trained.weights)


@pytest.mark.nightly(but=["2"])
@pytest.mark.parametrize("ranks", [None, 2])
def test_sigterm_saves_once_and_the_same_command_goes_on(tmp_path, ranks):
    slow = ("model=convnet", "batch_size=32", "max_steps=90", "checkpoint.every_steps=1000")
    whole = run(tmp_path / "whole", *slow, ranks=ranks)
    process = start(tmp_path / "run", *slow, *hold(21), ranks=ranks)
    wait_for(tmp_path / "run", reached(20), process=process)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, tmp_path / "run", timeout_s=40)
    assert stopped.code == (75 if ranks is None else 1), stopped.out
    assert "Traceback" not in "\n".join(stopped.said)
    assert stopped.outcome["outcome"] == "preempted" and stopped.outcome["exit_code"] == 75
    at = stopped.outcome["step"]
    assert names(tmp_path / "run") == [f"step-{at:08d}"] and at == max(stopped.losses)
    result = run(tmp_path / "run", *slow, ranks=ranks)
    assert result.events("resume")[-1]["step"] == at
    assert not result.outcome.get("cause"), "being stopped is no failure"
    assert result.losses == whole.losses and list(result.losses) == sorted(result.losses)
    assert all(torch.equal(weight, result.weights[name]) for name, weight in whole.weights.items())


@pytest.mark.quick
def test_metrics_have_no_step_twice_after_a_kill(tmp_path):
    slow = ("model=convnet", "batch_size=32", "max_steps=60", "checkpoint.every_steps=10")
    process = start(tmp_path / "run", *slow, *hold(26))
    wait_for(tmp_path / "run", reached(25), process=process)
    process.kill()
    finish(process, tmp_path / "run")
    result = run(tmp_path / "run", *slow)
    assert [line["step"] for line in result.lines("train")] == list(range(1, 61))
    assert result.events("restart")[0]["after"] == "running"
    assert result.events("restart")[0]["cause"].startswith("it left no record")
    assert "after=killed  cause=it left no record" in result.out and "cause=None" not in result.out
    assert json.loads((tmp_path / "run/outcome.json").read_text())["outcome"] == "done"


def test_two_jobs_in_one_folder(tmp_path):
    """The second refuses and says who is there; after a kill the folder is free again."""
    endless = (
        "model._target_=kit.parts.models.Slow",
        "data._target_=kit.parts.data.Numbered",
        "max_steps=100000",
        "checkpoint.every_steps=5",
    )
    first = start(tmp_path / "run", *endless, ranks=2)
    wait_for(tmp_path / "run", reached(10), process=first)
    second = run(tmp_path / "run", *endless, ranks=2, ok=False)
    assert len(second.said) == 1 and "in use by another job" in second.said[0], second.out
    assert second.said[0].endswith("stop it, or give this one another name"), second.out
    *_, last, _ = second.out.splitlines()
    assert last.lstrip().startswith("traceback : ") and "another name" in last, "torchrun's own report ends with it"
    assert "exitcode  : 2 " in second.out and first.poll() is None
    first.kill()
    first.wait()
    third = start(tmp_path / "run", *endless)
    wait_for(tmp_path / "run", lambda result: result.events("resume"), process=third)
    third.send_signal(signal.SIGTERM)
    assert finish(third, tmp_path / "run").code == 75
    assert not list((tmp_path / "run").glob(".*"))


def test_a_task_of_srun_beside_its_own_is_told_how_ranks_are_started(tmp_path):
    task = {"SLURM_JOB_ID": "5", "SLURM_STEP_NUM_TASKS": "2"}
    endless = ("model._target_=kit.parts.models.Slow", "data._target_=kit.parts.data.Numbered", "max_steps=100000")
    first = start(tmp_path / "run", *endless, env={**task, "SLURM_PROCID": "0"})
    wait_for(tmp_path / "run", reached(10), process=first)
    second = run(tmp_path / "run", *endless, ok=False, env={**task, "SLURM_PROCID": "1"})
    assert second.code == 2 and "srun has started 2 tasks of this command" in second.said[0], second.out
    first.send_signal(signal.SIGTERM)
    assert finish(first, tmp_path / "run").code == 75


@pytest.mark.nightly
def test_two_launches_with_the_same_rendezvous_id(tmp_path):
    """People give every launch the same id: it does not make the second job the first, nor `never` a restart of it."""
    endless = ("model._target_=kit.parts.models.Slow", "data._target_=kit.parts.data.Numbered", "max_steps=100000")
    flags = ("--rdzv-id=1", "--rdzv-backend=c10d")
    first = start(tmp_path / "run", *endless, ranks=2, torchrun=(*flags, "--rdzv-endpoint=127.0.0.1:0"))
    wait_for(tmp_path / "run", reached(10), process=first)
    second = run(tmp_path / "run", *endless, ranks=2, torchrun=(*flags, "--rdzv-endpoint=127.0.0.1:0"), ok=False)
    assert "in use by another job" in second.said[0] and first.poll() is None, second.out
    first.send_signal(signal.SIGTERM)
    finish(first, tmp_path / "run")
    over = ("checkpoint.resume=never", "max_steps=5")
    third = run(tmp_path / "run", *endless, *over, ranks=2, torchrun=(*flags, "--rdzv-endpoint=127.0.0.1:0"))
    assert third.events("start") and (tmp_path / "run/previous-1").is_dir(), third.out


def test_ctrl_c_saves_too(tmp_path):
    process = start(
        tmp_path / "run",
        "model._target_=kit.parts.models.Slow",
        "data._target_=kit.parts.data.Numbered",
        "max_steps=100000",
    )
    wait_for(tmp_path / "run", reached(5), process=process)
    process.send_signal(signal.SIGINT)
    result = finish(process, tmp_path / "run")
    assert result.code == 75 and result.outcome["outcome"] == "preempted", result.out
