"""A loop of a user's own resumes to the same bits: what it trains, in the middle of which epoch, from whichever loader."""

import json
import shutil
import sys

import pytest
from kit import warm
from kit.job import ROOT, by_hand, environment

sys.path.append(str(ROOT / "tests/kit/loops"))
from exact import LOOPS

DAILY = [
    "batch_norm",
    "buffers_that_are_not_saved",
    "a_stream_with_a_shuffle_buffer",
    "a_sampler_that_shuffles_on",
    "closures",
    "a_metric",
    "two_losses",
    "late_steps_of_replaced_gradients",
    "late_steps_after_the_count",
    "late_steps_in_pieces",
    "gradients_that_are_zeroed_now_and_then",
    "gradients_of_a_layer_that_is_frozen",
    "a_stream_that_shuffles",
    "set_epoch_in_a_sampler",
]
ON_THREE = ["gradients_of_no_optimizer", "gradients_of_views", "late_steps"]
"""There DistributedDataParallel multiplies by a third, and a sum has an order."""


@pytest.mark.nightly(but=["daily"])
@pytest.mark.parametrize(
    "ranks, loops",
    [(2, DAILY), (2, [each for each in LOOPS if each not in DAILY]), (3, ON_THREE)],
    ids=["daily", "others", "three ranks"],
)
def test_a_loop_resumes_to_the_same_bits(tmp_path, ranks, loops):
    """All loops from one launch: of the whole run, and of one that was resumed, the digests are the same."""
    shutil.copy(ROOT / "tests/kit/loops/exact.py", tmp_path)
    environments = [environment(**each) for each in by_hand(ranks)]
    code, out = warm.run(loops, environments, cwd=tmp_path, timeout_s=240, module="exact")
    assert code == 0, out
    found = {}
    for line in filter(lambda line: line.startswith('{"loop"'), out.splitlines()):
        said = json.loads(line)
        found.setdefault((said.pop("loop"), said.pop("rank")), {})[said.pop("resumed")] = said
    assert found.keys() == {(loop, rank) for loop in loops for rank in range(ranks)}
    assert not {place: both for place, both in found.items() if both[True] != both[False]}
