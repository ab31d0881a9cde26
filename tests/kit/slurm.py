"""A real Slurm for the tests: three hosts in network namespaces, started with CI=true and root."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kit.job import ROOT
from kit.until import until

SCRIPT = ROOT / "tests/substrates/slurm.sh"


class Slurm:
    """Runs commands on the cluster's login host, in a checkout whose path has a blank."""

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

    def version(self) -> tuple[int, ...]:
        """The cluster's, as (22, 5)."""
        return tuple(map(int, re.findall(r"\d+", self.on("ctl", "sinfo", "--version"))[:2]))

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
        """Take the link of `host` down within the block."""
        return self._without("link", host, "down", "up")

    def powered_off(self, host: str) -> contextlib.AbstractContextManager[None]:
        """Cut the link of `host` and kill its processes within the block, so that no connection is closed."""
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
        until(
            lambda: self.state(job).get("JobState") in states,
            f"{' or '.join(states)} of job {job}",
            timeout_s=timeout_s, every_s=0.5, said=lambda: str(self.state(job)),
        )  # fmt: skip
        return self.state(job)

    def restarted(self, job: str, *, times: int = 1, timeout_s: float = 150) -> None:
        """Wait until Slurm has requeued a job `times` times."""
        until(
            lambda: int(self.state(job).get("Restarts", 0)) >= times,
            f"{times} restarts of job {job}",
            timeout_s=timeout_s, every_s=0.5, said=lambda: str(self.state(job)),
        )  # fmt: skip

    def ended(self, job: str, *, timeout_s: float = 240) -> dict[str, str]:
        return self.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", timeout_s=timeout_s)
