"""Side-by-side benchmarks. They start the same jobs as the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
