"""Measure the kit on GPUs: images and tokens per second, log lines and saves, weak scaling, seconds after a kill.

    python -m bench.gpu one                                           # one GPU
    srun --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 \\
        python -m bench.gpu cluster --folder /shared/bench            # all GPUs, one node's, one

`cluster` runs once on each node, under any launcher that `muster launch node` knows (on one machine: NPROC=8). In a world
of ranks, the kit's own run and the other loops (gpu_loops.py) take turns in the same processes; the ratios are medians over
the turns. The kit logs every ten steps, also to TensorBoard. What a log line and a save take is timed around them, with
the device idle. The operations of some steps after the turns, of each loop, are listed by their time on the device in
FOLDER/*-operations.txt. The table for bench/README.md is written to FOLDER/gpu.md, its figures to FOLDER/gpu.json. Without a GPU there is nothing to measure: then
no table is written, also where a device is pretended (tests/kit/fake_cuda), on which `--tiny` runs every line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import nn
from torch.profiler import profile

from bench import gpu_loops
from muster.attempt.lifecycle import Lifecycle
from muster.errors import ConfigError
from muster.faults.preemption import Preemption
from muster.files import replace_file
from muster.launcher.spec import Dynamic, command, environment, steady_torchrun
from muster.launcher.substrate import here
from muster.train import loop
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.run import join, open_run
from muster.train.throughput import throughput

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = int(os.environ.get("ROUNDS", "5"))
KILLS = int(os.environ.get("KILLS", "3"))
UNITS = ("images", "tokens")
LISTED = 4
"""Steps of each loop whose operations are listed."""
AFTER = LISTED + 3
"""Steps after the turns: those that are listed, one before them, one that is saved, and the last one, which is saved again."""
NO_GPU = "There is no GPU here: nothing is measured, and no table is written."
AS_A_USER = (
    *("device=cuda", "precision=bf16", "log.every_steps=10", "log.progress=plain", "log.report=false"),
    *("eval.every_steps=off", "dist.timeout_s=3600"),
)


@dataclass(frozen=True)
class Workload:
    """What is trained. batch: samples per GPU and step. steps: per turn. goal: on one H100, in `unit`s per second."""

    name: str
    unit: str
    line: tuple[str, ...]
    batch: int
    steps: int
    goal: float | None


def workloads(folder: str, *, tiny: bool) -> list[Workload]:
    """Return the workloads, in the sizes of the table or in sizes that only run."""
    side, classes, pool = (16, 10, 8) if tiny else (224, 1000, 512)
    layers, heads, width, length, vocabulary = (1, 2, 16, 16, 64) if tiny else (12, 12, 768, 1024, 50304)
    resnet = (
        "data._target_=bench.gpu_data.Pictures", f"+data.side={side}", f"+data.num_classes={classes}", f"+data.pool={pool}",
        f"model=resnet{18 if tiny else 50}", "optimizer=sgd",
    )  # fmt: skip
    gpt = (
        "data=tokens", f"data.root={folder}/tokens", f"data.block_size={length}", f"data.vocab_size={vocabulary}",
        "model=gpt", f"model.num_layers={layers}", f"model.num_heads={heads}", f"model.hidden_dim={width}",
        "objective=language_modeling", "optimizer=adamw", "optimizer.lr=6e-4", "grad_clip=1.0", "compile=true",
    )  # fmt: skip
    return [
        Workload(f"resnet{18 if tiny else 50}, {side} x {side}", "images", resnet, 4 if tiny else 256, 2 if tiny else 60, None if tiny else 3000),
        Workload(f"gpt, {layers} layers, width {width}, {length} tokens, compiled", "tokens", gpt, 4 if tiny else 32, 2 if tiny else 40, None if tiny else 400_000),
    ]  # fmt: skip


def write_tokens(folder: str, *, tiny: bool) -> None:
    """Write a file of random tokens for the second workload."""
    place, vocabulary = Path(folder, "tokens"), 64 if tiny else 50304
    place.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(0).integers(0, vocabulary, 2_000 if tiny else 50_000_000)
    replace_file(
        place / "train.bin", lambda draft: drawn.astype("<u2").tofile(draft)
    )  # each node of a cluster writes it


def gpus() -> int:
    """Return the number of GPUs that the driver knows: what is pretended in Python does not count."""
    count: Callable[[], int] | None = getattr(torch._C, "_cuda_getDeviceCount", None)
    try:
        return count() if count else 0
    except RuntimeError:
        return 0


class InTurns:
    """A strategy that stops the clock at fixed intervals, for the turns of the other loops, and then lists the operations."""

    def __init__(self, strategy: Any, others: dict[str, Iterator[None]], steps: int, list_in: Path):
        self.strategy, self.others, self.steps, self.list_in = strategy, others, steps, list_in
        self.turns: list[dict[str, float]] = []
        self._done, self._since = 0, time.perf_counter()
        self._profile = profile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)

    def step(self, step: int, batches: list[Any]) -> Any:
        if self._done == self.steps and len(self.turns) <= ROUNDS:
            torch.cuda.synchronize()
            turn = {"kit": time.perf_counter() - self._since}
            self.turns.append(turn | {name: self._turn(other) for name, other in self.others.items()})
            self._done, self._since = 0, time.perf_counter()
        self._done += 1
        if len(self.turns) <= ROUNDS:
            return self.strategy.step(step, batches)
        if self._done == 2:
            self._profile.start()
        result = self.strategy.step(step, batches)
        if self._done == 1 + LISTED:
            self._list("kit")
            for name, other in self.others.items():
                self._profile.start()
                for _ in range(LISTED):
                    next(other)
                self._list(name)
        return result

    def _list(self, name: str) -> None:
        torch.cuda.synchronize()
        self._profile.stop()
        found = self._profile.key_averages().table(sort_by="self_device_time_total", row_limit=40)
        with self.list_in.open("a") as file:
            file.write(f"{LISTED} steps of {name}\n{found}\n\n")
        self._profile = profile()

    def _turn(self, other: Iterator[None]) -> float:
        began = time.perf_counter()
        for _ in range(self.steps):
            next(other)
        torch.cuda.synchronize()
        return time.perf_counter() - began


class Timed:
    """Calls a function of the loop with the device idle before and after, and notes the seconds of each call."""

    def __init__(self, name: str):
        self.name, self.called, self.seconds = name, getattr(loop, name), list[float]()

    def __call__(self, *given: Any) -> Any:
        torch.cuda.synchronize()
        began = time.perf_counter()
        try:
            return self.called(*given)
        finally:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - began)

    def __enter__(self) -> Timed:
        setattr(loop, self.name, self)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(loop, self.name, self.called)


def measure(workload: Workload, folder: str) -> tuple[bool, dict[str, Any]]:
    """Return whether this rank is the first, and the figures of a world. Collective: every rank must call it."""
    ranks, output = int(os.environ["WORLD_SIZE"]), f"{folder}/{workload.unit}-{os.environ['WORLD_SIZE']}"
    last = workload.steps * (ROUNDS + 1) + AFTER
    line = [*workload.line, *AS_A_USER, f"batch_size={workload.batch * ranks}", f"output_dir={output}"]
    config, preemption = compose([*line, f"max_steps={last}", f"checkpoint.every_steps={last - 1}"]), Preemption()
    world, strategy = join(config, preemption)
    life = Lifecycle(Path(output), preemption)
    life.meet(world, timeout_s=config.dist.timeout_s)
    with life, open_run(config=config, world=world, strategy=strategy, life=life) as (run, _):
        data = run.course.data
        worth = throughput(config, data, world)
        list_in = Path(f"{output}-operations.txt") if world.is_first else Path(os.devnull)
        turns = InTurns(strategy, others(workload, config, data, world), workload.steps, list_in)
        with Timed("log") as logged, Timed("save") as saved:
            life.end(loop.train(replace(run, strategy=turns)))  # type: ignore[arg-type]
    if life.exit_code:
        raise SystemExit(life.exit_code)
    kept = turns.turns[1:] or turns.turns  # the first turn compiles and warms up
    samples = workload.batch * workload.steps * ranks
    speeds = {name: statistics.median(samples / turn[name] for turn in kept) for name in kept[0]}
    ratios = {name: statistics.median(turn[name] / turn["kit"] for turn in kept) for name in turns.others}
    per_sample = worth.tokens or 1
    return world.is_first, {
        "workload": workload.name, "unit": workload.unit, "goal": workload.goal, "gpus": ranks,
        "speeds": {name: speed * per_sample for name, speed in speeds.items()}, "ratios": ratios,
        "mfu": worth.rates(speeds["kit"]).get("mfu"), "log_ms": 1e3 * statistics.median(logged.seconds),
        "first_save_s": saved.seconds[0], "blocked_s": saved.seconds[-1], "saved_s": last_save(Path(output)), "device": torch.cuda.get_device_name(world.device),
    }  # fmt: skip


def others(workload: Workload, config: Any, data: Any, world: Any) -> dict[str, Iterator[None]]:
    """Return the other loops, each with a model of its own on the device."""
    shape, device = data.train.input_shape, world.device

    def model() -> nn.Module:
        made: nn.Module = build(config.model, input_shape=shape, num_classes=data.num_classes)
        return made.to(device).train()

    inputs, targets = data.train.__getitems__(range(workload.batch))
    batch = inputs.to(device), targets.to(device)
    own = model()
    if workload.unit == "images":
        own = own.to(memory_format=torch.channels_last)
        batch = (batch[0].contiguous(memory_format=torch.channels_last), batch[1])
        sgd = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        reference = gpu_loops.images(model(), data.train, workload.batch, device)
        return {"bare": gpu_loops.bare(own, batch, sgd), "torchvision's manner": reference}
    own.compile()  # type: ignore[no-untyped-call]
    adam = torch.optim.AdamW(own.parameters(), lr=6e-4, fused=True)
    file = Path(config.data.values["root"], "train.bin")
    reference = gpu_loops.tokens(model(), file, workload.batch, shape[0], device, rank=world.rank)
    return {"bare": gpu_loops.bare(own, batch, adam), "nanoGPT's manner": reference}


def last_save(folder: Path) -> float:
    """Return the seconds from the beginning of the last checkpoint to its commit."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return float([line["seconds"] for line in lines if line.get("event") == "checkpoint"][-1])


