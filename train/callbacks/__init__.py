"""Callbacks of the training loop, called on every rank. Each has its own file and a YAML under conf/callbacks/."""

from muster.train.callbacks.base import Callback

__all__ = ["Callback"]
