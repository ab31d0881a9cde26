"""The batch scripts and submit.py on a real Slurm of three hosts."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from kit import script as mine
from kit.deaths import kill_rank
from kit.docker import CACHE, CI, skip
from kit.job import ROOT, Job, Result, environment, run
from kit.ledger import RECORDED, assert_exact
from kit.until import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
SLOW = (
    *RECORDED,
    "batch_size=10",
    "log.every_steps=1",
    "log.report=false",
    "log.tensorboard=false",
    "dist.timeout_s=20",
    "model._target_=kit.parts.models.Paced",
)


def step(folder):
    return Job(folder).step()


def reach(folder, target, timeout_s=120):
    Job(folder).reach(target, timeout_s=timeout_s)


def result(folder):
    return Result(0, "", folder, 0)


def logs(checkout):
    return "\n".join(path.read_text() for path in sorted((checkout / "slurm/logs").glob("*.log")))


@pytest.fixture
def ledger(tmp_path):
    folder = tmp_path / "ledger"
    folder.mkdir()
    Job(folder).pace(0.05)
    return folder


def slowly(ledger):
    """For a block in which Slurm is told something: under load it may take half a minute to do it."""
    return Job(ledger).slowly()


def test_every_directive_is_one():
    """`# SBATCH` with a blank is an inert comment, and one after the first command is ignored."""
    for script in (ROOT / "slurm").glob("*.sbatch"):
        lines = script.read_text().splitlines()
        assert not [line for line in lines if re.match(r"#\s+SBATCH", line)], script
        first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
        assert all(n < first for n, line in enumerate(lines) if line.startswith("#SBATCH"))
        assert sum(line.startswith("#SBATCH") for line in lines) >= 6


@pytest.mark.nightly
def test_the_doctor_visits_two_nodes(slurm, checkout):
    """Both look, and the folder that they would write to is shared."""
    job = slurm.sbatch(checkout, "output_dir=runs/visited", script="slurm/doctor.sbatch")
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), logs(checkout)
    found = json.loads((checkout / "runs/doctor.json").read_text())
    assert found["ok"] and len({rank["host"] for rank in found["checks"][0]["ranks"]}) == 2
    alone = slurm.sbatch(checkout, "output_dir=runs/visited", "--expect=3", script="slurm/doctor.sbatch")
    assert slurm.ended(alone)["JobState"] == "FAILED"
    assert "2 of 3 ranks are here" in logs(checkout)


def test_two_nodes_train_as_one_process_does(slurm, checkout, tmp_path):
    """The same losses and weights, bit for bit, as one process on one machine; two jobs at once, on the same nodes."""
    common = ("max_steps=30", "log.every_steps=1", "batch_size=50", "virtual_world_size=4")
    jobs = [slurm.sbatch(checkout, *common, f"name={name}", f"seed={seed}") for name, seed in (("a", 0), ("b", 1))]
    for job in jobs:
        state = slurm.ended(job)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), logs(checkout)
    for name, seed in (("a", 0), ("b", 1)):
        plain = run(tmp_path / name, *common, f"seed={seed}", ranks=1)
        ours = result(checkout / "runs" / name)
        assert ours.events("start")[0]["world_size"] == 2
        assert (ours.losses, ours.sha256) == (plain.losses, plain.sha256)


def test_a_wrong_override_ends_at_once(slurm, checkout):
    job = slurm.sbatch(checkout, "lr=3")
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0")
    assert "did you mean optimizer.lr?" in logs(checkout) and state["Restarts"] == "0"
    assert state["RunTime"] < "00:00:30", state


def test_usr1_saves_requeues_and_resumes(slurm, checkout, ledger):
    folder = checkout / "runs/run"
    job = slurm.sbatch(checkout, *SLOW, "max_steps=200", "checkpoint.every_steps=1000", LEDGER=str(ledger))
    reach(folder, 40)
    with slowly(ledger):
        slurm.on("ctl", "scancel", "--signal=USR1", "--batch", job)
        slurm.restarted(job)
    state = slurm.ended(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), logs(checkout)
    assert result(folder).events("preempted") and result(folder).events("resume")[0]["step"] >= 40
    assert_exact(ledger, steps=200, batch_size=10)
    assert "start: " in logs(checkout), "the log of the first attempt was truncated"


@pytest.mark.nightly
def test_requeue_and_preemption_resume(slurm, checkout, ledger):
    """scontrol requeue, then a job of a higher partition that needs the nodes: both send SIGTERM."""
    folder, steps = checkout / "runs/run", ("max_steps=300", "checkpoint.every_steps=10")
    job = slurm.sbatch(checkout, *SLOW, *steps, LEDGER=str(ledger))
    reach(folder, 30)
    with slowly(ledger):
        slurm.on("ctl", "scontrol", "requeue", job)
        slurm.restarted(job)
    at = step(folder)
    reach(folder, at + 20)
    with slowly(ledger):
        slurm.on(
            "ctl", "sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"
        )
        slurm.restarted(job, times=2)
    state = slurm.ended(job, timeout_s=200)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2"), logs(checkout)
    assert_exact(ledger, steps=300, batch_size=10)


@pytest.mark.nightly
def test_a_node_whose_ranks_die_often_is_left_out_of_the_next_attempt(slurm, checkout, ledger):
    folder, short = checkout / "runs/run", ("max_steps=300", "checkpoint.every_steps=1000", "dist.survive=true")
    job = slurm.sbatch(checkout, *SLOW, *short, LEDGER=str(ledger))
    for number in range(5):
        reach(folder, step(folder) + 10)  # a rank that dies twice at one step restarts all
        kill_rank(1, f"SLURM_JOB_ID={job}\0")
        until(
            lambda n=number: len(result(folder).events("survived")) > n,
            "birth of rank 1",
            timeout_s=60,
            said=lambda: logs(checkout),
        )
    bad = result(folder).events("survived")[-1]["host"]
    with slowly(ledger):
        slurm.on("ctl", "scancel", "--signal=USR1", "--batch", job)
        slurm.restarted(job)
    state = slurm.ended(job)
    assert (state["JobState"], state["Restarts"], state["ExcNodeList"]) == ("COMPLETED", "1", bad), logs(checkout)
    assert f"muster: without {bad} in the next attempt" in logs(checkout)
    assert bad not in re.split(r"[\[\],-]", state["NodeList"]) and state["NumNodes"] == "2", state
    assert_exact(ledger, steps=300, batch_size=10)


@pytest.mark.nightly
def test_a_node_that_the_doctor_refuses_is_left_out_of_the_next_attempt(slurm, checkout):
    """Its /dev/shm is too small for the loader's workers."""
    pids = subprocess.run(
        ["ip", "netns", "pids", "muster-n2"], capture_output=True, text=True, check=True
    ).stdout.split()
    [daemon] = [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "slurmd\n"]
    there = ["nsenter", f"--target={daemon}", "--mount"]
    subprocess.run([*there, "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"], check=True)
    try:
        job = slurm.sbatch(checkout, "doctor=true", "loader.num_workers=1", "max_steps=20")
        state = slurm.ended(job)
    finally:
        subprocess.run([*there, "umount", "/dev/shm"], check=True)
    assert (state["JobState"], state["Restarts"], state["ExcNodeList"]) == ("COMPLETED", "1", "n2"), logs(checkout)
    assert "n2: 0.00 GiB of /dev/shm are free" in logs(checkout) and "without n2 it can go on" in logs(checkout)


