"""What is to be seen of a run: where its time goes, who is late, the page, the live view, what others scrape."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import certifi
import pytest
from kit.job import ROOT, command, environment, finish, free_port, hold, reached, run, saved, start, wait_for
from kit.until import until

from muster.loggers import trainjob
from muster.loggers.console import Bar
from muster.report.figures import curves
from muster.report.history import History
from muster.report.page import spans, write_report
from muster.report.watch import _how_well
from muster.timing import clock as clock_module
from muster.timing.clock import WINDOWS, Clock, Stragglers, Times, gathered, spread

SEEN = ("log.report=true", "log.every_steps=5")
LATE = ("model._target_=kit.parts.own.Late", "max_steps=200", *SEEN)


def tool(*arguments, cwd, columns=80, **more):
    line = [sys.executable, "-m", "train.report", *map(str, arguments)]
    env = environment(COLUMNS=str(columns), TERM="dumb", **more)
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True)


class Seen(HTMLParser):
    """A page's words, the figures in it, and what it would load from elsewhere."""

    def __init__(self, path):
        super().__init__()
        self.words, self.loads, self.links, self.tag = [], [], [], ""
        text = path.read_text()
        self.feed(text)
        found = re.search(r"const figures = (.*), dark = ", text)
        self.figures = json.loads(found[1])

    def handle_starttag(self, tag, attrs):
        self.tag = tag
        links = [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "a":  # loads nothing before a click: a file of the run, beside the page
            self.links += links
            links = [link for link in links if "://" in link or link.startswith("/")]
        self.loads += links
        self.loads += [tag] if tag in ("link", "iframe", "object", "embed") else []

    def handle_data(self, data):
        if self.tag not in ("script", "style"):
            self.words.append(data.strip())

    def figure(self, title):
        return next(figure for figure in self.figures if figure["title"] == title)

    @property
    def text(self):
        return " ".join(filter(None, self.words))


# Where the time goes


@pytest.mark.unit
def test_a_clock_tells_waits_from_work(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passes(seconds):
        now[0] += seconds

    def slowly(items, seconds):
        for item in items:
            passes(seconds)
            yield item

    clock = Clock(lambda: 0.25)
    clock.begin()
    for _ in clock.waiting(slowly([1, 2], 1.0)):
        with clock.spending("checkpoint"):
            passes(0.5)
        passes(4.0)
    with clock.spending("evaluation"):
        list(clock.waiting(slowly([1], 0.125)))  # data of an evaluation are a part of it
        with clock.spending("checkpoint"):  # a stop within it
            passes(0.25)
    assert clock.read() == Times(seconds=11.375, data=2.0, wait=0.25, evaluation=0.125, checkpoint=1.25)
    assert clock.rest() == Times(), "reading begins anew"


@pytest.mark.unit
def test_a_sum_over_ranks_is_everybodys_times():
    times = [Times(1.0, 0.1, 0.2, 0.3, 0.4), Times(2.0, 0.5, 0.6, 0.7, 0.8), Times(3.0)]
    rows = [spread(each, rank=rank, size=3) for rank, each in enumerate(times)]
    assert gathered([sum(column) for column in zip(*rows, strict=True)]) == times


@pytest.mark.unit
def test_only_who_is_late_time_and_again_is_named():
    even = [Times(1.0, wait=0.5), Times(1.0, wait=0.5), Times(1.0, wait=0.45)]
    late = [Times(1.0, wait=0.6), Times(1.0, wait=0.1), Times(1.0, wait=0.6)]
    other = [Times(1.0, wait=0.1), Times(1.0, wait=0.6), Times(1.0, wait=0.6)]
    look = Stragglers().look
    assert [look(window) for window in (even, even, late, late, other, late, even, late, late)] == [None] * 9
    told = look(late)
    assert (told.rank, told.cause) == (1, "compute") and told.share == pytest.approx(0.5)
    assert look(late) is None, "once"
    assert WINDOWS == 3 and [look(other) for _ in range(3)][-1].rank == 0


@pytest.mark.nightly(but=["()"])
@pytest.mark.parametrize("more", [(), ("dist.shared_memory=false",), ("virtual_world_size=3",)], ids=str)
def test_a_late_rank_is_named_with_its_host_and_the_share_lost(tmp_path, more):
    result = run(tmp_path / "run", *LATE, *more, ranks=3, env={"LATE_S": "0.02"})
    told = result.events("straggler")
    assert told and told[0]["rank"] == 1 and told[0]["host"] == os.uname().nodename and told[0]["cause"] == "compute"
    assert told[0]["share_lost"] > 0.3
    assert "straggler: step=" in result.out


def test_a_rank_with_a_slow_disk_is_told_from_one_that_computes_slowly(tmp_path):
    disk = ("data._target_=kit.parts.own.SlowDisk", "model._target_=kit.parts.own.Late", "max_steps=25", *SEEN)
    told = run(tmp_path / "run", *disk, "batch_size=30", ranks=3, env={"LATE_S": "0.02"}).events("straggler")
    # rank 1 computes 20 ms longer, and nobody has to hear of it; rank 2 reads 10 samples a step, 200 ms
    assert told and {(line["rank"], line["cause"]) for line in told} == {(2, "data")}


@pytest.mark.nightly
def test_where_the_time_went_adds_up(tmp_path):
    """Killed, resumed on another number of ranks, finished: every second is in one of the parts."""
    line = ("model._target_=kit.parts.own.Late", "max_steps=120", "checkpoint.every_steps=60", *SEEN)
    began = time.time()
    process = start(tmp_path / "run", *line, *hold(77), ranks=2, env={"LATE_S": "0.05"}, cold=True)
    wait_for(tmp_path / "run", lambda found: reached(75)(found) and saved(60)(found), process=process)
    process.send_signal(signal.SIGKILL)
    finish(process, tmp_path / "run")
    time.sleep(1)
    run(tmp_path / "run", *line, ranks=3, env={"LATE_S": "0.1"}, cold=True)
    history = History.of(tmp_path / "run")
    assert sum(history.spent.values()) == pytest.approx(history.seconds, abs=0.01)
    assert history.seconds < time.time() - began
    assert history.spent["repeated steps"] > 0.1 and history.spent["down"] > 0.5
    assert history.spent["start"] > 0.5 < history.spent["restart"] and history.spent["evaluation"] > 0
    assert 0 < history.goodput < 0.9
    fits, told = history.ledger
    assert fits and "120 steps, as planned" in told and "begun by two attempts" in told
    assert len(history.by_rank) == 3 and max(history.by_rank, key=lambda row: row["compute"]) is history.by_rank[1]
    assert history.time_of(120) > history.time_of(60) > 0


def test_a_ledger_that_does_not_fit_is_said(tmp_path):
    run(tmp_path / "run", "max_steps=20", "log.every_steps=5")
    path = tmp_path / "run/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line.get("step") == 10)["samples"] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert History.of(tmp_path / "run").ledger[0] is False


# The page


@pytest.mark.nightly
def test_the_page_of_a_run_at_its_every_end(tmp_path):
    """Preempted, then failed, then done: each end leaves a page that says so; it loads nothing from anywhere."""
    folder, line = tmp_path / "run", (*LATE, "checkpoint.every_steps=20")
    process = start(folder, *line, "max_steps=100000", ranks=2, env={"LATE_S": "0.02"})
    wait_for(folder, reached(40), process=process)
    process.send_signal(signal.SIGTERM)
    at = finish(process, folder).outcome["step"]
    line = (*line, f"max_steps={at + 160}")
    page = Seen(folder / "report.html")
    assert "preempted" in page.text and page.loads == []
    assert {"metrics.jsonl", "checkpoints"} <= set(page.links) and all((folder / link).exists() for link in page.links)
    failed = run(
        folder,
        *line,
        "optimizer.lr=1e30",
        "checkpoint.accept_changes=true",
        ranks=2,
        ok=False,
        env={"LATE_S": "0"},
        cold=True,
    )
    text = Seen(folder / "report.html").text
    assert failed.code != 0 and failed.outcome["error"][:60] in text
    assert (
        f"on {failed.outcome['failed_host']} after step" in text
        and "resumes the run from the checkpoint of step" in text
    )
    watched = " ".join(tool("--watch", "--once", folder, cwd=tmp_path, columns=100).stdout.split())
    for words in (
        failed.outcome["error"],
        f"resumes the run from the checkpoint of step {at}:",
        "--nproc-per-node=2 -m train output_dir=",
    ):
        assert words in watched, watched
    (told,) = failed.events("failed")
    assert (told["rank"], told["exit_code"], told["host"]) == (failed.outcome["rank"], 6, failed.outcome["failed_host"])
    assert "torch.distributed.run --standalone --nproc-per-node=2 -m train output_dir=" in text, (
        "the command resumes it"
    )
    watched = tool("--watch", "--once", folder, cwd=tmp_path, columns=200).stdout
    assert "diverged" in watched and failed.outcome["error"][:60] in watched
    shutil.rmtree(folder / "checkpoints" / sorted(p.name for p in (folder / "checkpoints").glob("step-*"))[-1])
    (folder / "outcome.json").unlink()
    run(folder, *line, "checkpoint.accept_changes=true", ranks=3, env={"LATE_S": "0"})
    page = Seen(folder / "report.html")
    assert "memory, rank 0 at most" in page.text and "2 rank" in page.text and "waits for the next batch" in page.text
    assert (folder / "report.html").stat().st_size < 3e6, "Plotly is compressed"
    assert "done" in page.text and f"{at + 160} of {at + 160}" in page.text and "as planned, each once" in page.text
    loss = page.figure("loss")
    assert [trace["name"] for trace in loss["data"]] == ["train", "test"]
    assert [mark["what"] for mark in loss["marks"] if "preempted" in mark["what"]] and "3 ranks" in str(loss["marks"])
    assert {trace["name"] for trace in page.figure("where the time went")["data"]} >= {"steps", "start", "restart"}
    assert len(page.figure("each rank's steps, in the last attempt")["data"][0]["x"]) == 3
    assert page.figure("seconds to write a checkpoint, behind the training")


@pytest.mark.nightly
def test_the_page_of_a_run_that_was_over_at_once_has_all_that_its_files_have(tmp_path):
    """Ten steps are less than a window of timing.jsonl, and the last evaluation comes after the last log line."""
    run(tmp_path / "run", "max_steps=10", *SEEN, ranks=2)
    page = Seen(tmp_path / "run/report.html")
    assert len(page.figure("each rank's steps, in the last attempt")["data"][0]["x"]) == 2
    assert "evaluation" in {trace["name"] for trace in page.figure("where the time went")["data"]}
    assert tool("run", "--output", "again.html", cwd=tmp_path).returncode == 0
    assert Seen(tmp_path / "again.html").figures == page.figures


@pytest.mark.nightly
def test_a_run_of_a_sweep_that_failed_before_it_began_is_on_the_page(tmp_path):
    sweep = tmp_path / "sw"
    sweep.mkdir()
    run(sweep / "lr-0.1", "optimizer.lr=0.1", "max_steps=3")
    run(sweep / "lr-0.2", "optimizer.lr=0.2", "max_steps=3")
    nowhere = f"data.root={tmp_path}/nowhere"
    failed = run(sweep / "elsewhere", "data=imagefolder", nowhere, "model=resnet18", ok=False)
    assert failed.code == 3 and not (sweep / "elsewhere/metrics.jsonl").exists()
    assert tool("sw", cwd=tmp_path).returncode == 0
    page = Seen(sweep / "report.html")
    assert "elsewhere" in page.text and "data error" in page.text and "nowhere/train is not a folder" in page.text
    assert "optimizer.lr" in page.text and "model.hidden" not in page.text.partition("Configurations")[0], (
        "what it did not come to differs in nothing"
    )
    watched = tool("--watch", "--once", "sw", cwd=tmp_path).stdout
    assert "has not started: data error" in watched and "lr-0.2" in watched


@pytest.mark.nightly
def test_the_page_waits_for_the_cause_that_another_rank_is_slow_to_write(tmp_path):
    line = ("model._target_=kit.parts.models.AllCrash", "max_steps=20", *SEEN)
    failed = run(tmp_path / "run", *line, ranks=2, ok=False, module="kit.slow", env={"SLOW_RECORD_S": "3"})
    assert failed.code != 0 and "the user's own mistake" in failed.outcome["error"], failed.out
    page = Seen(tmp_path / "run/report.html")
    assert "the user's own mistake" in page.text and "running" not in page.text
    assert "Traceback" in page.text and "models.py" in page.text


def test_no_text_of_a_run_ends_the_script(tmp_path):
    evil = "a</script><script>document.title=1</script>"
    folder = tmp_path / "x"
    run(folder, "max_steps=10", "log.every_steps=5")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "event", "event": evil, "time": 1.0}) + "\n")
        file.write(json.dumps({"kind": "eval", "step": 10, "epoch": 0, evil: 0.5, "loss": 1.0}) + "\n")
    assert tool(folder, cwd=tmp_path).returncode == 0
    text = (folder / "report.html").read_text()
    assert evil not in text and text.count("</script>") == 2
    assert evil in Seen(folder / "report.html").text


