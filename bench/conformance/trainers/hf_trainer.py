"""transformers.Trainer with its documented options for exact resumption and for SIGTERM.

Source: https://huggingface.co/docs/transformers/main_classes/trainer (save_strategy, ignore_data_skip left at False,
enable_jit_checkpoint) and the resume from `get_last_checkpoint` of the library's own example scripts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.conformance.parts import KEEP, LR, SAVE_EVERY, Net, Points, batch_of_rank
from bench.conformance.trainers.base import Trainer, numbered, script


class Classifier(nn.Module):
    """The model with its loss inside, as Trainer requires."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def main(folder: Path, epochs: int) -> None:
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    transformers.set_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_of_rank(),
        learning_rate=LR,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        save_total_limit=KEEP,
        enable_jit_checkpoint=True,
        logging_steps=1,
        seed=0,
        dataloader_num_workers=1,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(Classifier(), arguments, data_collator=collate, train_dataset=Points())
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_state()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), folder / "final.pt")


def logged(folder: Path) -> list[int]:
    """Return the steps in the log history of the trainer's saved state."""
    history: list[dict[str, Any]] = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["step"] for entry in history if "loss" in entry]


TRAINER = Trainer(
    title="HF Trainer",
    packages=("transformers", "accelerate"),
    worker=script("bench.conformance.trainers.hf_trainer"),
    checkpoints=lambda folder: numbered([*folder.glob("checkpoint-*")]),
    metrics=logged,
)

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
