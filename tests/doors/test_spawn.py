"""Ranks without a launcher: from a script, a notebook, a function of one's own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from kit.deaths import started
from kit.job import QUIET, ROOT, Job, environment, finish, reached, start, wait_for
from kit.until import until
from torch.distributed import FileStore

import muster
from muster import launch
from muster.errors import ConfigError, Diverged, MusterError, Preempted
from muster.train.config.compose import compose
from muster.world.environment import Environment
from muster.world.rendezvous.meeting import meet

LONG = ("model=convnet", "batch_size=32", "max_steps=100000", "checkpoint.every_steps=100000")


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")


def reduced(folder):
    """Fails on the first attempt: the second has the value."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(2) * dist.get_rank()
    dist.all_reduce(value)
    if dist.get_rank() == 1 and not (folder / "again").exists():
        (folder / "again").touch()
        raise RuntimeError("once")
    dist.barrier()
    return value, [os.environ[name] for name in NAMES]


def one_is_killed():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def diverges():
    if os.environ["RANK"] == "1":
        raise Diverged("loss is nan at step 3")
    time.sleep(60)


def sits(folder):
    (folder / f"pid-{os.getpid()}").touch()
    time.sleep(300)


@pytest.mark.nightly
def test_a_function_gives_one_value_a_rank_after_a_restart_of_all(tmp_path):
    (first, its_place), (second, _) = muster.launch(reduced, tmp_path, nproc=2, max_restarts=1)
    assert first.tolist() == second.tolist() == [1.0, 1.0]
    assert its_place == ["0", "2", "0", "2", "127.0.0.1", "1"]


@pytest.mark.nightly
def test_without_a_number_each_core_or_gpu_has_a_rank():
    wanted = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    assert launch(os.getenv, "WORLD_SIZE") == [str(wanted)] * wanted


@pytest.mark.nightly
def test_the_rank_that_failed_first_is_named(capsys):
    with pytest.raises(MusterError, match="rank 1: killed by SIGKILL"):
        launch(one_is_killed, nproc=2)
    began = time.monotonic()
    with pytest.raises(Diverged, match=r"^rank 1: loss is nan at step 3$"):  # the same kind, and no restart of it
        launch(diverges, nproc=2, max_restarts=3)
    assert time.monotonic() - began < 50, "the other rank was waited for"


@pytest.mark.nightly
def test_values_that_cannot_travel_are_named():
    with pytest.raises(ConfigError, match=r"cannot be sent to other processes: .*lock"):
        launch(sits, threading.Lock(), nproc=1)
    with pytest.raises(ConfigError, match="rank 0: a lock cannot be sent back"):
        launch(threading.Lock, nproc=1)


@pytest.mark.unit
def test_mistakes_are_refused_before_any_process(monkeypatch):
    for wrong in ("max_steps=2", ["-m", "optimizer.lr=1,2"], [2]):
        with pytest.raises(ConfigError, match="is not a list of overrides"):
            launch(wrong, nproc=2)
    with pytest.raises(ConfigError, match="nproc=0 is not valid"):
        launch(sits, nproc=0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="by a process that is already a rank"):
        launch(sits, nproc=2)


def test_a_config_error_is_raised_as_python_m_train_says_it():
    with pytest.raises(ConfigError, match="max_steps=0 is out of range"):
        launch(["max_steps=0"], nproc=2)


def test_the_package_is_imported_without_torch():
    code = "import sys, muster; muster.launch; sys.exit(bool({'torch', 'hydra', 'cloudpickle'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


class Skewed(torch.nn.Linear):
    """Rank 1 takes its time in every step, and in all longer than dist.timeout_s."""

    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        time.sleep(3 * self.training * (os.environ["RANK"] == "1"))
        return super().forward(x.flatten(1))


@pytest.mark.nightly
def test_a_run_comes_back_with_its_folder_and_a_rank_that_is_slower_than_the_others_is_waited_for(tmp_path):
    line = ("model._target_=test_spawn.Skewed", "max_steps=6", "dist.timeout_s=15")
    run = launch([f"output_dir={tmp_path / 'run'}", *QUIET, *line], nproc=2)
    assert run.folder == tmp_path / "run" and (run.outcome["outcome"], run.outcome["step"]) == ("done", 6)
    steps = [line for line in Job(run.folder).lines() if line["kind"] == "train"]
    assert len(steps) == 6 and Job(run.folder).world_size() == 2


