"""A stream's own state, so that a resume need not read again what it has read."""

from __future__ import annotations

from typing import Any

from train.callbacks.base import Callback
from train.data.stream import Stream


class Position(Callback):
    """Of any rank: none has read further than to the end of the global batch."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def state(self) -> dict[str, Any]:
        state = self.stream.state()
        return {"state": state} if state else {}

    def load(self, state: dict[str, Any]) -> None:
        self.stream.load(state["state"])
