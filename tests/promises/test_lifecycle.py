"""The states of an attempt: which follows which, and how each is undone."""

import pickle
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kit.until import until

from muster import outcome
from muster.attempt import lifecycle
from muster.attempt.lifecycle import FOLLOWS, Ending, Lifecycle, State
from muster.errors import DataError, RankLost
from muster.faults.preemption import Preemption
from muster.lease.open_folder import RunOptions, open_folder

pytestmark = pytest.mark.unit


class Alone:
    """The group of one rank, which notes how it was left."""

    rank, size, is_first, device, calls = 0, 1, True, torch.device("cpu"), Counter()
    attempt, agents = "attempt", ["agent"]
    environment = SimpleNamespace(local_world_size=1, nodes=1)

    def __init__(self, said):
        self.said = said
        self.store_keys = SimpleNamespace(claim_failure=lambda record: (True, record))

    def on_first(self, ask):
        return ask()

    def broadcast(self, value):
        return value

    def together(self, failure):
        if failure:
            raise failure

    def close(self):
        self.said.append("group closed")

    def leave(self, *, gone):
        self.said.append("group left")


def restored(folder, said):
    """An attempt whose run is at step 7."""
    life = Lifecycle(folder, Preemption(), max_idle_attempts=3)
    life.meet(Alone(said), timeout_s=60)
    life.claim(RunOptions(folder), opens=partial(open_folder, refusal=lambda saved: None))
    life.on_end(lambda: said.append("strategy closed"), failed=lambda: said.append("strategy left"))
    life.restored(SimpleNamespace(step=7), report=lambda: said.append("report"))
    return life


def test_every_state_can_end_and_each_follows_another():
    assert FOLLOWS[State.ended] == {*State} and {*FOLLOWS} == {*State} - {State.started}
    life = Lifecycle("run", Preemption())
    with pytest.raises(AssertionError, match="started -> restored"):
        life.restored(SimpleNamespace(step=0), report=None)


def test_a_run_that_is_done_is_recorded_reported_and_undone_in_order(tmp_path):
    said = []
    with restored(tmp_path, said) as life:
        assert life.run().begin("step", 7)
        assert outcome.last(tmp_path).outcome == "running"
        life.end(Ending(7, 7))
        assert said == ["report"]
    assert said == ["report", "strategy closed", "group closed"]
    assert life.exit_code == 0 and life.state is State.ended
    assert outcome.last(tmp_path).outcome == "done" and not list(tmp_path.glob(".*"))


def test_a_preempted_run_ends_like_one_that_is_done(tmp_path, capfd):
    said = []
    with restored(tmp_path, said) as life:
        peers = life.run()
        life.preemption.request()
        assert not peers.begin("step", 7) and peers.agreement.is_reached
        life.end(Ending(7, 9, preempted="stopped at step 7"))
    assert said == ["report", "strategy closed", "group closed"]
    assert capfd.readouterr().err == "muster: preempted: stopped at step 7\n"
    record = outcome.last(tmp_path)
    assert (life.exit_code, record.exit_code, record.outcome, record.step) == (75, 75, "preempted", 7)
    assert record.error == "stopped at step 7" and not list(tmp_path.glob(".*"))


def test_after_an_error_nothing_is_waited_for(tmp_path, capfd):
    said = []
    with restored(tmp_path, said) as life:
        life.run()
        raise DataError("no such sample")
    assert said == ["report", "strategy left", "group left"]
    assert (life.exit_code, outcome.last(tmp_path).outcome) == (3, "data_error")
    assert capfd.readouterr().err == "muster: data error: no such sample\n"


def test_an_undoing_that_fails_turns_the_end_into_a_failure(tmp_path):
    said = []

    def broken():
        raise RuntimeError("connection reset")

    with restored(tmp_path, said) as life:
        life.on_end(broken)
        life.run()
        life.end(Ending(7, 7))
    assert said == ["report", "strategy left", "group left"]
    assert life.exit_code == 1 and "connection reset" in outcome.last(tmp_path).error


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lost_peer_ends_the_process_from_another_thread(tmp_path, monkeypatch, device):
    """On GPUs with the last collectives beside the record."""
    said, ended = [], []
    life = restored(tmp_path, said)
    life.run()
    monkeypatch.setattr(Alone, "device", torch.device(device))

    def leave(code, **_):
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr(lifecycle, "end", leave)
    with pytest.raises(SystemExit):
        life.lose(RankLost("rank 1 sends no heartbeat", rank=1, host="n2"))
    until(lambda: ended, "end of the process", timeout_s=60)
    record = outcome.last(tmp_path)
    assert (ended, record.outcome, record.rank, record.failed_host) == ([1], "rank_lost", 1, "n2")
    assert said == ["report", "strategy left", "group left"]
    assert record.flight_recorder == ("flight-recorder-attempt" if device == "cuda" else None)
    kept = [pickle.loads(path.read_bytes()) for path in tmp_path.glob("flight-recorder-*/rank_0")]
    assert len(kept) == (device == "cuda") and all("version" in each for each in kept)