@pytest.mark.nightly
def test_observers_ask_an_agent_over_rpc(tmp_path):
    """examples/rpc: the agent has learned the way."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples/rpc/train.py"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = re.search(r"goal: ([\d.]+) in the first round, ([\d.]+) in the last", done.stdout).groups()
    assert float(last) < 8 < float(first), done.stdout


class Script(Job):
    """examples/notebook/script.py on its way."""

    def __init__(self, folder, *overrides):
        super().__init__(folder)
        self.mark = f"muster-test-{os.getpid()}-{time.monotonic_ns()}"
        self.path = folder.parent / f"{self.mark}.log"
        line = [sys.executable, ROOT / "examples/notebook/script.py", f"output_dir={folder}", *QUIET, *overrides]
        with self.path.open("w") as log:
            env = environment(TEST_MARK=self.mark)
            self.process = subprocess.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder.parent)

    @property
    def log(self):
        return self.path.read_text()

    def processes(self):
        """Of this script, itself included: pid and command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                    if alive and self.mark.encode() in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def close(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def script():
    started = []

    def start(*args):
        started.append(Script(*args))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_a_script_loses_nothing_to_a_killed_rank_to_sigterm_or_to_its_own_death(tmp_path, script):
    run = script(tmp_path / "run", *LONG)
    run.reach(3)
    ranks = sorted((pid for pid, line in run.processes().items() if " -m muster name=" in line), key=started)
    os.kill(ranks[-1], signal.SIGKILL)
    run.until(lambda: any(line.get("event") == "survived" for line in run.lines()), "restart of the killed rank")
    run.next_step(lambda: os.kill(ranks[0], signal.SIGKILL))  # a supervisor
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == Preempted.exit_code, run.log
    until(lambda: not run.processes(), "end of all processes", timeout_s=60, said=lambda: run.log)
    assert "stopped by SIGTERM" in run.log
    saved = run.result().outcome
    assert saved["outcome"] == "preempted" and saved["step"] > 3

    again = script(tmp_path / "run", *LONG)
    again.until(lambda: again.attempts()[-1]["event"] == "resume" and again.step() > saved["step"], "resumed step")
    again.process.kill()
    until(lambda: not again.processes(), "end of all processes", timeout_s=60, said=lambda: again.log)
    last = again.result().outcome
    assert last["outcome"] == "preempted" and last["step"] > saved["step"]


@pytest.mark.nightly
def test_ctrl_c_ends_a_function_and_leaves_nothing_behind(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def interrupt():
        until(lambda: len([*tmp_path.iterdir()]) == 2, "start of both ranks", timeout_s=60)
        os.kill(os.getpid(), signal.SIGINT)

    keyboard = threading.Thread(target=interrupt)
    keyboard.start()
    with pytest.raises(KeyboardInterrupt):
        launch(sits, tmp_path, nproc=2)
    keyboard.join()
    assert not [path for path in tmp_path.iterdir() if Path("/proc", path.name.removeprefix("pid-")).exists()]
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


STOP = """
import os, signal, threading, time
from pathlib import Path

def press_stop():
    while not Path("runs/notebook/metrics.jsonl").exists() or '"kind": "train"' not in Path("runs/notebook/metrics.jsonl").read_text():
        time.sleep(0.05)
    os.killpg(os.getpgid(0), signal.SIGINT)  # as Jupyter does

threading.Thread(target=press_stop).start()
try:
    muster.launch(["name=notebook", "epochs=1000", "log.every_steps=1", "model=convnet", "batch_size=8"], nproc=2)
except KeyboardInterrupt as stop:
    print("stopped:", stop)
"""


@pytest.mark.nightly
def test_the_notebook_runs_and_its_stop_button_saves(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    book = nbformat.read(ROOT / "examples/notebook/ranks.ipynb", as_version=4)
    book.cells += [
        nbformat.v4.new_code_cell("import shutil; shutil.rmtree('runs/notebook')"),
        nbformat.v4.new_code_cell(STOP),
    ]
    client = nbclient.NotebookClient(
        book, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=environment(IPYTHONDIR=str(tmp_path / "ipython")))
    said = [
        "".join(out.get("text", "") or out.data["text/plain"] for out in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]
    _, run, measured, total, unlucky, _, stopped = said
    assert "done: " in run and "'done')" in run
    assert float(measured.rstrip(")\n").rpartition(" ")[2]) > 0.9
    assert total == "[(0, 12.0), (1, 12.0)]"
    assert "caught: rank 1: ValueError: no such luck" in unlucky and "Traceback" in unlucky
    assert "stopped: " in stopped and "preempted (exit code 75)" in stopped
    assert Job(tmp_path / "runs/notebook").result().outcome["outcome"] == "preempted"


def by_hand(folder, *overrides, ranks, at):
    """Each rank from a shell of its own, without an address or a port."""
    line = (*overrides, f"dist.init_method=file://{at}")
    env = {"MASTER_ADDR": "", "MASTER_PORT": "", "WORLD_SIZE": str(ranks)}
    return [start(folder, *line, env={**env, "RANK": str(rank)}) for rank in reversed(range(ranks))]


@pytest.mark.nightly
def test_ranks_meet_by_a_file_again_after_all_were_killed(tmp_path):
    """Three after two, on the path where the two have left theirs; what is told to stop leaves nothing there."""
    (tmp_path / "shared").mkdir()
    folder, at = tmp_path / "run", tmp_path / "shared/meet"
    line = ("model=convnet", "batch_size=32", "max_steps=100000", "checkpoint.every_steps=5")
    first = by_hand(folder, *line, ranks=2, at=at)
    wait_for(
        folder, lambda result: result.events("checkpoint") and reached(8)(result), process=first[-1], timeout_s=150
    )
    for process in first:
        process.kill()
    for process in first:
        process.communicate()
    assert [path for path in at.parent.iterdir() if ".store-" in path.name]

    second = by_hand(folder, *line, ranks=3, at=at)
    wait_for(folder, lambda result: result.events("resume") and reached(12)(result), process=second[-1], timeout_s=150)
    second[0].send_signal(signal.SIGTERM)
    results = [finish(process, folder) for process in second]
    assert [result.code for result in results] == [75, 75, 75], [result.out for result in results]
    resumed = results[0].events("resume")[0]
    assert resumed["world_size"] == 3 and resumed["step"] >= 5
    assert not [*at.parent.iterdir()]


class Visitor(threading.Thread):
    """One rank's meeting by file, as a thread."""

    def __init__(self, rank, size, at, timeout_s=20.0):
        super().__init__(daemon=True)
        self.place, self.timeout_s = Environment(rank, size, shared_file=at), timeout_s
        self.met = self.error = None
        self.start()

    def run(self):
        try:
            self.met = meet(self.place, alike=None, error=None, timeout_s=self.timeout_s)
        except MusterError as error:
            self.error = error

    def has_written(self):
        """Whether its file is no longer that of the killed launch."""
        rank = self.place.rank
        file = self.place.shared_file.with_name(f"meet.hello-{rank}" if rank else "meet.lock")
        return file.exists() and file.read_text() not in ("", f"dead{rank}", "process 1 on gone")


def leave_behind(at):
    """What a launch of four ranks leaves that was killed while it met: rank 0 had opened, and heard 1 and 3."""
    for rank in (1, 3):
        at.with_name(f"meet.hello-{rank}").write_text(f"dead{rank}")
        at.with_name(f"meet.answer-{rank}").write_text(f"dead{rank} ghost")
    ghost = FileStore(str(at.with_name("meet.store-ghost")))
    ghost.add("meet/newest", 1)
    ghost.set("meet/1/open", "{}")
    at.with_name("meet.lock").write_text("process 1 on gone")


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.unit
def test_files_of_a_killed_launch_lead_nobody_astray(tmp_path, first):
    at = tmp_path / "meet"
    leave_behind(at)
    order = [first, *({0, 1, 2} - {first})]
    visitors = []
    for rank in order:
        for earlier in visitors:  # each finds what those before it have made of the files
            until(lambda earlier=earlier: earlier.has_written(), "files of the ranks before", timeout_s=60)
        visitors.append(Visitor(rank, 3, at))
    for visitor in visitors:
        visitor.join(30)
    assert len({visitor.met and visitor.met.attempt for visitor in visitors}) == 1, [each.error for each in visitors]
    assert not [path for path in tmp_path.iterdir() if "ghost" in path.read_text(errors="replace") + path.name]
    visitors[order.index(0)].met.shared.remove()
    assert not [*tmp_path.iterdir()]


def test_whoever_does_not_come_to_the_file_is_named(tmp_path):
    at = tmp_path / "meet"
    leave_behind(at)
    alone = Visitor(0, 3, at, timeout_s=6.0)
    beside = Visitor(2, 3, at, timeout_s=6.0)
    for visitor in (alone, beside):
        visitor.join(30)
        assert "2 of 3 ranks arrived" in str(visitor.error) and "missing: 1:" in str(visitor.error)
    assert not [*tmp_path.iterdir()]
    waits = Visitor(1, 3, at, timeout_s=1.0)
    waits.join(30)
    assert f"waited in vain for rank 0 at file://{at}" in str(waits.error)
    nowhere = Visitor(0, 2, tmp_path / "no/meet", timeout_s=1.0)
    nowhere.join(30)
    assert "cannot be used" in str(nowhere.error) and "No such file" in str(nowhere.error)


def test_two_launches_do_not_share_a_file(tmp_path):
    at = tmp_path / "meet"
    code = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); file.write('process 7 on a'); file.flush(); print('ok', flush=True); input()"
    line = [sys.executable, "-c", code, str(at) + ".lock"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        late = Visitor(0, 2, at, timeout_s=1.0)
        late.join(30)
        assert "another launch (process 7 on a) is at work" in str(late.error)
        other.communicate("\n")


@pytest.mark.unit
def test_where_a_file_does_not_do_is_said(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"or give dist.init_method=file:///"):
        Environment.from_env()
    assert Environment.from_env("file:///shared/x").shared_file == Path("/shared/x")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match="under torchrun leave it out"):
        Environment.from_env("file:///shared/x")
    for wrong in ("tcp://host:1", "file://relative", "file:///"):
        with pytest.raises(ConfigError, match="use env://, or file:///shared/path"):
            compose([f"dist.init_method={wrong}"])
