"""The loss of a step is the mean over all that its global batch has: whatever the ranks, micro-batches and strategies."""

import copy
from functools import partial

import pytest
import torch
from kit.job import evaluated, run
from kit.parts.padded import IGNORED, Padded, Tagger
from kit.ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from muster.errors import ConfigError

PARTS = "kit.parts.padded"
BASE = (
    "batch_size=8", "optimizer=sgd", "optimizer.lr=0.5", "optimizer.momentum=0", "scheduler=constant", "device=cpu", "dist.timeout_s=20",
)  # fmt: skip
KINDS = {
    "padding": ("Padded", "Tagger", "torch.nn.functional.cross_entropy"),
    "class weights": ("Points", "Classifier", f"{PARTS}.Weighted"),
    "masked": ("Bits", "OneBit", f"{PARTS}.masked"),
    "hugging face": ("Named", "gpt2", "muster.train.objectives.model_loss.ModelLoss"),
    "the kit's": ("Padded", "Tagger", "muster.train.objectives.language_modeling.LanguageModeling"),
}
MORE = {
    "hugging face": (f"loader.batch={PARTS}.batch_of_named",),
    "the kit's": ("+model.transposed=false",),
}
EMPTY = {"padding": ("+data.empty=true",), "masked": ("+data.empty=true",)}
STRATEGIES = {
    "ddp": (), "zero": ("strategy=zero",), "fsdp": ("strategy=fsdp",), "slices": ("virtual_world_size=4",),
}  # fmt: skip
MICRO = (None, 1, 3)


def line(kind, objective=""):
    data, model, own = KINDS[kind]
    objective = objective or own
    parts = (f"data._target_={PARTS}.{data}", f"model._target_={PARTS}.{model}", f"objective._target_={objective}")
    return (*BASE, *parts, *MORE.get(kind, ()))


