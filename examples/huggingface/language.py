"""A GPT-2 of Hugging Face, from its config, on samples that are dicts."""

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Texts of different lengths, as bytes: what Python says of its own types, the last tenth for testing."""

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
    """`[B, T]` of each; what is padding gets the label -100, which the loss leaves out."""
    ids = [sample["input_ids"] for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(each) for each in ids])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return {"input_ids": padded, "attention_mask": mask.long(), "labels": padded.masked_fill(~mask, -100)}


def gpt2(**config: Any) -> GPT2LMHeadModel:
    """`config` is GPT2Config's."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, use_cache=False, loss_type="ForCausalLM", **config))
