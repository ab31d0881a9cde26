"""A real Docker engine for the tests: the running one, or in CI one that the tests start."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from kit.job import ROOT, Job

CACHE = Path(os.environ.get("MUSTER_TEST_CACHE", "/var/tmp/muster-tests"))
CI = os.environ.get("CI") == "true"


def skip(why: str) -> None:
    """Skip tests of a missing substrate with a reason; in CI, fail."""
    if CI:
        pytest.fail(f"CI must have it: {why}", pytrace=False)
    pytest.skip(why)


def works(env: dict[str, str], *command: str) -> bool:
    try:
        return subprocess.run(command, env=env, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def build(env: dict[str, str], target: str, root: Path = ROOT, *, name: str = "muster") -> float:
    """Build an image as the README does; behind a proxy, its certificates are passed as a secret. Return the seconds."""
    bundle = os.environ.get("SSL_CERT_FILE", "")
    secrets = ["--secret", f"id=ca,src={bundle}"] if Path(bundle).is_file() else []
    line = ["docker", "buildx", "build", "--load", "-f", "docker/Dockerfile", "--target", target]
    began = time.monotonic()
    done = subprocess.run(
        [*line, "-t", f"{name}:{target}", *secrets, "."], cwd=root, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return time.monotonic() - began


def for_plain_user(runs: Path, tests: Path) -> None:
    """Make `runs` below /tmp, which the containers' user owns and can reach, and a copy of the kit in `tests`.

    It may be unable to reach the checkout itself.
    """
    for folder in (runs, runs / "ledger"):
        folder.mkdir()
        os.chown(folder, 1000, 1000)
    for path in runs.parents:
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)
    shutil.copytree(ROOT / "tests/kit", tests / "kit", ignore=shutil.ignore_patterns("__pycache__"))


class Compose(Job):
    """docker/compose.yaml with an overlay of the tests, on folders of its own."""

    def __init__(self, env: dict[str, str], folder: Path, *, args: str, nodes: int = 3, **extra: str):
        self.files = (ROOT / "docker/compose.yaml", ROOT / "tests/kit/compose.yaml")
        self.runs = folder / "runs"
        super().__init__(self.runs / "compose")
        for_plain_user(self.runs, folder / "tests")
        self.env = {
            **env,
            "RUNS": str(self.runs),
            "TESTS": str(folder / "tests"),
            "ARGS": args,
            "NODES": str(nodes),
            **extra,
        }
        self.up_log = folder / "up.log"

    def __enter__(self) -> Compose:
        self.run("down", "--timeout", "1", "--volumes")  # an earlier test run may have been killed
        return self

    def __exit__(self, *_: object) -> None:
        self.run("down", "--timeout", "1", "--volumes")

    def compose(self, *command: str) -> list[str]:
        return ["docker", "compose", *(word for file in self.files for word in ("-f", str(file))), *command]

    def run(self, *command: str) -> str:
        return subprocess.run(self.compose(*command), env=self.env, capture_output=True, text=True, timeout=180).stdout

    def up(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.compose("up", "--no-build"), env=self.env, stdout=self.up_log.open("ab"), stderr=subprocess.STDOUT
        )

    @property
    def log(self) -> str:
        return self.up_log.read_text() if self.up_log.exists() else ""

    def docker(self, *command: str) -> None:
        subprocess.run(["docker", *command], env=self.env, check=True, capture_output=True, timeout=120)
