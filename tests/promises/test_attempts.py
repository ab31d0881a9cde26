"""One run, one writer; what an attempt leaves to the next; and refusals that touch nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from kit.clock import ManualClock
from kit.job import Job, environment, finish, hold, reached, run, saved, start, wait_for
from kit.until import until

from muster import outcome
from muster.errors import ConfigError, Held
from muster.lease import folder_lease
from muster.lease.folder_lease import Claimant, Lease
from muster.outcome import Outcome

ME = Claimant("me", agents=("me",))
ENDLESS = ("model._target_=kit.parts.models.Slow", "data._target_=kit.parts.data.Numbered", "max_steps=100000")


def claim(folder, attempt, **kwargs):
    own = Claimant(attempt, agents=kwargs.pop("agents", (attempt,)), launcher=attempt)
    after = max(folder_lease.newest_claim(folder)[0], outcome.last(folder).token)
    return Lease(folder, own, after=after, **{"on_loss": print} | kwargs)


@pytest.mark.nightly
def test_of_many_launches_at_once_exactly_one_trains(tmp_path):
    """Eight processes that claim one folder at the same moment, five times over."""
    code = (
        "import sys, time, pathlib\nfrom muster.lease.folder_lease import Claimant, Lease, look\nfrom muster.errors import ConfigError\n"
        "folder, me = pathlib.Path(sys.argv[1]), sys.argv[2]\nsys.stdin.read(1)\n"
        "try:\n    own = Claimant(me, agents=(me,), launcher=me)\n    Lease(folder, own, after=look(folder, own), on_loss=print)\n"
        "    print('won', flush=True)\n    time.sleep(60)\nexcept ConfigError as error:\n    print('refused', flush=True)\n"
    )
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        line = [sys.executable, "-c", code, str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment()}
        claimants = [subprocess.Popen([*line, f"launch-{each}"], **pipes) for each in range(8)]
        time.sleep(1.5)  # for all to be ready: the more of them are, the sharper
        for each in claimants:
            each.stdin.write("x")
            each.stdin.flush()
        said = [each.stdout.readline().strip() for each in claimants]
        for each in claimants:
            each.kill()
            each.communicate()
        assert sorted(said) == ["refused"] * 7 + ["won"], said


@pytest.mark.nightly(but=["0.3"])
@pytest.mark.parametrize("share", ["0", "0.3"])
def test_of_launches_at_the_same_moment_one_trains_and_saves(tmp_path, share):
    """Also where a file server lets some wait: what one looks at, another may have changed by the time that it acts."""
    line = ("data._target_=kit.parts.data.Numbered", "max_steps=30", "checkpoint.every_steps=5")
    line += hold(7, until=tmp_path / "go")
    launches = [start(tmp_path / "run", *line, module="kit.slow", env={"SLOW_FILES": share}) for _ in range(4)]
    until(lambda: sum(each.poll() is not None for each in launches) >= 3, "end of three", timeout_s=90)
    (tmp_path / "go").touch()
    ended = [finish(each, tmp_path / "run") for each in launches]
    said = "\n".join(each.out for each in ended)
    assert sorted(each.code for each in ended) == [0, 2, 2, 2], said
    told = {line["event"] for line in ended[0].lines("event")}
    assert "checkpoint" in told and not told & {"checkpoint_failed", "restart"}, said
    # A refused launch gives its record a second: where files are slow, what it has begun to write may stay.
    left = [each for each in (tmp_path / "run").glob(".*") if share == "0" or not each.name.endswith(".refused.json")]
    assert ended[0].outcome["outcome"] == "done" and not left


@pytest.mark.unit
def test_a_superseded_holder_cannot_commit_and_learns_of_it(tmp_path):
    """As after a pause that outlasted the lease: the older token is worth nothing, and its holder is told."""
    lost = []
    old = claim(tmp_path, "old", on_loss=lost.append, clock=ManualClock())
    until(lambda: (tmp_path / ".alive").exists(), "sign of life", timeout_s=60)
    outcome.write(tmp_path, Outcome(outcome="running", attempt="old", token=old.token))
    assert old.is_held() and old.renew()
    new = claim(tmp_path, "new")
    assert new.token > old.token and not old.is_held()
    outcome.write(tmp_path, Outcome(outcome="running", attempt="new", token=new.token))
    assert new.is_held()
    old._renew()  # what its thread does once a second
    assert "another launch has taken over" in str(lost[0])
    old.let_go()
    assert new.is_held(), "the old one took the new one's claim along"
    new.let_go()
    assert not list(tmp_path.glob(".*"))
    assert claim(tmp_path, "third").token > new.token, "the count goes on although no claim was left"


@pytest.mark.parametrize("spoil", ["missing", "torn", "stale"])
@pytest.mark.unit
def test_what_cannot_be_told_is_no(tmp_path, spoil):
    """outcome.json missing, torn, or as another attempt left it: no commit."""
    held = claim(tmp_path, "a")
    if spoil == "torn":
        (tmp_path / "outcome.json").write_text('{"token": 1, "att')
    if spoil == "stale":
        outcome.write(tmp_path, Outcome(outcome="running", attempt="b", token=held.token + 3))
    assert not held.is_held()
    held.let_go()


def test_a_holder_of_which_no_process_is_left_is_not_waited_for(tmp_path):
    from muster.world.environment import has_ended, launcher

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    gone = launcher().split(":")
    gone[1], gone[2] = str(process.pid), "1"  # another process has the pid by now
    assert not has_ended(launcher()) and has_ended(":".join(gone)) and not has_ended(f"elsewhere:{':'.join(gone[1:])}")
    process.kill()
    process.wait()
    held = claim(tmp_path, "dead", agents=(":".join(gone),))
    held._ended.set()
    began = time.monotonic()
    folder_lease.look(tmp_path, ME)
    assert time.monotonic() - began < folder_lease.HELD_S


@pytest.mark.unit
def test_a_full_disk_gathers_no_drafts(tmp_path, monkeypatch):
    """The sign of life is written once a second: what a full disk cuts short must not stay."""

    def full(source, target):
        raise OSError(28, "No space left on device")

    held = claim(tmp_path, "a")
    until(lambda: (tmp_path / ".alive").exists(), "sign of life", timeout_s=60)
    monkeypatch.setattr(folder_lease.os, "replace", full)
    for _ in range(3):
        held._show("cut short")
    assert not list(tmp_path.glob(".draft-*"))
    held.let_go()


@pytest.mark.unit
def test_a_sign_of_life_that_is_late_does_not_stay(tmp_path, monkeypatch):
    """It is renewed while the claim is given up, for which nobody waits longer than five seconds."""
    held = claim(tmp_path, "a")
    until(lambda: (tmp_path / ".alive").exists(), "sign of life", timeout_s=60)
    begun, go, show = threading.Event(), threading.Event(), folder_lease.show

    def slowly(*args):
        begun.set()
        go.wait()
        show(*args)

    monkeypatch.setattr(folder_lease, "show", slowly)
    assert begun.wait(60)
    held.let_go()
    assert not (tmp_path / ".alive").exists()
    go.set()
    held._thread.join()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.unit
@pytest.mark.parametrize("stalled_s", [folder_lease.HELD_S - 1, folder_lease.HELD_S + 1])
def test_a_stall_shorter_than_the_lease_keeps_it(tmp_path, stalled_s):
    clock = ManualClock()
    held = claim(tmp_path, "slow", clock=clock)
    until(lambda: (tmp_path / ".alive").exists(), "sign of life", timeout_s=60)
    clock.at(stalled_s, held.renew)
    if stalled_s < folder_lease.HELD_S:
        with pytest.raises(ConfigError, match="in use by another job"):
            folder_lease.look(tmp_path, ME, clock=clock)
    else:
        assert folder_lease.look(tmp_path, ME, clock=clock) == held.token
    held.let_go()


@pytest.mark.unit
@pytest.mark.parametrize("stands", [False, True])
def test_another_part_of_the_job_is_waited_for_and_superseded_once_it_stands(tmp_path, stands):
    clock, waited_s = ManualClock(), 30.0
    holder = Claimant("first", agents=("agent-1",), job="job", meets_at="here")
    asked = []
    held = Lease(tmp_path, holder, after=0, on_loss=print, on_request=asked.append, stands=lambda: stands, clock=clock)
    until(lambda: (tmp_path / ".alive").exists(), "sign of life", timeout_s=60)
    for second in range(1, 60):
        clock.at(second, held.renew)
    other = Claimant("second", agents=("agent-2",), job="job", meets_at="here")
    began = clock.now
    if stands:
        assert folder_lease.look(tmp_path, other, wait_s=waited_s, clock=clock) == held.token
        assert clock.now - began < 5
    else:
        with pytest.raises(Held, match="has not released it for 31 s"):
            folder_lease.look(tmp_path, other, wait_s=waited_s, clock=clock)
    assert len(asked) == 1 and not (tmp_path / ".wanted").exists()
    held.let_go()


@pytest.mark.unit
@pytest.mark.parametrize("clock_is", ["ahead of", "behind"])
def test_a_holder_whose_clock_differs_is_reported(tmp_path, clock_is):
    clock = ManualClock()
    held = Lease(tmp_path, Claimant("first", agents=("agent-1",), job="job"), after=0, on_loss=print, clock=clock)
    until(lambda: (tmp_path / ".alive").exists(), "sign of life", timeout_s=60)
    other = ManualClock()
    other.time = lambda: clock.now + (11 if clock_is == "ahead of" else -11)
    other.at(1, held.renew)
    with pytest.raises(ConfigError, match=f"is 11 s {clock_is} that of"):
        folder_lease.look(tmp_path, Claimant("second", job="job"), wait_s=30, clock=other)
    held.let_go()


@pytest.mark.unit
def test_a_slow_attempt_that_others_have_passed_holds_nothing(tmp_path):
    """It looked before two others came and the first of them left; its token is free, but no longer the newest."""
    first = claim(tmp_path, "first")
    second = claim(tmp_path, "second")
    assert not (tmp_path / f".claim-{first.token}").exists()
    with pytest.raises(ConfigError, match="in use by another job"):
        Lease(tmp_path, ME, after=first.token - 1, on_loss=print)
    assert [path.name for path in tmp_path.glob(".claim-*")] == [f".claim-{second.token}"]
    for each in (first, second):
        each.let_go()
    assert not list(tmp_path.glob(".*"))


def test_a_paused_launch_whose_folder_was_taken_leaves_at_once(tmp_path):
    """SIGSTOP for longer than the lease, a second launch, SIGCONT: the first writes nothing and ends."""
    line = (*ENDLESS, "checkpoint.every_steps=20")
    first = start(tmp_path / "run", *line)
    wait_for(tmp_path / "run", saved(20), process=first)
    first.send_signal(signal.SIGSTOP)
    second = start(tmp_path / "run", *line)
    wait_for(tmp_path / "run", lambda result: len(result.events("resume")) == 1, process=second, timeout_s=90)
    first.send_signal(signal.SIGCONT)
    ended = finish(first, tmp_path / "run", timeout_s=30)
    assert ended.code == 1 and any("another launch has taken over" in line for line in ended.said), ended.out
    at = Job(tmp_path / "run").step()
    wait_for(tmp_path / "run", reached(at + 30), process=second)
    assert json.loads((tmp_path / "run/outcome.json").read_text())["outcome"] == "running"
    second.send_signal(signal.SIGTERM)
    result = finish(second, tmp_path / "run")
    assert result.code == 75 and result.outcome["outcome"] == "preempted", result.out
    steps = [line["step"] for line in result.lines("train")]
    assert steps == sorted(set(steps)), "both have logged"


def test_a_refused_command_leaves_a_finished_run_alone(tmp_path):
    line = ("max_steps=5", "log.report=true")
    done = run(tmp_path / "run", *line)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    for mistake, code in ((("seed=3",), 2), (("data._target_=kit.parts.data.Numbered", "seed=0"), 2)):
        refused = run(tmp_path / "run", *line, *mistake, ok=False)
        assert refused.code == code, refused.out
        after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
        record = json.loads(after.pop("refused.json"))
        assert after == before and record["exit_code"] == code and "another run" in record["error"]
        assert not list((tmp_path / "run").glob(".*"))
    assert outcome.newest(tmp_path / "run")["outcome"] == "config_error"
    assert done.outcome["outcome"] == "done"


def test_a_refused_command_leaves_a_run_alone_that_has_only_just_claimed_the_folder(tmp_path):
    """It wrote outcome.json where there was none yet; whoever held the run then could save nothing any more."""
    folder = tmp_path / "run"
    folder.mkdir()
    held = claim(folder, "first")
    refused = run(folder, "max_steps=5", ok=False)
    assert refused.code == 2 and "in use by another job" in refused.said[0], refused.out
    assert not (folder / "outcome.json").exists()
    assert json.loads((folder / "refused.json").read_text())["outcome"] == "config_error"
    outcome.write(folder, Outcome(outcome="running", attempt="first", token=held.token))
    late = Outcome(outcome="data_error", attempt="late")
    outcome.refuse(folder, late, beside=False)  # as one that looked before the claim was made
    assert held.is_held() and outcome.newest(folder)["attempt"] == "late"
    held.let_go()


@pytest.mark.unit
def test_clean_stops_are_no_failures():
    """Four preemptions during start-up ended in exit code 7; they are counted by themselves, and far higher."""
    attempt = Outcome(outcome="preempted", furthest=10)
    for number in range(1, 5):
        failures, stops = attempt.idle(10)
        assert (failures, stops) == (0, number)
        attempt = Outcome(outcome="preempted", furthest=10, idle_attempts=failures, idle_preemptions=stops)
    assert Outcome(outcome="failed", furthest=10, idle_attempts=2, idle_preemptions=4).idle(10) == (3, 4)
    assert Outcome(outcome="failed", furthest=10, idle_attempts=2).idle(11) == (0, 0)
    assert Outcome(outcome="crash_loop", furthest=10, idle_attempts=4).idle(10) == (0, 0)


def test_an_evaluation_that_was_cut_short_is_made_after_the_resume(tmp_path):
    line = ("data._target_=kit.parts.data.SlowToTest", "model._target_=kit.parts.models.Slow", "max_steps=40")
    line += ("eval.every_steps=20", "batch_size=10", "eval.sanity_batches=0", "+data.seconds=0")
    stopped = run(tmp_path / "run", *line, f"+data.told={tmp_path / 'told'}", ok=False)
    assert stopped.code == 75 and stopped.outcome["step"] == 20 and not stopped.lines("eval"), stopped.out
    result = run(tmp_path / "run", *line, f"+data.told={tmp_path / 'told'}")
    assert [line["step"] for line in result.lines("eval")] == [20, 40]


def test_evaluation_can_be_bounded_or_left_out(tmp_path):
    counted = run(
        tmp_path / "some",
        "data._target_=kit.parts.data.Ledger",
        "eval.max_samples=7",
        "max_steps=3",
        "eval.sanity_batches=0",  # which reads samples, too
        env={"LEDGER": str(tmp_path)},
    )
    assert len((tmp_path / "test-0").read_text().split()) == 7 * len(counted.lines("eval")) > 0
    assert not run(tmp_path / "none", "eval.every_steps=off", "max_steps=3").lines("eval")
    refused = run(tmp_path / "bad", "eval.every_steps=sometimes", ok=False)
    assert refused.code == 2 and "null or off" in refused.said[0], refused.out


@pytest.mark.nightly
def test_a_schedule_that_depends_on_the_length_is_not_stretched_in_silence(tmp_path):
    """Cosine with another max_steps would jump from 2e-5 to 0.05; a constant rate may go on for longer."""
    run(tmp_path / "run", "scheduler=cosine", "max_steps=10")
    refused = run(tmp_path / "run", "scheduler=cosine", "max_steps=20", ok=False)
    assert refused.code == 2 and "was 10 steps and now is 20" in refused.said[0], refused.out
    told = ("scheduler=cosine", "max_steps=20", "checkpoint.accept_changes=true")
    assert run(tmp_path / "run", *told).events("resume")[-1]["step"] == 10


def test_a_changed_micro_batch_is_said(tmp_path):
    run(tmp_path / "run", "max_steps=2")
    result = run(tmp_path / "run", "max_steps=4", "micro_batch_size=16")
    assert "micro_batch_size=16 was None" in result.said[0], result.out


@pytest.mark.nightly
def test_every_generator_is_seeded(tmp_path):
    """Python's and NumPy's too: a model that draws from them starts the same each time."""
    (tmp_path / "drawn.py").write_text(
        "import random\nimport numpy as np\nimport torch\n"
        "class Drawn(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(64, 10)\n"
        "        self.weight.data += random.random() + np.random.rand()\n"
        "    def forward(self, x):\n        return super().forward(x.flatten(1)) * (1 + 0.1 * random.random())\n"
    )
    line = ("model._target_=drawn.Drawn", "max_steps=6", "checkpoint.every_steps=3")
    one, two = (run(tmp_path / name, *line, ranks=2) for name in ("one", "two"))
    assert one.losses == two.losses
    run(tmp_path / "parts", *line, "max_steps=3", ranks=2)
    assert run(tmp_path / "parts", *line, ranks=2).losses == one.losses


@pytest.mark.parametrize("own", ["np.random", "np.random.default_rng(0)", "Hidden()"])
def test_a_data_set_that_draws_from_a_generator_that_is_not_seen_is_said(tmp_path, own):
    (tmp_path / "noisy.py").write_text(
        "import numpy as np\nimport torch\n"
        "class Hidden:\n    __slots__ = ['rng']\n    def uniform(self):\n"
        "        self.rng = getattr(self, 'rng', None) or np.random.default_rng(0)\n        return self.rng.uniform()\n"
        "class Noisy(torch.utils.data.Dataset):\n    num_classes = 10\n    def __init__(self, train=True):\n"
        f"        self.draws = {own}\n"
        "    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, index):\n        return torch.full((64,), float(self.draws.uniform())), index % 10\n"
    )
    result = run(tmp_path / "run", "data._target_=noisy.Noisy", "max_steps=2")
    notes = [line["text"] for line in result.events("note")]
    assert sum("a generator that is not seen" in note for note in notes) == (own == "Hidden()"), result.out


def test_batch_norm_on_one_sample_is_explained(tmp_path):
    line = ("model._target_=kit.parts.models.Normed", "batch_size=100", "max_steps=20")
    result = run(
        tmp_path / "run", *line, "data=synthetic", "data.num_samples=1201", "data.image_shape=[1,8,8]", ok=False
    )
    assert result.code == 2 and "loader.drop_last=true" in result.said[0], result.out


def test_a_report_that_cannot_be_written_fails_nothing(tmp_path):
    (tmp_path / "run/report.html").mkdir(parents=True)  # a folder in its place
    result = run(tmp_path / "run", "max_steps=3", "log.report=true")
    assert result.outcome["outcome"] == "done" and any("no report.html" in line for line in result.said), result.out
    assert os.path.isdir(tmp_path / "run/report.html")
