"""One file a trainer: how its documentation says that a run is trained, saved and resumed."""

from __future__ import annotations

from importlib import import_module

from bench.conformance.trainers.base import Trainer

NAMES = ("by_hand", "hf_trainer", "accelerate", "lightning", "ours")


def trainer(name: str) -> Trainer:
    """The one that trainers/`name`.py describes."""
    found: Trainer = import_module(f"bench.conformance.trainers.{name}").TRAINER
    return found
