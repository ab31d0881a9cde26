"""The promises about samples and weights, on real processes through the front door."""

import hashlib
import json
import re
import sys

import pytest
import torch
from kit import warm
from kit.job import QUIET, command, environment, finish, free_port, run, start
from kit.ledger import read

LEDGER = (
    "data._target_=kit.parts.data.Ledger",
    "model.hidden=[8]",
    "batch_size=10",
    "max_steps=23",
    "optimizer.lr=0.05",
    "eval.sanity_batches=0",  # which reads samples, too
)


def ledger_run(folder, *overrides, ranks, **kwargs):
    notes = folder.parent / f"{folder.name}-ledger"
    notes.mkdir()
    result = run(folder, *LEDGER, *overrides, ranks=ranks, env={"LEDGER": str(notes)}, **kwargs)
    return result, read(notes), read(notes, "test")


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory):
    """The same run at world sizes 1 to 4, none of which divides the batch of 10 but 1 and 2."""
    folder = tmp_path_factory.mktemp("ledgers")
    return {ranks: ledger_run(folder / str(ranks), ranks=ranks) for ranks in (1, 2, 3, 4)}


def steps_of(ledger, *, batch=10, size=101, steps=23):
    """Merge the ranks' reads into step -> samples in the plan's order, from their contiguous slices."""
    ranks, taken, at = sorted(ledger), [], dict.fromkeys(ledger, 0)
    for step in range(steps):
        count = min(batch, size - (step % 11) * batch)
        merged = []
        for rank in ranks:
            share = count // len(ranks) + (rank < count % len(ranks))
            read_ = max(share, 1)  # an empty share still reads one sample, which weighs nothing
            merged += ledger[rank][at[rank] : at[rank] + share]
            at[rank] += read_
        taken.append(merged)
    return taken


def test_every_world_size_takes_the_same_samples_in_the_same_order(ledgers):
    alone = ledgers[1][1][0]
    assert [sample for step in steps_of({0: alone}) for sample in step] == alone
    for ranks in (2, 3, 4):
        assert steps_of(ledgers[ranks][1]) == steps_of({0: alone})


def test_epochs_are_whole_and_differ(ledgers):
    alone = ledgers[1][1][0]
    first, second = alone[:101], alone[101:202]
    assert sorted(first) == sorted(second) == list(range(101))
    assert first != second


@pytest.mark.quick
def test_losses_agree_at_every_world_size(ledgers):
    """Uneven slices are weighted by their true count: a mean of means would be off by percents."""
    reference = ledgers[1][0].losses
    assert len(reference) == 23
    for ranks in (2, 3, 4):
        for step, loss in ledgers[ranks][0].losses.items():
            assert loss == pytest.approx(reference[step], rel=2e-5), (ranks, step)


def test_ranks_really_share_the_work(ledgers):
    for ranks in (2, 3, 4):
        reads = [len(samples) for samples in ledgers[ranks][1].values()]
        assert len(reads) == ranks
        assert max(reads) - min(reads) <= 23 and sum(reads) <= 214 + 4 * ranks


def test_evaluation_counts_every_test_sample_once(ledgers):
    for ranks, (result, _, tests) in ledgers.items():
        evaluations = len(result.lines("eval"))
        counts = torch.bincount(torch.tensor([i for reads in tests.values() for i in reads]), minlength=101)
        assert counts.tolist() == [evaluations] * 101, ranks
        assert result.lines("eval")[-1]["accuracy"] == pytest.approx(
            ledgers[1][0].lines("eval")[-1]["accuracy"], abs=1e-9
        )


def test_the_loss_is_printed_once_per_interval(ledgers):
    for ranks, (result, _, _) in ledgers.items():
        assert sum(line.startswith("step 7/23 ") for line in result.out.splitlines()) == 1, ranks
        assert [line["step"] for line in result.lines("train")] == list(range(1, 24)), ranks


@pytest.mark.nightly(but=["2"])
@pytest.mark.parametrize("ranks", [None, 2, 3])
@pytest.mark.quick
def test_a_resumed_run_ends_with_bit_identical_weights(tmp_path, ranks):
    """Model with dropout, batch norm, momentum and augmentation: every kind of state that a resume can lose."""
    overrides = (
        "model._target_=kit.parts.models.Stateful",
        "data.augment=true",
        "batch_size=31",
        "seed=7",
        "checkpoint.every_steps=9",
    )
    whole = run(tmp_path / "whole", *overrides, "max_steps=30", ranks=ranks)
    run(tmp_path / "parts", *overrides, "max_steps=13", ranks=ranks)
    parts = run(tmp_path / "parts", *overrides, "max_steps=30", ranks=ranks)
    assert parts.events("resume")[0]["step"] == 13
    assert parts.losses == whole.losses
    for name, weight in whole.weights.items():
        assert torch.equal(weight, parts.weights[name]), name


GLOO = {
    "bf16": ("strategy.compression=bf16",),
    "fp16": ("strategy.compression=fp16",),
    "sparse": ("model._target_=kit.parts.models.Sparse",),
}


@pytest.mark.nightly(but=["bf16"])
@pytest.mark.parametrize("more", GLOO.values(), ids=GLOO)
def test_a_resume_is_exact_where_gloo_sums_although_three_ranks_share_memory(tmp_path, more):
    whole = run(tmp_path / "whole", *more, "max_steps=30", ranks=3)
    run(tmp_path / "parts", *more, "max_steps=13", ranks=3)
    parts = run(tmp_path / "parts", *more, "max_steps=30", ranks=3)
    assert parts.events("resume")[0]["step"] == 13 and parts.losses == whole.losses
    assert parts.sha256 == whole.sha256


