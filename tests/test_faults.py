"""Faults brought about on real agents and ranks on loopback. Each run must end with every sample in its place."""

import os
import random
import signal
import time

import pytest
import torch
from custom import RECORDED, assert_exact
from launch import finish, reached, run, start, wait_for
from nodes import nodes

LINE = (*RECORDED, "batch_size=10", "checkpoint.every_steps=10")


@pytest.fixture
def ledger(tmp_path):
    folder = tmp_path / "ledger"
    folder.mkdir()
    return folder


@pytest.fixture
def job(tmp_path, ledger):
    """A job of two nodes, one rank each, whose rendezvous store is in a process of its own."""

    def make(*overrides, folder="run", **kwargs):
        return nodes(tmp_path / folder, *LINE, *overrides, LEDGER=str(ledger), **kwargs)

    return make


def assert_clean(cluster, ledger, *, steps):
    """Exact ledger, no step twice, "done", and nothing left behind."""
    assert_exact(ledger, steps=steps, batch_size=10)
    result = cluster.result()
    assert [line["step"] for line in result.lines("train")] == list(range(1, steps + 1))
    assert result.outcome["outcome"] == "done" and result.outcome["exit_code"] == 0
    assert not list(cluster.folder.glob(".*")) and not list((cluster.folder / "checkpoints").glob(".*"))
    cluster.until(lambda: not cluster.left_over(), "end of all processes", timeout_s=15)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def test_killed_workers_cost_nothing(tmp_path, job, ledger):
    """Bit-identical to an undisturbed run of the same world size."""
    dice = random.Random(1)
    with job("max_steps=130") as cluster:
        agents = [cluster.start(), cluster.start()]
        for step in (15, 60):
            cluster.reach(step)
            cluster.next_step(lambda: kill(cluster.workers(dice.choice(agents))[0]))
        assert cluster.ended() == [0, 0], cluster.log
        assert_clean(cluster, ledger, steps=130)
        result = cluster.result()
        assert "gives no sign of life" in result.outcome.get("cause", "") or result.events("restart"), cluster.log
    whole = run(tmp_path / "whole", *LINE, "max_steps=130", ranks=2, env={"LEDGER": str(tmp_path)})
    assert all(torch.equal(weight, result.weights[name]) for name, weight in whole.weights.items())


def test_a_node_is_lost_and_another_joins(job, ledger):
    with job("max_steps=200") as cluster:
        first = cluster.start()
        cluster.start()
        cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both")
        cluster.reach(25)
        cluster.next_step(lambda: cluster.kill_node(first))
        assert cluster.attempts()[-1]["world_size"] == 1
        cluster.next_step(cluster.start)
        assert cluster.attempts()[-1]["world_size"] == 2
        assert cluster.ended() == [-9, 0, 0], cluster.log
        assert_clean(cluster, ledger, steps=200)


def test_a_late_node_is_waited_for(job, ledger):
    with job("max_steps=20", nnodes="2") as cluster:
        cluster.start()
        time.sleep(8)
        cluster.start()
        assert cluster.ended() == [0, 0], cluster.log
        assert [attempt["world_size"] for attempt in cluster.attempts()] == [2]
        assert_clean(cluster, ledger, steps=20)


def test_unequal_processes_per_node(job, ledger):
    with job("max_steps=20", nnodes="2") as cluster:
        cluster.start(nproc=1)
        cluster.start(nproc=2)
        assert cluster.ended() == [0, 0], cluster.log
        assert [attempt["world_size"] for attempt in cluster.attempts()] == [3]
        assert_clean(cluster, ledger, steps=20)


def test_the_rendezvous_host_is_lost(job, ledger):
    """The agent that holds the store takes the others with it; the same commands go on."""
    with job("max_steps=60", nnodes="2", own_store=False) as cluster:
        cluster.start()
        cluster.start()
        cluster.reach(25)
        cluster.kill_node(cluster.agents[0])
        cluster.until(lambda: cluster.agents[1].poll() is not None, "end of the other agent", timeout_s=40)
        cluster.start(host=True)
        cluster.start(host=False)
        assert cluster.ended()[2:] == [0, 0], cluster.log
        assert_clean(cluster, ledger, steps=60)


