"""Ranks on GPUs, over NCCL, that are killed, stopped, hung and told to stop: on a machine with GPUs, one of them is enough."""

import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from kit.faults import fail_at
from kit.job import ROOT, Result, finish, on_nodes, pace, reached, run, saved, start, wait_for
from kit.loopback import children, rank_of
from kit.one_gpu import ON_ONE
from kit.until import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]
LINE = (
    *("device=cuda", "deterministic=true", "optimizer=adamw", "batch_size=20", "model=convnet", "eval.every_steps=off"),
    *("checkpoint.every_steps=5", "dist.timeout_s=15", "max_steps=60"),
)
TEXT = (
    *("device=cuda", "data=text", "data.block_size=16", "data.pattern=*.txt", "objective=language_modeling", "batch_size=15"),
    *("model=gpt", "model.num_layers=4", "model.num_heads=2", "model.hidden_dim=16", "optimizer=adamw", "grad_clip=0.5"),
    *("max_steps=8", "eval.every_steps=4", "tf32=false"),
)  # fmt: skip


def begin(folder, *line, **env):
    """Start two ranks whose steps take 50 ms longer."""
    how = {"ranks": 2, "torchrun": ("--max-restarts=3",), "env": ON_ONE | env, "cold": True}
    return start(folder, *LINE, *pace(0.05), *line, **how)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("nccl") / "run", *LINE, ranks=2, env=ON_ONE, cold=True)


def pid_of(process, rank):
    return rank_of(children(process.pid)[rank])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_nothing_and_the_other_leaves_at_once(tmp_path, undisturbed, rank, record_property):
    process = begin(tmp_path / "run")
    wait_for(tmp_path / "run", saved(10), process=process, timeout_s=120)
    other = Path(f"/proc/{pid_of(process, 1 - rank)}")
    os.kill(pid_of(process, rank), signal.SIGKILL)
    seconds = until(lambda: not other.exists(), "end of the other rank", timeout_s=60)
    done = finish(process, tmp_path / "run")
    assert done.code == 0 and done.sha256 == undisturbed.sha256, done.out
    [restart] = done.events("restart")
    assert f"rank {rank}" in restart["cause"], restart
    record_property("seconds until the other rank has left", seconds)
    assert seconds < 20, "torchrun kills what does not end after 30 s"


def test_a_stopped_rank_is_named_and_the_collectives_are_on_record(tmp_path, undisturbed):
    process = begin(tmp_path / "run")
    wait_for(tmp_path / "run", saved(10), process=process, timeout_s=120)
    os.kill(pid_of(process, 1), signal.SIGSTOP)
    done = finish(process, tmp_path / "run")
    assert done.code == 0 and done.sha256 == undisturbed.sha256, done.out
    assert "rank 1 on" in done.events("restart")[0]["cause"], done.out
    [record] = (tmp_path / "run").glob("flight-recorder-*/rank_0")
    assert pickle.loads(record.read_bytes())["entries"]


def test_a_device_that_hangs_is_named(tmp_path, undisturbed):
    """The code of its rank has gone on, and the other waits in NCCL: only what the devices have computed tells them apart."""
    hang = ("+callbacks.hang._target_=kit.parts.dying.Hang", "+callbacks.hang.at=12", "+callbacks.hang.on_device=true")
    done = finish(begin(tmp_path / "run", *hang, FAULTS_MADE=str(tmp_path)), tmp_path / "run", timeout_s=200)
    assert done.code == 0 and done.sha256 == undisturbed.sha256, done.out
    assert "rank 1 on" in done.events("restart")[0]["cause"], done.out


@pytest.mark.parametrize("kills, says", [("false", "rank 0 has a bug"), ("true", "rank 0 on")])
def test_a_rank_that_waits_in_nccl_leaves_when_another_fails(tmp_path, kills, says):
    fails = (
        "+callbacks.fails._target_=kit.parts.dying.FirstFails",
        "+callbacks.fails.at=12",
        "+callbacks.fails.locks=false",
    )
    line = (*LINE, *fails, f"+callbacks.fails.kills={kills}")
    result = run(tmp_path / "run", *line, ranks=2, ok=False, env=ON_ONE, cold=True)
    assert result.code == 1 and says in result.out, result.out
    assert time.time() - (tmp_path / "run/metrics.jsonl").stat().st_mtime < 25, (
        "torchrun kills what does not end after 30 s"
    )


