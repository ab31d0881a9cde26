"""Training loops beside the kit's on a GPU: a bare one, and two in the manner of well-known scripts.

Each is a generator that yields after each step. Under torchrun the two in others' manner train with DDP; the processes of
the bare one are independent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

LOG_EVERY = 10
WORKERS = min(8, len(os.sched_getaffinity(0)))


def autocast() -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16)


def wrapped(model: nn.Module, device: torch.device) -> nn.Module:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return DistributedDataParallel(model, device_ids=[device.index]) if ranks > 1 else model


def bare(model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Only model, loss, backward and optimizer, on one batch that lies on the device."""
    inputs, targets = batch
    while True:
        optimizer.zero_grad()
        with autocast():
            loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def images(model: nn.Module, dataset: Any, batch_size: int, device: torch.device) -> Iterator[None]:
    """As torchvision's reference script for classification trains: loss and accuracies are read at each step.

    Source: https://github.com/pytorch/vision/tree/main/references/classification
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    sampler: Any = DistributedSampler(range(1_000_000), ranks, rank)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=BatchSampler(sampler, batch_size, drop_last=True),
        collate_fn=_unchanged,
        num_workers=WORKERS,
        pin_memory=True,
    )
    net = wrapped(model.to(memory_format=torch.channels_last), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for cpu_images, cpu_labels in loader:
            inputs, labels = cpu_images.to(device, non_blocking=True), cpu_labels.to(device, non_blocking=True)
            inputs = inputs.contiguous(memory_format=torch.channels_last)
            with autocast():
                outputs = net(inputs)
                loss = cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                best = outputs.topk(5, 1).indices == labels[:, None]
                [loss.item(), best[:, :1].sum().item(), best.sum().item()]
            yield


def _unchanged(batch: Any) -> Any:
    return batch


def tokens(
    model: nn.Module, file: Path, batch_size: int, length: int, device: torch.device, *, rank: int = 0
) -> Iterator[None]:
    """As nanoGPT trains: random windows of a mapped file, the next ones copied during the step, the loss read now and then.

    Source: https://github.com/karpathy/nanoGPT
    """
    data, draw = np.memmap(file, dtype="<u2", mode="r"), np.random.default_rng(1337 + rank)
    draw_batch = _windows(data, draw, batch_size, length, device)
    model.compile()  # type: ignore[no-untyped-call]
    net = wrapped(model, device)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    inputs, targets = draw_batch()
    for step in range(1_000_000_000):
        for group in optimizer.param_groups:
            group["lr"] = 6e-5 + 0.5 * (1 + math.cos(math.pi * min(1.0, step / 600_000))) * 5.4e-4
        with autocast():
            loss = cross_entropy(net(inputs).flatten(0, -2), targets.flatten())
        inputs, targets = draw_batch()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            loss.item()
        yield


def _windows(
    data: np.ndarray, draw: np.random.Generator, number: int, length: int, device: torch.device
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that draws `[B, T] int64` tokens and next tokens, on the device."""

    def drawn() -> tuple[Tensor, Tensor]:
        starts = draw.integers(len(data) - length, size=number)
        windows = torch.from_numpy(np.stack([data[at : at + length + 1].astype(np.int64) for at in starts]))
        both = windows[:, :-1].contiguous().pin_memory(), windows[:, 1:].contiguous().pin_memory()
        return both[0].to(device, non_blocking=True), both[1].to(device, non_blocking=True)

    return drawn
