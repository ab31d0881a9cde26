"""Lightning's Trainer with ModelCheckpoint every few steps, also on an exception, and a stateful loader.

Source: https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html (every_n_train_steps, save_last,
ckpt_path="last"), ModelCheckpoint's `save_on_exception`, and torchdata's StatefulDataLoader for the position in the epoch.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from bench.conformance.parts import KEEP, LR, SAVE_EVERY, Net, Points, batch_of_rank
from bench.conformance.trainers.base import Trainer, script


def main(folder: Path, epochs: int) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            inputs, targets = batch
            loss = cross_entropy(self.net(inputs), targets)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

        def train_dataloader(self) -> Any:
            # With shuffle=True the loader's own sampler would draw from a generator that no checkpoint restores.
            return StatefulDataLoader(data, batch_of_rank(), sampler=DistributedSampler(data), num_workers=1)

    data = Points()
    pl.seed_everything(0, workers=True)
    save = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        every_n_train_steps=SAVE_EVERY,
        monitor="step",
        mode="max",
        save_top_k=KEEP,
        save_last=True,
        save_on_exception=True,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=epochs,
        callbacks=[save],
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(model.state_dict(), folder / "final.pt")


def logged(folder: Path) -> list[int]:
    """Return the steps in all versions of metrics.csv, one per launch."""
    tables = [csv.DictReader(path.open()) for path in sorted(folder.glob("lightning_logs/*/metrics.csv"))]
    return [int(row["step"]) for table in tables for row in table if row.get("loss")]


TRAINER = Trainer(
    title="Lightning",
    packages=("lightning", "torchdata"),
    worker=script("bench.conformance.trainers.lightning"),
    checkpoints=lambda folder: [*folder.glob("checkpoints/last.ckpt")],
    metrics=logged,
)

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