def agents(checkout):
    """The pids of the agents that a job of this checkout has started."""
    found = subprocess.run(["pgrep", "-f", f"{checkout}/muster/launcher/torchrun.py"], capture_output=True, text=True)
    return found.stdout.split()


@pytest.mark.nightly
def test_a_lost_node_brings_the_job_back(slurm, checkout, ledger):
    folder = checkout / "runs/run"
    job = slurm.sbatch(
        checkout, *SLOW, "max_steps=200", "checkpoint.every_steps=10", flags=("--nodelist=n1,n2",), LEDGER=str(ledger)
    )
    reach(folder, 30)
    with slurm.cut_off("n2"), slowly(ledger):
        slurm.wait(job, "PENDING", timeout_s=120)
        # One that comes back with the old step still at work confuses Slurm: it starts the job there, and waits for ever.
        until(lambda: not agents(checkout), "end of the agent that was cut off", timeout_s=90)
    state = slurm.ended(job, timeout_s=200)
    assert state["JobState"] == "COMPLETED" and int(state["Restarts"]) >= 1, logs(checkout)
    assert_exact(ledger, steps=200, batch_size=10)


@pytest.mark.nightly
def test_the_time_limit_saves_requeues_and_resumes(slurm, checkout, ledger):
    """The signal may come a minute early: a limit of three leaves each attempt 45 s at least; the job needs more than one."""
    folder = checkout / "runs/run"
    job = slurm.sbatch(
        checkout,
        *SLOW,
        "max_steps=2000",
        "checkpoint.every_steps=100000",
        flags=("--time=3", "--signal=B:USR1@75"),
        LEDGER=str(ledger),
    )
    state = slurm.ended(job, timeout_s=380)
    assert state["JobState"] == "COMPLETED" and int(state["Restarts"]) >= 1, logs(checkout)
    stopped, resumed = result(folder).events("preempted"), result(folder).events("resume")
    assert [event["step"] for event in stopped] == [event["step"] for event in resumed], "a step was lost"
    assert not result(folder).events("restart")
    assert_exact(ledger, steps=2000, batch_size=10)


