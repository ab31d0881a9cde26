"""A process ends as Python does: files are flushed, functions of atexit called, threads joined."""

import shutil
import subprocess
import sys

import pytest
from kit import warm
from kit.faults import fail_at
from kit.job import ROOT, environment, run
from kit.left import found


def scripted(folder, script, *, begin=subprocess.Popen, **env):
    shutil.copy(ROOT / f"tests/kit/loops/{script}.py", folder)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", script, "run"]
    log = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if begin is subprocess.Popen else {}
    process = begin(line, env=environment(LEFT=str(folder), **env), cwd=folder, **log)
    out, _ = process.communicate()
    return process.returncode, out


def test_what_a_script_leaves_to_its_end_is_there_though_a_rank_was_killed(tmp_path):
    """In processes of their own: what they do at their end is Python's."""
    code, out = scripted(tmp_path, "leaves", FAULTS=fail_at(1, 6, "begin"))
    assert code == 0 and "survived: rank 1" in out, out
    assert "after 12 steps 0\n" in out and "after 6 steps 0\n" in out, out
    found(tmp_path, 0, steps=12)
    found(tmp_path, 1, steps=6)  # of its last life


@pytest.mark.nightly
def test_a_script_that_fails_has_written_its_files(tmp_path):
    code, out = scripted(tmp_path, "leaves", FAILS="1", FREEZES="1")
    assert code == 1 and "ValueError: of the script" in out, out
    assert (tmp_path / "lines-1").read_text().split() == ["1", "2", "3", "4", "5", "6"]
    assert (tmp_path / "atexit-1").read_text() == "6\n"
    assert len((tmp_path / "lines-0").read_text().split()) in (6, 7)


@pytest.mark.parametrize("ranks", [None, 2])
def test_what_callbacks_leave_to_the_end_is_there(tmp_path, ranks):
    more = ("+callbacks.leaves._target_=kit.left.Leaves", "loader.num_workers=1", "max_steps=9")
    run(tmp_path / "run", *more, ranks=ranks, env={"LEFT": str(tmp_path)})
    for rank in range(ranks or 1):
        found(tmp_path, rank, steps=9)


def test_no_thread_of_a_job_outlives_it(tmp_path):
    code, out = scripted(tmp_path, "again", begin=warm.Popen)
    assert code == 0, out


HELD = """
import torch, muster
with muster.Job("run", tensorboard=False) as job:
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    job.track(model=net, optimizer=optimizer)
    batches = job.batches(torch.ones(64, 1), batch_size=8, epochs=2, num_workers=1)
    for x in batches:
        net(x).mean().backward()
        optimizer.step(), optimizer.zero_grad(), job.step()
        if job.steps_done == 3:
            break
print("after", flush=True)
"""


def test_a_script_that_keeps_its_batches_ends(tmp_path):
    """Their loader's workers ignore SIGTERM, and Python waits for them at its end."""
    done = subprocess.run([sys.executable, "-c", HELD], env=environment(), cwd=tmp_path, stdout=-1, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith(b"after\n")
