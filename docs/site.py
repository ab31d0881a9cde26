"""Hook of MkDocs: pages may include a README from beside the templates, and link to files that are not pages.

On a code host such a link opens the file. The site has no such files, so it shows their paths.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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

    own = linked(markdown, (ROOT / "docs" / page.file.src_uri).parent)
    return INCLUDE.sub(lambda found: linked((ROOT / found[1]).read_text(), (ROOT / found[1]).parent), own)
