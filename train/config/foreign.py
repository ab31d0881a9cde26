"""What other trainers call the things that keys set: a name of theirs is refused with what to write instead."""

from __future__ import annotations

import os

from muster.train.config.command_line import given

PER_RANK = {
    "batch_size_per_rank",
    "batch_size_per_gpu",
    "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu",
}
NAMES = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "gradient_clip_val": "grad_clip",
    "max_grad_norm": "grad_clip",
    "mixed_precision": "precision",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
    "torch_compile": "compile=true",
    "log_every_n_steps": "log.every_steps",
    "logging_steps": "log.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "check_val_every_n_epoch": "eval.every_steps",
    "eval_steps": "eval.every_steps",
    "resume_from_checkpoint": "checkpoint.resume",
    "limit_val_batches": "eval.max_samples",
    "dataloader_num_workers": "loader.num_workers",
}
"""Names of Lightning, Accelerate and Hugging Face's Trainer -> keys."""
ACCUMULATION = {"accumulate_grad_batches", "gradient_accumulation_steps"}
LAUNCH = {"num_nodes", "nnodes", "nproc_per_node", "devices", "num_processes"}


def said_elsewhere(key: str) -> str | None:
    """Return what to write for a key of another trainer; None if it is not known as one."""
    if key in PER_RANK:
        return f"batch_size counts the samples of a step over all ranks: {_global_batch(key)}"
    if key in ACCUMULATION:
        return "batch_size is that of the whole step: micro_batch_size is the most that a rank computes at once"
    if key in LAUNCH:
        return "the number of ranks is the launcher's: torchrun --nnodes=2 --nproc-per-node=4 -m train"
    return f"write {NAMES[key]}" if key in NAMES else None


def _global_batch(key: str) -> str:
    value, ranks = given(key, None), int(os.environ.get("WORLD_SIZE", "1"))
    if not isinstance(value, int):
        return "write batch_size"
    return f"for {value} on each of {ranks} write batch_size={value * ranks}"
