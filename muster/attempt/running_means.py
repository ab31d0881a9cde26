"""Means over the steps since the last `train` record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.trained import own_prefix
from muster.sample_plan import leaves_of
from muster.world.counts import OF
from muster.world.dtensor import in_pieces
from muster.world.group import World

NAME = "loop/window"
JOBS, WEIGHT = "loop/totals", "\0weight"
"""Names in a Job's checkpoint until 2026-11-29: its sums alone, and each one's count."""
MEASURED = "measured/"
"""The group of the sums of a trainer's metrics."""
COUNTED = "\0counted"
"""Name of the sum of samples of which there are metrics."""
MOST = 1000
"""Number of values of one name that are added up at once."""


class RunningMeans:
    """Sums by name of what steps report, and what is logged for the next record.

    A value on a GPU is read once per record. Each checkpoint contains the sums: each rank's own, for a resume at the same world size
    that adds in the same order, and the sum over all ranks, for other world sizes.

    slices: `virtual_world_size`; the name of a slice's sum then has its number, as GROUP/SLICE/NAME.
    """

    def __init__(self, world: World, *, slices: int | None = None):
        self._world, self._slices = world, slices
        self.clear()

    def clear(self) -> None:
        """Forget everything: a record has it."""
        self._begin()
        self.logged: dict[str, Any] = {}
        """What is logged for the next record: numbers, or tensors [] on any device."""

    def _begin(self) -> None:
        self._sums: dict[str, float] = {}
        self._added: dict[str, list[tuple[Any, Any]]] = {}  # not yet in the sums: an operation a step costs more
        self.samples, self._made = 0, False

    def takes(self, *, samples: int, is_skipped: bool = False) -> bool:
        """Count a step of `samples` samples; return whether to add its values: a skipped step's only if all so far were skipped."""
        if self._made and is_skipped:
            return False
        if not self._made and not is_skipped:
            self._begin()
            self._made = True
        self.samples += samples
        return True

    def add(self, values: Mapping[str, Any], *, times: Any = 1.0) -> None:
        """Add `values`, numbers or tensors of one element, to the sums, each `times` times."""
        waits = self._world.device.type == "cpu"
        weight = number(times, waits=waits)
        for name, value in values.items():
            added = self._added.setdefault(name, [])
            added.append((number(value, waits=waits), weight))
            if len(added) >= MOST:
                self._plain()

    def own(self, group: str = "") -> dict[str, float]:
        """Return this rank's sums of `group`, by the rest of their names. Waits for the device."""
        return {name.removeprefix(group): value for name, value in self._plain().items() if name.startswith(group)}

    def take_logged(self) -> dict[str, float]:
        """Return and forget what is logged. Waits for the device."""
        logged, self.logged = {name: float(value) for name, value in self.logged.items()}, {}
        return logged

    # In checkpoints and journals, as JSON.

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Collective."""
        own = self.journal()
        shared = {**own, "sums": self._world.sum_named(own["sums"])}
        return {NAME: shared, f"{own_prefix(self._world.rank)}{NAME}": own}

    def journal(self) -> dict[str, Any]:
        """Return this rank's state, for `put`. Waits for the device."""
        logged = {name: float(value) for name, value in self.logged.items()}
        return {"samples": self.samples, "made": self._made, "sums": self._plain(), "logged": logged}

    def logged_since(self, noted: Mapping[str, Any]) -> dict[str, float]:
        """Return what is logged and not in `noted`, the `journal` of an earlier moment. Waits for the device."""
        before = noted.get("logged", {})
        return {name: value for name, value in self.journal()["logged"].items() if before.get(name) != value}

    def state_alone(self) -> dict[str, Any]:
        """Return the state of a checkpoint that one rank writes alone: what is logged. The sums need all ranks."""
        return {NAME: {"logged": self.journal()["logged"]}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state; clear it if the checkpoint has none."""
        own, shared = _found(state, own_prefix(self._world.rank)), _found(state, "") or {}
        here = {name: value for name, value in shared.get("sums", {}).items() if self._is_here(name)}
        self.put({**shared, "sums": here} if own is None else own)
        if "measured" in shared:  # of a trainer's checkpoint until 2026-11-29
            self._sums[f"{MEASURED}{COUNTED}"] = shared["measured"] * self._world.is_first
            if f"loss{OF}" not in shared["sums"]:  # until 2026-11-28: metrics then are of the steps after it
                self._sums = {k: v for k, v in self._sums.items() if not k.startswith(MEASURED)}
                self._sums[f"loss{OF}"] = self.samples * self._world.is_first

    def put(self, found: Mapping[str, Any]) -> None:
        """Restore this rank's state from a `journal`; what it lacks is empty."""
        self.clear()
        self._sums, self.logged = dict(found.get("sums", {})), dict(found.get("logged", {}))
        self.samples, self._made = found.get("samples", 0), found.get("made", False)

    def _is_here(self, name: str) -> bool:
        """Return True if this rank continues a sum over all ranks: the slice's rank, or rank 0 without slices."""
        number = name.partition("/")[2].partition("/")[0]
        if self._slices and number.isdigit():
            return int(number) in leaves_of(self._world.rank, self._world.size, self._slices)
        return self._world.is_first

    def _plain(self) -> dict[str, float]:
        """Return the sums, with what was added since the last call. Waits for the device."""
        for name, added in self._added.items():
            for value, times in zip(*(_numbers([pair[side] for pair in added]) for side in (0, 1)), strict=True):
                self._sums[name] = self._sums.get(name, 0.0) + value * times
        self._added = {}
        return dict(self._sums)


def _found(state: Mapping[str, Any], prefix: str) -> Mapping[str, Any] | None:
    sums = state.get(f"{prefix}{JOBS}")
    return (
        state.get(f"{prefix}{NAME}") if sums is None else {"sums": {k.replace(WEIGHT, OF): v for k, v in sums.items()}}
    )


def number(value: Any, *, waits: bool = True) -> Any:
    """Return a number; or without waiting a tensor [] float64: its product with a number of samples is exact."""
    if not isinstance(value, Tensor):
        return float(value)
    own = (value.full_tensor() if in_pieces(value) else value).detach()  # a DTensor may be a part of a sum
    return own.item() if waits else own.to(torch.float64, copy=True).reshape(())  # a loop may change its own in place


def _numbers(values: list[Any]) -> list[float]:
    """Return numbers, or tensors of one element, as numbers; tensors on one device are read together."""
    places = {value.device if isinstance(value, Tensor) else None for value in values}
    if len(places) == 1 and None not in places:
        numbers: list[float] = torch.stack(values).tolist()
        return numbers
    return [float(value) for value in values]
