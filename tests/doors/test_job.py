"""A training loop of a user's own with `muster.Job`: a script in a folder of its own, under torchrun or alone."""

import difflib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from itertools import chain

import pytest
import torch
from kit import warm
from kit.faults import fail_at
from kit.job import ROOT, Result, environment, finish, free_port, reached, wait_for
from kit.ledger import assert_exact

from muster.job.batch_source import LoaderSource
from muster.launcher.spec import UNSHARED
from muster.report.figures import marks
from muster.report.history import History
from muster.train import load

STEPS = 27  # three epochs of 100 samples in batches of 12: nine steps each, the last one with four samples


@pytest.fixture
def place(tmp_path):
    """Makes a folder of a user's own, with the scripts in it and no run yet."""

    def make(name):
        folder = tmp_path / name
        shutil.copytree(ROOT / "tests/kit/loops", folder)
        (folder / "ledger").mkdir()
        return folder

    return make


def start(folder, *arguments, script="ddp", to="run", ranks=None, restarts=0, **env):
    """Start `python script.py TO ARGUMENTS` in `folder`: under torchrun on `ranks` processes, or as one process if None."""
    line = [sys.executable, "-m"]
    if ranks:
        line += [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}",
            "-m",
        ]
    return warm.Popen([*line, script, *([to] if to else []), *arguments], env=environment(**env), cwd=folder)


def run(folder, *arguments, code=0, **how):
    """The same from start to end; asserts the exit code, unless it is None."""
    result = finish(start(folder, *arguments, **how), folder / "run")
    assert code is None or result.code == code, result.out
    return result


def assert_equal_weights(one, other):
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())


def assert_whole(result, *, steps=STEPS):
    """Every step is on record once, its samples are the plan's, and nothing is left behind."""
    assert_exact(result.folder.parent / "ledger", steps=steps, batch_size=12, size=100)
    assert [line["step"] for line in result.lines("train")] == list(range(1, steps + 1))
    assert result.outcome["outcome"] == "done" and result.outcome["exit_code"] == 0
    assert not list(result.folder.glob(".*")) and not list((result.folder / "checkpoints").glob(".*"))


STEADY = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it a group that a restarted script forms itself may read the addresses of the one before."""

# The same samples and weights, whatever happens


@pytest.mark.nightly(but=["2-1"])
@pytest.mark.parametrize("ranks, rank", [(1, 0), (2, 0), (2, 1)])
def test_a_killed_rank_costs_nothing(place, ranks, rank):
    whole = run(place("whole"), ranks=ranks)
    cut = run(place("cut"), ranks=ranks, restarts=1, FAULTS=fail_at(rank, 13))
    assert [line["step"] for line in cut.events("resume")] == [10]
    assert_whole(cut)
    assert_equal_weights(whole, cut)
    assert whole.losses == cut.losses
    assert [line["accuracy"] for line in whole.lines("eval")] == [line["accuracy"] for line in cut.lines("eval")]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [None, 2])
def test_sigterm_stops_all_ranks_after_one_step_and_the_same_command_resumes(place, ranks):
    whole, folder = run(place("whole"), ranks=ranks), place("cut")
    process = start(folder, ranks=ranks, HOLD="5")
    wait_for(folder / "run", reached(4), process=process)
    process.terminate()
    stopped = finish(process, folder / "run")
    assert stopped.code == (1 if ranks else 75), stopped.out  # torchrun's own code for every failure
    assert stopped.outcome["outcome"] == "preempted" and stopped.outcome["exit_code"] == 75
    assert "the script goes on" not in stopped.out
    assert (folder / f"run/checkpoints/step-{stopped.outcome['step']:08d}/manifest.json").exists()
    resumed = run(folder, ranks=ranks)
    assert_whole(resumed)
    assert_equal_weights(whole, resumed)
    assert whole.losses == resumed.losses


def test_samples_are_the_same_at_other_world_sizes(place):
    folder = place("any")
    for ranks, kill in ((3, fail_at(1, 8)), (1, fail_at(0, 14)), (2, "")):
        last = run(folder, ranks=ranks, FAULTS=kill, code=None)
    assert [line["world_size"] for line in last.events("start") + last.events("resume")] == [3, 1, 2]
    assert_whole(last)


@pytest.mark.nightly
def test_shares_that_are_not_equal_weigh_as_they_count(place):
    """4 samples for 3 ranks: the gradient is that of one rank's mean over all four, also where a rank has none of 2."""
    for size in ("100", "98"):
        one, three = (run(place(f"{size}-{ranks}"), "seed=3", ranks=ranks, SIZE=size) for ranks in (1, 3))
        assert one.losses[1] == pytest.approx(three.losses[1], abs=0.2)  # dropout differs by rank
        assert three.lines("eval")[0]["accuracy"] == pytest.approx(one.lines("eval")[0]["accuracy"], abs=0.2)


@pytest.mark.nightly
def test_a_sharded_model_is_killed_and_resumes_also_on_fewer_ranks(place):
    whole = run(place("whole"), script="sharded", ranks=2)
    cut = run(place("cut"), script="sharded", ranks=2, restarts=1, FAULTS=fail_at(1, 13))
    assert_whole(cut)
    assert_equal_weights(whole, cut)
    folder = place("fewer")
    run(folder, script="sharded", ranks=3, FAULTS=fail_at(1, 13), code=1)
    assert_whole(run(folder, script="sharded", ranks=2))


def test_a_finished_run_is_not_trained_again(place):
    folder = place("done")
    before = run(folder, ranks=2)
    rates = [line["lr"] for line in before.lines("train")]
    assert rates == pytest.approx([0.005 * (1 + math.cos(math.pi * step / 40)) for step in range(STEPS)]), (
        "the rate of each step, not the one that the schedule has set for the next"
    )
    again = run(folder, ranks=2)
    assert again.out.count(f"the script goes on after step {STEPS}") == 2
    assert again.sha256 == before.sha256 and again.losses == before.losses
    assert again.events("done")[-1]["note"] == "finished already"
    alone = run(folder)
    assert alone.events("resume")[-1]["world_size"] == 1
    history = History.of(folder / "run")
    assert (history.world_size, len(history.begins), history.attempts) == (2, 1, 1), "none of them has trained"
    assert not [mark for mark in marks(history) if "resumed" in mark["what"]]


# One writer


def test_of_two_launches_one_is_refused(place):
    folder = place("two")
    first = start(folder, ranks=2, HOLD="3")
    wait_for(folder / "run", reached(2), process=first)
    second = run(folder, code=2)
    (folder / "go").touch()
    assert len(second.said) == 1 and "is in use by another job" in second.said[0], second.out
    assert finish(first, folder / "run").code == 0
    assert_whole(Result(0, "", folder / "run", 0))


# Checkpoints that are damaged, and a disk that is full


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_spoiled_checkpoint_is_quarantined_and_the_one_before_is_used(place, ranks):
    whole, folder = run(place("whole"), ranks=ranks), place("spoiled")
    run(folder, ranks=ranks, FAULTS=fail_at(0, 13), code=None)
    part = folder / "run/checkpoints/step-00000010/rank-00000.bin"
    part.write_bytes(bytes([part.read_bytes()[0] ^ 1]) + part.read_bytes()[1:])
    resumed = run(folder, ranks=ranks)
    assert resumed.events("resume")[-1]["step"] == 5
    assert any("quarantined" in line for line in resumed.said)
    assert_whole(resumed)
    assert_equal_weights(whole, resumed)


@pytest.mark.nightly
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
def test_a_full_disk_is_tolerated_until_it_has_room_again(place):
    folder = place("full")
    (folder / "run").mkdir()
    script = "mount -t tmpfs -o size=1m none run && python ddp.py run && cp -r run kept"
    env = environment(FULL="8:17", PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = Result(0, done.stdout, folder / "kept", 0)
    assert len(kept.events("checkpoint_failed")) == 2
    assert [line["step"] for line in kept.events("checkpoint")] == [5, 20, 25, 27]


# State that differs by rank

NORMED = """
import sys
import ddp, torch, muster
from torch import nn
from torch.distributed.fsdp import fully_shard

with muster.Job("run", save_every=5, log_every=1, tensorboard=False) as job:
    model = nn.Sequential(nn.Linear(8, 15), nn.BatchNorm1d(15), nn.ReLU(), nn.Linear(15, 2))
    if sys.argv[1] == "fully_shard":
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)
    for _, x, y in job.batches(ddp.Numbered(), batch_size=20, epochs=3):
        ddp.disturb(job.steps_done)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(loss=loss)
        if job.ends_epoch:
            job.evaluate(ddp.Numbered(), lambda batch: {"right": (model(batch[1]).argmax(1) == batch[2]).float()})
"""


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["own", "fully_shard"])
def test_batch_norm_statistics_resume_exactly_on_every_rank(place, how):
    whole, cut = place("whole"), place("cut")
    for folder in (whole, cut):
        (folder / "normed.py").write_text(NORMED)
    first = run(whole, how, script="normed", to=None, ranks=2)
    killed = run(cut, how, script="normed", to=None, ranks=2, FAULTS=fail_at(1, 8), restarts=1)
    assert [line["step"] for line in killed.events("resume")] == [5]
    assert first.losses == killed.losses and first.sha256 == killed.sha256
    assert [line["right"] for line in first.lines("eval")] == [line["right"] for line in killed.lines("eval")]


# Groups that are there already, and loops that own their batches

OWN_LOOP = """
import os
import ddp, torch, muster
import torch.distributed as dist
from torch import nn

own_group = "GROUP" in os.environ
if own_group:
    dist.init_process_group("gloo")
data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1), torch.arange(40.0).reshape(40, 1) / 40)
with muster.Job("run", save_every=4, log_every=1, tensorboard=False) as job:
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    job.track(model=model, optimizer=optimizer)
    sampler = torch.utils.data.DistributedSampler(data, job.world_size, job.rank, seed=1)
    loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler)
    if job.world_size == 1:
        loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
    for x, y in job.batches(loader, epochs=3):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp.disturb(job.steps_done)
        job.step(loss=loss, first=x[0, 0])
        os.write(1, f"{job.rank} {job.steps_done} {x.flatten().tolist()}\\n".encode())
if own_group:
    dist.barrier()
    print("the group is still there", flush=True)
"""


@pytest.mark.nightly(but=["2"])
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_dataloader_of_ones_own_resumes_in_the_middle_of_an_epoch(place, ranks):
    whole, cut = place("whole"), place("cut")
    for folder in (whole, cut):
        (folder / "own.py").write_text(OWN_LOOP)
    first = run(whole, script="own", ranks=ranks)
    run(cut, script="own", ranks=ranks, FAULTS=fail_at(0, 10), SAVED="8", code=None)
    second = run(cut, script="own", ranks=ranks)
    assert second.events("resume")[-1]["step"] == 8
    assert_equal_weights(first, second)
    assert [line["first"] for line in first.lines("train")] == [line["first"] for line in second.lines("train")]


ALIKE = """
from itertools import chain
import os, torch, muster
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Subset, TensorDataset, WeightedRandomSampler, random_split

class Stream(IterableDataset):
    def __len__(self):
        return 40

    def __iter__(self):
        return iter(torch.arange(40.0).reshape(40, 1))

def main(job):
    data = TensorDataset(torch.arange(40.0).reshape(40, 1))
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    job.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    weighted = BatchSampler(WeightedRandomSampler([1.0] * 40, 40), 5, False)
    loader = {
        "weighted": lambda: DataLoader(data, batch_sampler=weighted),
        "again": lambda: DataLoader(data, 5, sampler=RandomSampler(data, replacement=True)),
        "of-each-rank": lambda: DataLoader(TensorDataset(data.tensors[0] + job.rank), 5, shuffle=True),
        "stream": lambda: DataLoader(Stream(), 5),
        "subset": lambda: DataLoader(random_split(data, [30, 10], torch.Generator().manual_seed(0))[0], 5, shuffle=True),
        "parts": lambda: DataLoader(Subset(data, range(job.rank, 40, 2)), 5, shuffle=True),
        "own": lambda: DataLoader(data, 5, shuffle=True),
        "divided": lambda: DataLoader(data, 5, sampler=DistributedSampler(data)),
    }[os.environ["FORM"]]()
    if os.environ["FORM"] == "divided":
        loader = chain(loader, loader)
    for _ in loader if os.environ["FORM"] in ("own", "divided") else job.batches(loader, max_steps=2):
        job.step()
muster.Job("run", tensorboard=False).run(main)
"""


def test_a_loader_that_gives_all_ranks_the_same_samples_is_refused_or_noted(place):
    def alike(form):
        folder = place(form)
        (folder / "alike.py").write_text(ALIKE)
        return run(folder, script="alike", to="", ranks=2, code=None, FORM=form)

    [said] = alike("weighted").said
    assert "WeightedRandomSampler does not divide the samples" in said
    assert "write job.batches(dataset, batch_size=10, weights=sampler.weights, ...)" in said
    assert "batch_size=10, weights=[1.0] * len(dataset), ...)" in alike("again").said[0]
    [said] = alike("subset").said
    assert "RandomSampler does not divide the samples" in said
    assert not alike("of-each-rank").events("note") and not alike("parts").events("note")
    [note] = alike("stream").events("note")
    assert "the first batch of the loader is the same on all 2 ranks" in note["text"]
    for form, more in (("own", ", and its RandomSampler does not divide the samples among the ranks"), ("divided", "")):
        note, *others = [line["text"] for line in alike(form).events("note")]
        assert "the loop reads a DataLoader by itself" in note and f"job.steps_done{more}; give" in note
        same = [each for each in others if "DistributedSampler has the same epoch as an epoch ago" in each]
        assert len(others) == len(same) == (form == "divided")


TRACKED_LOADER = """
import os, sys, torch, muster

class Loader:
    \'\'\'Numbers from 0, whose place is in its state, as torchdata's StatefulDataLoader has it.\'\'\'
    next = 0

    def __iter__(self):
        while self.next < 8:
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

with muster.Job("run", tensorboard=False, log_every=1) as job:
    model, loader = torch.nn.Linear(1, 1), Loader()
    job.track(model=model, loader=loader)
    for number, place in enumerate(loader):
        BODY
        if os.environ.get("LEAVES") and job.steps_done == 5:
            sys.exit(75)
    job.save()
"""


def test_a_save_before_the_step_in_a_loop_over_a_tracked_loader_is_noted(place):
    save, step = "if job.steps_done == 4: job.save()", "job.step(place=place)"
    for body, places, said in (
        ((save, step), [0, 1, 2, 3, 5, 6, 7], ["job.save (loader.py:23)"] * 2),  # 4 is left out
        ((step, save), [0, 1, 2, 3, 4, 5, 6, 7], []),
    ):
        folder = place(body[0][:2])
        (folder / "loader.py").write_text(TRACKED_LOADER.replace("BODY", "\n        ".join(body)))
        for leaves, code in (("1", 75), ("", 0)):
            done = run(folder, script="loader", to="", code=code, LEAVES=leaves)
        assert [line["place"] for line in done.lines("train")] == places
        told = [line["text"] for line in done.events("note") if "in the loop over a tracked loader" in line["text"]]
        assert [text.partition(" comes")[0] for text in told] == said


