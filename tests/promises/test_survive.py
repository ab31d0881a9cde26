"""dist.survive: a rank that dies is restarted in place, no step is repeated or lost, and the weights are the same."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit.deaths import has_ended, started
from kit.faults import SUPERVISORS_DIE
from kit.job import environment, finish, hold, pace, reached, run, start, wait_for
from kit.loopback import rank_of, variable
from kit.ranks import on_ranks
from kit.until import until
from torch.distributed import DistBackendError

from muster.checkpoint.commit import Saved, Storage
from muster.data.generators import Draws
from muster.faults.heartbeat import HEARD_S, STILL_S
from muster.launcher.spec import UNSHARED
from muster.lease.open_folder import RunFolder, RunOptions, _newest
from muster.outcome import Outcome
from muster.recovery import survival
from muster.recovery.emergency_checkpoint import save_emergency
from muster.recovery.journal import SLOT_BYTES, StepJournal
from muster.recovery.supervisor import Incarnation
from muster.report.history import History
from muster.report.page import write_report
from muster.world.exposed_communication import Waiting
from muster.world.group import alone

LINE = (
    "model._target_=kit.parts.dying.Net",
    "optimizer._target_=kit.parts.dying.Sgd",
    "+callbacks.kill._target_=kit.parts.dying.Kill",
    "dist.survive=true",
    "max_steps=50",
    "log.every_steps=7",
    "checkpoint.every_steps=20",
)
KINDS = {
    "memory": (2, ()),
    "gloo": (4, ("dist.shared_memory=false",)),  # an error reaches the rank opposite only when connections close
    "slices": (3, ("virtual_world_size=4",)),
    "many": (5, ("callbacks=ema", "micro_batch_size=5")),
    "lines": (2, ("log.every_steps=1", "checkpoint.every_steps=2")),
}
ENV = {
    "many": {"OMP_NUM_THREADS": "2"},  # then NumPy's library has threads in the supervisor, too
    "lines": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # as under `muster launch node`: the store is not the agent's
}
RESTARTS = ("--max-restarts=3",)
FOR_GOOD = {"FAULTS": SUPERVISORS_DIE}


def trained(folder, kind, *more, kill=""):
    ranks, overrides = KINDS[kind]
    marks = folder.parent / f"{folder.name}-marks"
    marks.mkdir()
    env = {"FAULTS": kill, "FAULTS_MADE": str(marks), **ENV.get(kind, {})}
    done = run(folder, *LINE, *overrides, *more, ranks=ranks, torchrun=RESTARTS, env=env)
    assert done.code == 0, done.out
    assert len([*marks.iterdir()]) == len([*filter(None, kill.split(","))]), done.out
    return done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same run without a death, by kind; made once."""
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = trained(tmp_path_factory.mktemp("undisturbed") / kind, kind)
        return made[kind]

    return of


def speeds(result):
    return [line["samples_per_s"] for line in result.lines("train")]


def assert_alike(result, other):
    assert result.sha256 == other.sha256
    assert result.numbers == other.numbers
    assert min(speeds(result)) > 0 and max(speeds(result)) < 10 * max(speeds(other)), speeds(result)
    assert len(result.events("done")) == 1 and not result.events("resume")


# Each point, and each rank of each kind, at least once.
DEATHS = [
    ("memory", "start@0:0"),
    ("memory", "forward@14:1"),
    ("memory", "backward@13:0"),
    ("memory", "before_update@13:1"),
    ("memory", "step_end@21:0"),
    ("memory", "save@20:1"),
    ("memory", "eval_end@23:1"),
    ("gloo", "after_update@13:0"),
    ("gloo", "backward@20:1"),
    ("gloo", "evaluation@23:2"),
    ("gloo", "save@20:3"),
    ("slices", "backward@13:0"),
    ("slices", "eval_begin@23:1"),
    ("slices", "after_update@13:2"),
    (
        "slices",
        "step_end@16:2",
    ),  # the others notice it between a forward and a backward pass, which has changed buffers
    ("many", "forward@13:4"),
    ("many", "save@50:3"),
    ("many", "end@50:0"),
    ("lines", "step_end@31:0"),
    ("lines", "backward@30:1"),
    ("lines", "forward@23:1"),  # what is logged in the evaluation comes into the line after it
]