def by_hand(trained, first, steps):
    """The weights after plain PyTorch's steps with the full batch."""
    config, objective = trained.config, trained.strategy.optimizer_step.recipe.objective
    from muster.train.config.parts import build
    from muster.train.models.model_json import filled_in

    model = build(config.model, **filled_in(config.model, trained.data))
    model.load_state_dict({name: torch.as_tensor(value) for name, value in first.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        samples = [trained.data.train[int(index)] for index in trained.plan.batch(step)]
        batch = torch.utils.data.default_collate(samples)
        optimizer.zero_grad()
        loss = model(**batch).loss if isinstance(batch, dict) else objective(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    return model.state_dict()


def whole(weights):
    values = {name: value() if callable(value) else value for name, value in weights.items()}
    values = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in values.items()}
    return {name: value.detach().clone() for name, value in values.items()}


def far(kinds, strategies, micro, steps):
    """(kind, strategy, micro-batch) -> the largest distance of a weight from those of plain PyTorch."""
    from kit.stepping import Trained, world

    here, found = world(), {}
    for kind in kinds:
        for name in strategies:
            for size in micro:
                more = (*STRATEGIES[name], *([f"micro_batch_size={size}"] if size else []))
                trained = Trained(here, *line(kind), *EMPTY.get(kind, ()), *more)
                first = copy.deepcopy(whole(trained.strategy.weights()))
                expected = by_hand(trained, first, steps)
                trained.steps(range(steps))
                ends = whole(trained.strategy.weights())
                found[kind, name, size] = max(float((ends[each] - expected[each]).abs().max()) for each in ends)
                trained.strategy.close()
    here.barrier()
    return found


@pytest.mark.nightly(but=["2 in threes"])
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "ranks, micro, strategies",
    [(1, MICRO, ["ddp", "slices"]), (2, MICRO, [*STRATEGIES]), (3, MICRO, [*STRATEGIES]), (2, (3,), ["ddp", "fsdp"])],
    ids=["1", "2", "3", "2 in threes"],
)
def test_the_weights_are_those_of_the_full_batch_in_one_process(ranks, micro, strategies):
    found = on_ranks(far, ranks, list(KINDS), strategies, micro, 20)[0]
    assert len(found) == len(KINDS) * len(micro) * len(strategies)
    assert not {case: distance for case, distance in found.items() if not distance < 1e-6}


TENSOR = ("strategy=tensor_parallel", "strategy.plan={mid: colwise, head: rowwise}")
OTHERS = {
    "hybrid": (2, "Tagger", ("strategy=hybrid", "strategy.shard=2")),
    "pipeline": (2, "Chain", ("strategy=pipeline",)),
    "tensor_parallel": (2, "Chain", TENSOR),
    "tensor_parallel, twice": (4, "Chain", (*TENSOR, "strategy.tensor=2")),
    "model_parallel": (1, "Chain", ("strategy=model_parallel", "strategy.split=[head]")),
    "data_parallel": (1, "Tagger", ("strategy=data_parallel",)),
    "local_sgd, before its first local step": (2, "Tagger", ("strategy=local_sgd", "strategy.warm_up_steps=100")),
    "parameter_server": (3, "Tagger", ("strategy=parameter_server",)),
    "ddp_rpc": (3, "Chain", ("strategy=ddp_rpc", "strategy.remote=stem")),
}


def far_by(model, more, micro, steps):
    from kit.stepping import Trained, world

    here = world()
    own = [
        each if not each.startswith("model._target_") else f"model._target_={PARTS}.{model}" for each in line("padding")
    ]
    trained = Trained(here, *own, *more, *([f"micro_batch_size={micro}"] if micro else []))
    first = copy.deepcopy(whole(trained.strategy.weights()))
    expected = by_hand(trained, first, steps) if here.is_first else {}
    trained.steps(range(steps))
    getattr(trained.strategy, "sync_parameters", lambda: None)()
    ends = whole(trained.strategy.weights())
    here.barrier()
    trained.strategy.close()
    return max((float((ends[each] - expected[each]).abs().max()) for each in expected), default=0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_by_every_other_strategy_too(name, micro):
    ranks, model, more = OTHERS[name]
    assert on_ranks(far_by, ranks, model, more, micro, 20)[0] < 1e-6


def reference(weights, transposed=True):
    """The mean loss over all labels of the test split, and the fraction of labels that are right."""
    model = Tagger(5)
    model.load_state_dict(weights)
    ids, labels = torch.utils.data.default_collate([Padded()[index] for index in range(24)])
    with torch.no_grad():
        logits = model(ids)
    right = (logits.argmax(1) == labels).sum() / (labels != IGNORED).sum()
    return float(F.cross_entropy(logits, labels)), float(right)


@pytest.mark.parametrize("kind", ["padding", "the kit's"])
def test_log_lines_and_evaluations_divide_by_the_labels(tmp_path, kind):
    more = ("max_steps=3", "micro_batch_size=2", "eval.every_steps=3", "seed=3")
    more += ("dist.shared_memory=false",) if kind == "padding" else ()
    one = run(tmp_path / "one", *line(kind), "max_steps=3", "eval.every_steps=3", "seed=3", ranks=None)
    two = run(tmp_path / "two", *line(kind), *more, ranks=2)
    assert list(one.losses.values()) == pytest.approx(list(two.losses.values()), abs=1e-6)
    for each in two.lines("train"):  # of the 12 tokens of a sample 6.5 have a label on average
        assert each["tokens_per_s"] < 12 * each["samples_per_s"] * 0.9
    loss, right = reference(two.weights)
    last = two.lines("eval")[-1]
    assert last["loss"] == pytest.approx(loss, abs=1e-6)
    assert kind == "padding" or last["accuracy"] == pytest.approx(right, abs=1e-6)
    for ranks, size in ((1, 8), (2, 8), (2, 3)):
        again = evaluated(two.folder, f"micro_batch_size={size}", ranks=ranks)
        assert again["loss"] == pytest.approx(loss, abs=1e-6)


def test_slices_give_one_hash_at_every_world_size(tmp_path):
    how = (*line("padding"), "virtual_world_size=4", "micro_batch_size=1", "max_steps=6")
    assert len({run(tmp_path / str(ranks), *how, ranks=ranks).sha256 for ranks in (1, 2, 3)}) == 1


def each_label(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none").sum(1)
    return {"loss": (losses, (batch[1] != IGNORED).sum(1))}


def trained_by_job(folder, micro):
    import muster

    torch.manual_seed(0)
    with muster.Job(folder, tensorboard=False, log_every=1, save_every=100) as job:
        model = nn.parallel.DistributedDataParallel(Tagger(5))
        first = copy.deepcopy(model.module.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        job.track(model=model, optimizer=optimizer)
        how = {"batch_size": 8, "micro_batch_size": micro, "epochs": 3, "shuffle": False}
        for ids, labels in job.batches(Padded(), count=lambda batch: (batch[1] != IGNORED).sum(), **how):
            loss = F.cross_entropy(model(ids), labels)
            (loss * job.weight).backward()
            if job.ends_step:
                optimizer.step()
                optimizer.zero_grad()
            job.step(loss=loss)
        ends = model.module.state_dict()
        found = job.evaluate(Padded(), partial(each_label, model.module), batch_size=7)
        with pytest.raises(ConfigError, match=r"evaluate\(loader\.dataset"):
            job.evaluate(torch.utils.data.DataLoader(Padded()), each_label)
        with pytest.raises(ConfigError, match="return loss as a pair"):
            job.evaluate(Padded(), lambda batch: {"loss/of": batch[0]}, batch_size=7)
    assert found["loss"] == pytest.approx(reference(ends)[0], abs=1e-6)
    expected = Tagger(5)
    expected.load_state_dict(first)
    optimizer, losses = torch.optim.SGD(expected.parameters(), lr=0.5), []
    for step in range(9):
        ids, labels = torch.utils.data.default_collate([Padded()[step % 3 * 8 + each] for each in range(8)])
        optimizer.zero_grad()
        loss = F.cross_entropy(expected(ids), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, max(float((ends[name] - value).abs().max()) for name, value in expected.state_dict().items())


@pytest.mark.parametrize("ranks, micro", [(1, 3), (2, None), (3, 1)])
def test_in_a_loop_of_ones_own_too(tmp_path, ranks, micro):
    import json

    losses, distance = on_ranks(trained_by_job, ranks, str(tmp_path / "run"), micro)[0]
    assert distance < 1e-6
    lines = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [each["loss"] for each in lines if each["kind"] == "train"] == pytest.approx(losses, abs=1e-6)


def test_a_loss_of_the_whole_batch_is_not_divided(tmp_path):
    whole = (*line("padding", f"{PARTS}.Whole"), "max_steps=2")
    assert run(tmp_path / "one", *whole).outcome["outcome"] == "done"
    for ranks, more in ((2, ()), (None, ("micro_batch_size=4",)), (None, ("virtual_world_size=2",))):
        refused = run(tmp_path / "refused", *whole, *more, ranks=ranks, ok=False)
        assert refused.outcome["exit_code"] == 2 and "whole_batch = True" in refused.said[0], refused.out


def test_what_is_assumed_of_a_loss_that_does_not_say_what_it_counts_is_said(tmp_path):
    for kind, name in (("padding", "Squares"), ("padding", "Derived"), ("the kit's", "OfTheKit")):
        unknown = run(tmp_path / name, *line(kind, f"{PARTS}.{name}"), "max_steps=2")
        assert f"{name} is taken for a mean over samples" in unknown.events("note")[0]["text"], unknown.out
    assert not run(tmp_path / "known", *line("masked"), "max_steps=2").events("note")


@pytest.mark.parametrize(
    "more, said",
    [
        ((f"objective._target_={PARTS}.Negative",), "Negative.count (padded.py:"),
        (("objective._target_=torch.nn.CrossEntropyLoss", "+objective.reduction=sum"), "has reduction=sum"),
    ],
)
def test_what_is_no_count_and_no_mean_is_refused(tmp_path, more, said):
    refused = run(tmp_path / "run", *line("padding"), *more, "max_steps=2", ok=False)
    assert refused.outcome["exit_code"] == 2 and said in refused.said[0], refused.out


def test_updates_of_single_ranks_are_refused_where_samples_differ_in_what_counts(tmp_path):
    server = ("strategy=parameter_server", "strategy.gradients_per_update=1")
    refused = run(tmp_path / "run", *line("padding"), *server, "max_steps=4", ranks=3, ok=False)
    assert refused.outcome["exit_code"] == 2 and "have no global batch" in refused.outcome["error"], refused.out
