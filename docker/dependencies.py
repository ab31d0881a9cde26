"""Print the run-time requirements of pyproject.toml: what an image installs before it gets any code."""

import sys
import tomllib
from pathlib import Path

print("\n".join(tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"]))