LEFT_OUT = """
import os, time, torch, muster
from torch import nn
from torch.utils.data import TensorDataset
FORM = os.environ["FORM"]
data = TensorDataset(torch.arange(32.0).reshape(32, 1) / 32)
scale = 1.0
def main(job):
    global scale
    net, beta = nn.Linear(1, 1), 0.0
    model = nn.parallel.DistributedDataParallel(net) if job.world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    own = TensorDataset(data.tensors[0] + (job.rank if FORM == "samples" else 0))
    measure = lambda batch: {"mean": net(batch[0])[:, 0]}
    if FORM == "evaluates":
        return job.evaluate(own, measure)
    best, seen, total, spent, before, rate, lowest = 100.0, 0, 0.0, 0.0, time.time(), 0.1, None
    for number, (x,) in enumerate(job.batches(data, batch_size=8, epochs=2)):
        beta, scale = min(1.0, beta + 0.04), 1.0 if number < 0 else scale
        scale = max(0.1, scale * 0.9)
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.ends_epoch:
            schedule.step()
            rate = rate * 0.1
        job.step()
        seen += 1
        if FORM == "":
            made = x * 2
        elif FORM == "stops":
            made = x
        total = total + (made if FORM in ("", "stops") else x).sum()
        spent += time.time() - before
        before = time.time()
        if job.ends_epoch:
            mean = job.evaluate(own, measure)["mean"]
            best = mean if mean < best and seen < 100 else best
            if lowest is None or mean < lowest:
                lowest = mean
        if FORM == "stops" and job.steps_done == 5:
            job.save()
            raise SystemExit(75)
muster.Job("run", tensorboard=False).run(main)
"""


def test_what_a_port_leaves_out_is_told_or_done_as_meant(place):
    folder = place("left-out")
    (folder / "left_out.py").write_text(LEFT_OUT)

    def left_out(form, *, code=0, ranks=None):
        return run(folder, script="left_out", to="", ranks=ranks, code=code, FORM=form)

    [said] = left_out("samples", code=1, ranks=2).said
    assert "evaluate(): the data set" in said and "give all ranks the same samples" in said
    shutil.rmtree(folder / "run")
    stopped = left_out("stops", code=75)
    assert "the script has ended itself by SystemExit: 75 (left_out.py:" in stopped.out and "failed" not in stopped.out
    assert [line["step"] for line in stopped.lines("eval")] == [4]
    evaluated = left_out("evaluates")
    assert evaluated.outcome["outcome"] == "preempted" and not (folder / "run/model.pt").exists(), evaluated.out
    assert "leaves the run at step 5 of 8" in evaluated.out and len(evaluated.lines("eval")) == 2
    done = left_out("")
    assert (done.outcome["outcome"], done.outcome["step"]) == ("done", 8)
    assert [line["lr"] for line in done.lines("train")] == [pytest.approx(0.01)], (
        "ends_epoch is true before step(), too"
    )
    best = [line["text"] for line in done.events("note") if "best, lowest go from batch to batch" in line["text"]]
    assert best and "job.evaluate(..., best=name)" in best[0] and "seen" not in "".join(best)
    [counted] = {line["text"] for line in done.events("note") if " go from batch to batch" in line["text"]} - {*best}
    assert {*counted.partition(" go from")[0].split(", ")} == {"seen", "total", "beta", "scale"}, counted
    assert "job.step(name=value)" in counted
    [rate] = {line["text"] for line in done.events("note") if line["text"].startswith("rate goes from")}
    assert "read it from optimizer.param_groups[0]['lr']" in rate
    assert not [line["text"] for line in done.events("note") if line["text"].startswith("made goes")]
    assert [
        line for line in done.events("note") if line["text"].startswith("number counts the batches of this attempt")
    ]


REMEMBERS = """
import logging, math, os, time, torch, muster
from torch import nn
best = 0.0
state, meter, saver = {"best": math.nan}, logging.Filter(), logging.Filter()
meter.avg, meter.val, saver.best_metric = 0.0, 0.0, None
class Stopping:
    def __init__(self):
        self.lowest, self.waited, self.began, self.step = math.inf, 0, time.time(), 0
    def __call__(self, value, step):
        self.waited = 0 if value < self.lowest else self.waited + 1
        self.lowest, self.began, self.step = min(value, self.lowest), time.time(), step
class Kept(Stopping):
    def state_dict(self):
        return dict(vars(self))
    def load_state_dict(self, state):
        vars(self).update(state)
def improve(value):
    global best
    best = max(value, best)
def main(job):
    net, average, lazy = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1)), nn.Linear(1, 1), nn.LazyBatchNorm1d()
    net = nn.parallel.DistributedDataParallel(net) if job.world_size > 1 else net
    optimizer, stopping, kept = torch.optim.Adam(net.parameters()), Stopping(), Kept()
    job.track(model=net, **({} if "UNTRACKED" in os.environ else {"optimizer": optimizer, "kept": kept}))
    for x in job.batches(torch.ones(16, 1), batch_size=4, epochs=int(os.environ.get("EPOCHS", 2))):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(loss=loss)
        if os.environ.get("AVERAGES") in ("both", str(job.rank)) and job.steps_done > int(os.environ.get("FROM", 0)):
            for each, other in zip(average.parameters(), net.parameters()):
                each.data.mul_(0.9).add_(other.data, alpha=0.1)
        if "AVERAGES" not in os.environ:
            net.mean = 0.9 * getattr(net, "mean", 0) + loss.item()
            meter.val, meter.avg = loss.item(), 0.9 * meter.avg + loss.item()
        rates = [group["lr"] / (1 + job.steps_done) for group in optimizer.param_groups]
        if job.ends_epoch:
            saver.best_metric = loss.item()
            for each in (stopping, kept):
                each(loss.item(), job.steps_done)
            improve(1 / job.steps_done)
            state["best"] = loss.item()
            net.eval()
muster.Job("run", tensorboard=False, own={"AVERAGES": os.environ.get("AVERAGES")}, timeout_s=20).run(main)
"""


def test_what_the_script_s_own_objects_remember_is_noted_or_refused(place):
    """Early stopping in an object, a best value in a global name or a dict; what is tracked, a clock's or the job's own is not."""
    folder, bare = place("remembers"), place("bare")
    for each in (folder, bare):
        (each / "remembers.py").write_text(REMEMBERS)
    done = run(folder, script="remembers", to="")
    average, mean, told, mode = notes(done)
    assert average.startswith("meter.avg is changed by the loop and in no checkpoint"), average
    assert mean.startswith("net.mean is changed by the loop and in no checkpoint"), mean
    assert {*told.partition(" are changed by the loop")[0].split(", ")} == {
        "best",
        "saver.best_metric",
        "state.best",
        "stopping.lowest",
    }, told
    assert mode.startswith("model is trained in evaluation mode at step 5, and was in training mode before"), mode
    refused = run(bare, script="remembers", to="", code=2, UNTRACKED="1")
    assert refused.outcome["error"].startswith("Adam steps the model and is not tracked"), refused.outcome


@pytest.mark.parametrize(("ranks", "late"), [("both", {}), ("0", {}), ("0", {"FROM": "102", "EPOCHS": "33"})])
def test_a_module_that_the_loop_changes_is_noted_unless_it_is_tracked(place, ranks, late):
    folder = place("averages")
    (folder / "remembers.py").write_text(REMEMBERS)
    done = run(folder, script="remembers", to="", ranks=2, AVERAGES=ranks, **late)
    notes = [line["text"] for line in done.events("note")]
    assert [each for each in notes if each.startswith("average is changed by the loop and is not tracked")], notes


POOLS = """
import collections, os, numpy as np, torch, muster
from torch import nn
class Pool:
    def __init__(self, at):
        self.at, self.kept = at, at()
    def state_dict(self):
        return {"kept": list(self.kept)}
    def load_state_dict(self, state):
        self.kept = self.at(state["kept"])
class Centre:
    def __init__(self):
        self.of = torch.zeros(4)
        self.shadow, self.mean, self.count = {"w": torch.zeros(4)}, torch.zeros(4), np.zeros(4)
        self.value, self.refilled = torch.zeros(()), np.zeros(4)
        self.last, self.shown, self.work = torch.zeros(4), {"x": torch.zeros(4)}, np.zeros(4)
    def last_of(self, x):
        return x.clone()
    def update(self, x):
        self.shadow = {key: 0.9 * value + 0.1 * x for key, value in self.shadow.items()}
        self.mean = 0.9 * self.mean + x
        self.value = 0.9 * self.value + x.mean()
        self.refilled[:] = 0.9 * self.refilled + x.numpy()
        self.count += 1
    def show(self, x):
        self.last, self.shown = self.last_of(x), {"x": x.clone()}
        self.work[:] = x.numpy() + self.count
class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.past, self.centre, self.last, self.is_begun = collections.deque(maxlen=2), torch.zeros(4), torch.zeros(4), False
    def forward(self, x):
        if "TRACKED" not in os.environ:
            self.past.append(x.detach().clone())
            self.centre, self.is_begun = 0.9 * self.centre + 0.1 * x.detach().mean(0), True
        self.last = x.detach().clone()
        return x
class Broken(list):
    def __iter__(self):
        raise ValueError("that no look may run")
class Strange(nn.Module):
    def named_modules(self, *_, **__):
        raise ValueError("that hides no other")
class Cached(torch.utils.data.Dataset):
    def __init__(self):
        self.seen = {}
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self.seen.setdefault(len(self.seen), torch.ones(4))
cached, broken, strange, abstract = Cached(), Broken([torch.zeros(4)]), Strange(), nn.Linear(2, 2, device="meta")
model, pool, memory, centre = nn.Sequential(nn.Linear(4, 4), Remembering()), Pool(list), Pool(collections.deque), Centre()
queue, losses, noise, of_step = {}, [], torch.zeros(4), []
curves, clock, newest = {"loss": [], "step": []}, {"times": []}, collections.deque(maxlen=3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
with muster.Job("run", tensorboard=False) as job:
    job.track(model=model, optimizer=optimizer, **({"pool": pool, "memory": memory} if "TRACKED" in os.environ else {}))
    for x in job.batches(torch.ones(16, 4), batch_size=4, epochs=2):
        outputs, lengths = [], [4]
        of_step.clear()
        pool.kept = pool.kept[-2:]
        pool.kept.append(x.clone()), memory.kept.append((1, x.clone()))
        if "TRACKED" not in os.environ:
            centre.of.mul_(0.9).add_(x.mean(0)), centre.update(x.mean(0)), queue.update(last=np.ones(3) + job.steps_done)
        centre.batch = {"x": x.clone()}
        centre.show(x[0])
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + job.steps_done)
        moments = optimizer.state[model[0].weight]
        loss = model(x + noise.normal_() + cached[0]).square().mean()
        lengths.append(4), of_step.extend([1.0, 2.0]), clock["times"].append(1.0)
        outputs.append(x * 2)
        if "TRACKED" not in os.environ:
            losses.append(loss.detach()), curves["loss"].append((job.steps_done, loss.item())), newest.append(loss.item())
        loss.backward(), optimizer.step(), optimizer.zero_grad(), job.step()
"""


@pytest.mark.parametrize("tracked", [{}, {"TRACKED": "1"}], ids=["untracked", "tracked"])
def test_what_a_loop_keeps_in_containers_is_noted_unless_it_is_tracked(place, tracked):
    """A replay buffer, a memory of tuples, averages, a queue of arrays, what a module has beside its buffers, lists of numbers. What a step
    makes anew, and a group of the optimizer, are not; what cannot be looked at hides no other."""
    folder = place("pools")
    (folder / "pools.py").write_text(POOLS)
    told = notes(run(folder, script="pools", to="", **tracked))
    names = [text.partition(" is changed by the loop and")[0] for text in told if "adds numbers" not in text]
    lists = [text.partition(", and no checkpoint")[0] for text in told if "adds numbers" in text]
    assert lists == ([] if tracked else ["the loop adds numbers to losses, curves['loss'], newest"]), lists
    averages = [f"centre.{each}" for each in ("count", "mean", "of", "refilled", "shadow", "value")]
    modules = [f"model.1.{each}" for each in ("centre", "is_begun", "past")]
    assert sorted(names) == ([] if tracked else [*averages, "memory.kept", *modules, "pool.kept", "queue"]), told


OF_RANKS = """
import os, sys, torch, muster
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(4, 4), 0.0
        self.register_buffer("centre", torch.zeros(4), persistent=False)
    def forward(self, x):
        self.seen = 0.9 * self.seen + x.sum().item()
        self.centre.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.inner(x - self.centre) * (1 + 0.01 * self.seen)
    def get_extra_state(self):
        return {"seen": self.seen}
    def set_extra_state(self, state):
        self.seen = state["seen"]
class Own(torch.optim.SGD):
    def step(self):
        super().step()
        for parameter, state in ((each, self.state[each]) for each in net.parameters()):
            state["own"] = [0.9 * state.get("own", [torch.zeros(())])[0] + net.seen]
            if job.is_first:
                state["alone"] = 1.0
class Scale:
    def __init__(self):
        self.of = nn.Parameter(torch.ones(()))
    def state_dict(self):
        return vars(self)
    def load_state_dict(self, state):
        vars(self).update(state)
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
with muster.Job("run", tensorboard=False, save_every=3) as job:
    net, scale = Net(), Scale()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = Own(net.parameters(), lr=torch.tensor(0.05), momentum=0.9, foreach=False)
    base = optimizer.param_groups[0]["lr"]
    group = optimizer.param_groups[0]
    job.track(model=model, optimizer=optimizer, scale=scale)
    for x in job.batches(data, batch_size=8, epochs=int(os.environ.get('EPOCHS', 2))):
        (model(x) * scale.of).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        group["lr"], group["momentum"] = base * 0.9**job.steps_done, group["momentum"] * 0.99
        with torch.no_grad():
            scale.of -= 0.1 * job.sum(scale.of.grad)
        scale.of.grad = None
        job.step()
        if job.steps_done == 8 and "LEAVE" in os.environ:
            job.save(), sys.exit(75)
states = optimizer.state.values()
own = [net.seen, net.centre.tolist(), [each["own"][0].item() for each in states], [each.get("alone") for each in states]]
print(f"rank {job.rank} has {own} {base.item()} {group['lr'].item()} {group['momentum']} {scale.of.item()}\\n", end="", flush=True)
"""


def test_what_each_rank_has_of_its_own_and_what_a_loop_holds_come_back(place):
    """A module's extra state, values in an optimizer's, a buffer changed by `.data`; a group that is held, a parameter in an object."""
    whole, cut = place("whole"), place("cut")
    for folder in (whole, cut):
        (folder / "of_ranks.py").write_text(OF_RANKS)
    done = run(whole, script="of_ranks", to="", ranks=2)
    run(cut, script="of_ranks", to="", ranks=2, code=None, LEAVE="1")
    again = run(cut, script="of_ranks", to="", ranks=2)
    assert [line["step"] for line in again.events("resume")] == [8], again.out
    told = [sorted(re.findall(r"rank \d has .*", each.out)) for each in (done, again)]
    assert len(told[0]) == 2 and told[0][0][7:] != told[0][1][7:] and told[0] == told[1]
    assert again.sha256 == done.sha256
    alone = run(cut, script="of_ranks", to="", ranks=1, EPOCHS="3")
    assert any("was another on each of the 2 ranks that saved it" in text for text in notes(alone)), alone.out


