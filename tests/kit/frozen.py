"""Imported last by the process that others are forked from: a collection in one of them copies nothing of what is imported."""

import gc

from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

from muster.process import freeze
from muster.report.page import plotly
from muster.train.config.compose import compose

plotly()  # compressed once for all reports
compose([])  # Hydra's parsers have built their tables, and imported what they use
Singleton._instances.pop(Plugins)  # a test may have plugins of its own
gc.collect()
freeze()