def elastic(slurm, checkout, ledger, *, steps, nodes):
    arguments = (*SLOW, "dist.timeout_s=8", f"max_steps={steps}", "checkpoint.every_steps=10")
    flags = ("--no-kill", f"--nodelist={nodes}")
    job = slurm.sbatch(checkout, *arguments, flags=flags, LEDGER=str(ledger), MIN_NODES="1")
    slurm.wait(job, "RUNNING")  # Slurm takes up to a minute to see that a node of an earlier test is back
    return job


@pytest.mark.nightly
def test_an_elastic_job_goes_on_without_a_lost_node(slurm, checkout, ledger):
    folder = checkout / "runs/run"
    job = elastic(slurm, checkout, ledger, steps=400, nodes="n1,n2")
    reach(folder, 40)
    with slurm.cut_off("n2"):
        state = slurm.ended(job, timeout_s=200)
    assert state["Restarts"] == "0" and state["JobState"] == "COMPLETED", logs(checkout)
    assert result(folder).events("start")[0]["world_size"] == 2
    assert result(folder).events("resume")[-1]["world_size"] == 1
    assert_exact(ledger, steps=400, batch_size=10)


@pytest.mark.nightly
def test_an_elastic_job_that_loses_its_first_node_is_requeued(slurm, checkout, ledger):
    """The batch script and the rendezvous are lost with it, and Slurm leaves such a job RUNNING on the others."""
    folder = checkout / "runs/run"
    job = elastic(slurm, checkout, ledger, steps=150, nodes="n1,n3")
    reach(folder, 40)
    with slurm.powered_off("n1"), slowly(ledger):
        slurm.wait(job, "PENDING", timeout_s=150)
    state = slurm.ended(job, timeout_s=200)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), logs(checkout)
    assert_exact(ledger, steps=150, batch_size=10)


@pytest.mark.nightly
def test_scancel_stays_cancelled(slurm, checkout, ledger):
    folder = checkout / "runs/run"
    job = slurm.sbatch(checkout, *SLOW, "max_steps=100000", LEDGER=str(ledger))
    reach(folder, 10)
    kill_rank(1, f"SLURM_JOB_ID={job}\0")  # it alone: it is restarted in place in its step of the job
    until(lambda: result(folder).events("survived"), "birth of rank 1", timeout_s=60, said=lambda: logs(checkout))
    slurm.on("ctl", "scancel", job)
    assert slurm.ended(job)["JobState"] == "CANCELLED"
    until(lambda: result(folder).outcome["outcome"] == "preempted", "saved place", timeout_s=60)
    time.sleep(3)
    assert slurm.state(job)["JobState"] == "CANCELLED"


