"""The launch policy: from each substrate's environment to a torchrun line, and from an end to what comes next."""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from kit.deaths import has_ended
from kit.job import ROOT, environment
from kit.until import until

from muster.errors import ConfigError, Held, final
from muster.faults.agent import STUCK_S
from muster.launcher import bad_nodes, compose, execute, kubernetes, loopback, script_agent, slurm, torchrun, verdict
from muster.launcher import variables as given_variables
from muster.launcher.__main__ import main
from muster.launcher.spec import MARGIN_S, Timings, command, for_script, printed
from muster.launcher.spec import environment as variables
from muster.launcher.substrate import find, here
from muster.launcher.verdict import Verdict, decide, decide_script

SLURM = {
    "SLURM_JOB_ID": "70012", "SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu-a",
    "SLURM_CPUS_PER_TASK": "7", "HEAD": "gpu-a", "NPROC": "2",
}  # fmt: skip
PYTORCHJOB = {
    "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "muster-worker-0:23456", "PET_NNODES": "1:3", "PET_MAX_RESTARTS": "9",
    "PET_NPROC_PER_NODE": "8", "HOSTNAME": "muster-worker-1", "POD_IP": "10.1.0.7", "GRACE_S": "90",
}  # fmt: skip
TRAINJOB = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "muster-node-0-0.muster",
    "PET_MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "1", "POD_IP": "10.1.0.8", "GRACE_S": "90",
}  # fmt: skip
INDEXED = {
    "JOB_COMPLETION_INDEX": "0", "HEAD": "muster-0.muster", "NNODES": "2", "NPROC": "1", "POD_IP": "fd00::9", "GRACE_S": "90",
    "OMP_NUM_THREADS": "4",
}  # fmt: skip
COMPOSE = {"NODES": "3", "NPROC": "1", "RUN": "compose", "ARGS": "", "GRACE_S": "60", "OMP_NUM_THREADS": "1"}
ACROSS = "join_timeout=300,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=20"
POD = ACROSS.replace("300", "600")
NEAR = "join_timeout=120,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"