@pytest.mark.nightly
def test_the_page_links_the_files_that_the_output_went_to(tmp_path):
    """A batch script names its own; else it is where the process writes. One that is gone is not linked."""
    folder, log = tmp_path / "run", tmp_path / "muster-7.log"
    log.write_text("")
    for step, named in ((5, "/nowhere/muster-6.log"), (10, str(log)), (15, "")):
        env = environment(MUSTER_LOG=named)
        with (tmp_path / "own.log").open("a") as own:
            line = command(f"output_dir={folder}", f"max_steps={step}", "log.every_steps=5", ranks=None)
            subprocess.run(line, cwd=tmp_path, env=env, stdout=own, check=True)
    links = Seen(folder / "report.html").links
    assert {"../muster-7.log", "../own.log"} <= set(links) and not [link for link in links if "muster-6" in link], links


@pytest.mark.unit
def test_no_figure_stands_alone_in_its_row():
    """Of 12 columns: rows of three, and of two where a third would be alone."""
    rows = {number: spans(number) for number in range(1, 9)}
    assert rows[1] == [12] and rows[2] == [6, 6] and rows[3] == [4] * 3 and rows[5] == [4] * 3 + [6] * 2
    assert all(len(row) == number and sum(row) % 12 == 0 for number, row in rows.items())


