"""Parts of one job that come apart, and launches that meet a run which is only just not there."""

import os
import signal
import time

import pytest
from kit.job import finish, free_port, run, start
from kit.ledger import RECORDED, assert_exact
from kit.loopback import nodes
from kit.until import until

from muster import outcome
from muster.errors import ConfigError
from muster.launcher import loopback
from muster.launcher.spec import Timings
from muster.lease import folder_lease
from muster.lease.folder_lease import Claimant

LINE = (*RECORDED, "batch_size=10", "checkpoint.every_steps=10")
ONCE = """
import os, pathlib, time
from kit.parts.data import Numbered
from muster.train.callbacks.base import Callback
HERE = pathlib.Path(__file__).parent


class Data(Numbered):
    def __init__(self, train):
        while (HERE / "raised").exists() and not (HERE / "go").exists():
            time.sleep(0.05)
        super().__init__(train)


class Once(Callback):
    def on_step_end(self, run):
        if run.step >= 15 and not (HERE / "raised").exists():
            (HERE / "raised").touch()
            raise RuntimeError("once")
"""


@pytest.fixture
def job(tmp_path):
    """A job of up to three nodes, one rank each, whose rendezvous store is in a process of its own."""
    (tmp_path / "ledger").mkdir()

    def make(*overrides, **kwargs):
        kwargs = {"nnodes": "1:3", "cold": False} | kwargs
        slowly = "model._target_=kit.parts.models.Paced"
        return nodes(
            tmp_path / "run",
            *LINE,
            slowly,
            "+model.delay_s=0.07",
            *overrides,
            LEDGER=str(tmp_path / "ledger"),
            **kwargs,
        )

    return make


def send(number, *pids):
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.long
def test_agents_that_were_starved_while_another_formed_a_round_train_with_it(tmp_path, job, monkeypatch):
    """Longer than their keep-alive: the rendezvous has dropped them, and their ranks train on."""
    monkeypatch.setattr(
        loopback, "TIMINGS", Timings()
    )  # of nodes on a network: agents that are slow are no matter here
    with job("max_steps=100000") as cluster:
        first = [cluster.start(), cluster.start()]
        cluster.until(lambda: cluster.world_size() == 2, "both")
        cluster.reach(15)
        cluster.pace(0.5)  # the ranks train on, and need not take the processors from the third
        send(signal.SIGSTOP, *(agent.pid for agent in first))
        cluster.start()
        cluster.until(lambda: "of this job waits for the run" in cluster.log, "wait of the third", timeout_s=150)
        send(signal.SIGCONT, *(agent.pid for agent in first))
        cluster.until(lambda: cluster.world_size() == 3, "all three", timeout_s=240)
        assert all(agent.poll() is None for agent in cluster.agents), cluster.log
        cluster.pace(0.05)
        at = cluster.step()
        cluster.reach(at + 10)
        for agent in cluster.agents:
            agent.send_signal(signal.SIGTERM)
        cluster.ended()
        steps = cluster.result().outcome["step"]
        assert_exact(tmp_path / "ledger", steps=steps, batch_size=10)
        assert [line["step"] for line in cluster.result().lines("train")] == list(range(1, steps + 1))


def test_a_rank_that_waits_for_a_lost_node_makes_way_for_its_replacement(tmp_path, job):
    """The rendezvous host loses its power, and a replacement comes at a new address."""
    with job("max_steps=60", nnodes="1:2", own_store=False) as cluster:
        host = cluster.start()
        cluster.until(lambda: cluster.world_size() == 1, "the host")
        other = cluster.start()
        cluster.gather(2)
        cluster.reach(25)
        cluster.pace(3)
        before = cluster.attempts()
        keeps = host if holder_is(cluster, other) else other
        send(signal.SIGSTOP, keeps.pid, *cluster.workers(keeps))
        cluster.port = free_port()
        began = time.monotonic()
        replacement = cluster.start(host=True)
        cluster.until(lambda: len(cluster.attempts()) > len(before), "training", timeout_s=150)
        assert time.monotonic() - began < 150, "default dist.timeout_s is 300"
        cluster.pace(0.05)
        cluster.until(lambda: replacement.poll() is not None, "end", timeout_s=60)
        assert replacement.returncode == 0, cluster.log
        assert_exact(tmp_path / "ledger", steps=60, batch_size=10)


