"""The kit's entry on slow storage: every rank's file of a checkpoint takes SLOW_S seconds."""

import os
import time

from kit.front import run
from train.checkpoint.backends.folder import Folder

put = Folder.put


def slowly(self, name):
    if name.endswith(".bin"):
        time.sleep(float(os.environ["SLOW_S"]))
    return put(self, name)


Folder.put = slowly

if __name__ == "__main__":
    run()