@pytest.mark.unit
def test_a_sweep_has_no_figure_of_what_is_the_same(tmp_path):
    line = {"kind": "train", "epoch": 0, "lr": 0.1, "grad_norm": 2.0, "samples": 1, "samples_per_s": 1.0}
    runs = [
        History(tmp_path / str(number), [{**line, "step": step, "loss": 1.0 + number} for step in (1, 2)], [], {})
        for number in range(3)
    ]
    assert [figure["title"] for figure in curves(runs)] == ["loss"]
    assert "learning rate" in {figure["title"] for figure in curves(runs[:1])}, "of one run it says the rate"


@pytest.mark.unit
def test_bar_page_and_live_view_count_restarts_alike(tmp_path):
    """A launch that found the run finished, and a rank that was restarted in place, are none."""
    begun = [
        ("start", "a"),
        ("resume", "b"),
        ("survived", "b"),
        ("done", "b"),
        ("resume", "c"),
        ("done", "c"),
        ("resume", "d"),
    ]
    facts = {"kind": "event", "world_size": 2, "total_steps": 9, "time": 1.0, "step": 4, "rank": 1, "host": "h"}
    lines = [{**facts, "event": name, "attempt": attempt} for name, attempt in begun]
    lines[5]["note"] = "finished already"
    bar = Bar(step=0, total_steps=9, earlier=lines)
    try:
        assert bar.ranks == "2 ranks, 2 restarts, 1 death survived"
    finally:
        bar.close()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "2 restarts  1 death survived" in _how_well(History.of(tmp_path), 80).plain
    assert "<span>attempts</span><b>3</b>" in write_report(tmp_path).read_text()


