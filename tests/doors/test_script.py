"""A user's own script in place of the trainer, under `muster launch node`, on two ranks."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from kit import script as mine
from kit.job import environment, free_port
from kit.loopback import children
from kit.until import until

SLURM = {
    "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "127.0.0.1", "HEAD": "127.0.0.1", "MAX_RESTARTS": "1", "GRACE_S": "30",
}  # fmt: skip


def start(folder, *words, **env):
    """A node of two ranks on this machine, in `folder`, which is all that the script knows."""
    line = [sys.executable, "-m", "train.launch", "node", "--", *words]
    env = environment(**{"NPROC": "2", "PYTHONUNBUFFERED": "", **env})
    return subprocess.Popen(line, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, timeout_s=180):
    out, _ = process.communicate(timeout=timeout_s)
    return process.returncode, out


def launch(folder, *words, **env):
    return finish(start(folder, *words, **env))


def reach(folder, step, process):
    def reached():
        assert process.poll() is None, process.communicate()[0]
        return len(mine.steps(folder)) >= step

    until(reached, f"step {step}", timeout_s=120)


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["my script.py"], ["-m", "mine.training"]])
def test_a_script_runs_unchanged_with_its_arguments_untouched(tmp_path, words):
    mine.write(tmp_path)
    mine.write(tmp_path, name="mine/training.py")
    hostile = ["a b", "it's", '"q"', "x=1", "--", "--run", "optimizer.lr=$HOME", "", "*"]
    code, out = launch(tmp_path, *words, f"--out={tmp_path}", "--steps=3", *hostile, OMP_NUM_THREADS="2")
    assert code == 0, out
    said = [line for line in out.splitlines() if " start 0 " in line]
    assert sorted(line[:4] for line in said) == ["[0] ", "[1] "], out
    assert all(
        '"a b", "it\'s", "\\"q\\"", "x=1", "--", "--run", "optimizer.lr=$HOME", "", "*"] threads 2' in line
        for line in said
    ), out
    assert out.count("] [] are imported") == 2, "neither the trainer nor the kit is imported by a rank"
    assert mine.steps(tmp_path) == [0, 1, 2]


@pytest.mark.nightly
def test_told_to_stop_it_saves_and_leaves_with_75_and_the_same_command_goes_on(tmp_path):
    words = (mine.write(tmp_path).name, f"--out={tmp_path}", "--steps=60")
    process = start(tmp_path, *words, "--step-s=0.5")
    reach(tmp_path, 5, process)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 75 and "muster: my script.py: to be run again (exit code 75)" in out, out
    code, out = launch(tmp_path, *words)
    assert code == 0, out
    assert mine.steps(tmp_path) == [*range(60)]


@pytest.mark.parametrize(
    ("words", "name", "alias"), [(["job.py"], "muster", ""), (["-m", "jobs.job"], "kit", " as kit")]
)
def test_told_to_stop_before_its_job_begins_it_is_run_again(tmp_path, words, name, alias):
    """The script of a Job may load its data first, for minutes."""
    path = tmp_path / ("job.py" if words[0] == "job.py" else "jobs/job.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"import time\nopen('ready', 'w').close()\ntime.sleep(60)\nimport muster{alias}\n{name}.Job('run').run(print)\n"
    )
    process = start(tmp_path, *words)
    until((tmp_path / "ready").exists, "start", timeout_s=120)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 75 and "to be run again (exit code 75)" in out, out


LATE = """
import os, sys, time
from pathlib import Path
import muster
from muster.errors import ConfigError
def main(job):
    Path(f"draft-{job.rank}").write_text(f"{os.getpid()} {os.getppid()}")
    os.rename(f"draft-{job.rank}", f"pids-{job.rank}")
    other = Path(f"pids-{1 - job.rank}")
    while job.rank == int(sys.argv[1]):
        time.sleep(0.02)
        if other.exists() and not any(Path("/proc", each).exists() for each in other.read_text().split()):
            break
    raise ConfigError("there is no such model")
