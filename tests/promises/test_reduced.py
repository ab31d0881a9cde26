"""Metrics of a user's own over ranks and slices: their value is that of one rank, or they are refused."""

import multiprocessing
import os
import random
import socket
import threading
import time
from collections import Counter
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torchmetrics
from kit.job import run
from kit.ranks import on_ranks
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup

from muster.errors import ConfigError
from muster.train.objectives import trial
from muster.train.objectives.measure import Measures
from muster.train.objectives.trial import Trial, tried
from muster.train.objectives.uniform_ranks import Untried, uniform_ranks


def summed(value):
    total = torch.tensor(float(value), dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total)


def hits(outputs, targets):
    return (outputs.argmax(1) == targets).sum()


class Plain:
    """Counts by hand; what it makes of the counts is that of `value`."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right, self.seen = 0, 0

    def update(self, outputs, targets):
        self.right += int(hits(outputs, targets))
        self.seen += len(targets)

    def compute(self):
        return self.value()


class Exact(Plain):
    def value(self):
        return summed(self.right) / summed(self.seen)


class ExactOnFirst(Plain):
    def value(self):
        every = [None] * (dist.get_world_size() if dist.is_initialized() else 1)
        if len(every) == 1:
            return self.right / self.seen
        dist.gather_object((self.right, self.seen), every if dist.get_rank() == 0 else None)
        return sum(right for right, _ in every) / sum(seen for _, seen in every) if every[0] else float("nan")


class ExactByObject(Plain):
    def value(self):
        every = [(self.right, self.seen)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, (self.right, self.seen))
        return sum(right for right, _ in every) / sum(seen for _, seen in every)


class CountForgotten(Plain):
    def value(self):
        return summed(self.right) / max(1, self.seen)


class OfTwoClasses(CountForgotten):
    """What it was made with happens to be the number of ranks."""

    def __init__(self):
        super().__init__()
        self.num_classes, self.k = 2, 3


class OfConfident(CountForgotten):
    """0 for an untrained model: the samples of a trial show nothing."""

    def update(self, outputs, targets):
        sure, which = outputs.softmax(1).max(1)
        self.right += float(((which == targets) & (sure > 0.9)).sum())
        self.seen += len(targets)


class RecallOfLast(Plain):
    """NaN where no sample is of that class."""

    def update(self, outputs, targets):
        self.right += float(((outputs.argmax(1) == 9) & (targets == 9)).sum())
        self.seen += float((targets == 9).sum())

    def value(self):
        size, seen = dist.get_world_size() if dist.is_initialized() else 1, summed(self.seen)
        return summed(self.right) / (seen / size) if seen else float("nan")


class BesideTime(Plain):
    """One value is another one each time; the other is wrong."""

    def value(self):
        return {"took": random.random(), "right": summed(self.right) / self.seen}


class OfHalves(Plain):
    """Half is 1 / the number of ranks, here by chance."""

    def __init__(self, threshold=0.5):
        super().__init__()
        self.threshold = threshold

    def update(self, outputs, targets):
        chances = outputs.softmax(1).gather(1, targets[:, None]).flatten()
        kept = chances[chances > self.threshold]
        self.right += float(kept.sum())
        self.seen += len(kept)

    def value(self):
        size, seen = dist.get_world_size() if dist.is_initialized() else 1, summed(self.seen)
        return summed(self.right) / (seen / size) if seen else float("nan")


class Ranks:
    def __init__(self):
        self.number = dist.get_world_size() if dist.is_initialized() else 1


class OfViews(Plain):
    """Its two counts are views of one tensor."""

    def __init__(self):
        self.counts = torch.zeros(2)
        self.right, self.seen = self.counts[0], self.counts[1]

    def reset(self):
        self.counts.zero_()

    def value(self):
        return summed(self.counts[0]) / summed(self.counts[1])


class InUpdate(Plain):
    """Ranks may have different numbers of batches."""

    def update(self, outputs, targets):
        self.right += summed(hits(outputs, targets))
        self.seen += summed(len(targets))

    def value(self):
        return self.right / self.seen


class FromHelper(Plain):
    """Another object has asked for the number of ranks."""

    def __init__(self):
        super().__init__()
        self.ranks = Ranks()

    def value(self):
        return summed(self.right / self.seen) / self.ranks.number


class OneOfTwo(Plain):
    def value(self):
        return {"accuracy": summed(self.right) / summed(self.seen), "seen": self.seen}


class BarrierAlone(Plain):
    def value(self):
        if dist.is_initialized():
            dist.barrier()
        return self.seen


class OwnOnFirst(Plain):
    def value(self):
        if dist.is_initialized():
            dist.barrier()
        return self.right / self.seen if not dist.is_initialized() or dist.get_rank() == 0 else float("nan")


class WithLock(Plain):
    """It cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def value(self):
        return self.seen


