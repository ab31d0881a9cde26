"""Save a data stream's own state, so that a resume does not reread samples."""

from __future__ import annotations

from typing import Any

from muster.data.stream import Stream
from muster.train.callbacks.base import Callback


class Position(Callback):
    """The state of any rank will do: no rank has read past the end of the global batch."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def state(self) -> dict[str, Any]:
        state = self.stream.state()
        return {"state": state} if state else {}

    def load(self, state: dict[str, Any]) -> None:
        self.stream.load(state["state"])