muster.Job("run").run(main)
"""


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_job_that_no_restart_helps_is_not_run_again(tmp_path, late):
    """Whichever rank ends last: the node's first one also ends the agent, perhaps as that ends it for the other's failure."""
    (tmp_path / "job.py").write_text(LATE)
    code, out = launch(tmp_path, "job.py", late)
    assert code == 2 and "muster: job.py: failed (exit code 2): rank " in out.splitlines()[-1], out


@pytest.mark.nightly
def test_told_to_stop_without_a_handler_it_has_failed(tmp_path):
    (tmp_path / "naive.py").write_text(
        "import time\n# a muster.Job() saves by itself\ntime.sleep(1)\nopen('ready', 'w').close()\ntime.sleep(60)\n"
    )
    process = start(tmp_path, "naive.py")
    until((tmp_path / "ready").exists, "start", timeout_s=120)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert (
        code == 1
        and "rank 0 was ended by SIGTERM; a script that saves on SIGTERM and leaves with 75 is run again" in out
    ), out


@pytest.mark.nightly
def test_a_script_that_always_fails_ends(tmp_path):
    words = (mine.write(tmp_path).name, f"--out={tmp_path}", "--fault=always")
    code, out = launch(tmp_path, *words, MAX_RESTARTS="2")
    assert code == 3 and mine.attempts(tmp_path, rank=1) == [0, 0, 0], out
    assert out.splitlines()[-2:] == [
        "muster: rank 1 left with exit code 3",
        "muster: my script.py: failed (exit code 3): rank 1 left with exit code 3",
    ]


def test_a_killed_rank_is_started_again(tmp_path):
    code, out = launch(tmp_path, mine.write(tmp_path).name, f"--out={tmp_path}", "--fault=once")
    assert code == 0 and mine.attempts(tmp_path, rank=1) == [0, 0], out
    aborted = r"(rank 0 was ended by SIGABRT; )?"  # by torch, as its peer is gone
    assert re.search(rf"\nmuster: {aborted}rank 1 was ended by SIGKILL: all ranks restart \(1 of at most 3\)\n", out), (
        out
    )
    assert "process group" not in out, out


def test_ranks_that_form_no_process_group_are_noted(tmp_path):
    (tmp_path / "alone.py").write_text("print('trained')\n")
    code, out = launch(tmp_path, "alone.py")
    assert code == 0 and out.count("trained") == 2, out
    assert out.count("muster: note: the 2 ranks have formed no process group at MASTER_PORT=") == 1, out


@pytest.mark.nightly
def test_a_rank_that_leaves_with_75_by_itself_is_not_started_again_here(tmp_path):
    code, out = launch(tmp_path, mine.write(tmp_path).name, f"--out={tmp_path}", "--fault=again")
    assert code == 75 and mine.attempts(tmp_path, rank=1) == [0], out


@pytest.mark.nightly
def test_a_rank_that_was_only_ended_with_a_failed_one_asks_for_nothing(tmp_path):
    """Else a script that saves on SIGTERM and always fails would be requeued for ever."""
    (tmp_path / "one.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "if os.environ['RANK'] == '0':\n    pathlib.Path('ready').touch()\n    time.sleep(60)\n"
        "while not os.path.exists('ready'):\n    time.sleep(0.05)\n"
        "sys.exit(4)\n"
    )
    code, out = launch(tmp_path, "one.py", MAX_RESTARTS="0")
    assert code == 4 and "muster: rank 1 left with exit code 4" in out and "rank 0 left" not in out, out


@pytest.mark.parametrize(
    ("ranks", "error", "starts"),
    [
        ("2", "KeyError('lr')", 2),
        ("1", "KeyError('lr')", 2),
        ("2", "RuntimeError('no such data set')", 2),
        ("2", "OSError('lr')", 4),
        ("1", "KeyError('lr') from OSError()", 4),
        ("1", "RuntimeError('Connection closed by peer')", 4),
    ],
)
def test_an_error_of_the_script_s_own_code_ends_it_at_the_second_start_and_is_the_last_line(
    tmp_path, ranks, error, starts
):
    """Another error, of a disk or of the network, may be gone at the next start."""
    (tmp_path / "mine.py").write_text(
        "import os\n"
        f"if os.environ['RANK'] == '{int(ranks) - 1}':\n"
        "    open('starts', 'a').write('x')\n"
        f"    raise {error}\n"
    )
    code, out = launch(tmp_path, "mine.py", NPROC=ranks)
    assert code == 1 and (tmp_path / "starts").read_text() == "x" * starts, out
    said = f"failed (exit code 1): rank {int(ranks) - 1} left with exit code 1: {tmp_path}/mine.py:4: {error.partition('(')[0]}: "
    assert said in out.splitlines()[-1], out


def test_an_option_that_the_script_does_not_know_ends_it_at_the_second_start_and_is_the_last_line(tmp_path):
    (tmp_path / "mine.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    code, out = launch(tmp_path, "mine.py", "--batchsize=6")
    assert code == 2 and out.count("all ranks restart") == 1, out
    assert out.splitlines()[-1].endswith("mine.py: error: unrecognized arguments: --batchsize=6"), out


def test_a_module_s_error_is_shown_once_with_its_rank(tmp_path):
    """Also the last words of a rank, which has no time to end its line."""
    (tmp_path / "broken.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '1':\n    print('last words', end='', flush=True)\n    raise ValueError('no such file')\n"
    )
    code, out = launch(tmp_path, "broken.py", MAX_RESTARTS="0")
    assert code == 1 and out.count("[1] ValueError: no such file\n") == 1 and "[1] last words\n" in out, out


@pytest.mark.nightly
def test_no_rank_outlives_its_agent(tmp_path):
    process = start(tmp_path, mine.write(tmp_path).name, f"--out={tmp_path}", "--steps=10000", "--step-s=0.05")
    reach(tmp_path, 3, process)
    [agent] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    assert len(ranks) == 2
    os.kill(int(agent), signal.SIGKILL)
    finish(process)
    until(lambda: not [rank for rank in ranks if Path("/proc", rank).exists()], "end of the ranks", timeout_s=60)


def two_nodes(folder, *words, **env):
    job = {"SLURM_JOB_ID": str(free_port() - 10000), "NPROC": "1", **SLURM, **env}
    return [start(folder, *words, SLURM_NODEID=str(node), **job) for node in range(2)]


def test_a_host_that_has_no_name_is_one_line(tmp_path):
    code, out = launch(
        tmp_path, mine.write(tmp_path).name, **SLURM | {"HEAD": "a..b"}, SLURM_JOB_ID="7", SLURM_NODEID="1"
    )
    assert code == 2 and "a..b is not a host's name" in out.splitlines()[-1] and "Traceback" not in out, out


@pytest.mark.parametrize("command", [("node", "--", "my.py"), ("doctor", "--quick")], ids=["node", "doctor"])
def test_a_node_that_holds_the_rendezvous_and_never_comes_is_named(tmp_path, command):
    """By a launcher of 2 s of patience: the wait of 300 s is the same."""
    (tmp_path / "my.py").touch()
    impatient = "import sys; from muster.launcher import __main__ as launch, slurm, spec; " + (
        "slurm.Dynamic = lambda **given: spec.Dynamic(**given, timings=spec.Timings(join_timeout=2)); "
        "sys.exit(launch.main(sys.argv[1:]))"
    )
    env = environment(**SLURM, SLURM_JOB_ID=str(free_port() - 10000), SLURM_NODEID="1", NPROC="1")
    done = subprocess.run(
        [sys.executable, "-c", impatient, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert "has not come within 2 s: see that node's log" in done.stderr and "Traceback" not in done.stderr, done
    assert done.returncode in (1, 69), done


@pytest.mark.nightly(but=["freed"])
@pytest.mark.parametrize("then", ["freed", "told", "kept"])
def test_a_port_in_use_is_waited_for_in_one_line_by_the_node_that_would_listen_there(tmp_path, then):
    """It may be that of the attempt before, which still saves. A stop request ends the wait."""
    words = (mine.write(tmp_path).name, f"--out={tmp_path}", "--steps=1")
    job = {**SLURM, "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        job |= {"MASTER_PORT": str(port), "SLURM_JOB_ID": "7"}
        waits = start(tmp_path, *words, **job)
        assert f":{port}" in waits.stdout.readline()
        assert f"waits up to 30 s: port {port} of " in waits.stdout.readline() and not children(waits.pid)
        if then == "told":
            waits.send_signal(signal.SIGTERM)
            assert finish(waits, timeout_s=60) == (75, "")
            return
        if then == "kept":
            code, out = finish(waits, timeout_s=60)
            assert (
                code == 2
                and f"port {port} of " in out
                and "give all nodes a free one" in out
                and "Traceback" not in out
            ), out
            return
    code, out = finish(waits)
    assert code == 0 and mine.steps(tmp_path) == [0], out


@pytest.mark.nightly(but=["2"])
@pytest.mark.parametrize("told", [None, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_node_waits_for_the_one_that_holds_the_rendezvous(tmp_path, told):
    """Not in torchrun, which gives up after 20 s; a stop request ends the wait."""
    words = (mine.write(tmp_path).name, f"--out={tmp_path}", "--steps=3")
    job = {"SLURM_JOB_ID": str(free_port() - 10000), "NPROC": "1", **SLURM}
    waits = start(tmp_path, *words, SLURM_NODEID="1", **job)
    assert "--rdzv-endpoint" in waits.stdout.readline()
    assert "waits up to 300 s for the node that holds the rendezvous, 127.0.0.1:" in waits.stdout.readline()
    assert not children(waits.pid)
    if told:
        waits.send_signal(told)
        code, out = finish(waits, timeout_s=60)
        assert (code, out) == (75, "") and not mine.attempts(tmp_path), "torchrun is not started"
        return
    host = start(tmp_path, *words, SLURM_NODEID="0", **job)
    assert [finish(each)[0] for each in (host, waits)] == [0, 0] and mine.steps(tmp_path) == [0, 1, 2]


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "code"), [("again", 75), ("always", 3)])
def test_of_two_nodes_both_end_soon_and_the_largest_code_says_how(tmp_path, fault, code):
    """srun reports the largest. The node whose ranks were not at fault waits for no one."""
    words = (mine.write(tmp_path).name, f"--out={tmp_path}", f"--fault={fault}")
    began = time.monotonic()
    ends = [finish(process) for process in two_nodes(tmp_path, *words)]
    codes = [end[0] for end in ends]
    if fault == "again" and codes == [0, 0]:
        # The other node's agent was faster: it restarted both before this one had seen the 75, so the job was run again.
        assert all("done" in end[1] for end in ends) and (tmp_path / "attempts-1").read_text().count("\n") == 2, ends
        return
    assert max(codes) == code and min(codes) > 0, ends
    assert time.monotonic() - began < 120, "the rendezvous's own patience is 300 s"


AGENT = """
import logging, os, runpy, signal, sys
shown, failures = logging.Handler.format, []

