"""The loops of other trainers on the model and data of `bench.loop`, with their defaults. Each yields after a step.

The defaults are Lightning's logs, progress bar and checkpoints after each epoch, and Accelerate's wrappers.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Loss = Callable[[Tensor, Tensor], Tensor]
Loop = Callable[[nn.Module, Dataset[Any], int, Loss], Iterator[None]]


def loader(dataset: Dataset[Any], batch: int) -> DataLoader[Any]:
    return DataLoader(dataset, batch, shuffle=True, drop_last=True, collate_fn=getattr(dataset, "collate", None))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def accelerate(model: nn.Module, dataset: Dataset[Any], batch: int, loss_of: Loss) -> Iterator[None]:
    """The loop of Accelerate's quick tour. Source: https://huggingface.co/docs/accelerate/quicktour"""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(dataset, batch))
    while True:
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            yield


def lightning(model: nn.Module, dataset: Dataset[Any], batch: int, loss_of: Loss) -> Iterator[None]:
    """Lightning's Trainer, in a thread that waits between turns.

    Source: https://lightning.ai/docs/pytorch/stable/starter/introduction.html
    """
    import lightning.pytorch as pl

    mine, theirs = threading.Semaphore(0), threading.Semaphore(0)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            inputs, labels = batch
            loss = loss_of(self.model(inputs), labels)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

    class Turn(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            theirs.release()
            mine.acquire()

    def fit() -> None:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        mine.acquire()
        with tempfile.TemporaryDirectory() as folder:
            more = {"strategy": "ddp"} if ranks > 1 else {}
            trainer = pl.Trainer(
                accelerator="cpu", devices=ranks, max_epochs=-1, callbacks=[Turn()], default_root_dir=folder, **more
            )
            trainer.fit(Module(), loader(dataset, batch))

    threading.Thread(target=fit, daemon=True).start()
    while True:
        mine.release()
        theirs.acquire()
        yield


PEERS: dict[str, Loop] = {"accelerate": accelerate, "lightning": lightning}


def installed() -> dict[str, Loop]:
    """Return the installed trainers; `pip install . --group conformance` installs all."""
    return {name: loop for name, loop in PEERS.items() if importlib.util.find_spec(name)}
