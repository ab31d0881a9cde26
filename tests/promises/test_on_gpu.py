"""Whole runs on a GPU: in CI on a device that is the CPU (kit/fake_cuda), and on the machine's own where there is one."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from kit.fake_cuda import ON_FAKE
from kit.job import environment, run
from kit.one_gpu import ON_ONE

from muster.checkpoint.state import Shares
from muster.doctor.checks import compiler
from muster.train.config.compose import compose
from muster.train.numerics import set_numerics
from muster.world.exposed_communication import Waiting

own = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PLACES = ["fake", pytest.param("own", marks=[pytest.mark.gpu, own])]
LINE = (
    "device=cuda",
    "deterministic=true",
    "optimizer=adamw",
    "batch_size=20",
    "log.every_steps=1",
    "eval.every_steps=4",
)

CUDA = torch.device("cuda", 0)
ASSERTS = """
import os
from types import SimpleNamespace

import torch

from muster.world.exposed_communication import Waiting
from muster.faults.phase import cuda_is_busy

device = torch.device("cuda", 0)
weight = torch.nn.Parameter(torch.ones(2, device=device))
for _ in range(2):  # a kernel that is first loaded while another runs may wait for it; the second gradient is added
    (weight * 2).sum().backward()
torch.ones(2, device=device)[torch.tensor([1], device=device)]
waiting = Waiting(SimpleNamespace(device=device), [weight])
waiting.begin()
torch.cuda._sleep(500_000_000)
(weight * 2).sum().backward()
waiting.end()
torch.ones(2, device=device)[torch.tensor([7], device=device)]
try:
    torch.cuda.synchronize()
except torch.AcceleratorError:
    print(cuda_is_busy(device), waiting.computed(), flush=True)
os._exit(0)
"""


def on_own(test):
    """Mark a test of what the fake device cannot show."""
    return pytest.mark.gpu(own(test))


everywhere = pytest.mark.parametrize("place", PLACES)


def train(place, folder, *line, ranks=None, **how):
    """A run on the device, from the command line. Ranks for which the machine has too few GPUs share the first."""
    env = ON_FAKE if place == "fake" else {}
    if place == "own" and (ranks or 1) > torch.cuda.device_count():
        env = ON_ONE
    return run(folder, *LINE, *line, env=env, cold=True, ranks=ranks, **how)


@pytest.mark.nightly(but=["own"])
@everywhere
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path, place):
    line = ("model=convnet", "data.augment=true", "micro_batch_size=7", "checkpoint.every_steps=4")
    whole = train(place, tmp_path / "whole", *line, "max_steps=8")
    train(place, tmp_path / "cut", *line, "max_steps=4")
    cut = train(place, tmp_path / "cut", *line, "max_steps=8")
    assert whole.events("start")[0]["device"] == "cuda" and cut.events("resume")[0]["step"] == 4
    assert cut.sha256 == whole.sha256 and cut.losses == whole.losses


@pytest.mark.nightly(but=["own"])
@everywhere
def test_one_hash_at_every_world_size(tmp_path, place):
    line = ("virtual_world_size=2", "model=convnet", "max_steps=6")
    hashes = {train(place, tmp_path / str(ranks), *line, ranks=ranks).sha256 for ranks in (1, 2)}
    assert len(hashes) == 1


SHARDED = [("fsdp",), ("fsdp", "strategy.prefetch=2", "strategy.param_dtype=bf16"), ("hybrid", "strategy.shard=1")]
"""On the machine's own alone: `fully_shard` asks a parameter for its device, which on the fake one is the CPU."""
OF_DDP = [("fake", ("zero",)), *(pytest.param("own", each, marks=PLACES[1].marks) for each in (("zero",), *SHARDED))]


@pytest.mark.nightly(
    but=[
        "own-('zero',)",
        "own-('fsdp',)",
        "own-('fsdp', 'strategy.prefetch=2', 'strategy.param_dtype=bf16')",
        "own-('hybrid', 'strategy.shard=1')",
    ]
)
@pytest.mark.parametrize("place, strategy", OF_DDP, ids=str)
def test_losses_are_those_of_ddp(tmp_path, place, strategy):
    ddp = train(place, tmp_path / "ddp", "max_steps=4", ranks=2)
    other = train(place, tmp_path / "other", f"strategy={strategy[0]}", *strategy[1:], "max_steps=4", ranks=2)
    assert other.losses == pytest.approx(ddp.losses, rel=2e-2 if "bf16" in str(strategy) else 1e-3)


@pytest.mark.nightly(but=["own"])
@everywhere
def test_an_evaluation_on_one_gpu_takes_no_more_samples_at_once_than_a_rank_of_training_did(tmp_path, place):
    """The whole global batch may not fit."""
    largest = "+metrics.largest._target_=kit.parts.measures.Largest"
    run(tmp_path / "run", *LINE[2:], "device=cpu", largest, "max_steps=4", ranks=2)
    line = [sys.executable, "-m", "muster.train.evaluate", str(tmp_path / "run"), "--json", "device=cuda"]
    env = environment(**(ON_FAKE if place == "fake" else {}))
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["largest"] == 10, done


