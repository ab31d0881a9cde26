"""A secret in a URL stays out of everything that is written or said; weights by URL are those of that URL."""

import base64
import contextlib
import http.server
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from kit.job import ROOT, environment, run
from kit.warm import run as start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from muster.checkpoint.commit import Storage
from muster.errors import StorageError, traceback_of
from muster.redact import redacted, redacted_all, without
from muster.train.config.compose import compose
from muster.train.config.differences import differences, to_dict

SECRETS = ("hunter2", "s3cr3t", "deadbeef", "c0ffee")
SMALL = ("model.hidden=[8]", "max_steps=1", "eval.every_steps=off")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files, of which it says by an ETag what they are; a query is no part of the name."""

    tagged, seen = True, []

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = Path(self.directory, self.path.partition("?")[0].lstrip("/"))
        data = path.read_bytes()
        tag = f'"{hash(data)}"' if self.tagged else None
        is_same = tag is not None and self.headers.get("If-None-Match") == tag
        type(self).seen.append((self.path, self.headers.get("Authorization"), 304 if is_same else 200))
        self.send_response(304 if is_same else 200)
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", "0" if is_same else str(len(data)))
        self.end_headers()
        if not is_same:
            self.wfile.write(data)


@contextlib.contextmanager
def serving(folder, *, tagged=True):
    kind = type("Tagged", (Handler,), {"tagged": tagged, "seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", kind.seen
    finally:
        server.shutdown()
        server.server_close()


def weights(path, value):
    """A file of the model's weights, all of them `value`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes = {"1.weight": (8, 64), "1.bias": (8,), "3.weight": (10, 8), "3.bias": (10,)}
    torch.save({name: torch.full(shape, float(value)) for name, shape in shapes.items()}, path)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # torch's; TORCH_HOME is read at import by others


def begun(folder, url, *more, **kwargs):
    """The first weight of a run that begins with `url` and does not move."""
    result = run(folder, *SMALL, f"init_from='{url}'", "optimizer.lr=0", *more, **kwargs)
    return float(result.weights["1.weight"][0, 0]), result


@pytest.mark.nightly
def test_weights_are_those_of_the_whole_url_and_of_now(tmp_path):
    """Not another URL's of the same base name, and not those of before; a line says which."""
    for name, value in (("one", 1), ("two", 2)):
        weights(tmp_path / "served" / name / "model.pt", value)
    with serving(tmp_path / "served") as (host, seen):
        assert begun(tmp_path / "a", f"http://{host}/one/model.pt")[0] == 1
        value, second = begun(tmp_path / "b", f"http://{host}/two/model.pt")
        assert value == 2 and f"init_from: http://{host}/two/model.pt was downloaded: " in second.out
        value, again = begun(tmp_path / "c", f"http://{host}/two/model.pt", ranks=2)
        assert value == 2 and again.out.count("has not changed") == 1 and "sha256" in again.out
        assert [status for *_, status in seen] == [200, 200, 304], "one rank asks for all of a host"
        weights(tmp_path / "served/two/model.pt", 3)
        assert begun(tmp_path / "d", f"http://{host}/two/model.pt")[0] == 3
    value, alone = begun(tmp_path / "e", f"http://{host}/two/model.pt")
    assert value == 3 and "cannot be reached" in alone.out and "may have changed" in alone.out
    refused = run(tmp_path / "f", *SMALL, f"init_from=http://{host}/three/model.pt", ok=False)
    assert refused.code == 5 and len(refused.said) == 1, refused.out


def test_a_server_that_does_not_say_what_it_has_is_read_again(tmp_path):
    """Weights of one model have one length."""
    with serving(tmp_path / "served", tagged=False) as (host, seen):
        for value in (1, 2):
            weights(tmp_path / "served/model.pt", value)
            assert begun(tmp_path / str(value), f"http://{host}/model.pt")[0] == value
        assert [status for *_, status in seen] == [200, 200]


