"""The measurements on GPUs run to their end in tiny sizes, on a device that is the CPU; without a GPU they give no table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kit.fake_cuda import ON_FAKE
from kit.job import ROOT, environment

from bench.gpu import NO_GPU, everywhere, gpus, table

without_gpu = pytest.mark.skipif(gpus() > 0, reason="there is a GPU here, which would be measured for twenty minutes")


def bench(*words, **env):
    line = [sys.executable, "-m", "bench.gpu", *words]
    return subprocess.run(line, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=540)


@pytest.mark.nightly
@without_gpu
@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_line_runs_on_a_fake_device_and_writes_no_table(tmp_path):
    few = {"ROUNDS": "1", "KILLS": "1", "NPROC": "2"}
    done = bench("cluster", "--tiny", f"--folder={tmp_path}", **ON_FAKE, **few)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    ran = [line.removeprefix("ran: ") for line in done.stdout.splitlines() if line.startswith("ran: ")]
    images, tokens = "resnet18, 16 x 16", "gpt, 1 layers, width 16, 16 tokens, compiled"
    assert ran == [
        f"{images}, 2 processes, beside bare and torchvision's manner",
        f"{tokens}, 2 processes, beside bare and nanoGPT's manner",
        f"{images}, 1 processes, beside bare and torchvision's manner",
        f"{tokens}, 1 processes, beside bare and nanoGPT's manner",
        "1 kills of 2 processes",
    ], done.stdout
    assert done.stdout.splitlines()[-1] == NO_GPU
    assert not (tmp_path / "gpu.md").exists() and "| workload |" not in done.stdout


@pytest.mark.nightly
@without_gpu
@pytest.mark.timeout(300)
def test_the_one_call_for_a_gpu_runs_to_its_end_on_a_fake_device(tmp_path):
    env = environment(**ON_FAKE, ROUNDS="1", TINY="--tiny", WORKERS="1")
    env |= {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "TESTS": "tests/promises/test_on_gpu.py -k a_run_goes_on_without_the_gpu[fake]",
    }
    line = ["bash", str(ROOT / "bench/gpu.sh"), str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    ran = [line.removeprefix("ran: ").partition(",") for line in done.stdout.splitlines() if line.startswith("ran: ")]
    assert [first for first, _, _ in ran] == ["resnet18", "gpt", "1 kills of 1 processes"], done.stdout
    assert NO_GPU in done.stdout.splitlines() and not (tmp_path / "out/gpu.md").exists()
    found = json.loads((tmp_path / "out/gpu.json").read_text())
    assert found["is_measured"] is False and [row["unit"] for row in found["rows"]] == ["images", "tokens"]
    assert [outcome for outcome, _ in found["tests"].values()] == ["passed"], found["tests"]
    listed = (tmp_path / "out/tokens-1-operations.txt").read_text()
    assert [line for line in listed.splitlines() if line.startswith("4 steps of ")] == [
        "4 steps of kit",
        "4 steps of bare",
        "4 steps of nanoGPT's manner",
    ]


@pytest.mark.nightly
@without_gpu
def test_without_a_device_nothing_is_run(tmp_path):
    done = bench("one", f"--folder={tmp_path}")
    assert done.returncode == 1 and done.stderr.strip() == NO_GPU and not list(tmp_path.iterdir())


@pytest.mark.unit
def test_each_world_of_a_slurm_job_meets_for_itself(monkeypatch):
    job = {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]", "NODEID": "1", "GPUS_ON_NODE": "8"}
    for name, value in ({f"SLURM_{name}": value for name, value in job.items()} | {"SLURMD_NODENAME": "n2", "HEAD": "n1"}).items():  # fmt: skip
        monkeypatch.setenv(name, value)
    lines = [" ".join(everywhere(["worker", "--unit=tokens"], number=number)[0]) for number in (0, 1)]
    for line, port, own in zip(lines, (10007, 10008), ("bench0", "bench1"), strict=True):
        assert f"--rdzv-endpoint=n1:{port} --rdzv-id=7.0.{own}" in line
        assert "--nnodes=2 --nproc-per-node=8 --max-restarts=0" in line and "is_host=0" in line
        assert line.endswith("-m bench.gpu worker --unit=tokens")


@pytest.mark.unit
def test_the_table_says_what_a_goal_is_held_against():
    def row(gpus, speed):
        return {
            "workload": "resnet50", "unit": "images", "goal": 3000, "gpus": gpus, "mfu": 0.07, "log_ms": 1.5, "first_save_s": 0.3, "blocked_s": 0.02, "saved_s": 0.5,
            "speeds": {"kit": speed, "bare": 3100.0, "torchvision's manner": 2500.0},
            "ratios": {"bare": 0.97, "torchvision's manner": 1.2}, "device": "NVIDIA H100 80GB HBM3",
        }  # fmt: skip

    text = table([row(8, 22_400.0), row(1, 3010.0)], {8: [12.0, 9.0, 10.0]})
    eight, one = [line.split(" | ") for line in text.splitlines() if line.startswith("| resnet50")]
    assert eight[2:6] == ["22,400 images", "2,800", "93.0%", "3,000: missed"] and one[5] == "3,000: met"
    assert (
        text.startswith("Measured on NVIDIA H100 80GB HBM3, torch ") and "median 10.0 s, worst 12.0 s, 3 kills" in text
    )
