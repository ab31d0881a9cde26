"""Training on a server: rank 0 keeps parameters, the others send gradients; synchronous is exact, asynchronous learns."""

import json
import os
import signal
from dataclasses import replace
from itertools import chain

import pytest
import torch
from kit.job import pace, run
from kit.ledger import read
from kit.loopback import nodes
from kit.ranks import on_ranks

from muster.errors import ConfigError
from muster.train.config.keys import Config, NonFinite, Precision

SERVED = "strategy=parameter_server"
OTHER = "checkpoint.accept_changes=true"
LINE = ("model.hidden=[30]", "grad_clip=0.5", "batch_size=31", "micro_batch_size=8", "checkpoint.every_steps=4")


CLICKS = (
    *("data=clicks", "model=recommender", "data.num_samples=2000", "data.num_items=500", "model.hidden=[16]"),
    *("grad_clip=0.1", "batch_size=31", "micro_batch_size=8", "checkpoint.every_steps=4"),
)


@pytest.mark.parametrize("strategy, line", [("parameter_server", LINE), ("ddp_rpc", CLICKS)])
def test_synchronous_training_equals_one_process_and_its_checkpoints_are_everybodys(tmp_path, strategy, line):
    """From the server's to DDP and back, at other world sizes."""
    whole = run(tmp_path / "whole", *line, "max_steps=16")
    folder = tmp_path / "run"
    for ranks, until, chosen in ((3, 6, strategy), (2, 10, "ddp"), (2, 16, strategy)):
        result = run(folder, *line, f"strategy={chosen}", f"max_steps={until}", OTHER, ranks=ranks)
    assert [event["step"] for event in result.events("resume")] == [6, 10]
    assert len(result.losses) == 16
    for ours, theirs in zip(result.lines("train"), whole.lines("train"), strict=True):
        for name in ("loss", "grad_norm", "lr"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (ours["step"], name)
    assert result.lines("eval")[-1]["loss"] == pytest.approx(whole.lines("eval")[-1]["loss"], rel=1e-4)
    assert list(result.weights) == list(whole.weights)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-4, atol=1e-5)
    index = json.loads((folder / "checkpoints/step-00000016/index.json").read_text())["tensors"]
    files = {name: {piece["file"] for piece in entry["pieces"]} for name, entry in index.items()}
    tables = {name for name, where in files.items() if where == {"rank-00000.bin"}}
    if strategy == "ddp_rpc":  # the table and its momentum with the server, the rest with the trainer
        assert tables == {"model/embedding.weight", "optimizer/embedding.weight/momentum_buffer"} < files.keys()
    else:
        assert tables == files.keys()


KEPT = {
    # Batch norm and dropout, whose state is each trainer's own.
    "parameter_server": ("model._target_=kit.parts.models.Stateful",),
    "ddp_rpc": (*CLICKS[:5], "micro_batch_size=null"),
}


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize("strategy", KEPT)
def test_killed_stopped_and_preempted_it_resumes_bit_for_bit(tmp_path, strategy):
    line = (f"strategy={strategy}", *KEPT[strategy], "batch_size=31", "checkpoint.every_steps=5")
    with nodes(tmp_path / "run", *line, *pace(0.1), "dist.timeout_s=4", nnodes="1:1", nproc=3, cold=False) as cluster:
        agent = cluster.start("max_steps=100000")
        cluster.reach(8)
        cluster.next_step(lambda: os.kill(cluster.workers(agent)[2], signal.SIGKILL))
        cluster.reach(20)
        cluster.next_step(lambda: os.kill(cluster.workers(agent)[1], signal.SIGSTOP))
        cluster.reach(30)
        agent.send_signal(signal.SIGTERM)
        cluster.ended()
        stopped = cluster.result().outcome
        assert stopped["outcome"] == "preempted", cluster.log
        ends = f"max_steps={stopped['step'] + 20}"
        cluster.start(ends)
        assert cluster.ended()[-1] == 0, cluster.log
        cluster.until(lambda: not cluster.left_over(), "end of all processes", timeout_s=60)
        result = cluster.result()
    whole = run(tmp_path / "whole", *line, ends, ranks=3)
    causes = iter(told := [event["cause"] for event in result.events("restart")])  # a stall of 4 s is a cause, too
    assert any("rank 2" in cause for cause in causes) and any("rank 1" in cause for cause in causes), told
    assert result.losses == whole.losses
    assert all(torch.equal(weight, result.weights[name]) for name, weight in whole.weights.items())


@pytest.mark.nightly
@pytest.mark.parametrize("ranks, per_update, lr", [(3, 1, 0.5), (5, 2, 0.1)], ids=["as they come", "two of four"])
def test_asynchronous_training_learns_from_every_sample_once_an_epoch(tmp_path, ranks, per_update, lr):
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    line = (
        *(
            SERVED,
            f"strategy.gradients_per_update={per_update}",
            "data._target_=kit.parts.data.Ledger",
            "+data.size=100",
        ),
        *(f"optimizer.lr={lr}", "batch_size=20", "epochs=20", "checkpoint.every_steps=30", "eval.every_steps=off"),
    )
    result = run(tmp_path / "run", *line, ranks=ranks, env={"LEDGER": str(ledger)})
    took = read(ledger)
    assert sorted(took) == [*range(1, ranks)] and sorted(chain(*took.values())) == sorted([*range(100)] * 20)
    losses = [line["loss"] for line in result.lines("train")]
    assert len(losses) == 100 and sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert len(result.events("checkpoint")) == 4


