"""The entry of `python -m train`, for modules that change something first."""

from muster.train.__main__ import main as run

__all__ = ["run"]
