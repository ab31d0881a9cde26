"""Faults brought about on real agents and ranks on loopback. Each run must end with every sample in its place."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from kit.fake_cuda import ON_FAKE
from kit.job import QUIET, Result, environment, finish, free_port, on_nodes, pace, reached, run, start, wait_for
from kit.ledger import RECORDED, assert_exact, recorded
from kit.loopback import children, nodes
from kit.until import until

from muster.data.loader import _plainly
from muster.launcher.spec import UNSHARED
from muster.process import without_sigchld
from muster.sample_plan import Plan

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
        return nodes(tmp_path / folder, *LINE, *pace(0.05), *overrides, LEDGER=str(ledger), cold=False, **kwargs)

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
    with job("max_steps=100", nnodes="2") as cluster:
        agents = [cluster.start(), cluster.start()]
        for step in (15, 45):
            cluster.reach(step)
            with cluster.slowly():
                cluster.next_step(lambda: kill(cluster.workers(dice.choice(agents))[0]))
        assert cluster.ended() == [0, 0], cluster.log
        assert_clean(cluster, ledger, steps=100)
        result = cluster.result()
        assert "sends no heartbeat" in result.outcome.get("cause", "") or result.events("restart"), cluster.log
    whole = run(tmp_path / "whole", *LINE, "max_steps=100", "+model.delay_s=0", ranks=2, env={"LEDGER": str(tmp_path)})
    assert all(torch.equal(weight, result.weights[name]) for name, weight in whole.weights.items())


def test_a_node_is_lost_and_another_joins(job, ledger):
    with job("max_steps=180") as cluster:
        first = cluster.start()
        cluster.start()
        cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both")
        cluster.reach(25)
        at = cluster.step()
        with cluster.slowly():
            cluster.next_step(lambda: cluster.kill_node(first))
            assert cluster.attempts()[-1]["world_size"] == 1
            assert cluster.attempts()[-1]["step"] >= at, "no step is repeated"
            cluster.start()
            cluster.until(lambda: cluster.world_size() == 2, "both again")
        assert cluster.ended() == [-9, 0, 0], cluster.log
        assert_clean(cluster, ledger, steps=180)


@pytest.mark.nightly(but=["1.5"])
@pytest.mark.parametrize("delay_s", [0.5, 1.0, 1.5, 2.0, 2.5])
def test_a_node_is_lost_at_any_moment_of_the_start(job, ledger, delay_s):
    """Before the agents meet, while the ranks do, or in the first steps; one that comes in its place is all it takes.

    An agent that waits for a word of the lost one gives up after `read_timeout`: that is torchrun's, and its launcher's to mend.
    """
    with job("max_steps=40") as cluster:
        agents = [cluster.start(), cluster.start()]
        time.sleep(delay_s)
        cluster.kill_node(agents[int(10 * delay_s) % 2])
        cluster.start()
        if 0 not in cluster.ended():
            cluster.start()
        assert 0 in cluster.ended(), cluster.log
        assert_clean(cluster, ledger, steps=40)


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
        with cluster.slowly():
            cluster.kill_node(cluster.agents[0])
            cluster.until(lambda: cluster.agents[1].poll() is not None, "end of the other agent", timeout_s=40)
        cluster.start(host=True)
        cluster.start(host=False)
        assert cluster.ended()[2:] == [0, 0], cluster.log
        assert_clean(cluster, ledger, steps=60)


def test_the_rendezvous_host_falls_silent(job, ledger):
    """As when its power or its link goes: no connection is closed, and torchrun's agents would read from it for 15 minutes."""
    with job("max_steps=60", "dist.timeout_s=4", nnodes="2", own_store=False) as cluster:
        cluster.start()
        cluster.start()
        cluster.reach(25)
        with cluster.slowly():
            for pid in cluster.node(cluster.agents[0]):
                stop(pid)
            cluster.until(lambda: cluster.agents[1].poll() is not None, "end of the other agent", timeout_s=70)
        assert "torchrun's agent hangs" in cluster.log
        cluster.kill_node(cluster.agents[0])
        cluster.start(host=True)
        cluster.start(host=False)
        assert cluster.ended()[2:] == [0, 0], cluster.log
        assert_clean(cluster, ledger, steps=60)


def test_workers_die_with_their_agent(job, ledger):
    with job("max_steps=60") as cluster:
        agent = cluster.start()
        cluster.reach(15)
        with cluster.slowly():
            assert cluster.workers(agent)
            kill(agent.pid)
            cluster.until(lambda: not cluster.left_over(), "end of the orphans", timeout_s=30)
        assert cluster.result().outcome["outcome"] == "running", "the kernel ended them, before they knew"
        cluster.start()
        assert cluster.ended() == [-9, 0], cluster.log
        assert_clean(cluster, ledger, steps=60)