@pytest.mark.nightly
def test_of_two_steps_of_one_allocation_in_one_folder_one_trains(slurm, checkout, ledger):
    """The scheduler's job is the same for both; the processes that started them are not."""
    (checkout / "two.sbatch").write_text("""#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm/logs/%j.log
step() {
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "$VENV/bin/python" -m train "${@:2}"
  echo "step on $1: $?"
}
for node in n1 n2; do step "$node" "$@" & done
wait
""")
    job = slurm.sbatch(
        checkout, *SLOW, "max_steps=300", script="two.sbatch", flags=("--nodelist=n1,n2",), LEDGER=str(ledger)
    )
    assert slurm.ended(job)["JobState"] == "COMPLETED", logs(checkout)
    said, trained = logs(checkout), result(checkout / "runs/run")
    assert sorted(re.findall(r"step on n\d: (\d+)", said)) == ["0", "2"], said
    refused = re.findall(r"muster: .*", said)
    assert len(refused) == 1 and "is in use by another job on n" in refused[0], said
    assert len(trained.events("start")) == 1 and not trained.events("resume") + trained.events("restart")
    assert trained.outcome["launcher"] == f"slurm:{job}"
    assert_exact(ledger, steps=300, batch_size=10)


@pytest.mark.nightly
def test_agents_that_never_meet_do_not_requeue_for_ever(slurm, checkout):
    """The outcome.json of an earlier attempt says "preempted", but nobody came to train in this one."""
    folder = checkout / "runs/run"
    folder.mkdir(parents=True)
    (folder / "outcome.json").write_text('{"outcome": "preempted", "exit_code": 75, "attempt": "1"}')
    state = slurm.ended(slurm.sbatch(checkout, "max_steps=5", MAX_RESTARTS="many"))
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "0") and state["ExitCode"] != "75:0", logs(checkout)
    assert "no rank began to train" in logs(checkout)


@pytest.mark.nightly
def test_told_to_stop_before_anybody_trains(slurm, checkout, ledger):
    """USR1 while the data still loads; and what a user's module prints is not taken for the run's folder."""
    (checkout / "slow_start.py").write_text(
        "import time\nfrom kit.parts.data import Numbered\nprint('hello from a module')\n\n"
        "class Late(Numbered):\n    def __init__(self, train):\n        open('loading', 'w').close()\n"
        "        time.sleep(8)\n        super().__init__(train)\n"
    )
    arguments = (*SLOW, "data._target_=slow_start.Late", "max_steps=30")
    job = slurm.sbatch(checkout, *arguments, LEDGER=str(ledger))
    until(lambda: (checkout / "loading").exists(), "data that load", timeout_s=150, said=lambda: logs(checkout))
    with slowly(ledger):
        slurm.on("ctl", "scancel", "--signal=USR1", "--batch", job)
        slurm.restarted(job)
    state = slurm.ended(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), logs(checkout)
    assert_exact(ledger, steps=30, batch_size=10)


@pytest.mark.nightly
def test_told_to_stop_while_the_overrides_are_checked(slurm, checkout, ledger):
    """USR1 before srun has begun: the batch script is alone with it, and lets no node start for nothing."""
    (checkout / "slow_check.py").write_text(
        "import os, pathlib, time\nfrom kit.parts.data import Numbered\nseen = pathlib.Path('checked')\n"
        "if not seen.exists():\n    seen.touch()\n    while not pathlib.Path('go').exists():\n        time.sleep(0.1)\n\nclass Slow(Numbered):\n    pass\n"
    )
    job = slurm.sbatch(checkout, *SLOW, "data._target_=slow_check.Slow", "max_steps=10", LEDGER=str(ledger))
    until(lambda: (checkout / "checked").exists(), "the check", timeout_s=150)
    slurm.on("ctl", "scancel", "--signal=USR1", "--batch", job)
    time.sleep(5)  # for the controller to pass it on
    (checkout / "go").touch()
    state = slurm.ended(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), logs(checkout)
    assert "stopped before a rank began to train" in logs(checkout)
    assert_exact(ledger, steps=10, batch_size=10)