@pytest.mark.quick
def test_another_world_size_goes_on_with_the_same_samples(tmp_path):
    notes = tmp_path / "parts-ledger"
    notes.mkdir()
    whole, ledger, _ = ledger_run(tmp_path / "whole", ranks=1)
    merged = []
    for ranks, until in ((3, 5), (2, 14), (4, 23)):
        part = run(tmp_path / "parts", *LEDGER, f"max_steps={until}", ranks=ranks, env={"LEDGER": str(notes)})
        reads = read(notes)
        counts = [10 if (step % 11) < 10 else 1 for step in range(*{5: (0, 5), 14: (5, 14), 23: (14, 23)}[until])]
        at = dict.fromkeys(reads, 0)
        for count in counts:
            for rank in sorted(reads):
                share = count // ranks + (rank < count % ranks)
                merged += reads[rank][at[rank] : at[rank] + share]
                at[rank] += max(share, 1)
        for file in notes.iterdir():
            file.unlink()
    assert merged == ledger[0]
    for step, loss in whole.losses.items():
        assert part.losses[step] == pytest.approx(loss, rel=1e-4)


def test_weights_of_two_ranks_never_differ(tmp_path):
    result = run(
        tmp_path / "run",
        "strategy._target_=kit.parts.strategies.Watched",
        "model=convnet",
        "max_steps=12",
        "batch_size=37",
        ranks=3,
    )
    seen = [json.loads(line) for path in sorted((tmp_path).glob("digests-*")) for line in path.read_text().splitlines()]
    assert len(seen) == 36, result.out
    for step in range(12):
        assert len({line["digest"] for line in seen if line["step"] == step}) == 1


@pytest.mark.quick
def test_micro_batches_give_the_same_training(tmp_path):
    whole = run(tmp_path / "whole", "batch_size=50", "max_steps=8", ranks=2)
    micro = run(tmp_path / "micro", "batch_size=50", "max_steps=8", "micro_batch_size=7", ranks=2)
    for step, loss in whole.losses.items():
        assert micro.losses[step] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_nodes(tmp_path, backend):
    """Two agents on one machine, as two nodes would be started by hand."""
    port = free_port()
    flags = {
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=t", "--local-addr=127.0.0.1"],
        "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
    }[backend]
    nodes = [
        warm.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", *flags,
             "-m", "train", f"output_dir={tmp_path / 'run'}", *QUIET, "max_steps=5"],
            env=environment(), cwd=tmp_path,
        )
        for node in range(2)
    ]  # fmt: skip
    results = [finish(node, tmp_path / "run") for node in nodes]
    assert [result.code for result in results] == [0, 0], results[0].out + results[1].out
    assert results[0].events("start")[0]["world_size"] == 2
    assert len(results[0].losses) == 5


@pytest.mark.nightly
def test_a_start_leaves_out_what_nobody_uses(tmp_path):
    """Not torch's compiler, where nothing is compiled, nor what shards, where nothing is: a second and a half of each start."""
    exact = ("virtual_world_size=4", "optimizer=adamw")
    for folder, more in (("run", ("max_steps=4",)), ("run", ("max_steps=6",)), ("exact", ("max_steps=4", *exact))):
        line = (*more, "checkpoint.every_steps=2")  # the second one resumes the first
        env = {"PYTHONPROFILEIMPORTTIME": "1"}
        result = run(tmp_path / folder, *line, ranks=2, env=env, cold=True)
        imported = set(re.findall(r"^import time: .*\| +(\S+)$", result.out, re.M))
        assert {"torch", "muster.train.loop"} <= imported
        heavy = {
            "torch._dynamo",
            "torch._inductor",
            "sympy",
            "torch.distributed.tensor",
            "torch.distributed.checkpoint",
        }
        assert not heavy & imported


@pytest.mark.nightly
def test_any_working_folder_and_one_run_folder(tmp_path):
    elsewhere = tmp_path / "a folder with blanks"
    elsewhere.mkdir()
    process = start(elsewhere / "runs" / "x", "max_steps=3", ranks=2, quiet=False, cwd=elsewhere)
    result = finish(process, elsewhere / "runs" / "x")
    assert result.code == 0, result.out
    left = {path.name for path in result.folder.iterdir()}
    assert left == {
        "config.yaml",
        "model.json",
        "metrics.jsonl",
        "timing.jsonl",
        "outcome.json",
        "model.pt",
        "checkpoints",
        "tensorboard",
        "report.html",
    }
    assert [path.name for path in elsewhere.iterdir()] == ["runs"]
    manifest = json.loads((result.folder / "checkpoints/step-00000003/manifest.json").read_text())
    assert {"files", "step", "samples", "world_size", "config_hash"} <= set(manifest)
    for name, facts in manifest["files"].items():
        data = (result.folder / "checkpoints/step-00000003" / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (facts["size"], facts["sha256"])
    assert result.outcome["outcome"] == "done" and result.outcome["exit_code"] == 0


@pytest.mark.quick
def test_a_finished_run_says_so_at_once(tmp_path):
    first = run(tmp_path / "run", "max_steps=5", ranks=2)
    again = run(tmp_path / "run", "max_steps=5", ranks=2)
    assert "finished already" in again.out
    assert again.losses == first.losses


def test_a_sweep_gives_each_job_its_own_folder(tmp_path):
    line = command(
        *["-m", "optimizer.lr=0.1,0.01", "max_steps=3", "log.report=false", "log.tensorboard=false"], ranks=2
    )
    done = warm.Popen([*line, f"checkpoint.storage={tmp_path}/kept"], env=environment(), cwd=tmp_path)
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 0, out
    assert sorted(p.name for p in (tmp_path / "runs/run").iterdir()) == ["lr-0.01", "lr-0.1"]
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["lr-0.01", "lr-0.1"]
