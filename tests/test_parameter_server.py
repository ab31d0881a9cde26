"""Training on a server: rank 0 keeps parameters, the others send gradients; synchronous is exact, asynchronous learns."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from kit.job import run
from kit.ledger import read
from kit.loopback import nodes
from kit.ranks import on_ranks

from train.config.keys import Config, NonFinite, Precision
from train.errors import ConfigError

SERVED = "strategy=parameter_server"
OTHER = "checkpoint.accept_changes=true"
LINE = ("model.hidden=[30]", "grad_clip=0.5", "batch_size=31", "micro_batch_size=8", "checkpoint.every_steps=4")


def test_synchronous_training_equals_one_process_and_its_checkpoints_are_everybodys(tmp_path):
    """From the server's to DDP and back, at other world sizes."""
    whole = run(tmp_path / "whole", *LINE, "max_steps=16")
    folder = tmp_path / "run"
    for ranks, until, strategy in ((3, 6, SERVED), (2, 10, "strategy=ddp"), (2, 16, SERVED)):
        result = run(folder, *LINE, strategy, f"max_steps={until}", OTHER, ranks=ranks)
    assert [event["step"] for event in result.events("resume")] == [6, 10]
    assert len(result.losses) == 16
    for ours, theirs in zip(result.lines("train"), whole.lines("train"), strict=True):
        for name in ("loss", "grad_norm", "lr"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (ours["step"], name)
    assert result.lines("eval")[-1]["loss"] == pytest.approx(whole.lines("eval")[-1]["loss"], rel=1e-4)
    assert list(result.weights) == list(whole.weights)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-4, atol=1e-5)


def test_killed_stopped_and_preempted_it_resumes_bit_for_bit(tmp_path):
    """With batch norm and dropout, whose state is each trainer's own."""
    line = (SERVED, "model._target_=kit.parts.models.Stateful", "batch_size=31", "checkpoint.every_steps=5", "max_steps=50")  # fmt: skip
    whole = run(tmp_path / "whole", *line, ranks=3)
    with nodes(tmp_path / "run", *line, "dist.timeout_s=4", nnodes="1:1", nproc=3) as cluster:
        agent = cluster.start()
        cluster.reach(8)
        cluster.next_step(lambda: os.kill(cluster.workers(agent)[2], signal.SIGKILL))
        cluster.reach(20)
        cluster.next_step(lambda: os.kill(cluster.workers(agent)[1], signal.SIGSTOP))
        cluster.reach(30)
        agent.send_signal(signal.SIGTERM)
        cluster.ended()
        assert cluster.result().outcome["outcome"] == "preempted", cluster.log
        cluster.start()
        assert cluster.ended()[-1] == 0, cluster.log
        cluster.until(lambda: not cluster.left_over(), "end of all processes", timeout_s=15)
        result = cluster.result()
    causes = [event["cause"] for event in result.events("restart")]
    assert "rank 2 has closed its connection" in causes[0] and "rank 1" in causes[1], causes
    assert result.losses == whole.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in whole.weights.items())


def test_asynchronous_training_learns_from_every_sample_once_an_epoch(tmp_path):
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    line = (
        *(SERVED, "strategy.gradients_per_update=1", "data._target_=kit.parts.data.Ledger", "+data.size=100"),
        *("optimizer.lr=0.5", "batch_size=20", "epochs=20", "checkpoint.every_steps=30", "eval.every_steps=off"),
    )
    result = run(tmp_path / "run", *line, ranks=3, env={"LEDGER": str(ledger)})
    took = read(ledger)
    assert sorted(took) == [1, 2] and sorted(took[1] + took[2]) == sorted([*range(100)] * 20)
    losses = [line["loss"] for line in result.lines("train")]
    assert len(losses) == 100 and sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert len(result.events("checkpoint")) == 4


def serve_on(steps):
    """Three ranks without a launcher; the trainer of rank 2 dies after ten steps."""
    from functools import partial

    from kit.until import until
    from torch import nn
    from torch.distributed import rpc

    from train.config.parts import Part
    from train.data.loader import Batch
    from train.dist.place import Place
    from train.dist.world import start
    from train.optim.build import build_optimizer
    from train.strategies.base import Recipe
    from train.strategies.parameter_server import ParameterServer

    world = start(Config(), Place.from_env())
    optimizer = Part.of("optimizer", {"_target_": "torch.optim.SGD", "lr": 0.1})
    build = partial(build_optimizer, optimizer, precision=Precision.fp32)
    recipe = Recipe(
        partial(nn.Linear, 4, 2), build, nn.CrossEntropyLoss(), lambda step: 1.0, Precision.fp32, None, False, None, NonFinite.stop
    )  # fmt: skip
    strategy, done = ParameterServer(gradients_per_update=1), world.board.rpc_store()
    strategy.build(recipe, world)
    if strategy.server:
        done.wait(["done"])
        told = (strategy.server.updates, [*strategy.server.lost], strategy.caveat)
        done.set("seen", "")
        rpc.shutdown(graceful=False)
        return told
    points = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    batch, losses = Batch(points, (points.sum(1) > 0).long(), 16, 32), []
    for step in range(steps):
        losses.append(float(strategy.step(step, [batch]).loss))
        if world.rank == 2 and step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 9:  # not to be at the end before the other one dies
            until(lambda: not _is_up(world, 2), "end of rank 2", timeout_s=60)
    strategy.sync_parameters()
    done.set("done", "")
    done.wait(["seen"])
    rpc.shutdown(graceful=False)
    return losses


def _is_up(world, rank):
    """Whether a message still gets through to it."""
    from torch.distributed import rpc

    from train.dist import rpc as calls

    try:
        rpc.rpc_sync(calls.name(rank), os.getpid, timeout=1)
    except RuntimeError:
        return False
    return True


def test_a_trainer_that_dies_does_not_stop_the_server_and_the_others():
    """The processes alone: under torchrun the launcher restarts all of them."""
    (updates, lost, caveat), losses = on_ranks(serve_on, 3, 60, lost=[2])
    assert lost == [2] and updates == 10 + 60
    assert len(losses) == 60 and losses[-1] < 0.5 * losses[0]
    assert "no run gives the same weights" in caveat


@pytest.mark.parametrize(
    "world_size, change, said",
    [
        (1, {}, "at least 2 processes"),
        (5, {"gradients_per_update": 3}, "must divide the number of trainers, 4 .* use one of 1, 2, 4"),
        (3, {"compile": True}, "use compile=false"),
        (3, {"precision": Precision.fp16}, "use precision=bf16 or fp32"),
        (3, {"on_nonfinite": NonFinite.skip, "gradients_per_update": 1}, "use on_nonfinite=stop"),
    ],
)
def test_what_does_not_go_together_is_refused(world_size, change, said):
    from train.strategies.parameter_server import ParameterServer

    strategy = ParameterServer(gradients_per_update=change.pop("gradients_per_update", None))
    with pytest.raises(ConfigError, match=said):
        strategy.check(replace(Config(), **change), world_size)
