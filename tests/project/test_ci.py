"""What CI makes of a test that fails: .ci/again.py and the stacks of a test that does not end."""

import os
import subprocess
import sys

import pytest
from kit.job import ROOT

CONFTEST = 'pytest_plugins = ["kit.failures"]\nfrom kit.stacks import pytest_timeout_set_timer\n'
TESTS = """
import subprocess, sys, time
from pathlib import Path
import pytest

def test_that_is_right():
    pass

@pytest.mark.parametrize("case", range({flaky}))
def test_once(case, seen=[]):
    mark = Path(f"seen-{{case}}")
    there = mark.exists()
    mark.touch()
    assert there, "the first time"

@pytest.mark.parametrize("case", range({wrong}))
def test_always(case):
    assert False, "each time"
"""
SLOW = """
import subprocess, sys
import pytest

@pytest.mark.timeout(3)
def test_that_waits():
    subprocess.run([sys.executable, "-c", "import time\\ndef stands_here():\\n    time.sleep(60)\\nstands_here()"])
"""


def python(folder, *line):
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run([sys.executable, *line], cwd=folder, env=env, capture_output=True, text=True, timeout=100)


def lane(folder, tests):
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    return python(folder, "-m", "pytest", "--failures=failed/test-core.jsonl")


def again(folder, *lanes):
    return python(folder, ROOT / ".ci/again.py", "failed", *lanes)


def test_what_failed_once_is_repeated_and_named_with_its_first_failure(tmp_path):
    assert lane(tmp_path, TESTS.format(flaky=2, wrong=0)).returncode == 1
    done = again(tmp_path, "test-core")
    assert done.returncode == 0 and "flaky: 2 failed once" in done.stdout, done.stdout
    assert "flaky: test_it.py::test_once[1]\n" in done.stdout and "AssertionError: the first time" in done.stdout


@pytest.mark.nightly(but=["4-0-4 tests failed; at most 3 are repeated"])
@pytest.mark.parametrize(
    ("flaky", "wrong", "said"),
    [(1, 1, "each time"), (4, 0, "4 tests failed; at most 3 are repeated"), (0, 0, "0 tests failed")],
)
def test_what_is_no_noise_fails(tmp_path, flaky, wrong, said):
    lane(tmp_path, TESTS.format(flaky=flaky, wrong=wrong))
    done = again(tmp_path, "test-core")
    assert done.returncode == 1 and said in done.stdout and "flaky: " not in done.stdout, done.stdout


def test_a_lane_that_did_not_end_or_failed_otherwise_fails(tmp_path):
    lane(tmp_path, TESTS.format(flaky=1, wrong=0))
    assert "lane test-slurm did not end" in again(tmp_path, "test-core", "test-slurm").stdout
    file = tmp_path / "failed/test-core.jsonl"
    whole = file.read_text()
    file.write_text(whole.replace('"exit_code": 1', '"exit_code": 3'))
    assert "lane test-core ended with 3, and 1 of its tests failed" in again(tmp_path, "test-core").stdout
    file.write_text(whole.splitlines()[0])
    done = again(tmp_path, "test-core")
    assert done.returncode == 1 and "lane test-core did not end" in done.stdout


def test_a_test_that_does_not_end_shows_where_its_processes_stand(tmp_path):
    done = lane(tmp_path, SLOW)
    assert done.returncode == 1 and "no end within 3 s" in done.stdout, done.stdout
    assert "stands_here (<string>:3)" in done.stdout, done.stdout
