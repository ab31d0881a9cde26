"""macOS: the kit's own code on a machine without what only Linux has (see kit/mac), and gloo where memory cannot be shared."""

import json
import os
import platform
import subprocess
import sys

import pytest
from kit.job import ROOT, environment, run

from muster.process import usable_processors
from muster.world.reduce.shared_memory import why_none

MAC = {"PYTHONPATH": ":".join(str(ROOT / each) for each in ("tests/kit/mac", "", "tests"))}


@pytest.mark.nightly
def test_a_mac_trains_with_loader_workers_and_says_what_it_lacks(tmp_path):
    """Two ranks, loader workers by spawn, the doctor's quick checks first."""
    mac = run(tmp_path / "mac", "max_steps=3", "doctor=true", "loader.num_workers=1", ranks=2, env=MAC)
    assert mac.outcome["outcome"] == "done" and "dist.survive=true does not apply: it needs Linux" in mac.out
    assert "gradients go through gloo: ranks share memory on Linux on x86-64, and this is darwin" in mac.out


def test_the_doctor_says_what_it_cannot_see_on_a_mac(tmp_path):
    line = [sys.executable, "-m", "muster", "doctor", "--quick"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(**MAC), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("this cluster can train, with 1 rank on 1 host")
    found = {each["check"]: each for each in json.loads((tmp_path / "runs/doctor.json").read_text())["checks"]}
    assert {name for name, each in found.items() if not each["here"]} == {"memory", "ports"}
    assert found["processors"]["ranks"][0]["usable"]


@pytest.mark.parametrize("system, machine, shares", [("linux", "x86_64", True), ("linux", "aarch64", False), ("darwin", "arm64", False)])  # fmt: skip
@pytest.mark.unit
def test_memory_is_shared_only_where_stores_are_seen_in_order(system, machine, shares, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert (why_none() == "") is shares


@pytest.mark.unit
def test_the_processors_of_a_mac_are_all_of_them(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_processors() == [0, 1, 2]


@pytest.mark.unit
def test_make_asks_an_old_make_for_nothing_that_it_lacks():
    """Apple's make is 3.81, without --output-sync; BSD's sed does not know \\t; lint checks the types of macOS, too."""
    text = (ROOT / "Makefile").read_text()
    assert "$(filter --output-sync=target,$(.FEATURES:%=--%=target))" in text and text.count("--output-sync") == 1
    assert "\\t" not in text and "sed " not in text and "mypy --platform darwin" in text