def committed(cluster):
    """The steps of the checkpoints so far."""
    return [0, *(line["step"] for line in cluster.lines() if line.get("event") == "checkpoint")]


def test_everything_is_killed_at_once(job, ledger):
    with job("max_steps=60") as cluster:
        cluster.start()
        cluster.start()
        cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both")
        cluster.reach(27)
        cluster.until(lambda: max(committed(cluster)) >= 20, "checkpoint of step 20")
        with cluster.slowly():
            for pid in [pid for agent in cluster.agents for pid in cluster.node(agent)]:
                with contextlib.suppress(ProcessLookupError):
                    kill(pid)
            for agent in cluster.agents:
                agent.wait()
        newest = max(committed(cluster))
        cluster.start()
        cluster.start()
        assert cluster.ended()[2:] == [0, 0], cluster.log
        assert cluster.attempts()[-1]["step"] >= newest >= 20
        assert_clean(cluster, ledger, steps=60)


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_and_ended(job, ledger, rank):
    with job("max_steps=60", "dist.timeout_s=6", "dist.survive=false", nnodes="1", nproc=2) as cluster:
        agent = cluster.start()
        cluster.reach(25)
        pid = cluster.workers(agent)[rank]
        with cluster.slowly():
            seconds = cluster.next_step(lambda: stop(pid))
        waited = f"( while rank {1 - rank} waited for dist.timeout_s=6)?"  # unless its collective has failed before
        assert re.search(rf"rank {rank} on [^:]+ sends no heartbeat{waited}: killed, stopped", cluster.log)
        assert seconds < 6 + 22  # torchrun ends what does not end by itself after 30 s; the figures are in bench/
        assert cluster.ended() == [0], cluster.log
        assert f"rank {rank} on" in cluster.result().events("restart")[0]["cause"]
        assert_clean(cluster, ledger, steps=60)


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_deadlocked_rank_says_where_it_stands(job, ledger, rank):
    stuck = ("model._target_=kit.parts.models.Stuck", f"+model.rank={rank}")
    with job(*stuck, "max_steps=60", "dist.timeout_s=5", "dist.survive=false", nnodes="1", nproc=2) as cluster:
        cluster.start()
        assert cluster.ended() == [0], cluster.log
        cause = cluster.result().events("restart")[0]["cause"]
        assert f"rank {rank} on" in cause and "(step 29)" in cause and "parts/models.py" in cause and "forward" in cause
        assert "dist.timeout_s=5" in cause
        assert_clean(cluster, ledger, steps=60)


@pytest.mark.nightly
def test_a_stopped_rank_alone_on_its_node_is_ended(job, ledger):
    """Nobody on its node could end it, but the kernel's timer does."""
    with job("max_steps=60", "dist.timeout_s=5") as cluster:
        agents = [cluster.start(), cluster.start()]
        cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both")
        cluster.reach(25)
        at, pid = cluster.step(), cluster.ranks(agents[0])[0]
        with cluster.slowly():
            stop(pid)
            cluster.until(lambda: cluster.result().events("survived"), "its birth")
        cluster.until(lambda: cluster.step() > at + 5, "steps after the stop")
        assert cluster.ended() == [0, 0], cluster.log
        assert [attempt["world_size"] for attempt in cluster.attempts()][-1] == 2
        assert cluster.result().events("survived"), cluster.log
        assert_clean(cluster, ledger, steps=60)


@pytest.mark.nightly(but=["by SIGKILL"])
@pytest.mark.parametrize(
    "how, said", [("false", "rank 0 has a bug"), ("true", "rank 0 on")], ids=["by an error", "by SIGKILL"]
)
def test_a_rank_that_waits_in_c_leaves_when_another_fails(tmp_path, how, said):
    """Its SIGTERM handler does not run, and torchrun kills it after 30 s: so long was each crash of a rank on NCCL."""
    fails = (
        "+callbacks.fails._target_=kit.parts.dying.FirstFails",
        "+callbacks.fails.at=3",
        f"+callbacks.fails.kills={how}",
    )
    result = run(tmp_path / "run", *fails, "max_steps=9", "dist.survive=false", ranks=2, ok=False)
    assert result.code == 1 and time.time() - result.events("start")[0]["time"] < 25, result.out
    assert said in result.out and result.outcome["step"] == 3, result.out