@pytest.mark.nightly(
    but=[
        "memory-forward@14:1",
        "memory-backward@13:0",
        "memory-save@20:1",
    ]
)
@pytest.mark.parametrize(("kind", "kill"), DEATHS)
def test_a_death_at_any_point_leaves_no_trace_in_the_weights(tmp_path, undisturbed, kind, kill):
    result = trained(tmp_path / "run", kind, kill=kill)
    [survived] = result.events("survived")
    step, rank = kill.partition("@")[2].split(":")
    assert survived["rank"] == int(rank) and survived["cause"] == "SIGKILL" and survived["host"], survived
    assert int(step) <= survived["step"] <= int(step) + 1
    assert f"survived: rank {rank} died on {survived['host']} (SIGKILL) and is restarted in place after" in result.out
    assert_alike(result, undisturbed(kind))
    assert_accounted_for(History.of(result.folder), survived["seconds"] + survived["silent"])


def assert_accounted_for(history, seconds):
    """The report has the time of the death as such, and one attempt."""
    assert history.attempts == len(history.deaths) == 1 and not history.spent["restart"] and not history.spent["down"]
    assert history.spent["survived deaths"] == pytest.approx(seconds, abs=0.01)
    assert sum(history.spent.values()) == pytest.approx(history.seconds, abs=0.01)


@pytest.mark.nightly
def test_a_rank_whose_data_take_long_to_load_says_that_the_others_wait(tmp_path):
    result = trained(tmp_path / "run", "memory", "data._target_=kit.parts.dying.SlowAgain", kill="forward@14:1")
    told = "rank 1 has died (SIGKILL) and loads its data again: the others wait for it"
    assert result.out.count(told) == 1 and result.events("survived")[0]["seconds"] > 2.5


@pytest.mark.nightly(but=["backward@13:1,backward@13:2-2"])
@pytest.mark.parametrize(
    ("kill", "survived"),
    [
        ("backward@13:1,backward@13:2", 2),  # at once
        ("backward@13:0,backward@13:1,backward@13:3", 3),  # all but one
        ("backward@13:1,build@13:0", 2),  # while the ranks meet again: rank 0, which has the records
        ("backward@13:1,forward@14:1", 2),  # the same one, in the next step
        ("backward@13:1,backward@14:1,forward@15:0,before_update@16:3", 4),  # one after the other
    ],
)
def test_several_deaths(tmp_path, undisturbed, kill, survived):
    result = trained(tmp_path / "run", "gloo", kill=kill)
    events = result.events("survived")
    assert len(events) == survived and max(event["deaths_on_host"] for event in events) == survived
    assert_alike(result, undisturbed("gloo"))
    assert result.out.count("and is restarted in place after") == survived, result.out
    assert f"<b>{survived} on {events[0]['host']}</b>" in write_report(result.folder).read_text()


@pytest.mark.nightly(but=["backward@23:0,backward@23:1"])
@pytest.mark.parametrize("kill", ["backward@23:0,backward@23:1", "backward@23:1,before_update@23:1"])
def test_what_is_not_survived_goes_by_restart_and_checkpoint(tmp_path, undisturbed, kill):
    """No rank is left with the state; a rank dies twice at one step."""
    result = trained(tmp_path / "run", "memory", kill=kill)
    assert result.events("restart") and result.sha256 == undisturbed("memory").sha256
    assert result.out.count("rank 1 has died twice at one step, 24: all ranks restart") == ("before_update" in kill)


@pytest.mark.nightly
def test_of_a_rank_that_is_lost_for_good_in_the_first_step_nothing_is_saved(tmp_path, undisturbed):
    result = trained(tmp_path / "run", "memory", kill="forward@0:1:supervisor")
    assert result.sha256 == undisturbed("memory").sha256 and "has saved step 0" not in result.out, result.out
    assert [line["step"] for line in result.events("checkpoint")] == [20, 40, 50]


CHANGED = (
    "model._target_=kit.parts.dying.Drawn",
    "data._target_=kit.parts.dying.Subset",
    "+callbacks.changing._target_=kit.parts.dying.Changing",
)


@pytest.mark.nightly
def test_what_parts_draw_when_they_are_built_and_what_callbacks_change_is_as_without_a_death(tmp_path):
    """A data set and a model draw in their constructors; a callback changes the optimizer, and counts its calls."""
    undisturbed = trained(tmp_path / "undisturbed", "memory", *CHANGED)
    result = trained(tmp_path / "run", "memory", *CHANGED, kill="backward@13:1,forward@17:0")
    assert len(result.events("survived")) == 2
    assert_alike(result, undisturbed)
    assert (result.folder / "saves").read_text() == (undisturbed.folder / "saves").read_text()