GOLDEN = {
    "slurm": (
        slurm.spec(SLURM),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 OMP_NUM_THREADS=4 torchrun --nnodes=4 "
        "--nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=gpu-a:20012 --rdzv-id=70012.0 "
        f"--rdzv-conf=is_host=1,{ACROSS} --local-addr=gpu-a -m train",
    ),
    "slurm, elastic, requeued, with GPUs": (
        slurm.spec({**SLURM, "MIN_NODES": "2", "SLURM_RESTART_COUNT": "3", "SLURM_GPUS_ON_NODE": "8", "SLURM_NODEID": "2",
                    "SLURMD_NODENAME": "gpu-c", "MAX_RESTARTS": "5", "GRACE_S": "300", "OMP_NUM_THREADS": "1"}),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=290 OMP_NUM_THREADS=1 torchrun --nnodes=2:4 "
        "--nproc-per-node=8 --max-restarts=5 --rdzv-backend=c10d --rdzv-endpoint=gpu-a:20012 --rdzv-id=70012.3 "
        f"--rdzv-conf=is_host=0,{ACROSS} --local-addr=gpu-c -m train",
    ),
    "pytorchjob": (
        kubernetes.pytorchjob(PYTORCHJOB),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=80 OMP_NUM_THREADS=1 torchrun --nnodes=1:3 "
        "--nproc-per-node=8 --max-restarts=9 --rdzv-backend=c10d --rdzv-endpoint=muster-worker-0:23456 "
        f"--rdzv-id=muster-worker-0 --rdzv-conf=is_host=0,{POD} --local-addr=10.1.0.7 -m train",
    ),
    "pytorchjob, the host": (
        kubernetes.pytorchjob({**PYTORCHJOB, "HOSTNAME": "muster-worker-0", "PET_RDZV_ID": "mine"}),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=80 OMP_NUM_THREADS=1 torchrun --nnodes=1:3 "
        "--nproc-per-node=8 --max-restarts=9 --rdzv-backend=c10d --rdzv-endpoint=muster-worker-0:23456 "
        f"--rdzv-id=mine --rdzv-conf=is_host=1,{POD} --local-addr=10.1.0.7 -m train",
    ),
    "trainjob": (
        kubernetes.static(TRAINJOB),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=80 OMP_NUM_THREADS=1 torchrun --nnodes=2 "
        "--nproc-per-node=1 --max-restarts=0 --master-addr=muster-node-0-0.muster --master-port=29500 --node-rank=1 "
        "--local-addr=10.1.0.8 -m train",
    ),
    "indexed job": (
        kubernetes.indexed_job(INDEXED),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=80 OMP_NUM_THREADS=4 torchrun --nnodes=1:2 "
        "--nproc-per-node=1 --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=muster-0.muster:29500 "
        f"--rdzv-id=muster-0.muster --rdzv-conf=is_host=1,{POD} --local-addr=fd00::9 -m train",
    ),
    "compose": (
        compose.spec({**COMPOSE, "RUN": "second"}, address=lambda: "172.18.0.3"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=50 OMP_NUM_THREADS=1 torchrun --nnodes=1:3 "
        "--nproc-per-node=1 --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=store:29400 --rdzv-id=second "
        f"--rdzv-conf=is_host=0,{NEAR} --local-addr=172.18.0.3 -m train",
    ),
    "loopback": (
        loopback.spec("1:2", port=4711, id="t", is_host=True, nproc=2),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=30 OMP_NUM_THREADS=1 torchrun --nnodes=1:2 "
        "--nproc-per-node=2 --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:4711 --rdzv-id=t "
        f"--rdzv-conf=is_host=1,{NEAR.replace('last_call_timeout=2', 'last_call_timeout=1')} --local-addr=127.0.0.1 -m train",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
@pytest.mark.unit
def test_the_line_of_each_substrate(case):
    spec, expected = GOLDEN[case]
    assert printed(spec, command(spec, [])) == expected


@pytest.mark.unit
def test_the_printed_line_is_the_one_that_runs_whatever_the_overrides_hold():
    hostile = ["name=a b", "x='it''s'", 'y="$HOME"', "z=`id`;rm -rf /", "w=\\", "v=a\nb", "*"]
    spec = slurm.spec(SLURM)
    words = shlex.split(printed(spec, command(spec, hostile)))
    assert words == [*(f"{key}={value}" for key, value in variables(spec).items()), *command(spec, hostile)]
    assert words[-len(hostile) :] == hostile


def test_torchrun_accepts_every_line():
    """Its own parser, which knows each flag, and the keys of --rdzv-conf that its handler reads."""
    code = (
        "import json, sys; from torch.distributed.run import parse_args, config_from_args\n"
        "for line in json.load(sys.stdin):\n"
        "    config, _, given = config_from_args(parse_args(line))\n"
        "    assert config.local_addr and given[-2:] == ['train', 'a=b'], (config, given)\n"
        "    assert config.rdzv_backend == 'static' or {'is_host', 'read_timeout'} <= {*config.rdzv_configs}, config\n"
    )
    lines = [command(spec, ["a=b"])[1:] for spec, _ in GOLDEN.values()]
    lines = [[word.replace("nproc-per-node=8", "nproc-per-node=1") for word in line] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(lines), env=environment(), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.unit
def test_no_request_waits_longer_than_an_agent_that_hangs_is_given():
    assert all(timings.read_timeout < STUCK_S for timings in (Timings(), kubernetes.TIMINGS, compose.TIMINGS))
    with pytest.raises(AssertionError):
        Timings(read_timeout=30)


@pytest.mark.unit
def test_compose_splits_args_as_a_shell_does():
    assert compose.overrides({**COMPOSE, "ARGS": "model=mlp  'name=a b' x=\"y z\""}) == [
        "name=compose", "model=mlp", "name=a b", "x=y z",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="close every quote"):
        compose.overrides({**COMPOSE, "ARGS": "model='mlp"})


@pytest.mark.parametrize(
    ("env", "name"),
    [(SLURM, "Slurm"), (PYTORCHJOB, "PyTorchJob"), (TRAINJOB, "TrainJob"), (INDEXED, "Indexed Job"), (COMPOSE, "compose")],
)  # fmt: skip
@pytest.mark.unit
def test_each_environment_is_recognised(env, name):
    """Also in a shell that has one of compose's short names by chance."""
    kind = find({"PATH": "/bin", "ARGS": "x", **env})
    assert kind and kind.name == name


@pytest.mark.unit
def test_what_is_missing_or_garbled_is_named():
    for make, env, said in (
        (slurm.spec, {**SLURM, "HEAD": ""}, "HEAD is not set"),
        (slurm.spec, {**SLURM, "MAX_RESTARTS": "many"}, "MAX_RESTARTS=many"),
        (slurm.spec, {**SLURM, "MIN_NODES": "5"}, "MIN_NODES=5 .* use 1 to 4"),
        (slurm.spec, {**SLURM, "NPROC": "0"}, "NPROC=0 .* at least 1"),
        (slurm.spec, {**SLURM, "GRACE_S": "5"}, "GRACE_S=5 leaves no time"),
        (kubernetes.pytorchjob, {**PYTORCHJOB, "PET_NNODES": "1:"}, "nnodes=1: "),
        (kubernetes.pytorchjob, {**PYTORCHJOB, "PET_NPROC_PER_NODE": "two"}, "nproc=two"),
        (kubernetes.static, {**TRAINJOB, "PET_NODE_RANK": "-1"}, "PET_NODE_RANK=-1"),
        (kubernetes.indexed_job, {**INDEXED, "POD_IP": ""}, "POD_IP is not set"),
        (compose.spec, {**COMPOSE, "NODES": "²"}, "NODES=² is not valid"),
        (here, {"PATH": "/bin"}, "no launcher's variables are set.*torchrun --standalone"),
    ):
        with pytest.raises(ConfigError, match=said) as raised:
            make(env)
        assert "\n" not in str(raised.value)


@pytest.mark.unit
def test_what_srun_is_told():
    assert slurm.srun_flags(SLURM) == ["--ntasks=4", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=120"]
    assert slurm.srun_flags({**SLURM, "MIN_NODES": "1"})[2:] == ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    assert slurm.srun_environment({**SLURM, "MASTER_PORT": "4711"}) == {
        "MASTER_PORT": "4711",
        "SRUN_CPUS_PER_TASK": "7",
    }
    assert slurm.spec({**SLURM, "MASTER_PORT": "4711"}).rendezvous.endpoint.endswith(":4711")
    assert slurm.job_name({**SLURM, "SLURM_ARRAY_JOB_ID": "70010", "SLURM_ARRAY_TASK_ID": "2"}) == "70010_2"
    assert slurm.job_name(SLURM) == "70012"
    assert slurm.note_of_components(SLURM) == "" and "3 components" in slurm.note_of_components(
        {**SLURM, "SLURM_HET_SIZE": "3"}
    )
    assert {slurm.port_of(job) for job in (0, 19999, 20000, 10**7)} <= {*range(10000, 30000)}


@pytest.mark.unit
def test_a_port_in_use_on_the_first_node_is_passed_over():
    taken = slurm.port_of(int(SLURM["SLURM_JOB_ID"]))
    assert slurm.srun_environment(SLURM)["MASTER_PORT"] == str(taken)
    with socket.create_server(("", taken)):
        assert slurm.srun_environment(SLURM)["MASTER_PORT"] == str(taken + 1)


@pytest.mark.unit
def test_apptainer_passes_on_whatever_the_launcher_reads():
    """Its container sees no variable of the job by itself."""
    text = "".join(Path(each.__file__).read_text() for each in (slurm, given_variables))
    read = {*re.findall(r'env(?:\[|, |\.get\()["\']([A-Z_]+)', text)}
    passed = set(re.search(r'PASS_ENV="(.*)\$', (ROOT / "slurm/container.sbatch").read_text())[1].split())
    assert {"HEAD", "NPROC", "SLURMD_NODENAME", "SLURM_JOB_ID"} <= read, "the pattern finds them"
    assert {name for name in read if not name.startswith("SLURM_")} <= passed


INTERRUPTED = """
import os, signal, subprocess
from muster.launcher.torchrun import take_signals_between_looks
from torch.distributed.elastic.multiprocessing import api

look = subprocess.Popen._internal_poll
def interrupted(self):
    os.kill(os.getpid(), signal.SIGTERM)
    print("looks", flush=True)
    return look(self)
subprocess.Popen._internal_poll = interrupted
take_signals_between_looks()
signal.signal(signal.SIGTERM, api._terminate_process_handler)
process = subprocess.Popen(["true"])
try:
    process.poll()
except api.SignalException as error:
    print("told", int(error.sigval), process._waitpid_lock.locked())
"""


def test_a_stop_signal_does_not_interrupt_an_agent_that_looks_at_its_workers():
    """Its handler raises an exception, which would leave a lock taken."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], env=environment(), capture_output=True, text=True)
    assert done.stdout == "looks\ntold 15 False\n", done


CAUGHT = """
import logging, os, signal, subprocess, sys
from muster.launcher.torchrun import take_signals_between_looks
from torch.distributed.elastic.multiprocessing import api

def told(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    return ""

class Line:
    __str__ = told

take_signals_between_looks()
signal.signal(signal.SIGTERM, api._terminate_process_handler)
if sys.argv[1] == "fork":
    os.register_at_fork(after_in_parent=told)
process = subprocess.Popen(["true"], preexec_fn=lambda: None)  # as the agent starts ranks
try:
    if sys.argv[1] == "log":
        logging.error(Line())
    print("goes on", flush=True)
    process.poll()
except api.SignalException as error:
    print("told", int(error.sigval))
"""


@pytest.mark.parametrize("where", ["fork", "log"])
def test_a_stop_signal_is_not_lost_where_python_catches_what_its_handler_raises(where):
    """The agent went on until its ranks ended by themselves."""
    done = subprocess.run([sys.executable, "-c", CAUGHT, where], env=environment(), capture_output=True, text=True)
    assert done.stdout == "goes on\ntold 15\n", done


def test_a_shell_reads_what_python_meant():
    words, value = ["a b", "'", "$HOME", "x\ny", ""], "it's `id`\n"
    script = slurm.assignments({"words": words, "value": value}) + '\nprintf "%s\\0" "${words[@]}" "$value"'
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.split("\0")[:-1] == [*words, value]


def record(code, attempt="2", outcome=None):
    return {"exit_code": code, "attempt": attempt, "outcome": outcome or f"outcome of {code}", "time": attempt}


BEFORE = record(7, attempt="1")
NEVER, TOLD = (
    "no rank began to train: see the agents' messages above",
    "stopped before a rank began to train",
)


@pytest.mark.parametrize(
    ("policy", "after", "agent", "told", "code", "requeue"),
    [
        (verdict.SLURM, record(75), 0, True, 0, False),
        (verdict.SLURM, record(75), 1, True, 75, True),
        (verdict.SLURM, record(0, outcome="done"), 1, False, 0, False),  # of an elastic job that lost a node
        (verdict.SLURM, record(2), 1, False, 2, False),
        (verdict.SLURM, record(8), 1, False, 8, True),
        (verdict.SLURM, record(8) | {"times_held": verdict.MOST_HELD}, 1, False, 8, True),
        (verdict.SLURM, record(8) | {"times_held": verdict.MOST_HELD + 1}, 1, False, 8, False),
        (verdict.SUBMITIT, record(8), 1, False, 8, True),
        (verdict.PYTORCHJOB, record(8), 1, False, 143, False),
        (verdict.TRAINJOB, record(8), 1, False, 8, False),
        (verdict.INDEXED_JOB, record(8), 1, False, 8, False),
        (verdict.SLURM, record(None), 137, False, 137, False),
        (verdict.SLURM, BEFORE, 1, False, 1, False),
        (verdict.SLURM, BEFORE, 1, True, 75, True),
        (verdict.SLURM, {}, 143, True, 75, True),
        (verdict.SUBMITIT, record(75), 1, True, 75, True),
        (verdict.SUBMITIT, record(7), 1, True, 7, False),
        (verdict.LOCAL, record(75), 1, True, 75, True),
        (verdict.PYTORCHJOB, record(0), 0, False, 0, False),
        (verdict.PYTORCHJOB, record(6), 1, False, 6, False),
        (verdict.PYTORCHJOB, record(75), 1, True, 143, False),
        (verdict.PYTORCHJOB, record(None), 1, False, 143, False),
        (verdict.PYTORCHJOB, BEFORE, 2, False, 143, False),
        (verdict.PYTORCHJOB, BEFORE, 1, True, 143, False),
        (verdict.TRAINJOB, record(3), 1, False, 3, False),
        (verdict.TRAINJOB, record(75), 1, True, 75, False),
        (verdict.INDEXED_JOB, record(4), 1, False, 4, False),
        (verdict.INDEXED_JOB, record(75), 1, True, 75, False),
        (verdict.INDEXED_JOB, BEFORE, 1, False, 1, False),
        (verdict.COMPOSE, record(5), 1, False, 5, False),
    ],
)
@pytest.mark.unit
def test_verdicts(policy, after, agent, told, code, requeue):
    line = (TOLD if told else NEVER) if after in ({}, BEFORE) else f"{after['outcome']} (exit code "
    end = decide(BEFORE if after else {}, after, agent, told=told, policy=policy)
    assert (end.code, end.requeue) == (code, requeue)
    line = "done, although its launcher ended with 1" if code == 0 else line
    assert end == Verdict(0, False, "") if agent == 0 else end.line.startswith(line)


@pytest.mark.parametrize(
    "ends, agent, told, code",
    [
        ([("done", 0), ("running", None)], 137, False, 137),
        ([("running", None), ("diverged", 6)], 1, False, 1),
        ([("done", 0), ("diverged", 6)], 1, False, 6),
        ([("done", 0), ("done", 0)], 1, False, 0),
        ([("done", 0), None], 1, False, 1),
        ([("done", 0), None], 1, True, 75),
        ([("preempted", 75), None], 1, True, 75),
        ([("diverged", 6), None], 1, False, 6),
    ],
)
@pytest.mark.unit
def test_a_sweep_is_judged_by_the_run_that_ended_worst(ends, agent, told, code):
    """One that has not ended has to go on, whatever the others made of it."""
    after = [
        {} if end is None else {"attempt": "b", "outcome": end[0], "exit_code": end[1], "time": 9.0} for end in ends
    ]
    found = decide(*verdict.before_and_after([{}] * len(ends), after), agent, told=told, policy=verdict.THIS_MACHINE)
    assert found.code == code, found


BOUND = verdict.Requeues(so_far=2, most=3)
LAST = verdict.Requeues(so_far=3, most=3)


@pytest.mark.parametrize(
    ("policy", "agent", "told", "lost", "requeues", "code", "requeue"),
    [
        (verdict.SLURM, 0, True, "", BOUND, 0, False),
        (verdict.SLURM, 75, True, "", BOUND, 75, True),
        (verdict.SLURM, 75, False, "", LAST, 75, False),
        (verdict.SLURM, 3, False, "", BOUND, 3, False),
        (verdict.SLURM, 3, True, "", BOUND, 3, False),
        (verdict.SLURM, 1, False, "n2", BOUND, 75, True),
        (verdict.SLURM, 1, False, "n2", LAST, 75, False),
        (verdict.SLURM, verdict.UNMET, False, "", BOUND, 1, False),
        (verdict.SLURM, 137, False, "", BOUND, 1, False),
        (verdict.SLURM, 143, True, "", BOUND, 75, True),
        (verdict.THIS_MACHINE, 130, True, "", None, 75, False),
        (verdict.SUBMITIT, 75, True, "", BOUND, 75, True),
        (verdict.SUBMITIT, 75, True, "", LAST, 75, False),
        (verdict.PYTORCHJOB, 75, True, "", None, 143, False),
        (verdict.PYTORCHJOB, 3, False, "", None, 3, False),
        (verdict.PYTORCHJOB, 1, True, "", None, 143, False),
        (verdict.PYTORCHJOB, verdict.UNMET, False, "", None, 143, False),
        (verdict.TRAINJOB, 3, False, "", None, 3, False),
        (verdict.TRAINJOB, 75, False, "", None, 75, False),
        (verdict.TRAINJOB, 3, True, "", None, 1, False),
        (verdict.INDEXED_JOB, 3, False, "", None, 7, False),
        (verdict.INDEXED_JOB, 1, True, "", None, 1, False),
        (verdict.INDEXED_JOB, 75, True, "", None, 75, False),
        (verdict.INDEXED_JOB, verdict.UNMET, False, "", None, 1, False),
        (verdict.COMPOSE, 3, False, "", None, 3, False),
        (verdict.THIS_MACHINE, 75, True, "", None, 75, False),
    ],
)
@pytest.mark.unit
def test_verdicts_of_a_script(policy, agent, told, lost, requeues, code, requeue):
    end = decide_script(agent, told=told, lost=lost, policy=policy, requeues=requeues)
    assert (end.code, end.requeue) == (code, requeue)
    assert bool(end.line) == (agent != 0) and "\n" not in end.line
    if requeues and 75 in (agent, code):
        assert ("requeue 3 of at most 3" if requeue else "it was 3 times, MAX_REQUEUES=3") in end.line


@pytest.mark.parametrize(
    ("ended", "told", "code"),
    [
        ({}, True, 75), ({0: 75, 1: 0}, True, 75), ({0: -15, 1: 75}, True, 75), ({0: 0, 1: 0}, True, 0), ({0: -15}, True, 1),
        ({1: 3}, False, 3), ({1: -9}, False, 1), ({0: 69}, False, 1), ({0: 200}, False, 1), ({0: 1, 1: 75}, False, 75),
        ({0: -6, 1: 3}, False, 3), ({0: 1, 1: 3}, False, 3),
    ],
)  # fmt: skip
@pytest.mark.unit
def test_what_the_agent_of_a_script_exits_with(ended, told, code):
    assert script_agent.exit_code(ended, told=told) == code
    is_ended = told and {*ended.values()} == {-15}
    assert script_agent.exit_code(ended, told=told, is_job=True) == (75 if is_ended else code), "no Job had begun"


@pytest.mark.unit
@pytest.mark.parametrize("told", ["rank 1: no\n memory", {"message": "rank 1: no\n memory", "extraInfo": {}}])
def test_what_a_rank_has_told_torchrun_is_read_in_one_line(tmp_path, told):
    (tmp_path / "error.json").write_text(json.dumps({"message": told}))
    assert script_agent.told_in(str(tmp_path / "error.json")) == "rank 1: no memory"
    assert script_agent.told_in(str(tmp_path / "none.json")) == ""


@pytest.mark.unit
def test_both_sides_of_the_agent_of_a_script_mean_the_same():
    """The agent imports nothing of the kit, so it repeats some names."""
    assert (script_agent.COME_BACK, script_agent.UNMET) == (verdict.COME_BACK, verdict.UNMET)
    assert {*script_agent.FINAL} == final().keys()
    assert script_agent.STUCK_S == STUCK_S and torchrun.SCRIPT == execute.SCRIPT


@pytest.mark.unit
def test_a_script_s_restarts_are_bounded_on_every_substrate():
    for name, (spec, _) in GOLDEN.items():
        assert for_script(spec, {}).max_restarts == min(spec.max_restarts, 3), name
        assert for_script(spec, {"MAX_RESTARTS": "1"}).max_restarts == min(spec.max_restarts, 1), name
    with pytest.raises(ConfigError, match="MAX_RESTARTS=many"):
        for_script(GOLDEN["compose"][0], {"MAX_RESTARTS": "many"})


@pytest.mark.unit
def test_compose_runs_a_script_in_place_of_the_named_run():
    words = ["--", "src/my script.py", "--lr", "1e-3"]
    assert compose.overrides({**COMPOSE, "ARGS": "-- 'src/my script.py' --lr 1e-3"}) == words
    assert compose.overrides(COMPOSE, words) == words
    node = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    path = str(compose.end_of_script({**COMPOSE, "RUN": "${RUN:-compose}"}))
    assert f"--until-written=/job/{path}" in node["store"]["command"], "the store ends with the script"
    assert {"MAX_RESTARTS", "PYTHONPATH"} <= node["node"]["environment"].keys()


@pytest.mark.unit
def test_a_script_s_words_follow_torchrun_s_own_options():
    hostile = ["my script.py", "--nnodes=9", "--", "a='b c'", "-m", ""]
    for spec, expected in GOLDEN.values():
        line = printed(spec, command(spec, ["--", *hostile]))
        assert line == expected.removesuffix("-m train") + shlex.join(["--", *hostile])
        assert command(spec, ["--", "-m", "my.module", "x=1"])[-4:] == ["-m", "--", "my.module", "x=1"]


@pytest.mark.parametrize("words", [["my.py"], ["-m", "my.module"]])
def test_torchrun_leaves_a_script_s_words_alone(words):
    """Also one that begins as two of its own options do: torchrun would say that it is ambiguous."""
    words = [*words, "--run", "3", "--log=x", "--nnodes=9", "--", "-m", "a b", "--rdzv-id=x", ""]
    code = (
        "import json, sys; from torch.distributed.run import parse_args, config_from_args\n"
        "config, _, given = config_from_args(parse_args(json.load(sys.stdin)))\n"
        "print(json.dumps([config.max_nodes, given[1:]]))\n"
    )
    line = json.dumps(command(loopback.spec("1", port=0, id="t", is_host=True), ["--", *words])[1:])
    done = subprocess.run([sys.executable, "-c", code], input=line, env=environment(), text=True, capture_output=True)
    assert json.loads(done.stdout) == [1, words], done.stderr  # `given` begins with -u, and -m for a module


def test_a_verdict_is_of_the_launchers_own_record(tmp_path):
    """A refused job took the run's own record, which is newer, for its own, and requeued itself."""
    run = {"outcome": "preempted", "exit_code": 75, "attempt": "a", "time": 9.0, "launcher": "slurm:1"}
    refused = {"outcome": "config_error", "exit_code": 2, "attempt": "b", "time": 5.0, "launcher": "slurm:2"}
    (tmp_path / "outcome.json").write_text(json.dumps(run))
    (tmp_path / "refused.json").write_text(json.dumps(refused))
    for job, said in (("1", "code=75\nrequeue=1"), ("2", "code=2\nrequeue=0"), ("3", "code=1\nrequeue=0")):
        done = launcher("verdict", str(tmp_path), "{}", "1", SLURM_JOB_ID=job)
        assert done.returncode == 0 and done.stdout.startswith(said), done


@pytest.mark.unit
def test_each_substrate_names_its_job_the_same_on_every_node_and_over_restarts():
    others = {
        slurm.spec: (
            SLURM,
            {"SLURM_NODEID": "3", "SLURMD_NODENAME": "gpu-d", "SLURM_RESTART_COUNT": "2"},
            "slurm:70012",
        ),
        kubernetes.pytorchjob: (PYTORCHJOB, {"HOSTNAME": "muster-worker-0"}, "kubernetes:muster-worker-0"),
        kubernetes.static: (TRAINJOB, {"PET_NODE_RANK": "0"}, "kubernetes:muster-node-0-0.muster"),
        kubernetes.indexed_job: (INDEXED, {"JOB_COMPLETION_INDEX": "1"}, "kubernetes:muster-0.muster"),
    }
    for make, (env, change, job) in others.items():
        assert make(env).job_name == make({**env, **change}).job_name == job
    assert compose.spec({**COMPOSE, "PROJECT": "mine"}, address=lambda: "").job_name == "compose:mine/compose"
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    assert "COMPOSE_PROJECT_NAME" in services["node"]["environment"]["PROJECT"]


@pytest.mark.unit
def test_no_manifest_fails_the_job_where_another_try_helps():
    """Nor retries what is final."""
    found = {}
    for path in (ROOT / "k8s").rglob("*.yaml"):
        found |= dict.fromkeys(re.findall(r"operator: In, values: \[(.*)\]", path.read_text()), path)
    assert [*found] == [", ".join(str(code) for code in sorted(final()))] and Held.exit_code not in final()


@pytest.mark.nightly
@pytest.mark.parametrize(("codes", "times"), [([8, 0], 2), ([5, 0], 1)])
def test_a_compose_node_starts_its_agent_again_while_the_run_is_held(own_python, tmp_path, codes, times):
    folder = tmp_path / "runs/compose"
    folder.mkdir(parents=True)
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    place = own_python(
        f"cd {tmp_path}; code=$(head -n 1 codes); sed -i 1d codes; echo x >>times\n"
        f'echo "{{\\"exit_code\\": $code, \\"launcher\\": \\"$MUSTER_JOB\\", \\"time\\": $(date +%s.%N)}}" >{folder}/refused.json\n'
        "[ $code = 0 ] || exit 1"
    )
    line = [place / "python3", "-m", "train.launch", "node"]
    env = environment(**COMPOSE, PATH=f"{place}:/usr/bin:/bin")
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert len((tmp_path / "times").read_text().split()) == times, done
    assert done.returncode == (0 if codes[times - 1] == 0 else 1)


@pytest.mark.nightly
def test_a_store_listens_at_one_address_alone():
    line = [sys.executable, "-m", "train.launch", "store", "--port=0", "--host=127.0.0.2"]
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        socket.create_connection(("127.0.0.2", port), timeout=10).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
    finally:
        process.kill()
        process.communicate()


def test_a_store_outlives_the_end_of_a_job_within_a_script(tmp_path):
    """The script goes on after its muster.Job, and may be started again: launch.json says when it has ended."""
    written = tmp_path / "launch.json"
    line = [sys.executable, "-m", "train.launch", "store", "--port=0", "--host=127.0.0.1"]
    line += [f"--until-end-of={tmp_path}", f"--until-written={written}"]
    stores = [
        subprocess.Popen([*line, f"--linger={linger}"], env=environment(ARGS=args), stdout=subprocess.PIPE, text=True)
        for args, linger in (("max_steps=2", 2), ("-- my.py", 0))
    ]
    try:
        for each in stores:
            assert "rendezvous store on" in each.stdout.readline()
        (tmp_path / "outcome.json").write_text(json.dumps({"outcome": "done", "exit_code": 0, "time": time.time() + 1}))
        assert stores[0].wait(timeout=60) == 0
        assert stores[1].poll() is None, "without 2 s of patience it would have ended before"
        written.write_text("{}")
        assert stores[1].wait(timeout=60) == 0
    finally:
        for each in stores:
            each.kill()
            each.communicate()


@pytest.mark.parametrize("module", ["__main__", "execute", "substrate", "store", "answer", "script"])
def test_a_launcher_starts_without_torch(module):
    code = f"import sys, muster.launcher.{module}; sys.exit(any(name in sys.modules for name in ('torch', 'hydra')))"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def launcher(*arguments, **env):
    line = [sys.executable, "-m", "train.launch", *arguments]
    return subprocess.run(line, env=environment(**env), capture_output=True, text=True, timeout=60)


def test_the_commands_say_what_is_wrong_in_one_line(tmp_path):
    for arguments, env, said in (
        (["nod"], {}, "did you mean node?"),
        (["node"], {}, "no launcher's variables"),
        (["command"], {**SLURM, "SLURM_NODEID": "first"}, "SLURM_NODEID=first"),
        (["plan", "lr=3"], SLURM, "did you mean optimizer.lr?"),
        (["node", "lr=3"], INDEXED, "did you mean optimizer.lr?"),
        (["check"], {**COMPOSE, "ARGS": "lr=3"}, "did you mean optimizer.lr?"),
        (["check"], {**COMPOSE, "ARGS": "-- src/none.py"}, "src/none.py is not a file in"),
        (["plan", "--", "none.py"], SLURM, "none.py is not a file in"),
        (["node", "--", "none.py"], INDEXED, "none.py is not a file in"),
        (["node", "--", "-m", "none.none"], {"NPROC": "2"}, "there is no module none.none in"),
        (["node", "--"], {"NPROC": "2"}, "-- is followed by nothing: give a script"),
        (["check", "--", "--lr", "3"], {}, "-- is followed by --lr 3: give a script"),
        (["check", "lr=3", "--", "none.py"], {}, "lr=3 stands before --"),
        (["node", "max_steps=3"], {"NPROC": "0"}, "NPROC=0 is not valid"),
        (["node"], {"NPROC": "2", "NUMA_BINDING": "nodes"}, "NUMA_BINDING=nodes is not valid; valid: node, socket"),
    ):
        done = launcher(*arguments, **env)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1 and not done.stdout, done


def test_command_prints_what_node_would_run():
    done = launcher("command", "name=a b", **{**COMPOSE, **INDEXED})
    spec = kubernetes.indexed_job(INDEXED)
    words = shlex.split(done.stdout)
    assert words[3 - len(words) :][-1] == "name=a b" and words[-3:-1] == ["-m", "train"]
    assert done.stdout.endswith(shlex.join(command(spec, ["name=a b"])[1:]) + "\n")


def test_processes_are_bound_beside_their_gpus_where_there_are_some(tmp_path):
    (tmp_path / "my.py").touch()
    env = {"NPROC": "2", "NUMA_BINDING": "node"}
    done = launcher("command", "--", str(tmp_path / "my.py"), **env)
    assert " --numa-binding=node " in done.stdout, done
    if not any(Path(each).exists() for each in execute.GPUS):
        done = launcher("node", "--", str(tmp_path / "my.py"), **env)
        assert done.returncode == 2 and "this host has none: unset it" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.nightly
def test_submitted_processes_are_bound_beside_their_gpus_as_well(tmp_path):
    def submit(*words):
        line = [sys.executable, str(ROOT / "slurm/submit.py"), *words, "cluster=local", f"cluster.log_dir={tmp_path}"]
        return subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)

    assert " --numa-binding=node " in submit("--dry-run", "cluster.numa_binding=node").stdout
    refused = submit("--dry-run", "cluster.numa_binding=nodes")
    assert refused.returncode == 2 and "cluster.numa_binding=nodes is not valid; valid: node" in refused.stderr
    if not any(Path(each).exists() for each in execute.GPUS):
        done = submit("--wait", "cluster.numa_binding=node")
        assert done.returncode == 1 and "failed: numa_binding=node (NUMA_BINDING) binds each" in done.stdout, done


def test_command_needs_no_cluster(tmp_path):
    """It prints what one process, or NPROC of them, would run on this machine."""
    for env, processes in (({}, 1), ({"NPROC": "4"}, 4)):
        done = launcher("command", "--", "my.py", "--lr", "1e-3", **env)
        assert f" --nnodes=1 --nproc-per-node={processes} --max-restarts=3 " in done.stdout, done
        assert done.stdout.endswith(" -- my.py --lr 1e-3\n")


def test_plan_and_verdict_of_a_script(tmp_path):
    path = tmp_path / "my script.py"
    path.touch()
    done = launcher("plan", "--", str(path), "lr=3", **SLURM)
    assert done.returncode == 0 and f"run='{path}'\nbefore=''\n" in done.stdout, done
    for restarts, lost, said in (
        ("0", "", "code=75\nrequeue=1\nline='my.py: to be run again (exit code 75); requeue 1 of at most 2'\n"),
        ("1", "n2 n3", "code=75\nrequeue=1\nline='my.py: lost n2 n3; requeue 2 of at most 2'\n"),
        ("2", "", "code=75\nrequeue=0\nline='my.py: to be run again (exit code 75); not requeued again"),
    ):
        env = {**SLURM, "SLURM_RESTART_COUNT": restarts, "MAX_REQUEUES": "2"}
        done = launcher("verdict", "my.py", "", "75", "told", lost, **env)
        assert done.stdout.startswith(said), done


def started(place, folder, env, **popen):
    """A node whose agent is `place`'s torchrun; comes back when that has written to folder/heard."""
    line = [place / "python3", "-m", "train.launch", "node", f"output_dir={folder / 'run'}"]
    process = subprocess.Popen(
        line, env=environment(**env, PATH=f"{place}:/usr/bin:/bin"), cwd=folder, text=True, **popen
    )
    deadline = time.monotonic() + 60
    while not ((folder / "heard").exists() and (folder / "heard").read_text()):
        ended = process.poll() is not None  # looked at first: one that ends at once has written before
        assert time.monotonic() < deadline and (not ended or (folder / "heard").exists())
        time.sleep(0.05)
    return process


@pytest.mark.nightly(but=["env0-75-unheard0"])
@pytest.mark.parametrize(("env", "code", "unheard"), [(INDEXED, 75, []), (SLURM, 1, [signal.SIGTERM, signal.SIGTERM])])
def test_a_node_passes_on_one_signal_alone_and_shields_its_agent(own_python, tmp_path, env, code, unheard):
    """A second SIGTERM would end torchrun's wait for its workers, and Slurm sends the first to the agent itself."""
    heard = tmp_path / "heard"
    place = own_python(
        f"trap 'echo term >>{heard}' TERM; echo ready >>{heard}\n"
        f"for _ in $(seq 400); do sleep 0.1; [ -e {tmp_path}/end ] && exit 1; done"
    )
    process = started(place, tmp_path, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    agent = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    for number in unheard:
        process.send_signal(number)
        time.sleep(0.3)
    assert heard.read_text().split() == ["ready"]
    subprocess.run(["kill", "-USR1", agent], check=True)  # Slurm's comes to every process: the agent would die of it
    process.send_signal(signal.SIGUSR2)
    until(lambda: "term" in heard.read_text(), "its way to the agent", timeout_s=60)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    (tmp_path / "end").touch()
    out, _ = process.communicate(timeout=60)
    assert heard.read_text().split() == ["ready", "term"], out
    assert process.returncode == code and (code == 1 or "stopped before a rank began to train" in out), out
    spec = here(env).spec(environment(**env))
    line = command(spec, [f"output_dir={tmp_path / 'run'}"], module="muster")  # the folder is no clone
    assert printed(spec, line) + "\n" in out, "pasteable: a short name"


@pytest.mark.nightly
def test_the_end_of_the_run_is_said_after_torchrun_s_own_report(own_python, tmp_path):
    """torchrun's is a traceback, and comes after the line that the ranks have said."""
    error = "stopped at step 5 of 9 and saved it: it's to be run again"
    record = {"outcome": "preempted", "exit_code": 75, "attempt": "a", "time": 1.0, "error": error}
    (tmp_path / "record").write_text(json.dumps(record))
    place = own_python(
        f"mkdir -p {tmp_path}/run; cp {tmp_path}/record {tmp_path}/run/outcome.json; echo ready >{tmp_path}/heard\n"
        "echo 'torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15' >&2; exit 1"
    )
    process = started(place, tmp_path, INDEXED, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "SignalException" in out
    assert out.splitlines()[-1] == f"muster: {tmp_path / 'run'}: preempted (exit code 75): {error}"


def test_an_agent_dies_with_its_launcher(own_python, tmp_path):
    process = started(own_python(f"echo $$ >{tmp_path}/heard; exec sleep 60"), tmp_path, INDEXED)
    agent = int((tmp_path / "heard").read_text())
    process.kill()
    process.wait()
    until(lambda: has_ended(agent), "end of the orphan", timeout_s=60)


SETTINGS = (
    r"--rdzv[-_]\w+=|rdzv(Backend|Id|Conf)\b|PET_RDZV_CONF|(join|last_call|read|close|heartbeat)_timeout|keep_alive"
    r"|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|TORCH_ELASTIC_SHUTDOWN_TIMEOUT|--shutdown-timeout"
)
ALLOWED = r"muster/launcher/|muster/world/external_group\.py$|docs/|.*\.md$|tests/\w+/test_\w+\.py$|docker/(?:wheel\.)?Dockerfile$"


def tracked():
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_no_rendezvous_setting_stands_outside_the_launch_policy():
    """Prose may speak of them, as a note of a Job's does, tests may say what they expect, and the image serves torchrun lines given by hand."""
    found = [
        f"{name}:{number}: {line}"
        for name in tracked()
        if not re.match(ALLOWED, name) and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), 1)
        if re.search(SETTINGS, line) and not line.lstrip().startswith(("#", "STUCK_S"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.unit
def test_each_substrate_ends_its_agents_before_it_is_killed():
    """The grace time that a substrate gives is the one that its nodes are told of."""
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    node = services["node"]
    assert node["stop_grace_period"] == f"{node['environment']['GRACE_S']}s"
    for script in ("ddp", "container"):
        assert f"#SBATCH --signal=B:USR1@{slurm.GRACE_S}\n" in (ROOT / f"slurm/{script}.sbatch").read_text()
    for spec, _ in GOLDEN.values():
        assert int(variables(spec)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == spec.grace_s - MARGIN_S < spec.grace_s
    assert services["store"]["command"][:5] == ["python3", "-m", "muster", "launch", "store"]
    assert "--port" not in services["store"]["command"], "the nodes look for it at the default port"


def deaths(host, count, *, ago_s=60.0):
    return [{"kind": "event", "event": "survived", "host": host, "time": 10_000.0 - ago_s}] * count


@pytest.mark.unit
@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (deaths("n2", 5), "n2"),
        (deaths("n2.cluster.local", 5), "n2"),
        (deaths("n2", 4), ""),
        (deaths("n2", 5, ago_s=3700), ""),
        (deaths("n2", 5) + deaths("n1", 5), ""),
        (deaths("n2", 6) + deaths("n1", 5), "n2"),
        (deaths("n2", 6) + deaths("n9", 60), "n2"),  # excluded already
        ([{"kind": "event", "event": "note", "time": 9999.0}], ""),
        ([], ""),
    ],
)
def test_a_node_whose_ranks_die_often_is_blamed(events, expected):
    assert bad_nodes.blamed(events, ["n1", "n2"], now=10_000.0) == expected
    assert bad_nodes.blamed(events, ["n2"], now=10_000.0) == "", "there is no other one to compare it with"


ALIKE = dict.fromkeys(("n1", "n2", "n3", "n4", "n5"), "(null) gpu:8 96 1000000") | {"cpu": "(null) (null) 8 4000"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("nodes", "usable", "excluded", "expected"),
    [
        ("n1 n2", "n1 n2 n3", "", "n2"),
        ("n1 n2", "n1 n2", "", ""),  # it would wait for ever
        ("n1 n2", "n1 n2 cpu", "", ""),
        ("n1 n2", "n1 n2 n3", "n3", ""),
        ("n1 n3", "n1 n2 n3", "", ""),
        ("n1 n2", "n1 n2 n3 n4 n5", "n4 n5", "n2"),  # the user's own do not count
        ("n1 n2", "n1 n2 n3 n4 n5", "n7 n8", ""),
    ],
)
def test_a_job_can_do_without_the_node_that_it_excludes(nodes, usable, excluded, expected):
    events = [*deaths("n7", 1), *deaths("n8", 1), *deaths("n2", 6)]
    given = {
        "nodes": nodes.split(),
        "usable": {name: ALIKE[name] for name in usable.split()},
        "excluded": excluded.split(),
    }
    assert bad_nodes.to_exclude(events, **given, most=2, now=10_000.0) == expected


def test_the_node_to_exclude_is_part_of_the_verdict(tmp_path, capsys, monkeypatch):
    now = time.time()
    lines = [{"kind": "event", "event": "survived", "host": "n2", "time": now, "step": step} for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    usable = "".join(f"{name} (null) (null) 2 4000\n" for name in ("n1", "n2", "n3"))

    def bad(*words, told="told"):
        assert main(["verdict", *words[:2], "1", told, "", *words[2:]]) == 0
        return re.search(r"bad=(.*)", capsys.readouterr().out)[1].strip("'")

    assert bad(str(tmp_path), "{}", "n1 n2", usable, "") == "n2"
    assert bad(str(tmp_path), "{}", "", "", "") == "", "a job that asks for certain nodes"
    assert bad(str(tmp_path), "{}", "n1 n2", usable, "", told="") == "", "not requeued"
    assert bad("my.py", "", "n1 n2", usable, "") == "", "a script of a user's own has no record"
    refused = {"attempt": "a", "outcome": "config_error", "exit_code": 2, "time": now, "bad_host": "n1.example.org"}
    (tmp_path / "refused.json").write_text(json.dumps(refused))
    assert bad(str(tmp_path), "{}", "n1 n2", usable, "", told="") == "n1", "the doctor's word is newer than the deaths"
    assert bad(str(tmp_path), json.dumps(refused), "n1 n2", usable, "", told="") == "", "of an attempt before"
    assert bad(str(tmp_path), "{}", "n1", usable, "", told="") == "", "the job has no other"
    elsewhere = {**refused, "bad_host": "pod-7"}
    (tmp_path / "refused.json").write_text(json.dumps(elsewhere))
    assert bad(str(tmp_path), "{}", "n1 n2", usable, "", told="") == "", (
        "no node of this name: another is not to blame for it"
    )
    (tmp_path / "refused.json").write_text(json.dumps(refused))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert bad(str(tmp_path), "{}", "n1 n2", usable, "", told="") == "", "at most twice"
    monkeypatch.setenv("MAX_EXCLUDED", "0")
    assert bad(str(tmp_path), "{}", "n1 n2", usable, "") == ""
    assert main(["verdict"]) == 2
