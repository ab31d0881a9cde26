"""Pods of a PyTorchJob as processes, each with the agent that `muster launch node` starts: clocks a minute apart, names of their nodes."""

import contextlib
import re
import signal
import subprocess
import sys

import pytest
from kit.job import QUIET, ROOT, Job, environment, free_port, pace

MINUTE = 60


class Nodes(Job):
    """Up to two of a PyTorchJob, on this machine."""

    def __init__(self, folder, nnodes, *overrides):
        super().__init__(folder)
        self.overrides, self.nnodes, self.port, self.started = overrides, nnodes, free_port(), []

    def start(self, *, moved=0, **pod):
        """One more, whose clock is `moved` by seconds; the first one holds the rendezvous store. pod: more variables of it, None for none."""
        env = environment(
            PET_RDZV_ENDPOINT=f"localhost:{self.port}", PET_NNODES=self.nnodes, PET_NPROC_PER_NODE="1", POD_IP="127.0.0.1",
            HOSTNAME="another" if self.started else "localhost", GRACE_S="60", CLOCK_MOVED=str(moved),
        )  # fmt: skip
        env = {name: value for name, value in {**env, **pod}.items() if value is not None}
        env["PYTHONPATH"] = f"{ROOT / 'tests/kit/moved'}:{env['PYTHONPATH']}"
        line = [sys.executable, "-m", "train.launch", "node", f"output_dir={self.folder}", *QUIET, *self.overrides]
        with (self.folder.parent / f"node-{len(self.started)}.log").open("w") as log:
            self.started.append(subprocess.Popen(line, env=env, stdout=log, stderr=log, cwd=self.folder.parent))
        return self.started[-1]

    @property
    def log(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.parent.glob("node-*.log")))

    def codes(self):
        self.until(lambda: all(node.poll() is not None for node in self.started), "end of all nodes", timeout_s=120)
        return [node.returncode for node in self.started]

    def trains_on(self, world_size):
        """Comes back when as many ranks have begun, and made a step."""

        def stepped():
            lines = self.lines()
            kinds = [
                line["kind"] for line in lines if line["kind"] == "train" or line.get("event") in ("start", "resume")
            ]
            return self.world_size() == world_size and kinds[-1] == "train"

        self.until(stepped, f"step of {world_size} ranks", timeout_s=120)


@contextlib.contextmanager
def nodes(*given):
    made = Nodes(*given)
    try:
        yield made
    finally:
        for node in made.started:
            node.kill()  # its agent and its rank die with it
            node.wait()


@pytest.mark.nightly(but=["60"])
@pytest.mark.parametrize("moved", [MINUTE, -MINUTE])
def test_a_node_whose_clock_is_a_minute_off_trains_to_the_end(tmp_path, moved):
    with nodes(tmp_path / "run", "2", "max_steps=3") as job:
        job.start()
        job.start(moved=moved)
        assert job.codes() == [0, 0], job.log
        result = job.result()
    assert result.outcome["outcome"] == "done" and result.events("start")[0]["world_size"] == 2
    assert 50 <= int(re.search(r"are (\d+) s apart; synchronize them", job.log)[1]) <= 70


@pytest.mark.nightly
@pytest.mark.long
def test_nodes_whose_clocks_are_a_minute_off_come_late_and_are_lost_again(tmp_path):
    with nodes(tmp_path / "run", "1:2", "max_steps=1000000", *pace(0.05)) as job:
        job.start()
        job.trains_on(1)
        for moved in (MINUTE, -MINUTE):
            late = job.start(moved=moved)
            job.trains_on(2)
            late.kill()
            job.trains_on(1)
        job.started[0].send_signal(signal.SIGTERM)
        assert job.codes() == [143, -signal.SIGKILL, -signal.SIGKILL], job.log
    assert job.result().outcome["outcome"] == "preempted"


@pytest.mark.nightly
def test_pods_that_have_the_names_of_their_nodes_meet_by_their_own(tmp_path):
    """As with hostNetwork."""
    with nodes(tmp_path / "run", "2", "max_steps=3") as job:
        for pod in ("other", "localhost"):
            job.start(HOSTNAME="node-7", POD_NAME=pod)
        assert job.codes() == [0, 0], job.log
    assert job.result().events("start")[0]["world_size"] == 2


@pytest.mark.nightly
def test_pods_of_a_master_and_a_worker_are_started_again_after_a_preemption(tmp_path):
    """Without an elasticPolicy; with restartPolicy ExitCode 75 would fail the job."""
    with nodes(tmp_path / "run", "2", "max_steps=1000000", *pace(0.05)) as job:
        for rank in range(2):
            static = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(job.port), "PET_NODE_RANK": str(rank)}
            job.start(PET_RDZV_ENDPOINT=None, **static)
        job.trains_on(2)
        for each in job.started:
            each.send_signal(signal.SIGTERM)
        assert job.codes() == [143, 143], job.log
    assert job.result().outcome["outcome"] == "preempted"
