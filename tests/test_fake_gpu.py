"""What the kit asks of a GPU, on one that is the CPU (kit/fake_gpu.py): above all where the host waits for it."""

import json

import pytest
from kit.job import run

LINE = ("+callbacks.waits._target_=kit.fake_gpu.Waits", "device=cuda", "log.every_steps=100", "eval.every_steps=off")


def train(folder, *line):
    """A run on the fake GPU, and what has waited for it after each step."""
    result = run(folder, *LINE, *line, module="kit.fake_gpu")
    return result, json.loads((folder / "waits.json").read_text())


@pytest.mark.parametrize("line", [(), ("precision=bf16", "micro_batch_size=16"), ("model=convnet",)], ids=str)
def test_a_plain_step_waits_for_no_device(tmp_path, line):
    _, waits = train(tmp_path / "run", *line, "max_steps=6")
    assert len(waits) == 6 and waits[0] == waits[-1]


def test_a_value_that_is_read_is_counted(tmp_path):
    _, waits = train(tmp_path / "run", "precision=fp16", "max_steps=4")
    assert sum(waits[-1].values()) > sum(waits[0].values()), "the loss scaler reads whether a gradient is finite"


def test_a_save_waits_in_the_thread_that_writes_it(tmp_path):
    """By an event after its copies, not for the whole device; what it writes is resumed bit for bit."""
    line = ("optimizer=adamw", "checkpoint.every_steps=4")
    whole, waits = train(tmp_path / "whole", *line, "max_steps=8")
    assert not [each for each in waits[-1] if each.startswith(("cuda", "stream"))]
    assert [each for each in waits[-1] if each.startswith("event.synchronize in state.py")]
    train(tmp_path / "cut", *line, "max_steps=4")
    again, _ = train(tmp_path / "cut", *line, "max_steps=8")
    assert again.events("resume")[0]["step"] == 4 and again.sha256 == whole.sha256