class OfMany(Plain):
    """As a correlation, it needs more than two samples."""

    def value(self):
        if self.seen < 10:
            raise ValueError("too few samples")
        return self.seen


class Declared(torchmetrics.Metric):
    """Declares the hits. How it counts the samples is in `count` and `counted`."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("right", torch.tensor(0.0), dist_reduce_fx="sum")
        self.begin()

    def begin(self):
        self.counts = self.none()

    def reset(self):
        super().reset()
        self.begin()

    def update(self, outputs, targets):
        self.right += hits(outputs, targets)
        self.count(len(targets))

    def compute(self):
        return self.right / max(1, self.counted())


class ExactDeclared(Declared):
    def begin(self):
        if not hasattr(self, "seen"):
            self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")

    def count(self, number):
        self.seen += number

    def counted(self):
        return self.seen


class WithExamples(ExactDeclared):
    """It keeps what its value does not depend on."""

    def __init__(self):
        super().__init__()
        self.examples, self.updated_at = [], 0.0

    def update(self, outputs, targets):
        super().update(outputs, targets)
        self.updated_at = time.time()
        self.examples += [int(targets[0])]


class InCounter(Declared):
    none = Counter

    def count(self, number):
        self.counts["seen"] += number

    def counted(self):
        return self.counts["seen"]


class InArray(InCounter):
    def none(self):
        return np.zeros(1)

    def count(self, number):
        self.counts[0] += number

    def counted(self):
        return float(self.counts[0])


class InList(InArray):
    def none(self):
        return [0] * 3


class FromNone(InArray):
    def none(self):
        return None

    def count(self, number):
        self.counts = (self.counts or 0) + number

    def counted(self):
        return self.counts or 1


class Late(FromNone):
    def begin(self):
        self.__dict__.pop("late", None)

    def count(self, number):
        self.late = self.__dict__.get("late", 0) + number

    def counted(self):
        return self.__dict__.get("late", 1)


class ByUpdates(Late):
    """A mean over micro-batches, by torchmetrics' own count of this rank's updates."""

    def update(self, outputs, targets):
        self.right += hits(outputs, targets) / len(targets)

    def count(self, number):
        pass

    def counted(self):
        return self.update_count


class MeanOfCounts(ExactDeclared):
    def begin(self):
        if not hasattr(self, "seen"):
            self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="mean")


class ByEnvironment(Plain):
    def value(self):
        return summed(self.right / self.seen) / int(os.environ.get("WORLD_SIZE", "1"))


class FromConstructor(Plain):
    def __init__(self):
        super().__init__()
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1

    def value(self):
        return summed(self.right / self.seen) / self.ranks


@cache
def cached_size():
    return dist.get_world_size() if dist.is_initialized() else 1


@cache
def cached_group():
    return dist.group.WORLD


class Cached(Plain):
    """It remembers the group and its size for good at its first use."""

    def value(self):
        both = torch.tensor([float(self.right), float(self.seen)])
        if cached_size() > 1:
            dist.all_reduce(both, group=cached_group())
        return float(both[0] / both[1]) + 0 * cached_size()


class Inverse(Plain):
    def __init__(self):
        super().__init__()
        self.scale = 1 / dist.get_world_size() if dist.is_initialized() else 1.0

    def value(self):
        return summed(self.right / self.seen) * self.scale


class InSharedMemory(Plain):
    """It counts in memory that a child of this process would share."""

    def __init__(self):
        self.shared = multiprocessing.Value("q", 0)
        super().__init__()

    def reset(self):
        super().reset()
        self.shared.value = 0

    def update(self, outputs, targets):
        super().update(outputs, targets)
        self.shared.value += len(targets)

    def value(self):
        return summed(self.right) / summed(self.shared.value)


class OverAll(Plain):
    """It cannot be copied, and goes on counting over resets."""

    def __init__(self):
        self.lock, self.all = threading.Lock(), [0, 0]
        super().__init__()

    def update(self, outputs, targets):
        super().update(outputs, targets)
        self.all[0] += int(hits(outputs, targets))
        self.all[1] += len(targets)

    def value(self):
        return summed(self.all[0]) / summed(self.all[1]) + 0 * (summed(self.all[1]) - 360)


class InPlace(Plain):
    """It changes what it is given."""

    def update(self, outputs, targets):
        super().update(outputs.clone(), targets)
        targets.add_(1).remainder_(10)

    def value(self):
        return summed(self.right) / summed(self.seen)


class Functional(Plain):
    def value(self):
        both = torch.tensor([float(self.right), float(self.seen)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            both = functional.all_reduce(both, "sum", dist.group.WORLD)
        return float(both[0] / both[1])


class MostAtOnce(Plain):
    """0.125 for the most updates of a rank, whatever they are: not the same as a count of them."""

    def update(self, outputs, targets):
        super().update(outputs, targets)
        self.updates = getattr(self, "updates", 0) + 1

    def value(self):
        most = torch.tensor(float(self.updates))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return summed(self.right) / summed(self.seen) + 0 * float(most)


class WithCache(ExactDeclared):
    """What it keeps undeclared does not count: weights made at the first update, and the size of the last one."""

    def __init__(self):
        super().__init__()
        self.weights, self.last, self.late = {}, 0, None

    def count(self, number):
        super().count(number)
        self.weights.setdefault(10, torch.ones(10))
        self.late = torch.ones(3) if self.late is None else self.late
        self.last = number


class HoldsOne(nn.Module):
    """A metric of torchmetrics, and a count beside it."""

    def __init__(self):
        super().__init__()
        self.right, self.seen = torchmetrics.SumMetric(), 0

    def update(self, outputs, targets):
        self.right.update(hits(outputs, targets))
        self.seen += len(targets)

    def compute(self):
        return self.right.compute() / max(1, self.seen)

    def reset(self):
        self.right.reset()
        self.seen = 0


class MakesThem(torchmetrics.Metric):
    """A metric for each class that it has seen."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.of = nn.ModuleDict()

    def update(self, outputs, targets):
        for label in targets.unique().tolist():
            each = self.of[str(label)] if str(label) in self.of else torchmetrics.MeanMetric()
            self.of[str(label)] = each
            each.update((outputs.argmax(1) == targets)[targets == label].float())

    def compute(self):
        return {label: each.compute() for label, each in self.of.items()}


