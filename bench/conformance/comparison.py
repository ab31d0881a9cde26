"""Comparison of a run under a fault with an undisturbed run of the same trainer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from bench.conformance.faults import Fault, Scene
from bench.conformance.ledger import differing, samples_by_step, seconds_per_step, seconds_to_next, steps_repeated


@dataclass(frozen=True)
class Reference:
    """The undisturbed run."""

    samples: dict[int, list[int]]
    weights: str
    metrics: list[int]
    seconds_per_step: float


def reference_of(scene: Scene) -> Reference:
    """Return the reference of this undisturbed run. Raises RuntimeError if it has not finished."""
    weights = weights_of(scene)
    if weights is None:
        said = (scene.place / "log").read_text()[-2000:]
        raise RuntimeError(f"{scene.trainer.title} does not train undisturbed:\n{said}")
    lines = scene.ledger.lines
    return Reference(samples_by_step(lines), weights, metrics_of(scene), seconds_per_step(lines))


def weights_of(scene: Scene) -> str | None:
    """Return a hash of the final weights and their names, not of the file; None if there are none."""
    path = scene.folder / scene.trainer.weights
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for name, value in sorted(torch.load(path, weights_only=True).items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()[:16]


def metrics_of(scene: Scene) -> list[int]:
    """Return the logged steps; empty if the trainer has not written a log."""
    try:
        return scene.trainer.metrics(scene.folder)
    except OSError:
        return []


def judge(scene: Scene, fault: Fault, reference: Reference) -> dict[str, Any]:
    """Return the raw result of one run. Entries that an unfinished run does not have are left out."""
    lines, facts = scene.ledger.lines, dict(scene.facts)
    seconds = [seconds_to_next(lines, at) for at in scene.at]
    result: dict[str, Any] = {
        "exit_codes": scene.launches.codes(),
        "finished": False,
        "seconds": [value if value is None else round(value, 1) for value in seconds],
        "steps_repeated": steps_repeated(lines),
        "facts": facts,
    }
    if "steps" in facts:
        undisturbed = facts["seconds"] / reference.seconds_per_step
        return result | {"goodput": round(facts["steps"] / undisturbed, 2)}
    weights = weights_of(scene)
    if weights is None or 0 not in result["exit_codes"]:
        return result
    return result | {
        "finished": True,
        "samples": compare_samples(reference.samples, samples_by_step(lines)),
        "weights_equal": weights == reference.weights if fault.same_weights else None,
        "metrics": dict(zip(("twice", "missing"), differing(reference.metrics, metrics_of(scene)), strict=True)),
    }


def compare_samples(reference: dict[int, list[int]], found: dict[int, list[int]]) -> dict[str, int]:
    """Count steps with other samples, and samples used too often or too rarely over the whole run."""
    steps = {step for step in {*reference, *found} if reference.get(step) != found.get(step)}
    too_many, missing = differing([*chain(*reference.values())], [*chain(*found.values())])
    return {"other_steps": len(steps), "too_often": too_many, "missing": missing}