@pytest.mark.nightly
def test_an_evaluation_of_which_some_callbacks_have_taken_notice_is_not_taken_as_done(tmp_path):
    """The survivor stands in a callback's collective, before another one counts the evaluation: it has no state to hand on."""
    more = (
        "eval.every_steps=10",
        "checkpoint.best=accuracy",
        "+callbacks.meeting._target_=kit.parts.dying.Meeting",
        "callbacks=early_stopping",
        "callbacks.early_stopping.patience=2",
        "callbacks.early_stopping.min_delta=0.2",
    )
    undisturbed = trained(tmp_path / "undisturbed", "memory", *more)
    result = trained(tmp_path / "run", "memory", *more, kill="meeting@20:1")
    assert result.events("restart") and result.sha256 == undisturbed.sha256
    assert result.numbers == undisturbed.numbers
    best = [json.loads((each.folder / "best.json").read_text()) for each in (result, undisturbed)]
    assert best[0]["step"] == best[1]["step"] and best[0]["value"] == best[1]["value"]


TAUGHT = ("model._target_=kit.parts.dying.Taught", "checkpoint.every_steps=10")
SLOWING = ("optimizer._target_=kit.parts.dying.Slowing", "optimizer.momentum=0.9")
EARLY = {  # overrides, the death, and why its state is not handed on
    "in place": (TAUGHT, "backward@13:1", "rank 0 had changed teacher since step 13"),
    "data": ((*TAUGHT, "+model.by_data=true"), "backward@13:1", "the forward pass changes teacher by .data"),
    "optimizer": (SLOWING, "within_step@33:1", "rank 0 had changed the optimizer's state since step 33"),
}


@pytest.mark.nightly(but=["in place-again"])
@pytest.mark.parametrize("supervisor", ["", ":supervisor"], ids=["again", "for good"])
@pytest.mark.parametrize("how", EARLY)
def test_what_a_step_changes_before_its_update_is_not_changed_twice(tmp_path, how, supervisor):
    """All go back to the checkpoint, and a line says why."""
    more, kill, why = EARLY[how]
    again = ",forward@11:1:later" * (how == "in place")  # in a step that is repeated: no second death at the same step
    undisturbed = trained(tmp_path / "undisturbed", "memory", *more)
    result = trained(tmp_path / "run", "memory", *more, kill=kill + (supervisor or again))
    assert result.sha256 == undisturbed.sha256, result.out
    assert result.events("restart") and not result.events("survived") and "died twice" not in result.out, result.out
    assert supervisor or why in "".join(line.get("cause", line.get("text", "")) for line in result.lines("event"))


@pytest.mark.nightly
def test_buffers_that_change_after_the_forward_pass_are_not_survived(tmp_path):
    """A rank has no notes of them: it says so, all restart, and the weights are the same."""
    more = ("model._target_=kit.parts.dying.Backwards",)
    undisturbed = trained(tmp_path / "undisturbed", "memory", *more)
    assert "outside of its forward pass" in undisturbed.events("note")[0]["text"]
    result = trained(tmp_path / "run", "memory", *more, kill="backward@23:0")
    assert result.events("restart") and result.sha256 == undisturbed.sha256


@pytest.mark.nightly(but=["stopped"])
@pytest.mark.parametrize("fault", ["stopped", "hangs"])
def test_a_rank_that_stands_still_is_restarted_in_place(tmp_path, fault):
    """Stopped by SIGSTOP, or asleep in its own code: after dist.timeout_s, with no rank restarted."""
    env = {"FAULTS_MADE": str(tmp_path)}
    hang = ("+callbacks.hang._target_=kit.parts.dying.Hang", "+callbacks.hang.at=30")
    line = (*LINE, *hang) if fault == "hangs" else (*LINE, *pace(0.05), *hold(40, until=tmp_path / "stopped"))
    line = (*line, "dist.timeout_s=5", "max_steps=100")
    process = start(tmp_path / "run", *line, ranks=2, torchrun=RESTARTS, env=env)
    if fault == "stopped":
        wait_for(tmp_path / "run", reached(28), process=process)
        os.kill(rank_of(children(process.pid)[1]), signal.SIGSTOP)
        (tmp_path / "stopped").touch()
    done = finish(process, tmp_path / "run")
    [survived] = done.events("survived")
    assert done.code == 0 and survived["rank"] == 1 and not done.events("restart"), done.out


