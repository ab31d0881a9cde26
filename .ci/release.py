"""`python .ci/release.py TAG`: refuse a release whose tag, version, changelog and citation do not agree."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def wrong(tag: str, root: Path = ROOT) -> list[str]:
    """Return what does not agree with `tag`, such as v0.1.0, one line each."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    found = [] if tag == f"v{version}" else [f"the tag {tag} is not v{version}, the version in pyproject.toml"]
    if not re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)$", (root / "CHANGELOG.md").read_text(), re.M
    ):
        found.append(f"CHANGELOG.md has no heading `## {version} (YYYY-MM-DD)`")
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        found.append(f"CITATION.cff has not version: {version}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(wrong(sys.argv[1])))
