"""`Job.run`: a rank that dies in a loop of a user's own is restarted in place, and the weights are the same."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from kit import warm
from kit.job import ROOT, environment, finish
from kit.ports import free_port

from muster.job.tracked_state import Tracked
from muster.report.history import History
from muster.world.group import alone


def trained(folder, ranks, kill="", *, code=0, restarts=3, script="lives", cold=False, **env):
    folder.mkdir()
    for each in {script, "lives"}:
        shutil.copy(ROOT / f"tests/kit/loops/{each}.py", folder)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    line += [f"--max-restarts={restarts}", "-m", script, "run"]
    log = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    begin = partial(subprocess.Popen, **log) if cold else warm.Popen
    done = finish(begin(line, env=environment(FAULTS=kill, **env), cwd=folder), folder / "run")
    assert done.code == code, done.out
    kills = [*filter(None, kill.split(","))]
    assert all((folder / each).exists() for each in kills), f"not all were killed:\n{done.out}"
    return done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same run without a death, by world size; made once."""
    made = {}

    def of(ranks):
        if ranks not in made:
            made[ranks] = trained(tmp_path_factory.mktemp("undisturbed") / f"of-{ranks}", ranks)
        return made[ranks]

    return of


IN_PLACE = {
    "first": (2, "begin@0:1,before-backward@1:0,within-backward@3:0,forward@10:1,begin@20:0"),
    "second": (2, "forward@0:0,after-forward@2:1,within-backward@6:1,begin@10:0,before-backward@29:1,after-loop@30:0"),
    "three": (3, "within-backward@4:2,begin@11:1,forward@14:0,begin@20:0"),
    "four": (4, "within-backward@10:0,within-backward@20:3,begin@22:0,begin@22:1"),
}


def test_a_rank_that_dies_after_an_evaluation_keeps_its_own_statistics(tmp_path):
    """And an evaluation that the body repeats stands there once; and a loop that goes on after torch's error learns of the death."""
    whole, killed = (
        trained(tmp_path / name, 2, kill, script="evaluated")
        for name, kill in (("whole", ""), ("killed", "before-sum@1:0,before-sum@3:1,evaluated@5:1,evaluated@7:0"))
    )
    assert [line["step"] for line in killed.events("survived")] == [1, 3, 5, 7], killed.out
    assert killed.lines("eval") == whole.lines("eval")
    for each in (whole, killed):
        assert [[line["own"], line["last"]] for line in each.lines("train")] == [[0, 7]], (
            "what rank 0 has logged, and nothing older"
        )
    unsure = [line["text"] for line in killed.events("note") if line["text"].startswith("rank 0 has died")]
    assert unsure == ["rank 0 has died: what was logged for last, own in the next train line may be rank 1's, or older"]
    told = [
        sorted(re.findall(r"statistics of rank \d: \[.*?\]", each.out)) for each in (whole, killed)
    ]  # perhaps in one line
    assert len(told[0]) == 2 and told[0] == told[1]


def test_the_best_evaluation_and_the_early_stop_are_the_same_whatever_was_killed(tmp_path):
    """Deaths after the best evaluation and others, and of both ranks, which go back to a checkpoint."""
    whole = trained(tmp_path / "whole", 2, script="chooses")
    step = json.loads((whole.folder / "best.json").read_text())["step"]
    kills = f"evaluated@8:1,stepped@{step + 2}:1,evaluated@{step + 4}:0,stepped@{step + 9}:0,stepped@{step + 9}:1"
    killed = trained(tmp_path / "killed", 2, kills, script="chooses")
    assert step + 2 in [line["step"] for line in killed.events("survived")]
    best = [(each.folder / "best.json").read_text() for each in (whole, killed)]
    assert best[0] == best[1] and killed.sha256 == whole.sha256, killed.out
    assert killed.lines("eval") == whole.lines("eval")
    assert killed.outcome["step"] == whole.outcome["step"] < 48


