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
sys.path[:0] = [
    str(ROOT / "tests"),
    str(ROOT / "tests/house"),
]  # the order of the rooms is written in the test that enforces it

from test_rooms import FRONT, MODULES, ORDER, imported, room, room_of  # noqa: E402

PAGES = (ROOT / "docs/extending.md",)
BEGIN, END = "<!-- rooms: begin; `make rooms` draws this -->", "<!-- rooms: end -->"
LAYERS = {"trainer": "train/", "runtime": "muster/"}
ENTRY = "train/__main__"

Graph = dict[str, set[str]]


def imports() -> Graph:
    """Return for each room the other rooms that it imports, from the left of the order to the right."""
    graph: Graph = {}
    for path in MODULES.values():
        if (own := room(path)) not in FRONT:
            graph.setdefault(own, set()).update(map(room_of, imported(path.read_text())))
    return {own: graph[own] - {own} for own in sorted(graph, key=ORDER.index)}


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
    for layer, folder in LAYERS.items():
        nodes = [f"    {_node(own)}" for own in graph if own.startswith(folder)]
        lines += [f'  subgraph {layer}["{folder} ({layer})"]', *nodes, "  end"]
    for own in reversed(graph):
        if graph[own]:
            lines.append(f"  {_id(own)} --> {' & '.join(map(_id, sorted(graph[own], key=ORDER.index)))}")
    return "\n".join(lines)


def _id(own: str) -> str:
    return own.replace("/", ".").replace("__", "")


def _node(own: str) -> str:
    return f'{_id(own)}["{"python -m train" if own == ENTRY else own.partition("/")[2]}"]'


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
