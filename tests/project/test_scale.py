"""The model of large worlds: its formulas hold together, and agree with what torch really issues at 1,024 ranks."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.ranks import on_ranks

from bench.scale.__main__ import main, predict
from bench.scale.job import Machine, ScaledJob, Workload
from bench.scale.show import assumed
from bench.scale.strategies import (
    STRATEGIES,
    ddp,
    fsdp,
    hybrid,
    local_sgd,
    parameter_server,
    pipeline,
    tensor_parallel,
    zero,
)
from muster.collectives.algorithm import Network

RANKS = st.sampled_from([2**power for power in range(1, 15)])
OUTER, INNER = Network(1e-5, 2e-11), Network(2e-6, 2e-12)
WORK = Workload(7e9, 32, samples=2, flops=8e13, boundary_bytes=1.6e7, activation_bytes=9e9)
JOB = ScaledJob(WORK, Machine(4e14, OUTER, INNER, node_size=8))
LAYERS, WIDTH = 4, 1024
LINE = ["--parameters=7e9", "--layers=32", "--hidden=4096", "--sequence=2048", "--flops-per-s=4e14"]


@given(ranks=RANKS)
@pytest.mark.unit
def test_bytes_are_the_textbook_s(ranks):
    share = (ranks - 1) / ranks * WORK.nbytes
    assert ddp(JOB, ranks).sent_bytes == pytest.approx(2 * share)
    assert zero(JOB, ranks).sent_bytes == fsdp(JOB, ranks).sent_bytes == pytest.approx(3 * share)
    assert local_sgd(JOB, ranks).sent_bytes == pytest.approx(2 * share / JOB.every)
    assert parameter_server(JOB, ranks).sent_bytes == (ranks - 1) * WORK.nbytes


@given(ranks=RANKS)
@pytest.mark.unit
def test_memory_falls_from_ddp_to_zero_to_fsdp(ranks):
    whole, sharded, least = (each(JOB, ranks).memory_bytes for each in (ddp, zero, fsdp))
    assert whole == 7e9 * 16 + 2 * 9e9
    assert whole > sharded and (ranks == 2 or sharded > least)
    assert fsdp(JOB, 2**14).memory_bytes < fsdp(JOB, ranks).memory_bytes or ranks == 2**14


@given(ranks=RANKS)
@pytest.mark.unit
def test_a_strategy_at_its_limit_is_a_simpler_one(ranks):
    base = ddp(JOB, ranks)
    assert local_sgd(replace(JOB, every=1), ranks) == base
    assert tensor_parallel(replace(JOB, tensor=1), ranks) == base
    assert pipeline(replace(JOB, stages=1, micro_batches=1), ranks) == base
    assert hybrid(replace(JOB, group=ranks), ranks) == fsdp(JOB, ranks)


@given(ranks=RANKS, name=st.sampled_from(sorted(STRATEGIES)))
@pytest.mark.unit
def test_more_ranks_send_no_less_and_no_faster(ranks, name):
    step, more = STRATEGIES[name](JOB, ranks), STRATEGIES[name](JOB, 2 * ranks)
    assert more.sent_bytes >= step.sent_bytes * (1 - 1e-9)
    assert more.seconds >= step.seconds * (1 - 1e-9) and step.least_seconds <= step.seconds


@given(stages=st.integers(1, 64), micro_batches=st.integers(1, 256))
@pytest.mark.unit
def test_the_bubble_is_the_pipeline_s(stages, micro_batches):
    job = replace(JOB, stages=stages, micro_batches=micro_batches)
    busy, step = ddp(job, 64).compute_s, pipeline(job, 64).compute_s
    assert 1 - busy / step == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@pytest.mark.unit
def test_a_group_within_a_node_uses_the_node_s_network_and_one_beyond_it_does_not():
    slow = replace(JOB, machine=replace(JOB.machine, inner=OUTER))
    assert fsdp(JOB, 8).communication_s < fsdp(slow, 8).communication_s
    assert fsdp(JOB, 16) == fsdp(slow, 16)
    assert hybrid(JOB, 64).communication_s < hybrid(slow, 64).communication_s


@pytest.mark.unit
def test_log_rounds_save_latency_and_no_bytes():
    ring, recursive = ddp(JOB, 4096), ddp(replace(JOB, recursive=True), 4096)
    assert recursive.sent_bytes == ring.sent_bytes
    messages = 2 * -(-WORK.nbytes // JOB.bucket_bytes)
    assert ring.communication_s - recursive.communication_s == pytest.approx(messages * (4095 - 12) * OUTER.alpha_s)


def what_a_rank_of_1024_sends():
    """The calls that torch makes in one step of fully_shard, among ranks that are not there; and in groups of 8 of them."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = {"_allgather_base_": [], "_reduce_scatter_base_": [], "allreduce_": []}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if func.namespace == "c10d" and name in self.calls:
                tensors = args[0] if name == "allreduce_" else args[:2]
                self.calls[name].append([tensor.nbytes for tensor in tensors])
            return func(*args, **(kwargs or {}))

    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    flat = init_device_mesh("cpu", (1024,))
    found = []
    for mesh in (flat, init_device_mesh("cpu", (128, 8), mesh_dim_names=("replicate", "shard"))):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        with Seen() as seen:
            model(torch.ones(1, WIDTH)).sum().backward()
        found.append(seen.calls)
    return found


def test_torch_issues_the_collectives_of_the_model_at_1024_ranks():
    (meshes,) = on_ranks(what_a_rank_of_1024_sends, 1)
    for group, calls in zip((1024, 8), meshes, strict=True):
        gathered, scattered, reduced = calls.values()
        assert (len(gathered), len(scattered), len(reduced)) == (2 * LAYERS, LAYERS, LAYERS * (group == 8))
        sent = sum(abs(whole - part) for whole, part in (*gathered, *scattered))  # its own part a rank sends nobody
        sent += sum(2 * 127 / 128 * whole for (whole,) in reduced)
        job = replace(JOB, workload=replace(WORK, parameters=LAYERS * WIDTH**2, layers=LAYERS), group=group)
        assert sent == pytest.approx(hybrid(job, 1024).sent_bytes), group


def test_a_table_a_picture_and_the_numbers(tmp_path, capsys):
    (tmp_path / "net.json").write_text(json.dumps({"network": {"alpha_s": 1e-5, "beta_s": 2e-11}}))
    assert main([*LINE, f"--network={tmp_path / 'net.json'}", f"--out={tmp_path / 'out'}"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in STRATEGIES) and "16,384" in out
    assert (tmp_path / "out/scale.png").read_bytes().startswith(b"\x89PNG")
    steps = json.loads((tmp_path / "out/scale.json").read_text())["steps"]
    assert {name: len(sizes) for name, sizes in steps.items()} == dict.fromkeys(STRATEGIES, 12)
    assert re.fullmatch(
        r"Assumed: .+ parameters; .+ TFLOP/s a rank; .+ us and .+ GB/s between nodes of \d+, .+ inside", assumed(JOB)
    )
    assert set(predict(JOB)["ddp"]) == {int(size) for size in steps["ddp"]}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (LINE, "do not describe a network"),
        ([*LINE, "--alpha-us=10", "--gb-per-s=0"], "do not describe a network"),
        ([*LINE, "--network=no.json"], "holds no fitted constants"),
        ([*LINE, "--alpha-us=10", "--gb-per-s=50", "--stages=0"], "--stages=0"),
        (["--parameters=7e9"], "--layers"),
    ],
)
@pytest.mark.unit
def test_what_is_missing_is_one_line_and_exit_2(arguments, said, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("muster: config error: ") and said in err and err.count("\n") == 1