def worker(unit: str, folder: str, *, tiny: bool) -> None:
    workload = next(each for each in workloads(folder, tiny=tiny) if each.unit == unit)
    is_first, row = measure(workload, folder)
    if is_first:
        print(f"\nrow {json.dumps(row)}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # like the kit: torch's threads may abort during teardown


def rows_of(line: Sequence[str], env: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows that a world prints, and show all that it prints. On the nodes without its first rank there are no rows."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    whole = {"OMP_NUM_THREADS": "1", **os.environ, **(env or {}), "PYTHONPATH": path}
    with subprocess.Popen(line, env=whole, stdout=subprocess.PIPE, text=True) as child:
        for text in child.stdout or ():
            sys.stderr.write(text)
            if text.startswith("row "):
                yield json.loads(text[4:])
    if child.returncode:
        sys.exit(f"the world of `{' '.join(line)}` failed with {child.returncode}")


def alone(nproc: int, words: Sequence[str]) -> list[str]:
    """Return the command for a world of this node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [*torchrun, "-m", "bench.gpu", *words]


def everywhere(words: Sequence[str], *, number: int) -> tuple[list[str], dict[str, str]]:
    """Return the command for the world of all nodes, and its environment. Raises ConfigError without a launcher.

    number: of the world. Each meets for itself, as a node may be there before another has left the world before.
    """
    env = dict(os.environ)
    if "SLURM_JOB_NODELIST" in env and "HEAD" not in env:  # as in slurm/job.sh
        nodes = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
        env["HEAD"] = subprocess.run(nodes, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0]
    spec = replace(here(env).spec(env), max_restarts=0)
    if isinstance(meeting := spec.rendezvous, Dynamic):
        host, _, port = meeting.endpoint.rpartition(":")
        own = (
            f"{host}:{int(port) + number}" if "HEAD" in env else meeting.endpoint
        )  # on Slurm, an agent holds the store
        spec = replace(spec, rendezvous=replace(meeting, endpoint=own, id=f"{meeting.id}.bench{number}"))
    return command(spec, words, torchrun=steady_torchrun(), module="bench.gpu"), environment(spec)


def after_kills(nproc: int, *, tiny: bool) -> list[float]:
    """Return the seconds from the SIGKILL of a random rank to the next step, of a run on `nproc` GPUs of this node."""
    from kit.loopback import nodes

    with tempfile.TemporaryDirectory() as folder:
        write_tokens(folder, tiny=tiny)
        gpt = workloads(folder, tiny=tiny)[1]
        line = [*gpt.line, *AS_A_USER, f"batch_size={gpt.batch * nproc}", "max_steps=1000000000", "log.every_steps=1"]
        line += ["checkpoint.every_steps=20", "log.tensorboard=false"]
        env = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT), str(ROOT / "tests"))))
        seconds = []
        with nodes(Path(folder, "run"), *line, nnodes="1", nproc=nproc, **env) as job:
            agent = job.start()
            for number in range(KILLS):
                job.until(lambda n=number: agent.poll() is not None or len(job.attempts()) > n, "start", timeout_s=300)
                if agent.poll() is not None:
                    sys.exit(f"the run whose ranks are to be killed has ended by itself:\n{job.log[-3000:]}")
                job.reach(job.attempts()[-1]["step"] + 25, timeout_s=300)
                victim = job.workers(agent)[number % nproc]
                seconds.append(job.next_step(partial(os.kill, victim, signal.SIGKILL), timeout_s=300))
        return seconds


COLUMNS = (
    "workload", "GPUs", "kit, per s", "per GPU", "of one GPU's", "goal", "MFU", "bare", "reference", "kit / bare", "kit / reference",
    "a log line, ms", "the first save blocks, s", "a later one, s", "committed after, s",
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]], kills: dict[int, list[float]]) -> str:
    """Return the table, in Markdown."""
    single = {row["workload"]: row["speeds"]["kit"] for row in rows if row["gpus"] == 1}
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        (bare, reference), kit = [name for name in row["speeds"] if name != "kit"], row["speeds"]["kit"]
        each, one = kit / row["gpus"], single.get(row["workload"])
        goal = "" if not row["goal"] else f"{row['goal']:,.0f}: {'met' if each >= row['goal'] else 'missed'}"
        cells = (
            row["workload"], row["gpus"], f"{kit:,.0f} {row['unit']}", f"{each:,.0f}", f"{each / one:.1%}" if one else "", goal,
            "" if row["mfu"] is None else f"{row['mfu']:.1%}", f"{row['speeds'][bare]:,.0f}", f"{row['speeds'][reference]:,.0f} ({reference})",
            f"{row['ratios'][bare]:.2f}", f"{row['ratios'][reference]:.2f}",
            f"{row['log_ms']:.2f}", f"{row['first_save_s']:.3f}", f"{row['blocked_s']:.3f}", f"{row['saved_s']:.2f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for nproc, seconds in kills.items():
        said = f"median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s, {len(seconds)} kills"
        lines.append(f"\nA rank killed on a node with {nproc} GPUs, to the next step: {said}.")
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {date.today()}"
    return "\n".join([f"Measured on {', '.join(sorted({row['device'] for row in rows}))}, {versions}:\n", *lines, ""])


def outcome_of(tests: str | None) -> dict[str, Any]:
    """Return the outcome and the seconds of each test in pytest's XML, by name; empty without a file: a run that was cut short has none."""
    if not (tests and Path(tests).exists()):
        return {}
    cases = ElementTree.parse(tests).iter("testcase")
    return {
        case.attrib["name"]: [
            next((each.tag for each in case if each.tag != "properties"), "passed"),
            float(case.attrib["time"]),
        ]
        for case in cases
    }


def carry_out(what: str, folder: str, *, tiny: bool, tests: str | None) -> None:
    """Measure the worlds, the largest first, and write table and JSON on the node that has the first rank."""
    there, rows = torch.cuda.device_count(), list[dict[str, Any]]()
    of_each = [["worker", f"--unit={unit}", f"--folder={folder}", *(["--tiny"] if tiny else [])] for unit in UNITS]
    for number, words in enumerate(of_each if what == "cluster" else ()):
        line, env = everywhere(words, number=number)
        rows += rows_of(line, env)
    if what == "cluster" and not rows:
        return  # another node goes on
    done = {row["gpus"] for row in rows}
    for nproc in dict.fromkeys((there, 1) if what == "cluster" else (1,)):
        for words in of_each if nproc not in done else ():
            rows += rows_of(alone(nproc, words))
    nproc = there if what == "cluster" else 1
    kills = {nproc: after_kills(nproc, tiny=tiny)}
    facts = {
        "is_measured": gpus() > 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": str(date.today()),
    }
    found = {**facts, "rows": rows, "seconds_after_kills": kills, "tests": outcome_of(tests)}
    Path(folder, "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    text = table(rows, kills)
    if not gpus():
        for row in rows:
            print(f"ran: {row['workload']}, {row['gpus']} processes, beside {' and '.join(row['ratios'])}")
        print(f"ran: {len(kills[nproc])} kills of {nproc} processes")
        print(NO_GPU, flush=True)
        return
    Path(folder, "gpu.md").write_text(text)
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("what", choices=["one", "cluster", "worker"], help="one GPU, or all of this job's nodes")
    parser.add_argument("--folder", help="for runs and the table; on a cluster one that all nodes see")
    parser.add_argument("--tiny", action="store_true", help="sizes that only run every line, to try it out")
    parser.add_argument("--tests", help="pytest's XML, for gpu.json in the folder")
    parser.add_argument("--unit", choices=UNITS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = str(Path(given.folder).resolve()) if given.folder else None
    if given.what == "worker":
        assert folder
        worker(given.unit, folder, tiny=given.tiny)
    if not torch.cuda.is_available():
        sys.exit(NO_GPU)
    if given.what == "cluster" and not folder:
        sys.exit("bench.gpu cluster needs --folder, one that all nodes see")
    own = folder or tempfile.mkdtemp(prefix="muster-gpu-")
    write_tokens(own, tiny=given.tiny)
    try:
        carry_out(given.what, own, tiny=given.tiny, tests=given.tests)
    except ConfigError as error:
        sys.exit(f"bench.gpu: {error}")


if __name__ == "__main__":
    main()
