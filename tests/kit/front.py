"""The kit's entry as `python -m train` has it, for modules that change something before."""

from muster.train.__main__ import main as run

__all__ = ["run"]
