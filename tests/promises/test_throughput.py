"""Tokens per second, model FLOPs utilization and device memory, in the records and wherever they are shown."""

import json

import numpy as np
import pytest
import torch
from kit.job import run

from muster.loggers.console import Bar, describe
from muster.report.history import History
from muster.report.page import write_report
from muster.report.watch import _how_well
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.data.load import Data
from muster.train.throughput import PEAKS, Throughput, flops_per_sample, multiplied, peak_flops

GPT = ("data=text", "model=gpt", "objective=language_modeling")


class Images:
    """Has samples and no images: only their shapes matter."""

    num_classes, input_shape = 1000, (3, 224, 224)

    def __init__(self, train=True):
        pass

    def __len__(self):
        return 1

    def __getitems__(self, indices, keys=None):
        return torch.zeros(len(indices), *self.input_shape), torch.zeros(len(indices)).long()

    def __getitem__(self, index):
        raise AssertionError("read whole")


def counted(*line, data=None):
    config = compose([*line])
    data = build(config.data, train=True) if data is None else data
    return flops_per_sample(config, Data(data, None, data.num_classes, ""))


@pytest.mark.unit
def test_a_transformer_takes_what_palms_formula_says(tmp_path):
    """6N + 12LHQT per token: N parameters of products, L layers, H heads of size Q, T tokens."""
    layers, heads, width, length, vocabulary = 3, 2, 32, 64, 128
    np.zeros(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    data = (f"data.root={tmp_path}", f"data.block_size={length}", f"data.vocab_size={vocabulary}")
    size = (f"model.num_layers={layers}", f"model.num_heads={heads}", f"model.hidden_dim={width}")
    parameters = 12 * layers * width**2 + vocabulary * width
    per_token = 6 * parameters + 12 * layers * width * length
    assert counted(*GPT[1:], "data=tokens", *data, *size) == length * per_token


@pytest.mark.unit
def test_resnet50_takes_its_published_operations():
    """4.09 billion multiplications and additions of a forward pass, at 224 by 224 pixels: torchvision's own figure."""
    assert counted("model=resnet50", data=Images()) == pytest.approx(3 * 2 * 4.09e9, rel=0.002)


@pytest.mark.parametrize("line", [["freeze=['layers.0*']"], ["model._target_=kit.parts.models.ReadsItself"]])
@pytest.mark.unit
def test_a_model_that_cannot_be_counted_has_no_figure(line):
    """Frozen parameters take less; a model that looks at its own numbers needs real ones."""
    assert counted() is not None
    assert counted(*line) is None


@pytest.mark.unit
def test_a_device_that_is_not_listed_has_no_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", dtype="bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM4", dtype="bf16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", dtype="bf16") is None
    assert all(peak.fp32 < (peak.tf32 or peak.fp16) < 2000 for peak in PEAKS.values())


@pytest.mark.parametrize(
    "line, tf32, kind",
    [([], True, "tf32"), ([], False, "fp32"), (["precision=bf16"], True, "bf16"), (["precision=fp16"], False, "fp16"),
     (["strategy=fsdp", "strategy.param_dtype=bf16"], True, "bf16")],
)  # fmt: skip
@pytest.mark.unit
def test_the_peak_is_that_of_what_is_multiplied(line, tf32, kind):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        assert multiplied(compose(line)) == kind
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.unit
def test_rates_are_what_is_known():
    assert Throughput(tokens=1024, flops=8e11, peak=2e15).rates(1000.04) == {"tokens_per_s": 1024041.0, "mfu": 0.4}
    assert Throughput(flops=8e11).rates(1000.0) == Throughput(peak=2e15).rates(1000.0) == {}


RECORD = {"kind": "train", "step": 3, "epoch": 0, "loss": 0.5, "lr": 0.1, "grad_norm": 1.0, "samples": 9, "samples_per_s": 400.0}  # fmt: skip
ON_GPU = {"tokens_per_s": 409600.0, "mfu": 0.412, "peak_memory_gib": 41.25}


@pytest.mark.unit
def test_they_are_in_the_line_the_bar_the_live_view_and_the_report(tmp_path):
    shown = "409600 tokens/s  MFU 41.2%  41.2 GiB"
    assert describe(RECORD | ON_GPU, 9).endswith(f"400 samples/s  {shown}")
    bar = Bar(step=0, total_steps=9)
    try:
        bar.log(RECORD | ON_GPU)
        assert "409600 tokens/s, MFU 41.2%, 41.2 GiB" in bar.bar.tasks[0].description
        bar.log(RECORD)
        assert "400 samples/s" in bar.bar.tasks[0].description and "MFU" not in bar.bar.tasks[0].description
    finally:
        bar.close()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**RECORD, **ON_GPU, "step": n}) + "\n" for n in (1, 2)))
    assert "409,600 tokens/s  MFU 41.2%  41.2 GiB" in _how_well(History.of(tmp_path), 80).plain
    page = write_report(tmp_path).read_text()
    for said in ("<span>tokens a second, median</span><b>409,600</b>", "<span>MFU, median</span><b>41.2 %</b>", "<b>41.2 GiB</b>"):  # fmt: skip
        assert said in page


def test_on_the_cpu_text_has_tokens_per_second_and_no_figure_of_a_gpu(tmp_path):
    result = run(tmp_path / "run", *GPT, "max_steps=2", "batch_size=2", "eval.every_steps=off", "model.hidden_dim=8")
    for line in result.lines("train"):
        assert line["tokens_per_s"] == pytest.approx(
            128 * line["samples_per_s"], abs=128 * 0.06
        )  # which has one decimal
        assert not {"mfu", "peak_memory_gib"} & line.keys()
