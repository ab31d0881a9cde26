"""Hook of MkDocs: pages may include a README from beside the templates, and link to files that are not pages.

On a code host such a link opens the file. The site has no such files, so it shows their paths. The site asks no other host:
its graphs are drawn before (drawn.py), and its search works from files with a script of its own (iframe-worker.js).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.drawn import FOLDER, GRAPH, name

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.M)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """Return the page's text with its inclusions, in which links to files that are not pages are paths."""
    pages = {(ROOT / "docs" / file.src_uri).resolve() for file in files}

    def linked(text: str, folder: Path) -> str:
        def shown(link: re.Match[str]) -> str:
            target = (folder / link[2]).resolve()
            if target in pages or not target.exists():  # MkDocs reports a link that leads nowhere
                return link[0]
            path = f"`{target.relative_to(ROOT)}`"
            return path if link[1].strip("`/") in path else f"{link[1]} ({path})"

        return LINK.sub(shown, text)

    def shown_graph(graph: re.Match[str]) -> str:
        if not (FOLDER / name(graph[1])).exists():
            raise PluginError(f"{page.file.src_uri} has a graph that is not drawn yet: run `make architecture`")
        return f"![]({'../' * page.file.src_uri.count('/')}drawn/{name(graph[1])}){{: .drawn }}"

    markdown = GRAPH.sub(shown_graph, markdown)
    own = linked(markdown, (ROOT / "docs" / page.file.src_uri).parent)
    return INCLUDE.sub(lambda found: linked((ROOT / found[1]).read_text(), (ROOT / found[1]).parent), own)
