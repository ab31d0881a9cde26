"""Linter for costly mistakes in batch scripts and manifests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from muster.errors import ConfigError
from muster.launcher.spec import SHUTDOWN

Rule = Callable[[str], Iterator[tuple[int, str]]]
"""Maps the text of a file to (line number, mistake and remedy)."""


def lint(paths: list[Path]) -> list[str]:
    """Return `file:line: mistake` for all files, and *.sbatch, *.sh, *.yaml, *.yml in folders. Raises ConfigError."""
    found = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--lint {path}: there is no such file or folder")
        kinds = ("*.sbatch", "*.sh", "*.yaml", "*.yml")
        files = sorted(file for kind in kinds for file in path.rglob(kind)) if path.is_dir() else [path]
        for file in files:
            text = file.read_text(errors="replace", encoding="utf-8")
            rules = MANIFEST if file.suffix in (".yaml", ".yml") else BATCH
            found += [f"{file}:{line}: {said}" for rule in rules for line, said in rule(text)]
    return found


def blank_in_directive(text: str) -> Iterator[tuple[int, str]]:
    """Find `# SBATCH`, which Slurm reads as a comment."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"#\s+SBATCH\b|##+\s*SBATCH\b", line):
            yield number, "Slurm takes this for a comment: write #SBATCH without a blank"


def directive_too_late(text: str) -> Iterator[tuple[int, str]]:
    """Find #SBATCH directives after the first command, which Slurm ignores."""
    commands = False
    for number, line in enumerate(text.splitlines(), 1):
        if commands and line.startswith("#SBATCH"):
            yield number, "Slurm reads no directive after the first command: move it up"
        commands |= bool(line.strip()) and not line.startswith("#")


def processors_lost(text: str) -> Iterator[tuple[int, str]]:
    """Find srun without --cpus-per-task, which it does not inherit from sbatch."""
    if not re.search(r"^#SBATCH\s+(?:--cpus-per-task|-c)\b", text, re.M) or "SRUN_CPUS_PER_TASK" in text:
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*(?:exec\s+)?srun\b", line) and "--cpus-per-task" not in line and " -c" not in line:
            yield number, "srun does not inherit --cpus-per-task: pass it here as well, or export SRUN_CPUS_PER_TASK"


def no_warning(text: str) -> Iterator[tuple[int, str]]:
    """Find torchrun jobs without --signal, which the time limit kills before they can save."""
    if re.search(r"^#SBATCH", text, re.M) and "torchrun" in text and not re.search(r"^#SBATCH\s+--signal", text, re.M):
        yield 1, "no #SBATCH --signal=B:USR1@120: the time limit kills the run before it can save"


def flag_over_variable(text: str) -> Iterator[tuple[int, str]]:
    """Find torchrun flags that override a PET_ variable set in the same file."""
    for number, line in enumerate(text.splitlines(), 1):
        for flag, variable in (
            ("nnodes", "NNODES"),
            ("nproc-per-node", "NPROC_PER_NODE"),
            ("rdzv-endpoint", "RDZV_ENDPOINT"),
            ("node-rank", "NODE_RANK"),
        ):
            if re.search(rf"--{flag}\b".replace("-", "[-_]").replace("[-_][-_]", "--", 1), line) and re.search(
                rf"PET_{variable}\b", text
            ):
                yield number, f"--{flag} wins over PET_{variable}, which is set here, too: keep one of the two"


def manifests(text: str) -> list[Any]:
    """Return the YAML documents that are mappings; an empty list if the text is not valid YAML."""
    try:
        return [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except yaml.YAMLError:
        return []


def grace_too_short(text: str) -> Iterator[tuple[int, str]]:
    """Find pods with a grace period shorter than the time that workers may take to save."""
    for match in re.finditer(r"terminationGracePeriodSeconds:\s*(\d+)", text):
        timeout = re.search(rf"(?:{SHUTDOWN}|GRACE_S)\D+?value:\s*\D?(\d+)", text)
        needed = int(timeout[1]) if timeout else 30
        if int(match[1]) < needed:
            yield (
                text.count("\n", 0, match.start()) + 1,
                f"the pod is killed after {match[1]} s, and its workers may take {needed} s to save: make it longer",
            )


def service_as_endpoint(text: str) -> Iterator[tuple[int, str]]:
    """Find rendezvous endpoints that name a load-balanced Service instead of one pod."""
    documents = manifests(text)
    services = {
        d["metadata"]["name"]
        for d in documents
        if d.get("kind") == "Service" and d.get("spec", {}).get("clusterIP") != "None"
    }
    for match in re.finditer(r"(?:--rdzv[-_]endpoint=|RDZV_ENDPOINT\D+?value:\s*)[\"']?([\w.-]+)", text):
        if match[1].split(".")[0] in services:
            yield (
                text.count("\n", 0, match.start()) + 1,
                f"{match[1]} is a Service that spreads over all pods: each would meet itself or another; use a headless one and pod 0's name",
            )


def trainer_missing(text: str) -> Iterator[tuple[int, str]]:
    """Find TrainJobs without spec.trainer, which get no PET_ variables."""
    for document in manifests(text):
        if document.get("kind") == "TrainJob" and "trainer" not in (document.get("spec") or {}):
            line = next((n for n, t in enumerate(text.splitlines(), 1) if t.startswith("kind: TrainJob")), 1)
            yield (
                line,
                "a TrainJob without spec.trainer gets the runtime's own command and no PET_ variables: add trainer: {}",
            )


BATCH: tuple[Rule, ...] = (blank_in_directive, directive_too_late, processors_lost, no_warning, flag_over_variable)
MANIFEST: tuple[Rule, ...] = (grace_too_short, service_as_endpoint, trainer_missing, flag_over_variable)