@pytest.mark.nightly
def test_runs_beside_each_other(tmp_path):
    line = [
        sys.executable,
        "-m",
        "train",
        "-m",
        "name=grid",
        "max_steps=20",
        "optimizer.lr=0.01,0.1,1",
        "log.tensorboard=false",
    ]
    subprocess.run(line, cwd=tmp_path, env=environment(), check=True, capture_output=True)
    done = tool("runs/grid", "--output", "sweep.html", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "sweep.html", done.stderr
    page = Seen(tmp_path / "sweep.html")
    axes = page.figure("what was tried and what came of it")["data"][0]["dimensions"]
    assert [axis["label"] for axis in axes] == ["optimizer.lr", "accuracy", "loss"]
    losses = [History.of(tmp_path / "runs/grid" / f"lr-{lr}").last_values["loss"] for lr in (0.01, 0.1, 1)]
    ordered = sorted(zip(losses, (0.01, 0.1, 1.0), strict=True))
    assert axes[0]["values"] == [lr for _, lr in ordered] and axes[0]["log"], (
        "the best comes first; rates are on a log axis"
    )
    assert axes[2]["values"] == sorted(losses) and "The best loss" in page.text
    assert page.links == [f"runs/grid/lr-{lr:g}/report.html" for _, lr in ordered] and page.loads == []
    titles = {figure["title"] for figure in page.figures}
    assert "loss" in titles and "learning rate" not in titles, "each run has one, which the table names"
    assert len(page.figure("loss")["data"]) == 6 and "3 runs" in page.text
    two = tool(*sorted((tmp_path / "runs/grid").iterdir())[:2], cwd=tmp_path)
    assert two.stdout.strip() == "report.html" and (tmp_path / "report.html").exists()
    (tmp_path / "report.html").unlink()
    whole = tool("runs/grid", cwd=tmp_path)
    assert whole.stdout.strip() == "runs/grid/report.html" and not (tmp_path / "report.html").exists(), whole.stderr
    (tmp_path / "runs/grid/report.html").unlink()
    jobs = [History.of(folder).stretches for folder in sorted((tmp_path / "runs/grid").iterdir())]
    assert all(after[0].began >= before[-1].ended - 0.01 for before, after in itertools.pairwise(jobs)), (
        "not its own time"
    )


def test_a_report_is_made_without_torch():
    """Whose import takes longer than the report."""
    code = "import sys, muster.report.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def test_what_is_no_run_is_refused_in_a_line(tmp_path):
    done = tool(tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("muster: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


# The live view


@pytest.mark.nightly(but=["80"])
@pytest.mark.parametrize("columns", [80, 200])
def test_the_live_view_fits_the_terminal(tmp_path, columns):
    run(tmp_path / "run", "max_steps=40", "log.every_steps=5", ranks=2)
    done = tool("--watch", "--once", "run", "nothing", cwd=tmp_path, columns=columns)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "step 40/40" in lines[0] and "goodput" in lines[0] and lines[0].startswith("run done")
    assert re.search(r"loss [\d.]+ [▁-█]+ +accuracy", lines[1]) and "2 ranks" in lines[1]
    assert "done: " in lines[2] and "has not started" in lines[3]
    plain = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }  # what has no place in this locale is escaped
    assert "goodput" in tool("--watch", "--once", "run", cwd=tmp_path, **plain).stdout
    assert tool("run", cwd=tmp_path, **plain).returncode == 0
    assert not (tmp_path / "run/report.html").read_text(encoding="utf-8").isascii()


def test_the_live_view_follows_a_run_to_its_end(tmp_path):
    line = [sys.executable, "-m", "train.report", "--watch", "run"]
    watching = subprocess.Popen(
        line, cwd=tmp_path, env=environment(TERM="xterm", COLUMNS="100"), stdout=subprocess.PIPE, text=True
    )
    run(tmp_path / "run", *LATE, ranks=2, env={"LATE_S": "0.01"})
    out, _ = watching.communicate(timeout=30)
    assert watching.returncode == 0
    assert "step 200/200" in out and "done" in out


@pytest.mark.nightly
def test_the_bar_says_what_runs_and_how_long_it_takes_yet(tmp_path):
    bar = ("log.progress=bar", "max_steps=20", "log.every_steps=5")
    run(tmp_path / "run", "max_steps=10", "log.every_steps=5", ranks=2)
    out = run(tmp_path / "run", *bar, ranks=2, env={"COLUMNS": "120", "TERM": "xterm"}, cold=True).out
    assert re.search(r"step 20/20 .*left .*loss [\d.]+, \d+ samples/s, 2 ranks, 1 restart", out), out


# What others read


def prometheus():
    """Debian's Prometheus, where it is or where it may be fetched to."""
    if there := shutil.which("prometheus"):
        return there
    if not os.environ.get("CI") or os.geteuid() != 0:
        pytest.skip("there is no prometheus here")
    cache = Path(os.environ.get("MUSTER_TEST_CACHE", "/var/tmp/muster-tests")) / "prometheus"
    if not (cache / "usr/bin/prometheus").exists():
        subprocess.run([ROOT / "tests/substrates/apt.sh", "fetch", cache, "prometheus"], check=True)
    return str(cache / "usr/bin/prometheus")


@pytest.mark.nightly
def test_prometheus_scrapes_a_run(tmp_path):
    port, own = free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: muster, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    line = [prometheus(), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    server = subprocess.Popen([*line, f"--web.listen-address=127.0.0.1:{own}"], stderr=subprocess.DEVNULL)

    seen = []

    def asked(query):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/query?query={query}", timeout=5) as answer:
                return json.load(answer)["data"]["result"]
        except (OSError, urllib.error.URLError):
            return []

    try:
        late = ("model._target_=kit.parts.own.Late", "max_steps=10000", "log.every_steps=5")
        process = start(tmp_path / "run", *late, f"metrics.port={port}", "name=mine", ranks=2, env={"LATE_S": "0.02"})
        until(lambda: asked("muster_train"), "value in Prometheus", timeout_s=60)
        until(lambda: seen.extend(asked("muster_step%3E0")) or seen, "step in Prometheus", timeout_s=30)
        (step,) = seen
        assert step["metric"]["run"] == "mine" and 0 < float(step["value"][1]) < 10000
        until(lambda: len(asked("muster_rank_seconds_total")) == 10, "time of each rank", timeout_s=30)
        listening = Path("/proc/net/tcp").read_text()
        assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening, "this host alone"
        process.send_signal(signal.SIGTERM)
        assert finish(process, tmp_path / "run").outcome["outcome"] == "preempted"
    finally:
        server.terminate()
        server.wait()


def test_a_port_that_is_taken_costs_the_run_nothing(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run(tmp_path / "run", "max_steps=3", f"metrics.port={taken.getsockname()[1]}")
    assert any("loggers.prometheus cannot start" in line for line in result.said), result.out


def test_tensorboard_has_each_step_once_after_a_kill_and_the_hyperparameters(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    line = ("model._target_=kit.parts.own.Late", "max_steps=90", "checkpoint.every_steps=40", "eval.every_steps=10")
    seen = (*line, "log.tensorboard=true", "log.every_steps=5")
    process = start(tmp_path / "run", *seen, *hold(55), ranks=2, env={"LATE_S": "0.08"})
    wait_for(tmp_path / "run", lambda found: reached(50)(found) and saved(40)(found), process=process)
    process.kill()
    finish(process, tmp_path / "run")
    result = run(tmp_path / "run", *seen, ranks=2, env={"LATE_S": "0"})
    assert result.events("resume")[0]["step"] == 40
    store_keys = EventAccumulator(str(tmp_path / "run/tensorboard"))
    store_keys.Reload()
    assert [event.step for event in store_keys.Scalars("eval/accuracy")] == list(range(10, 91, 10))
    assert [event.step for event in store_keys.Scalars("train/loss")] == list(range(5, 91, 5))
    assert store_keys.Scalars("train/loss")[-1].value == pytest.approx(result.losses[90])
    assert set(store_keys.PluginTagToContent("hparams")) == {"_hparams_/experiment", "_hparams_/session_start_info"}


class Trainer(BaseHTTPRequestHandler):
    """Answers as Kubeflow Trainer's status server; the first request by what is no HTTP."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Authorization"], json.loads(body)["trainerStatus"]))
        if len(self.server.got) == 1:
            return self.wfile.write(b"garbage\n")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_the_progress_of_a_trainjob_is_posted(tmp_path):
    """Whatever the server answers, the run goes on, and its end is told."""
    (tmp_path / "token").write_text("of the pod")
    with ThreadingHTTPServer(("127.0.0.1", 0), Trainer) as server:
        server.got = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{server.server_port}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": certifi.where(), "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        }  # fmt: skip
        done = run(tmp_path / "run", "max_steps=60", "eval.every_steps=30", env=env)
        server.shutdown()
    assert done.code == 0 and done.out.count("status cannot be posted") == 1, done.out
    path, authorization, status = server.got[-1]
    assert (path, authorization) == ("/status", "Bearer of the pod")
    assert status["progressPercentage"] == 100 and status["estimatedRemainingSeconds"] == 0
    values = {each["name"]: float(each["value"]) for each in status["metrics"]}
    assert (
        values["step"] == 60
        and values["loss"] == pytest.approx(done.losses[60], rel=1e-5)
        and "eval_accuracy" in values
    )


def test_what_is_posted_of_a_trainjob(tmp_path, monkeypatch):
    """A post that fails is made again; a value that is not finite, or has a long name, breaks nothing."""
    monkeypatch.setattr(trainjob, "EVERY_S", 0.05)
    (tmp_path / "token").write_text("of the pod\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Trainer) as server:
        server.got = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/status"
        logger = trainjob.TrainJob(address, certifi.where(), str(tmp_path / "token"), step=100, total_steps=1000)
        logger.log(
            {"kind": "train", "step": 200, "epoch": 1, "samples": 5, "loss": math.nan, "grad_norm": None, "x" * 65: 1.0}
        )
        logger.log({"kind": "event", "event": "checkpoint", "step": 200, "seconds": 0.1})
        logger.advance(200)
        until(lambda: len(server.got) > 2, "another post", timeout_s=20)
        logger.close()
        server.shutdown()
    status = server.got[-1][2]
    assert status["progressPercentage"] == 20 and status["estimatedRemainingSeconds"] >= 1
    assert status["metrics"] == [{"name": "step", "value": "200"}, {"name": "loss", "value": "nan"}]
    assert trainjob.of_environment({}, step=0, total_steps=1) == []