@pytest.fixture(scope="session")
def container(tmp_path_factory):
    """Apptainer, and an image for it that holds the kit and takes system, Python and packages from this host."""
    if not (CI or shutil.which("apptainer")):
        skip("Apptainer is not installed (CI=true installs it)")
    installed = subprocess.run(
        [ROOT / "tests/substrates/apptainer.sh", CACHE / "apptainer"], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr[-3000:]
    apptainer = Path(installed.stdout.strip())
    folder = tmp_path_factory.mktemp("image")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "muster.def").write_text(f"""Bootstrap: scratch

%setup
    cd "$APPTAINER_ROOTFS"
    mkdir -p usr bin lib lib64 sbin etc home root tests ledger job/runs opt/python opt/venv/bin opt/venv/lib/{python}/site-packages opt/muster
    cp -r "{ROOT}/muster" "{ROOT}/train" "{ROOT}/conf" opt/muster/
    cp /etc/passwd /etc/group /etc/nsswitch.conf etc/
    ln -s /opt/python/bin/{python} opt/venv/bin/python3
    echo "home = /opt/python/bin" >opt/venv/pyvenv.cfg
    printf '#!/opt/venv/bin/python3\\nfrom torch.distributed.run import main\\nmain()\\n' >opt/venv/bin/torchrun
    chmod +x opt/venv/bin/torchrun

%environment
    export PATH=/opt/venv/bin:/usr/bin:/bin PYTHONPATH=/opt/muster:/tests PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp/matplotlib
""")
    image = folder / "muster.sif"
    built = subprocess.run(
        [apptainer, "build", image, folder / "muster.def"], capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stderr
    return {
        "IMAGE": str(image),
        "PATH": f"{apptainer.parent}:{os.environ['PATH']}",
        "APPTAINER_BIND": "/usr,/bin,/lib,/lib64,"
        f"{sys.base_prefix}:/opt/python,{sysconfig.get_path('purelib')}:/opt/venv/lib/{python}/site-packages",
    }


@pytest.mark.nightly
def test_a_container_trains_requeues_and_resumes(slurm, checkout, ledger, container):
    """In Apptainer, as one node's wrong override, then as two nodes that are told to save their place."""
    script = "slurm/container.sbatch"
    state = slurm.ended(slurm.sbatch(checkout, "lr=3", script=script, **container))
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0")
    assert "did you mean optimizer.lr?" in logs(checkout) and state["Restarts"] == "0"
    env = container | {
        "MOUNTS": f"{ROOT / 'tests'}:/tests:ro,{ledger.parent}:/seen",
        "LEDGER": "/seen/ledger",
        "PASS_ENV": "LEDGER",
    }
    arguments = (*SLOW, "max_steps=200", "checkpoint.every_steps=1000")
    job = slurm.sbatch(checkout, *arguments, script=script, **env)
    folder = checkout / "runs/run"
    reach(folder, 40)
    with slowly(ledger):
        slurm.on("ctl", "scancel", "--signal=USR1", "--batch", job)
        slurm.restarted(job)
    state = slurm.ended(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), logs(checkout)
    assert result(folder).events("resume")[0]["step"] >= 40
    assert result(folder).events("start")[0]["world_size"] == 2
    assert result(folder).outcome["launcher"] == f"slurm:{job}"
    assert_exact(ledger, steps=200, batch_size=10)


def submit(slurm, checkout, *arguments, ok=True, **env):
    env = {"PYTHONPATH": f"{checkout}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", **env}
    return slurm.on("ctl", sys.executable, "slurm/submit.py", *arguments, cwd=checkout, env=env, ok=ok)


@pytest.mark.nightly
def test_submit_a_sweep_of_three(slurm, checkout):
    out = submit(slurm, checkout, "-m", "--wait", "cluster.nodes=1", "optimizer.lr=0.1,0.05,0.01", "max_steps=5")
    assert sorted(path.name for path in (checkout / "runs/run").iterdir()) == [
        f"lr-{lr}" for lr in ("0.01", "0.05", "0.1")
    ], out
    assert len(re.findall(r"^\[\d+_\d\] done  /", out, re.M)) == 3, out


def test_submit_is_requeued_and_resumes(slurm, checkout, ledger):
    folder = checkout / "runs/run"
    out = submit(
        slurm, checkout, "cluster.nodes=2", *SLOW, "max_steps=150", "checkpoint.every_steps=1000", LEDGER=str(ledger)
    )
    job = re.search(r"job (\d+)", out)[1]
    reach(folder, 40)
    with slowly(ledger):
        slurm.on("ctl", "scancel", "--signal=USR2", job)
        slurm.restarted(job)
    state = slurm.ended(job)
    text = "\n".join(path.read_text() for path in (checkout / "slurm/logs").glob("*.err"))
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), text[-4000:]
    assert result(folder).events("resume")[0]["step"] >= 40
    assert_exact(ledger, steps=150, batch_size=10)


