"""Ranks without a launcher: from a script, a notebook, a function of one's own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kit.job import QUIET, ROOT, Job, environment
from kit.until import until

import train.launch
from train.errors import ConfigError, Diverged, MusterError, Preempted
from train.launch import launch

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


def test_a_function_gives_one_value_a_rank_after_a_restart_of_all(tmp_path):
    (first, its_place), (second, _) = train.launch(reduced, tmp_path, nproc=2, max_restarts=1)
    assert first.tolist() == second.tolist() == [1.0, 1.0]
    assert its_place == ["0", "2", "0", "2", "127.0.0.1", "1"]


def test_the_rank_that_failed_first_is_named(capsys):
    with pytest.raises(MusterError, match="rank 1: killed by SIGKILL"):
        launch(one_is_killed, nproc=2)
    began = time.monotonic()
    with pytest.raises(Diverged, match=r"^rank 1: loss is nan at step 3$"):  # the same kind, and no restart of it
        launch(diverges, nproc=2, max_restarts=3)
    assert time.monotonic() - began < 50, "the other rank was waited for"


def test_values_that_cannot_travel_are_named():
    with pytest.raises(ConfigError, match=r"cannot be sent to other processes: .*lock"):
        launch(sits, threading.Lock(), nproc=1)
    with pytest.raises(ConfigError, match="rank 0: a lock cannot be sent back"):
        launch(threading.Lock, nproc=1)


def test_mistakes_are_refused_before_any_process(monkeypatch):
    for wrong in ("max_steps=2", ["-m", "optimizer.lr=1,2"], [2]):
        with pytest.raises(ConfigError, match="is not a list of overrides"):
            launch(wrong, nproc=2)
    with pytest.raises(ConfigError, match="nproc=0 is not valid"):
        launch(sits, nproc=0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="by a process that is a rank already"):
        launch(sits, nproc=2)


def test_a_config_error_is_raised_as_python_m_train_says_it():
    with pytest.raises(ConfigError, match="max_steps=0 is out of range"):
        launch(["max_steps=0"], nproc=2)


def test_the_package_is_imported_without_torch():
    code = "import sys, train.launch; sys.exit(bool({'torch', 'hydra', 'cloudpickle'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


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
    rank = max(pid for pid, line in run.processes().items() if " -m train name=" in line)
    run.next_step(lambda: os.kill(rank, signal.SIGKILL))
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == Preempted.exit_code, run.log
    assert not run.processes()
    assert "told to stop by SIGTERM" in run.log
    saved = run.result().outcome
    assert saved["outcome"] == "preempted" and saved["step"] > 3

    again = script(tmp_path / "run", *LONG)
    again.until(lambda: again.attempts()[-1]["event"] == "resume" and again.step() > saved["step"], "resumed step")
    again.process.kill()
    until(lambda: not again.processes(), "end of all processes", timeout_s=60, said=lambda: again.log)
    last = again.result().outcome
    assert last["outcome"] == "preempted" and last["step"] > saved["step"]


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
    train.launch(["name=notebook", "epochs=2", "log.every_steps=1", "model=convnet", "batch_size=8"], nproc=2)
except KeyboardInterrupt as stop:
    print("stopped:", stop)
"""


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
