"""A newcomer: an empty folder, an environment with nothing of this repository but its wheel, and `muster init`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from kit.job import Job, Result
from kit.ledger import assert_exact

STEPS, BATCH = 160, 10
LOOP = f"""\
import json, os, pathlib, time
import torch
import muster


class Curve(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        x = torch.tensor([index / 500 - 1])
        return index, x, torch.sin(3 * x)


def note(job, attempt, indices):
    line = {{"step": job.steps_done, "rank": job.rank, "attempt": attempt, "time": time.time(), "samples": indices.tolist()}}
    with open(f"runs/ledger/{{attempt}}-{{job.rank}}.jsonl", "a") as file:
        print(json.dumps(line), file=file)


def pause():
    told = pathlib.Path("runs/pace")
    time.sleep(float(os.environ.get("PACE") or (told.read_text() if told.exists() else 0.1)))


os.makedirs("runs/ledger", exist_ok=True)
with muster.Job("runs/curve", save_every=20, log_every=1, tensorboard=False) as job:
    net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(job.device)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    attempt = job.sum(time.time())
    for indices, x, y in job.batches(Curve(), batch_size={BATCH}, max_steps={STEPS}):
        note(job, attempt, indices)
        pause()
        loss = torch.nn.functional.mse_loss(model(x), y)
        (loss * job.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(loss=loss)
"""


def built(source: Path, kind: str, place: Path) -> Path:
    """Build a distribution of `source`, an sdist or a wheel, in the empty folder `place`."""
    line = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(place), str(source)]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    [found] = place.iterdir()
    return found


def installed(wheel: Path, place: Path) -> None:
    """Make a virtual environment with the wheel and this one's other packages; its `muster` is the wheel's alone."""
    venv.create(place, with_pip=False, symlinks=True)
    packages = next(place.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, module in (("muster", "muster.__main__"), ("torchrun", "torch.distributed.run")):
        # As pip writes it where the path of the interpreter has a blank.
        start = f"#!/bin/sh\n'''exec' \"{place / 'bin/python'}\" \"$0\" \"$@\"\n' '''\n"
        text = f"{start}import sys\nfrom {module} import main\nsys.exit(main())\n"
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)


class Newcomer(Job):
    """A project that `muster init` has written, whose example is replaced by a loop of the newcomer's own."""

    def __init__(self, folder: Path, wheel: Path, *words: str):
        self.project = folder / "My job"
        self.project.mkdir()
        self.runs = self.project / "runs"
        super().__init__(self.runs / "curve")
        installed(wheel, self.project / ".venv")
        self.said = self.shell(" ".join(("muster init", *words)))
        (self.project / "my_loop.py").write_text(LOOP)
        imported = self.shell("python -c 'import muster, muster.train; print(muster.__file__, muster.train.__file__)'")
        assert imported.count(str(self.project)) == 2, "of the wheel, and not of this repository"

    @property
    def log(self) -> str:
        """What the processes have printed."""
        found = [*self.project.parent.glob("*.log"), *self.project.glob("slurm/logs/*")]
        return "\n".join(path.read_text() for path in found if path.is_file())

    def printed(self, row: str) -> str:
        """Return the command of a row of MUSTER.md."""
        found = re.search(rf"^\| {row} \| `(.*?)` \|$", (self.project / "MUSTER.md").read_text(), re.MULTILINE)
        assert found, row
        return found[1]

    def shell(self, command: str, *, cwd: Path | None = None, **more: str) -> str:
        """Run a command in the project as in a terminal, and return its output."""
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env = {**kept, "PATH": f"{self.project / '.venv/bin'}:{kept['PATH']}", "OMP_NUM_THREADS": "1", **more}
        done = subprocess.run(
            ["bash", "-c", command], cwd=cwd or self.project, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def undisturbed(self) -> Result:
        """The same loop by its printed command on this machine, in a folder of its own."""
        place = self.project.parent / "undisturbed"
        place.mkdir()
        (place / "my_loop.py").write_text(LOOP)
        self.shell(self.printed("this machine"), cwd=place, PACE="0")
        return Result(0, "", place / "runs/curve", 0)

    def moves_to(self, volume: Path) -> None:
        """Look for the run on a volume, which the containers see as runs/."""
        self.runs, self.folder = volume, volume / "curve"

    def assert_exact(self) -> None:
        """Assert that the run is done, and that no step was repeated or lost."""
        assert self.result().outcome["outcome"] == "done", self.log
        assert_exact(self.runs / "ledger", steps=STEPS, batch_size=BATCH)
        assert list(self.result().losses) == list(range(1, STEPS + 1))
        assert self.result().events("resume")
