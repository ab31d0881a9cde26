"""Side-by-side benchmarks; they drive the same jobs as the tests do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