def test_workers_die_with_their_agent(job, ledger):
    with job("max_steps=60") as cluster:
        agent = cluster.start()
        cluster.reach(15)
        before = cluster.workers(agent)
        kill(agent.pid)
        cluster.until(lambda: not cluster.left_over(), "end of the orphans", timeout_s=5)
        assert before
        cluster.start()
        assert cluster.ended() == [-9, 0], cluster.log
        assert_clean(cluster, ledger, steps=60)


def test_everything_is_killed_at_once(job, ledger):
    with job("max_steps=60") as cluster:
        cluster.start()
        cluster.start()
        cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both")
        cluster.reach(27)
        for agent in cluster.agents:
            cluster.kill_node(agent)
        at = cluster.step()
        cluster.start()
        cluster.start()
        assert cluster.ended()[2:] == [0, 0], cluster.log
        assert cluster.attempts()[-1]["step"] >= at - 11
        assert_clean(cluster, ledger, steps=60)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_and_ended(job, ledger, rank):
    with job("max_steps=60", "dist.timeout_s=6", nnodes="1", nproc=2) as cluster:
        agent = cluster.start()
        cluster.reach(25)
        pid = cluster.workers(agent)[rank]
        seconds = cluster.next_step(lambda: stop(pid))
        assert f"rank {rank} on" in cluster.log and "gives no sign of life while rank" in cluster.log
        assert seconds < 6 + 15  # the figures are in bench/
        assert cluster.ended() == [0], cluster.log
        assert f"rank {rank} on" in cluster.result().events("restart")[0]["cause"]
        assert_clean(cluster, ledger, steps=60)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_deadlocked_rank_says_where_it_stands(job, ledger, rank):
    stuck = ("model._target_=custom.Stuck", f"+model.rank={rank}")
    with job(*stuck, "max_steps=60", "dist.timeout_s=5", nnodes="1", nproc=2) as cluster:
        cluster.start()
        assert cluster.ended() == [0], cluster.log
        cause = cluster.result().events("restart")[0]["cause"]
        assert f"rank {rank} on" in cause and "(step 29)" in cause and "tests/custom.py" in cause and "forward" in cause
        assert "dist.timeout_s=5" in cause
        assert_clean(cluster, ledger, steps=60)


def test_a_stopped_rank_alone_on_its_node_is_ended(job, ledger):
    """Nobody on its node could end it, but the kernel's timer does."""
    with job("max_steps=60", "dist.timeout_s=5") as cluster:
        agents = [cluster.start(), cluster.start()]
        cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both")
        cluster.reach(25)
        pid = cluster.workers(agents[0])[0]
        cluster.next_step(lambda: stop(pid))
        assert cluster.ended() == [0, 0], cluster.log
        assert cluster.attempts()[-1]["world_size"] == 2
        assert_clean(cluster, ledger, steps=60)


def test_what_is_slow_is_no_hang(tmp_path, ledger):
    """A start, a first step and saves that each take longer than the timeout."""
    env = {"LEDGER": str(ledger), "SLOW_S": "4"}
    line = (*LINE, "model._target_=custom.SlowToStart", "max_steps=25", "dist.timeout_s=2")
    result = run(tmp_path / "run", *line, ranks=2, module="slow", env=env)
    assert not result.events("restart") and len(result.events("checkpoint")) == 3, result.out
    assert_exact(ledger, steps=25, batch_size=10)


def test_an_agent_sleeps_and_wakes(job, ledger):
    """Longer than its keep-alive: the others may go on without it; it joins again, or nobody noticed."""
    with job("max_steps=250") as cluster:
        agents = [cluster.start(), cluster.start()]
        cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both")
        cluster.reach(25)
        stop(agents[1].pid)
        time.sleep(6)
        os.kill(agents[1].pid, signal.SIGCONT)
        cluster.ended()
        assert 0 in [agent.returncode for agent in agents], cluster.log
        assert_clean(cluster, ledger, steps=250)


