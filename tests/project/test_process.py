"""A process that dies with its parent, and ignores the signals that are for others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.job import environment
from kit.until import until

from muster import process

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
time.sleep(60)
"""
CHILD = "import os, time; from muster import process; process.{}; print(os.getpid(), flush=True); time.sleep(60)"
linux = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@linux
@pytest.mark.parametrize("call", ["die_with_parent()", "die_with_parent(15)"])
def test_a_child_dies_with_its_parent(call):
    line = [sys.executable, "-c", PARENT, CHILD.format(call)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.kill()
    until(lambda: not is_running(child), "death of the child", timeout_s=60)


def test_a_child_whose_parent_has_died_before_dies_at_once():
    line = [sys.executable, "-c", CHILD.format("die_with_parent(15, parent=1)")]
    assert os.getpid() != 1 and subprocess.run(line, timeout=30, check=False).returncode == -signal.SIGTERM


def test_ignored_signals_stay_ignored_after_exec():
    """As in an agent between fork and exec."""
    line = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('alive')"]
    done = subprocess.run(
        line, preexec_fn=lambda: process.ignore(signal.SIGUSR1), stdout=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")


WORKERS_IN_A_CYCLE = """
import gc, multiprocessing, time
from torch.utils.data import DataLoader
from muster.process import collect_garbage

gc.disable()
loader = DataLoader([*range(100)], num_workers=2, persistent_workers=True)
batches = iter(loader)
next(batches)
workers = [*batches._workers]
batches.itself = batches
del loader, batches
began = time.monotonic()
collect_garbage()
seconds = time.monotonic() - began
print(seconds, [each.join(10) or each.is_alive() for each in workers])
"""


@pytest.mark.nightly
def test_workers_of_a_data_loader_in_the_garbage_are_not_waited_for():
    done = subprocess.run([sys.executable, "-c", WORKERS_IN_A_CYCLE], capture_output=True, text=True, timeout=60)
    seconds, _, alive = done.stdout.partition(" ")
    assert alive == "[False, False]\n" and float(seconds) < 4.5, done


MALLINFO = """
import ctypes, sys
import torch, muster
from muster import process

class Mallinfo2(ctypes.Structure):  # mallinfo(3)
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
"""
MAPPED = f"""{MALLINFO}
with muster.Job("run", tensorboard=False, keep_memory=sys.argv[1] == "keep") as job:
    net = torch.nn.Linear(1, 1)
    job.track(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    before = libc.mallinfo2().hblkhd
    held = torch.ones(31 * 2**18)  # 31 MB: larger than any block that was freed before
    print("mapped", libc.mallinfo2().hblkhd - before)
"""


@pytest.mark.skipif(not hasattr(process.LIBC, "mallinfo2"), reason="glibc 2.33")
def test_large_tensors_are_in_memory_that_is_kept_unless_the_user_says_otherwise(tmp_path):
    """And not in a mapping of their own, which is given back at once."""

    def mapped(how, **env):
        kept = {
            name: value for name, value in environment(**env).items() if not name.startswith("MALLOC_") or name in env
        }
        line = [sys.executable, "-c", MAPPED, how]
        (folder := tmp_path / "-".join([how, *env])).mkdir()
        done = subprocess.run(line, env=kept, cwd=folder, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split("mapped ")[1].split()[0])

    assert mapped("keep") == 0
    assert mapped("keep", MALLOC_ARENA_MAX="2", GLIBC_TUNABLES="glibc.malloc.tcache_count=0") == 0
    assert mapped("leave") > 31 * 2**20 and mapped("keep", MALLOC_TRIM_THRESHOLD_="131072") > 31 * 2**20
    assert mapped("keep", GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072") > 31 * 2**20


GIVEN_BACK = f"""{MALLINFO}
import psutil

def resident():
    return psutil.Process().memory_info().rss / 2**20

process.keep_memory(True)
process.keep_memory(False)
before = libc.mallinfo2().hblkhd
held = torch.ones(31 * 2**18)
mapped = libc.mallinfo2().hblkhd - before
process.keep_memory(True)
before = resident()
held = [torch.ones(2**18) for _ in range(400)]
del held
kept = resident() - before
process.give_memory_back()
print(int(kept), int(resident() - before), mapped)
"""


@pytest.mark.skipif(not hasattr(process.LIBC, "mallinfo2"), reason="glibc 2.33")
def test_memory_is_given_back_after_an_evaluation_and_kept_no_longer_than_is_said():
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_BACK], env=environment(), capture_output=True, text=True, timeout=100
    )
    kept, given_back, mapped = map(int, done.stdout.split())
    assert kept > 300 and given_back < 100 and mapped > 31 * 2**20, done.stderr
