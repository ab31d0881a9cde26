"""The benchmarks run; what they measure is for people to read."""

import os
import subprocess
import sys

import pytest
from kit.job import ROOT, environment

pytestmark = pytest.mark.nightly


def bench(*arguments, **env):
    line = [sys.executable, "-m", *arguments]
    done = subprocess.run(line, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_kit_as_started_beside_scripts_by_hand():
    chosen, kinds = ["kit", "by_hand", "bare", "job", "job_loader"], ["plain", "batched", "keyed", "random"]
    of_data = bench(
        "bench.loop", "W1", "W3", "--nproc=2", "--data", *kinds, "--trainers", "kit", ROUNDS="1", WINDOW_S="2"
    )
    of_trainers = bench("bench.loop", "W1", "--trainers", *chosen, ROUNDS="1", WINDOW_S="0.5")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (of_data + of_trainers).splitlines()
        if "| W" in line
    ]
    expected = [[name, kind, "2", "kit"] for name in ("W1", "W3") for kind in kinds]
    assert [row[:4] for row in rows] == expected + [["W1", "plain", n, each] for n in "12" for each in chosen], rows
    assert all(float(cell) > 0 for row in rows for cell in row[4:-1]), rows


def test_a_checkpoint_beside_torch_save():
    out = bench("bench.checkpoint", "mlp, 1 MB", ROUNDS="1")
    assert float(out.splitlines()[-1].split("|")[3]) > 0, out


def test_batches_beside_those_that_people_write():
    rows = [line.split("|") for line in bench("bench.input", "--quick", ROUNDS="1").splitlines()[2:]]
    assert len(rows) == 3 and all(float(row[2]) > 0 for row in rows), rows


def test_two_processes_beside_one():
    row = bench("bench.speedup", ROUNDS="1", STEPS="3").splitlines()[-1].split("|")
    assert all(float(cell) > 0 for cell in row[2:5]), row


@pytest.mark.skipif(os.getuid() != 0, reason="network namespaces need root")
def test_sums_by_hosts_send_less():
    rows = [
        line.split("|") for line in bench("bench.hosts", "--per-host=2", "--rounds=1", "--steps=10").splitlines()[2:]
    ]
    assert [row[1].strip() for row in rows] == ["never", "always"] and all(float(row[2]) > 0 for row in rows), rows
    assert float(rows[1][5]) < 0.8, "half of the bytes, and what is sent once"


@pytest.mark.long
def test_a_short_soak():
    out = bench("bench.soak", "--minutes=0.2", "--seed=1")
    assert "every sample in its place, no step twice, nothing left behind" in out


def test_recovery_from_one_kill():
    out = bench("bench.recovery", "--only=rank killed", "--kills=1")
    assert "| rank killed, dist.survive=false | 1 |" in out and "| rank killed | 1 |" in out
    assert "restarts 0, steps repeated 0" in out
