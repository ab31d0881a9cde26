"""`pytest --failures=FILE`: one JSON line a failed test as it fails, and one with the exit code as the session ends.

`.ci/again.py` reads the files of all lanes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, help="write each failed test, and the exit code, to this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--failures")
    if file and not hasattr(config, "workerinput"):  # xdist's workers report to the process that started them
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        config.pluginmanager.register(Failures(file))


class Failures:
    def __init__(self, file: Path):
        self.file = file

    def note(self, **line: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.note(test=report.nodeid, when=report.when, failure=report.longreprtext)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.note(exit_code=int(exitstatus))
