"""A model that is to be sharded is built by rank 0 alone, and starts as it does under every other strategy."""

from pathlib import Path

import pytest
import torch
from kit.job import run
from kit.parts import built
from kit.ranks import on_ranks

from bench.steps import Steps
from muster.train.strategies.partition.deferred_init import FirstBuilds

KINDS = dict.fromkeys(["Busy", "Drawing", "Hiding", "Sized", "Caching"], False) | dict.fromkeys(
    ["Reading", "Holding", "Trying", "Scaling", "Recurrent", "Counting"], True
)
"""Models of kit.parts.built, and whether every rank needs all of its weights to build it."""
WIDE = (
    "data=synthetic",
    "data.image_shape=[1,32,32]",
    "data.num_samples=64",
    "model=mlp",
    f"model.hidden={[3000] * 7}",
)
"""Layers of more than 32 MB, whose memory the C library gives back at once (M_MMAP_THRESHOLD in mallopt(3))."""
MORE = ("strategy.prefetch=2", "strategy.reshard_after_forward=true")


def peak_of(build):
    """Return by how many bytes this process grew at most during `build()`. Linux only."""

    def status(field):
        text = Path("/proc/self/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kept = build()
    return status("VmHWM") - before, kept


def on_rank():
    """What each rank finds: of each model whether it was whole before it was filled, whether it is rank 0's afterwards, and
    losses of ddp, fsdp and hybrid; the peak of memory while a wide model was built, and its size."""
    found = {}
    for name in KINDS:
        line = ("data=digits", f"model._target_=kit.parts.built.{name}", "batch_size=20")
        losses = {}
        for strategy in (("ddp",), ("fsdp",), ("fsdp", *MORE), ("hybrid",)):
            losses[strategy] = Steps(f"strategy={strategy[0]}", *strategy[1:], *line, steps=3).losses()
        losses["alike"] = len({*map(str, Steps.met.gather(str(losses)))}) == 1
        torch.manual_seed(7)
        own = getattr(built, name)().state_dict()
        torch.manual_seed(7)
        drawn = torch.get_rng_state()
        first = FirstBuilds(getattr(built, name), Steps.met)
        is_hollow = any(parameter.is_meta for parameter in first.model.parameters())
        assert first.model.after.weight is first.model.before.weight and torch.equal(torch.get_rng_state(), drawn)
        first.fill(first.model)
        here = first.model.state_dict()
        found[name] = is_hollow, all(torch.equal(here[key], own[key]) for key in own), losses
    Steps("strategy=fsdp", *WIDE[:-1], "model.hidden=[16]", steps=1).losses()  # what is imported, and the data
    peak, steps = peak_of(lambda: Steps("strategy=fsdp", *WIDE, steps=1))
    return found, peak, sum(each.numel() * 4 for each in steps.strategy.parameters().values())


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(on_rank, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_ranks_have_the_weights_of_rank_0(ranks, name):
    assert [found[name][0] for found, *_ in ranks] == [False, not KINDS[name]]
    assert all(found[name][1] for found, *_ in ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_losses_are_those_of_ddp(ranks, name):
    losses = ranks[0][0][name][2]
    assert losses.pop("alike")
    if name in ("Counting", "Caching"):  # each strategy builds it anew
        return
    expected = torch.tensor(losses[("ddp",)])
    for strategy, found in losses.items():
        assert torch.allclose(torch.tensor(found), expected, rtol=1e-5, atol=0), strategy
    assert losses[("fsdp",)] == losses[("fsdp", *MORE)]


@pytest.mark.nightly
def test_no_other_rank_holds_the_whole_model(ranks):
    [(_, first, whole), (_, second, _)] = ranks
    assert whole > 100e6
    assert first > whole  # rank 0 has all of it, and its shards
    assert second < 0.8 * whole, second / whole


def test_a_hook_on_a_gradient_is_refused_where_parameters_are_replaced(tmp_path):
    """`fully_shard` makes new parameters, which have no hooks: until it was refused, the run went on without them."""
    done = run(
        tmp_path / "run", "strategy=fsdp", "model._target_=kit.parts.built.Hooked", "max_steps=2", ranks=2, ok=False
    )
    assert done.outcome["exit_code"] == 2 and "first.weight has a hook on its gradient" in done.out, done.out