@everywhere
def test_a_run_goes_on_without_the_gpu(tmp_path, place):
    cpu = run(tmp_path / "cpu", *LINE, "device=cpu", "max_steps=8")
    train(place, tmp_path / "both", "max_steps=4")
    both = run(tmp_path / "both", *LINE, "device=cpu", "max_steps=8", "checkpoint.accept_changes=true")
    assert [line["device"] for line in both.events("start") + both.events("resume")] == ["cuda", "cpu"]
    assert both.losses == pytest.approx(cpu.losses, rel=1e-3)


@pytest.mark.nightly(but=["bf16-own", "fp16-own"])
@everywhere
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_compiled_step_in_reduced_precision_learns(tmp_path, place, precision):
    found = train(
        place, tmp_path / "run", "compile=true", f"precision={precision}", "deterministic=false", "max_steps=40"
    )
    assert found.losses[40] < 0.5 * found.losses[1]


@pytest.mark.parametrize(
    "more",
    [
        ("precision=fp32",),
        ("precision=bf16",),
        ("precision=bf16", "model=gpt", "objective=language_modeling", "grad_clip=1.0", "compile=true"),
    ],
    ids=["fp32", "bf16", "compiled and clipped"],
)
@on_own
def test_no_step_waits_for_the_device(tmp_path, more):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question: " * 500)
    text = ("data=text", f"data.root={tmp_path}", "data.pattern=*.txt", "data.block_size=16") if len(more) > 1 else ()
    strict = ("+callbacks.strict._target_=kit.parts.callbacks.NoWaits", "+callbacks.strict.last=8")
    line = ("deterministic=false", *text, *more, "log.every_steps=100", "eval.every_steps=off")
    train("own", tmp_path / "run", *line, *strict, "max_steps=10")


@on_own
def test_a_kernel_is_compiled():
    assert compiler.attempt(CUDA) == ""


@on_own
def test_an_evaluation_takes_no_more_memory_than_a_step(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question: " * 50_000)
    data = ("data=text", f"data.root={tmp_path}", "data.pattern=*.txt", "data.block_size=256", "batch_size=2")
    model = ("model=gpt", "objective=language_modeling", "eval.max_samples=256", "eval.every_steps=4")
    found = train("own", tmp_path / "run", *data, *model, "max_steps=8")
    peaks = {line["step"]: line["peak_memory_gib"] for line in found.lines("train")}
    assert max(peaks.values()) < 1.5 * max(peaks[step] for step in range(1, 4)), peaks


@on_own
def test_a_device_with_an_error_does_not_silence_the_heartbeat():
    """In a process of its own, whose device is lost by it."""
    done = subprocess.run([sys.executable, "-c", ASSERTS], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[-2:] == ["False", "0"], done


@on_own
def test_gradients_are_computed_when_the_device_is_done():
    weight = torch.nn.Parameter(torch.ones(2, device=CUDA))
    for _ in range(2):  # a kernel that is first loaded while another runs may wait for it; the second gradient is added
        (weight * 2).sum().backward()
    waiting = Waiting(SimpleNamespace(device=CUDA), [weight])
    waiting.begin()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    (weight * 2).sum().backward()
    waiting.end()
    assert waiting.computed() == 0
    torch.cuda.synchronize()
    assert waiting.computed() == 1


@on_own
def test_tf32_rounds_a_product():
    one, products = torch.rand(512, 512, device=CUDA), {}
    for tf32 in ("true", "false", "true"):
        set_numerics(compose([f"tf32={tf32}"]))
        products[tf32] = one @ one
    exact = one.double() @ one.double()
    error = {tf32: float((product - exact).abs().max()) for tf32, product in products.items()}
    assert error["true"] > 10 * error["false"], error


@on_own
def test_copies_of_a_checkpoint_have_the_bits_of_the_device():
    tensors = [torch.rand(1000, 1000, device=CUDA), torch.rand(3, device=CUDA).bfloat16(), torch.arange(9, device=CUDA)]
    shares = Shares(SimpleNamespace(device=CUDA))
    before = [tensor.cpu() for tensor in tensors]
    ready = shares._copy(tensors)
    for tensor in tensors:
        tensor.zero_()  # the next step, which may not overtake the copies
    ready()
    assert all(copy.is_pinned() for copy in shares._copies) and all(map(torch.equal, shares._copies, before))


@on_own
def test_intervals_in_seconds_are_kept(tmp_path):
    pace = ("+callbacks.pace._target_=kit.parts.callbacks.Pace", "+callbacks.pace.step_s=0.05")
    line = ("log.every_steps=100000", "log.every_s=0.5", "max_steps=60", "eval.every_steps=off")
    found = train("own", tmp_path / "run", *line, *pace)
    assert 3 <= len(found.lines("train")) <= 10
