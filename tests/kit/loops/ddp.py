"""A loop of a user's own, as the tests run it: `python ddp.py FOLDER [JOB OPTION=VALUE...]`; the environment says what is disturbed."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import muster
from kit.faults import fault
from kit.until import await_writer, until

SIZE = int(os.environ.get("SIZE", "100"))
ATTEMPT = f"{os.environ.get('TORCHELASTIC_RUN_ID')}-{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"


class Numbered(torch.utils.data.Dataset):
    """Sample i is (i, x, y); x has noise from the global generators."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, x + 0.1 * torch.rand(8), int(x.sum() > 0)


def disturb(step):
    """Go slowly with PACE; die as FAULTS says (kit/faults.py), when the checkpoint of step SAVED is there.

    From step HOLD on each step takes two seconds until there is a file `go`: the test may be kept waiting.
    """
    time.sleep(float(os.environ.get("PACE", "0")))
    if step >= int(os.environ.get("HOLD", 10**9)) and not os.path.exists("go"):
        time.sleep(2)
    fill(step)
    saved = Path(f"run/checkpoints/step-{int(os.environ.get('SAVED', step // 5 * 5)):08d}")
    fault("step", step, ready=lambda: until(saved.exists, f"{saved}", timeout_s=30))


def fill(step):
    """From the first to the second step of FULL=FIRST:SECOND the disk has no room."""
    first, _, second = os.environ.get("FULL", "-1:-1").partition(":")
    ballast = Path("run/ballast")
    if step in (int(first), int(second)):
        await_writer()
    if step == int(second):
        ballast.unlink()
    if step == int(first):
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))


def note(step, rank, samples):
    line = {"step": step, "rank": rank, "attempt": ATTEMPT, "time": time.time(), "samples": samples}
    with open(f"ledger/{rank}-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def main(folder, *given):
    options = {key: json.loads(value) for key, _, value in (each.partition("=") for each in given)}
    with muster.Job(folder, **{"save_every": 5, "log_every": 1, "tensorboard": False, **options}) as job:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)).to(job.device)
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        job.track(model=model, optimizer=optimizer, schedule=schedule)
        for indices, x, y in job.batches(Numbered(), batch_size=int(os.environ.get("BATCH", "12")), epochs=3):
            note(job.steps_done, job.rank, indices.tolist() if job.weight else [])
            disturb(job.steps_done)
            loss = nn.functional.cross_entropy(model(x), y)
            (loss * job.weight).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            job.step(loss=loss)
            if job.ends_epoch:
                right = lambda batch: {"accuracy": (model(batch[1]).argmax(1) == batch[2]).float()}  # noqa: E731
                job.evaluate(Numbered(), right, batch_size=32)
    print(f"the script goes on after step {job.steps_done}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
