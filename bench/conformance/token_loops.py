"""Padded sequences, a small model, and a loop around them for each trainer: `-m bench.conformance.token_loops NAME FOLDER BATCH`.

Each loop follows the documentation of its trainer on gradient accumulation, where there is one for losses that are means over tokens.
`batch` is the number of sequences that a rank puts through the model at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEQUENCES, TOKENS, STEPS, LR = 8, 12, 20, 0.5
WORDS, CLASSES, IGNORED = 7, 5, -100


class Padded(Dataset[tuple[Tensor, Tensor]]):
    """The sequences of one step, [12] int64, and their labels: half have one label, half have 12; -100 elsewhere.

    An epoch is a step, so every order of the samples gives the same steps.
    """

    def __init__(self, train: bool = True):
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randint(WORDS, (SEQUENCES, TOKENS), generator=draw)
        self.targets = torch.randint(CLASSES, (SEQUENCES, TOKENS), generator=draw)
        self.targets[1::2, 1:] = IGNORED

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Tagger(nn.Module):
    """Logits `[B, 5, T]` of `inputs [B, T] int64`. Its first weights are always the same."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(inputs))
        return logits.transpose(1, 2)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR)


def accumulated(batch: int) -> int:
    """Return the micro-batches of a step on each rank."""
    return SEQUENCES // int(os.environ["WORLD_SIZE"]) // batch


def plain() -> nn.Module:
    """The expected model: the full batch in one process, without a trainer."""
    model = Tagger()
    data, optimizer = Padded(), sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(data.inputs), data.targets).backward()
        optimizer.step()
    return model


def by_hand(folder: Path, batch: int) -> nn.Module:
    """The loop of the tutorial; the loss of a micro-batch divided by their number.

    Source: https://pytorch.org/tutorials/beginner/ddp_series_multigpu.html; `no_sync` of DistributedDataParallel's reference
    """
    dist.init_process_group("gloo")
    data = Padded()
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch, sampler=sampler)
    model = DistributedDataParallel(Tagger())
    optimizer = sgd(model)
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(loader, 1):
            with contextlib.nullcontext() if number == len(loader) else model.no_sync():
                (cross_entropy(model(inputs), targets) / len(loader)).backward()
        optimizer.step()
    dist.destroy_process_group()
    return model.module


def hf_trainer(folder: Path, batch: int) -> nn.Module:
    """A loss function that gets `num_items_in_batch`, and the default of `average_tokens_across_devices`.

    Source: https://huggingface.co/docs/transformers/grad_accumulation (loss scaling)
    """
    import transformers
    from transformers.loss.loss_utils import fixed_cross_entropy

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        inputs, labels = zip(*samples, strict=True)
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=STEPS,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated(batch),
        optim="sgd",
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    model = Tagger()
    trainer = transformers.Trainer(
        model, arguments, data_collator=collate, train_dataset=Padded(), compute_loss_func=fixed_cross_entropy
    )
    trainer.train()
    return model


def accelerate(folder: Path, batch: int) -> nn.Module:
    """The recipe for samples of variable size: the sum of the losses over the gathered number of tokens.

    Source: https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
    """
    from accelerate import Accelerator

    steps = accumulated(batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = Tagger()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(Padded(), batch, shuffle=True))
    for _ in range(STEPS):
        batches = list(loader)
        tokens = accelerator.gather(sum((targets != IGNORED).sum() for _, targets in batches)).sum().item()
        for number, (inputs, targets) in enumerate(batches, 1):
            alone = number == steps or accelerator.num_processes == 1
            with contextlib.nullcontext() if alone else model.no_sync():
                loss = cross_entropy(model(inputs), targets, reduction="sum")
                accelerator.backward(loss * steps * accelerator.num_processes / tokens)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


def lightning(folder: Path, batch: int) -> nn.Module:
    """`accumulate_grad_batches`. Source: https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html"""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tagger()

        def training_step(self, batch: Any, _: int) -> Tensor:
            inputs, targets = batch
            return cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=STEPS,
        accumulate_grad_batches=accumulated(batch),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(Padded(), batch, shuffle=True))
    return module.net


def own_loop(folder: Path, batch: int) -> nn.Module:
    """`job.batches(count=...)` and `job.weight`. Source: docs/loop-recipes.md (gradient accumulation)"""
    import muster

    with muster.Job(folder, tensorboard=False) as job:
        model = DistributedDataParallel(Tagger())
        optimizer = sgd(model)
        job.track(model=model, optimizer=optimizer)
        sizes = {"batch_size": SEQUENCES, "micro_batch_size": batch, "epochs": STEPS}
        for inputs, targets in job.batches(Padded(), count=lambda batch: (batch[1] != IGNORED).sum(), **sizes):
            with contextlib.nullcontext() if job.ends_step else model.no_sync():
                loss = cross_entropy(model(inputs), targets)
                (loss * job.weight).backward()
            if job.ends_step:
                optimizer.step()
                optimizer.zero_grad()
            job.step(loss=loss)
    return model.module


def ours(folder: Path, batch: int) -> list[str]:
    """Return the command line of the kit's trainer, which needs no loop. Source: docs/your-own-training.md"""
    parts = "bench.conformance.token_loops"
    return [
        *("-m", "train", f"output_dir={folder}", f"epochs={STEPS}", f"batch_size={SEQUENCES}"),
        *(f"micro_batch_size={batch}", f"data._target_={parts}.Padded", f"model._target_={parts}.Tagger"),
        *("objective._target_=torch.nn.functional.cross_entropy", f"optimizer.lr={LR}", "optimizer.momentum=0"),
        *("device=cpu", "log.tensorboard=false", "log.report=false", "log.progress=none"),
    ]


def main(name: str, folder: Path, batch: int) -> None:
    loops = {loop.__name__: loop for loop in (by_hand, hf_trainer, accelerate, lightning, own_loop)}
    model = loops[name](folder, batch)
    if os.environ["RANK"] == "0":
        folder.mkdir(exist_ok=True)
        torch.save(model.state_dict(), folder / "model.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