@pytest.mark.nightly
@pytest.mark.parametrize("kills, says", [("true", "while rank 1 waited in"), ("false", "rank 0 has a bug")])
def test_the_other_node_of_a_static_rendezvous_leaves_when_the_first_fails(tmp_path, kills, says):
    """Its launcher tells it nothing, the store ends with the first node, and on NCCL the rank may wait in C for ever."""
    fails = (
        "+callbacks.fails._target_=kit.parts.dying.FirstFails",
        "+callbacks.fails.at=3",
        f"+callbacks.fails.kills={kills}",
    )
    kit = (f"output_dir={tmp_path}/run", "device=cuda", "max_steps=9", *QUIET, *fails)
    agents = on_nodes("train", *kit, folders=[tmp_path] * 2, env=ON_FAKE)
    try:
        said = [node.communicate(timeout=90)[0] for node in agents]
        began = Result(0, "", tmp_path / "run", 0).events("start")[0]["time"]
        assert time.time() - began < 29, "torchrun kills what does not end after 30 s"
        assert [node.returncode for node in agents] == [1, 1]
        assert says in said[1], said[1]
    finally:
        for node in agents:
            node.kill()
            node.wait()


def test_what_is_slow_is_no_hang(tmp_path, ledger):
    """A start, a first step and saves that each take longer than the timeout."""
    env = {"LEDGER": str(ledger), "SLOW_S": "6"}
    line = (*LINE, "model._target_=kit.parts.models.SlowToStart", "max_steps=15", "dist.timeout_s=5")
    result = run(tmp_path / "run", *line, ranks=2, module="kit.slow", env=env)
    assert not result.events("restart") and len(result.events("checkpoint")) == 2, result.out
    assert "waiting for" in result.out and "which may take" in result.out
    assert_exact(ledger, steps=15, batch_size=10)


def test_an_agent_sleeps_and_wakes(job, ledger):
    """Longer than its keep-alive: the others may go on without it; it joins again, or nobody noticed."""
    with job("max_steps=200") as cluster:
        agents = [cluster.start(), cluster.start()]
        cluster.until(lambda: cluster.attempts() and cluster.attempts()[-1]["world_size"] == 2, "both")
        cluster.reach(25)
        with cluster.slowly():
            stop(agents[1].pid)
            time.sleep(6)
            os.kill(agents[1].pid, signal.SIGCONT)
        cluster.ended()
        assert 0 in [agent.returncode for agent in agents], cluster.log
        assert_clean(cluster, ledger, steps=200)


@pytest.mark.nightly(but=["preempted0"])
@pytest.mark.parametrize("preempted", [[0], [0, 1]])
def test_preempted_nodes(job, ledger, preempted):
    """SIGTERM to one agent or to all: one checkpoint, everybody leaves at once, no step is lost."""
    with job("max_steps=80", "checkpoint.every_steps=100000", nnodes="2") as cluster:
        agents = [cluster.start(), cluster.start()]
        cluster.reach(20)
        began = time.monotonic()
        with cluster.slowly():
            for index in preempted:
                cluster.tell(agents[index])
            cluster.until(lambda: any(agent.poll() is not None for agent in agents), "end of an agent", timeout_s=40)
        if len(preempted) == 1:  # torchrun restarts the workers of the other node, which waits for the lost one
            left = agents[1 - preempted[0]]
            if left.poll() is None:
                cluster.tell(left)
        cluster.ended(timeout_s=60)
        assert time.monotonic() - began < 60
        outcome, before = cluster.result().outcome, len(cluster.attempts())  # of processes that have all ended
        assert outcome["outcome"] == "preempted" and outcome["exit_code"] == 75
        assert outcome["step"] == cluster.step() >= 20
        cluster.start()
        cluster.start()
        assert cluster.ended()[2:] == [0, 0], cluster.log
        assert (
            cluster.attempts()[before]["step"] == outcome["step"]
        )  # torchrun may begin once more as the second node joins
        assert not cluster.result().events("restart"), cluster.log
        assert_clean(cluster, ledger, steps=80)


