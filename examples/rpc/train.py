"""Launch one agent and three observers on this machine: `python train.py`."""

from observers import main

import muster

means = muster.launch(main, 0, nproc=4)[0]
print(f"steps to the goal: {means[0]:.1f} in the first round, {means[-1]:.1f} in the last (4 is the least)")