@pytest.mark.nightly(but=["waits-2", "a thread-2"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "a thread"])
def test_a_rank_that_is_not_told_of_a_death_keeps_nobody_waiting(tmp_path, waits, ranks):
    """gloo's own fault. If the rank can go on itself, it leaves gloo's thread behind; else it is restarted in place, too."""
    line = (*LINE, "dist.shared_memory=false", "model._target_=kit.parts.dying.Untold", f"+model.waits={waits}")
    env = {"FAULTS": "message@13:0", "FAULTS_MADE": str(tmp_path)}
    undisturbed = run(tmp_path / "undisturbed", *line, ranks=ranks, torchrun=RESTARTS)
    done = run(tmp_path / "run", *line, ranks=ranks, torchrun=RESTARTS, env=env)
    assert done.code == 0 and done.sha256 == undisturbed.sha256, done.out
    if waits and ranks == 2:  # no rank is left with the state
        [back] = done.events("restart")
        assert "rank 1 on" in back["cause"] and "after another rank's death" in back["cause"], done.out
    else:
        ended = [event["rank"] for event in done.events("survived")]
        assert ended == ([0, 1] if waits else [0]) and not done.events("restart"), done.out


@pytest.mark.nightly
def test_a_rank_that_computes_for_long_while_another_dies_is_let_be(tmp_path):
    """Its main thread stands in one call of the backward pass for longer than one may that is not told of a death."""
    line = (*LINE, "dist.shared_memory=false", "model._target_=kit.parts.dying.Busy")
    undisturbed = run(tmp_path / "undisturbed", *line, ranks=2, torchrun=RESTARTS)
    env = {"FAULTS": "busy@13:0", "FAULTS_MADE": str(tmp_path)}
    done = run(tmp_path / "run", *line, ranks=2, torchrun=RESTARTS, env=env)
    [survived] = done.events("survived")
    assert survived["rank"] == 0 and survived["seconds"] > 3.5 + HEARD_S + STILL_S, "or the backward pass was too short"
    assert done.sha256 == undisturbed.sha256


@pytest.mark.nightly
def test_a_store_that_is_killed_restarts_all_ranks_and_is_no_failure_of_the_storage(tmp_path):
    """Under the kit's launchers rank 0's supervisor has it in a child; a checkpoint may be on its way."""
    line = (*LINE, *pace(0.05), *hold(30, until=tmp_path / "killed"), "max_steps=60", "checkpoint.every_steps=1")
    process = start(tmp_path / "run", *line, ranks=2, torchrun=RESTARTS, env={**UNSHARED, **FOR_GOOD}, cold=True)
    wait_for(tmp_path / "run", reached(20), process=process)
    [supervisor] = [pid for pid in children(process.pid) if variable(pid, "RANK") == "0"]
    store, _ = sorted(children(supervisor), key=started)
    os.kill(store, signal.SIGKILL)
    (tmp_path / "killed").touch()
    done = finish(process, tmp_path / "run")
    assert done.code == 0 and done.events("restart") and "storage error" not in done.out, done.out


@pytest.mark.nightly(but=["0.05"])
@pytest.mark.parametrize("delay_s", [-0.05, 0.05])
def test_a_death_while_the_ranks_are_told_to_stop_costs_no_step(tmp_path, undisturbed, delay_s):
    """SIGTERM to torchrun, as by a scheduler, just before or after a rank is killed: the ranks stop together, and save."""
    line = (*LINE, *pace(0.05), *hold(25), "checkpoint.every_steps=1000")
    process = start(tmp_path / "run", *line, ranks=2)
    wait_for(tmp_path / "run", reached(14), process=process)
    rank = rank_of(children(process.pid)[1])
    acts = [lambda: os.kill(rank, signal.SIGKILL), lambda: process.send_signal(signal.SIGTERM)]
    if delay_s < 0:  # or it may be gone before it is killed
        os.kill(rank, signal.SIGSTOP)
    for act in acts if delay_s > 0 else reversed(acts):
        act()
        time.sleep(abs(delay_s))
    stopped = finish(process, tmp_path / "run")
    assert stopped.outcome["outcome"] == "preempted" and stopped.events("survived"), stopped.out
    at = stopped.outcome["step"]
    resumed = run(tmp_path / "run", *LINE, ranks=2)
    assert resumed.events("resume")[0]["step"] == at >= 14
    assert resumed.sha256 == undisturbed("memory").sha256


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.nightly
def test_signals_and_exit_codes_are_as_without_a_supervisor(tmp_path):
    """SIGTERM to torchrun saves and ends with 75; the same command goes on. No process is left."""
    process = start(tmp_path / "run", *LINE, "max_steps=2000", "checkpoint.every_steps=1000", ranks=2, cold=True)
    wait_for(tmp_path / "run", reached(14), process=process)
    processes = [pid for supervisor in children(process.pid) for pid in (supervisor, *children(supervisor))]
    assert len(processes) == 4
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes]
    assert sorted(name for name in names if "rank" in name) == ["muster-rank0", "muster-rank1"], (
        "as ps and pkill show them"
    )
    process.terminate()
    done = finish(process, tmp_path / "run")
    assert done.outcome["outcome"] == "preempted" and done.outcome["exit_code"] == 75, done.out
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    step = done.events("preempted")[0]["step"]
    again = run(tmp_path / "run", *LINE, f"max_steps={step + 5}", ranks=2)
    assert again.code == 0 and again.events("resume")[0]["step"] == step


