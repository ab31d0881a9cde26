"""Loops that a resume could get wrong: `python exact.py` runs each to its end, and again from the middle of the first run.

Each rank prints a JSON line for each of both: the loop's name and digests of all that it trains.
"""

import hashlib
import json
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
)
from torchmetrics.classification import BinaryAccuracy

import muster

SIZE, MIDDLE = 40, 14  # ten steps an epoch


class Pairs(Dataset):
    """Sample i is (x, y), with noise from `draw`."""

    def __init__(self, draw=lambda: torch.rand(4), own=None):
        self.draw, self.own = draw, own

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        noise = torch.tensor(self.own.random(4)).float() if self.own else self.draw()
        return x + noise, int(x.sum() > 0)


class Stream(IterableDataset):
    """The same as a stream, which shuffles with the global generator."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        return (Pairs()[index] for index in torch.randperm(SIZE).tolist())


class Buffered(IterableDataset):
    """A stream of this rank's samples that shuffles with a buffer, by Python's global generator."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        buffer = []
        for each in (self.data[index] for index in range(len(self.data))):
            buffer.append(each)
            if len(buffer) > 6:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


class InPlace(torch.utils.data.Sampler):
    """A sampler that shuffles its own list on and on."""

    def __init__(self, size):
        self.order = [*range(size)]

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)


class OwnOrder(torch.utils.data.Sampler):
    """A sampler with a generator of its own."""

    def __init__(self):
        self.random = random.Random(1)

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(self.random.sample(range(SIZE), SIZE))


class Assigned(nn.Module):
    """A model that replaces its buffer, and whose second branch begins to train late."""

    def __init__(self):
        super().__init__()
        self.one, self.two = net(), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls, self.mean = self.calls + 1, 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.one(x - self.mean) + (self.two(x) if self.calls > 12 else 0)


class Unsaved(nn.Module):
    """A model with buffers in no state dict: one follows from the batch, one counts, and one is assigned."""

    def __init__(self):
        super().__init__()
        self.net = net()
        for name in ("mean", "calls"):
            self.register_buffer(name, torch.zeros(()), persistent=False)
        self.register_buffer("moving", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.mean = x.mean().detach()
        self.calls += 1
        self.moving = self.moving * 0.9 + self.mean
        return self.net(x - self.moving) / self.calls.sqrt()

    def get_extra_state(self):  # for the digest
        return {"calls": self.calls.clone(), "moving": self.moving.clone()}

    def set_extra_state(self, state):
        pass


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def train(job, feed, *, model=None, every=1, make=lambda model: torch.optim.AdamW(model.parameters(), 1e-2), **ddp):
    model = DistributedDataParallel(model or net(), **ddp)
    optimizer = make(model)
    schedule = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.StepLR(optimizer, 4)], [5]
    )
    ema = swa_utils.AveragedModel(model.module, use_buffers=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    job.track(model=model, optimizer=optimizer, schedule=schedule, ema=ema, scaler=scaler)
    for x, y in feed(job):
        loss = cross_entropy(model(x), y)
        scaler.scale(loss * job.weight / every).backward()
        if (job.steps_done + 1) % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
        job.step(loss=loss)
        ema.update_parameters(model.module)
    return {"model": model, "ema": ema, "optimizer": optimizer, "schedule": schedule}


def closures(job):
    """LBFGS, whose state is lists of tensors, steps with a closure."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)
    job.track(model=model, optimizer=optimizer)
    for x, y in planned(job):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        job.step(loss=optimizer.step(closure))
    return {"model": model, "optimizer": optimizer}


def two_losses(job, zeroes="after", **how):
    """A generator and a critic, whose gradients are dropped right `after` its step, so that the other's loss leaves some, or `before`."""
    one, other = (
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), **how) for _ in range(2)
    )
    first, second = (torch.optim.Adam(each.parameters(), 1e-2) for each in (one, other))
    job.track(model=one, critic=other, first=first, second=second)
    for x, _ in planned(job):
        made = one(x)
        if zeroes == "before":
            second.zero_grad(set_to_none=False)
        (other(made.detach()).pow(2).mean() - other(x).mean()).backward()
        second.step()
        if zeroes == "after":
            second.zero_grad()
        loss = other(made).mean()
        loss.backward()
        first.step()
        first.zero_grad()
        job.step(loss=loss)
    return {"model": one, "critic": other, "first": first, "second": second}


