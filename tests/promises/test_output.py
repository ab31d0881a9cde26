"""Training never ends because nobody looks at what it prints any more."""

import json
import os
import pty
import shlex
import subprocess
import sys
import time

import pytest
from kit.job import QUIET, ROOT, Result, environment, free_port
from kit.until import until

from muster.attempt.records import names_of
from muster.loggers import jsonl
from muster.loggers.console import Bar, describe

SMALL = (*QUIET, "model.hidden=[4]", "max_steps=30", "checkpoint.every_steps=10", "batch_size=64")
PYTHON = shlex.quote(sys.executable)
LAUNCHED = {
    "python": f"{PYTHON} -m train",
    "torchrun": f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node=2 -m train",
    "node": f"{PYTHON} -m train.launch node",
}
ENDS = {
    "reader goes away": "{line} 2>&1 | head -n 1; exit ${{PIPESTATUS[0]}}",
    "closed": "{line} >&- 2>&- <&-",
    "full disk": "{line} >/dev/full 2>&1",
}


def shell(line, cwd, **env):
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=120
    )


def pod():
    """What a PyTorchJob's operator writes into the environment of its one pod."""
    where = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "HOSTNAME": "127", "POD_IP": "127.0.0.1"}
    return {**where, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "GRACE_S": "30"}


def ended_well(folder, *, printed=True):
    result = Result(0, "", folder, 0)
    assert result.outcome["outcome"] == "done" and result.outcome["exit_code"] == 0
    assert [line["step"] for line in result.lines("train")] == [*range(1, 31)] and (folder / "model.pt").exists()
    said = [line["text"] for line in result.events("note") if "is dropped, and the run continues" in line["text"]]
    assert len(said) == printed, said
    assert not list(folder.glob(".*"))


@pytest.mark.nightly(
    but=[
        "python-reader goes away-loader.num_workers=1",
        "python-closed-log.progress=plain",
        "python-full disk-log.progress=bar",
    ]
)
@pytest.mark.parametrize(
    ("launched", "end", "more"),
    [
        ("python", "reader goes away", "loader.num_workers=1"),
        ("python", "closed", "log.progress=plain"),
        ("python", "full disk", "log.progress=bar"),
        ("torchrun", "reader goes away", "log.progress=plain"),
        ("torchrun", "closed", "log.progress=bar"),
        ("node", "reader goes away", "log.progress=plain"),
        ("node", "closed", "log.progress=plain"),
    ],
)
def test_a_run_that_nobody_listens_to_goes_on_to_its_end(tmp_path, launched, end, more):
    """It ended with exit code 0 after two lines, and with 1 before the first step."""
    waits = "+callbacks.unheard._target_=kit.parts.callbacks.Unheard" if end == "reader goes away" else ""
    line = f"{LAUNCHED[launched]} {' '.join(map(shlex.quote, SMALL))} output_dir={tmp_path}/run {more} {waits}"
    done = shell(ENDS[end].format(line=line), tmp_path, **(pod() if launched == "node" else {}))
    assert done.returncode == 0, done.stdout + done.stderr
    ended_well(tmp_path / "run")


def test_a_terminal_that_is_closed_ends_nothing(tmp_path):
    """SIGHUP to all that run in it, and EIO for whatever is written to it."""
    head, terminal = pty.openpty()
    line = [
        sys.executable,
        "-m",
        "train",
        *SMALL,
        f"output_dir={tmp_path}/run",
        "+callbacks.unheard._target_=kit.parts.callbacks.Unheard",
    ]
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", take, *line],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environment(), cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    until(lambda: b"step" in os.read(head, 10_000), "progress bar", timeout_s=60)
    os.close(head)
    assert process.wait(120) == 0
    ended_well(tmp_path / "run")


@pytest.mark.nightly
def test_tools_whose_reader_goes_away_end_quietly(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text(
        json.dumps({"kind": "event", "event": "start", "time": time.time(), "step": 0, "total_steps": 9}) + "\n"
    )
    for tool in ("report --watch run", f"doctor --lint {ROOT}/slurm {ROOT}/k8s", "launch --help"):
        done = shell(f"{PYTHON} -m train.{tool} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
        assert done.returncode == 0 and not done.stderr, f"{tool}: {done.stderr}"
    done = shell(f"{PYTHON} -m train --help | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.unit
def test_a_loop_that_counts_no_samples_shows_no_speed():
    assert describe({"kind": "train", "step": 3, "loss": 0.5, "samples": 0, "samples_per_s": 0.0}, 0) == "step 3  loss 0.5000"  # fmt: skip


@pytest.mark.unit
def test_a_rank_that_stood_still_is_told_from_one_that_was_killed():
    """Its watchdog ends a stopped process by the same signal."""
    death = {"rank": 1, "host": "n2", "cause": "SIGKILL", "seconds": 0.5, "step": 9}
    told = [describe({"kind": "event", "event": "survived", **death, "silent": silent}, 0) for silent in (0.2, 20.4)]
    said = "SIGKILL, 20 s after its last step; a rank that stands still for timeout_s is ended so"
    assert [each.partition("(")[2].partition(")")[0] for each in told] == ["SIGKILL", said]
    assert names_of([{**death, "silent": 20.4}]) == f"rank 1 on n2 ({said})"


@pytest.mark.unit
def test_a_bar_counts_the_ranks_and_what_happened_to_them_also_before_it():
    starts = [{"kind": "event", "event": name, "step": 0, "world_size": 2} for name in ("start", "resume")]
    death = {"kind": "event", "event": "survived", "step": 5, "rank": 0}
    bar = Bar(step=5, total_steps=9, earlier=[*starts, death])
    try:
        assert bar.ranks == "2 ranks, 1 restart, 1 death survived"
        bar.log(death)
        assert bar.ranks == "2 ranks, 1 restart, 2 deaths survived"
    finally:
        bar.close()


@pytest.mark.unit
def test_a_long_file_of_records_is_read_and_cut_from_its_end(tmp_path):
    """As if all lines were read: those before the last 64 KiB stay as they are."""
    path = tmp_path / jsonl.NAME
    event = {"kind": "event", "event": "start", "step": 0, "world_size": 2}
    steps = [{"kind": "train", "step": n, "epoch": 0, "loss": 0.5, "lr": 0.1, "grad_norm": 1.0, "samples": n, "samples_per_s": 1.0} for n in range(3000)]  # fmt: skip
    evals = [{"kind": "eval", "step": 1500, "epoch": 0, "accuracy": 0.5}, {"kind": "eval", "step": 2900, "epoch": 0}]
    lines = [event, *steps[:1501], evals[0], *steps[1501:2901], event | {"event": "survived"}, evals[1], *steps[2901:]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "train", "st')
    assert jsonl.events(path) == [event, event | {"event": "survived"}]
    assert jsonl.last_step(tmp_path) == 2999
    for newest, evaluated in ((2950, None), (2950, 1500), (1400, None), (0, None)):
        jsonl.truncate(path, newest, evaluated=evaluated)
        last = {"train": newest, "eval": newest if evaluated is None else evaluated}
        lines = [line for line in lines if line["step"] <= last.get(line["kind"], 2**31)]
        assert path.read_text() == "".join(json.dumps(line) + "\n" for line in lines)
