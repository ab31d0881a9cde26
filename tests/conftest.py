"""Test modules import their helpers by name; what killed launches leave in the temporary folder goes with the session."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


def pytest_configure(config):
    tempfile.gettempdir()  # pytest's own folders stay where a person looks for them
    config.scratch = tempfile.mkdtemp(prefix="muster-")
    os.environ["TMPDIR"] = config.scratch


def pytest_unconfigure(config):
    shutil.rmtree(config.scratch, ignore_errors=True)
