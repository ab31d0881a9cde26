"""The architecture: data flows one way through the packages, and adding a part is one file."""

import ast
from pathlib import Path

import pytest
from kit.job import ROOT

pytestmark = pytest.mark.unit

# The runtime, muster/, which knows no Hydra, no strategy and no model.
RUNTIME = (
    "redact", "code_location", "errors", "import_by_path", "dotted_names", "files", "tensor_bytes", "process", "clock", "sample_plan", "data", "world", "outcome", "faults",
    "timing", "checkpoint", "loggers", "launcher", "report", "lease", "recovery", "attempt", "job", "doctor", "collectives", "init",
)  # fmt: skip
# The trainer, muster.train: config -> data -> model -> strategy -> loop.
TRAINER = (
    "config", "numerics", "data", "models", "objectives", "optim", "strategies", "throughput", "evaluation", "progress", "loop",
    "callbacks", "trainee", "first_records", "resume", "settings", "in_process_restart", "validate", "run", "saved_weights", "evaluate_run", "evaluate", "load", "export", "submit", "doctor", "__main__", "entry",
)  # fmt: skip
FRONT = ("muster/__init__", "muster/__main__")
"""The public names and the command, which may import all."""
ORDER = (*(f"muster/{package}" for package in RUNTIME), *(f"train/{package}" for package in TRAINER), *FRONT)


def package(path: Path) -> str:
    """The package of a source file; the left never imports the right in ORDER."""
    package, first, *_ = path.relative_to(ROOT).parts
    return f"{package}/{first.removesuffix('.py')}"


def package_of(module: str) -> str:
    """The package of an imported module or name."""
    words = module.split(".")
    return f"train/{words[2]}" if words[1:2] == ["train"] else f"muster/{words[1]}"


def imported(source: str) -> set[str]:
    """Every module or name of the kit that a source imports, wherever the line stands and whatever it is renamed to."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
    return {name for name in found if name.split(".")[0] in ("muster", "train")}


def test_every_arrow_is_seen():
    source = "import os, muster.train.run\nfrom muster import sample_plan, job as j\ndef f():\n    from muster.world.group import World as W"
    assert imported(source) == {"muster.train.run", "muster.sample_plan", "muster.job", "muster.world.group.World"}
    assert package_of("muster.train.run") == "train/run" and package_of("muster.world.group.World") == "muster/world"


SOURCES = [
    path for package in ("muster", "train") for path in sorted((ROOT / package).rglob("*.py"))
    if path != ROOT / "train/__init__.py" and not {"muster/train", "muster/init/examples"} & {*map(str, path.relative_to(ROOT).parents)}
]  # fmt: skip


def test_the_left_never_imports_the_right():
    arrows = [(path.relative_to(ROOT), name) for path in SOURCES for name in sorted(imported(path.read_text()))]
    assert not [arrow for arrow in arrows if arrow[1].split(".")[0] != "muster"], (
        "a module has one name, muster.train.*"
    )
    places = {where: place for place, where in enumerate(ORDER)}
    assert not [(path, name) for path, name in arrows if places[package_of(name)] > places[package(ROOT / path)]]


def test_the_runtime_knows_no_hydra():
    runtime = [path for path in SOURCES if path.is_relative_to(ROOT / "muster")]
    known = {
        node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        for path in runtime
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert "torch" in known and not {name for name in known if name.split(".")[0] in ("hydra", "omegaconf")}


def test_every_package_is_known():
    assert {package(path) for path in SOURCES} == set(ORDER)


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
    """The modules that a module imports, at its top, when a function is called, or to name a type."""
    return {module_of(name) for name in imported(path.read_text())} - {""}


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


MODULES = {
    ".".join(("muster" / path.relative_to(ROOT) if path.is_relative_to(ROOT / "train") else path.relative_to(ROOT)).with_suffix("").parts)
    .removesuffix(".__init__"): path
    for path in SOURCES
}  # fmt: skip


def test_a_cycle_is_seen():
    assert cycle({"a": {"b"}, "b": {"c", "b"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert "muster.world.group" in edges(MODULES["muster.checkpoint.manager"])


def test_no_two_modules_import_each_other():
    """Neither at the top, nor within a function, nor for a type: a cycle that is hidden so is one, too."""
    graph = {name: edges(path) for name, path in MODULES.items()}
    for maker in ("hierarchical", "shared_memory"):  # a world has what they make of it
        graph[f"muster.world.reduce.{maker}"].remove("muster.world.group")
    assert cycle(graph) == []


def test_what_starts_a_module_as_a_program_is_its_last_statement():
    """What is defined after it is not there yet."""
    for path in [*(ROOT / "muster").rglob("*.py"), *(ROOT / "train").rglob("*.py")]:
        early = [ast.unparse(each) for each in ast.parse(path.read_text()).body[:-1] if isinstance(each, ast.If)]
        assert not [each for each in early if each.startswith("if __name__ == '__main__'")], path
