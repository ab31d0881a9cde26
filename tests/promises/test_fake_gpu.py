"""What the kit asks of a GPU, on one that is the CPU (kit/fake_gpu.py): above all where the host waits for it."""

import json
from collections import Counter

import pytest
import torch
from kit import fake_gpu
from kit.job import run

LINE = ("+callbacks.waits._target_=kit.fake_gpu.Waits", "device=cuda", "log.every_steps=100", "eval.every_steps=off")


GPT = (
    *(
        "data=text",
        "data.pattern=*.txt",
        "data.block_size=16",
        "model=gpt",
        "model.num_layers=1",
        "model.hidden_dim=32",
    ),
    *("objective=language_modeling", "optimizer=adamw", "batch_size=8", "precision=bf16"),
)
EXTRAS = ("grad_clip=0.5", "log.train_metrics=true", "callbacks=[ema]", "callbacks.ema.every_steps=1")


def train(folder, *line, **how):
    """A run on the fake GPU, and what has waited for it after each step."""
    result = run(folder, *LINE, *line, module="kit.fake_gpu", **how)
    waits, gradients = json.loads((folder / "waits.json").read_text())
    assert gradients == [*range(1, len(waits) + 1)], "the heartbeat says which rank's device hangs"
    return result, waits


@pytest.mark.parametrize(
    "line, ranks",
    [((), None), (("precision=bf16", "micro_batch_size=16"), None), (("model=convnet",), None), ((*GPT, *EXTRAS), None), (("micro_batch_size=5",), 2)],
    ids=str,
)  # fmt: skip
def test_a_plain_step_waits_for_no_device(tmp_path, line, ranks):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question: " * 15)
    root = (f"data.root={tmp_path}",) if line[:1] == GPT[:1] else ()
    _, waits = train(tmp_path / "run", *line, *root, "max_steps=6", ranks=ranks)
    assert len(waits) == 6 and waits[0] == waits[-1]


@pytest.mark.parametrize(
    "line, said",
    [
        (("device=cpu",), "strategy.sync_batchnorm=true needs CUDA devices"),
        ((), "SyncBatchNorm layers only work with GPU modules"),  # torch's own word: it has been converted
    ],
)
def test_synchronized_batch_norm_wants_a_real_gpu(tmp_path, line, said):
    asked = (*LINE, "model=convnet", "strategy.sync_batchnorm=true", "max_steps=1", *line)
    assert said in run(tmp_path / "run", *asked, module="kit.fake_gpu", ranks=2, ok=False).outcome["error"]


@pytest.mark.unit
def test_what_waits_for_a_device_is_counted(monkeypatch):
    monkeypatch.setattr(fake_gpu, "waits", Counter())
    device, values = torch.device("cuda", 0), torch.tensor([1, 0, 2])
    acts = [
        lambda: values[values > 0], lambda: values.masked_select(values > 0), lambda: torch.nonzero(values), lambda: values.unique(),
        lambda: torch.unique(values), lambda: values.repeat_interleave(values), lambda: torch.repeat_interleave(values, values),
        lambda: values.to(device), lambda: values.cuda(), lambda: values.copy_(values.clone()), lambda: values.tolist(), lambda: float(values[0]),
    ]  # fmt: skip
    with fake_gpu.Mapped():
        for number, act in enumerate(acts):
            act()
            assert sum(fake_gpu.waits.values()) == number + 1, (number, fake_gpu.waits)
        values.to(device, non_blocking=True).copy_(values.clone(), non_blocking=True)
        values[1:].to(torch.float32)[0].cuda(non_blocking=True)
    assert sum(fake_gpu.waits.values()) == len(acts)


def test_a_value_that_is_read_is_counted(tmp_path):
    _, waits = train(tmp_path / "run", "precision=fp16", "max_steps=4")
    assert sum(waits[-1].values()) > sum(waits[0].values()), "the loss scaler reads whether a gradient is finite"


@pytest.mark.nightly
def test_a_save_waits_in_the_thread_that_writes_it(tmp_path):
    """By an event after its copies, not for the whole device; what it writes is resumed bit for bit."""
    line = ("optimizer=adamw", "checkpoint.every_steps=4")
    whole, waits = train(tmp_path / "whole", *line, "max_steps=12")  # the save of step 8 has waited for that of step 4
    assert not [each for each in waits[-1] if each.startswith(("cuda", "stream"))]
    assert [each for each in waits[-1] if each.startswith("event.synchronize in state.py")]
    train(tmp_path / "cut", *line, "max_steps=4")
    again, _ = train(tmp_path / "cut", *line, "max_steps=12")
    assert again.events("resume")[0]["step"] == 4 and again.sha256 == whole.sha256
