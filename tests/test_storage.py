"""Checkpoints in an object store: a real S3 server (moto's), and real disks that are full."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from launch import environment, finish, free_port, reached, run, start, wait_for

from train.errors import StorageError

SAVING = ("model.hidden=[16]", "checkpoint.every_steps=5", "max_steps=20", "checkpoint.keep=2")


class S3:
    """moto's server in a process of its own, which can be killed."""

    def __init__(self):
        self.port = free_port()
        self.env = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_MAX_ATTEMPTS": "1",
        }
        line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.server = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(300):
            try:
                self.fs().mkdir("muster")
                break
            except Exception:
                time.sleep(0.1)

    def fs(self):
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        return s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=self.env["AWS_ENDPOINT_URL"], use_listings_cache=False
        )

    def steps(self, prefix):
        return sorted(int(key.split("/")[-2][5:]) for key in self.fs().glob(f"muster/{prefix}/step-*/manifest.json"))


@pytest.fixture(scope="module")
def s3():
    server = S3()
    yield server
    server.server.kill()
    server.server.wait()


@pytest.fixture
def bucket(s3, request, monkeypatch):
    """A Bucket of this test's own, in this process."""
    import s3fs

    from train.checkpoint.backends.fsspec import Bucket

    for key, value in s3.env.items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return Bucket(f"s3://muster/{re.sub(r'[^a-z_]', '-', request.node.name)}")


def test_a_run_on_s3_resumes_bit_identically(tmp_path, s3):
    """Killed with a draft half written; nothing of a checkpoint lies in the run's folder."""
    line = (*SAVING[1:], "model._target_=custom.Stateful", "data.augment=true")
    whole = run(tmp_path / "whole", *line, ranks=2)
    url = "checkpoint.storage=s3://muster/resume"
    process = start(tmp_path / "run", *line, url, "max_steps=13", ranks=2, env=s3.env)
    first = finish(process, tmp_path / "run")
    assert first.code == 0, first.out
    assert s3.steps("resume") == [10, 13]
    s3.fs().pipe_file("muster/resume/step-00000017/dead/state/__0_0.distcp", b"half")
    result = run(tmp_path / "run", *line, url, ranks=2, env=s3.env)
    assert result.events("resume")[-1]["step"] == 13
    assert result.losses == whole.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in whole.weights.items())
    assert s3.steps("resume") == [15, 20] and not (tmp_path / "run/checkpoints").exists()
    assert not s3.fs().exists("muster/resume/step-00000017"), "a dead writer's draft was left behind"
    manifest = json.loads(s3.fs().cat("muster/resume/step-00000020/manifest.json"))
    assert {name.split("/", 1)[1] for name in manifest["files"]} == {
        f"{part}/{name}" for part in ("state", "rank-00000", "rank-00001") for name in (".metadata", "__0_0.distcp")
    }


