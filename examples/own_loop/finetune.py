"""A Hugging Face classifier trained by Accelerate: torchrun --nproc-per-node=2 finetune.py [FOLDER] [STEPS]

It tells by the bytes of a line in which of Python's modules the line stands. For a trained model, replace `classifier()` by
AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=3), and the bytes by its tokenizer's ids.
"""

import argparse
import contextlib
import dataclasses
import inspect
import sys
import tarfile

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from transformers import BertConfig, BertForSequenceClassification, get_cosine_schedule_with_warmup

import muster

MODULES = (argparse, dataclasses, tarfile)
LENGTH, PADDING = 48, 0


def lines(module):
    return [line.strip() for line in inspect.getsource(module).splitlines() if len(line.strip()) > 20]


def collate(samples):
    """Pad lines of different lengths: input_ids and attention_mask [B, T] int64, labels [B] int64."""
    texts, labels = zip(*samples, strict=True)
    ids = [torch.tensor([*text.encode()[:LENGTH]]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PADDING)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": torch.tensor(labels)}


def classifier():
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForSequenceClassification(
        BertConfig(vocab_size=256, max_position_embeddings=LENGTH, num_labels=len(MODULES), **size)
    )


def scores(model, batch):
    """The accuracy of each sample, [B]."""
    return {"accuracy": (model(**batch).logits.argmax(1) == batch["labels"]).float()}


def main(job, accelerator, steps):
    samples = [(line, label) for label, module in enumerate(MODULES) for line in lines(module)]
    train, test = ([each for number, each in enumerate(samples) if (number % 10 == 0) == held] for held in (0, 1))
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    for batch in job.batches(train, batch_size=32, micro_batch_size=8, max_steps=steps, collate_fn=collate):
        with contextlib.nullcontext() if job.ends_step else accelerator.no_sync(model):
            loss = model(**batch).loss
            accelerator.backward(loss * job.weight)
        if job.ends_step:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        job.step(loss=loss)
        if job.ends_epoch:
            job.evaluate(test, lambda batch: scores(model, batch), collate_fn=collate)
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    # Without `cpu` Accelerate forms no group of processes on CPUs under torchrun. `split_batches` says that a batch is of all
    # ranks: otherwise each step is one step of the schedule for every rank.
    split = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=split)
    folder = sys.argv[1] if sys.argv[1:] else "runs/finetune"
    with muster.Job(folder, save_every=20) as job:
        model = main(job, accelerator, int(sys.argv[2]) if sys.argv[2:] else 300)
    if accelerator.is_main_process:
        model.save_pretrained(f"{folder}/pretrained")
    accelerator.end_training()