@pytest.mark.nightly
def test_a_rank_dies_with_its_supervisor_and_the_run_restarts(tmp_path):
    line = (*LINE, *hold(60, until=tmp_path / "killed"), "max_steps=400")
    process = start(tmp_path / "run", *line, ranks=2, torchrun=RESTARTS, env=FOR_GOOD, cold=True)
    wait_for(tmp_path / "run", reached(28), process=process)
    supervisor = children(process.pid)[0]
    [rank] = children(supervisor)
    os.kill(supervisor, signal.SIGKILL)
    (tmp_path / "killed").touch()
    done = finish(process, tmp_path / "run")
    assert done.code == 0 and done.events("restart") and not done.events("survived"), done.out
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.nightly(but=["memory-1-more0"])
@pytest.mark.parametrize(
    ("kind", "rank", "more"),
    [
        ("memory", 1, ()),
        ("gloo", 2, ()),
        ("slices", 0, ()),  # the rank that writes the records, and saves
        ("memory", 0, ("model._target_=kit.parts.dying.Plain", "callbacks=ema", "log.every_steps=1")),
    ],
)
def test_no_step_is_repeated_when_a_rank_is_lost_for_good(tmp_path, kind, rank, more):
    """Its supervisor is killed, too: the others save their last step before all restart, and the weights are the same."""
    ranks, overrides = KINDS[kind]
    line = (*LINE, *overrides, "checkpoint.every_steps=1000", *more)
    undisturbed = run(tmp_path / "undisturbed", *line, ranks=ranks)
    steps = tmp_path / "steps"
    steps.mkdir()
    paced = (*line, *pace(0.02), *hold(35, until=tmp_path / "killed"))
    env = {"STEPS_IN": str(steps), **FOR_GOOD}
    process = start(tmp_path / "run", *paced, ranks=ranks, torchrun=RESTARTS, env=env)
    wait_for(tmp_path / "run", reached(28), process=process)
    os.kill(next(pid for pid in children(process.pid) if is_rank(pid, rank)), signal.SIGKILL)
    (tmp_path / "killed").touch()
    done = finish(process, tmp_path / "run")
    assert done.code == 0 and done.events("restart") and not done.events("survived"), done.out
    assert done.sha256 == undisturbed.sha256, done.out
    for path in steps.iterdir():
        made = [int(text) for text in path.read_text().split()]
        assert made == sorted({*made}), f"{path.name} has repeated a step: {made}"
    lines = [each["step"] for each in done.metrics if each["kind"] == "train"]
    assert lines == [each["step"] for each in undisturbed.metrics if each["kind"] == "train"], done.out
    if "log.every_steps=1" in more:  # no line is of several steps, of which a lost rank had a part
        pairs = [(one, other) for one, other in zip(done.numbers, undisturbed.numbers, strict=True) if one != other]
        assert all(one == {**other, "loss": None} for one, other in pairs) and len(pairs) <= 1, pairs


OWN_LOSS = "objective._target_=kit.parts.dying.Remembering"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kill", "more"),
    [
        ("step_end@50:1", ()),  # model.pt has the mean of all ranks' statistics
        ("forward@1:1", ("model._target_=kit.parts.dying.Backwards",)),  # the last note is of older statistics
        ("forward@25:1", ("model._target_=kit.parts.dying.Plain", OWN_LOSS)),
        ("forward@25:1", ("model._target_=kit.parts.dying.Late",)),
    ],
    ids=["over", "buffers", "objective", "draws"],
)
def test_what_the_other_ranks_do_not_know_is_not_saved_without_the_lost_one(tmp_path, kill, more):
    undisturbed = trained(tmp_path / "undisturbed", "memory", *more)
    result = trained(tmp_path / "run", "memory", *more, kill=f"{kill}:supervisor")
    assert result.events("restart") and result.sha256 == undisturbed.sha256, result.out