def test_told_to_stop_both_save_and_the_same_command_goes_on(tmp_path, undisturbed):
    process = begin(tmp_path / "run")
    wait_for(tmp_path / "run", reached(12), process=process, timeout_s=120)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, tmp_path / "run")
    at = stopped.outcome["step"]
    assert stopped.outcome["outcome"] == "preempted" and at < 60, stopped.out
    done = run(tmp_path / "run", *LINE, ranks=2, env=ON_ONE, cold=True)
    assert done.events("resume")[0]["step"] == at and done.sha256 == undisturbed.sha256


STRATEGIES = {
    "tensor_parallel": (),
    "pipeline": (),
    "fsdp": ("strategy.prefetch=2",),
    "fsdp offloaded": ("strategy.cpu_offload=true",),
    "fsdp recomputed": ("strategy.activation_checkpointing=true",),
    "hybrid": ("strategy.shard=1",),
    "zero": (),
}
KEPT = ("fsdp", "hybrid", "zero", "tensor_parallel", "pipeline")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "all.txt").write_bytes(bytes(range(256)) * 4)
    return (*TEXT, f"data.root={folder}")


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory, text):
    return run(tmp_path_factory.mktemp("ddp") / "run", *text, ranks=2, env=ON_ONE, cold=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_of_a_language_model_are_those_of_ddp(tmp_path, text, of_ddp, name):
    line = (*text, f"strategy={name.split()[0]}", *STRATEGIES[name])
    found = run(tmp_path / "run", *line, ranks=2, env=ON_ONE, cold=True)
    assert found.losses == pytest.approx(of_ddp.losses, rel=1e-3)
    assert [line["loss"] for line in found.lines("eval")] == pytest.approx(
        [line["loss"] for line in of_ddp.lines("eval")], rel=1e-3
    )


@pytest.mark.parametrize("name", KEPT)
def test_state_of_each_strategy_is_saved_and_read_bit_for_bit(tmp_path, text, name):
    line = (*text, f"strategy={name}", *STRATEGIES[name], "deterministic=true", "model.dropout=0.2")
    how = {"ranks": 2, "env": ON_ONE, "cold": True}
    whole = run(tmp_path / "whole", *line, **how)
    run(tmp_path / "cut", *line, "max_steps=4", **how)
    cut = run(tmp_path / "cut", *line, **how)
    assert cut.events("resume")[0]["step"] == 4
    assert cut.losses == whole.losses and cut.sha256 == whole.sha256


SCRIPTS = ["gpt", "gan", "fsdp2"]


def ended(processes, folder):
    said = [process.communicate(timeout=200)[0] for process in processes]
    return Result(max(process.returncode for process in processes), "\n".join(said), folder / "run", 0)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_with_a_loop_of_its_own_is_killed_and_resumes(tmp_path, name, nodes):
    """Its kernels are not deterministic, so losses are compared, not bits."""
    found = {}
    for kind, kill in (("whole", ""), ("cut", fail_at(nodes - 1, 23))):
        folder = tmp_path / kind
        shutil.copytree(ROOT / "tests/kit/loops", folder)
        shutil.copytree(ROOT / "examples/own_loop", folder, dirs_exist_ok=True)
        words = ("disturbed", f"{name}.py", "run", "60")
        env = ON_ONE | {"FAULTS": kill, "SAVED": "20", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        how = {"folders": [folder] * nodes, "env": env, "restarts": 1}
        found[kind] = ended(on_nodes(*words, **how), folder)
        assert (nodes == 2 and kill) or found[kind].code == 0, found[kind].out
        if found[kind].code:  # the nodes of a static rendezvous do not restart each other: the same command goes on
            found[kind] = ended(on_nodes(*words, **how), folder)
        assert found[kind].code == 0, found[kind].out
    whole, cut = found["whole"], found["cut"]
    assert whole.events("start")[0]["device"] == "cuda" and [line["step"] for line in cut.events("resume")] == [20]
    assert cut.losses.keys() == whole.losses.keys()
    for step, loss in whole.losses.items():
        assert cut.losses[step] == pytest.approx(loss, rel=2e-2, abs=2e-2), (step, cut.losses, whole.losses)
