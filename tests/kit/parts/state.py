"""Parts with state that a run could lose: buffers of all kinds, losses, optimizers, functions that draw random numbers."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset


class Keeping(nn.Module):
    """Its outputs depend on two running averages, which it assigns, or with `in_place` writes into; `bad`: the forward pass
    whose inputs are not numbers."""

    def __init__(self, num_classes=10, in_place=False, bad=None):
        super().__init__()
        self.head, self.in_place, self.bad, self.calls = nn.Linear(64, num_classes), in_place, bad, 0
        self.register_buffer("running", torch.zeros(64))
        self.register_buffer("unsaved", torch.zeros(64), persistent=False)

    def forward(self, images):
        inputs = images.flatten(1).float()
        if self.training:
            self.calls += 1
            inputs = inputs * float("nan") if self.calls == self.bad else inputs
            self.follow("running", 0.9, inputs)
            self.follow("unsaved", 0.5, inputs)
        return self.head(inputs - self.running + self.unsaved.tanh())

    def follow(self, name, decay, inputs):
        value = decay * getattr(self, name) + (1 - decay) * inputs.detach().mean(0)
        if self.in_place:
            getattr(self, name).copy_(value)
        else:
            setattr(self, name, value)


class Late(Keeping):
    """A buffer that is None until the first forward pass."""

    def __init__(self, num_classes=10):
        super().__init__(num_classes)
        self.register_buffer("first", None)

    def forward(self, images):
        if self.first is None:
            self.first = images.flatten(1).float()[:3].clone()
        return super().forward(images) + self.first.mean()


class Counting(Keeping):
    """Buffers that are not trained, and counts of inputs."""

    def __init__(self, num_classes=10):
        super().__init__(num_classes)
        self.register_buffer("mask", torch.full((64, 64), float("-inf")).triu(1))
        self.register_buffer("lowest", torch.full((8,), torch.finfo(torch.float32).min))
        self.register_buffer("table", torch.arange(1000.0).sin())
        self.register_buffer("wide", torch.arange(1000, dtype=torch.float64).sin())
        self.register_buffer("bright", torch.zeros((), dtype=torch.int64))
        self.register_buffer("met", torch.zeros(num_classes, dtype=torch.bool))
        self.norm = nn.BatchNorm1d(num_classes)

    def forward(self, images):
        outputs = self.norm(super().forward(images))
        if self.training:
            self.bright += (images > 0.5).sum()
            self.met |= torch.nn.functional.one_hot(outputs.argmax(-1), outputs.shape[1]).sum(0) > 0
        return outputs


class Growing(Keeping):
    """A buffer that grows with each forward pass."""

    def forward(self, images):
        self.running = torch.cat([self.running, torch.zeros(1)])
        return self.head(images.flatten(1).float())


class Chancy(nn.Module):
    """Draws random numbers also in evaluation."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, images):
        return self.head(nn.functional.dropout(images.flatten(1).float(), 0.3))


class Twice(nn.Sequential):
    """One batch norm under two names."""

    def __init__(self, num_classes=10):
        norm = nn.BatchNorm1d(16)
        super().__init__(nn.Flatten(), nn.Linear(64, 16), norm, nn.Linear(16, 16), norm, nn.Linear(16, num_classes))


class Extra(nn.Linear):
    """Has extra state, a dict. plain: whether it has only plain values."""

    def __init__(self, plain=True):
        super().__init__(64, 10)
        self.calls, self.plain = 0, plain

    def get_extra_state(self):
        return {"calls": self.calls if self.plain else random.Random(0), "last": torch.tensor([self.calls])}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, images):
        self.calls += self.training
        return super().forward(images.flatten(1).float())


class SamplesSeen(Extra):
    """Counts the samples of its rank in its extra state."""

    def forward(self, images):
        self.calls += self.training * (len(images) - 1)
        return super().forward(images)


