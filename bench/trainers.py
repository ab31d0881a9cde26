"""Training scripts beside the kit's: `torchrun ... -m bench.trainers NAME WORKLOAD DATA FOLDER`. Each trains until it is ended."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from bench.workloads import KINDS, SAMPLES, WORKLOADS, Plain, loss_of, model

FOREVER = 1_000_000_000


def loader_of(dataset: Plain, batch: int, sampler: Any) -> DataLoader[Any]:
    """Return a loader of the sampler's samples."""
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, batch, drop_last=True), collate_fn=dataset.collate)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def by_hand(net: nn.Module, dataset: Plain, batch: int, folder: str) -> None:
    """The loop of PyTorch's DDP tutorial, which reads the loss every 10 steps and keeps nothing."""
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(net) if ranks > 1 else net
    optimizer = sgd(net)
    sampler: Any = DistributedSampler(dataset, ranks, int(os.environ["RANK"]))
    loader = loader_of(dataset, batch, sampler)
    for epoch in range(FOREVER):
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(wrapped(inputs), labels)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                loss.item()


def bare(net: nn.Module, dataset: Plain, batch: int, folder: str) -> None:
    """Only model, loss, backward and SGD, on tensors read by the batch. Its processes are independent."""
    optimizer = sgd(net)
    while True:
        for indices in torch.randperm(SAMPLES).split(batch)[:-1]:
            optimizer.zero_grad()
            inputs, labels = Plain.__getitem__(dataset, indices)
            loss_of(net(inputs), labels).backward()
            optimizer.step()


def job(net: nn.Module, dataset: Plain, batch: int, folder: str) -> None:
    """The loop by hand with `muster.Job`, which logs every 10 steps and saves every 100."""
    import muster

    muster.Job(folder).run(_with_job, net, dataset, batch, False)


def job_loader(net: nn.Module, dataset: Plain, batch: int, folder: str) -> None:
    """The same with the loader of the loop by hand."""
    import muster

    muster.Job(folder).run(_with_job, net, dataset, batch, True)


def _with_job(run: Any, net: nn.Module, dataset: Plain, batch: int, by_loader: bool) -> None:
    wrapped = DistributedDataParallel(net) if run.world_size > 1 else net
    optimizer = sgd(net)
    run.track(model=wrapped, optimizer=optimizer)
    if by_loader:
        sampler: Any = DistributedSampler(dataset, run.world_size, run.rank)
        batches = run.batches(loader_of(dataset, batch, sampler), max_steps=FOREVER)
    else:
        batches = run.batches(dataset, batch_size=batch * run.world_size, max_steps=FOREVER)
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = loss_of(wrapped(inputs), labels)
        loss.backward()
        optimizer.step()
        run.step(loss=loss)


def accelerate(net: nn.Module, dataset: Plain, batch: int, folder: str) -> None:
    """The loop of Accelerate's quick tour. Source: https://huggingface.co/docs/accelerate/quicktour"""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(dataset, batch, shuffle=True, drop_last=True, collate_fn=dataset.collate)
    wrapped, optimizer, batches = accelerator.prepare(net, sgd(net), loader)
    while True:
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = loss_of(wrapped(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()


def lightning(net: nn.Module, dataset: Plain, batch: int, folder: str) -> None:
    """Lightning's Trainer with its defaults: logs, progress bar, a checkpoint after each epoch.

    Source: https://lightning.ai/docs/pytorch/stable/starter/introduction.html
    """
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = net

        def training_step(self, batch: Any, _: int) -> Tensor:
            inputs, labels = batch
            loss = loss_of(self.model(inputs), labels)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

    ranks = int(os.environ["WORLD_SIZE"])
    more = {"strategy": "ddp"} if ranks > 1 else {}
    trainer = pl.Trainer(accelerator="cpu", devices=ranks, max_epochs=-1, default_root_dir=folder, **more)
    trainer.fit(Module(), DataLoader(dataset, batch, shuffle=True, drop_last=True, collate_fn=dataset.collate))


TRAINERS = {each.__name__: each for each in (by_hand, bare, job, job_loader, accelerate, lightning)}


def main() -> None:
    name, of, kind, folder = sys.argv[1:]
    TRAINERS[name](model(of), KINDS[kind](of), WORKLOADS[of].batch, folder)


if __name__ == "__main__":
    main()