def test_a_bad_object_is_put_aside_and_all_bad_is_no_start_from_zero(tmp_path, s3):
    line = (*SAVING, "checkpoint.storage=s3://muster/bad")
    run(tmp_path / "run", *line, env=s3.env)
    (state,) = s3.fs().glob("muster/bad/step-00000020/*/state/__0_0.distcp")
    data = bytearray(s3.fs().cat(state))
    data[len(data) // 2] ^= 1
    s3.fs().pipe_file(state, bytes(data))
    result = run(tmp_path / "run", *line, "max_steps=22", env=s3.env)
    assert result.events("resume")[-1]["step"] == 15 and "SHA-256 differs" in result.out
    for state in s3.fs().glob("muster/bad/step-*/*/state/__0_0.distcp"):
        s3.fs().rm(state)
    for _ in range(2):
        result = run(tmp_path / "run", *line, "max_steps=24", ok=False, env=s3.env)
        assert result.code == 4 and "no valid checkpoint in s3://muster/bad" in result.said[0], result.out
    result = run(tmp_path / "run", *line, "checkpoint.resume=never", env=s3.env)
    assert result.events("start") and s3.steps("bad") == [15, 20]


def test_a_store_that_cannot_be_reached(tmp_path, s3):
    env = {**s3.env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    result = run(tmp_path / "run", *SAVING, "checkpoint.storage=s3://muster/x", ranks=2, ok=False, env=env)
    assert len(result.said) == 1 and "s3://muster/x" in result.said[0], result.out
    assert "exitcode  : 5 " in result.out
    result = run(tmp_path / "run", *SAVING, "checkpoint.storage=nosuch://muster/x", ok=False)
    assert result.code == 2 and "nosuch" in result.said[0], result.out


def test_a_store_that_goes_away_is_survived_until_the_limit(tmp_path):
    server = S3()
    line = (
        "data._target_=custom.Numbered",
        "model._target_=custom.Slow",
        "max_steps=100000",
        "checkpoint.every_steps=20",
    )
    process = start(tmp_path / "run", *line, "checkpoint.storage=s3://muster/gone", ranks=2, env=server.env)
    try:
        wait_for(tmp_path / "run", reached(45), process=process)
    finally:
        server.server.send_signal(signal.SIGKILL)
        server.server.wait()
    result = finish(process, tmp_path / "run", timeout_s=100)
    assert result.outcome["exit_code"] == 5 and result.outcome["step"] >= 80, result.out
    assert len(result.events("checkpoint_failed")) >= 2


def test_a_cut_off_writer_cannot_commit_or_spoil(bucket):
    bucket.write(7, "old", "state", {"x": torch.ones(3)})
    files = bucket.write(7, "new", "state", {"x": torch.zeros(3), "n": [1, (2.5, None)]})
    assert bucket.commit(7, "new", {"step": 7, "attempt": "new", "files": files})
    late = bucket.write(7, "old", "state", {"x": torch.ones(3)})
    assert not bucket.commit(7, "old", {"step": 7, "attempt": "old", "files": late})
    manifest = bucket.verify(7)
    value = bucket.read(7, "state", manifest)
    assert torch.equal(value["x"], torch.zeros(3)) and value["n"] == [1, (2.5, None)]
    assert bucket.steps() == [7]


@pytest.mark.parametrize("module, name", [("os", "system"), ("torch.distributed.checkpoint.filesystem", "os.system")])
def test_the_index_of_a_checkpoint_runs_no_code(bucket, tmp_path, module, name):
    mark = tmp_path / "was-here"
    evil = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"
    evil += b"\x8c" + bytes([len(f"touch {mark}")]) + f"touch {mark}".encode() + b"\x85R."
    files = bucket.write(1, "a", "state", {"x": torch.ones(1)})
    bucket.fs.pipe_file(bucket._key(1, "a/state/.metadata"), evil)
    with pytest.raises(StorageError, match="which is no part of one"):
        bucket.read(1, "state", {"attempt": "a", "files": files})
    assert not mark.exists()


def commit(storage, step, attempt, value=1.0):
    files = storage.write(step, attempt, "state", {"x": torch.full((3,), value)})
    assert storage.commit(step, attempt, {"step": step, "attempt": attempt, "files": files})


def test_what_was_put_aside_outlives_a_new_checkpoint_of_the_same_step(bucket):
    commit(bucket, 5, "old")
    bucket.start_over()
    commit(bucket, 5, "new")
    bucket.remove(5)
    bucket.prepare()
    assert bucket.steps() == [] and bucket.bad() == []
    left = bucket.fs.find(f"{bucket.base}/step-00000005")
    assert any("previous-" in key for key in left) and any("/old/state/" in key for key in left)
    assert not any("/new/" in key for key in left)


def test_a_name_that_is_a_pattern_is_refused(tmp_path):
    """fsspec would take it for one, and a run for an empty place."""
    result = run(tmp_path / "run", *SAVING, "checkpoint.storage='s3://muster/run[1]'", ok=False)
    assert result.code == 2 and "run[1]" in result.said[0] and "pattern" in result.said[0], result.out


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_what_cannot_be_read_just_now_is_not_bad(tmp_path, request, monkeypatch, kind):
    """A time-out, a stale handle: tried again, and if it stays, the run ends; nothing is put aside."""
    from train.checkpoint import manager as checkpoint
    from train.checkpoint.backends import base
    from train.checkpoint.backends.folder import Folder

    storage = Folder(tmp_path) if kind == "folder" else request.getfixturevalue("bucket")
    monkeypatch.setattr(base, "PAUSE_S", 0.01)
    for step in (1, 2):
        commit(storage, step, "a")
    failures, size = [1], storage.size

    def flaky(step, file):
        if failures and failures.pop():
            raise TimeoutError("the server is busy")
        return size(step, file)

    monkeypatch.setattr(storage, "size", flaky)
    assert checkpoint.newest(storage, on_bad=pytest.fail).step == 2
    failures.extend([1] * 100)
    with pytest.raises(StorageError, match=r"cannot read .*the server is busy"):
        checkpoint.newest(storage, on_bad=pytest.fail)
    assert storage.steps() == [2, 1] and storage.bad() == []


def test_another_runs_checkpoints_are_only_read(tmp_path):
    from train.checkpoint import manager as checkpoint
    from train.checkpoint.backends.folder import Folder

    storage = Folder(tmp_path)
    for step in (1, 2):
        commit(storage, step, "a")
    (tmp_path / "step-00000002/state.pt").write_bytes(b"")
    bad = []
    assert checkpoint.newest(storage, on_bad=bad.append, own=False).step == 1
    assert len(bad) == 1 and storage.steps() == [2, 1]


def test_start_over_before_there_was_anything(tmp_path):
    result = run(tmp_path / "run", *SAVING, f"checkpoint.storage={tmp_path / 'there'}", "checkpoint.resume=never")
    assert result.events("start") and (tmp_path / "there/step-00000020").is_dir()


needs_mount = pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs root to mount")


def on_small_disk(tmp_path, size, *overrides, ranks=2):
    """A run whose folder is a tmpfs of `size`, in a mount namespace of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    copy = tmp_path / "run"
    script = (
        f"mount -t tmpfs -o size={size} none '{folder}' && \"$@\"; code=$?; cp -r '{folder}/run' '{copy}'; exit $code"
    )
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "train"]
    line += [f"output_dir={folder}/run", "log.report=false", "log.tensorboard=false", "log.every_steps=1", *overrides]
    return finish(
        subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", *line],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        ),
        copy,
    )  # fmt: skip


@needs_mount
def test_a_full_disk_ends_the_run_after_the_limit(tmp_path):
    """Room for some checkpoints but not for `keep`: what is there stays valid, no draft is left."""
    result = on_small_disk(
        tmp_path, "5m", "model.hidden=[4096]", "checkpoint.every_steps=5", "checkpoint.keep=20", "max_steps=100"
    )
    assert result.outcome["exit_code"] == 5, result.out
    assert "No space left on device" in result.outcome["error"], result.out
    assert len(result.events("checkpoint_failed")) == 3
    names = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
    assert names and all(name.startswith("step-") for name in names), names
    failed = result.events("checkpoint_failed")
    assert result.outcome["step"] > int(names[-1][5:]) and "No space left" in failed[0]["failed"]


@needs_mount
def test_a_disk_that_is_full_for_a_while(tmp_path):
    """Training goes on and the next checkpoint is written when there is room again; no step is missing."""
    result = on_small_disk(
        tmp_path, "3m", "model._target_=custom.FillsDisk", "checkpoint.every_steps=5", "max_steps=40"
    )
    assert result.code == 0, result.out
    assert 1 <= len(result.events("checkpoint_failed")) <= 2
    assert result.events("checkpoint")[-1]["step"] == 40
    assert result.lines("train")[-1]["step"] == 40