COUNTER = """
import torch, muster
class Scheduled:
    "Never self.n_steps = self.n_steps + 2"
    def __init__(self, optimizer, start=0):
        self.optimizer, self.n_steps = optimizer, START
    def step(self):
        self.n_steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.n_steps
        self.optimizer.step(), self.optimizer.zero_grad()
model = torch.nn.Linear(1, 1)
scheduled = Scheduled(torch.optim.SGD(model.parameters(), lr=0.1))
with muster.Job("run", tensorboard=False) as job:
    job.track(model=model, optimizer=scheduled.optimizer)
    SET
    for x in job.batches(torch.ones(16, 1), batch_size=4, epochs=1):
        model(x).square().mean().backward(), scheduled.step()
        job.step()
"""


@pytest.mark.parametrize(
    ("start", "how"), [("0", "scheduled.n_steps = job.steps_done"), ("start", "pass"), ("0", "pass")]
)
def test_a_counter_of_steps_is_noted_before_a_resume_begins_it_anew(place, start, how):
    """It is the job's own count until then. One that is given where it begins may follow that."""
    folder = place("counts")
    (folder / "counter.py").write_text(COUNTER.replace("SET", how).replace("START", start))
    told = notes(run(folder, script="counter", to=""))
    assert [text[:40] for text in told] == ["scheduled.n_steps is changed by the loop"] * (
        (start, how) == ("0", "pass")
    ), told


@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        ("((model(x) - y) ** 2).sum()", True),
        ("nn.functional.mse_loss(model(x), y, reduction='sum') + model.module.weight.abs().mean()", True),
        ("((model(x) - y) ** 2).sum() / len(x)", False),
        ("((model(x) - y) ** 2).mean(dim=0).sum()", False),
        ("nn.functional.mse_loss(model(x), y) + sum(0.1 * each.abs().sum() for each in model.parameters())", False),
        ("torch.stack([nn.functional.mse_loss(model(x), y), model.module.weight.square().mean()]).sum()", False),
    ],
)
def test_a_loss_that_is_a_sum_is_told_on_several_ranks(place, loss, is_told):
    body = (
        f"model = nn.parallel.DistributedDataParallel(model)\n    {LOOP}loss = {loss}; loss.backward(); optimizer.step(); "
        "optimizer.zero_grad(); job.step(loss=loss)"
    )
    told = [text for text in notes(wrong(place("two"), body, ranks=2)) if "has a sum in it" in text]
    assert bool(told) == is_told and not notes(wrong(place("one"), body)), told


CENTRED = """
import sys, torch, muster
from torch import nn
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))
    def forward(self, x):
        new = 0.9 * self.centre + 0.1 * x.detach().mean()
        HOW
        return (x - self.centre).square().mean()
model, centred = nn.Linear(1, 1), Centred()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with muster.Job("run", tensorboard=False) as job:
    job.track(model=model, optimizer=optimizer, **({"centred": centred} if "tracked" in sys.argv else {}))
    for x in job.batches(torch.ones(16, 1), batch_size=4, epochs=1):
        loss = centred(model(x))
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        job.step(loss=loss)
"""


@pytest.mark.parametrize("how", ["self.centre = new", "self.centre.copy_(new)"])
def test_a_loss_whose_buffer_the_loop_changes_is_noted_unless_it_is_tracked(place, how):
    for name in ("tracked", "left-out"):
        folder = place(name)
        (folder / "centred.py").write_text(CENTRED.replace("HOW", how))
        told = notes(run(folder, script="centred", to=name))
        assert [text[:44] for text in told] == ["centred is changed by the loop and is not tr"] * (
            name == "left-out"
        ), told


UNUSUAL = """
import atexit, multiprocessing, os, resource, signal, sys, torch, muster
from torch import nn
class Remote:
    def __getattr__(self, name):
        raise SystemExit(3)
class Disguised:
    @property
    def __class__(self):
        raise SystemExit(4)
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls, self.words = nn.Linear(1, 1), 100, nn.Embedding(1, 1, sparse=True)
        self.register_buffer("graph", torch.eye(4).to_sparse(), persistent=False)
    def forward(self, x):
        self.calls += 7
        with torch.inference_mode():
            self.register_buffer("places", torch.arange(len(x)), persistent=False)
        return torch.sparse.mm(self.graph, self.inner(x)) if len(x) == 4 else self.inner(x)
    def get_extra_state(self):
        return {"calls": self.calls}
    def set_extra_state(self, state):
        self.calls = state["calls"]
class Stopping:
    def __init__(self, waits=100):
        self.waits = waits
class Holder:
    def __init__(self, part):
        self.part = part
    def state_dict(self):
        return {"waits": self.part.waits}
    def load_state_dict(self, state):
        self.part.waits = state["waits"]
def lines(queue):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open("lines", "w") as file:
        for line in iter(queue.get, None):
            file.write(line)
def main(job):
    net, critic, stopping = Counts(), nn.Linear(1, 1), Stopping()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer, other = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
    remote, disguised, mask = Remote(), Disguised(), {"mask": torch.zeros(1, 1).expand(30_000, 30_000)}
    state, alias = net.state_dict(), [each.data for each in net.parameters()]
    with torch.inference_mode():
        cached = [torch.zeros(3), torch.eye(2).to_sparse_csr()]
    average = {"weight": torch.zeros(2, 1)} if "AVERAGE" in os.environ else None
    job.track(model=net, critic=critic, optimizer=optimizer, other=other, holder=Holder(stopping))
    test = torch.utils.data.TensorDataset(torch.ones(8, 1))
    for x in job.batches(torch.ones(64, 1), batch_size=8, micro_batch_size=4, epochs=2, num_workers=1):
        net.train(), critic.train()
        inner.state.clear()
        (critic(x).mean() * job.weight).backward()
        other.step(), other.zero_grad()  # in each micro-batch
        critic.eval()
        ((net(x) + net.words(x.long() * 0)[..., 0]).square().mean() * job.weight).backward()
        if job.ends_step:
            before = [each.detach().clone() for each in net.parameters()]
            inner.step()
            for each, value in zip(net.parameters(), before):
                each.data.copy_(value)
            optimizer.step(), optimizer.zero_grad()
            stopping.waits += 7
            net.eval()
            if average:
                average["weight"].data.add_(1)
        job.step()
        if job.ends_epoch and job.ends_step:
            job.evaluate(test, lambda batch: {"value": net(batch[0])[:, 0]}, num_workers=1)
if __name__ == "__main__":
    queue = multiprocessing.Queue()
    writer = multiprocessing.Process(target=lines, args=(queue,), daemon=True)
    writer.start()
    def close():
        queue.put("closed"), queue.put(None), writer.join(20)
    atexit.register(close)
    muster.Job("run", tensorboard=False, timeout_s=20).run(main)
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MB")
"""


def test_a_script_of_unusual_objects_is_let_be(place):
    """Proxies whose attributes do something, huge views, states of inner optimizers, a critic's steps, a child that outlives SIGTERM."""
    folder = place("unusual")
    (folder / "unusual.py").write_text(UNUSUAL)
    for average in ({}, {"AVERAGE": "1"}):
        shutil.rmtree(folder / "run", ignore_errors=True)
        line = [sys.executable, "unusual.py"]
        done = subprocess.run(line, cwd=folder, env=environment(**average), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and (folder / "lines").read_text() == "closed", done.stdout + done.stderr
        assert int(done.stdout.partition("peak ")[2].split()[0]) < 2000, "the view of 3.6 GB was made"
        told = notes(Result(0, "", folder / "run", 0))
        assert told.pop(0).startswith("other.step() came before the step's last micro-batch"), told
        told = [text.partition(" is changed")[0] for text in told if "SGD steps the model" not in text]
        assert told == ["average"] * len(average), told


AFTER = """
import os, sys, torch, muster
from torch import nn
FORM = os.environ["FORM"]
data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
def build():
    return nn.Sequential(nn.Linear(8, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 1))
def digest(net):
    return sum(each.detach().double().sum().item() for each in net.parameters())
def main(job):
    net = build()
    model = nn.parallel.DistributedDataParallel(net) if job.world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job.track(model=model, optimizer=optimizer)
    for (x,) in job.batches(data, batch_size=16, epochs=2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step()
        if job.ends_epoch:
            job.evaluate(data, lambda batch: {"loss": net(batch[0])[:, 0] ** 2}, best="loss")
            if FORM == "body":
                muster.load("run", into=build(), checkpoint="best")
    if FORM == "into":
        for each in net.parameters():
            each.data.mul_(0.5)  # as the weights of another step
    assert FORM == "into" or digest(muster.load("run", into=build(), checkpoint="best")) == digest(net)
job = muster.Job("run", tensorboard=False, timeout_s=20)
job.run(main)
print(f"after {job.rank} {job.is_first} {job.world_size} {job.steps_done} {job.best.step}", flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_best_weights_are_loaded_at_the_end_of_the_loop_and_after_the_job(place, ranks):
    """Each rank waits for what has been saved: it read the checkpoint before, now and then."""
    folder = place("after")
    (folder / "after.py").write_text(AFTER)
    done = run(folder, script="after", to="", ranks=ranks, FORM="")
    assert [f"after {rank} {rank == 0} {ranks} 8 8" in done.out for rank in range(ranks)] == [True] * ranks, done.out
    assert not notes(done)


def test_weights_that_are_changed_after_the_loop_are_told_and_a_load_before_its_save_refused(place):
    folder = place("after")
    (folder / "after.py").write_text(AFTER)
    [told] = notes(run(folder, script="after", to="", FORM="into"))
    assert told.startswith("model/0.weight was changed after the loop: model.pt and the checkpoint of step 8"), told
    shutil.rmtree(folder / "run")
    refused = run(folder, script="after", to="", code=2, FORM="body")
    assert "load(..., checkpoint='best') came before that checkpoint is saved" in refused.outcome["error"]


APART = """
import os, torch, muster
from torch import nn
FORM = os.environ["FORM"]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(200, 3), nn.Linear(3, 1)
        self.rows.weight.requires_grad = False
    def forward(self, numbers): return self.head(self.rows(numbers))
data = torch.utils.data.TensorDataset(torch.arange(40), torch.randn(40, 1, generator=torch.Generator().manual_seed(0)))
with muster.Job("run", tensorboard=False, save_every=2) as job:
    model = nn.parallel.DistributedDataParallel(net := Net())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    for x, y in job.batches(data, batch_size=4, epochs=1):
        net.rows.weight.requires_grad = FORM == "thawed" and job.steps_done >= 4  # which DDP does not know
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if FORM == "rates":
            schedule.step(loss.item())
        job.step(loss=loss)
"""


@pytest.mark.parametrize(
    "form, step, says",
    [
        ("thawed", 6, "the optimizer's optimizer/model/rows.weight/exp_avg differs from rank 0's"),
        (
            "rates",
            2,
            "so the ranks train by other rules: step a schedule such as ReduceLROnPlateau with what all ranks have",
        ),
    ],
)
def test_ranks_that_drift_apart_are_refused_at_the_next_save(place, form, step, says):
    folder = place(form)
    (folder / "apart.py").write_text(APART)
    refused = run(folder, script="apart", to="", ranks=2, code=None, FORM=form)
    assert any(says in line for line in refused.said), refused.out
    assert refused.outcome["step"] == step


DRAWN = """
import json, os, torch, muster
class Augmented(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index): return torch.tensor(index), torch.rand(())
data = Augmented()
weights = torch.arange(40) % int(os.environ.get("MODULUS", 4))
model = torch.nn.Linear(1, 1)
with muster.Job("run", tensorboard=False) as job:
    job.track(model=model)
    for x, noise in job.batches(data, batch_size=7, max_steps=int(os.environ["STEPS"]), weights=weights):
        job.step()
        pairs = [*zip(x.tolist(), noise.tolist())]
        os.write(1, f"drawn {job.steps_done} {job.rank} {json.dumps(pairs)}\\n".encode())
"""


def test_weighted_samples_are_the_same_at_any_world_size_and_after_a_resume(place):
    whole, cut = place("whole"), place("cut")
    for folder in (whole, cut):
        (folder / "drawn.py").write_text(DRAWN)

    def drawn(folder, steps, *, code=0, ranks=None, **env):
        out = run(folder, script="drawn", to="", code=code, ranks=ranks, STEPS=str(steps), **env).out
        found = {}
        for line in sorted(line for line in out.splitlines() if line.startswith("drawn")):
            _, step, _, samples = line.split(maxsplit=3)
            found[int(step)] = found.get(int(step), []) + json.loads(samples)
        return found, out

    all_steps, _ = drawn(whole, 8)
    samples = [sample for sample, _ in chain(*all_steps.values())]
    assert [*map(len, all_steps.values())] == [7, 7, 7, 7, 7, 5, 7, 7], "an epoch has as many as the data set"
    assert all(each % 4 for each in samples) and len({*samples}) < len(samples), "with replacement, and weight 0 never"
    noise = [noise for _, noise in chain(*all_steps.values())]
    assert len({*noise}) == len(noise), "a sample that is drawn twice is augmented in two ways"
    before, _ = drawn(cut, 4, ranks=2)
    assert before | drawn(cut, 8)[0] == all_steps
    _, out = drawn(cut, 9, code=2, MODULUS="3")
    assert "with weights=" in out and "give batches() the weights of before" in out
    assert "the run is at step 8, and batches() ends with step 3: nothing is trained" in drawn(cut, 3)[1]


MOVES_ON = """
import os, torch, muster
from kit.faults import fault
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Numbers(IterableDataset):
    def __init__(self):
        self.rounds, self.epoch = 0, 0

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.rounds += os.environ["FORM"] == "counts"
        return iter(torch.arange(12.0).reshape(12, 1) + 100 * self.rounds)

data = Numbers()

def main(job):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    job.track(model=model, optimizer=optimizer)
    for x in job.batches(data, batch_size=4, epochs=3):
        fault("begin", job.steps_done)
        model(x).square().mean().backward(), optimizer.step(), optimizer.zero_grad()
        job.step(x=x.mean())
muster.Job("run", save_every=2, log_every=1, tensorboard=False, timeout_s=20).run(main)
"""


@pytest.mark.nightly(but=["counts"])
@pytest.mark.parametrize("form", ["counts", "pure"])
def test_a_stream_that_was_built_before_run_and_has_moved_on_is_not_read_again(place, form):
    folder = place(form)
    (folder / "moves.py").write_text(MOVES_ON)
    result = run(folder, script="moves", to="", ranks=2, restarts=2, FORM=form, FAULTS="begin@2:1")
    assert bool(result.events("survived")) == (form == "pure"), result.out
    assert ("Numbers was built before run() and has moved on" in result.out) == (form == "counts"), result.out
    assert result.outcome["outcome"] == "done"


@pytest.mark.unit
@pytest.mark.parametrize("nested", [False, True])
def test_a_sampler_is_shuffled_anew_each_epoch_also_inside_a_batch_sampler(nested):
    data = list(range(12))
    sampler = torch.utils.data.DistributedSampler(data, 1, 0, seed=1)
    batches = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
    how = {"batch_sampler": batches} if nested else {"batch_size": 2, "sampler": sampler}
    loader = torch.utils.data.DataLoader(data, **how)

    def samples(step):
        loaded = LoaderSource(loader, total_steps=12, device=torch.device("cpu"), seed=0)
        return [portion.batch.tolist() for portion in loaded.portions(step)]

    whole = samples(0)
    assert {*chain(*whole[:6])} == {*chain(*whole[6:])} and whole[:6] != whole[6:]
    assert samples(8) == whole[8:]


HALF = """
import ddp, os, torch, muster
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1), torch.arange(40.0).reshape(40, 1) / 40)
def main(job):
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.Adam(model.parameters())
    other, is_beside = nn.Parameter(torch.ones(1)), os.environ["FORM"] == "beside"
    elsewhere = (torch.optim.Adam if is_beside else torch.optim.SGD)([other], lr=0.1)  # of something else
    class Noam:
        def __init__(self, inner):
            self.inner = inner
        def state_dict(self):
            return self.inner.state_dict()
        def load_state_dict(self, state):
            self.inner.load_state_dict(state)
    class Listed(Noam):
        def __init__(self, inner):
            self.all = {"one": [inner]}
            self.inner_state = inner.state_dict
        def state_dict(self):
            return self.inner_state()
    if "sched" in os.environ["FORM"]:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    if os.environ["FORM"] == "unscheduled":
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        both = torch.optim.lr_scheduler.ChainedScheduler([schedule])  # it has no state of its own
    class Own:  # its own schedule: it reads the optimizer and does not save it
        def __init__(self, inner):
            self.optimizer, self.n = inner, 0
        def state_dict(self):
            return {"n": self.n}
        def load_state_dict(self, state):
            self.n = state["n"]
    class Hidden(Noam):
        def __init__(self, inner):
            self.state_dict, self.load_state_dict = (lambda: inner.state_dict()), inner.load_state_dict
    class Sharp(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__([*model.parameters()], {})
            self.base_optimizer = inner
        def step(self):
            self.base_optimizer.step()
    more = {"own": {"own": Own(optimizer)}, "hidden": {"hidden": Hidden(optimizer)}, "sharp": {"sharp": Sharp(optimizer)}}
    more |= {"wrapped": {"noam": Noam(optimizer)}, "listed": {"all": Listed(optimizer)}, }
    if os.environ["FORM"] == "unscheduled":
        scaler = torch.amp.GradScaler("cpu", enabled=False)  # which holds no schedule
        more["unscheduled"] = {"optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    more["beside"] = {"optimizer": optimizer}
    more |= {"scheduled": {"schedule": schedule}} if os.environ["FORM"] == "scheduled" else {}
    job.track(model=model, **more.get(os.environ["FORM"], {}))
    loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=torch.utils.data.DistributedSampler(data))
    if os.environ["FORM"] == "listed":
        sampler = torch.utils.data.DistributedSampler(data)
        loader = torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 5, False))
    for x, y in job.batches(loader, epochs=1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y) + is_beside * other.square().sum()
        loss.backward()
        optimizer.step(), elsewhere.step()
        job.step(loss=loss)
