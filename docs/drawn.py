"""Draw the Mermaid graphs of the pages for the site: `make architecture`. Needs Chromium or Chrome, and npm, which fetches Mermaid.

A code host draws such a graph itself. The site shows the picture in docs/drawn/ that is named by the digest of its text, so
that a reader's browser asks no other host.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.picture import browser

FOLDER = Path(__file__).parent / "drawn"
GRAPH = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
PAGE = """<body><div id="there"></div><script src="mermaid.js"></script><script>
mermaid.initialize({startOnLoad: false, theme: "neutral", htmlLabels: false, flowchart: {htmlLabels: false}})
mermaid.render("graph", %s).then(drawn => there.append(new XMLSerializer().serializeToString(
  new DOMParser().parseFromString(drawn.svg, "image/svg+xml"))))
</script>"""


def name(graph: str) -> str:
    """Return the file name of the picture of `graph`."""
    return f"{hashlib.sha256(graph.encode()).hexdigest()[:12]}.svg"


def graphs() -> dict[str, str]:
    """Return the graphs of all pages of docs/ by the names of their pictures."""
    pages = sorted(FOLDER.parent.rglob("*.md"))
    return {name(graph): graph for page in pages for graph in GRAPH.findall(page.read_text())}


def draw(graph: str, folder: Path) -> str:
    """Return `graph` as SVG; `folder` has Mermaid as mermaid.js. Raises RuntimeError if the browser draws none."""
    page = folder / "page.html"
    page.write_text(PAGE % json.dumps(graph).replace("</", "<\\/"))
    line = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    found = re.search(r'<div id="there">(.*?)</div>', done.stdout, re.S)
    if not found or "svg" not in found[1]:
        raise RuntimeError(f"no picture of:\n{graph}\n{done.stderr[-500:]}")
    return html.unescape(found[1]) + "\n"


def main() -> None:
    """Draw what is not drawn yet, and delete the pictures of graphs that are gone."""
    wanted = graphs()
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.iterdir():
        if path.name not in wanted:
            path.unlink()
    missing = [each for each in wanted if not (FOLDER / each).exists()]
    if not missing:
        return
    if not shutil.which("npm"):
        sys.exit("npm is not installed; it fetches Mermaid")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(["npm", "pack", "--silent", "mermaid@11"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        [package] = folder.glob("mermaid-*.tgz")
        shutil.unpack_archive(package, folder, format="gztar", filter="data")
        (folder / "package/dist/mermaid.min.js").rename(folder / "mermaid.js")
        for each in missing:
            (FOLDER / each).write_text(draw(wanted[each], folder))


if __name__ == "__main__":
    main()
