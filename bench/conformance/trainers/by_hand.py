"""A hand-written loop under torchrun: rank 0 saves a snapshot of model, optimizer and epoch after each epoch.

Source: https://pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html for the snapshot and the restart,
https://pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html for the optimizer's state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from bench.conformance.parts import LR, STEPS_PER_EPOCH, Net, Points, batch_of_rank
from bench.conformance.trainers.base import Trainer, script


def main(folder: Path, epochs: int) -> None:
    dist.init_process_group("gloo")
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    data = Points()
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_of_rank(), sampler=sampler, num_workers=1)
    model, first = Net(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    snapshot = folder / "snapshot.pt"
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epochs_run"]
    parallel = DistributedDataParallel(model)
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = cross_entropy(parallel(inputs), targets)
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                log(folder, step=epoch * STEPS_PER_EPOCH + index, loss=loss.item())
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": epoch + 1}
            torch.save(state, snapshot)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "final.pt")
    dist.destroy_process_group()


def log(folder: Path, *, step: int, loss: float) -> None:
    """Append one line per step."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def logged(folder: Path) -> list[int]:
    """Return the steps that `log` has written."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


TRAINER = Trainer(
    title="torchrun, by hand",
    packages=("torch",),
    worker=script("bench.conformance.trainers.by_hand"),
    checkpoints=lambda folder: [*folder.glob("snapshot.pt")],
    metrics=logged,
    save_every=STEPS_PER_EPOCH,
)

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