@pytest.mark.nightly
@pytest.mark.parametrize("supervisor", ["", ":supervisor"], ids=["restarted in place", "for good"])
def test_the_best_checkpoint_is_made_again_if_it_was_still_being_written(tmp_path, supervisor):
    marks = tmp_path / "marks"
    marks.mkdir()
    line = [*LINE, "model._target_=kit.parts.dying.Plain", "checkpoint.every_steps=1000", "checkpoint.best=loss"]
    line += [
        "eval.every_steps=20",
        "max_steps=30",
        f"checkpoint.storage=kit.parts.dying.SlowStorage://{tmp_path}/saved",
    ]
    kill = {"FAULTS": f"forward@25:0{supervisor}", "FAULTS_MADE": str(marks)}
    result = run(tmp_path / "run", *line, ranks=2, torchrun=RESTARTS, env=kill)
    assert result.events("restart"), result.out
    best = json.loads((result.folder / "best.json").read_text())
    assert best["step"] == 30 or Path(best["path"]).is_dir(), best
    assert (tmp_path / "saved" / "step-00000020").is_dir(), result.out


@pytest.mark.nightly
def test_an_error_of_one_rank_after_each_step_is_a_crash_loop_although_the_others_save_the_step(tmp_path):
    more = ("+callbacks.raises._target_=kit.parts.dying.Raises", "dist.survive=true", "max_steps=20")
    result = run(tmp_path / "run", *more, ranks=2, torchrun=("--max-restarts=5",), ok=False)
    assert result.outcome["exit_code"] == 7 and "the same error at the same place" in result.outcome["error"], (
        result.out
    )
    assert len(result.events("resume")) == 1 and result.events("resume")[0]["step"] == 5, result.out


@pytest.mark.nightly
def test_the_others_save_the_last_step_although_the_rank_that_failed_is_slow_to_record_why(tmp_path):
    more = ("+callbacks.raises._target_=kit.parts.dying.RaisesSlowly", "dist.survive=true", "max_steps=20")
    result = run(tmp_path / "run", *more, ranks=2, torchrun=RESTARTS)
    assert result.events("resume")[0]["step"] == 5, result.out
    assert [each["rank"] for each in result.events("failed")] == [1], result.out


@pytest.mark.unit
def test_the_save_of_a_lost_rank_s_peers_does_not_wait_for_a_folder_that_is_gone(tmp_path):
    began, folder = (
        time.monotonic(),
        RunFolder(tmp_path / "gone", Outcome(), None, is_done=False, lease=None, storage_lease=None),
    )
    save_emergency(alone(torch.device("cpu")), folder, step=1, save=lambda: None)
    assert time.monotonic() - began < 5


@pytest.mark.unit
def test_a_newer_checkpoint_that_was_found_bad_does_not_count_as_saved(tmp_path):
    options = RunOptions(tmp_path)
    own = _newest(options, Saved(options.checkpoints, {"step": 20}))
    assert own == {"step": 20, "path": f"{tmp_path}/checkpoints/step-00000020"}
    assert _newest(options, Saved(Storage(str(tmp_path / "other")), {"step": 20})) is None


def is_rank(supervisor, number):
    return Path(f"/proc/{rank_of(supervisor)}/comm").read_text().strip() == f"muster-rank{number}"


@pytest.mark.nightly(but=["overrides0-strategy=fsdp does not hand on its state"])
@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("strategy=fsdp",), "strategy=fsdp does not hand on its state"),
        (("precision=fp16",), "precision=fp16"),
        (("on_nonfinite=skip",), "on_nonfinite=skip"),
        ((), "ranks are not started by torchrun"),
    ],
)
def test_a_run_that_cannot_survive_says_so_in_one_line(tmp_path, overrides, why):
    done = run(tmp_path / "run", "max_steps=3", *overrides, ranks=2, **({"torchrun": RESTARTS} if overrides else {}))
    told = [event["text"] for event in done.events("note") if "dist.survive" in event["text"]]
    assert done.code == 0 and len(told) == 1 and why in told[0], done.out


