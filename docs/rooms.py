"""Draw the imports between rooms from the code: `python -m docs.rooms`, or `make rooms`.

A room is a folder or a module directly below a package. The command replaces the Mermaid graph between the markers of
each page. An arrow leads from a room to a room that it imports. Arrows that follow from others are left out: with
`loop --> strategies` and `strategies --> dist` there is no `loop --> dist`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the order of the rooms is written in the test that enforces it

from test_rooms import ORDER, RUNTIME, imported  # noqa: E402

PACKAGES = {"train": "train"}  # folder -> the name under which its modules are imported
PAGES = (ROOT / "docs/extending.md", ROOT / "docs/index.md")
BEGIN, END = "<!-- rooms: begin; `make rooms` draws this -->", "<!-- rooms: end -->"
ENTRY = "__main__"

Graph = dict[str, set[str]]


def room_of(name: str) -> str | None:
    """Return the room of a module, or of a name in it; None if it is in none of the packages, or is a package itself."""
    if name == "muster.train.doctor":  # the trainer's command, which calls the runtime's doctor
        return ENTRY
    for package in sorted(PACKAGES.values(), key=len, reverse=True):  # a package may lie in another
        if name.startswith(f"{package}."):
            return name.removeprefix(f"{package}.").split(".")[0]
    return None


def layer_of(room: str) -> str:
    """Return the layer of a room: `runtime` or `trainer`."""
    return "runtime" if room in RUNTIME else "trainer"


def modules() -> dict[str, Path]:
    """Return the modules of all packages by name."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imports() -> Graph:
    """Return for each room the other rooms that it imports, from the left of the order to the right."""
    graph: Graph = {}
    for module, path in modules().items():
        if room := room_of(module):
            graph.setdefault(room, set()).update(filter(None, map(room_of, imported(path.read_text()))))
    return {room: graph[room] - {room} for room in sorted(graph, key=ORDER.index)}


def reachable(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Return all nodes that a path of at least one edge leads to from `start`. `graph` has no cycle."""
    return set().union(*({node} | reachable(graph, node) for node in graph[start]))


def reduced(graph: Graph) -> Graph:
    """Return `graph`, which has no cycle, without edges that other edges imply (its transitive reduction)."""
    beyond = {node: reachable(graph, node) for node in graph}
    return {node: following - set().union(*(beyond[each] for each in following)) for node, following in graph.items()}


def mermaid(graph: Graph) -> str:
    """Return `graph` as a Mermaid flowchart, with one subgraph per layer. Source: https://mermaid.js.org/syntax/flowchart"""
    lines = ["flowchart TD"]
    for layer in ("trainer", "runtime"):
        lines += [f"  subgraph {layer}", *(f"    {_node(room)}" for room in graph if layer_of(room) == layer), "  end"]
    for room in reversed(graph):
        if graph[room]:
            lines.append(f"  {room} --> {' & '.join(sorted(graph[room], key=ORDER.index))}")
    return "\n".join(lines)


def _node(room: str) -> str:
    return f'{room}["python -m train"]' if room == ENTRY else room  # Mermaid would print __main__ in bold


def drawn(page: str, picture: str) -> str:
    """Return the text of a page with `picture` between its markers. Raises ValueError if it lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no markers: add {BEGIN} and {END}")
    return f"{before}{begin}\n```mermaid\n{picture}\n```\n{end}{after}"


def main() -> None:
    """Draw the picture into all pages."""
    picture = mermaid(reduced(imports()))
    for page in PAGES:
        page.write_text(drawn(page.read_text(), picture))


if __name__ == "__main__":
    main()
