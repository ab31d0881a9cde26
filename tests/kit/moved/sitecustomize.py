"""On PYTHONPATH: shifts the wall clock of this Python and of its children by `CLOCK_MOVED` seconds."""

import datetime
import os
import time

seconds = float(os.environ["CLOCK_MOVED"])
true_time = time.time


class Moved(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=seconds)


Moved.__module__, Moved.__qualname__ = "datetime", "datetime"  # for pickle
datetime.datetime = Moved
time.time = lambda: true_time() + seconds
