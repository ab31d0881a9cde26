"""Checkpoints in an object store: a real S3 server (moto's), and real disks that are full."""

import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit.clock import ManualClock
from kit.job import QUIET, command, environment, finish, free_port, on_nodes, reached, run, saved, start, wait_for
from kit.until import until

from muster.checkpoint import commit as protocol
from muster.checkpoint import manager
from muster.checkpoint.backends.folder import Directory
from muster.checkpoint.commit import Lost, Storage, Unclear
from muster.checkpoint.state import read
from muster.errors import StorageError
from muster.lease.storage_lease import StorageLease
from muster.outcome import Outcome
from muster.world.environment import Environment
from muster.world.group import World
from muster.world.store_keys import StoreKeys

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
        until(self.is_there, "answer of the server", timeout_s=60, every_s=0.1)

    def is_there(self):
        assert self.server.poll() is None, "it has ended"
        with contextlib.suppress(Exception):
            self.fs().mkdir("muster")
            return True

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
    """A store of this test's own, in this process."""
    import s3fs

    for key, value in s3.env.items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return Storage(f"s3://muster/{re.sub(r'[^a-z_]', '-', request.node.name)}")


@pytest.mark.nightly
def test_a_run_on_s3_resumes_bit_identically(tmp_path, s3):
    """Killed with a draft half written; nothing of a checkpoint lies in the run's folder."""
    line = (*SAVING[1:], "model._target_=kit.parts.models.Stateful", "data.augment=true")
    whole = run(tmp_path / "whole", *line, ranks=2)
    url = "checkpoint.storage=s3://muster/resume"
    process = start(tmp_path / "run", *line, url, "max_steps=13", ranks=2, env=s3.env)
    first = finish(process, tmp_path / "run")
    assert first.code == 0, first.out
    assert s3.steps("resume") == [10, 13]
    s3.fs().pipe_file("muster/resume/step-00000017/dead/rank-00000.bin", b"half")
    result = run(tmp_path / "run", *line, url, ranks=2, env=s3.env)
    assert result.events("resume")[-1]["step"] == 13
    assert result.losses == whole.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in whole.weights.items())
    assert s3.steps("resume") == [15, 20] and not (tmp_path / "run/checkpoints").exists()
    assert not s3.fs().exists("muster/resume/step-00000017"), "a dead writer's draft was left behind"
    manifest = json.loads(s3.fs().cat("muster/resume/step-00000020/manifest.json"))
    files = {name.split("/", 1)[1] for name in manifest["files"]}
    assert files == {"index.json", "rank-00000.bin", "rank-00001.bin"}


