"""Thirty short jobs in a group of the script's own: `python again.py FOLDER`. No thread of a job outlives it."""

import sys
import threading

import torch
import torch.distributed as dist

import muster

dist.init_process_group("gloo")
for number in range(12):
    with muster.Job(f"{sys.argv[1]}/{number}", tensorboard=False, log_every=100, timeout_s=20) as job:
        job.track(model=torch.nn.Linear(1, 1))
    left = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    assert not left, f"job {number} has left {left}"
dist.destroy_process_group()
