"""Print the run-time requirements of pyproject.toml, S3 included; an image installs them before it copies the code."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["s3"]))