@pytest.mark.nightly
def test_submit_comes_back_after_a_preemption(slurm, checkout, ledger):
    """With a grace time Slurm sends SIGTERM alone, and a job that ends within it does not come back by itself."""
    folder = checkout / "runs/run"
    arguments = ("cluster.nodes=2", *SLOW, "max_steps=1000", "checkpoint.every_steps=1000")
    job = re.search(r"job (\d+)", submit(slurm, checkout, *arguments, LEDGER=str(ledger)))[1]
    reach(folder, 30)
    slurm.on("ctl", "sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    state = slurm.ended(job, timeout_s=200)
    text = "\n".join(path.read_text() for path in (checkout / "slurm/logs").glob("*.err"))
    once_more = slurm.version() >= (24, 5)  # Slurm requeues it, too: the last start finds that the run is done
    slurm.restarted(job, times=1 + once_more)
    state = slurm.ended(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2" if once_more else "1"), text[-4000:]
    assert result(folder).events("resume")[0]["step"] >= 30
    assert_exact(ledger, steps=1000, batch_size=10)


def local(tmp_path, *arguments):
    line = [sys.executable, str(ROOT / "slurm/submit.py"), *arguments]
    return subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.nightly
def test_submit_locally(tmp_path):
    done = local(tmp_path, "cluster=local", "cluster.nproc_per_node=2", "--wait", "max_steps=4")
    assert done.returncode == 0 and "] done" in done.stdout, done.stdout + done.stderr
    assert result(tmp_path / "runs/run").events("start")[0]["world_size"] == 2


@pytest.mark.nightly
def test_submit_says_what_is_wrong_before_it_sends_anything(tmp_path):
    for mistake, said in (
        ("lr=3", "optimizer.lr"),
        ("cluster.node=3", "nodes"),
        ("cluster.nodes=0", "at least 1"),
        ("cluster.signal_delay_s=5", "at least 11"),
    ):
        done = local(tmp_path, "cluster=local", mistake)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "slurm").exists()


@pytest.mark.nightly
def test_a_script_of_ones_own_is_requeued_after_75_and_after_a_lost_node(slurm, checkout, tmp_path):
    """It stops by USR1, as before the time limit, and leaves with 75; then one of its nodes is cut off."""
    mine.write(checkout)
    out = tmp_path / "out"
    out.mkdir()
    words = ("--", "my script.py", f"--out={out}", "--steps=150", "--step-s=0.1", "a b", "--", "c='d'")
    job = slurm.sbatch(checkout, *words, flags=("--nodelist=n1,n2",))
    until(lambda: len(mine.steps(out)) >= 20, "20 steps", timeout_s=150, said=lambda: logs(checkout))
    with slowly(out / "ledger"):
        slurm.on("ctl", "scancel", "--signal=USR1", "--batch", job)
        until(lambda: len(mine.attempts(out)) >= 2, "second attempt", timeout_s=150, said=lambda: logs(checkout))
    assert "my script.py: to be run again (exit code 75); requeue 1 of at most 100" in logs(checkout)
    assert re.search(r"^\[1\] start 0 .*\"a b\", \"--\", \"c='d'\"\] threads 1$", logs(checkout), re.M)
    with slurm.cut_off("n2"), slowly(out / "ledger"):
        slurm.wait(job, "PENDING", timeout_s=120)
        until(lambda: not agents(checkout), "end of the agent that was cut off", timeout_s=120)
    state = slurm.ended(job, timeout_s=200)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), logs(checkout)
    assert int(state["Restarts"]) >= 2
    first = mine.attempts(out)[1]
    assert mine.steps(out)[: first + 1] == [*range(first + 1)], "the second attempt goes on where the first stopped"


