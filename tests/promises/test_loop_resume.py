"""A loop of a user's own resumes to the same bits: what it trains, in the middle of which epoch, from whichever loader."""

import json
import shutil
import sys

import pytest
from kit import warm
from kit.job import ROOT, by_hand, environment, finish

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


def amid(folder, **env):
    """Return a run of kit/loops/amid.py."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests/kit/loops/amid.py", folder)
    return finish(warm.Popen([sys.executable, "-m", "amid", "run"], env=environment(**env), cwd=folder), folder / "run")


@pytest.mark.nightly(but=["env0-10", "env1-11", "env5-10", "env6-10", "env7-6", "env9-10", "env10-11"])
@pytest.mark.parametrize(
    ("env", "resumed_at"),
    [
        ({"FORM": "best"}, 10),
        ({"NORM": "1"}, 11),
        ({"EVERY": "3"}, 11),
        ({"FORM": "stop"}, 10),
        ({"TEACHER": "1"}, 11),
        ({"TEACHER": "1", "FORM": "own"}, 10),
        ({"FORM": "best", "WITH": "1"}, 10),
        ({"FORM": "stop", "NORM": "1"}, 6),
        ({"FORM": "late"}, 6),
        ({"FORM": "stop", "TAIL": "1"}, 10),
        ({"FORM": "bare"}, 11),
    ],
)
def test_a_save_amid_a_step_has_nothing_of_the_next_one(tmp_path, env, resumed_at):
    """Gradients of its backward pass, its batch-norm statistics, or what it has changed or drawn before would be there twice after a resume."""
    whole = amid(tmp_path / "whole", **env)
    assert whole.code == 0, whole.out
    ended = amid(tmp_path / "ended", **env, END_AT="12")
    assert env.get("FORM") not in ("stop", "bare") or ended.code == 75, ended.out
    again = amid(tmp_path / "ended", **env)
    assert [line["step"] for line in again.events("resume")] == [resumed_at], again.out
    assert again.sha256 == whole.sha256 and not notes(again)


@pytest.mark.parametrize(
    ("env", "changed"),
    [
        ({"FORM": "best", "NORM": "1"}, "model/0.num_batches_tracked"),
        ({"FORM": "best", "TEACHER": "1"}, "teacher/1.weight"),
        ({"FORM": "exit", "EVERY": "3", "END_AT": "12"}, "the gradient of model/1.weight"),
    ],
)
def test_a_save_that_cannot_wait_for_the_end_of_the_step_says_what_it_has_of_it(tmp_path, env, changed):
    done = amid(tmp_path / "amid", **env)
    [told] = notes(done)
    assert f"was saved within the next step, which has changed {changed} already" in told
    steps = {json.loads(path.read_text())["step"] for path in done.folder.glob("checkpoints/*/manifest.json")}
    if env["FORM"] == "best":
        steps = {*steps} & {json.loads((done.folder / "best.json").read_text())["step"]}
    assert steps, "the best checkpoint, or the one that was asked for, is there"


@pytest.mark.parametrize(("env", "left"), [({}, (9, 10)), ({"FROM": "8", "TAIL": "1"}, (10, 11))])
def test_gradients_that_add_up_are_kept_by_a_save_in_the_first_body_that_adds_to_them(tmp_path, env, left):
    env |= {"EVERY": "3"}
    whole = amid(tmp_path / "whole", **env)
    assert [amid(tmp_path / "left", LEAVE=str(step), **env).code for step in left] == [75, 75]
    again = amid(tmp_path / "left", **env)
    assert again.events("resume")[-1]["step"] == left[-1] and again.sha256 == whole.sha256, again.out


def notes(done):
    return [line["text"] for line in done.events("note")]