class Recalling(Extra):
    """Its outputs depend on its extra state, which is a bare tensor if `bare`."""

    def __init__(self, bare=False):
        super().__init__()
        self.bare = bare

    def get_extra_state(self):
        state = super().get_extra_state()
        return state["last"] if self.bare else state

    def set_extra_state(self, state):
        self.calls = int(state) if self.bare else state["calls"]

    def forward(self, images):
        return super().forward(images) * self.calls


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.one, self.other, self.head = (nn.Linear(64, size, bias=False) for size in (64, 64, num_classes))
        self.other.weight = self.one.weight

    def forward(self, images):
        return self.head(self.other(self.one(images.flatten(1).float()).relu()).relu())


class Replacing(nn.Linear):
    """Replaces its parameter in a forward pass."""

    def __init__(self, at=1):
        super().__init__(64, 10)
        self.calls, self.at = 0, at

    def forward(self, images):
        self.calls += self.training
        if self.training and self.calls == self.at:
            self.weight = nn.Parameter(self.weight.detach().clone())
        return super().forward(images.flatten(1).float())


class Thawing(nn.Module):
    """A layer that is frozen until the first forward pass."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.body.requires_grad_(False)

    def forward(self, images):
        self.body.requires_grad_(True)
        return self.head(self.body(images.flatten(1).float()))


class Centred(nn.Module):
    """A loss with a running centre, and a copy that follows it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(10))
        self.teacher = nn.Parameter(torch.zeros(10), requires_grad=False)

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs - self.centre + self.teacher.tanh(), targets)
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        with torch.no_grad():
            self.teacher.lerp_(outputs.mean(0), 0.05)
        return loss


class Weighted(nn.Module):
    """A loss with trainable parameters."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs * self.temperature, targets)


class Remembering(nn.CrossEntropyLoss):
    """A loss with extra state."""

    def get_extra_state(self):
        return {"calls": 1}


class Mixed(torch.optim.Optimizer):
    """Keeps a velocity in float64 and a sign in int8, and adds noise to its steps."""

    def __init__(self, params, lr=0.01, noise=0.0):
        super().__init__(params, {"lr": lr, "noise": noise})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["sign"] = torch.zeros_like(parameter, dtype=torch.int8)
                assert state["sign"].dtype is torch.int8, state["sign"].dtype
                state["velocity"].mul_(0.9).add_(parameter.grad.double() / 3)
                state["sign"].copy_(state["velocity"].sign())
                noise = group["noise"] * torch.randn_like(parameter)
                parameter.sub_(group["lr"] * (state["velocity"] + 0.01 * state["sign"] + noise).to(parameter.dtype))


def mixup(samples):
    """Mix each sample with another, with numbers from three generators."""
    images = torch.stack([torch.as_tensor(image).float() for image, _ in samples])
    others = torch.randperm(len(images))
    share = random.random() + np.random.rand() + torch.rand(())
    return images + 0.2 * share * images[others], torch.tensor([int(label) for _, label in samples])


def mixup_in_training(samples, train):
    """Mix training samples."""
    return mixup(samples) if train else torch.utils.data.default_collate(samples)


class MaskedInTraining:
    """Masks a fifth of each training image."""

    def __init__(self, train):
        self.train = train

    def __call__(self, batch):
        return masked(batch) if self.train else batch


def masked(batch):
    """Mask a fifth of each image."""
    images, labels = batch
    return images * (torch.rand_like(images) > 0.2), labels


class Shuffled(IterableDataset):
    """A stream that shuffles within a buffer with the global generators."""

    num_classes = 10

    def __init__(self, *, train: bool):
        self.size = 96 if train else 32

    def __len__(self):
        return self.size

    def __iter__(self):
        waiting = []
        for index in range(self.size):
            waiting.append(index)
            if len(waiting) == 8:
                yield self.sample(waiting.pop(random.randrange(8)))
        while waiting:
            yield self.sample(waiting.pop(int(torch.randint(len(waiting), ()))))

    def sample(self, index):
        return torch.full((64,), index / 96), index % 10
