"""Whole runs on a GPU: in CI on a device that is the CPU (kit/fake_cuda), and on the machine's own where there is one."""

import pytest
import torch
from kit.fake_cuda import ON_FAKE
from kit.job import run

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

everywhere = pytest.mark.parametrize("place", PLACES)


def train(place, folder, *line, **how):
    """A run on the device, from the command line."""
    return run(folder, *LINE, *line, env=ON_FAKE if place == "fake" else {}, cold=True, **how)


def devices(place):
    """The number of devices of the machine."""
    return int(ON_FAKE["FAKE_CUDA"]) if place == "fake" else torch.cuda.device_count()


@everywhere
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path, place):
    line = ("model=convnet", "data.augment=true", "micro_batch_size=7", "checkpoint.every_steps=4")
    whole = train(place, tmp_path / "whole", *line, "max_steps=8")
    train(place, tmp_path / "cut", *line, "max_steps=4")
    cut = train(place, tmp_path / "cut", *line, "max_steps=8")
    assert whole.events("start")[0]["device"] == "cuda" and cut.events("resume")[0]["step"] == 4
    assert cut.sha256 == whole.sha256 and cut.losses == whole.losses


@everywhere
def test_one_hash_at_every_world_size(tmp_path, place):
    line = ("virtual_world_size=2", "model=convnet", "max_steps=6")
    hashes = {
        train(place, tmp_path / f"{number}-{ranks}", *line, ranks=ranks).sha256
        for number, ranks in enumerate([1, min(2, devices(place))])
    }
    assert len(hashes) == 1


SHARDED = [("fsdp",), ("fsdp", "strategy.prefetch=2", "strategy.param_dtype=bf16"), ("hybrid", "strategy.shard=1")]
"""On the machine's own alone: `fully_shard` asks a parameter for its device, which on the fake one is the CPU."""
OF_DDP = [("fake", ("zero",)), *(pytest.param("own", each, marks=PLACES[1].marks) for each in (("zero",), *SHARDED))]


@pytest.mark.parametrize("place, strategy", OF_DDP, ids=str)
def test_losses_are_those_of_ddp(tmp_path, place, strategy):
    ranks = min(2, devices(place))
    ddp = train(place, tmp_path / "ddp", "max_steps=4", ranks=ranks)
    other = train(place, tmp_path / "other", f"strategy={strategy[0]}", *strategy[1:], "max_steps=4", ranks=ranks)
    assert other.losses == pytest.approx(ddp.losses, rel=2e-2 if "bf16" in str(strategy) else 1e-3)


@everywhere
def test_a_run_goes_on_without_the_gpu(tmp_path, place):
    cpu = run(tmp_path / "cpu", *LINE, "device=cpu", "max_steps=8")
    train(place, tmp_path / "both", "max_steps=4")
    both = run(tmp_path / "both", *LINE, "device=cpu", "max_steps=8", "checkpoint.accept_changes=true")
    assert [line["device"] for line in both.events("start") + both.events("resume")] == ["cuda", "cpu"]
    assert both.losses == pytest.approx(cpu.losses, rel=1e-3)


@everywhere
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_compiled_step_in_reduced_precision_learns(tmp_path, place, precision):
    found = train(
        place, tmp_path / "run", "compile=true", f"precision={precision}", "deterministic=false", "max_steps=40"
    )
    assert found.losses[40] < 0.5 * found.losses[1]