class Ragged(torchmetrics.Metric):
    """Keeps the wrong ones, one entry each: ranks and slices have different numbers of them."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("wrong", [], dist_reduce_fx=None)
        self.add_state("label", [], dist_reduce_fx=None)

    def update(self, outputs, targets):
        for output, target in zip(outputs, targets, strict=True):
            if output.argmax() != target:
                self.wrong.append(output.max())
                self.label.append(target.float())

    def compute(self):
        return torch.stack(list(self.label)).mean()


def collected():
    return torchmetrics.MetricCollection({"own": ByUpdates()})


def one_collected():
    return torchmetrics.MetricCollection([torchmetrics.Accuracy(task="multiclass", num_classes=10)])


EXACT = (
    Exact,
    ExactOnFirst,
    ExactByObject,
    ExactDeclared,
    one_collected,
    Cached,
    OverAll,
    Functional,
    MostAtOnce,
    OfViews,
    WithCache,
    WithExamples,
)
MEANS = (ByEnvironment, FromConstructor, FromHelper, Inverse)
WRONG_ON_RANKS = (
    CountForgotten,
    OfConfident,
    RecallOfLast,
    BesideTime,
    OfHalves,
    InUpdate,
    OfTwoClasses,
    OneOfTwo,
    BarrierAlone,
    OwnOnFirst,
    WithLock,
    OfMany,
    HoldsOne,
    collected,
)
WRONG = (InCounter, InArray, InList, FromNone, Late, ByUpdates, MeanOfCounts, MakesThem, Ragged)


def measured(slices):
    """What each metric gives for the same 360 samples on these ranks, or its refusal."""
    from muster.world.environment import Environment
    from muster.world.group import start
    from muster.world.group_options import GroupOptions

    world = start(GroupOptions(device="cpu"), Environment.from_env())
    dice, found = torch.Generator().manual_seed(0), {}
    outputs, targets = torch.randn(360, 10, generator=dice), torch.randint(0, 10, (360,), generator=dice)
    parts = max(slices, world.size)
    for each in (*EXACT, *MEANS, InPlace, *WRONG_ON_RANKS, *WRONG):
        try:
            measures = Measures({"m": each()}, sliced=bool(slices), anew={"m": each})
            for part in range(parts):
                if part * world.size // parts == world.rank:
                    mine = slice(part * 360 // parts, (part + 1) * 360 // parts)
                    for half in (slice(0, 30), slice(30, None)):
                        measures.update(outputs[mine][half], targets[mine][half].clone(), slice=part)
            found[each.__name__] = measures.compute(world)
        except ConfigError as error:
            found[each.__name__] = str(error)
        world.barrier()
    world.close()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("ranks, slices", [(1, 0), (2, 0), (3, 0), (1, 4), (2, 4)])
def test_the_value_is_that_of_one_rank_or_refused(ranks, slices):
    (found, *_) = on_ranks(measured, ranks, slices)
    for each in MEANS:  # of ranks: right where all have as many samples
        assert [*found[each.__name__].values()] == [pytest.approx(0.125)], (each.__name__, found[each.__name__])
    for each in (*EXACT, InPlace):
        assert [*found[each.__name__].values()] == [pytest.approx(0.125)], (each.__name__, found[each.__name__])
    for each in WRONG_ON_RANKS:
        is_refused = isinstance(found[each.__name__], str)
        assert is_refused == (ranks > 1), (each.__name__, found[each.__name__])
    for each in WRONG if ranks > 1 or slices else ():
        assert isinstance(found[each.__name__], str), (each.__name__, found[each.__name__])
    if ranks == 3:
        assert (
            "m 0.5 for samples on 3 ranks and 0.16" in found["CountForgotten"]
            and "add its state up" in found["CountForgotten"]
        )
        assert "m seen 30 for samples on 3 ranks and 90 for the same on one" in found["OneOfTwo"]
        assert "makes metrics while it is updated" in found["MakesThem"] and "without add_state" in found["InCounter"]


@pytest.mark.unit
def test_nobody_takes_part_in_a_trial_and_the_group_is_as_before():
    assert not dist.is_initialized()
    if not hasattr(FakeProcessGroup.Options(), "simulate_uniform_ranks"):  # before torch 2.15
        with pytest.raises(Untried), uniform_ranks(3):
            pass
        return
    with uniform_ranks(3):
        total = torch.ones(2)
        dist.all_reduce(total)
        assert (dist.get_world_size(), dist.get_rank(), total.tolist()) == (3, 0, [3.0, 3.0])
        with pytest.raises(Untried):
            dist.recv(total, 1)
    assert not dist.is_initialized()


def test_a_trial_judges_neither_time_nor_chance_and_changes_nothing(tmp_path, monkeypatch, capfd):
    class Rate(Exact):
        def value(self):
            print("said in a trial")
            return time.perf_counter()

    class Drawn(Exact):
        def value(self):
            return float(torch.rand(1))

    class Opens(Exact):
        def value(self):
            (tmp_path / "written").write_text("once")
            return 1.0

    class Saves(Exact):  # in C++
        def value(self):
            torch.save([*torch.load(tmp_path / "history.pt"), 1.0], tmp_path / "history.pt")
            return 1.0

    class Sends(Exact):
        def value(self):
            ours.send(b"sent")
            return 1.0

    ours, theirs = socket.socketpair()
    torch.save([0.0], tmp_path / "history.pt")

    class Slow(Exact):
        def value(self):
            time.sleep(60)

    samples, before = (torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64)), torch.get_rng_state()
    assert [tried(each, samples) for each in (Rate(), Exact(), Drawn())] == [Trial(), Trial(), Trial(unknown=("",))]
    assert torch.equal(torch.get_rng_state(), before)
    assert [tried(each, samples) for each in (Opens(), Saves(), Sends())] == [None] * 3, "it is refused all of that"
    assert [each.name for each in tmp_path.iterdir()] == ["history.pt"] and torch.load(tmp_path / "history.pt") == [0.0]
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    with monkeypatch.context() as short:
        short.setattr(trial, "TRIAL_S", 1.0)
        assert tried(Slow(), samples) is None
    found = tried(CountForgotten(), (torch.eye(10)[:4], torch.tensor([0, 1, 9, 9])))
    assert found and found.said == "1.5 for samples on 3 ranks and 0.5 for the same on one"
    assert not capfd.readouterr().out


def test_a_trial_moves_no_file_on_and_takes_nothing_from_a_pipe(tmp_path):
    """Processes that share an open file share their place in it."""
    (tmp_path / "words").write_text("header\n" + "\n".join(map(str, range(20000))))
    reads, writes = os.pipe()
    os.write(writes, b"said")
    words = (tmp_path / "words").open()
    assert words.readline() == "header\n"

    class Reads(Exact):
        words = None

        def update(self, outputs, targets):
            Reads.words = Reads.words or {*words.read().split()}
            self.right += sum(str(int(each) + 3000) in Reads.words for each in targets)
            self.seen += len(targets)

        def value(self):
            os.read(reads, 1)
            return super().value()

    metric = Reads()
    samples = torch.eye(10)[:4], torch.tensor([0, 1, 9, 9])
    assert tried(metric, samples) == Trial()
    metric.update(*samples)
    assert metric.compute() == 1.0 and os.read(reads, 9) == b"aid"


def test_a_trial_takes_samples_of_any_form_with_any_number_of_files_open():
    class OfWords(CountForgotten):
        def update(self, outputs, targets):
            assert len(outputs["weights"]) == 200 and len(outputs["words"]) == len(targets) <= trial.TRIED
            self.right += sum(each == other for each, other in zip(outputs["words"], targets, strict=True))
            self.seen += len(targets)

    class ByTime(CountForgotten):
        def update(self, outputs, targets):  # [time, samples, classes] and [samples, time]
            super().update(outputs.transpose(0, 1).flatten(0, 1), targets.flatten())

    class Nearly(Exact):  # as sums of half precision in another order
        def value(self):
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            return super().value() * (1 + 0.004 * ranks)

    words = [str(number) for number in range(100)]
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        found = tried(OfWords(), ({"words": words, "weights": torch.ones(200)}, words))
    finally:
        for each in opened:
            os.close(each)
    assert found and found.said == "3 for samples on 3 ranks and 1 for the same on one"
    found = tried(ByTime(), (torch.zeros(100, 8, 4), torch.zeros(8, 100, dtype=torch.int64)))
    assert found and found.said == "3 for samples on 3 ranks and 1 for the same on one"
    assert tried(Nearly(), (torch.eye(10)[:4], torch.tensor([0, 1, 9, 9]))) == Trial(unknown=("",))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["Right", "Wrong", "Never"])
def test_a_metric_is_tried_in_a_run_that_has_imported_nothing_for_it(tmp_path, kind):
    line = (f"+metrics.m._target_=kit.parts.plain_metric.{kind}", "max_steps=2")
    result = run(tmp_path / "run", *line, ranks=2, cold=True, ok=kind != "Wrong")
    assert "could not be tried" not in result.out
    assert (
        "m is 0, NaN, another one each time, or only nearly that of one rank: whether Never adds" in result.out
    ) == (kind == "Never")
    if kind == "Wrong":
        assert result.outcome["exit_code"] == 2 and "for samples on 3 ranks and" in result.outcome["error"], result.out


@pytest.mark.unit
def test_two_metrics_that_give_one_name_are_refused():
    class Named(Exact):
        def value(self):
            return {"b": 1.0}

    measures = Measures({"a": Named(), "a_b": Exact()})
    measures.update(torch.eye(10)[:4], torch.tensor([0, 1, 9, 9]), slice=0)
    with pytest.raises(ConfigError, match=r"metrics\.a_b and metrics\.a both give a_b"):
        measures.compute(SimpleNamespace(size=1))


def test_a_metric_s_verdict_is_that_of_the_trial_before_training_and_after(capfd):
    """Slices of one rank: `aside`, for the sanity batches, works on copies."""
    measures = Measures({"m": WithCache()}, sliced=True)
    samples = torch.eye(10)[:4], torch.tensor([0, 1, 9, 9])
    with measures.aside():
        measures.update(*samples, slice=0)
        measures.compute(SimpleNamespace(size=1))
    measures.update(*samples, slice=0)
    assert measures.compute(SimpleNamespace(size=1)) == {"m": 0.5}
    assert "could not be tried" not in capfd.readouterr().err


def test_a_metric_that_cannot_be_tried_is_said(capfd):
    class Fails(ExactDeclared):
        def compute(self):
            if self.update_count < 3:
                raise ValueError("too few")
            return super().compute()

    measures = Measures({"m": Fails()}, sliced=True)
    measures.update(torch.eye(10)[:4], torch.tensor([0, 1, 9, 9]), slice=0)
    assert "metrics.m could not be tried: whether Fails adds everything up" in capfd.readouterr().err
