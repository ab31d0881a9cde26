"""The cut of a model over two devices, and what the strategies of this kind refuse before any process group."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from muster.errors import ConfigError
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.models.gpt import Gpt
from muster.train.strategies.data_parallel import gather, replicate, scatter
from muster.train.strategies.model_parallel import spread

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
GPT = {"input_shape": [8], "num_classes": 11, "num_layers": 4, "num_heads": 2, "hidden_dim": 8, "dropout": 0.1}


@pytest.mark.parametrize(
    "split", [["blocks.2", "blocks.3", "norm"], ["blocks"], ["blocks.0"], ["embedding.dropout", "norm"]]
)
def test_what_flows_follows_the_layers_to_their_devices(split):
    """torch's fake tensors know devices that are not there, and refuse to mix them as real ones do."""
    with FakeTensorMode():
        model = Gpt(**GPT)
        spread(model, split, first=FIRST, second=SECOND)
        for name, parameter in model.named_parameters():
            assert (parameter.device == SECOND) == name.startswith(tuple(split)), name
        outputs = model(torch.zeros(2, 8, dtype=torch.int64, device=FIRST))
        assert outputs.device == FIRST and model.head.weight is model.embedding.token.weight


@pytest.mark.unit
def test_buffers_lie_where_their_layers_do():
    with FakeTensorMode():
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        spread(model, ["1", "2"], first=FIRST, second=SECOND)
        assert [buffer.device for buffer in model.buffers()] == [FIRST] * 3 + [SECOND] * 3
        assert model(torch.zeros(2, 4)).device == FIRST


@pytest.mark.parametrize(
    "split, said",
    [
        ([], r"names no layer of the second device: use some of this model's, embedding, blocks, norm, head"),
        (["blocks.9"], r"no layer blocks.9; did you mean blocks.3\? valid: blocks.0, blocks.1, blocks.2, blocks.3$"),
        (["norm", "head"], r"embedding.token.weight and head.weight are one weight: put both layers on one device"),
    ],
)
@pytest.mark.unit
def test_a_cut_that_cannot_be_is_refused(split, said):
    with pytest.raises(ConfigError, match=said):
        spread(Gpt(**GPT), split, first=torch.device("cpu"), second=torch.device("cpu"))


@pytest.mark.unit
def test_a_batch_is_scattered_and_gathered_whole():
    batch = {"image": torch.arange(21).view(7, 3), "length": torch.arange(7)}
    parts = scatter(batch, 3)
    assert [len(part["length"]) for part in parts] == [3, 3, 1]
    whole = gather(parts)
    assert all(torch.equal(whole[name], batch[name]) for name in batch)
    assert len(scatter(torch.zeros(2, 3), 4)) == 2


@pytest.mark.unit
def test_a_replica_gives_its_gradient_back_and_keeps_its_buffers_to_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = model[1].running_mean.clone()
    torch.func.functional_call(model, replicate(model), (torch.randn(5, 4),)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize(
    "overrides, ranks, said",
    [
        (["strategy=data_parallel"], 2, "takes one process and was started with 2: use strategy=ddp"),
        (["strategy=data_parallel", "compile=true"], 1, "use compile=false, or strategy=ddp"),
        (["strategy=model_parallel", "compile=true"], 2, "use compile=false, or strategy=ddp"),
        (["strategy=local_sgd", "precision=fp16"], 2, "cannot be combined with precision=fp16: use fp32 or bf16"),
        (
            ["strategy.compression=powersgd", "precision=fp16"],
            2,
            "cannot be combined with precision=fp16: use fp32 or bf16",
        ),
        (["strategy.compression=powersgd", "on_nonfinite=skip"], 2, "use on_nonfinite=stop"),
        (["strategy.compression=int8"], 2, "'none', 'bf16', 'fp16' or 'powersgd'"),
        (["strategy=local_sgd", "strategy.every_steps=0"], 2, "strategy.every_steps=0 is out of range"),
    ],
)
@pytest.mark.unit
def test_what_does_not_go_together_is_refused_before_any_process_group(overrides, ranks, said):
    with pytest.raises(ConfigError, match=said):
        config = compose(overrides)
        build(config.strategy).check(config, ranks)


@pytest.mark.unit
def test_gpus_are_dealt_two_to_a_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = compose(["strategy=model_parallel", "strategy.split=['3']"])
    with pytest.raises(ConfigError, match=r"2 processes have 3: use --nproc-per-node=1, or device=cpu"):
        build(config.strategy).check(config, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match=r"cannot use NCCL.*dist.backend=gloo"):
        build(config.strategy).check(config, 2)
    config = compose(["strategy=model_parallel", "strategy.split=['3']", "dist.backend=gloo"])
    build(config.strategy).check(config, 2)
    config = compose(["strategy=data_parallel", "strategy.devices=3", "gpus=[0,2]"])
    with pytest.raises(ConfigError, match=r"strategy.devices=3, and there are 2 GPUs: use 2 at most"):
        build(config.strategy).check(config, 1)
