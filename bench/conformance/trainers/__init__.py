"""One file per trainer, which trains, saves and resumes as the documentation of the trainer says."""

from __future__ import annotations

from importlib import import_module

from bench.conformance.trainers.base import Trainer

NAMES = ("by_hand", "hf_trainer", "accelerate", "lightning", "own_loop", "ours")


def trainer(name: str) -> Trainer:
    """Return the trainer that trainers/`name`.py describes."""
    found: Trainer = import_module(f"bench.conformance.trainers.{name}").TRAINER
    return found