@pytest.mark.nightly
def test_a_loop_that_goes_on_after_torch_s_error_in_a_block_is_no_mistake_of_the_config(tmp_path):
    """Nobody is restarted in place there: the ranks restart, as after any death."""
    whole, killed = (
        trained(tmp_path / name, 2, kill, script="evaluated", BLOCK="1")
        for name, kill in (("whole", ""), ("killed", "before-sum@3:1"))
    )
    [restart] = killed.events("restart")
    assert "a rank has died" in restart["cause"] or "rank 1" in restart["cause"], killed.out
    assert killed.sha256 == whole.sha256


def test_a_mistake_of_the_loop_that_hangs_again_after_the_update_ends_the_run(tmp_path):
    """Rank 0 alone calls torch's barrier there: each time the rest of its body was left out, and the run went on to its end."""
    done = trained(tmp_path / "job", 2, script="alone", code=1, BARRIER="1")
    survived = done.events("survived")
    assert all(re.search(r"hang in job/alone.py:\d+ \(main\)", line["cause"]) for line in survived), survived
    assert [line["step"] for line in survived] == [4, 8]
    assert (done.outcome["exit_code"], done.outcome["step"]) == (7, 12)
    assert "rank 0" in done.outcome["error"] and "in job/alone.py" in done.outcome["error"], done.outcome


def test_a_call_of_the_job_on_one_rank_alone_ends_the_run_at_once(tmp_path):
    done = trained(tmp_path / "job", 2, script="alone", code=1, restarts=0)
    said = r"rank 0 on \S+ \(step 3\) is in job/alone.py:\d+ \(main\), a call for all ranks that rank 1 on \S+ \(step 4\) has left out"
    assert re.search(said, done.outcome["error"]) and done.outcome["exit_code"] == 2, done.outcome
    assert not done.events("survived")


def test_a_call_of_the_job_on_one_rank_alone_is_not_taken_for_one_of_a_save(tmp_path):
    """The sums met, and the save read `not finite` from the other rank's number."""
    done = trained(tmp_path / "job", 2, script="alone", code=1, restarts=0, SAVE="4")
    assert done.outcome["exit_code"] == 2, done.outcome
    assert re.search(r"have called different functions \(alone.py:\d+\)", done.outcome["error"]), done.outcome


def test_a_rank_that_leaves_in_the_middle_of_a_step_ends_the_run(tmp_path):
    done = trained(tmp_path / "job", 2, script="alone", code=1, LEAVES="1")
    assert (
        done.outcome["exit_code"] == 2 and "all ranks must leave the loop after the same step" in done.outcome["error"]
    )
    assert "the loop has ended after step 4 on rank 1" in done.outcome["error"] and not done.events("survived")


def test_a_rank_that_works_alone_after_the_loop_is_waited_for(tmp_path):
    """By backward passes, in which a rank may wait for others, for longer than half of timeout_s."""
    done = trained(tmp_path / "job", 2, script="alone", restarts=0, LOOKS="4")
    assert done.outcome["outcome"] == "done", done.out


def test_a_first_step_that_hangs_in_a_collective_does_not_wait_as_long_as_one_that_compiles(tmp_path):
    done = trained(tmp_path / "job", 2, script="alone", code=1, restarts=0, AT="1")
    assert re.search(r"rank 0 on \S+ \(step 0\) is in job/alone.py:\d+ \(main\)", done.outcome["error"]), done.outcome
    assert done.outcome["time"] - done.events("start")[0]["time"] < 30.0


def test_what_shows_the_progress_goes_on_after_a_death(tmp_path, undisturbed):
    """The page of metrics keeps its port, and the speed is of all steps since the last line, not of those since the death."""
    result = trained(tmp_path / "job", 2, "forward@29:1", EVERY="30", PORT=str(free_port()))
    assert len(result.events("survived")) == 1 and "cannot start" not in result.out, result.out
    assert (
        'muster_step{run="run"} 30.0' in result.out
        and 'muster_events_total{event="survived",run="run"} 1.0' in result.out
    )
    speeds = [[line["samples_per_s"] for line in each.lines("train")] for each in (result, undisturbed(2))]
    assert 0 < speeds[0][0] < 10 * max(speeds[1]), speeds
    assert [line["last"] for line in result.events("logged")] == [30], "what was logged after the last line"