muster.Job("run", log_every=1, tensorboard=False).run(main)
"""


@pytest.mark.parametrize("tracked", ["", ", scaler=scaler", ", scaler=native"])
def test_a_gradient_scaler_is_refused_unless_it_is_tracked(place, tracked):
    """By itself, or in an object that holds it."""
    body = (
        "class Native:\n"
        "        def __init__(self): self.inner = torch.amp.GradScaler('cpu')\n"
        "        def state_dict(self): return self.inner.state_dict()\n"
        "        def load_state_dict(self, state): self.inner.load_state_dict(state)\n"
        "    native = Native(); scaler = native.inner\n"
        f"    {LOOP.replace('model=model', f'model=model{tracked}')}scaler.scale(model(x).mean()).backward()\n"
        "        scaler.step(optimizer), scaler.update(), optimizer.zero_grad(), job.step()\n"
        "    print(job.steps_per_epoch)"
    )
    done = wrong(place("scaler"), body)
    said = "GradScaler, the gradient scaler of Adam, is not tracked: a resume, or the death of a rank, would begin its scale anew"
    assert (said in done.out, done.code) == ((False, 0) if tracked else (True, 2)), done.out
    assert ("is not tracked" in done.out) == (not tracked) and ("\n5\n" in done.out) == bool(tracked), done.out


def test_an_optimizer_that_each_step_makes_anew_need_not_be_tracked(place):
    """As an attack's, also beside a tracked object of which nobody knows what it holds."""
    body = (
        "import types; own = types.SimpleNamespace(state_dict=dict, load_state_dict=print)\n"
        f"    {LOOP.replace('model=model', 'model=model, own=own')}delta = torch.zeros_like(x, requires_grad=True)\n"
        "        attack = torch.optim.Adam([delta])\n"
        "        model(x + delta).sum().backward(), attack.step(), optimizer.zero_grad()\n"
        "        model(x + delta.detach()).sum().backward(), optimizer.step(), optimizer.zero_grad(), job.step()"
    )
    done = wrong(place("attack"), body)
    assert done.code == 0 and not [text for text in notes(done) if "not tracked" in text], done.out


@pytest.mark.nightly
def test_what_a_resume_would_lose_is_noted_or_refused(place):
    wrapped = place("wrapped")
    (wrapped / "half.py").write_text(HALF)
    noted = run(wrapped, script="half", to="", ranks=2, FORM="wrapped").events("note")
    assert not [event for event in noted if "is not tracked" in event["text"]], "a wrapper has it"
    listed = place("listed")
    (listed / "half.py").write_text(HALF)
    [note] = run(listed, script="half", to="", ranks=2, FORM="listed").events("note")
    assert note["text"].startswith("a rank that dies"), (
        "neither of a wrapper of several nor of a loader that is divided"
    )
    unscheduled = place("unscheduled")
    (unscheduled / "half.py").write_text(HALF)
    refused = run(unscheduled, script="half", to="", ranks=2, FORM="unscheduled", code=1)
    said = "ReduceLROnPlateau, the schedule of Adam, is not tracked: a resume, or the death of a rank, would begin it anew; name it: track(schedule=...)"
    assert refused.outcome["exit_code"] == 2 and refused.outcome["error"].startswith(said), refused.outcome
    for form, is_lost in {"own": True, "hidden": False}.items():
        other = place(form)
        (other / "half.py").write_text(HALF)
        noted = run(other, script="half", to="", ranks=2, FORM=form).events("note")
        assert any("Adam steps the model and is not" in note["text"] for note in noted) == is_lost, (form, noted)
    for form in ("bare", "sharp", "scheduled"):  # a schedule leaves its optimizer out, and so does that wrapper
        other = place(form)
        (other / "half.py").write_text(HALF)
        refused = run(other, script="half", to="", ranks=2, FORM=form, code=1)
        said = "Adam steps the model and is not tracked: a resume, or the death of a rank, would begin its state anew"
        assert refused.outcome["exit_code"] == 2 and refused.outcome["error"].startswith(said), refused.outcome
    beside = place("beside")
    (beside / "half.py").write_text(HALF)
    refused = run(beside, script="half", to="", ranks=2, FORM="beside", code=1)
    said = (
        "Adam and the parameters that it steps are not tracked: a resume, or the death of a rank, would begin both anew"
    )
    assert refused.outcome["exit_code"] == 2 and refused.outcome["error"].startswith(said), refused.outcome


AND_THEN = """
import os, torch, muster
import torch.distributed as dist
from torch import nn
data = torch.utils.data.TensorDataset(torch.ones(40, 1), torch.ones(40, 1))
def main(job):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, optimizer=optimizer)
    for x, y in job.batches(data, batch_size=10, epochs=1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        job.step(loss=loss)
job = muster.Job("run", tensorboard=False)
if os.environ["FORM"] == "run":
    job.run(main)
else:
    with job:
        main(job)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"the script's own sum: {int(total)}\\n".encode())  # at once: print's words mix with another rank's
dist.destroy_process_group()
"""


@pytest.mark.nightly(but=["with"])
@pytest.mark.parametrize("form", ["run", "with"])
def test_the_script_forms_a_group_of_its_own_after_a_job_whose_rank_0_hosts_the_store(place, form):
    folder = place(form)
    (folder / "then.py").write_text(AND_THEN)
    result = run(folder, script="then", to="", ranks=2, FORM=form, **UNSHARED)
    assert result.out.count("the script's own sum: 2") == 2, result.out


ACCELERATED = """
import ddp, torch, muster
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1), torch.arange(40.0).reshape(40, 1) / 40)
with muster.Job("run", save_every=4, log_every=1, tensorboard=False) as job:
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    for x, y in job.batches(loader, epochs=3):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ddp.disturb(job.steps_done)
        job.step(loss=loss, first=x[0, 0])
accelerator.end_training()
print("accelerate goes on", flush=True)
"""


@pytest.mark.nightly
def test_what_accelerate_has_prepared_resumes_in_the_middle_of_an_epoch_also_by_its_launcher(place):
    pytest.importorskip("accelerate")
    whole, cut = place("whole"), place("cut")
    for folder in (whole, cut):
        (folder / "own.py").write_text(ACCELERATED)
    first = run(whole, script="own", to=None, ranks=2)
    run(cut, script="own", to=None, ranks=2, FAULTS=fail_at(0, 7), SAVED="4", code=None)
    line = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", f"--main_process_port={free_port()}"]
    env = environment(ACCELERATE_USE_CPU="true")
    launched = subprocess.Popen(
        [sys.executable, "-m", *line, "own.py"], env=env, cwd=cut, text=True, stdout=-1, stderr=-2
    )
    second = finish(launched, cut / "run")
    assert second.code == 0 and second.out.count("accelerate goes on") == 2, second.out
    assert [line["step"] for line in second.events("resume")] == [4]
    assert lines_of(first) == lines_of(second)
    assert first.sha256 == second.sha256
    firsts = [line["first"] for line in first.lines("train")]
    assert firsts[:4] != firsts[4:8] != firsts[8:]


@pytest.mark.nightly
def test_a_group_that_exists_is_used_and_left_alone(place):
    folder = place("borrowed")
    (folder / "own.py").write_text(OWN_LOOP)
    done = run(folder, script="own", ranks=2, GROUP="1", FAULTS=fail_at(1, 10), SAVED="8", restarts=1, **STEADY)
    assert done.out.count("the group is still there") == 2 and not any(
        "shares its store" in each for each in notes(done)
    )
    assert [line["step"] for line in done.events("resume")] == [8]
    without = place("without")
    (without / "own.py").write_text(OWN_LOOP)
    assert_equal_weights(done, run(without, script="own", ranks=2))


def test_a_group_whose_store_torchrun_shares_is_noted_where_torchrun_restarts_ranks(place):
    """torch's own fault: after a restart its `env://` may read the addresses of the start before, and hang."""
    folder = place("shared")
    (folder / "own.py").write_text(OWN_LOOP)
    said = notes(run(folder, script="own", ranks=2, GROUP="1", restarts=1))
    assert sum("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun" in each for each in said) == 1, said


def notes(result):
    return [note["text"] for note in result.events("note")]


OF_THE_BATCH = """
import os, torch, muster
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
def contrast(one, two):
    one, two = normalize(one, dim=1), normalize(two, dim=1)
    return cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))
def main(job):
    net = nn.Linear(8, 4)
    model = nn.parallel.DistributedDataParallel(net) if job.world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))
    for (x,) in job.batches(data, batch_size=12, epochs=1, drop_last=os.environ["FORM"] == "gathered"):
        optimizer.zero_grad()
        if os.environ["FORM"] == "gathered":
            one, two = model(torch.cat([x, x + 0.1])).chunk(2)
            if job.world_size > 1:
                one, two = torch.cat(all_gather(one)), torch.cat(all_gather(two))
            loss = contrast(one, two)
            loss.backward()
        else:
            loss = model(x).square().sum()
            (loss * job.world_size * (job.weight > 0)).backward()
            loss = loss / len(x)
        optimizer.step()
        job.step(loss=loss)
job = muster.Job("run", tensorboard=False, log_every=1)
job.run(main)
"""


