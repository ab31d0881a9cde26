"""Sequences of which some have one label and some have all, and losses whose mean is over labels, not over samples."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

from muster.train.objectives.language_modeling import LanguageModeling

IGNORED = -100
CLASSES = 5


class Padded(torch.utils.data.Dataset):
    """24 sequences of 12 tokens; every other one has one label, the others 12. The third has none if `empty`."""

    num_classes, tokens_per_sample = CLASSES, 12

    def __init__(self, train: bool = True, *, empty: bool = False):
        self.empty = empty

    def __len__(self):
        return 24

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        ids, labels = torch.randint(7, (12,), generator=draw), torch.randint(CLASSES, (12,), generator=draw)
        labels[0 if self.empty and index == 3 else 1 if index % 2 else 12 :] = IGNORED
        return ids, labels


class Named(Padded):
    """As Hugging Face's models want them."""

    def __getitem__(self, index):
        ids, labels = super().__getitem__(index)
        return {"input_ids": ids, "labels": labels}


class Bits(Padded):
    """The labels as 0 and 1, and -100 where there is none."""

    def __getitem__(self, index):
        ids, labels = super().__getitem__(index)
        return ids, torch.where(labels == IGNORED, labels, labels % 2).float()


class Points(Padded):
    """A point and its class."""

    def __getitem__(self, index):
        ids, labels = super().__getitem__(index)
        return ids / 7, labels[0]


class Tagger(nn.Module):
    """Logits [B, classes, T] of tokens [B, T]; [B, T, classes] if not `transposed`."""

    def __init__(self, num_classes: int, *, transposed: bool = True):
        super().__init__()
        self.embedding, self.head, self.transposed = nn.Embedding(7, 8), nn.Linear(8, num_classes), transposed

    def forward(self, ids):
        logits = self.head(self.embedding(ids))
        return logits.transpose(1, 2) if self.transposed else logits


class Turned(nn.Linear):
    """Logits [B, classes, T]."""

    def forward(self, x):
        return super().forward(x).transpose(1, 2)


class Chain(nn.Sequential):
    """`Tagger` as layers in a row."""

    def __init__(self, num_classes: int):
        super().__init__(OrderedDict(stem=nn.Embedding(7, 8), mid=nn.Linear(8, 8), head=Turned(8, num_classes)))


class OneBit(Tagger):
    """A logit for each token."""

    def __init__(self, num_classes: int):
        super().__init__(1, transposed=False)

    def forward(self, ids):
        return super().forward(ids)[..., 0]


class Classifier(nn.Linear):
    def __init__(self, num_classes: int):
        super().__init__(12, num_classes)


def gpt2():
    """A tiny GPT-2 of transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 7, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**small, **off))


def masked(outputs, targets):
    """A mean over the tokens that have a label, [] : 0 / 0 without any."""
    kept = (targets != IGNORED).float()
    return (
        F.binary_cross_entropy_with_logits(outputs, targets.clamp(min=0), reduction="none") * kept
    ).sum() / kept.sum()


masked.count = lambda targets: (targets != IGNORED).sum()


class Weighted(nn.CrossEntropyLoss):
    """Rare classes weigh more."""

    def __init__(self):
        super().__init__(weight=torch.tensor([1.0, 2.0, 0.5, 4.0, 0.25]), label_smoothing=0.1)


class Squares:
    """A loss that says nothing of what its mean is over."""

    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


class Derived(nn.CrossEntropyLoss):
    """A mean over something else than that of the class it is derived from."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none").mean()


class OfTheKit(LanguageModeling):
    """The same, of one of the kit's."""

    def __call__(self, outputs, targets):
        return Derived()(outputs.transpose(1, 2), targets)


class Negative(Squares):
    def count(self, targets):
        return -targets.numel()


class Whole(Squares):
    whole_batch = True


def batch_of_named(batch):
    """The adapter of `Named`: the model computes its own loss."""
    return batch, batch["labels"]