@pytest.mark.nightly
def test_a_script_that_always_fails_is_not_requeued(slurm, checkout, tmp_path):
    mine.write(checkout)
    job = slurm.sbatch(checkout, "--", "my script.py", f"--out={tmp_path}", "--fault=always", MAX_RESTARTS="1")
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "3:0", "0"), logs(checkout)
    assert mine.attempts(tmp_path, rank=1) == [0, 0]
    assert "muster: rank 1 left with exit code 3" in logs(checkout) and "failed (exit code 3)" in logs(checkout)


@pytest.mark.nightly
def test_a_script_that_always_asks_for_more_is_requeued_as_often_as_it_may_be(slurm, checkout):
    (checkout / "more.py").write_text("raise SystemExit(75)\n")
    job = slurm.sbatch(checkout, "--", "more.py", MAX_REQUEUES="1", flags=("--nodes=1",))
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "75:0", "1"), logs(checkout)
    assert "requeue 1 of at most 1" in logs(checkout)
    assert "not requeued again: it was 1 times, MAX_REQUEUES=1" in logs(checkout)


@pytest.mark.nightly
def test_a_script_that_is_not_there_ends_at_once(slurm, checkout):
    state = slurm.ended(slurm.sbatch(checkout, "--", "mine.py"))
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")
    assert "mine.py is not a file in" in logs(checkout)


@pytest.mark.nightly
def test_a_job_from_another_folder_and_an_environment_that_is_not_there_are_said(slurm, checkout, tmp_path):
    (tmp_path / "slurm/logs").mkdir(parents=True)
    for script, cwd, env, says in (
        (str(checkout / "slurm/ddp.sbatch"), tmp_path, {}, "run sbatch in the project's folder"),
        ("slurm/ddp.sbatch", checkout, {"VENV": "/none"}, "VENV=/none has no bin/activate"),
    ):
        job = re.search(r"job (\d+)", slurm.on("ctl", "sbatch", script, cwd=cwd, env=env))[1]
        state = slurm.ended(job)
        assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")
        assert says in logs(cwd)
    job = slurm.sbatch(checkout, "max_steps=3", flags=(f"--chdir={tmp_path}",))
    assert slurm.ended(job)["JobState"] == "COMPLETED", logs(tmp_path)


@pytest.mark.nightly
def test_submit_a_script_of_ones_own(slurm, checkout, tmp_path):
    mine.write(checkout)
    words = ("cluster.nodes=2", "--", "my script.py", f"--out={tmp_path}", "--steps=200", "--step-s=0.1")
    job = re.search(r"job (\d+)", submit(slurm, checkout, *words))[1]
    until(lambda: len(mine.steps(tmp_path)) >= 20, "20 steps", timeout_s=150)
    with slowly(tmp_path / "ledger"):
        slurm.on("ctl", "scancel", "--signal=USR2", job)
        slurm.restarted(job)
    state = slurm.ended(job)
    text = "\n".join(path.read_text() for path in (checkout / "slurm/logs").glob("*.err"))
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), text[-4000:]
    assert mine.steps(tmp_path) == [*range(200)]


@pytest.mark.nightly
def test_a_newcomers_own_loop_by_the_command_that_init_printed(slurm, newcomer):
    """With the wheel alone; it is told to stop, requeued, and ends with the weights of an undisturbed run."""
    out = slurm.on("ctl", "bash", "-c", newcomer.printed("Slurm"), cwd=newcomer.project)
    job = re.search(r"Submitted batch job (\d+)", out)[1]
    newcomer.reach(20, timeout_s=150)
    with newcomer.slowly():
        slurm.on("ctl", "scancel", "--signal=USR1", "--batch", job)
        slurm.restarted(job)
    state = slurm.ended(job)
    assert (state["JobState"], state["Restarts"], state["JobName"]) == ("COMPLETED", "1", "my-job"), logs(
        newcomer.project
    )
    newcomer.assert_exact()
    assert newcomer.result().sha256 == newcomer.undisturbed().sha256
