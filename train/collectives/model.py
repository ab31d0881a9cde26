"""The alpha-beta model: a message of n bytes takes alpha + beta n seconds, whoever sends it to whom, whatever else is sent.

Source: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 1994.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.collectives.algorithm import Cost


@dataclass(frozen=True)
class Network:
    """alpha_s: seconds that any message takes. beta_s: seconds for each of its bytes."""

    alpha_s: float
    beta_s: float

    def seconds(self, cost: Cost) -> float:
        """What one all-reduce should take; the additions cost nothing here."""
        return cost.messages * self.alpha_s + cost.nbytes * self.beta_s


def fit(nbytes: Sequence[float], seconds: Sequence[float]) -> Network:
    """The network whose messages of `nbytes` come closest to the measured `seconds`, both constants at least 0.

    Errors count relative to what was measured: with absolute ones the largest messages alone would decide, and alpha,
    which is lost in their noise, would be anything.
    """
    sizes, times = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    alpha, beta = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)[0]
    if alpha >= 0 and beta >= 0:
        return Network(float(alpha), float(beta))
    column = terms[:, 1] if alpha < 0 else terms[:, 0]
    only = float(column.sum() / (column @ column))
    return Network(0.0, only) if alpha < 0 else Network(only, 0.0)