def holder_is(cluster, agent):
    """Whether rank 0 is the worker of `agent`."""
    [pid] = cluster.workers(agent)
    with open(f"/proc/{pid}/environ") as file:
        return "RANK=0" in file.read().split("\0")


def test_a_launch_while_torchrun_restarts_another_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "once.py").write_text(ONCE)
    line = (
        "data._target_=once.Data",
        "+callbacks.once._target_=once.Once",
        "max_steps=30",
        "checkpoint.every_steps=10",
    )
    first = start(tmp_path / "run", *line, ranks=2, torchrun=("--max-restarts=3",))
    until(lambda: (tmp_path / "raised").exists(), "exception", timeout_s=60)
    for _ in range(2):
        second = run(tmp_path / "run", "max_steps=30", ok=False)
        assert second.code == 2 and "in use by another job" in second.said[0], second.out
    monkeypatch.setattr(
        folder_lease, "is_at_work", lambda _: False
    )  # as on another host, which sees no process of this one
    with pytest.raises(ConfigError, match="in use by another job"):
        folder_lease.look(tmp_path / "run", Claimant("elsewhere", agents=("elsewhere",)))
    (tmp_path / "go").touch()
    ended = finish(first, tmp_path / "run")
    assert ended.code == 0 and ended.outcome["outcome"] == "done", ended.out
    assert ended.events("restart") and not list((tmp_path / "run").glob(".*"))


def test_a_claim_is_given_up_when_its_launcher_is_gone(tmp_path):
    (tmp_path / "once.py").write_text(ONCE)
    line = ("data._target_=once.Data", "+callbacks.once._target_=once.Once", "max_steps=30")
    first = start(tmp_path / "run", *line, ranks=1, torchrun=("--max-restarts=3",))
    until(lambda: (tmp_path / "raised").exists(), "exception", timeout_s=60)
    until(lambda: "restarts" in (tmp_path / "run/.alive").read_text(), "lease keeper", timeout_s=60)
    first.kill()
    first.wait()
    until(lambda: not list((tmp_path / "run").glob(".*")), "end of the claim", timeout_s=60)


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_data_set_whose_constructor_raises_ends_as_a_crash_loop(tmp_path, ranks):
    (tmp_path / "broken.py").write_text(
        "class Data:\n    def __init__(self, train):\n        raise RuntimeError('no such server')\n"
    )
    line = ("data._target_=broken.Data", "max_steps=3")
    result = run(tmp_path / "run", *line, ranks=ranks, torchrun=("--max-restarts=100",), ok=False)
    assert result.code != 0 and "no such server" in result.out
    record = outcome.newest(tmp_path / "run")
    assert record["exit_code"] == 7 and record["outcome"] == "crash_loop" and "no such server" in record["error"], (
        record
    )
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.nightly
def test_failures_before_the_run_is_claimed_are_counted_whatever_they_are(tmp_path):
    """Another error each time; the run that is there is left alone, and its next attempt begins the count anew."""
    done = run(tmp_path / "run", "max_steps=2")
    before = (tmp_path / "run/outcome.json").read_bytes()
    (tmp_path / "broken.py").write_text(
        "import time\nclass Data:\n    def __init__(self, train):\n        raise RuntimeError(f'no such server {time.time()}')\n"
    )
    (tmp_path / "other.py").write_text(
        (tmp_path / "broken.py").read_text().replace("RuntimeError", "\n\n        raise KeyError")
    )
    line = ("max_steps=3", "max_idle_attempts=2")
    codes = [
        run(tmp_path / "run", f"data._target_={name}.Data", *line, ok=False).code
        for name in ("broken", "other", "broken")
    ]
    assert codes == [1, 1, 7] and (tmp_path / "run/outcome.json").read_bytes() == before
    assert run(tmp_path / "run", "max_steps=3").outcome["outcome"] == "done" and done.code == 0
    assert run(tmp_path / "run", "data._target_=broken.Data", *line, ok=False).code == 1