@pytest.mark.nightly(but=["evaluation"])
@pytest.mark.parametrize("when", ["start-up", "evaluation", "save", "twice", "with loader workers"])
def test_sigterm_at_an_inconvenient_moment(tmp_path, ledger, when):
    """The same end: one valid checkpoint, or none yet; no traceback of ours; exact afterwards."""
    env = {"LEDGER": str(ledger), "SLOW_S": "1" if when == "save" else "0"}
    line = (*LINE, "eval.every_steps=20", "data._target_=kit.parts.data.SlowToTest")
    line += (f"loader.num_workers={int(when == 'with loader workers')}",)  # torchrun signals them too
    slowly = (*line, *pace(0.1), "max_steps=100000")
    process = start(tmp_path / "run", *slowly, ranks=2, env=env, module="kit.slow", cold=when == "start-up")
    if when == "start-up":
        time.sleep(2.0)
    else:
        at = {"evaluation": 20, "save": 10, "twice": 15, "with loader workers": 15}[when]
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
        saved = {int(path.name[5:]) for path in (tmp_path / "run/checkpoints").glob("step-*")}
        assert saved == {*sorted({*range(10, outcome["step"], 10), outcome["step"]})[-3:]}, "one for all signals"
    steps = max(40, outcome.get("step", 0) + 10)
    result = run(tmp_path / "run", *line, f"max_steps={steps}", ranks=2, env=env, module="kit.slow")
    if outcome:
        assert result.events("resume")[-1]["step"] == outcome["step"]
    assert_exact(ledger, steps=steps, batch_size=10)
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


@pytest.mark.nightly
def test_preempted_for_ever_ends(tmp_path):
    """Every attempt is stopped before it has done a step."""
    line = ("model._target_=kit.parts.models.SlowToStart", "data._target_=kit.parts.data.Numbered", "max_steps=50")
    line += ("max_idle_preemptions=3",)
    env, codes = {"SLOW_S": "5"}, []
    written = tmp_path / "run/config.yaml"  # after the claim, and before the model, which takes five seconds
    for _ in range(5):
        written.unlink(missing_ok=True)
        process = start(tmp_path / "run", *line, env=env, cold=True)
        until(lambda: process.poll() is not None or written.exists(), "start", timeout_s=60)  # noqa: B023
        process.send_signal(signal.SIGTERM)
        codes.append(finish(process, tmp_path / "run").code)
    assert codes == [75, 75, 75, 75, 7] or codes[-1] == 7, codes


def test_a_killed_loader_worker(job, ledger):
    with job("max_steps=60", "loader.num_workers=1", nnodes="1", nproc=2) as cluster:
        agent = cluster.start()
        cluster.reach(25)
        child = children(cluster.ranks(agent)[0])[0]
        with cluster.slowly():
            cluster.next_step(lambda: kill(child))
        assert cluster.ended() == [0], cluster.log
        assert "DataLoader worker" in cluster.result().events("restart")[0]["cause"]
        assert_clean(cluster, ledger, steps=60)


def test_a_worker_that_dies_while_a_failure_is_reported_does_not_end_the_report():
    def heard(*_):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    before = signal.signal(signal.SIGCHLD, heard)
    try:
        with without_sigchld():
            subprocess.run(["true"], check=True)
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            subprocess.run(["true"], check=True)
            until(lambda: False, "signal", timeout_s=60)  # another thread may get it, and tell this one later
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.unit
def test_a_workers_broken_pipe_waits_for_the_word_of_its_death():
    def fetched():
        yield 1
        raise EOFError

    def heard(*_):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    before = signal.signal(signal.SIGALRM, heard)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            list(_plainly(fetched()))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_out_of_memory_again_and_again(tmp_path):
    hungry = (
        "model._target_=kit.parts.models.Hungry",
        "data._target_=kit.parts.data.Numbered",
        "max_steps=9",
        "max_idle_attempts=1",
    )
    result = run(tmp_path / "run", *hungry, ranks=2, torchrun=("--max-restarts=10",), ok=False)
    assert result.outcome["exit_code"] == 7 and "memory" in result.outcome["error"], result.out


