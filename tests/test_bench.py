"""The benchmarks run; what they measure is for people to read."""

import subprocess
import sys

from kit.job import ROOT, environment


def bench(*arguments, **env):
    line = [sys.executable, "-m", *arguments]
    done = subprocess.run(line, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_step_beside_a_hand_written_one():
    assert bench("bench.loop", ROUNDS="1", STEPS="2").count("\n") == 8


def test_two_processes_beside_one():
    row = bench("bench.speedup", ROUNDS="1", STEPS="3").splitlines()[-1].split("|")
    assert all(float(cell) > 0 for cell in row[2:5]), row


def test_a_short_soak():
    out = bench("bench.soak", "--minutes=0.2", "--seed=1")
    assert "every sample in its place, no step twice, nothing left behind" in out


def test_recovery_from_one_kill():
    assert "| worker killed | 1 |" in bench("bench.recovery", "--only=worker", "--kills=1")
