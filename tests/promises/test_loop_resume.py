"""A loop of a user's own resumes to the same bits: what it trains, in the middle of which epoch, from whichever loader."""

import json
import shutil
import sys

import pytest
from kit import warm
from kit.job import ROOT, by_hand, environment

sys.path.append(str(ROOT / "tests/kit/loops"))
from exact import LOOPS


@pytest.fixture(scope="module")
def digests(request, tmp_path_factory):
    """(loop, rank) -> digests of the whole run and of the one that was resumed, all chosen loops from one launch of two ranks."""
    loops = [
        item.callspec.params["loop"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return launched(tmp_path_factory.mktemp("exact"), loops, 2)


def launched(folder, loops, ranks):
    shutil.copy(ROOT / "tests/kit/loops/exact.py", folder)
    environments = [environment(**each) for each in by_hand(ranks)]
    code, out = warm.run(loops, environments, cwd=folder, timeout_s=240, module="exact")
    assert code == 0, out
    found = {}
    for line in filter(lambda line: line.startswith('{"loop"'), out.splitlines()):
        said = json.loads(line)
        found.setdefault((said.pop("loop"), said.pop("rank")), {})[said.pop("resumed")] = said
    return found


@pytest.mark.nightly(
    but=[
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
)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_resumes_to_the_same_bits(digests, loop):
    for rank in range(2):
        assert digests[loop, rank][True] == digests[loop, rank][False]


@pytest.mark.nightly
def test_gradients_of_several_passes_on_three_ranks(tmp_path):
    """Where DistributedDataParallel multiplies by a third, or adds what is there thrice, no bit is the same."""
    loops = ["gradients_of_no_optimizer", "gradients_of_views", "late_steps"]
    found = launched(tmp_path, loops, 3)
    assert all(found[loop, rank][True] == found[loop, rank][False] for loop in loops for rank in range(3))