@pytest.mark.nightly
def test_a_bad_object_is_quarantined_and_all_bad_is_no_start_from_zero(tmp_path, s3):
    line = (*SAVING, "checkpoint.storage=s3://muster/bad")
    run(tmp_path / "run", *line, env=s3.env)
    (state,) = s3.fs().glob("muster/bad/step-00000020/*/rank-00000.bin")
    data = bytearray(s3.fs().cat(state))
    data[len(data) // 2] ^= 1
    s3.fs().pipe_file(state, bytes(data))
    result = run(tmp_path / "run", *line, "max_steps=22", env=s3.env)
    assert result.events("resume")[-1]["step"] == 15 and "SHA-256 differs" in result.out
    for state in s3.fs().glob("muster/bad/step-*/*/rank-00000.bin"):
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


@pytest.mark.nightly
def test_a_store_that_goes_away_is_survived_until_the_limit(tmp_path):
    server = S3()
    line = (
        "data._target_=kit.parts.data.Numbered",
        "model._target_=kit.parts.models.Slow",
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


def draft(storage, step, attempt, content=b"abc"):
    with storage.write(step, attempt, "rank-00000.bin") as stream:
        stream.write(content)
    return {"rank-00000.bin": stream.facts}


def commit(storage, step, attempt, content=b"abc"):
    manifest = {"step": step, "attempt": attempt, "world_size": 1}
    return storage.commit(step, attempt, manifest, draft(storage, step, attempt, content))


def newest(storage, **kwargs):
    from muster.checkpoint import manager

    return manager.newest(storage, alone(), **{"on_bad": pytest.fail, **kwargs})


def alone():
    store_keys = StoreKeys(torch.distributed.HashStore(), attempt="a", rank=0, size=1)
    return World(Environment(), torch.device("cpu"), "a", store_keys, [])


def content(storage, step):
    with protocol.Saved(storage, storage.manifest(step)).open("rank-00000.bin") as stream:
        return stream.read()


def test_a_cut_off_writer_cannot_commit_or_spoil(bucket):
    draft(bucket, 7, "old", b"old")
    assert commit(bucket, 7, "new", b"new")
    assert not commit(bucket, 7, "old", b"old")
    assert content(bucket, 7) == b"new" and bucket.steps() == [7] and newest(bucket).step == 7


@pytest.mark.unit
def test_a_checkpoint_runs_no_code(tmp_path):
    """Its plain values are all that is unpickled."""
    mark = tmp_path / "was-here"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {mark}",)

    torch.save({"scaler": Evil()}, tmp_path / "rank-00000.bin")
    index = {"tensors": {}, "values": {"scaler": {"file": "rank-00000.bin", "at": 0}}}
    with pytest.raises(StorageError, match="not a plain value"):
        read(index, ["scaler"], {}, lambda file: (tmp_path / file).open("rb"))
    assert not mark.exists()


def test_what_was_withdrawn_outlives_a_new_checkpoint_of_the_same_step(bucket):
    commit(bucket, 5, "old")
    bucket.start_over()
    commit(bucket, 5, "new")
    bucket.remove(5)
    commit(bucket, 6, "new")
    bucket.prune(keep=1)
    assert bucket.steps() == [6] and bucket.bad() == []
    left = bucket.backend.fs.find(f"{bucket.backend.base}/step-00000005")
    assert any("previous-" in key for key in left) and any("/old/rank-" in key for key in left)
    assert not any("/new/" in key for key in left)


@pytest.fixture(params=["folder", "database", "object store"])
def any_storage(request, tmp_path):
    """An empty storage of each kind of commit, in this process."""
    if request.param == "object store":
        pytest.importorskip("fsspec")
        yield Storage(f"memory://{tmp_path}")
        return
    storage = Storage(f"kit.parts.backends.Sqlite://{tmp_path}/s.db" if request.param == "database" else str(tmp_path))
    storage.prepare()
    yield storage


@pytest.mark.unit
def test_every_backend_keeps_the_commit_protocol(any_storage):
    """Nothing of a draft is seen; of two writers one commits; what is withdrawn is kept, what is removed is gone."""
    storage = any_storage
    draft(storage, 4, "killed")
    assert storage.steps() == []
    for step in (1, 2, 3):
        assert commit(storage, step, "a", b"first")
    assert not commit(storage, 3, "late", b"other") and content(storage, 3) == b"first"
    assert storage.steps() == [3, 2, 1] and storage.bad() == []
    storage.withdraw(2)
    assert commit(storage, 2, "b", b"again") and content(storage, 2) == b"again"
    assert len(storage.bad()) == 1 and "bad-" in storage.bad()[0]
    storage.prune(keep=1, spare=1)
    assert storage.steps() == [3, 1] and len(storage.bad()) == 1
    storage.start_over()
    assert storage.steps() == [] and storage.bad() == []
    assert commit(storage, 5, "c") and newest(storage).step == 5
    storage.prune(keep=1)
    storage.clear()
    files = [file for folder in storage.backend.list() for file in everything(storage.backend, folder)]
    assert not [file for file in files if "killed" in file or "late" in file or ".old" in file], files
    kept = [file for file in files if file.endswith("rank-00000.bin")]
    assert len(kept) == 4, "withdrawn ones and the newest, and no other"


def everything(backend, folder):
    """The paths of all files in a folder."""
    below = [
        path
        for each in backend.list(folder)
        if each != folder.split("/")[-1]
        for path in everything(backend, f"{folder}/{each}")
    ]
    return below or [folder]


class Proxy:
    """HTTP between a client and the store: `answer(method, path)` may spoil an answer after the store has acted, or before."""

    def __init__(self, port):
        self.before, self.after = (lambda *_: None), (lambda *_: None)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status = proxy.before(self.command, self.path)
                reply, data, headers = None, b"", []
                if status is None:
                    store = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                    store.request(self.command, self.path, body, dict(self.headers))
                    reply = store.getresponse()
                    data, headers = reply.read(), reply.getheaders()
                    status = proxy.after(self.command, self.path)
                    store.close()
                if status is not None:
                    reply, data, headers = None, b"", []
                self.send_response(reply.status if reply else status)
                for key, value in headers:
                    if key.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                        self.send_header(key, value)
                length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def proxy(s3, monkeypatch):
    proxy = Proxy(s3.port)
    monkeypatch.setattr(s3, "env", {**s3.env, "AWS_ENDPOINT_URL": proxy.url})
    yield proxy
    proxy.server.shutdown()


def test_a_manifest_that_was_stored_but_answered_with_an_error_is_a_commit(proxy, bucket):
    failed = []

    def once(method, path):
        if method == "PUT" and path.split("?")[0].endswith("manifest.json") and not failed:
            failed.append(path)
            return 500
        return None

    proxy.after = once
    assert commit(bucket, 5, "a") and failed
    assert bucket.steps() == [5] and newest(bucket).step == 5


def test_a_commit_of_which_nothing_is_known_keeps_its_files(proxy, bucket):
    """Neither was the manifest answered for nor can it be read: whoever deletes the files may destroy a checkpoint."""
    proxy.before = lambda method, path: 403 if "manifest.json" in path else None
    with pytest.raises(Unclear):
        commit(bucket, 5, "a")
    proxy.before = lambda *_: None
    assert bucket.backend.list("step-00000005/a") == ["rank-00000.bin"] and bucket.steps() == []
    bucket.prepare()
    assert bucket.backend.list("step-00000005/a") == ["rank-00000.bin"]


def test_a_failure_after_the_commit_is_none_of_the_save(proxy, bucket, tmp_path):
    world, events, committed = alone(), [], []
    (tmp_path / "outcome.json").write_text(json.dumps({"attempt": world.attempt}))
    proxy.after = lambda method, path: committed.append(path) if method == "PUT" and "manifest" in path else None
    proxy.before = lambda method, path: 403 if committed and "list-type" in path else None
    checkpoints = manager.Checkpoints(bucket, folder=tmp_path, world=world, keep=1, facts={}, on_commit=events.append)
    checkpoints.save(state={"model/x": torch.ones(3)}, position={"step": 5})
    checkpoints.flush()
    assert committed and [event.get("step") for event in events] == [5]
    proxy.before = lambda *_: None
    assert bucket.steps() == [5] and newest(bucket).step == 5


@pytest.mark.unit
def test_a_save_that_takes_longer_than_the_ranks_wait_after_a_death_is_repeated(tmp_path, monkeypatch):
    goes_on, put = threading.Event(), Directory.put
    monkeypatch.setattr(manager, "OTHERS_S", 0.05)
    monkeypatch.setattr(Directory, "put", lambda self, name: goes_on.wait() and put(self, name))
    checkpoints = manager.Checkpoints(Storage(str(tmp_path)), folder=tmp_path, world=alone(), keep=1, facts={})
    checkpoints.save(state={"model/x": torch.ones(3)}, position={"step": 5})
    assert checkpoints.give_up()
    goes_on.set()
    checkpoints.settle(30)
    assert not checkpoints.give_up()


def test_a_put_that_lands_late_harms_nothing(bucket):
    """Rank 0 of an old attempt was killed while its manifest was under way; the next attempt has begun and saved."""
    manifests = {}
    for step in (5, 7):
        files = draft(bucket, step, "old", b"old")
        whole = {"format": protocol.FORMAT, "step": step, "attempt": "old", "world_size": 1}
        whole["files"] = {f"old/{name}": facts for name, facts in files.items()}
        manifests[step] = json.dumps(whole).encode()
    bucket.prepare()
    assert commit(bucket, 5, "new", b"new")
    bucket.prune(keep=3)
    with pytest.raises(FileExistsError):
        bucket.backend.publish("step-00000005/old", "step-00000005", manifests[5])
    bucket.backend.publish("step-00000007/old", "step-00000007", manifests[7])
    assert newest(bucket).step == 7 and content(bucket, 7) == b"old" and content(bucket, 5) == b"new"
    assert commit(bucket, 8, "new") and not bucket.prune(keep=3) and newest(bucket).step == 8


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path, request, kind):
    storage = Storage(str(tmp_path)) if kind == "folder" else request.getfixturevalue("bucket")
    commit(storage, 5, "old")
    place = next(iter(storage.manifest(5)["files"]))
    if kind == "folder":
        (tmp_path / "step-00000005" / place).write_bytes(b"abd")
    else:
        storage.backend.fs.pipe_file(f"{storage.backend.base}/step-00000005/{place}", b"abd")
    assert commit(storage, 5, "new", b"new")
    assert newest(storage).manifest["attempt"] == "new" and content(storage, 5) == b"new" and len(storage.bad()) == 1


@pytest.mark.unit
def test_a_file_that_rank_0_does_not_see_is_no_part_of_a_commit(tmp_path):
    clock = ManualClock()
    storage, began = Storage(str(tmp_path), clock=clock), clock.now
    files = {**draft(storage, 5, "a"), "rank-00001.bin": {"size": 3, "sha256": ""}}
    with pytest.raises(StorageError, match=r"rank-00001\.bin is missing on rank 0"):
        storage.commit(5, "a", {"step": 5, "attempt": "a"}, files)
    assert storage.steps() == []
    assert protocol.SEEN_WITHIN_S <= clock.now - began < protocol.SEEN_WITHIN_S + 1


@pytest.mark.unit
def test_a_file_that_rank_0_sees_late_is_waited_for(tmp_path):
    clock = ManualClock()
    storage, late = Storage(str(tmp_path), clock=clock), tmp_path / ".step-00000005.a/rank-00001.bin"
    files = {**draft(storage, 5, "a"), late.name: {"size": 3, "sha256": ""}}
    clock.at(2.0, lambda: late.write_bytes(b"a"))
    clock.at(4.0, lambda: late.write_bytes(b"abc"))
    assert storage.commit(5, "a", {"step": 5, "attempt": "a"}, files) and storage.steps() == [5]
    assert (tmp_path / "step-00000005/rank-00001.bin").read_bytes() == b"abc"


def test_nodes_that_do_not_share_the_folder_are_told_so(tmp_path):
    folders = [tmp_path / str(node) for node in range(2)]
    for folder in folders:
        folder.mkdir()
    nodes = on_nodes("train", "output_dir=run", "max_steps=5", folders=folders)
    first, second = [finish(process, tmp_path / str(node) / "run") for node, process in enumerate(nodes)]
    assert first.code and second.code
    out = first.out + second.out
    assert "is not the folder that rank 0 writes to" in out and "exitcode  : 5 " in out, out


def test_checkpoints_that_are_gone_are_missed(tmp_path):
    """A run that was finished, and then its checkpoints deleted or another place given."""
    line = (*SAVING, "checkpoint.every_steps=10")
    run(tmp_path / "run", *line)
    elsewhere = run(tmp_path / "run", *line, "max_steps=22", f"checkpoint.storage={tmp_path / 'else'}", ok=False)
    assert elsewhere.code == 4 and "step 20 was saved as" in elsewhere.said[0], elsewhere.out
    shutil.rmtree(tmp_path / "run/checkpoints")
    for _ in range(2):
        deleted = run(tmp_path / "run", *line, "max_steps=22", ok=False)
        assert deleted.code == 4 and "step 20 was saved as" in deleted.said[0], deleted.out
    again = run(tmp_path / "run", *line, "checkpoint.resume=never")
    assert again.events("start") and again.outcome["checkpoint"]["step"] == 20


def test_of_two_runs_on_one_storage_the_later_resumes_and_the_earlier_ends(tmp_path, s3):
    """In two folders, where no lease tells one of the other; and whoever moves its folder is no other run."""
    url = "checkpoint.storage=s3://muster/owned"
    line = ("data._target_=kit.parts.data.Numbered", "model._target_=kit.parts.models.Slow", "checkpoint.keep=2", url)
    endless = (*line, "checkpoint.every_steps=10", "max_steps=100000")
    a, b = tmp_path / "a", tmp_path / "b"
    earlier = start(a, *endless, ranks=2, torchrun=("--max-restarts=3",), env=s3.env)
    later = None
    try:
        wait_for(a, saved(20), process=earlier)
        later = start(b, *endless, env=s3.env)
        lost = finish(earlier, a, timeout_s=60)
        wait_for(b, lambda found: len(found.events("checkpoint")) >= 3, process=later)
        later.send_signal(signal.SIGTERM)
        won = finish(later, b)
    finally:
        for process in filter(None, (earlier, later)):
            process.kill()
    attempt = won.outcome["attempt"]
    assert lost.said == [
        f"muster: storage error: checkpoint.storage=s3://muster/owned was taken over by a run in {b} on {won.outcome['host']} "
        f"(attempt {attempt}): give each run a storage of its own"
    ], lost.out
    assert lost.outcome["exit_code"] == 5 and lost.code == 1, lost.out
    assert len(lost.events("start")) == 1 and not lost.events("resume"), "torchrun has started it again"
    assert len(lost.events("checkpoint_failed")) == 1
    assert won.code == 75 and f"last used by a run in {a} on" in won.said[0], won.out
    # The last one of the earlier run may be committed while the later one lists them.
    assert won.events("resume")[0]["step"] in [event["step"] for event in lost.events("checkpoint")][-2:]
    assert won.events("resume")[0]["step"] >= 20
    steps = [event["step"] for event in won.events("checkpoint")][-2:]
    assert s3.steps("owned") == steps, "something of the one that goes on is gone, or something of the other was added"
    assert {json.loads(s3.fs().cat(f"muster/owned/step-{step:08d}/manifest.json"))["attempt"] for step in steps} == {
        attempt
    }
    b.rename(tmp_path / "moved")
    moved = run(tmp_path / "moved", *line, f"max_steps={steps[-1] + 5}", env=s3.env)
    assert [event["step"] for event in moved.events("resume")][1:] == [steps[-1]]
    shutil.rmtree(tmp_path / "moved")
    empty = run(tmp_path / "moved", *line, f"max_steps={steps[-1] + 10}", env=s3.env)
    assert moved.said == empty.said == [] and empty.events("resume")[0]["step"] == steps[-1] + 5
    (marker,) = s3.fs().glob("muster/owned/owner-*.json")
    assert json.loads(s3.fs().cat(marker))["folder"] == str(tmp_path / "moved")


def storage_lease(storage, folder, attempt, *agents):
    return StorageLease(storage, folder=folder, attempt=attempt, agents=list(agents))


def place(kind, tmp_path, request):
    if kind == "bucket":
        return request.getfixturevalue("bucket")
    return Storage(str(tmp_path / "s") if kind == "folder" else f"kit.parts.backends.Sqlite://{tmp_path}/s.db")


@pytest.mark.parametrize("kind", ["folder", "bucket", "sqlite"])
def test_of_claims_at_once_each_has_a_token_of_its_own_and_one_holds(tmp_path, request, kind):
    storage = place(kind, tmp_path, request)
    storage.prepare()
    known = set()
    for turn in range(5):
        owners = [storage_lease(storage, tmp_path / str(n), f"{turn}-{n}", f"agent-{n}") for n in range(4)]
        gate = threading.Barrier(len(owners))

        def claim(each, gate=gate):
            gate.wait()
            each.claim(Outcome())

        with ThreadPoolExecutor() as pool:
            list(pool.map(claim, owners))
        tokens = {each.token for each in owners}
        assert len(tokens) == len(owners) and min(tokens) > max(known, default=0), tokens
        known = tokens
        for each in owners:
            if each.token == max(tokens):
                each.check()
            else:
                with pytest.raises(Lost, match="was taken over by a run in"):
                    each.check()
    storage_lease(storage, tmp_path, "last", "agent").claim(Outcome())
    assert [each for each in storage.backend.list() if not each.startswith("owner-")] == []
    assert len(storage.backend.list()) == 1, "markers pile up"


def test_a_restart_does_not_take_back_what_another_run_has_taken_over(bucket, tmp_path, capfd):
    """A new launch does; and markers that somebody cleared away are nobody's."""
    first, second = (tmp_path / "1", "a", "agent-1"), (tmp_path / "2", "b", "agent-2")
    storage_lease(bucket, *first).claim(Outcome())
    killed = Outcome(outcome="running", attempt="a", agents=("agent-1",))
    again = storage_lease(bucket, tmp_path / "1", "a2", "agent-1")
    again.claim(killed)
    assert capfd.readouterr().err == ""
    storage_lease(bucket, *second).claim(Outcome())
    assert f"last used by a run in {tmp_path / '1'} on" in capfd.readouterr().err
    killed = Outcome(outcome="running", attempt="a2", agents=("agent-1",))
    with pytest.raises(Lost, match=rf"was taken over by a run in {tmp_path / '2'} on .* \(attempt b\): give each run"):
        storage_lease(bucket, tmp_path / "1", "a3", "agent-1").claim(killed)
    launched = storage_lease(bucket, tmp_path / "1", "a4", "agent-3")
    launched.claim(killed)
    launched.check()
    bucket.backend.delete("owner-00000004.json")
    launched.check()


def test_a_claim_that_was_stored_but_answered_with_an_error_is_one(proxy, bucket, tmp_path):
    failed = []

    def once(method, path):
        if method == "PUT" and "owner-" in path and not failed:
            failed.append(path)
            return 500
        return None

    proxy.after = once
    claimed = storage_lease(bucket, tmp_path, "a", "agent")
    claimed.claim(Outcome())
    claimed.check()
    assert failed and claimed.token == 1


def test_a_refused_run_leaves_the_drafts_of_who_is_at_work_alone(tmp_path):
    """Two runs of different configs with one folder for their checkpoints."""
    storage = f"checkpoint.storage={tmp_path / 'both'}"
    run(tmp_path / "a", *SAVING, storage)
    (tmp_path / "both/.step-00000025.other").mkdir()
    before = sorted(path.name for path in (tmp_path / "both").iterdir())
    refused = run(tmp_path / "b", *SAVING, storage, "seed=1", ok=False)
    assert refused.code == 2 and f"{tmp_path / 'both'} holds another run: seed" in refused.said[0], refused.out
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == before


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_whose_folder_is_removed_ends(tmp_path, ranks):
    endless = ("data._target_=kit.parts.data.Numbered", "model._target_=kit.parts.models.Slow", "max_steps=100000")
    process = start(tmp_path / "run", *endless, "checkpoint.every_steps=10", ranks=ranks)
    wait_for(tmp_path / "run", reached(15), process=process)
    (tmp_path / "run").rename(tmp_path / "gone")
    result = finish(process, tmp_path / "run")
    assert "no longer exists" in result.out and "restore it" in result.out
    assert (result.code == 5) if ranks is None else ("exitcode  : 5 " in result.out), result.out
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_name_that_is_a_pattern_is_refused(tmp_path):
    """fsspec would take it for one, and a run for an empty place."""
    result = run(tmp_path / "run", *SAVING, "checkpoint.storage='s3://muster/run[1]'", ok=False)
    assert result.code == 2 and "run[1]" in result.said[0] and "pattern" in result.said[0], result.out


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_what_cannot_be_read_just_now_is_not_bad(tmp_path, request, monkeypatch, kind):
    """A time-out, a stale handle: tried again, and if it stays, the run ends; nothing is quarantined."""
    backend = Storage(str(tmp_path)).backend if kind == "folder" else request.getfixturevalue("bucket").backend
    storage = Storage(backend, clock=ManualClock())
    for step in (1, 2):
        commit(storage, step, "a")
    failures, size = [1], storage.backend.size

    def flaky(file):
        if failures and failures.pop():
            raise TimeoutError("the server is busy")
        return size(file)

    monkeypatch.setattr(storage.backend, "size", flaky)
    assert newest(storage).step == 2
    failures.extend([1] * 100)
    with pytest.raises(StorageError, match=r"cannot read .*the server is busy"):
        newest(storage)
    assert storage.steps() == [2, 1] and storage.bad() == []


@pytest.mark.unit
def test_another_runs_checkpoints_are_only_read(tmp_path):
    storage = Storage(str(tmp_path))
    for step in (1, 2):
        commit(storage, step, "a")
    (tmp_path / "step-00000002/rank-00000.bin").write_bytes(b"")
    bad = []
    assert newest(storage, on_bad=bad.append, own=False).step == 1
    assert len(bad) == 1 and storage.steps() == [2, 1]


def test_start_over_before_there_was_anything(tmp_path):
    result = run(tmp_path / "run", *SAVING, f"checkpoint.storage={tmp_path / 'there'}", "checkpoint.resume=never")
    assert result.events("start") and (tmp_path / "there/step-00000020").is_dir()


needs_mount = pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs root to mount")


def on_small_disk(tmp_path, size, *overrides, ranks):
    """A run whose folder is a tmpfs of `size`, in a mount namespace of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    copy = tmp_path / "run"
    script = (
        f"mount -t tmpfs -o size={size} none '{folder}' && \"$@\"; code=$?; cp -r '{folder}/run' '{copy}'; exit $code"
    )
    line = command(f"output_dir={folder}/run", *QUIET, *overrides, ranks=ranks)
    return finish(
        subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", *line],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        ),
        copy,
    )  # fmt: skip


@pytest.mark.nightly(but=["None"])
@pytest.mark.parametrize("ranks", [None, 2])
@needs_mount
def test_a_full_disk_ends_the_run_after_the_limit(tmp_path, ranks):
    """Room for some checkpoints but not for `keep`: what is there stays valid, no draft is left."""
    line = ("model.hidden=[4096]", "checkpoint.every_steps=5", "checkpoint.keep=20", "max_steps=100")
    result = on_small_disk(tmp_path, "5m", *line, ranks=ranks)
    assert result.outcome["exit_code"] == 5, result.out
    assert "No space left on device" in result.outcome["error"], result.out
    assert len(result.events("checkpoint_failed")) == 3
    names = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
    assert names and all(name.startswith("step-") for name in names), names
    failed = result.events("checkpoint_failed")
    assert result.outcome["step"] > int(names[-1][5:]) and "No space left" in failed[0]["failed"]


@pytest.mark.nightly
@needs_mount
def test_a_disk_that_is_full_for_a_while(tmp_path):
    """Training goes on and the next checkpoint is written when there is room again; no step is missing."""
    line = ("model._target_=kit.parts.models.FillsDisk", "checkpoint.every_steps=5", "max_steps=40")
    result = on_small_disk(tmp_path, "3m", *line, ranks=2)
    assert result.code == 0, result.out
    assert 1 <= len(result.events("checkpoint_failed")) <= 2
    assert result.events("checkpoint")[-1]["step"] == 40
    assert result.lines("train")[-1]["step"] == 40
