"""A GPT-2 of Hugging Face, built from its config and trained on dict samples."""

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Texts of different lengths as bytes: docstrings of Python's built-in types; the last tenth is the test split."""

    def __init__(self, *, train: bool, longest: int):
        texts = [str(each.__doc__) for kind in (str, dict, list, set, bytes) for each in vars(kind).values()]
        texts = [text.encode("ascii", "ignore")[:longest] for text in texts]
        cut = len(texts) * 9 // 10
        self.texts = texts[:cut] if train else texts[cut:]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(list(self.texts[index]))}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad samples to `[B, T] int64`; padding has the label -100, which the loss ignores."""
    ids = [sample["input_ids"] for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(each) for each in ids])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return {"input_ids": padded, "attention_mask": mask.long(), "labels": padded.masked_fill(~mask, -100)}


def gpt2(**config: Any) -> GPT2LMHeadModel:
    """Build the model; `config` has arguments of GPT2Config."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, use_cache=False, loss_type="ForCausalLM", **config))