@pytest.mark.nightly(but=["0"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_ends_the_run_or_gives_its_place_to_the_next(tmp_path, workers):
    """The same substitutes at every world size, each said once, and not without bound."""
    line = (
        *LINE,
        "data._target_=kit.parts.data.Spoiled",
        "max_steps=100",
        "+model.delay_s=0",
        f"loader.num_workers={workers}",
    )
    ledgers = {}
    for ranks in (1, 2):
        (tmp_path / f"ledger-{ranks}").mkdir()
        result = run(
            tmp_path / str(ranks), *line, "loader.on_bad_sample=skip", ranks=ranks, env={"LEDGER": str(tmp_path / f"ledger-{ranks}")}
        )  # fmt: skip
        ledgers[ranks] = recorded(tmp_path / f"ledger-{ranks}")
        assert len(set(result.said)) == 3, result.out
        assert any("sample 500 cannot be read" in line for line in result.said), result.out
    plan = Plan(1000, 10, 0)
    substitute = {3: 5, 4: 5, 500: 501}
    for step in range(100):
        wanted = [substitute.get(sample, sample) for sample in plan.batch(step).tolist()]
        assert ledgers[1][step] == ledgers[2][step] == wanted
    env = {"LEDGER": str(tmp_path)}
    bounded = run(
        tmp_path / "bounded", *line, "loader.on_bad_sample=skip", "loader.max_bad_samples=2", ok=False, env=env
    )
    assert bounded.code == 3 and "loader.max_bad_samples=2" in bounded.said[-1], bounded.out


def test_a_spoiled_picture_is_named(tmp_path):
    from PIL import Image

    for split in ("train", "val"):
        for kind in ("a", "b"):
            (tmp_path / "pictures" / split / kind).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 40), (number * 50, 0, 0)).save(tmp_path / f"pictures/{split}/{kind}/{number}.png")
    bad = tmp_path / "pictures/train/a/2.png"
    bad.write_bytes(bad.read_bytes()[:60])
    line = (
        "data=imagefolder",
        f"data.root={tmp_path / 'pictures'}",
        "data.image_size=32",
        "model=convnet",
        "max_steps=4",
    )
    for workers in (0, 1):
        result = run(tmp_path / f"run-{workers}", *line, f"loader.num_workers={workers}", ok=False)
        assert result.code == 3 and len(result.said) == 1 and str(bad) in result.said[0], result.out
        assert "Traceback" not in result.said[0]


def limited(tmp_path, prologue, *overrides):
    """A run whose shell has first carried out `prologue`."""
    line = [sys.executable, "-m", "train", f"output_dir={tmp_path / 'run'}", *overrides]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{prologue} && exec "$@"', "sh", *line],
        env=environment(), capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("muster: ")], done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
def test_too_little_shared_memory(tmp_path):
    shm = "mount -t tmpfs -o size=64k none /dev/shm"
    code, said, out = limited(tmp_path, shm, "data=synthetic", "loader.num_workers=1", "max_steps=5", "model=convnet")
    assert code == 2 and len(said) == 1 and "/dev/shm" in said[0], out


@pytest.mark.skipif(os.getuid() != 0, reason="unshare needs root")
def test_too_few_file_descriptors(tmp_path):
    code, said, out = limited(tmp_path, "ulimit -n 24", "loader.num_workers=8", "max_steps=5")
    assert code == 2 and len(said) == 1 and "ulimit -n" in said[0], out


def test_a_port_that_is_taken(tmp_path):
    """Another job's rank 0 cannot listen; a rank that meets a stranger there does not wait for ever."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(stranger.getsockname()[1])}
        overrides = ("max_steps=2", "dist.start_timeout_s=8")
        ranks = [start(tmp_path / "run", *overrides, env={**env, "RANK": str(rank)}) for rank in (0, 1)]
        results = [finish(process, tmp_path / "run", timeout_s=60) for process in ranks]
    for rank, result in enumerate(results):
        says = f"rank {rank} cannot reach the rendezvous store" if rank else "is in use by another process here"
        assert result.code == 2 and says in result.said[0], result.out


THIEF = """
import os, socket, sys
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    stranger = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    os.set_inheritable(stranger.fileno(), True)
os.execv(sys.executable, [sys.executable, "-m", "train", *sys.argv[1:]])
"""


@pytest.mark.nightly
def test_a_port_that_another_process_takes_after_torchrun_found_it_free(tmp_path):
    """All ranks start again, at another port; without restarts left the launch ends soon, and says why."""
    (tmp_path / "thief.py").write_text(THIEF)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for restarts, expected in ((1, 0), (0, 1)):
        folder = tmp_path / f"run-{restarts}"
        begun = time.monotonic()
        done = subprocess.run(
            [*line, f"--max-restarts={restarts}", "thief.py", f"output_dir={folder}", "max_steps=2", *QUIET],
            env=environment(**UNSHARED), cwd=tmp_path, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        out = done.stdout + done.stderr
        assert done.returncode == expected and time.monotonic() - begun < 50, out
        assert len([text for text in out.splitlines() if text.startswith("muster: ")]) == 1, out
        assert "was free when torchrun chose it, and is in use by another process now" in out


def test_clocks_that_differ_are_said(tmp_path):
    port = free_port()
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        start(tmp_path / "run", "max_steps=2", env={**env, "RANK": str(rank)}, module=("train", "kit.skewed")[rank])
        for rank in (0, 1)
    ]
    results = [finish(process, tmp_path / "run", timeout_s=60) for process in ranks]
    assert [result.code for result in results] == [0, 0], results[0].out + results[1].out
    assert "are 60 s apart" in results[0].said[0] and not results[1].said