@pytest.mark.nightly(but=["zeros"])
@pytest.mark.parametrize("form", ["none", "zeros"])
def test_gradients_that_the_loop_throws_away_stand_in_no_way(tmp_path, form):
    whole, killed = (
        trained(tmp_path / name, 2, kill, script="critic", FORM=form)
        for name, kill in (("whole", ""), ("killed", "forward@5:1"))
    )
    assert [line["step"] for line in killed.events("survived")] == [5], killed.out
    assert killed.sha256 == whole.sha256 and not killed.events("resume")


@pytest.mark.parametrize("kind", ["float64", pytest.param("float32", marks=pytest.mark.nightly)])
def test_numbers_of_numpy_are_saved_and_read_again(tmp_path, kind):
    """As they were: the arithmetic of Python's is another. Rates of an optimizer, numbers and an array in an object of one's own."""
    kills = {"whole": "", "in-place": "forward@5:1", "all": "forward@9:0,forward@9:1"}
    own = {"OTHER": "float64"}  # which may differ between ranks, so that no rank survives
    whole, killed = (
        trained(tmp_path / f"own-{name}", 2, kills[name], script="scheduled", **own) for name in ("whole", "all")
    )
    assert killed.events("resume") and killed.sha256 == whole.sha256
    done = {name: trained(tmp_path / name, 2, kill, script="scheduled", KIND=kind) for name, kill in kills.items()}
    assert len(done["in-place"].events("survived")) == 1 and not done["in-place"].events("resume")
    assert done["all"].events("resume") and {each.sha256 for each in done.values()} == {done["whole"].sha256}
    assert [line["lr"] for line in done["all"].lines("train")] == [line["lr"] for line in done["whole"].lines("train")]


@pytest.mark.nightly(but=["2-numpy.datetime64"])
@pytest.mark.parametrize(
    ("ranks", "kind"), [(2, "numpy.datetime64"), (1, "numpy.datetime64"), (2, "builtins.function")]
)
def test_a_state_that_becomes_unreadable_ends_the_run(tmp_path, ranks, kind):
    """At once, as every later checkpoint would fail, too; the one before stays."""
    done = trained(tmp_path / "job", ranks, script="scheduled", code=1, restarts=0, OTHER=kind.partition(".")[2])
    assert done.outcome["exit_code"] == 2 and "in _write" not in done.out, done.out
    said = (
        rf"step-00000008 is not saved: (rank-0000\d/)?last\['rate'\] is of type {kind}, which torch.load does not read"
    )
    assert re.search(said, done.outcome["error"]), done.outcome
    assert [path.name for path in (done.folder / "checkpoints").glob("*")] == ["step-00000004"]
    assert done.lines("train")[-1]["step"] < 14


@pytest.mark.parametrize("which", ["0", "1"])
def test_of_ranks_of_which_one_cannot_be_restarted_in_place_all_restart(tmp_path, which):
    """One that has started a thread before the job, as a tracker on rank 0 does: the meeting tells all of them."""
    whole, killed = (
        trained(tmp_path / name, 2, kill, script="evaluated", THREAD=which)
        for name, kill in (("whole", ""), ("killed", "evaluated@5:1"))
    )
    note = f"(survive=True does not apply: an imported module has started the thread own, on rank {which})"
    assert [note in line["text"] for line in whole.events("note")] == [True], whole.out
    assert [line["step"] for line in killed.events("resume")] == [4] and killed.sha256 == whole.sha256


def test_an_error_of_what_outlives_a_death_says_where_it_comes_from(tmp_path):
    whole, killed = (
        trained(tmp_path / name, 2, kill, script="critic", FORM="listed")
        for name, kill in (("whole", ""), ("killed", "listed@5:1"))
    )
    [restart] = killed.events("restart")
    assert "(after a rank's death the function was called again: what it keeps outside" in restart["cause"]
    assert killed.sha256 == whole.sha256, killed.out


