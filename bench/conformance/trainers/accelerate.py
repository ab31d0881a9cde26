"""Accelerate's save_state and load_state every few steps, with skip_first_batches for the position in the epoch.

Source: https://huggingface.co/docs/accelerate/usage_guides/checkpoint and the library's by_feature/checkpointing.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from bench.conformance.parts import KEEP, LR, SAVE_EVERY, STEPS_PER_EPOCH, Net, Points, batch_of_rank
from bench.conformance.trainers.base import Trainer, numbered, script
from bench.conformance.trainers.by_hand import log, logged


def main(folder: Path, epochs: int) -> None:
    import shutil

    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seedable, project_dir=str(folder))
    folder.mkdir(exist_ok=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(Points(), batch_of_rank(), shuffle=True, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    if saved := numbered([*folder.glob("step_*")]):
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.removeprefix("step_"))
    for epoch in range(step // STEPS_PER_EPOCH, epochs):
        loader.set_epoch(epoch)
        done = step % STEPS_PER_EPOCH
        for inputs, targets in accelerator.skip_first_batches(loader, done) if done else loader:
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.is_main_process:
                log(folder, step=step, loss=loss.item())
            step += 1
            if step % SAVE_EVERY == 0:
                accelerator.save_state(str(folder / f"step_{step}"))
                if accelerator.is_main_process:
                    for old in numbered([*folder.glob("step_*")])[:-KEEP]:
                        shutil.rmtree(old)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), folder / "final.pt")
    accelerator.end_training()


TRAINER = Trainer(
    title="Accelerate",
    packages=("accelerate",),
    worker=script("bench.conformance.trainers.accelerate"),
    checkpoints=lambda folder: numbered([*folder.glob("step_*")]),
    metrics=logged,
)

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
