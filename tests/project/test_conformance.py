"""The conformance suite: our own column, and that its judgement can fail."""

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.job import ROOT, environment, run
from kit.ranks import on_ranks
from kit.until import until

from bench.conformance import ledger, token_loops
from bench.conformance.comparison import Reference, judge
from bench.conformance.faults import FAULTS, Scene
from bench.conformance.matrix import cell, matrix
from bench.conformance.tokens import furthest
from bench.conformance.trainers import NAMES, trainer
from bench.conformance.trainers.base import Trainer

UNDISTURBED = Reference({0: [1, 2], 1: [3, 4], 2: [5, 6]}, "none", [1, 2, 3], 0.1)


def line(step, samples, *, attempt="a", rank=0, time=None):
    return ledger.Line(time if time is not None else step, attempt, rank, pid=100 + rank, step=step, samples=samples)


def suite(*arguments, timeout_s=550):
    command = [sys.executable, "-m", "bench.conformance", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, fault", [("own_loop", "rank"), ("ours", "twice")])
def test_our_columns(tmp_path, name, fault):
    done = suite(
        f"--only={name}",
        f"--faults={fault}",
        f"--json={tmp_path / 'raw.json'}",
        "--limit-s=200",
        f"--keep={tmp_path / 'runs'}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "raw.json").read_text())["results"][trainer(name).title][FAULTS[fault].title]
    assert result["finished"] and result["weights_equal"], done.stdout
    assert result["samples"] == {"other_steps": 0, "too_often": 0, "missing": 0}
    assert result["metrics"] == {"twice": 0, "missing": 0}
    assert all(seconds is not None for seconds in result["seconds"])
    if fault == "twice":
        logs = "\n".join(path.read_text() for path in (tmp_path / "runs").rglob("log"))
        assert not result["facts"]["second trained too"] and result["exit_codes"] == [0, 1], f"{result}\n{logs}"
    until(lambda: not left_behind(tmp_path), "end of all processes", timeout_s=60)


def left_behind(folder):
    """The processes that were told of `folder` in their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                return path
    return None


@pytest.mark.unit
def test_a_trainer_that_is_not_installed_is_left_out_and_said():
    absent = Trainer("X", ("no-such-package",), lambda *_: [], lambda _: [], lambda _: [])
    assert absent.versions() == {"no-such-package": None}
    assert [trainer(name).title for name in NAMES][-1] == "Muster"


@pytest.mark.nightly
def test_an_unknown_fault_names_the_valid_ones():
    done = suite("--faults=flood")
    assert done.returncode == 2 and "flood is none of none, rank, all" in done.stderr


@pytest.mark.unit
def test_the_last_attempt_at_a_step_counts():
    lines = [
        line(0, [1]),
        line(1, [3]),
        line(1, [9], attempt="b", time=5.0),
        line(1, [8], attempt="b", rank=1, time=5.1),
    ]
    assert ledger.samples_by_step(lines) == {0: [1], 1: [8, 9]}
    assert ledger.steps_repeated(lines) == 1
    assert ledger.seconds_to_next([*lines, line(2, [7], attempt="b", time=7.0)], 4.0) == 3.0
    assert ledger.seconds_to_next(lines, 4.0) is None


@pytest.mark.unit
def test_a_step_that_is_begun_again_in_place_counts_once_for_each_rank():
    lines = [line(0, [1]), line(0, [2], rank=1), line(1, [3], time=1.0), line(1, [4], rank=1, time=1.1)]
    lines += [line(1, [3], time=2.0), line(1, [4], rank=1, time=2.2), line(2, [5], time=3.0)]
    assert ledger.samples_by_step(lines) == {0: [1, 2], 1: [3, 4], 2: [5]}
    assert ledger.seconds_to_next([*lines, line(2, [6], rank=1, time=3.5)], 1.5) == 2.0


@pytest.mark.parametrize(
    ("samples", "metrics", "says"),
    [
        ([[1, 2], [3, 4], [5, 6]], [1, 2, 3], "S ✓ W ✗ M ✓"),
        ([[1, 2], [3, 3], [5, 6]], [1, 2, 2], "S ✗ 1 steps W ✗ M ✗ 1 twice, 1 missing"),
        ([[1, 2], [3, 4]], [1, 2, 3], "S ✗ 1 steps W ✗ M ✓"),
    ],
)
def test_what_differs_is_said(tmp_path, samples, metrics, says):
    described = Trainer("X", (), lambda *_: [], lambda _: [], lambda _: metrics)
    scene = Scene(described, tmp_path / "scene", random.Random(0), 1.0)
    scene.folder.mkdir()
    torch.save({"weight": torch.zeros(2)}, scene.folder / "final.pt")
    with (scene.ledger.folder / "1.jsonl").open("w") as file:
        file.writelines(json.dumps(vars(line(step, got))) + "\n" for step, got in enumerate(samples))
    ended = subprocess.Popen(["true"])
    ended.wait()
    scene.launches.started.append(ended)
    result = judge(scene, FAULTS["all"], UNDISTURBED)
    assert cell(result) == f"{says}, [0]"
    assert matrix({"X": {"a fault": result}}).splitlines()[2] == f"| a fault | {says}, [0] |"


def test_a_run_that_ends_without_weights_has_not_finished(tmp_path):
    scene = Scene(trainer("by_hand"), tmp_path / "scene", random.Random(0), 1.0)
    failed = subprocess.Popen(["false"])
    failed.wait()
    scene.launches.started.append(failed)
    assert cell(judge(scene, FAULTS["truncated"], UNDISTURBED)) == "does not finish, [1]"


def by_loop(loop, folder, batch):
    return furthest(loop(folder, batch).state_dict())


@pytest.mark.parametrize("ranks, batch", [(2, 4), (1, 2)])
def test_the_loss_of_padded_tokens_is_that_of_the_full_batch(tmp_path, ranks, batch):
    assert on_ranks(by_loop, ranks, token_loops.own_loop, tmp_path / "job", batch)[0] < 1e-6
    run(tmp_path / "run", *token_loops.ours(tmp_path / "run", batch)[3:], ranks=ranks)
    assert furthest(torch.load(tmp_path / "run/model.pt")) < 1e-6
    assert on_ranks(by_loop, ranks, token_loops.by_hand, tmp_path, batch)[0] > 1e-2


@pytest.mark.nightly
def test_the_command_of_the_padded_tokens(tmp_path):
    command = [sys.executable, "-m", "bench.conformance.tokens", "--only=own_loop", "--limit-s=200"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)
    row = done.stdout.splitlines()[-1]
    assert row.startswith("| by hand with Job | ") and all(float(each) < 1e-6 for each in row.split("|")[2:5]), done
