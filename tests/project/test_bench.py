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


def test_the_loop_beside_others_on_the_same_data(tmp_path):
    kinds = ["plain", "batched", "keyed", "random"]
    out = bench("bench.loop", "W1", "W3", "--data", *kinds, ROUNDS="1", STEPS="2", RESULTS=str(tmp_path))
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in out.splitlines() if line.startswith("| W")]
    expected = [[name, kind, str(n)] for n in (1, 2) for name in ("W1", "W3") for kind in kinds]
    assert [[name.split(":")[0], *more] for name, *more in rows] == expected, out
    assert (tmp_path / "loop.png").stat().st_size > 1000


def test_a_loop_with_a_job_beside_the_same_loop_without():
    rows = bench("bench.own_loop", "W1", "--nproc=2", ROUNDS="1", STEPS="2").splitlines()[2:]
    assert [row.split("|")[3].strip() for row in rows] == ["the job's", "the loader's"], rows
    assert all(float(row.split("|")[6]) > 0 for row in rows), rows


def test_a_checkpoint_beside_torch_save():
    out = bench("bench.checkpoint", "mlp, 1 MB", ROUNDS="1")
    assert float(out.splitlines()[-1].split("|")[3]) > 0, out


def test_batches_beside_those_that_people_write():
    rows = [line.split("|") for line in bench("bench.input", "--quick", ROUNDS="1").splitlines()[2:]]
    assert len(rows) == 3 and all(float(row[2]) > 0 for row in rows), rows


def test_the_start_beside_a_script_of_ones_own():
    row = bench("bench.start", "1", ROUNDS="1").splitlines()[-1].split("|")
    assert row[1].strip() == "1" and float(row[2]) > 0 and float(row[5]) > 0, row


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