@pytest.mark.nightly
def test_after_too_many_deaths_within_an_hour_all_ranks_restart(tmp_path):
    kill = "backward@13:1,backward@16:1"
    result = trained(tmp_path / "run", "memory", "dist.max_survivals_per_hour=1", kill=kill)
    assert len(result.events("survived")) == 1 and result.events("restart")
    assert "rank 1 has died 2 times within an hour (max_survivals_per_hour=1)" in result.out


@pytest.mark.unit
def test_notes_are_read_as_they_were_written_and_a_torn_one_is_not_read():
    notes = StepJournal()
    assert notes.read(0) is None and notes.launch == "" and not notes.is_over
    tensors = {
        "a": torch.arange(5.0),
        "empty": torch.empty(0, 3),
        "bf16": torch.ones(2, 2, dtype=torch.bfloat16),
        "one": torch.tensor(7),
    }
    notes.write(4, {"loss": 0.1, "window": {"sums": {}}}, tensors)
    notes.write(5, {"loss": 0.2}, {})
    facts, found = notes.read(4)
    assert facts == {"loss": 0.1, "window": {"sums": {}}} and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], each) and found[name].dtype == each.dtype for name, each in tensors.items())
    assert notes.read(5) == ({"loss": 0.2}, {})
    notes.write(6, {}, {})
    assert notes.read(4) is None  # overwritten
    with pytest.raises(ValueError, match="more than 64 MiB"):
        notes.write(7, {}, {"large": torch.empty(SLOT_BYTES, dtype=torch.uint8)})
    notes.launch = "abc12345"
    notes.end()
    assert notes.launch == "abc12345" and notes.is_over


@pytest.mark.unit
def test_draws_depend_on_seed_step_and_rank_alone():
    def drawn(seed, step, rank, *, used=False):
        draws = Draws()
        draws.used = used
        draws.begin(seed, rank, are_restored=False)
        draws.seed(seed, step, rank)
        return [*torch.rand(3).tolist(), *([random.random(), *np.random.rand(2)] if used else [])]

    assert drawn(0, 1, 2) == drawn(0, 1, 2) and drawn(0, 1, 2, used=True) == drawn(0, 1, 2, used=True)
    values = [drawn(seed, step, rank, used=True) for seed in (0, 1) for step in (0, 1) for rank in (0, 1)]
    assert len({tuple(each) for each in values}) == len(values)


@pytest.mark.unit
@pytest.mark.parametrize("use", [random.random, np.random.rand, lambda: [random.random() for _ in range(624)]])
def test_a_use_of_pythons_or_numpys_generator_is_seen_also_after_a_resume(use):
    draws = Draws()
    draws.begin(3, 1, are_restored=False)
    assert not draws.are_used()
    states = random.getstate(), np.random.get_state()
    use()
    assert draws.are_used() and draws.are_used()
    used = random.getstate(), np.random.get_state()
    for (python, numpy), expected in ((states, False), (used, True)):
        random.setstate(python)
        np.random.set_state(numpy)
        resumed = Draws()
        resumed.begin(3, 1, are_restored=True)
        assert resumed.are_used() == expected


@pytest.mark.unit
def test_a_replacement_s_checkpoint_says_that_pythons_generator_was_used():
    draws = Draws()
    draws.used = True
    draws.begin(3, 1, are_restored=False)
    resumed = Draws()
    resumed.begin(3, 1, are_restored=True)
    assert resumed.are_used()


KEPT = """
import os, signal, subprocess, sys, time
from muster.recovery.supervisor import supervise
from muster.world.exposed_communication import Waiting
from muster.world.group import alone
from muster.recovery.journal import StepJournal
from muster.faults.preemption import Preemption

preemption = Preemption()
preemption.install()

def live(life):
    life.journal.launch = "launch"
    life.journal.whole = life.number
    print(life.number, life.died_of, preemption.signalled, flush=True)
    BODY

life = supervise(StepJournal(), preemption=preemption, most_per_hour=5)
sys.exit(life if isinstance(life, int) else live(life))
"""