@pytest.mark.nightly
def test_an_asynchronous_table_learns_through_distributed_optimizers(tmp_path):
    line = ("strategy=ddp_rpc", "strategy.asynchronous=true", *CLICKS[:5], "epochs=3", "batch_size=40")
    result = run(tmp_path / "run", *line, ranks=3)
    losses = [line["loss"] for line in result.lines("train")]
    assert len(losses) == 150 and sum(losses[-10:]) < 0.8 * sum(losses[:10]), losses
    assert len(result.lines("eval")) == 3 and len(result.events("checkpoint")) == 2


def serve_on(steps):
    """Three ranks without a launcher; the trainer of rank 2 dies after ten steps."""
    from functools import partial

    from kit.until import until
    from torch import nn
    from torch.distributed import rpc

    from muster.data.loader import Batch
    from muster.train.config.parts import Part
    from muster.train.optim.build import build_optimizer
    from muster.train.strategies.base import Recipe
    from muster.train.strategies.rpc.parameter_server import ParameterServer
    from muster.world.environment import Environment
    from muster.world.group import start
    from muster.world.group_options import GroupOptions

    world = start(GroupOptions(), Environment.from_env())
    optimizer = Part.of("optimizer", {"_target_": "torch.optim.SGD", "lr": 0.5})
    build = partial(build_optimizer, optimizer, precision=Precision.fp32)
    recipe = Recipe(
        partial(nn.Linear, 4, 2), build, nn.CrossEntropyLoss(), lambda step: 1.0, Precision.fp32, None, False, None, NonFinite.stop
    )  # fmt: skip
    strategy, done = ParameterServer(gradients_per_update=1), world.store_keys.rpc_store()
    strategy.build(recipe, world)
    if strategy.server:
        strategy.server.begin(steps)
        until(lambda: strategy.server.lost, "end of rank 2", timeout_s=60)
        done.set("lost", "")
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
            done.wait(["lost"])
    strategy.sync_parameters()
    done.set("done", "")
    done.wait(["seen"])
    rpc.shutdown(graceful=False)
    return losses


def test_a_trainer_that_dies_does_not_stop_the_server_and_the_others():
    """The processes alone: under torchrun the launcher restarts all of them."""
    (updates, lost, caveat), losses = on_ranks(serve_on, 3, 60, lost=[2])
    assert lost == [2] and updates == 10 + 60
    assert len(losses) == 60 and losses[-1] < 0.5 * losses[0]
    assert "the weights are not reproducible" in caveat


SYNCHRONOUS = {"gradients_per_update": None}
HOGWILD = {"gradients_per_update": 1}
TABLE = {"remote": "embedding", "asynchronous": True}


@pytest.mark.parametrize(
    "options, world_size, change, said",
    [
        (SYNCHRONOUS, 1, {}, "at least 2 processes"),
        ({"gradients_per_update": 3}, 5, {}, "must divide the number of trainers, 4 .* use one of 1, 2, 4"),
        (SYNCHRONOUS, 3, {"compile": True}, "use compile=false"),
        (SYNCHRONOUS, 3, {"precision": Precision.fp16}, "use precision=bf16 or fp32"),
        (HOGWILD, 3, {"on_nonfinite": NonFinite.skip}, "use on_nonfinite=stop"),
        (TABLE, 1, {}, "at least 2 processes"),
        (TABLE, 3, {"grad_clip": 1.0}, "use grad_clip=null"),
        (TABLE, 3, {"compile": True}, "use compile=false"),
    ],
)
@pytest.mark.unit
def test_what_does_not_go_together_is_refused(options, world_size, change, said):
    from muster.train.strategies.rpc.ddp_rpc import DdpRpc
    from muster.train.strategies.rpc.parameter_server import ParameterServer

    strategy = DdpRpc(**options) if "remote" in options else ParameterServer(**options)
    with pytest.raises(ConfigError, match=said):
        strategy.check(replace(Config(), **change), world_size)


def test_a_submodule_that_is_not_there_is_named(tmp_path):
    line = ("strategy=ddp_rpc", *CLICKS[:5], "strategy.remote=embeding")
    result = run(tmp_path / "run", *line, ranks=2, ok=False)
    assert len(result.said) == 1 and "did you mean embedding?" in result.said[0], result.out


@pytest.mark.unit
def test_clicks_depend_on_the_sample_alone():
    from muster.train.data.clicks import Clicks

    data = Clicks(train=True, num_samples=500, num_items=100, list_length=5, hidden_seed=3)
    items, clicked = data.__getitems__(range(500))
    assert items.shape == (500, 5) and int(items.min()) >= 0 and int(items.max()) < 100
    assert torch.equal(items[77], data[77][0]) and int(clicked[77]) == int(data[77][1])
    counts = torch.bincount(items.flatten(), minlength=100)
    assert counts[0] > 5 * counts[20] and 100 < int(clicked.sum()) < 400
    test = Clicks(train=False, num_samples=500, num_items=100, list_length=5, hidden_seed=3)
    assert len(test) == 50 and not torch.equal(test[0][0], items[0])
