"""Typical mistakes in custom parts. The line that the error must name is marked `# here: MISTAKE`."""

import os
from types import SimpleNamespace

import torch
from torch import nn

from muster.errors import DataError
from muster.train.callbacks.base import Callback


class Data:
    """Thirty pairs of four numbers and a class."""

    num_classes = 3

    def __init__(self, train=True):
        self.x, self.y = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class MissingOn(Data):
    """Data that one rank does not find."""

    def __init__(self, train=True, rank=0):
        super().__init__(train)
        if os.environ.get("RANK", "0") == str(rank):
            raise DataError("/nonexistent is not a folder")


class Net(nn.Linear):  # here: dict
    def __init__(self):
        super().__init__(4, 3)


class NoReturn(Net):
    def forward(self, x):  # here: forgotten return
        super().forward(x)


class Puts(Net):
    def forward(self, x):
        return super().forward(x.put(torch.tensor([1]), torch.zeros(1)))  # torch has no deterministic form of it


class Tuple(Net):
    def forward(self, x):  # here: tuple
        return super().forward(x), x


class HuggingFace(Net):
    def forward(self, x):  # here: hugging face
        logits = super().forward(x)
        return SimpleNamespace(logits=logits, loss=logits.mean())


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x):
        return self.layer(x)  # here: wrong shape


class Convolving(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 3))

    def forward(self, x):
        return super().forward(x)  # here: no picture


class Several(Net):
    def forward(self, x, mask):  # here: one input of two
        return super().forward(x * mask)


class Raising(Net):
    def __init__(self, rank=None, at=1):
        super().__init__()
        self.rank, self.at, self.calls = rank, at, 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == self.at and self.rank in (None, int(os.environ.get("RANK", "0"))):
            raise ValueError("no such thing")  # here: raises in forward
        return super().forward(x)


class Detached(Net):
    def forward(self, x):  # here: cut off
        return super().forward(x).detach()


class Unbuilt(Net):
    def __init__(self):
        super().__init__()
        self.width = self.hidden  # here: raises in the constructor


def vector(outputs, targets):  # here: vector
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def none(outputs, targets):  # here: none
    nn.functional.cross_entropy(outputs, targets)


def number(outputs, targets):  # here: number
    return nn.functional.cross_entropy(outputs, targets).item()


def raising(outputs, targets):
    return outputs["logits"].mean()  # here: raises in the loss


class Bare:
    def __call__(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def metrics(self, outputs, targets):  # here: sums by name
        return self(outputs, targets)


class NoLength:  # here: no length
    def __getitem__(self, index):
        return torch.ones(4), 0


class Dicts(Data):
    def __getitem__(self, index):
        return {"points": self.x[index], "label": self.y[index]}


class Doubles(Data):
    def __getitem__(self, index):  # here: float64
        return self.x[index].double(), self.y[index]


class Beyond(Data):
    def __getitem__(self, index):  # here: labels out of range
        return self.x[index], self.y[index] + 1


class FloatLabels(Data):
    def __getitem__(self, index):  # here: float labels
        return self.x[index], self.y[index].float()


class Counted(Data):  # here: classes
    num_classes = None

    def __init__(self, train=True):
        super().__init__(train)
        self.classes = 3


class Uncounted(Data):  # here: no number of classes
    num_classes = None


class ForClasses(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(4, num_classes)


class Values(Data):
    num_classes = None

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum()


class OneColumn(nn.Linear):  # here: each with each
    def __init__(self):
        super().__init__(4, 1)


class Unreadable(Data):
    def __getitem__(self, index):
        raise ValueError("no such sample")  # here: unreadable


class Misspelt(Data):
    def __getitem__(self, index):
        return self.points[index], self.y[index]  # here: raises in the data set


class Stuck(Data):
    def __getitem__(self, index):
        if index == 21:
            raise RuntimeError("no such decoder")  # here: raises RuntimeError in the data set
        return super().__getitem__(index)


class Transformed(Data):
    def __getitem__(self, index):
        return transform(self.x[index]), self.y[index]


def transform(x):
    return x + "1"  # here: raises in a transform


class Pictures(Data):
    def __init__(self, train=True, transform=None):
        super().__init__(train)
        self.transform = transform

    def __getitem__(self, index):  # here: pictures
        from PIL import Image

        picture = Image.new("L", (2, 2), index)
        return self.transform(picture) if self.transform else picture, self.y[index]


class Ragged(Data):
    def __getitem__(self, index):  # here: ragged
        return torch.ones(index + 1), self.y[index]


class Untested(Data):
    def __init__(self):
        super().__init__()


class EmptyTest(Data):
    def __init__(self, train):
        super().__init__()
        self.train = train

    def __len__(self):
        return 30 if self.train else 0


class Hole(Data):
    def __getitem__(self, index):  # here: hole
        return super().__getitem__(index) if index % 2 else None


class Absent(Data):
    def __init__(self, train=True, path="/nowhere/points.csv"):
        super().__init__(train)
        open(path)  # here: missing file


class AbsentLate(Data):
    def __getitem__(self, index):
        return open(f"/nowhere/{index}.csv")  # here: missing file of a sample


def forgetful(samples):  # here: forgotten return in collate_fn
    torch.utils.data.default_collate(samples)


def three(samples):  # here: three parts of collate_fn
    return 1, 2, 3


def doubles(samples):  # here: float64 of collate_fn
    x, y = torch.utils.data.default_collate(samples)
    return x.double(), y


def leave_out(samples):
    return torch.utils.data.default_collate([sample for sample in samples if sample is not None])


def collate(samples):
    return samples["x"]  # here: raises in collate_fn


def adapter(batch):
    return batch["x"]  # here: raises in the adapter


class Hook(Callback):
    def on_step_end(self, run):
        run.no_such_thing()  # here: raises in a callback


class Metric:
    def to(self, device):
        return self

    def update(self, outputs, targets):
        self.total += 1  # here: raises in a metric

    def compute(self):
        return 0.0

    def reset(self):
        pass


class Named(Net):
    def forward(self, x):  # here: metric of a dict
        return {"class": super().forward(x)}


def named(outputs, targets):
    return nn.functional.cross_entropy(outputs["class"], targets)


class Counts:
    """Of which one metric is a pair with a plain number."""

    def __call__(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def metrics(self, outputs, targets):
        return {"accuracy": ((outputs.argmax(1) == targets).sum(), len(targets)), "per_class": (targets.sum(), 3.0)}