@pytest.mark.parametrize(
    ("form", "kill", "said"),
    [
        ("none", "stepped@5:0", "rank 1 had changed critic/weight since step 5"),
        ("cycle", "made@5:0", "gradients of second were left from step 5, and no rank hands them on: unless .*"),
    ],
)
def test_a_death_before_the_first_checkpoint_is_named(tmp_path, form, kill, said):
    """The other rank has changed the critic's weights, or has gradients of before, so no rank has the state of a step: all restart."""
    whole, killed = (
        trained(tmp_path / name, 2, kill, script="critic", FORM=form)
        for name, kill in (("whole", ""), ("killed", kill))
    )
    [restart] = killed.events("restart")
    said = rf"rank 0 on \S+ \(SIGKILL\) died, {said}, and there is no checkpoint: all ranks restart"
    assert re.search(said, restart["cause"]) and killed.sha256 == whole.sha256, killed.out


@pytest.mark.nightly(but=["first"])
@pytest.mark.parametrize("which", IN_PLACE)
def test_a_rank_that_dies_before_its_sum_costs_nothing(tmp_path, undisturbed, which):
    ranks, kill = IN_PLACE[which]
    result, whole = trained(tmp_path / "job", ranks, kill), undisturbed(ranks)
    assert len(result.events("survived")) == len(kill.split(",")), result.out
    assert not result.events("restart") and not result.events("resume"), result.out
    assert result.sha256 == whole.sha256 and result.numbers == whole.numbers
    history = History.of(result.folder)
    assert history.attempts == len(history.begins) == 1 and not history.spent["restart"]
    told = [line for line in result.events("note") if "for the exact" in line["text"]]
    assert len(told) == (10 % ranks > 0), "batches of 10 are unequal on 3 and on 4 ranks: said once"


@pytest.mark.nightly
def test_ranks_that_wait_for_others_than_the_dead_one_go_on_at_once(tmp_path, undisturbed):
    """Of four ranks in a ring one has no connection to the dead one: its sum fails when the others have closed theirs.

    Here torch's own modules are imported when the group is there already, as for a user.
    """
    result = trained(tmp_path / "job", 4, "before-backward@9:0,begin@15:1", cold=True)
    assert [line["rank"] for line in result.events("survived")] == [0, 1], result.out
    assert result.sha256 == undisturbed(4).sha256


@pytest.mark.nightly(but=["2-before-backward@17:1-plain"])
@pytest.mark.parametrize("form", ["plain", "constant", ""])
@pytest.mark.parametrize("ranks, where", [(2, "before-backward@17:1"), (2, "begin@17:0"), (3, "within-backward@17:2")])
def test_a_rank_that_is_lost_for_good_costs_no_step(tmp_path, form, ranks, where):
    """With its supervisor; one of the ranks that are left saves the last step. Buffers of each rank's own are lost with it."""
    whole = trained(tmp_path / "whole", ranks, FORM=form)
    result = trained(tmp_path / "job", ranks, f"{where}:supervisor", FORM=form)
    resumed = result.events("resume")
    assert [line["step"] for line in resumed] == [17 if form else 10], result.out
    assert result.sha256 == whole.sha256
    if form:
        assert "has saved step 17" in result.out, result.out
        assert any("the last 30 samples: no train line has it" in line["text"] for line in result.events("note"))
        there, here = ([line for line in each.numbers if line["step"] != 21] for each in (whole, result))
        assert there == here, "but for the line of steps 15 to 21"


@pytest.mark.nightly
def test_a_rank_that_is_asked_to_stop_since_another_is_lost_does_not_wait_for_its_answer(tmp_path):
    """torchrun's SIGTERM comes between the optimizer's step and the next collective."""
    kill = {"kill": "after-update@15:1:supervisor", "PAUSE_S": "1"}
    whole, result = trained(tmp_path / "whole", 2, FORM="plain"), trained(tmp_path / "job", 2, FORM="plain", **kill)
    assert [line["step"] for line in result.events("resume")] == [16] and "has saved step 16" in result.out, result.out
    assert result.sha256 == whole.sha256