@pytest.mark.parametrize("form", ["gathered", "summed"])
def test_a_loss_of_the_batch_as_a_whole_and_a_sum_are_those_of_one_rank(place, form):
    """The two rows of docs/loop-recipes.md."""
    found = []
    for ranks in (1, 3):
        folder = place(f"ranks{ranks}")
        (folder / "of_the_batch.py").write_text(OF_THE_BATCH)
        done = run(folder, script="of_the_batch", to="", ranks=ranks, FORM=form)
        found.append([*done.weights.values(), torch.tensor([*done.losses.values()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", ["None", "lambda batch: (batch[1] != 7).sum()"])
def test_a_loss_that_ignores_labels_asks_for_their_count(place, count):
    """Each rank's mean is over another number of labels, which nobody would notice."""
    body = (
        (
            "model = nn.parallel.DistributedDataParallel(nn.Linear(1, 8)); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    "
            f"{LOOP}(nn.functional.cross_entropy(model(x), y[:, 0].long(), ignore_index=7) * job.weight).backward(); job.step()"
        )
        .replace("epochs=2", f"epochs=2, count={count}, collate_fn=collate")
        .replace("x, y in", "x, y, _ in")
    )
    body = (
        "collate = lambda samples: [*torch.utils.data.default_collate(samples), torch.eye(2, dtype=torch.int64).to_sparse()]\n    "
        + body
    )
    said = notes(wrong(place("wrong"), body, ranks=2))
    assert any("wrong.py has a loss with an ignore_index" in each for each in said) == (count == "None"), said


def test_a_loss_over_packed_sequences_asks_for_their_count(place):
    packed = "values = lambda y, sizes: nn.utils.rnn.pack_padded_sequence(y, sizes, batch_first=True)[0]\n    "
    said = notes(wrong(place("wrong"), f"{packed}{LOOP}model(x).sum().backward(); job.step()", ranks=2))
    assert any("wrong.py takes the values of packed sequences" in each for each in said), said


# Misuse, in one line

START = """
import os, time
import torch, muster
from torch import nn
rank, _ = int(os.environ.get("RANK", "0")), torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.ones(40, 1), torch.ones(40, 1))
model, other = nn.Linear(1, 1), nn.Linear(1, 2)
optimizer = torch.optim.Adam(model.parameters())
"""
WITH = "with muster.Job('run', tensorboard=False, save_every=2, log_every=1, timeout_s=int(os.environ.get('TIMEOUT_S', '20'))) as job:\n    "


def wrong(folder, body, *, ranks=None, **how):
    """The result of a script that misuses a job, in one process or several."""
    # Python takes a compiled file for that of a source of the same size and second.
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (folder / "wrong.py").write_text(f"{START}{WITH}{body}\n")
    return run(folder, script="wrong", ranks=ranks, code=None, **how)


LOOP = (
    "job.track(model=model, optimizer=optimizer)\n    for x, y in job.batches(data, batch_size=8, epochs=2):\n        "
)


OWN_STATE = (
    "import collections, numpy, types\n"
    "    job.track(model=model, own=types.SimpleNamespace(state_dict=lambda: {}, load_state_dict=print))"
)
WEIGHTED = "job.track(model=model); job.batches(data, batch_size=8, epochs=1, weights={})"


@pytest.mark.parametrize(
    "body, says",
    [
        ("job.step()", "step() came before track()"),
        ("job.batches(data, batch_size=4, epochs=1)", "batches() came before track()"),
        ("pass", "came before track()"),
        ("job.track()", "track() names nothing"),
        ("job.track(model=model); job.track(optimizer=optimizer)", "name everything in one call"),
        ("job.track(model=3)", "track(model=...) is of type int, which has no state_dict()"),
        (
            f"{LOOP}optimizer.state[model.weight]['a/b'] = 0.1; job.step()",
            "optimizer keeps 'a/b' of each parameter, which no checkpoint can name",
        ),
        (
            f"{LOOP}optimizer.state[model.weight][0] = 0.1; job.step()",
            "optimizer keeps 0 of each parameter, which no checkpoint can name",
        ),
        ("job.track(optimizer=optimizer)", "track the module, too"),
        ("job.track(loop=model)", "choose another"),
        (OWN_STATE.format("{'name': numpy.str_('x')}"), "own['name'] is of type numpy.str_, which torch.load"),
        (OWN_STATE.format("[numpy.array([{}])]"), "own[0] is of type numpy.ndarray of object, which torch.load"),
        (OWN_STATE.format("[collections.defaultdict(int)]"), "own[0] is of type collections.defaultdict, which"),
        (OWN_STATE.format("{'p': collections.namedtuple('P', 'x')(1)}"), "own['p'] is of type __main__.P, which"),
        (OWN_STATE.format("{numpy.str_('x'): 1}"), "the key of own[np.str_('x')] is of type numpy.str_, which"),
        (
            "import numpy; type(model).get_extra_state = lambda self: {'n': numpy.ones(1)}; job.track(model=model)",
            "model/_extra_state['n'] is of type numpy.ndarray of float64, which torch.load",
        ),
        ("muster.Job('other').__enter__()", "run is open in this process"),
        (f"{LOOP}pass", "no step() came for batch 0"),
        (f"{LOOP}job.step(); job.step()", "without a new batch"),
        (f"{LOOP}job.step(loss=x)", "step(loss=...) is a Tensor [8, 1]"),
        (f"{LOOP}job.step(); job.evaluate(data, lambda batch: batch[0].mean())", "return a dict of tensors"),
        (f"{LOOP}job.step(); job.evaluate(data, lambda batch: {{'x': batch[0].mean()}})", "one value per sample"),
        ("job.track(model=model); job.batches(data, epochs=1)", "needs batch_size=..."),
        ("job.track(model=model); job.batches(data, batch_size=8)", "give one of the two"),
        ("job.track(model=model); job.batches(data, batch_size=0, epochs=1)", "at least 1"),
        ("job.track(model=model); job.batches([], batch_size=8, epochs=1)", "no samples"),
        ("job.track(model=model); job.evaluate([], lambda batch: {})", "no samples"),
        (
            "job.track(model=model); torch.rand(1); job.batches(data, batch_size=8, epochs=1)",
            "draw them before track()",
        ),
        ("job.track(model=nn.LazyLinear(2))", "without a shape yet"),
        (
            "model.register_buffer('graph', torch.eye(2).to_sparse()); job.track(model=model)",
            "model/graph is sparse, which no checkpoint holds",
        ),
        (
            "model.register_buffer('graph', torch.eye(2).to_sparse(), persistent=False); "
            f"{LOOP}model.graph *= 2; job.step(); job.save()",
            "model/graph has changed, and is sparse",
        ),
        ("job.track(model=model); job.sum(torch.ones(2))", "sum(...) is a Tensor [2]"),
        ("job.track(model=model); job.log(text='one')", "log(text=...) is a str"),
        (f"{LOOP}job.step(epoch=1.0)", "has the name epoch"),
        ("job.track(model=model); job.log(event=1)", "log() has the name event"),
        (f"{LOOP}optimizer.step(); job.save()", "save() came after optimizer.step() and before job.step()"),
        (f"{LOOP}optimizer.step(); job.evaluate(data, dict)", "evaluate() came after optimizer.step()"),
        (f"{LOOP}optimizer.step(); job.should_stop", "should_stop came after optimizer.step()"),
        (f"{LOOP}job.step(); job.save()".replace("=8,", "=8, micro_batch_size=3,"), "between two micro-batches"),
        (
            f"{LOOP}optimizer.step(); job.step()".replace("=8,", "=8, micro_batch_size=3,"),
            "optimizer.step() came before the step's last micro-batch",
        ),
        (
            "job.track(model=model); job.batches(torch.utils.data.DataLoader(data), micro_batch_size=2, epochs=1)",
            "leave micro_batch_size out",
        ),
        (
            "job.track(model=model); job.batches(torch.utils.data.DataLoader(data), weights=[1] * 40, epochs=1)",
            "a DataLoader has a sampler of its own",
        ),
        (
            "class Endless(torch.utils.data.IterableDataset): __iter__ = None\n    "
            "job.track(model=model); job.batches(torch.utils.data.DataLoader(Endless()), max_steps=1)",
            "a stream without a length, Endless: give it __len__",
        ),
        (WEIGHTED.format("[1.0, 2.0]"), "shape [2], and there are 40 samples"),
        (WEIGHTED.format("[-1.0] * 40"), "numbers of at least 0"),
        (WEIGHTED.format("torch.zeros(40)"), "one is above 0"),
        (WEIGHTED.format("'heavy'"), "give a list or a tensor of numbers"),
        (WEIGHTED.format("[1.0] * 40, shuffle=False"), "leave shuffle out"),
    ],
)
def test_misuse_is_one_line(place, body, says):
    result = wrong(place("wrong"), body)
    assert result.code == 2 and len(result.said) == 1 and says in result.said[0], result.out
    assert "Traceback" not in result.out


@pytest.mark.parametrize("ranks", [None, 2])
def test_containers_of_a_state_come_back_as_they_were(place, ranks):
    """Each rank has its own."""
    state = (
        "{'c': C(a=rank), 'o': O(b=(1, [2])), 's': {3 + rank}, 'b': bytearray([rank]), 'size': torch.ones(5, 6).shape, 'z': 1j, "
        "'n': {i64(7): {i64(8)}}}"
    )
    body = (
        "from collections import Counter as C, OrderedDict as O; from numpy import int64 as i64; import types\n"
        f"    own = types.SimpleNamespace(state_dict=lambda: {state}, load_state_dict=lambda given: print('given %s %s' % (given == {state}, given)))\n"
        f"    {LOOP.replace('model=model', 'model=model, own=own')}job.step(); job.save(); raise SystemExit(75)"
    )
    folder = place("kinds")
    assert "given" not in wrong(folder, body, ranks=ranks).out
    again = wrong(folder, body, ranks=ranks).out
    for rank in range(ranks or 1):
        given = (
            f"given True {{'c': Counter({{'a': {rank}}}), 'o': OrderedDict([('b', (1, [2]))]), 's': {{{3 + rank}}}, "
            f"'b': {bytearray([rank])}, 'size': torch.Size([5, 6]), 'z': 1j, 'n': {{np.int64(7): {{np.int64(8)}}}}}}"
        )
        assert given in again, again


@pytest.mark.parametrize("more, says", [(0, "sum 4950"), (1, "goes on after 100 samples, which is its length")])
def test_a_stream_that_divides_itself_by_worker_is_read_once_and_one_longer_than_its_length_refused(place, more, says):
    body = f"""import kit.parts.own as own
    job.track(model=model, optimizer=optimizer)
    found = 0
    for number in job.batches(own.Counted(more={more}), batch_size=8, epochs=1, num_workers=2):
        found += int(number.sum())
        job.step()
    print("sum", found)"""
    result = wrong(place("wrong"), body)
    assert result.code == (3 if more else 0) and says in result.out, result.out


@pytest.mark.parametrize(
    "body, says",
    [
        ("job.track(**({'model': model} if rank else {'model': model, 'other': other}))", "model, other on rank 0"),
        ("job.track(model=other if rank else model)", "shapes of the modules"),
        ("job.track(model=3 if rank else model)", "track(model=...) is of type int"),
        ("job.track(model=model); job.batches(data, batch_size=4 + rank, epochs=1)", "batch_size=5"),
        (f"{LOOP}None if rank else job.step()", "no step() came for batch 0"),
        (
            "job.track(model=model); job.batches(torch.utils.data.DataLoader(data, 4), epochs=1)",
            "write job.batches(dataset, batch_size=8, shuffle=False, ...)",
        ),
        (
            "nn.init.constant_(model.weight, rank + 1); job.track(model=model)",
            "model/weight differs from rank 0's: build",
        ),
        (
            f"{LOOP}model(x * (1 - 2 * rank)).sum().backward(); optimizer.step(); optimizer.zero_grad(); job.step()",
            "model/weight differs from rank 0's: wrap the model in DistributedDataParallel",
        ),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told_in_one_line(place, body, says):
    result = wrong(place("wrong"), body, ranks=2)
    assert len(result.said) == 1 and says in result.said[0], result.out
    assert result.outcome["exit_code"] == 2


@pytest.mark.nightly(but=["0"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_of_some_ranks_only_is_named_within_the_timeout(place, rank):
    body = (
        "job.track(model=model, optimizer=optimizer)\n"
        "    for _ in range(40):\n"
        f"        if rank == {rank} or job.steps_done < 20:\n"
        "            job.step(loss=1.0)\n"
        "        else:\n"
        "            time.sleep(0.01); job.steps_done\n"
        "    time.sleep(60)"
    )
    result = wrong(place("wrong"), body, ranks=2, TIMEOUT_S="6")
    told = result.said[-1]
    assert "rank lost" in told and f"rank {1 - rank} on" in told and "(step 20)" in told, result.out
    assert "wrong.py" in told and "timeout_s=6" in told and result.seconds < 40


@pytest.mark.parametrize(
    "before, after, says",
    [
        ("batch_size=8", "batch_size=10", "batch_size=8, and this is batch_size=10"),
        (
            "job.track(model=model, ",
            "job.track(net=model, ",
            "tracked=model, optimizer, and this is tracked=net, optimizer",
        ),
        (
            "model=model, optimizer=optimizer",
            "model=other, optimizer=torch.optim.Adam(other.parameters())",
            "[1, 1] in the",
        ),
        (
            "job.track(",
            "optimizer.add_param_group({'params': other.parameters()}); job.track(other=other, ",
            "tracked=",
        ),
        ("batches(data", "batches(data + data", "fingerprint"),
        ("epochs=2", "epochs=2, count=len", "count=False, and this is count=True"),
    ],
)
def test_a_resume_with_something_else_is_refused(place, before, after, says):
    folder, body = place("changed"), f"{LOOP}job.step()"
    assert wrong(folder, body).code == 0
    assert before in body
    result = wrong(folder, body.replace(before, after))
    assert result.code == (3 if says == "fingerprint" else 2) and len(result.said) == 1, result.out
    assert says in result.said[0], result.out
    assert wrong(folder, body).code == 0  # nothing was changed


@pytest.mark.parametrize("kind", ["float32", "complex64"])
def test_a_model_that_each_rank_trains_by_itself_is_refused_at_the_first_save(place, kind):
    """Nothing else would tell: the loop has forgotten DistributedDataParallel, and a checkpoint would mix the models."""
    body = f"model.to(torch.{kind}); {LOOP}loss = (model(x.to(torch.{kind})) * rank).abs().sum()"
    body += "; loss.backward(); optimizer.step(); optimizer.zero_grad(); job.step(loss=loss)"
    result = wrong(place("wrong"), body, ranks=2)
    assert len(result.said) == 1 and "wrap the model in DistributedDataParallel" in result.said[0], result.out
    assert result.outcome["exit_code"] == 2 and not list((result.folder / "checkpoints").glob("step-*"))


def test_a_model_whose_gradients_ddp_has_not_averaged_is_refused_with_what_keeps_it_from_that(place):
    wrapped = "model = nn.parallel.DistributedDataParallel(model); model.require_backward_grad_sync = False\n    "
    body = f"{wrapped}{LOOP}loss = (model(x) * rank).sum(); loss.backward(); optimizer.step(); job.step(loss=loss)"
    result = wrong(place("wrong"), body, ranks=2)
    assert "its DistributedDataParallel has not averaged its gradient" in result.said[0], result.out


def test_drop_last_may_change_until_the_first_smaller_batch(place):
    """A model with batch norm may fail at it, and the first epoch need not be trained again."""
    leaves = "\n        if job.steps_done == int(os.environ['LEAVE']): job.save(); raise SystemExit(75)"
    body = f"{LOOP}job.step()".replace("batch_size=8", "batch_size=12, drop_last=DROPS") + leaves
    folders = {at: place(f"at-{at}") for at in (2, 3)}

    def codes(at, *drops):
        return [
            wrong(folders[at], body.replace("DROPS", each), LEAVE=str(0 if number else at)).code
            for number, each in enumerate(drops)
        ]

    assert codes(2, "False", "True", "False") == [75, 0, 2]
    assert codes(3, "False", "True") == [75, 2], "whether the third batch ends the epoch has been told already"


def test_a_mistake_in_the_loop_is_told_once_with_its_place(place):
    result = wrong(place("wrong"), f"{LOOP}job.step(loss=1 / (3 - job.steps_done))", ranks=2)
    assert len(result.said) == 1 and "ZeroDivisionError" in result.said[0] and "wrong.py:12" in result.said[0], (
        result.out
    )
    assert result.outcome["outcome"] == "failed" and result.outcome["step"] == 3


def test_a_loss_that_is_not_finite_ends_the_run(place):
    result = wrong(place("wrong"), f"{LOOP}job.step(loss=float('nan') if job.steps_done == 5 else 1.0)", ranks=2)
    assert result.outcome["exit_code"] == 6 and "the loss is not finite at step 6" in result.said[0], result.out


def test_an_error_that_a_loop_catches_around_next_is_raised_again(place):
    """Some take whatever ends the iterator for the end of an epoch, and ask for the batches again."""
    body = """batches = lambda: iter(job.batches(data, batch_size=8, epochs=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    job.track(model=model, optimizer=optimizer)
    made = batches()
    while job.steps_done < 10:
        try:
            x, y = next(made)
        except:
            made = batches()
        model(x).square().sum().backward(); optimizer.step(); job.step()"""
    done = wrong(place("caught"), body)
    assert done.code == 6 and "a weight is not finite at step" in done.out, done.out


# How a script may leave a loop


def test_a_loop_that_is_left_early_is_done_and_not_trained_further(place):
    folder, body = place("left"), f"{LOOP}job.step()\n        if job.steps_done == 3: break\n    print(job.steps_done)"
    assert wrong(folder, body).outcome["outcome"] == "done"
    again = wrong(folder, body)
    assert again.code == 0 and "\n3\n" in again.out, again.out
    assert again.events("done")[-1]["note"] == "finished already"
    assert wrong(folder, body.replace("batch_size=8", "batch_size=4")).code == 2
    still = wrong(folder, body)
    assert still.code == 0 and "\n3\n" in still.out and still.outcome["outcome"] == "done", still.out


# What the body does after the step belongs to the step


def evaluated(result):
    return {line["step"]: line["error"] for line in result.lines("eval")}


@pytest.mark.nightly(but=["short-"])
@pytest.mark.parametrize("save", [{}, {"SAVE": "1"}], ids=["", "saves"])
@pytest.mark.parametrize("slow_s, at", [(1.0, 8), (20.0, 6)], ids=["short", "long"])
def test_told_to_stop_within_the_body_nothing_of_it_is_lost(place, slow_s, at, save):
    """A short evaluation ends, and its step is saved with all that follows; a step with a long one is repeated."""
    whole = run(place("whole"), script="bodies", ranks=2, **save)
    cut = run(place("cut"), script="bodies", ranks=2, code=None, STOPS="1", SLOW_S=str(slow_s), **save)
    assert cut.outcome["exit_code"] == 75, cut.out
    again = run(cut.folder.parent, script="bodies", ranks=2, **save)
    assert [line["step"] for line in again.events("resume")] == [max(at, 4)], again.out
    assert again.sha256 == whole.sha256 and again.losses == whole.losses and evaluated(again) == evaluated(whole)


@pytest.mark.nightly
@pytest.mark.parametrize("save_every", [6, 100])
def test_a_rank_that_dies_after_a_save_in_the_body_costs_nothing_of_the_body(place, save_every):
    env = {"SAVE": "1", "SAVE_EVERY": str(save_every)}
    whole = run(place("whole"), script="bodies", ranks=2, **env)
    killed = run(
        place("killed"), script="bodies", ranks=2, restarts=3, FAULTS=(kill := fail_at(1, 8, "evaluation")), **env
    )
    assert (killed.folder.parent / kill).exists(), killed.out
    assert killed.sha256 == whole.sha256 and evaluated(killed) == evaluated(whole)


def test_a_loop_that_saves_and_is_left_stays_left(place):
    first = run(place("left"), script="bodies", SAVE="1", LEAVE="1")
    assert first.outcome["step"] == 12
    assert run(first.folder.parent, script="bodies", SAVE="1", LEAVE="1", LR="0.1", code=None).code == 2
    again = run(first.folder.parent, script="bodies", SAVE="1", LEAVE="1")
    assert again.outcome["step"] == 12 and again.sha256 == first.sha256 and "after the loop 12" in again.out, again.out


LEFT = (
    f"{LOOP}job.step()\n        if job.steps_done == 3:\n            {{last}}\n            break\n    "
    "steps = lambda: sorted(os.listdir('run/checkpoints')) if os.path.exists('run/checkpoints') else []\n    {then}"
)
WAIT = "for _ in range(3000):\n        time.sleep(0.02 if 'step-00000003' not in steps() else 0)\n    print('saved', steps())"


@pytest.mark.parametrize(
    "last, then",
    [
        ("pass", f"job.save()\n    {WAIT}\n    os.kill(os.getpid(), 9)"),
        ("job.save()", f"job.should_stop\n    {WAIT}\n    os.kill(os.getpid(), 9)"),
        ("job.save()", "raise SystemExit(9)"),
    ],
)
def test_a_save_beside_a_break_is_made(place, last, then):
    """After the loop at once; one in its last body with the next call of the job, or as the script exits with a code."""
    result = wrong(place("left"), LEFT.format(last=last, then=then))
    assert result.code in (9, -9) and (result.folder / "checkpoints/step-00000003").exists(), result.out


def test_a_loop_left_with_a_code_after_a_save_is_continued(place):
    body = f"{LOOP}job.step()\n        if job.steps_done == 3 and not os.path.exists('once'):\n            "
    body += "open('once', 'w').close(); job.save(); raise SystemExit(75)"
    folder = place("again")
    assert wrong(folder, body).code == 75
    again = wrong(folder, body)
    assert [line["step"] for line in again.events("resume")] == [3] and again.outcome["step"] == 10, again.out


def test_a_save_in_the_last_body_is_made_before_the_end(place):
    body = f"{LOOP}job.step()\n        if job.ends_epoch and job.epoch == 1: job.save()\n    "
    then = WAIT.replace("00000003", "00000010")
    steps = "steps = lambda: sorted(os.listdir('run/checkpoints')) if os.path.exists('run/checkpoints') else []\n    "
    result = wrong(place("last"), f"{body}{steps}{then}\n    os.kill(os.getpid(), 9)")
    assert result.code == -9 and (result.folder / "checkpoints/step-00000010").exists(), result.out


@pytest.mark.parametrize("last", ["pass", "job.save()"])
def test_told_to_stop_after_a_loop_that_was_left_it_stays_left(place, last):
    """The stop comes in an evaluation after the loop, which is made again; the loop is not entered."""
    after = (
        "def slow(batch):\n        "
        "if not os.path.exists('slow'):\n            open('slow', 'w').close(); os.kill(os.getpid(), 15); time.sleep(0.5)\n        "
        "return {'one': torch.ones(len(batch[0]))}\n    "
        "job.evaluate(data, slow, batch_size=8); print('after', job.steps_done)"
    )
    body = LEFT.format(last=last, then=after)
    folder = place("after")
    stopped = wrong(folder, body)
    assert stopped.code == 75 and "stopped at step 3 of 10 and saved it" in stopped.out, stopped.out
    again = wrong(folder, body)
    assert again.code == 0 and "after 3" in again.out and again.outcome["step"] == 3, again.out


def test_a_loop_left_after_it_was_told_to_stop_is_done(place):
    """The stop comes in the last evaluation, after which the loop is left for a reason of its own."""
    env = {"LEAVE": "1", "STOPS": "1", "SLOW_S": "1", "LEAVE_AT": "8"}
    first = run(place("left"), script="bodies", ranks=2, code=None, **env)
    assert first.outcome["outcome"] == "done" and first.outcome["step"] == 8, first.out
    again = run(first.folder.parent, script="bodies", ranks=2, **env)
    assert again.outcome["step"] == 8 and again.sha256 == first.sha256


@pytest.mark.nightly(but=["break"])
@pytest.mark.parametrize("leave", ["break", "raise SystemExit"])
def test_a_rank_that_leaves_a_loop_alone_is_noticed_within_the_timeout(place, leave):
    body = f"{LOOP}job.step(loss=1.0)\n        if job.steps_done == 4 + rank: {leave}"
    result = wrong(place("alone"), body.replace("epochs=2", "epochs=9"), ranks=2, TIMEOUT_S="6")
    assert result.outcome["outcome"] in ("rank_lost", "config_error"), result.out
    assert len([line for line in result.said if "waiting for" not in line]) == 1 and result.seconds < 40, result.out


@pytest.mark.parametrize("leaves, code, outcome", [("()", 0, "done"), ("(0)", 0, "done"), ("(9)", 9, "failed")])
def test_sys_exit_keeps_its_code(place, leaves, code, outcome):
    result = wrong(place("exits"), f"{LOOP}job.step()\n        if job.steps_done == 3: raise SystemExit{leaves}")
    assert (result.code, result.outcome["outcome"], result.outcome["step"]) == (code, outcome, 3), result.out


@pytest.mark.nightly
def test_a_forked_child_leaves_the_run_to_its_parent(place):
    fork = "job.step()\n        if not os.fork(): raise SystemExit\n        os.wait()"
    result = wrong(place("forks"), f"{LOOP}{fork}", ranks=2)
    assert result.code == 0 and result.outcome["outcome"] == "done", result.out


def test_a_compiled_layer_leaves_no_mark_in_the_names(place):
    """Each attempt, compiled or not, goes on from the other's checkpoint; `muster.load` fills either model."""
    folder = place("compiled")
    (folder / "compiled.py").write_text(f"""{START}
def net(is_compiled):
    torch.manual_seed(0)
    found = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    for at in (0, 1) if is_compiled else ():
        found[at] = torch.compile(found[at], backend="eager")
    return torch.compile(found, backend="eager") if is_compiled == "twice" else found

for attempt, is_compiled in enumerate([True, False, "twice"]):
    model = net(is_compiled)
    optimizer = torch.optim.Adam(model.parameters())
    with muster.Job("run", tensorboard=False, log_every=1) as job:
        job.track(model=model, optimizer=optimizer)
        for x, y in job.batches(data, batch_size=8, max_steps=2 * attempt + 2):
            model(x).sum().backward(), optimizer.step(), optimizer.zero_grad(), job.step()
for filled in (muster.load("run", into=net(True)), muster.load("run", into={{"model": net(True)}})["model"]):
    assert all(map(torch.equal, filled.state_dict().values(), model.state_dict().values()))
""")
    result = run(folder, script="compiled", to="")
    assert [line["step"] for line in result.events("resume")] == [2, 4]
    layers = {0: ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"), 1: ("weight", "bias")}
    assert {*result.weights} == {f"{layer}.{name}" for layer, names in layers.items() for name in names}


@pytest.mark.nightly(but=["True"])
@pytest.mark.parametrize("thaws", [False, True])
def test_a_parameter_that_was_thawed_and_is_frozen_again_is_said(place, thaws):
    """The checkpoint's optimizer has a group for it; the resumed script did not come to the line that thawed it."""
    again = "if job.steps_done >= 3: other.requires_grad_(True)" if thaws else "pass"
    body = (
        "other.requires_grad_(False)\n    "
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    "
        f"job.track(model=model, other=other, optimizer=optimizer)\n    {again}\n    "
        "for x, y in job.batches(data, batch_size=8, max_steps=int(os.environ['STEPS'])):\n        "
        "(model(x).sum() + other(x).sum()).backward(); optimizer.step(); job.step()\n        "
        "if job.steps_done == 3:\n            "
        "other.requires_grad_(True); optimizer.add_param_group({'params': [*other.parameters()]})"
    )
    folder = place("thawed")
    assert not wrong(folder, body, STEPS="5").events("note")
    notes = [line["text"] for line in wrong(folder, body, STEPS="8").events("note")]
    assert len(notes) == (not thaws) and all("other/weight was thawed" in note for note in notes), notes


@pytest.mark.parametrize("body", [f"{LOOP}job.step()", f"{LOOP}job.step(loss=1 / (3 - job.steps_done))"])
def test_a_job_in_a_thread_ends_as_in_the_main_thread(place, body):
    folder = place("thread")
    lines = "".join(f"    {line}\n" for line in f"{WITH}{body}".splitlines())
    run_in_thread = "import threading\nthread = threading.Thread(target=main); thread.start(); thread.join()\n"
    (folder / "wrong.py").write_text(f"{START}def main():\n{lines}{run_in_thread}")
    result = run(folder, script="wrong", code=None)
    failed = "1 /" in body
    assert result.outcome["outcome"] == ("failed" if failed else "done"), result.out
    assert len(result.said) == failed and "main thread" not in result.out
    assert not list(result.folder.glob(".*"))


def test_a_job_serves_one_with_block(place):
    body = "job.track(model=model)\n    job.step()\n"
    again = "for misuse in (job.step, job.__enter__, muster.Job('other').sum):\n    try: misuse()\n    except Exception as error: print(error)"
    result = wrong(
        place("again"), f"{body}{again}".replace("muster.Job('other').sum", "lambda: muster.Job('other').rank")
    )
    assert "step() came after the end of the `with` block" in result.out
    assert "has been used" in result.out and "is not entered" in result.out


# What else a loop can ask


@pytest.mark.parametrize(
    "backward",
    [
        "loss.backward()",
        "print(loss.item() * job.weight)\n        loss.backward()",
        "shown = loss.detach() * job.weight\n        loss.backward()",
        "(loss * job.weight).backward()",
        "weight = float(job.weight)\n        (loss * weight).backward()",
    ],
)
def test_unequal_shares_whose_loss_is_not_weighed_are_told(place, backward):
    """Also where the loop weighs a number that it prints."""
    body = (
        "model = nn.parallel.DistributedDataParallel(model)\n"
        "    job.track(model=model, optimizer=optimizer)\n"
        "    for x, y in job.batches(data, batch_size=5, epochs=1):\n"
        "        loss = (model(x) - y).square().mean()\n"
        f"        {backward}\n"
        "        optimizer.step(), optimizer.zero_grad(), job.step(loss=loss)"
    )
    told = notes(wrong(place("unequal"), body, ranks=2))
    assert [text.partition(":")[0] for text in told if "job.weight" in text] == [
        "step 0 has 5 samples, not as many in each batch of 2 ranks"
    ] * ("(loss * " not in backward), told


def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(place):
    """40 samples in steps of 16, 16 and 8: on three ranks with unequal shares, and micro-batches that have none."""
    body = (
        "job.track(model=model)\n"
        "    data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1) / 40)\n"
        "    for (x,) in job.batches(data, batch_size=16, micro_batch_size=MICRO, epochs=2):\n"
        "        loss = (model(x) - 3 * x).square().mean()\n"
        "        (loss * job.weight).backward()\n"
        "        if job.ends_step:\n"
        "            for each in model.parameters():\n"
        "                each.grad /= job.world_size\n"
        "                if job.world_size > 1: torch.distributed.all_reduce(each.grad)\n"
        "                each.data -= 0.1 * each.grad; each.grad = None\n"
        "        job.step(loss=loss)"
    )
    whole = wrong(place("whole"), body.replace("MICRO", "None"))
    for ranks, micro in ((None, 5), (3, 2)):
        parts = wrong(place(f"micro-{micro}"), body.replace("MICRO", str(micro)), ranks=ranks)
        assert parts.losses == pytest.approx(whole.losses, rel=1e-4) and len(parts.losses) == 6, parts.out
        assert [line["samples"] for line in parts.lines("train")] == [16, 32, 40, 56, 72, 80]
        assert not [line for line in parts.events("note") if "job.weight" in line["text"]]
    assert whole.losses[6] < whole.losses[1] / 2


def test_every_sample_is_evaluated_once_and_with_the_same_random_numbers_at_any_world_size(place):
    body = (
        "job.track(model=model)\n"
        "    data = torch.utils.data.TensorDataset(torch.arange(10.0) ** 3)\n"
        "    found = job.evaluate(data, lambda batch: {'mean': batch[0], 'sum': batch[0] * 10}, batch_size=4)\n"
        "    import random, numpy as np\n"
        "    def drawn(batch):\n"
        "        noise = torch.rand(len(batch[0])) + random.random() + np.random.random() + len(batch[0])\n"
        "        return {f'noise{number}': noise * row for number, row in enumerate(batch[0].T)}\n"
        "    job.evaluate(torch.utils.data.TensorDataset(torch.eye(10)), drawn, batch_size=4)\n"
        "    print(found, flush=True)"
    )
    noises = []
    for ranks in (1, 2, 3, 4):
        result = wrong(place(f"evaluated-{ranks}"), body, ranks=ranks)
        assert result.out.count("{'mean': 202.5, 'sum': 2025.0}") == ranks, result.out
        noises += [[result.lines("eval")[1][f"noise{number}"] for number in range(10)]]
    assert noises == [noises[0]] * 4 and len({*noises[0]}) == 10


def test_weights_that_are_put_in_for_the_best_evaluation_and_taken_out_again_are_told(place):
    evaluate = "job.evaluate(data, lambda batch: {'loss': (model(batch[0]) - 1)[:, 0] ** 2}, best='loss')"
    within = "(model(x) - y).pow(2).mean().backward(); optimizer.step(); optimizer.zero_grad(); job.step()"
    swapped = f"{LOOP}{within}; kept = model.weight.clone(); model.weight.data *= 0.9; {evaluate}; model.weight.data.copy_(kept)"
    result = wrong(place("swapped"), swapped)
    assert any("has changed the model since evaluate(best=...)" in text for text in notes(result)), result.out
    alone = wrong(place("alone"), f"{LOOP}{within}; {evaluate}")
    assert alone.code == 0 and not notes(alone), alone.out


def test_two_evaluations_whose_values_have_one_name_are_told(place):
    """No record, chart or `muster load` could tell them apart."""

    def told(name, *evaluations):
        each = [f"job.evaluate({data}, lambda batch: {{'{value}': batch[0][:, 0]}})" for data, value in evaluations]
        return notes(wrong(place(name), f"{LOOP}job.step()\n        if job.ends_epoch: {'; '.join(each)}"))

    [text] = told("lengths", ("data", "accuracy"), ("[*data][:7]", "accuracy"))
    assert text.startswith("evaluate() gives accuracy of 40 samples and of 7: records, charts"), text
    [text] = told("step", ("data", "accuracy"), ("[(2 * x, y) for x, y in data]", "accuracy"))
    assert text.startswith("evaluate() gives accuracy twice at step 5: records, charts"), text
    assert not told("again", ("data", "accuracy"), ("[*data]", "accuracy")), (
        "as every 5 steps and at the end of each epoch"
    )
    assert not told("named", ("data", "accuracy"), ("[*data][:7]", "quick_accuracy"))
    best = "job.evaluate({}, lambda batch: {{'accuracy': {} * batch[0][:, 0]}}{})"
    calls = f"{best.format('data', 0.5, ', best=' + repr('accuracy'))}; {best.format('[*data][:7]', 0.9, '')}"
    chosen = wrong(place("chosen"), f"{LOOP}job.step()\n        if job.ends_epoch: {calls}")
    assert chosen.code == 0 and "metrics     accuracy 0.5" in load.summary(load.open_source(chosen.folder, "best"))


def test_a_batch_that_is_too_small_for_batch_norm_is_told_when_the_run_begins(place):
    """It ends the run, an epoch later."""
    body = LOOP.replace("batch_size=8", "batch_size={}").replace("model=model", "model=nn.BatchNorm1d(1), other=model")
    for name, batch_size, said in (
        (
            "one",
            "13",
            [
                "an epoch's last batch, of size 1, leaves a rank one sample at most (1 rank), and model (BatchNorm1d) needs two"
            ],
        ),
        ("dropped", "13, drop_last=True", []),
        ("two", "19", []),
    ):
        result = wrong(place(name), f"{body.format(batch_size)}job.step()")
        assert [text.partition(" unless")[0] for text in notes(result)] == said, result.out


RATE_AGAIN = """
import os, sys, torch, muster
from torch import nn

with muster.Job("run", tensorboard=False, log_every=1) as job:
    model, new_lr = nn.Linear(1, 1), float(os.environ["RATE"])
    optimizer, apart = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    schedule = SCHEDULE
    job.track(model=model, optimizer=optimizer, schedule=schedule, apart=apart)
    apart.param_groups[0]["lr"] = new_lr  # beside no schedule
    if os.environ["FORM"] == "anew" and new_lr != 0.1:
        optimizer.param_groups[0]["lr"] = new_lr
        if hasattr(schedule, "base_lrs"):
            schedule.base_lrs = [new_lr]
DOCUMENTED
    for (x,) in job.batches(torch.utils.data.TensorDataset(torch.ones(32, 1)), batch_size=8, epochs=4):
        model(x).square().mean().backward(), optimizer.step(), optimizer.zero_grad(), schedule.step(*WORSE)
        job.step()
        if job.steps_done == int(os.environ["LEAVE"]):
            job.save()
            sys.exit(75)
"""


STEPPED = "StepLR(optimizer, 4, 0.5)"
WARMED = "SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 13)], milestones=[3])"
CHAINED = "ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=7), ExponentialLR(optimizer, 0.9)])"
CYCLE, PLATEAU = "OneCycleLR(optimizer, 0.1, total_steps=16)", "ReduceLROnPlateau(optimizer, patience=2)"


@pytest.mark.parametrize(
    ("form", "schedule"),
    [
        ("as-documented", STEPPED),
        ("as-documented", WARMED),
        ("as-documented", CHAINED),
        ("anew", STEPPED),
        ("anew", CYCLE),
        ("anew", PLATEAU),
    ],
)
def test_another_rate_beside_a_schedule_is_set_once(place, form, schedule):
    """Set anew after each `track`, it undoes the schedule's steps. No way is named for a schedule that it would not be right for."""
    text = (ROOT / "docs/loop-recipes.md").read_text()
    [way] = re.findall(r"```python\n(rates = \[new_lr\].*?)```", text, flags=re.DOTALL)
    folder = place(form)
    documented = textwrap.indent(way, "    ") if form == "as-documented" else ""
    script = RATE_AGAIN.replace("DOCUMENTED", documented).replace("*WORSE", "1.0" if schedule == PLATEAU else "")
    (folder / "rates.py").write_text(f"from torch.optim.lr_scheduler import *\n{script.replace('SCHEDULE', schedule)}")
    for rate, leave, code in (("0.1", "5", 75), ("0.05", "9", 75), ("0.05", "0", 0)):
        done = run(folder, script="rates", to="", code=code, FORM=form, RATE=rate, LEAVE=leave)
    told = [each for each in notes(done) if re.match(r"optimizer.lr was \S+ when track\(\)", each)]
    assert bool(told) == (form == "anew") and len(notes(done)) == len(told), done.out
    assert all(("Another learning rate" in each) == (schedule == STEPPED) for each in told), told
    if form == "as-documented":
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        planned = eval(schedule, {**vars(torch.optim.lr_scheduler), "optimizer": optimizer})
        right = [
            rate
            for rate in (optimizer.param_groups[0]["lr"] for _ in range(16))
            if not (optimizer.step(), planned.step())[1]
        ]
        used = [line["lr"] for line in done.lines("train")]
        assert used == pytest.approx([*right[:5], *[each / 2 for each in right[5:]]]), used


def test_a_value_of_ones_own_that_has_changed_is_told_at_a_resume(place):
    """As its checkpoint has it: an attempt between may have died before it saved one. No file has the secrets of a URL."""
    folder, leave, die = place("own"), "job.save(); raise SystemExit(75)", "os.kill(os.getpid(), 9)"
    for beta, stop, end in ((0.9, 3, leave), (0.99, 5, die), (0.99, 7, leave), (0.9, 0, leave)):
        own = f"{{'beta': numpy.float64({beta}), 'nan': float('nan'), 'hook': 'https://me:hidden@example.org/?token=hidden'}}"
        body = f"{LOOP}job.step()\n        if job.steps_done == {stop}: {end}"
        job = WITH.replace("save_every=2", f"own={own}, save_every=100")
        (folder / "wrong.py").write_text(f"import numpy\n{START}{job}{body}\n")
        result = run(folder, script="wrong", code=None)
    told = [
        re.fullmatch(r"values of own= have changed since \S+-0000000(\d) was written: beta=(.*)", text)
        for text in notes(result)
    ]
    assert [each and each.groups() for each in told] == [("3", "0.9 is now 0.99")] * 2 + [("7", "0.99 is now 0.9")], (
        notes(result)
    )
    assert not [each for each in (folder / "run").rglob("*") if each.is_file() and b"hidden" in each.read_bytes()]


LAYERED = """
import os, torch, muster
from torch import nn
with muster.Job("run", save_every=100, log_every=1, tensorboard=False) as job:
    gate = nn.GELU(approximate=os.environ["GATE"])
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(float(os.environ["RATE"])), gate, nn.Linear(4, 1), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    for x in job.batches(torch.ones(16, 1), batch_size=4, epochs=2):
        model(x).mean().backward(); optimizer.step(); optimizer.zero_grad(); job.step()
        if job.steps_done == int(os.environ["LEAVE"]): job.save(); raise SystemExit(75)
"""


def test_layers_that_are_built_otherwise_are_told_at_a_resume(place):
    """No weight has another shape."""
    folder = place("layers")
    (folder / "layered.py").write_text(LAYERED)
    for leave, rate, gate in (("2", "0.1", "none"), ("3", "0.1", "none"), ("4", "0.5", "tanh"), ("0", "0.5", "tanh")):
        result = run(folder, script="layered", to="", code=None, LEAVE=leave, RATE=rate, GATE=gate)
    assert notes(result) == [
        "model was built with 1 Dropout(p=0.1, inplace=False), 1 GELU(approximate='none') before, and with 1 Dropout(p=0.5, inplace=False), "
        "1 GELU(approximate='tanh') in place of that now: its weights fit, and the run goes on with them"
    ]
    assert result.code == 0, result.out


def test_a_loop_of_ones_own_can_ask_whether_to_stop(place):
    body = (
        "job.track(model=model)\n"
        "    while not job.should_stop and job.steps_done < 1000:\n"
        "        job.log(noted=job.steps_done)\n"
        "        time.sleep(0.02)\n"
        "        job.step(loss=job.sum(1.0), samples=4)\n"
        "    print('left the loop', flush=True)"
    )
    folder = place("asks")
    (folder / "wrong.py").write_text(f"{START}{WITH}{body}\n")
    process = start(folder, script="wrong", ranks=2)
    wait_for(folder / "run", reached(5), process=process)
    process.terminate()
    result = finish(process, folder / "run")
    assert result.outcome["exit_code"] == 75, result.out
    line = result.lines("train")[3]
    assert (line["loss"], line["noted"], line["samples"]) == (2.0, 3.0, 32)


def test_values_are_recorded_by_whatever_name_they_have(place):
    body = (
        "job.track(model=model)\n"
        "    job.log(lr=torch.tensor(0.5), narrow=__import__('numpy').float32(0.25))\n"
        "    job.step(loss=1.0, samples=0, **{'train/weight': 2.0})"
    )
    line = wrong(place("names"), body).lines("train")[0]
    assert (line["loss"], line["lr"], line["narrow"], line.get("train/weight")) == (None, 0.5, 0.25, None)
    assert wrong(place("named"), body.replace("samples=0, ", "")).lines("train")[0]["train/weight"] == 2.0


@pytest.mark.nightly
def test_a_function_launched_from_a_script_is_a_job_too(place, tmp_path):
    from muster import launch

    def loop(folder):
        import muster

        with muster.Job(folder, tensorboard=False) as job:
            model = torch.nn.Linear(1, 1)
            job.track(model=model)
            data = torch.utils.data.TensorDataset(torch.arange(12.0))
            return [batch[0].tolist() for batch in job.batches(data, batch_size=4, epochs=1) if not job.step()]

    ranks = launch(loop, str(tmp_path / "run"), nproc=2)
    taken = [int(sample) for steps in ranks for samples in steps for sample in samples]
    assert sorted(taken) == list(range(12)) and [len(steps) for steps in ranks] == [3, 3]


# The examples


SCRIPTS = ["after", "gan", "gpt", "fsdp2", "finetune"]


@pytest.fixture
def example(place):
    """Makes a folder of a user's own with the examples in it, and no run yet."""

    def make(kind):
        folder = place(kind)
        shutil.copytree(ROOT / "examples/own_loop", folder, dirs_exist_ok=True)
        (folder / "runs").mkdir()
        (folder / "run").mkdir()
        (folder / "runs/digits").symlink_to(folder / "run")  # the folder of after.py is a constant
        return folder

    return make


def of_example(name, **how):
    """The arguments of `start` and `run` for 60 steps of an example."""
    return [f"{name}.py", "run", "60"], {"script": "disturbed", "to": None, "ranks": 2, **how}


def lines_of(result, *, without=("samples_per_s",)):
    return [{key: each[key] for key in each if key not in without} for each in result.lines("train")]


def killed_and_preempted(folder, name):
    """Kill a rank after step 23, and stop all after step 30; return the attempt that has stopped."""
    arguments, how = of_example(name, FAULTS=fail_at(1, 23), SAVED="20", HOLD="31", restarts=1, **STEADY)
    process = start(folder, *arguments, **how)
    wait_for(folder / "run", reached(30), process=process)
    process.terminate()
    return finish(process, folder / "run")


@pytest.mark.nightly(but=["after"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_killed_and_preempted_and_resumes_exactly(example, name):
    if name == "finetune":
        pytest.importorskip("accelerate"), pytest.importorskip("transformers")
    arguments, how = of_example(name)
    whole, folder = run(example("whole"), *arguments, **how), example("cut")
    stopped = killed_and_preempted(folder, name)
    lives = name == "after"  # which is a function that Job.run calls
    assert [line["step"] for line in stopped.events("resume")] == ([] if lives else [20]), stopped.out
    assert len(stopped.events("survived")) == lives
    said = stopped.outcome
    assert said["outcome"] == "preempted" and said["exit_code"] == 75, stopped.out
    shutil.copytree(folder, folder.with_name("other"), symlinks=True)
    resumed = run(folder, *arguments, **how)
    assert [line["step"] for line in resumed.events("resume")] == [*([] if lives else [20]), said["step"]]
    measured = ("samples_per_s", "loss") if lives else ("samples_per_s",)  # its loss of step 23 is gone with the rank
    assert lines_of(whole, without=measured) == lines_of(resumed, without=measured)
    if name != "gan":  # which has two models, and no model.pt
        assert whole.sha256 == resumed.sha256
    if name == "fsdp2":
        assert_goes_on_with_other_ranks(folder.with_name("other"), whole)


def assert_goes_on_with_other_ranks(folder, whole):
    """A run that has stopped ends on three ranks with the same samples, and up to rounding with the same losses."""
    arguments, how = of_example("fsdp2", ranks=3)
    other = run(folder, *arguments, **how)
    assert [line["world_size"] for line in other.events("start") + other.events("resume")] == [2, 2, 3]
    measured = ("samples_per_s", "loss", "grad_norm")
    assert lines_of(whole, without=measured) == lines_of(other, without=measured)
    assert other.losses == pytest.approx(whole.losses, abs=1e-3)


def test_the_page_shows_the_difference_between_the_examples():
    before, after = ((ROOT / f"examples/own_loop/{name}.py").read_text().splitlines() for name in ("before", "after"))
    lines = [
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if not line.startswith(("---", "+++", "@"))
    ]
    assert sum(line.startswith("+") for line in lines) <= 12
    assert "```text\n" + "\n".join(lines) + "\n```" in (ROOT / "docs/your-own-loop.md").read_text()


SCHEDULED = """
import os, time
import torch, muster
from torch.optim import lr_scheduler as by

class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([index / 40.0])

class Since:
    def __init__(self):
        self.started = time.time()

    def __call__(self, step):
        return 0.9 ** step

VALUE = os.environ.get("VALUE")
KINDS = {"float": float, "tensor": torch.tensor, "float32": __import__("numpy").float32}
SCHEDULES = {
    "none": lambda optimizer: None,
    "sequential": lambda optimizer: by.SequentialLR(optimizer, [
        by.LinearLR(optimizer, 0.5, total_iters=2), by.CosineAnnealingLR(optimizer, int(VALUE or 20)),
    ], milestones=[2]),
    "chained": lambda optimizer: by.ChainedScheduler([
        by.ConstantLR(optimizer, total_iters=3), by.ExponentialLR(optimizer, float(VALUE or 0.9)),
    ]),
    "steps": lambda optimizer: by.MultiStepLR(optimizer, [int(VALUE or 5), 50]),
    "since": lambda optimizer: by.LambdaLR(optimizer, Since()),
    "cycle": lambda optimizer: by.OneCycleLR(optimizer, 0.5, total_steps=40, pct_start=int(VALUE or 3) / 10),
    "plateau": lambda optimizer: by.ReduceLROnPlateau(optimizer, patience=int(VALUE or 3)),
}

def main(job):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    lr = float(os.environ.get("LR", 0.1)) * (job.world_size if "SCALED" in os.environ else 1)
    kind = getattr(torch.optim, os.environ.get("KIND", "SGD"))
    weight, bias = ({"params": [each]} for each in model.parameters())
    bias["scale"] = float(os.environ.get("SCALE", 1))  # of the loop's own
    decay = float(os.environ.get("DECAY", 0))
    optimizer = kind([weight, bias], lr=KINDS[os.environ.get("TYPE", "float")](lr), weight_decay=decay)
    schedule = SCHEDULES[os.environ.get("SCHEDULE", "none")](optimizer)
    job.track(model=model, optimizer=optimizer, **({"schedule": schedule} if schedule else {}))
    if "AFTER" in os.environ:
        optimizer.param_groups[0]["lr"] = float(os.environ["AFTER"])
    for x in job.batches(Numbered(), batch_size=8, epochs=int(os.environ.get("EPOCHS", 2))):
        (job.weight * model(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step(*([1.0] if os.environ["SCHEDULE"] == "plateau" else []))
        job.step()

own = {"lr": float(os.environ["LR"])} if "OWN" in os.environ else {}
muster.Job("run", tensorboard=False, save_every=2, log_every=1, own=own).run(main)
"""


@pytest.fixture
def built(place):
    """Runs the script above in one folder; asserts the run's exit code."""
    folder = place("built")
    (folder / "built.py").write_text(SCHEDULED)

    def run_it(code, *, ranks=2, **env):
        result = run(folder, script="built", to="", ranks=ranks, code=None, **env)
        assert bool(result.code) == bool(code) and result.outcome["exit_code"] == code, result.out
        return result

    return run_it


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind, schedule, value, name",
    [
        ("SGD", "sequential", "40", "schedule.1.T_max=20, and this is schedule.1.T_max=40"),
        ("SGD", "chained", "0.5", "schedule.1.gamma=0.9"),
        ("Adam", "steps", "7", "schedule.milestones=[5, 50], and this is schedule.milestones=[7, 50]"),
        ("Adagrad", "since", None, ""),
        ("SGD", "plateau", "4", "schedule.patience=3"),
        ("SGD", "cycle", "7", "schedule._schedule_phases="),
    ],
)
def test_a_schedule_built_otherwise_is_not_silently_replaced_by_the_checkpoints(built, kind, schedule, value, name):
    given = {"KIND": kind, "SCHEDULE": schedule}
    before = built(0, **given)
    lrs = [line["lr"] for line in before.lines("train")]
    if value:
        [said] = built(2, **given, EPOCHS="4", VALUE=value).said
        assert name in said and "build it as before; or use another folder" in said, said
    if schedule != "cycle":  # which sets the rate alone
        [said] = built(2, **given, EPOCHS="4", LR="0.4").said
        assert "optimizer.lr=0.1, and this is optimizer.lr=0.4" in said and "track()" not in said, said
    longer = built(0, **given, EPOCHS="4")  # as before
    assert longer.outcome["step"] == 20 and not longer.events("note")
    assert [line["lr"] for line in longer.lines("train")][:10] == lrs


def test_a_schedule_of_more_steps_is_refused_at_another_world_size_too(built):
    """Of the checkpoint's T_max, the rate would rise again; a number of steps follows from no number of ranks."""
    longer = {"SCHEDULE": "sequential", "VALUE": "40"}
    built(0, SCHEDULE="sequential")
    [said] = built(2, **longer, EPOCHS="4", ranks=None).said
    assert "schedule.1.T_max=20, and this is schedule.1.T_max=40" in said, said
    assert "total_steps=10, and this is total_steps=20" in said and "build it as before" in said, said
    [note] = built(0, **longer, ranks=None).events("note")
    assert "schedule.1.T_max=40, in place of which the checkpoint's is loaded" in note["text"], (
        "the run is as long as before"
    )


def test_all_that_is_built_otherwise_is_told_by_group(built):
    built(0, ranks=None)
    changed = {"LR": "0.4", "DECAY": "0.5", "SCALE": "2"}
    [said] = built(2, **changed, ranks=None).said
    [note] = built(0, **changed).events("note")
    for name, before, now in (("lr", 0.1, 0.4), ("weight_decay", 0.0, 0.5), ("1.lr", 0.1, 0.4), ("1.scale", 1.0, 2.0)):
        told = f"optimizer.{name}={before}, and this is optimizer.{name}={now}"
        assert told in said and told in note["text"], (said, note)
    assert "in place of which the checkpoint's are loaded" in note["text"]


@pytest.mark.nightly
def test_a_rate_built_otherwise_is_refused_and_at_another_world_size_noted(built):
    built(0)
    [said] = built(2, EPOCHS="3", LR="0.4").said
    assert "set another one after track(), in every attempt" in said, said
    assert [line["lr"] for line in built(0, EPOCHS="3", AFTER="0.4").lines("train")][10:] == [0.4] * 5
    assert not built(0, EPOCHS="4", TYPE="tensor").events("note"), "a tensor of the same rate"
    [said] = built(2, EPOCHS="5", LR="0.4", TYPE="float32").said
    assert "optimizer.lr=0.1, and this is optimizer.lr=0.4" in said.replace("0.4000000059604645", "0.4"), said
    # A rate that follows from the number of ranks does not end an elastic run; the checkpoint's is loaded, and remembered.
    [note] = built(0, EPOCHS="5", SCALED="1", ranks=3).events("note")
    assert "optimizer.lr=0.1, and this is optimizer.lr=0.3" in note["text"], note
    assert len(built(0, EPOCHS="6", ranks=3).events("note")) == 1, "as the run has begun"


def test_a_rate_that_the_script_was_given_is_refused_at_another_world_size_too(built):
    built(0, LR="0.1", OWN="1", ranks=None)
    [said] = built(2, LR="0.4", OWN="1").said
    assert "optimizer.lr=0.1, and this is optimizer.lr=0.4" in said and "set another one after track()" in said, said
    for ranks, scaled in ((2, {"LR": "0.2"}), (3, {"LR": "0.1", "SCALED": "1"})):  # in args.lr, or in the optimizer
        *_, note = built(0, OWN="1", ranks=ranks, EPOCHS=str(ranks + 1), **scaled).events("note")
        assert f"optimizer.lr=0.1, and this is optimizer.lr=0.{ranks}" in note["text"], (
            "it follows from the number of ranks"
        )


def test_an_optimizer_that_was_trained_in_this_process_is_not_as_it_was_built(place):
    folder = place("notebook")
    (folder / "notebook.py").write_text("""
import torch, muster
data = torch.utils.data.TensorDataset(torch.ones(40, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for steps in (4, 8):
    with muster.Job("run", tensorboard=False, log_every=1) as job:
        job.track(model=model, optimizer=optimizer)
        for x, in job.batches(data, batch_size=8, max_steps=steps):
            model(x).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
            job.step()
""")
    again = run(folder, script="notebook", to="")
    assert [line["lr"] for line in again.lines("train")] == [0.1 * 0.5**step for step in range(8)]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "rule",
            ["no optimizer is tracked", "hidden goes from batch to batch in a variable of the loop (carried.py:53)"],
        ),
        ("iterated", ["hidden goes from batch to batch in a variable of the loop (carried.py:53)"]),
        ("reset", []),
        ("draws", ["the loop draws from OWN, a Generator, which no checkpoint has"]),
        ("seeds", []),
    ],
)
def test_what_a_loop_keeps_in_variables_is_noted(place, how, says):
    notes = run(place(how), how, script="carried").events("note")
    assert [note["text"][: len(text)] for note, text in zip(notes, says, strict=True)] == says


ENVIRONMENT = """
import numpy as np, torch, muster
class Env:
    def reset(self, seed=None):
        if seed is not None:
            self._np_random = np.random.default_rng(seed)
        return torch.tensor(self._np_random.random(4), dtype=torch.float32)
class Wrapper:
    def __init__(self, env):
        self.env = env
    def reset(self, **given):
        return self.env.reset(**given)
env, policy = Wrapper(Wrapper(Env())), torch.nn.Linear(4, 1)
env.reset(seed=1)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
with muster.Job("run", tensorboard=False) as job:
    job.track(policy=policy, optimizer=optimizer)
    while job.steps_done < 4:
        policy(env.reset(SEED)).sum().backward(), optimizer.step(), optimizer.zero_grad()
        job.step(samples=1)
"""


@pytest.mark.parametrize("seed", ["", "seed=job.steps_done"])
def test_an_environment_that_draws_is_noted_unless_each_step_seeds_it(place, seed):
    folder = place("environment")
    (folder / "environment.py").write_text(ENVIRONMENT.replace("SEED", seed))
    told = notes(run(folder, script="environment", to=""))
    assert [text.partition(", which")[0] for text in told] == (
        [] if seed else ["the loop draws from env.env.env._np_random, a Generator"]
    )


CLOSURES = """
import os, torch, muster
from torch import nn
def main(job):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8)
    job.track(model=model, optimizer=optimizer)
    data = torch.arange(40.0).view(10, 4).sin()
    for x in job.batches(data, batch_size=10, epochs=3, shuffle=False):
        def closure():
            optimizer.zero_grad()
            loss = (model(x)[:, 0] - x.sum(1)).square().mean()
            (loss * job.weight).backward()
            return job.sum(loss.item() * job.weight) / job.world_size
        job.step(loss=optimizer.step(closure))
muster.Job("run", tensorboard=False, log_every=1, timeout_s=20).run(main)
"""


def test_an_optimizer_with_a_closure_takes_the_loss_of_all_ranks(place):
    """Three ranks have 4, 3 and 3 samples. On several ranks a note says how."""
    losses = []
    for ranks in (None, 3):
        folder = place(f"closures-{ranks}")
        (folder / "closures.py").write_text(CLOSURES)
        done = run(folder, script="closures", to="", ranks=ranks)
        losses.append(list(done.losses))
        told = [text for text in notes(done) if text.startswith("optimizer is an LBFGS, which calls its closure")]
        assert len(told) == (ranks is not None), done.out
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_numbers_that_were_drawn_before_the_job_from_another_seed_are_noted(place):
    folder = place("drawn")
    for _ in range(2):
        run(folder, "buffer", script="carried", DRAWS="1")
        shutil.rmtree(folder / "run/checkpoints/step-00000008")
        (folder / "run/outcome.json").unlink()
    notes = [note["text"] for note in run(folder, "buffer", script="carried", DRAWS="2").events("note")]
    [drawn] = [text for text in notes if text.startswith("before the job, random numbers")]
    assert "drawn from another state of NumPy's generator and torch's generator than in the attempt" in drawn
    seeded = [text.partition(" before the loop does not seed it")[0] for text in notes if text != drawn]
    assert seeded == ["torch.manual_seed(1)", "torch.manual_seed(1)", "torch.manual_seed(2)"]


@pytest.mark.parametrize(("seeds", "noted"), [({"SEED": "3"}, "3"), ({"DRAWS": "3", "SEED": "0"}, ""), ({}, "")])
def test_a_seed_in_the_job_that_is_not_the_job_s_is_noted(place, seeds, noted):
    """It seeds the initial weights alone."""
    notes = [note["text"] for note in run(place("seeded"), "reset", script="carried", **seeds).events("note")]
    assert [text.partition(" before the loop")[0] for text in notes] == [f"torch.manual_seed({noted})"] * bool(noted)


def test_buffers_of_each_rank_are_noted_where_there_are_others(place):
    """Those of a model in plain DistributedDataParallel are rank 0's in any case."""
    folder = place("buffers")
    run(folder, "buffer", script="carried", ranks=2)
    shutil.rmtree(folder / "run/checkpoints/step-00000008")
    (folder / "run/outcome.json").unlink()
    again = run(folder, "buffer", script="carried", ranks=2).events("note")
    shutil.rmtree(folder / "run/checkpoints/step-00000008")
    (folder / "run/outcome.json").unlink()
    [*before, note] = run(folder, "buffer", script="carried").events("note")
    assert before == again == [] and "model/hidden was another on each of the 2 ranks" in note["text"], note


WHOLE = """
import os, signal, sys, torch, muster
import torch.distributed as dist
from torch import nn
class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.register_buffer("scale", torch.ones(1))
        self.count = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
    def forward(self, x):
        with torch.no_grad():
            scale = 0.9 * self.scale.expand(4) + x.abs().amax(0)
            self.scale.resize_(4).copy_(scale)
            self.count += 1 + (dist.get_rank() if os.environ["CASE"] == "parameter" else 0)
        self.seen.append(x.detach().mean().item())
        return x / self.scale
    if os.environ["CASE"] != "kill":  # with another one on each rank all restart
        def get_extra_state(self):
            return torch.tensor(self.seen)
        def set_extra_state(self, state):
            self.seen = state.tolist()
    def _load_from_state_dict(self, state, prefix, *rest):
        self.scale.resize_(state[prefix + "scale"].shape)
        super()._load_from_state_dict(state, prefix, *rest)
class Own(torch.optim.SGD):
    def step(self):
        super().step()
        for state in self.state.values():
            state["seen"] = state.get("seen", torch.zeros(1, dtype=torch.int64)) + 1 + (dist.get_rank() if os.environ["CASE"] == "optimizer" else 0)
def main(job):
    net = nn.Sequential(nn.Linear(4, 4), Observer())
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = Own([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    for x in job.batches(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), batch_size=8, epochs=2):
        if os.environ["CASE"] == "stop" and job.steps_done == 5 and not os.path.exists("stopped"):
            if job.sum(1) and job.is_first:
                open("stopped", "w").close()
            sys.exit(75)
        if os.environ["CASE"] == "kill" and job.rank == 1 and job.steps_done == 8 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        model(x).square().mean().backward(), optimizer.step(), optimizer.zero_grad(), job.step()
    if os.environ["CASE"] == "destroys":
        dist.destroy_process_group()
    print(f"rank {job.rank} has {net[1].scale.tolist()} {net[1].count.item()} {net[1].seen if os.environ['CASE'] != 'kill' else ''}\\n", end="", flush=True)
muster.Job("run", tensorboard=False, save_every=3, timeout_s=20).run(main)
"""


def test_buffers_that_a_forward_pass_resizes_and_extra_state_that_grows_come_back(place):
    """As a fake-quantizer's scales do: its module resizes them when it loads. Also after a death."""
    told = {}
    for case in ("whole", "stop", "kill"):
        folder = place(case)
        (folder / "whole.py").write_text(WHOLE)
        if case == "stop":
            run(folder, script="whole", to="", ranks=2, code=None, CASE=case)
        done = run(folder, script="whole", to="", ranks=2, restarts=1, CASE=case)
        told[case] = sorted(line for line in done.out.splitlines() if "has [" in line)
        assert bool(done.events("survived")) == (case == "kill"), done.out
    assert len(told["whole"]) == 2 and told["whole"] == told["stop"], told
    assert all(line.startswith(found) for line, found in zip(told["whole"], told["kill"], strict=True)), told


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("optimizer", "the optimizer's optimizer/model/0.bias/seen differs from rank 0's"),
        ("parameter", "the parameter model/1.count differs from rank 0's"),
        ("destroys", "the process group was ended before the job"),
    ],
)
def test_integers_that_differ_between_ranks_and_an_ended_group_are_refused(place, case, line):
    """A checkpoint has one value of a parameter and of an optimizer's tensor, whatever its kind."""
    folder = place(case)
    (folder / "whole.py").write_text(WHOLE)
    assert line in run(folder, script="whole", to="", ranks=2, code=None, CASE=case).outcome["error"]