@pytest.mark.nightly
def test_a_kept_copy_that_was_spoiled_is_downloaded_anew(tmp_path):
    """Of the right size: torch reads flipped bits without a word."""
    weights(tmp_path / "served/model.pt", 1)
    with serving(tmp_path / "served") as (host, _):
        begun(tmp_path / "a", f"http://{host}/model.pt")
        (copy,) = (tmp_path / "cache").rglob("muster-*.pt")
        spoiled = copy.read_bytes().replace(b"\x00\x00\x80\x3f", b"\x00\x00\x00\x40")  # 1.0, 2.0
        assert copy.stat().st_size == len(spoiled) and spoiled != copy.read_bytes()
        copy.write_bytes(spoiled)
        value, again = begun(tmp_path / "b", f"http://{host}/model.pt", ranks=2)
        assert value == 1 and again.out.count("is downloaded anew") == 1
        assert again.out.count("was downloaded: ") == 1
        copy.write_bytes(spoiled)
    refused = run(tmp_path / "c", *SMALL, f"init_from=http://{host}/model.pt", ok=False)
    assert refused.code == 5 and "is downloaded anew" in refused.out, "nobody vouches for it offline either"


@pytest.mark.nightly
def test_an_older_file_that_was_put_back_is_noticed(tmp_path):
    """By a server that knows files by their dates alone, and takes whatever is not newer for unchanged."""
    kind = type("Dated", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(tmp_path / "served")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, said = f"http://127.0.0.1:{server.server_port}/model.pt", []
    try:
        for value, date in ((2, 2_000_000), (2, 2_000_000), (1, 1_000_000)):
            weights(tmp_path / "served/model.pt", value)
            os.utime(tmp_path / "served/model.pt", (date, date))
            found, result = begun(tmp_path / f"{len(said)}", url)
            assert found == value
            said.append("has not changed" in result.out)
    finally:
        server.shutdown()
        server.server_close()
    assert said == [False, True, False]


def test_a_secret_is_neither_written_nor_said(tmp_path):
    """In two attempts with other secrets, which are one run: the place is the same."""
    weights(tmp_path / "served/model.pt", 1)
    with serving(tmp_path / "served") as (host, seen):
        for user, signature, steps in (("bob:hunter2", "deadbeef01", 2), ("bob:s3cr3t", "c0ffee02", 4)):
            result = run(
                tmp_path / "run", *SMALL[:1], f"max_steps={steps}",
                f"init_from='http://{user}@{host}/model.pt?X-Amz-Signature={signature}&versionId=3'",
                "log.report=true", "log.tensorboard=true", f"+own.hook='https://{user}@example.org/?token={signature}'",
                "loggers=[tensorboard,csv]",
            )  # fmt: skip
            assert not any(secret in result.out for secret in SECRETS), result.out
        assert seen[0][1] == f"Basic {base64.b64encode(b'bob:hunter2').decode()}", "and the server was given it"
    assert result.events("resume")[0]["step"] == 2
    for path in (
        path for folder in (tmp_path / "run", tmp_path / "cache") for path in folder.rglob("*") if path.is_file()
    ):
        found = [secret for secret in SECRETS if secret.encode() in path.read_bytes()]
        assert not found, f"{found} in {path}"
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (
        config["init_from"] == f"http://{host}/model.pt?versionId=3" and config["own"]["hook"] == "https://example.org/"
    )
    assert EventAccumulator(str(tmp_path / "run/tensorboard")).Reload().Tags()["scalars"]


@pytest.mark.nightly(but=["None"])
@pytest.mark.parametrize("ranks", [None, 2])
def test_an_error_about_a_storage_keeps_its_secret(tmp_path, ranks):
    """fsspec and urllib quote the URL, or parts of it, in their own messages."""
    for line, code in (
        ("checkpoint.storage='ftp://bob:hunter2@127.0.0.1:9/x'", 5),
        ("checkpoint.storage='nowhere://bob:hunter2@host/x?sig=deadbeef'", 2),
        ("init_from='https://bob:hunter2@127.0.0.1:9/m.pt?sig=deadbeef'", 5),
        ("init_from='s3://bob:hunter2@bucket/m.pt'", 2),
        ("checkpoint.resume='ftp://bob:hunter2@127.0.0.1:9/x'", 5),
        ("epochs='https://bob:hunter2@host'", 2),
    )[: 2 if ranks else None]:  # fmt: skip
        result = run(tmp_path / "run", *SMALL, line, "log.report=true", ranks=ranks, ok=False)
        assert not any(secret in result.out for secret in SECRETS), result.out
        assert ranks or (result.code == code and len(result.said) == 1), result.out
        for path in (path for path in tmp_path.rglob("*") if path.is_file()):
            assert not any(secret.encode() in path.read_bytes() for secret in SECRETS), path


def test_what_a_launcher_or_hydra_prints_has_no_secret(tmp_path):
    words = ["init_from='https://bob:hunter2@host/x?token=deadbeef'"]
    code, out = start([*words, "--cfg", "job"], [environment()], cwd=tmp_path, timeout_s=60)
    assert code == 0 and "init_from: https://host/x\n" in out and "hunter2" not in out, out
    submit = [sys.executable, str(ROOT / "slurm/submit.py"), "--dry-run", "cluster=local", *words]
    done = subprocess.run(submit, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "https://host/x" in done.stdout, done.stderr
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS)


@pytest.mark.unit
def test_a_rotated_secret_is_not_another_run():
    signed = "init_from='https://b.example.org/m.pt?versionId={}&X-Amz-Date={}&X-Amz-Signature={}'"
    before = to_dict(compose([signed.format(1, "monday", "aa11")]))
    assert differences(before, compose([signed.format(1, "friday", "bb22")])) == []
    assert differences(before, compose([signed.format(2, "friday", "bb22")])) == [
        "init_from: https://b.example.org/m.pt?versionId=1 -> https://b.example.org/m.pt?versionId=2"
    ]
    old = {**before, "init_from": "https://u:p@b.example.org/m.pt?versionId=1&sig=x"}  # as it was once written
    assert differences(old, compose([signed.format(1, "friday", "bb22")])) == []


@pytest.mark.parametrize(
    "url, shown",
    [
        ("https://user:pw@host/x?versionId=3", "https://host/x?versionId=3"),
        ("https://TOKEN@host/x", "https://host/x"),
        ("sftp://u:p@ss:w@host:22/y", "sftp://host:22/y"),
        ("https://u:pa/ss@host/x", "https://host/x"),
        ("https://b.s3.amazonaws.com/k?X-Amz-Algorithm=A&X-Amz-Signature=a&partNumber=9", "https://b.s3.amazonaws.com/k?partNumber=9"),
        ("https://a.blob.core.windows.net/x?sv=1&se=2&sig=z%3D&id=3", "https://a.blob.core.windows.net/x?id=3"),
        ("simplecache::https://u:pw@host/x", "simplecache::https://host/x"),
        ("s3://a:b@bucket/x,https://u:p@host/y", "s3://bucket/x,https://host/y"),
        ("tried 'https://u:p@host/x?token=5', and gave up", "tried 'https://host/x', and gave up"),
        *((same, same) for same in (
            "abfs://container@account.dfs.core.windows.net/x", "s3://bucket/run@2x/y", "http://host:8080/a@b", "file:///a/b@c",
            "https://host/x?id=3&page=2#part", "package.module.Class:///x", "a@b.c", "no url: at all @ home", "http://[::1]:80/x@y",
        )),
    ],
)  # fmt: skip
@pytest.mark.unit
def test_what_is_shown_of_a_url_names_the_place(url, shown):
    assert redacted(url) == shown
    assert redacted_all({"a": [url, 3, None]}) == {"a": [shown, 3, None]}


@pytest.mark.unit
def test_a_library_may_quote_a_part():
    said = without("nonnumeric port: 'p@ss' of bob", "https://bob:p%40ss@host/x")
    assert "p@ss" not in said and "bob" not in said


class Quoting:
    """A storage of a library that quotes what it was given in its own error, beside the message."""

    def __init__(self, root):
        self.root = root

    def prepare(self):
        raise OSError(f"bad credentials KEY1:s3cr3t of KEY1 at {self.root.partition('@')[2]}")


@pytest.mark.unit
def test_a_traceback_may_quote_a_part():
    storage = Storage(Quoting("s3://KEY1:s3cr3t@bucket/x"))
    with pytest.raises(StorageError) as raised:
        storage.prepare()
    said = traceback_of(raised.value)
    assert "bad credentials" in said and "s3cr3t" not in said and "KEY1" not in said, said


def test_refusing_a_pickle_says_our_advice(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    torch.save({"1.weight": torch.nn.Linear(2, 2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "words.pt").write_text("no weights")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    for name, code, said in (
        ("whole", 5, "it contains torch.nn.modules.linear.Linear, which is not a tensor"),
        ("old", 5, "which is not a tensor and could run code"),
        ("words", 5, "it is not a file of weights"),
        ("tensor", 2, "contains a Tensor, not a state dict"),
    ):
        result = run(tmp_path / "run", *SMALL, f"init_from={tmp_path}/{name}.pt", ok=False)
        assert result.code == code and len(result.said) == 1, result.out
        assert said in result.said[0] and "torch.save(model.state_dict(), path)" in result.said[0]
        assert "weights_only" not in result.out and "add_safe_globals" not in result.out