AFTER_ITS_SUM = "after-backward@4:0,after-update@12:1,after-step@16:0,after-evaluation@24:1"


def test_a_rank_that_dies_after_its_sum_costs_its_part_of_one_loss_at_most(tmp_path, undisturbed):
    result, whole = trained(tmp_path / "job", 2, AFTER_ITS_SUM), undisturbed(2)
    assert len(result.events("survived")) == 4 and not result.events("restart"), result.out
    assert result.sha256 == whole.sha256
    noted = [line["step"] for line in result.events("note") if "without its loss of this step" in line["text"]]
    assert noted == [5, 13, 16, 24], "a line says what it lacks"
    steps = [(line["kind"], line["step"]) for line in result.numbers]
    assert steps == [(line["kind"], line["step"]) for line in whole.numbers], "each step is there once"


FROM_THE_CHECKPOINT = "after-track@0:1,before-evaluation@18:0,within-evaluation@29:1"


def test_a_rank_that_dies_in_what_follows_a_step_is_back_at_the_checkpoint_in_warm_processes(tmp_path, undisturbed):
    result, whole = trained(tmp_path / "job", 2, FROM_THE_CHECKPOINT, restarts=0), undisturbed(2)
    assert [line["step"] for line in result.events("resume")] == [10, 20], result.out
    assert result.sha256 == whole.sha256 and result.numbers == whole.numbers


@pytest.mark.nightly
def test_a_rank_that_dies_in_the_building_restarts_all(tmp_path, undisturbed):
    result = trained(tmp_path / "job", 2, "build@0:1,before-track@0:0")
    assert result.sha256 == undisturbed(2).sha256 and not result.events("survived")


@pytest.mark.nightly
def test_without_survival_the_run_is_the_same(tmp_path, undisturbed):
    result = trained(tmp_path / "job", 2, "within-backward@13:1", SURVIVE="")
    assert len(result.events("restart")) == 1 and not result.events("survived")
    assert result.sha256 == undisturbed(2).sha256
    assert result.numbers == undisturbed(2).numbers


@pytest.mark.nightly
def test_ranks_of_which_each_has_its_own_weights_do_not_hand_them_on(tmp_path):
    """Parameters are averaged after every second step, from the tenth step on, and lines come after an average."""
    result = trained(tmp_path / "job", 2, "begin@15:1", ALONE="2", BEGINS="9", EVERY="2")
    assert not result.events("survived") and result.events("restart"), result.out
    assert "had parameters of its own" in result.out, result.out
    assert "parameters differ between ranks" in str(result.events("note")), "after the restart, from its first step on"


