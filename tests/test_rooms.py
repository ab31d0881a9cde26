"""The house: data flows one way through it, and adding a part is one file."""

import ast
from pathlib import Path

import pytest
from kit.job import ROOT

pytestmark = pytest.mark.unit

# The runtime, which knows no Hydra, no strategy and no model; then the trainer: config -> data -> model -> strategy ->
# loop. The left never imports the right.
RUNTIME = (
    "redact", "errors", "origin", "imported", "flat", "files", "process", "clock", "plan", "dist", "attempts", "faults", "launch",
    "timing", "checkpoint", "loggers", "report", "job",
)  # fmt: skip
ORDER = (
    *RUNTIME, "doctor", "patterns", "config", "numerics", "data", "models", "objectives", "optim", "strategies", "window", "evaluation", "course", "loop",
    "callbacks", "announce", "position", "changes", "settings", "outputs", "accepts", "run", "evaluate", "__main__", "collectives",
)  # fmt: skip


def room(path: Path) -> str:
    if path == ROOT / "train/doctor/__main__.py":  # the trainer's, which asks the runtime's doctor
        return "__main__"
    return path.relative_to(ROOT / "train").parts[0].removesuffix(".py")


def imported(source: str) -> set[str]:
    """Every module or name of train that a source imports, wherever the line stands and whatever it is renamed to."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
    return {name for name in found if name.split(".")[0] == "train"}


def test_every_arrow_is_seen():
    source = "import os, train.run\nfrom train import loop, checkpoint as c\ndef f():\n    from train.dist.world import World as W"
    assert imported(source) == {"train.run", "train.loop", "train.checkpoint", "train.dist.world.World"}


SOURCES = [path for path in sorted((ROOT / "train").rglob("*.py")) if path != ROOT / "train/__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_left_never_imports_the_right(path):
    own = ORDER.index(room(path))
    for name in imported(path.read_text()):
        assert ORDER.index(name.split(".")[1]) <= own, name


def test_every_room_is_known():
    assert {room(path) for path in SOURCES} == set(ORDER)


def test_no_two_public_classes_have_one_name():
    places = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def module_of(name: str) -> str:
    """The module that an imported name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def edges(path: Path) -> set[str]:
    """The modules that a module imports, at its top or when a function is called; not those that only name a type."""
    tree = ast.parse(path.read_text())
    typed = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    tree.body = [node for node in tree.body if node not in typed]
    return {module_of(name) for name in imported(ast.unparse(tree))} - {""}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """A path through `graph` that ends where it begins; empty if there is none."""
    done = set()

    def search(path):
        for following in sorted(graph[path[-1]] - {path[-1]} - done):
            if following in path:
                return [*path[path.index(following) :], following]
            if found := search([*path, following]):
                return found
        done.add(path[-1])
        return []

    return next(filter(None, (search([each]) for each in sorted(graph))), [])


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}


def test_a_cycle_is_seen():
    assert cycle({"a": {"b"}, "b": {"c", "b"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert "train.dist.world" in edges(MODULES["train.checkpoint.manager"])


def test_no_two_modules_import_each_other():
    """Neither at the top nor within a function: a cycle that a late import hides is one, too."""
    assert cycle({name: edges(path) for name, path in MODULES.items()}) == []