def told(self, record):
    failures.extend([1] * ("failed (exitcode" in record.getMessage()))
    if len(failures) == int(os.environ["TOLD_AT"]):
        failures.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
    return shown(self, record)

logging.Handler.format = told
from muster.launcher import torchrun
sys.argv[0] = torchrun.__file__
sys.path[0] = os.path.dirname(torchrun.__file__)
runpy.run_path(torchrun.__file__, run_name="__main__")
"""
HAS_COME = "    while not os.path.exists('begins'):\n        time.sleep(0.02)\n"
RANKS = {
    "dies": "os.kill(os.getpid(), 9)\n",
    "is stuck": "signal.signal(signal.SIGTERM, lambda *_: (say('told'), time.sleep(2), os._exit(1)))\n"
    f"if rank == 1:\n{HAS_COME}    os.kill(os.getpid(), 9)\n",
    "leaves a helper": "subprocess.Popen(['sleep', '30'], start_new_session=True)\n"
    "signal.signal(signal.SIGTERM, lambda *_: (say('told'), os._exit(75)))\n",
    "goes on": "signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else lambda *_: say('told'))\n"
    "if rank == 1:\n    say('begins')\n    os._exit(0)\n",
}


@pytest.mark.parametrize(
    ("script", "ranks", "told_at", "stops", "code"),
    [
        ("dies", 1, 2, [], 75),
        ("is stuck", 2, -1, [("told", 1)], 75),
        ("leaves a helper", 2, -1, [("begins", 2), ("", 0)], 75),
        ("goes on", 2, -1, [("begins", 2), ("told", 1), ("told", 2)], 1),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_an_agent_that_is_told_to_stop_says_how_its_ranks_stand(tmp_path, script, ranks, told_at, stops, code):
    """As a line on a second failure is logged, while the others of a rank that was killed are ended, again after all have left, and
    again while a rank goes on to work, which then dies with the agent."""
    (tmp_path / "mine.py").write_text(
        "import os, signal, subprocess, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "say = lambda word: print(word, flush=True)\n"
        f"{RANKS[script]}"
        "say('begins'), open('begins', 'w').close()\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    words = [f"--nproc-per-node={ranks}", "--max-restarts=3", "--standalone", "--monitor-interval=0.2", "mine.py"]
    with open(tmp_path / "out", "w") as out:
        line, env = [sys.executable, "-c", AGENT, *words], environment(MUSTER_SCRIPT="1", TOLD_AT=str(told_at))
        process = subprocess.Popen(line, env=env, cwd=tmp_path, stdout=out, stderr=out)
    said = (tmp_path / "out").read_text

    def has_come(word, times):
        return said().count(f"{word}\n") == times if word else not children(process.pid)

    for word, times in stops:
        until(partial(has_come, word, times), f"{word or 'end of the ranks'}, {times} times", timeout_s=60, said=said)
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=90) == code, said()
