"""The alpha-beta model: a message of n bytes takes alpha + beta n seconds, for any two ranks and any other traffic.

Source: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 1994.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from muster.collectives.algorithm import Cost


@dataclass(frozen=True)
class Network:
    """Parameters of the model. alpha_s: seconds per message. beta_s: seconds per byte."""

    alpha_s: float
    beta_s: float

    def seconds(self, cost: Cost) -> float:
        """Return the predicted seconds of one all-reduce; the time of the additions is ignored."""
        return cost.messages * self.alpha_s + cost.nbytes * self.beta_s


def fit(nbytes: Sequence[float], seconds: Sequence[float]) -> Network:
    """Fit alpha and beta, both at least 0, to the measured `seconds` of messages of `nbytes`, by least squares.

    Errors are relative to the measured times: with absolute errors the largest messages alone would determine the fit,
    and alpha would be arbitrary, as it is lost in their noise.
    """
    sizes, times = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    alpha, beta = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)[0]
    if alpha >= 0 and beta >= 0:
        return Network(float(alpha), float(beta))
    column = terms[:, 1] if alpha < 0 else terms[:, 0]
    only = float(column.sum() / (column @ column))
    return Network(0.0, only) if alpha < 0 else Network(only, 0.0)