def late_steps(job, replaces=False, counts_first=False):
    """The gradients of a batch are used before the next one's are computed."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    job.track(model=model, optimizer=optimizer)
    for x, y in planned(job):
        for each in model.parameters() if replaces else ():
            each.grad = None if each.grad is None else each.grad / 2
        optimizer.step()
        optimizer.zero_grad()
        if counts_first:
            job.step()
        loss = cross_entropy(model(x), y)
        loss.backward()
        if not counts_first:
            job.step(loss=loss)
    return {"model": model, "optimizer": optimizer}


def by_hand(job, step, model=None, data=None, zero=lambda job, model: None, options=()):
    """`step` is called after each backward pass, and before it `zero`."""
    inner = model or nn.Linear(4, 2)
    model = DistributedDataParallel(inner, **dict(options))
    optimizer = torch.optim.SGD(inner.parameters(), 0.01)
    job.track(model=model, **({} if step is by_own_step else {"optimizer": optimizer}))
    for x, y in planned(job, data):
        zero(job, model)
        loss = cross_entropy(model(x), y)
        loss.backward()
        step(job, model, optimizer)
        job.step(loss=loss)
    return {"model": model}


def every_step(job, model, optimizer):
    optimizer.step()


def and_zeros(job, model, optimizer):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def by_own_step(job, model, optimizer):
    """Every fourth one, without an optimizer that is tracked."""
    if job.steps_done % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()


def every_third(job, model):
    if job.steps_done % 3 == 0:
        model.zero_grad()


def freeze_bias(job, model):
    model.module.bias.requires_grad_(job.steps_done < 12)


class Words(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.randint(0, 9, (3,), generator=torch.Generator().manual_seed(index)), index % 2


def late_steps_in_pieces(job):
    """Half of the rows are never used: the gradient of one rank's piece is zero."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Embedding(18, 4), nn.Flatten(), nn.Linear(12, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    job.track(model=model, optimizer=optimizer)
    for x, y in planned(job, Words()):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        job.step(loss=loss)
    return {"model": model}


def a_metric(job):
    """The sums of a metric are of each rank's own samples, and neither parameters nor buffers."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer, accuracy = torch.optim.AdamW(model.parameters(), 1e-2), BinaryAccuracy()
    accuracy.persistent(True)
    job.track(model=model, optimizer=optimizer, accuracy=accuracy)
    for x, y in planned(job):
        outputs = model(x)
        loss = cross_entropy(outputs, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy.update(outputs.detach()[:, 1].sigmoid(), y)
        job.step(loss=loss)
    return {"model": model, "accuracy": accuracy}


def planned(job, data=None, **options):
    return job.batches(data or Pairs(), batch_size=4, epochs=3, **options)


def loaded(make):
    """A loop over a DataLoader: `make` gets the data and this rank's place."""
    return lambda job: train(job, lambda job: job.batches(make(Pairs(), job), epochs=3))


def share(data, job):
    return Subset(data, range(job.rank, SIZE, job.world_size))


def generator():
    return torch.Generator().manual_seed(3)


