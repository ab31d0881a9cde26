"""The sample plan: a pure function that every other promise rests on."""

import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.sample_plan import Permutation, Plan, Share, Weights, sample_keys

pytestmark = pytest.mark.unit


def test_permutation_is_a_bijection():
    for size in (*range(1, 70), 255, 256, 257, 1000, 65_537):
        values = Permutation(size, seed=3, epoch=1)(np.arange(size))
        assert sorted(values.tolist()) == list(range(size)), size


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_permutation_is_a_bijection_for_any_seed_and_epoch(size, seed, epoch):
    values = Permutation(size, seed, epoch)(np.arange(size))
    assert len(np.unique(values)) == size and values.min() == 0 and values.max() == size - 1


def test_epochs_and_seeds_shuffle_differently_and_no_entry_is_favoured():
    positions = np.arange(50)
    orders = {tuple(Permutation(50, seed, epoch)(positions)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    first = [int(Permutation(10, 0, epoch)(np.array([0]))[0]) for epoch in range(5000)]
    counts = np.bincount(first, minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 30  # chi-squared with 9 degrees of freedom: p about 0.0004


def test_a_trillion_samples_cost_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = Plan(10**12, batch_size=4096, seed=1)
    batches = [plan.batch(step) for step in (0, 10**6, plan.steps_per_epoch - 1, 3 * plan.steps_per_epoch)]
    assert all(((batch >= 0) & (batch < 10**12)).all() for batch in batches)
    assert len(np.unique(np.concatenate(batches))) == sum(map(len, batches))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


@given(
    size=st.integers(1, 300), batch=st.integers(1, 40), world=st.integers(1, 9), micro=st.one_of(st.none(), st.integers(1, 9)),
    drop=st.booleans(), step=st.integers(0, 200),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_the_ranks_shares_are_the_global_batch(size, batch, world, micro, drop, step):
    plan = Plan(size, min(batch, size), seed=5, drop_last=drop)
    shares = [plan.share(step, Share(rank, world, micro)) for rank in range(world)]
    counted = [index for share in shares for part in share for index in part.indices[: part.count].tolist()]
    assert counted == plan.batch(step).tolist()
    assert len({len(share) for share in shares}) == 1, "every rank must run as many forward passes"
    assert all(len(part.indices) >= 1 for share in shares for part in share)
    if micro:
        assert all(len(part.indices) <= micro for share in shares for part in share)


@given(size=st.integers(1, 200), batch=st.integers(1, 50), drop=st.booleans())
@settings(max_examples=100, deadline=None)
def test_an_epoch_takes_every_sample_once(size, batch, drop):
    plan = Plan(size, min(batch, size), seed=2, drop_last=drop)
    taken = [i for step in range(plan.steps_per_epoch) for i in plan.batch(step).tolist()]
    assert len(set(taken)) == len(taken) == plan.samples_before(plan.steps_per_epoch)
    assert drop or len(taken) == size
    assert plan.samples_before(plan.steps_per_epoch + 1) == len(taken) + plan.count(0)


def test_weights_draw_each_sample_as_often_as_it_weighs():
    weights = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
    plan = Plan(6, batch_size=4, seed=1, weights=Weights(weights))
    drawn = np.concatenate([plan.batch(step) for step in range(2 * 5000)])
    counts, expected = np.bincount(drawn, minlength=6), weights / weights.sum() * len(drawn)
    assert len(drawn) == 6 * 5000 and not counts[[0, 3, 5]].any()
    assert (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum() < 14  # p about 0.001
    shares = [part.indices[: part.count] for rank in range(3) for part in plan.share(3, Share(rank, 3))]
    assert np.concatenate(shares).tolist() == plan.batch(3).tolist()
    assert plan.batch(0).tolist() != Plan(6, batch_size=4, seed=2, weights=Weights(weights)).batch(0).tolist()


def test_sample_keys_depend_on_sample_epoch_and_seed_alone():
    one = sample_keys(seed=1, epoch=2, indices=np.array([5, 6, 7]))
    assert one[1] == sample_keys(seed=1, epoch=2, indices=np.array([6]))[0]
    others = [sample_keys(seed=s, epoch=e, indices=np.array([6]))[0] for s, e in ((1, 3), (2, 2), (2, 1))]
    assert len({int(one[1]), *map(int, others)}) == 4


def test_a_rank_computes_its_own_slice_only(monkeypatch):
    """The whole global batch on every rank would be 15 ms a step at 1,024 ranks."""
    from muster import sample_plan as room

    computed, permute = [], Permutation.__call__
    monkeypatch.setattr(room.Permutation, "__call__", lambda self, at: computed.append(len(at)) or permute(self, at))
    Plan(10**6, batch_size=4096).share(3, Share(5, 1024))
    Plan(10**6, batch_size=7).share(3, Share(9, 10))
    assert computed == [4, 0, 1]


@pytest.mark.parametrize("size, permutations", [(9, 20_000), (25, 8_000), (64, 4_000), (1437, 400), (70_001, 40)])
def test_neighbours_do_not_stay_together(size, permutations):
    """Adjacent pairs over many orders against a uniform shuffle's mean of 2 (n - 1) / n and variance of about 2 an order.

    At five standard deviations a sound shuffle fails one run of this in a million; the seeds are fixed, so it does not.
    """
    positions = np.arange(size)
    adjacent = sum(
        int((np.abs(np.diff(Permutation(size, 7, epoch)(positions))) == 1).sum()) for epoch in range(permutations)
    )
    mean = permutations * 2 * (size - 1) / size
    assert abs(adjacent - mean) < 5 * (2 * permutations) ** 0.5, (adjacent, mean)


def test_small_data_reaches_every_order():
    """A sort by hash does; the Feistel network reached half of all orders of 9, 25 and 49 entries."""
    orders = {tuple(Permutation(4, seed, 0)(np.arange(4)).tolist()) for seed in range(400)}
    assert len(orders) == 24
    parities = [
        sum(1 for a in range(9) for b in range(a) if order[b] > order[a]) % 2
        for order in (Permutation(9, seed, 0)(np.arange(9)) for seed in range(2000))
    ]
    assert 850 < sum(parities) < 1150  # half of all orders are even: 6.7 standard deviations
