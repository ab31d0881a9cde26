"""Which rank is which part of what, from the world size alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import ConfigError
from muster.world.layout import Layout

pytestmark = pytest.mark.unit


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_slices_cover_the_batch_and_one_rank_speaks_for_each(replicate, shard, tensor):
    layout = Layout.of(
        replicate * shard * tensor, samples_over=("replicate", "shard"), replicate=-1, shard=shard, tensor=tensor
    )
    assert layout.world_size == replicate * shard * tensor and layout.sizes["replicate"] == replicate
    ranks = range(layout.world_size)
    speakers = [rank for rank in ranks if layout.speaks(rank)]
    assert [layout.shard(rank) for rank in speakers] == [(n, replicate * shard) for n in range(replicate * shard)]
    assert len({tuple(layout.coordinates(rank).values()) for rank in ranks}) == layout.world_size


def test_the_last_dimension_is_the_nearest():
    layout = Layout.of(8, data=-1, tensor=2)
    assert [layout.coordinates(rank) for rank in (0, 1, 2)] == [
        {"data": 0, "tensor": 0},
        {"data": 0, "tensor": 1},
        {"data": 1, "tensor": 0},
    ]


def test_a_size_that_does_not_divide_is_told_those_that_do():
    with pytest.raises(ConfigError, match=r"strategy.tensor=3 must divide world size 8: use 1, 2, 4 or 8"):
        Layout.of(8, data=-1, tensor=3)
    with pytest.raises(
        ConfigError, match=r"strategy.stage=2 x strategy.tensor=8 must divide world size 8: their product"
    ):
        Layout.of(8, data=-1, stage=2, tensor=8)
    with pytest.raises(ConfigError, match="must divide world size 8"):
        Layout.of(8, stage=4)