def kept(body):
    return subprocess.Popen(
        [sys.executable, "-c", KEPT.replace("BODY", body)],
        env=environment(RANK="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly
@pytest.mark.quick
def test_a_supervisor_ends_as_its_last_child_does():
    for body, code, said in (
        ("return 7", 7, "0  False\n"),
        (
            "os.kill(os.getpid(), signal.SIGKILL) if life.number < 2 else None; return 75",
            75,
            "0  False\n1 SIGKILL False\n2 SIGKILL False\n",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV) if not life.number else sys.exit(3)", 3, "0  False\n1 SIGSEGV False\n"),
        (
            "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGHUP)",
            -signal.SIGHUP,
            "0  False\n",
        ),
        (
            "life.journal.whole = 0; os.kill(os.getpid(), signal.SIGKILL)",
            -signal.SIGKILL,
            "0  False\n1 SIGKILL False\nmuster: rank 0 has died twice at one step, 1: all ranks restart\n",
        ),
    ):
        out, _ = (process := kept(body)).communicate(timeout=30)
        assert process.returncode == code and out.startswith(said), (body, process.returncode, out)


@pytest.mark.quick
def test_a_supervisor_passes_a_stop_on_once_and_a_replacement_knows_of_it():
    body = "time.sleep(0.3) if life.number else time.sleep(60) if not preemption.signalled else None; os.kill(os.getpid(), 9) if not life.number else None; return 75"
    process = kept(body)
    assert process.stdout.readline() == "0  False\n"
    time.sleep(0.3)
    process.terminate()
    [child] = children(process.pid)
    time.sleep(0.3)
    os.kill(child, signal.SIGKILL)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and out == "1 SIGKILL True\n"


@pytest.mark.nightly
@pytest.mark.quick
def test_what_a_rank_has_started_is_gone_when_it_is_restarted_in_place():
    body = "print(subprocess.Popen(['sleep', '60']).pid, flush=True) if not life.number else None; os.kill(os.getpid(), signal.SIGKILL) if not life.number else None; return 0"
    process = kept(body)
    assert process.stdout.readline() == "0  False\n"
    orphan = int(process.stdout.readline())
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and out == "1 SIGKILL False\n"
    until(lambda: has_ended(orphan), "end of the orphan", timeout_s=30)


@pytest.mark.parametrize(("begun", "said"), [("thread", "the thread beside"), ("socket", "a connection")])
def test_a_module_that_starts_a_thread_or_opens_a_connection_is_not_forked(tmp_path, begun, said):
    """Neither works in a child: such a run has no supervisor, as without dist.survive."""
    env = {"MUSTER_TEST_BEGUN": begun}
    more = ("dist.survive=true", "model._target_=kit.parts.threaded.Net", "max_steps=3", "eval.every_steps=off")
    done = run(tmp_path / "run", *more, ranks=2, torchrun=RESTARTS, env=env)
    [told] = [event["text"] for event in done.events("note") if "dist.survive" in event["text"]]
    assert done.code == 0 and said in told, done.out


@pytest.mark.unit
def test_an_attempt_that_has_ended_holds_no_parameters():
    """Each birth would cost a survivor the memory of all gradients, of which a parameter's is a view."""
    model = torch.nn.Linear(3, 3)
    waiting = Waiting(alone(torch.device("cpu")), model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    waiting.end()
    gone = [weakref.ref(each) for each in (waiting, *model.parameters())]
    del model, waiting
    gc.collect()
    assert [each() for each in gone] == [None, None, None]


def handed_on_by_one_that_dies():
    """Rank 0 is a step ahead and dies while it hands its state on; then rank 1 does. Return what rank 1 has handed on."""
    from kit.stepping import world

    from muster.recovery.hand_over import HandOver

    here = replace(world(), again=True)
    kept = HandOver(survival.Survival(Incarnation(0, StepJournal())))
    step = 11 - here.rank
    kept.mark, kept.state, kept.facts = [step], {"model": torch.full((2,), float(step))}, {"newest_step": step}
    seen = []

    def take_over(state, facts, own):
        seen.append([state["model"].tolist(), facts["newest_step"]])
        if len(seen) == 1:
            raise DistBackendError("rank 0 dies")

    trainee = SimpleNamespace(world=here, targets=lambda saved: {}, take_over=take_over, unsure=[])
    assert kept.furthest(here) == 0
    with pytest.raises(DistBackendError):
        kept.hand_on(trainee)
    if here.rank == 0:
        kept.mark, kept.state, kept.facts = None, {}, {}  # it is restarted in place
    assert kept.furthest(here) == 1
    kept.hand_on(trainee)
    return seen


def test_of_a_rank_that_dies_while_it_hands_its_state_on_nothing_is_left():
    """What the next one hands on is of one step: the facts of another with a state of its own would be a silent error."""
    ahead, own = [[11.0, 11.0], 11], [[10.0, 10.0], 10]
    assert on_ranks(handed_on_by_one_that_dies, 2) == [[ahead, own]] * 2