FORMS = {  # ranks, kills, how many of the deaths are survived in place
    "early": (2, "before-backward@13:1,begin@18:0", 2),
    "global": (2, "before-backward@13:1,within-backward@19:0", 2),
    "own": (2, "before-backward@13:1", 1),
    "inner": (3, "before-backward@13:1", 1),
    "counted": (2, "within-backward@6:1,after-backward@12:0", 1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_loops_as_people_write_them(tmp_path, form):
    ranks, kill, in_place = FORMS[form]
    whole = trained(tmp_path / "whole", ranks, FORM=form)
    result = trained(tmp_path / "job", ranks, kill, FORM=form)
    assert len(result.events("survived")) == in_place, result.out
    assert result.sha256 == whole.sha256 and result.numbers == whole.numbers


ODD = {  # kills, how many of the deaths are survived in place
    "zeroed": ("begin@11:1,within-backward@14:0", 2),
    "by-hand": ("within-step-1@8:1,begin@15:0", 0),
    "decay": ("forward@12:1,begin@18:0", 0),
    "groups": ("begin@5:1,forward@12:0,within-backward@19:1", 3),
    "extra": ("begin@13:1", 0),
    "taught": ("begin@13:1,within-backward@18:0", 0),
    "slowed": ("forward@12:1,within-backward@18:0", 0),
    "unsaved": ("begin@11:1,within-backward@14:0", 2),
}


@pytest.mark.nightly(but=["zeroed", "unsaved"])
@pytest.mark.parametrize("form", ODD)
def test_a_state_that_is_easily_forgotten_is_handed_on_or_all_go_back(tmp_path, form):
    """Gradients of zero, an update by .data that is half done, groups that a loop has added, an extra state of a module,
    a buffer in no state dict, a teacher that follows in each forward pass, an optimizer's state that the body changes."""
    kill, in_place = ODD[form]
    whole = trained(tmp_path / "whole", 2, FORM=form, script="odd")
    result = trained(tmp_path / "job", 2, kill, FORM=form, script="odd")
    assert len(result.events("survived")) == in_place, result.out
    assert result.sha256 == whole.sha256 and result.numbers == whole.numbers


@pytest.mark.nightly
def test_a_death_that_was_not_survived_in_place_is_told_as_what_it_was(tmp_path):
    result = trained(tmp_path / "job", 2, "before-evaluation@18:0,begin@22:1", restarts=0)
    lines = [line for line in result.lines("event") if line["event"] in ("restart", "survived")]
    assert [(line["event"], line["step"], line.get("rank")) for line in lines] == [
        ("restart", 10, None),
        ("survived", 22, 1),
    ]
    assert "rank 0 on " in lines[0]["cause"] and "SIGKILL" in lines[0]["cause"]


def test_a_communication_hook_with_a_state_of_each_rank_is_not_survived(tmp_path):
    result = trained(tmp_path / "job", 2, "begin@13:1", FORM="hook", script="odd")
    noted = [
        line for line in result.events("note") if "powerSGD_hook has a state that no checkpoint holds" in line["text"]
    ]
    assert len(noted) == 2, "one in each attempt"
    assert any("powerSGD_hook has a state of each rank" in line["text"] for line in result.events("note")), result.out
    assert not result.events("survived") and result.events("restart")


@pytest.mark.nightly
def test_optimizers_with_a_state_of_each_rank_are_refused_at_the_first_save(tmp_path):
    """A checkpoint would have the momenta of some ranks, and a resume others than the run."""
    result = trained(tmp_path / "job", 2, FORM="momenta", script="odd", code=1)
    assert any("keep it alike on all ranks" in line and "momentum" in line for line in result.said), result.out


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_the_loop_alone_is_told_in_one_line(tmp_path, rank):
    """Early stopping by a loss of a rank's own: the other ranks wait in the next step's broadcast of buffers."""
    result = trained(tmp_path / "job", 2, FORM=f"leaves-{rank}", script="odd", code=1)
    assert result.outcome["exit_code"] == 2 and not result.events("survived"), result.out
    said = [line for line in result.said if "the loop has ended after step 7 on rank" in line]
    assert len(said) == 1 and f"on rank {rank} " in said[0] and "all ranks must leave the loop" in said[0], result.out
    assert "terminate called" not in result.out


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exit_of_one_rank_alone_ends_all_with_its_code(tmp_path, rank):
    result = trained(tmp_path / "job", 2, FORM=f"exits-{rank}", script="odd", code=1, restarts=0)
    assert result.outcome["exit_code"] == 3 and not result.events("survived"), result.out
    assert "terminate called" not in result.out


@pytest.mark.nightly
def test_a_model_that_outlives_the_function_does_not_begin_anew_with_what_it_has_learned(tmp_path):
    whole = trained(tmp_path / "whole", 2, FORM="global")
    result = trained(tmp_path / "job", 2, "before-evaluation@6:1", FORM="global")
    assert len(result.events("restart")) == 1 and result.sha256 == whole.sha256, result.out
    assert result.numbers == whole.numbers


@pytest.mark.unit
def test_buffers_are_looked_up_since_a_module_may_assign_others():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("scratch", torch.zeros(()), persistent=False)

    module = Counting()
    tracked = Tracked({"model": module}, alone(torch.device("cpu")))
    module.seen = module.seen + 1
    assert {name: float(value) for name, value in tracked.buffers().items()} == {"model/seen": 1.0}
    module.scratch += 2  # and is like one that is saved from now on
    assert [*map(float, tracked.buffers().values())] == [1.0, 2.0]
