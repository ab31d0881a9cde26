"""Draw the imports between packages from the code: `python -m docs.architecture`, or `make architecture`.

A package is a folder or a module directly below `muster/` or `train/`; those that are read together are one node (GROUPS). The
command replaces the Mermaid graph between the markers of the page. An arrow leads from a package to one that it imports. Arrows
that follow from others are left out: with `loop --> strategies` and `strategies --> world` there is no `loop --> world`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT / "tests"),
    str(ROOT / "tests/project"),
]  # the order of the packages is written in the test that enforces it

from test_packages import FRONT, MODULES, ORDER, imported, package, package_of  # noqa: E402

PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- packages: begin; `make architecture` draws this -->", "<!-- packages: end -->"
LAYERS = {"trainer": "train/", "runtime": "muster/"}
GROUPS = {
    "muster/files, clock, sample_plan": "redact code_location errors import_by_path dotted_names files tensor_bytes process clock sample_plan",
    "train/config": "config numerics",
    "train/data, models, objectives, optim": "data models objectives optim",
    "train/run, loop": "throughput evaluation progress loop callbacks trainee first_records resume settings in_process_restart validate run",
    "train/python -m train, tools": "saved_weights evaluate_run evaluate load export submit doctor __main__ entry",
}
"""Packages that are one node of the picture: neighbors in the order, so that the picture has no cycle."""
NODE = {f"{name.partition('/')[0]}/{each}": name for name, members in GROUPS.items() for each in members.split()}

Graph = dict[str, set[str]]


def imports() -> Graph:
    """Return for each node of the picture the others that it imports, from the left of the order to the right."""
    graph: Graph = {}
    for path in sorted(MODULES.values(), key=lambda path: ORDER.index(package(path))):
        if (own := package(path)) not in FRONT:
            found = {NODE.get(each, each) for each in map(package_of, imported(path.read_text()))}
            graph.setdefault(NODE.get(own, own), set()).update(found)
    return {own: found - {own} for own, found in graph.items()}


def reachable(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Return all nodes that a path of at least one edge leads to from `start`. `graph` has no cycle."""
    return set().union(*({node} | reachable(graph, node) for node in graph[start]))


def reduced(graph: Graph) -> Graph:
    """Return `graph`, which has no cycle, without edges that other edges imply (its transitive reduction)."""
    beyond = {node: reachable(graph, node) for node in graph}
    return {node: following - set().union(*(beyond[each] for each in following)) for node, following in graph.items()}


def mermaid(graph: Graph) -> str:
    """Return `graph` as a Mermaid flowchart, with one subgraph per layer. Source: https://mermaid.js.org/syntax/flowchart"""
    ids, lines = {own: f"n{number}" for number, own in enumerate(graph)}, ["flowchart TD"]
    for layer, folder in LAYERS.items():
        nodes = [f'    {ids[own]}["{own.removeprefix(folder)}"]' for own in graph if own.startswith(folder)]
        lines += [f'  subgraph {layer}["{folder} ({layer})"]', *nodes, "  end"]
    for own in reversed(graph):
        if graph[own]:
            lines.append(f"  {ids[own]} --> {' & '.join(ids[each] for each in graph if each in graph[own])}")
    return "\n".join(lines)


def drawn(page: str, picture: str) -> str:
    """Return the text of a page with `picture` between its markers. Raises ValueError if it lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no markers: add {BEGIN} and {END}")
    return f"{before}{begin}\n```mermaid\n{picture}\n```\n{end}{after}"


def main() -> None:
    """Draw the picture into the page."""
    PAGE.write_text(drawn(PAGE.read_text(), mermaid(reduced(imports()))))


if __name__ == "__main__":
    main()
