"""Imported last by the process that others are forked from: a collection in one of them copies nothing of what is imported."""

import gc

from muster.process import freeze
from muster.report.page import plotly

plotly()  # compressed once for all reports
gc.collect()
freeze()
