"""Compare the kit with a hand-written script: seconds from the command to the first step, and memory after a few more.

`python -m bench.start` alternates between both, with one and with two processes (or the numbers in its arguments). The
hand-written script is that of PyTorch's DDP tutorial, with the kit's default model and data.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", "5"))
STEPS = 30
BY_HAND = """
import json, os, sys, time
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = 0
while step < STEPS:
    sampler.set_epoch(step)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        if step == 1:
            print(f"first {time.time()}", flush=True)
        if step == STEPS:
            break
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
print(f"peak {peak.split()[1]}", flush=True)
os._exit(0)
""".replace("STEPS", str(STEPS))
KIT = f"""
import os, sys, time
sys.argv = ["train", "max_steps={STEPS}", "log.every_steps=1", "log.progress=none", "eval.every_steps=off", "output_dir=" + sys.argv[1]]
real = os._exit
def leave(code):
    peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
    print(f"peak {{peak.split()[1]}}", flush=True)
    real(code)
os._exit = leave
from muster.train.__main__ import main
import muster.train.loop
log = muster.train.loop.log
def first(run, result):
    if run.step == 1:
        print(f"first {{time.time()}}", flush=True)
    log(run, result)
muster.train.loop.log = first
main()
"""


def once(script: Path, ranks: int, folder: Path) -> tuple[float, float]:
    """Return the seconds to the last rank's first step, and the largest memory of a rank in MB."""
    root = str(Path(__file__).parent.parent)
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(script),
        str(folder),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    began = time.time()
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    first, peak = (
        [float(value) for value in re.findall(rf"{word} ([\d.]+)", done.stdout)] for word in ("first", "peak")
    )
    return max(first) - began, max(peak) / 1e3


def main() -> None:
    """Print one row per number of processes."""
    columns = ["processes", "kit: first step after, s", "by hand", "ratio", "kit: most memory, MB", "by hand", "ratio"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    with tempfile.TemporaryDirectory() as folder:
        scripts = {name: Path(folder) / f"{name}.py" for name in ("kit", "hand")}
        scripts["kit"].write_text(KIT)
        scripts["hand"].write_text(BY_HAND)
        for ranks in map(int, sys.argv[1:] or ("1", "2")):
            rounds = [
                [once(script, ranks, Path(folder) / f"{name}-{ranks}-{turn}") for name, script in scripts.items()]
                for turn in range(ROUNDS)
            ]
            row: list[str] = [str(ranks)]
            for at in (0, 1):
                values = [[each[which][at] for each in rounds] for which in (0, 1)]
                ratio = statistics.median(kit / hand for kit, hand in zip(*values, strict=True))
                row += [*(f"{statistics.median(each):.1f}" for each in values), f"{ratio:.2f}"]
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