@pytest.mark.parametrize("preempted", [[0], [1], [0, 1]])
def test_preempted_nodes(job, ledger, preempted):
    """SIGTERM to one agent or to all: one checkpoint, everybody leaves at once, no step is lost."""
    with job("max_steps=80", "checkpoint.every_steps=100000", nnodes="2") as cluster:
        agents = [cluster.start(), cluster.start()]
        cluster.reach(20)
        began = time.monotonic()
        for index in preempted:
            agents[index].send_signal(signal.SIGTERM)
        cluster.until(lambda: any(agent.poll() is not None for agent in agents), "end of an agent", timeout_s=20)
        outcome = cluster.result().outcome
        assert outcome["outcome"] == "preempted" and outcome["exit_code"] == 75
        assert outcome["step"] == cluster.step() >= 20
        if len(preempted) == 1:  # torchrun restarts the workers of the other node, which waits for the lost one
            left = agents[1 - preempted[0]]
            if left.poll() is None:
                left.send_signal(signal.SIGTERM)
        cluster.ended(timeout_s=40)
        assert time.monotonic() - began < 40
        cluster.start()
        cluster.start()
        assert cluster.ended()[2:] == [0, 0], cluster.log
        assert cluster.attempts()[-1]["step"] == outcome["step"]
        assert not cluster.result().events("restart"), cluster.log
        assert_clean(cluster, ledger, steps=80)


@pytest.mark.parametrize("when", ["start-up", "evaluation", "save", "twice"])
def test_sigterm_at_an_inconvenient_moment(tmp_path, ledger, when):
    """The same end: one valid checkpoint, or none yet; no traceback of ours; exact afterwards."""
    env = {"LEDGER": str(ledger), "SLOW_S": "1.5" if when == "save" else "0"}
    line = (*LINE, "max_steps=60", "eval.every_steps=20", "data._target_=custom.SlowToTest")
    process = start(tmp_path / "run", *line, ranks=2, env=env, module="slow")
    if when == "start-up":
        time.sleep(2.0)
    else:
        at = {"evaluation": 20, "save": 10, "twice": 15}[when]
        wait_for(tmp_path / "run", reached(at), process=process)
        time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    if when == "twice":
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    stopped = finish(process, tmp_path / "run", timeout_s=60)
    assert stopped.code != 0
    ours = [line for line in stopped.out.splitlines() if line.startswith("muster: ")]
    assert all("preempted" in line for line in ours) and len(ours) <= 1, stopped.out
    outcome = stopped.outcome if when != "start-up" else {}
    if outcome:
        assert outcome["outcome"] == "preempted", stopped.out
        assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) <= 2
    result = run(tmp_path / "run", *line, ranks=2, env=env, module="slow")
    if outcome:
        assert result.events("resume")[-1]["step"] == outcome["step"]
    assert_exact(ledger, steps=60, batch_size=10)
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


def test_preempted_for_ever_ends(tmp_path):
    """Every attempt is stopped before it has done a step."""
    line = ("model._target_=custom.SlowToStart", "data._target_=custom.Numbered", "max_steps=50")
    env, codes = {"SLOW_S": "3"}, []
    for _ in range(5):
        process = start(tmp_path / "run", *line, env=env)
        began = time.monotonic()
        while process.poll() is None and not (tmp_path / "run/config.yaml").exists() and time.monotonic() - began < 30:
            time.sleep(0.05)
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        codes.append(finish(process, tmp_path / "run").code)
    assert codes == [75, 75, 75, 75, 7] or codes[-1] == 7, codes


def test_a_killed_loader_worker(job, ledger):
    with job("max_steps=60", "loader.num_workers=1", nnodes="1", nproc=2) as cluster:
        agent = cluster.start()
        cluster.reach(25)
        parent = cluster.workers(agent)[0]
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            child = int(file.read().split()[0])
        cluster.next_step(lambda: kill(child))
        assert cluster.ended() == [0], cluster.log
        assert "DataLoader worker" in cluster.result().events("restart")[0]["cause"]
        assert_clean(cluster, ledger, steps=60)


def test_out_of_memory_again_and_again(tmp_path):
    hungry = ("model._target_=custom.Hungry", "data._target_=custom.Numbered", "max_steps=9", "max_idle_attempts=1")
    result = run(tmp_path / "run", *hungry, ranks=2, torchrun=("--max-restarts=10",), ok=False)
    assert result.outcome["exit_code"] == 7 and "memory" in result.outcome["error"], result.out
