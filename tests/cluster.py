"""A real Slurm for the tests: three hosts in namespaces of their own, started in CI, or by root who asks with CI=true."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import CACHE, CI, skip
from launch import ROOT, Result

SCRIPT = ROOT / "tests/substrates/slurm.sh"


class Slurm:
    """Commands on the cluster's login host, in a checkout whose path has a blank in it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on(
        self, host: str, *command: str, cwd: Path | None = None, ok: bool = True, env: dict[str, str] | None = None
    ) -> str:
        line = [str(SCRIPT), "on", str(self.folder), host, *command]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        # Into a file: a pipe would be held open by daemons that the command leaves behind.
        done = subprocess.run(
            line, cwd=cwd or ROOT, env={**kept, **(env or {})}, capture_output=True, text=True, timeout=120
        )
        assert not ok or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def sbatch(
        self, checkout: Path, *arguments: str, flags: tuple[str, ...] = (), script: str = "slurm/ddp.sbatch", **env: str
    ) -> str:
        venv = Path(sys.executable).parent.parent
        path = f"{checkout}:{ROOT / 'tests'}"
        env = {"VENV": str(venv), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
        out = self.on("ctl", "sbatch", *flags, script, *arguments, cwd=checkout, env=env)
        found = re.search(r"Submitted batch job (\d+)", out)
        assert found, out
        return found[1]

    def cut_off(self, host: str) -> contextlib.AbstractContextManager[None]:
        """The link of `host` is down within the block."""
        return self._without("link", host, "down", "up")

    def powered_off(self, host: str) -> contextlib.AbstractContextManager[None]:
        """No process of `host` lives within the block, and none has closed its connections."""
        return self._without("power", host, "off", "on")

    @contextlib.contextmanager
    def _without(self, what: str, host: str, off: str, on: str) -> Iterator[None]:
        subprocess.run([SCRIPT, what, self.folder, host, off], check=True)
        try:
            yield
        finally:
            subprocess.run([SCRIPT, what, self.folder, host, on], check=True, stdin=subprocess.DEVNULL)

    def state(self, job: str) -> dict[str, str]:
        text = self.on("ctl", "scontrol", "show", "job", job, ok=False)
        return dict(re.findall(r"(\w+)=(\S+)", text))

    def wait(self, job: str, *states: str, timeout_s: float = 150) -> dict[str, str]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self.state(job)
            if state.get("JobState") in states:
                return state
            time.sleep(0.5)
        raise AssertionError(f"job {job} is {self.state(job)}, not {states}")

    def ended(self, job: str, *, timeout_s: float = 150) -> dict[str, str]:
        return self.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", timeout_s=timeout_s)


@pytest.fixture(scope="session")
def slurm():
    if sys.platform != "linux" or os.getuid() != 0 or not (CI or shutil.which("slurmctld")):
        skip("a Slurm cluster of our own needs Linux, root and slurm-wlm (or CI=true, to have it installed)")
    folder = CACHE / "slurm"
    subprocess.run([SCRIPT, "stop", folder], capture_output=True, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (folder / "start.log").open("w") as log:
        done = subprocess.run([SCRIPT, "start", folder], stdout=log, stderr=subprocess.STDOUT, timeout=400)
    if done.returncode:
        skip(f"no Slurm could be started: {(folder / 'start.log').read_text()[-2000:]}")
    yield Slurm(folder)
    subprocess.run([SCRIPT, "stop", folder], capture_output=True, timeout=60)


@pytest.fixture
def checkout(tmp_path):
    """The repo's root as a user has it, at a path with a blank."""
    root = tmp_path / "my repo"
    root.mkdir()
    for name in ("train", "conf", "slurm"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.log"))
    (root / "slurm/logs").mkdir(exist_ok=True)
    return root


def result(folder: Path) -> Result:
    return Result(0, "", folder, 0)