LOOPS = {
    "batch_norm": lambda job: train(job, planned),
    "buffers_that_differ": lambda job: train(job, planned, broadcast_buffers=False),
    "buffers_that_are_assigned": lambda job: train(job, planned, model=Assigned(), find_unused_parameters=True),
    "buffers_that_are_not_saved": lambda job: train(job, planned, model=Unsaved()),
    "accumulation_over_steps": lambda job: train(job, planned, every=4),
    "closures": closures,
    "a_metric": a_metric,
    "two_losses": two_losses,
    "two_losses_of_views": lambda job: two_losses(job, gradient_as_bucket_view=True),
    "two_losses_that_are_zeroed": lambda job: two_losses(job, "before", gradient_as_bucket_view=True),
    "late_steps": late_steps,
    "late_steps_of_replaced_gradients": lambda job: late_steps(job, replaces=True),
    "late_steps_after_the_count": lambda job: late_steps(job, counts_first=True),
    "late_steps_in_pieces": late_steps_in_pieces,
    "gradients_that_add_up": lambda job: by_hand(job, every_step),
    "gradients_that_are_zeroed_now_and_then": lambda job: by_hand(job, every_step, zero=every_third),
    "gradients_of_no_optimizer": lambda job: by_hand(job, by_own_step),
    "gradients_of_views": lambda job: by_hand(job, by_own_step, options={"gradient_as_bucket_view": True}),
    "gradients_of_a_layer_that_is_frozen": lambda job: by_hand(
        job, and_zeros, zero=freeze_bias, options={"find_unused_parameters": True}
    ),
    "sparse_gradients": lambda job: by_hand(
        job,
        and_zeros,
        nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2)),
        Words(),
    ),
    "a_stream_that_shuffles": lambda job: train(job, lambda job: planned(job, Stream())),
    "a_sampler_in_a_sampler": loaded(
        lambda data, job: DataLoader(
            share(data, job),
            batch_sampler=BatchSampler(RandomSampler(share(data, job), generator=generator()), 4, True),
        )
    ),
    "set_epoch_in_a_sampler": loaded(
        lambda data, job: DataLoader(
            data, batch_sampler=BatchSampler(DistributedSampler(data, job.world_size, job.rank), 2, True)
        )
    ),
    "a_sampler_with_its_own_generator": loaded(lambda data, job: DataLoader(data, 4, sampler=OwnOrder())),
    "a_stream_with_a_shuffle_buffer": loaded(lambda data, job: DataLoader(Buffered(share(data, job)), 2)),
    "a_sampler_that_shuffles_on": loaded(
        lambda data, job: DataLoader(share(data, job), 2, sampler=InPlace(SIZE // job.world_size))
    ),
    "data_with_its_own_generator": loaded(
        lambda data, job: DataLoader(share(Pairs(own=np.random.default_rng(3)), job), 4, shuffle=True)
    ),
    "workers_that_persist": loaded(
        lambda data, job: DataLoader(share(data, job), 4, shuffle=True, num_workers=1, persistent_workers=True)
    ),
}


def leaves(state):
    """Yield the tensors and values of a state in an order that does not depend on insertion."""
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from leaves(state[key])
    elif isinstance(state, list | tuple):
        for item in state:
            yield from leaves(item)
    else:
        whole = state.full_tensor() if hasattr(state, "full_tensor") else state
        yield whole.detach().numpy().tobytes() if isinstance(whole, torch.Tensor) else whole


def digest(thing):
    return hashlib.sha256(repr([*leaves(thing.state_dict())]).encode()).hexdigest()[:12]


def main(names):
    dist.init_process_group("gloo")  # for all jobs
    for name in names or LOOPS:
        for folder, resume in ((name, "auto"), (f"{name}-resumed", f"{name}/checkpoints/step-{MIDDLE:08d}")):
            options = {"save_every": 7, "keep": 9, "tensorboard": False, "timeout_s": 30}
            with muster.Job(folder, resume=resume, **options) as job:
                trained = LOOPS[name](job)
                rank = job.rank
            digests = {each: digest(thing) for each, thing in trained.items()}
            line = json.dumps({"loop": name, "rank": rank, "resumed": resume != "auto", **digests})
            print(f"{line}\n", end="", flush=True)  # at once: ranks share the output


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
