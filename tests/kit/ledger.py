"""The samples of each rank in each step, which tests compare."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from muster.sample_plan import Plan

RECORDED = (
    "data._target_=kit.parts.data.Numbered",
    "model._target_=kit.parts.models.Slow",
    "strategy._target_=kit.parts.strategies.Recorded",
)


def recorded(folder):
    """Return for each step the samples of the last attempt at it, in the order of ranks."""
    last = {}
    for path in Path(folder).glob("*.jsonl"):
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # killed in the middle of the line, before the step: the next attempt at the step writes it again
            line = json.loads(text)
            known = last.setdefault(line["step"], {})
            begun = known.get(line["attempt"], (line["time"], {}))
            begun[1][line["rank"]] = line["samples"]
            known[line["attempt"]] = (min(begun[0], line["time"]), begun[1])
    merged = {}
    for step, attempts in last.items():
        _, ranks = max(attempts.values(), key=lambda attempt: attempt[0])
        merged[step] = [sample for rank in sorted(ranks) for sample in ranks[rank]]
    return merged


def assert_exact(folder, *, steps, batch_size, size=1000, seed=0):
    """Assert that each step got exactly the samples of the plan. steps: None for a run that was ended early."""

    plan, got = Plan(size, batch_size, seed), recorded(folder)
    if steps is None:  # the last step may have been begun by some ranks only
        steps = max(got)
        got.pop(steps)
    assert sorted(got) == list(range(steps))
    for step in range(steps):
        assert got[step] == plan.batch(step).tolist(), step


def read(folder: Path, split: str = "train") -> dict[int, list[int]]:
    """Return for each rank the samples that it read, in order."""
    ledger = defaultdict(list)
    for path in folder.glob(f"{split}-*"):
        ledger[int(path.name.split("-")[1])] = [int(line) for line in path.read_text().split()]
    return dict(ledger)
