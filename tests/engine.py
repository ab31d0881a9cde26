"""A real Docker engine for the tests: the one that runs here, or in CI one of our own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, Result

CACHE = Path(os.environ.get("MUSTER_TEST_CACHE", "/var/tmp/muster-tests"))
CI = os.environ.get("CI") == "true"


def skip(why: str) -> None:
    """On a user's machine a missing substrate is skipped and said; in CI it is a failure."""
    if CI:
        pytest.fail(f"CI must have it: {why}", pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def engine():
    """The environment in which `docker` works; both images are built."""
    env = dict(os.environ)
    ours = CACHE / "docker"
    if not works(env, "docker", "info"):
        if not (CI and os.getuid() == 0):
            skip(
                "no Docker engine answers here (docker info): start one, or run as root with CI=true to have one installed"
            )
        setup = subprocess.run([ROOT / "tests/substrates/docker.sh", ours], capture_output=True, text=True)
        if setup.returncode:
            pytest.fail(f"no Docker engine could be started: {(ours / 'setup.log').read_text()[-3000:]}", pytrace=False)
    if (ours / "config").is_dir():
        env["DOCKER_CONFIG"] = str(ours / "config")
    if not works(env, "docker", "compose", "version") or not works(env, "docker", "buildx", "version"):
        skip("docker compose (v2) or buildx is missing")
    build(env)
    pid = ours / "dockerd.pid"
    if pid.exists():  # an engine of our own: 6 GB of an earlier image would stay with each change of the requirements
        for prune in (("image", "prune", "--force"), ("builder", "prune", "--force", "--keep-storage=8gb")):
            subprocess.run(["docker", *prune], env=env, capture_output=True, timeout=120)
    yield env
    if pid.exists():
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(pid.read_text()), signal.SIGTERM)
        pid.unlink()


def works(env: dict[str, str], *command: str) -> bool:
    try:
        return subprocess.run(command, env=env, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def build(env: dict[str, str]) -> dict[str, float]:
    """Build both images as the README says; a machine behind a proxy passes its certificates as a secret."""
    seconds = {}
    bundle = os.environ.get("SSL_CERT_FILE", "")
    secrets = ["--secret", f"id=ca,src={bundle}"] if Path(bundle).is_file() else []
    for target in ("cpu", "gpu"):
        started = time.monotonic()
        line = [
            "docker",
            "buildx",
            "build",
            "--load",
            "-f",
            "docker/Dockerfile",
            "--target",
            target,
            "-t",
            f"muster:{target}",
            *secrets,
            ".",
        ]
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
        seconds[target] = time.monotonic() - started
    return seconds


class Compose:
    """docker/compose.yaml with the tests' own parts laid over it, on folders of its own."""

    def __init__(self, env: dict[str, str], folder: Path, *, args: str, nodes: int = 3, **extra: str):
        self.runs = folder / "runs"
        (self.runs / "ledger").mkdir(parents=True)
        for path in (self.runs, self.runs / "ledger"):
            os.chown(path, 1000, 1000)
        for path in (folder, *folder.parents):  # a plain user has to get through to it
            if path.is_relative_to("/tmp") and path != Path("/tmp"):
                path.chmod(path.stat().st_mode | 0o055)
        self.env = {
            **env,
            "RUNS": str(self.runs),
            "TESTS": str(ROOT / "tests"),
            "ARGS": args,
            "NODES": str(nodes),
            **extra,
        }
        self.log = folder / "up.log"

    def __enter__(self) -> Compose:
        self.run("down", "--timeout", "1", "--volumes")  # what a test run that was killed may have left
        return self

    def __exit__(self, *_: object) -> None:
        self.run("down", "--timeout", "1", "--volumes")

    def compose(self, *command: str) -> list[str]:
        files = (ROOT / "docker/compose.yaml", ROOT / "tests/compose.yaml")
        return ["docker", "compose", *(word for file in files for word in ("-f", str(file))), *command]

    def run(self, *command: str) -> str:
        return subprocess.run(self.compose(*command), env=self.env, capture_output=True, text=True, timeout=180).stdout

    def up(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.compose("up", "--no-build"), env=self.env, stdout=self.log.open("ab"), stderr=subprocess.STDOUT
        )

    @property
    def result(self) -> Result:
        return Result(0, self.log.read_text(), self.runs / "compose", 0)

    def step(self) -> int:
        """The newest step in metrics.jsonl."""
        steps = [line["step"] for line in self.lines() if line["kind"] == "train"]
        return steps[-1] if steps else 0

    def lines(self) -> list[dict[str, Any]]:
        path = self.runs / "compose" / "metrics.jsonl"
        lines = []
        for text in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
        return lines

    def wait(self, condition: Any, what: str, *, timeout_s: float = 90) -> float:
        """Seconds until `condition()` holds."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if condition():
                return time.monotonic() - started
            time.sleep(0.1)
        raise AssertionError(f"not within {timeout_s} s: {what}\n{self.log.read_text()[-5000:]}")

    def docker(self, *command: str) -> None:
        subprocess.run(["docker", *command], env=self.env, check=True, capture_output=True, timeout=120)

    def attempts(self) -> int:
        return sum(line.get("event") in ("start", "resume") for line in self.lines())
