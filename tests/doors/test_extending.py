"""A part is one file and, where it is a choice, one yaml: each is added to a copy of the kit in which nothing is edited."""

import shutil
from pathlib import Path

from kit.job import ROOT, run

FILES = {
    "train/data/squares.py": """
import torch


class Squares(torch.utils.data.TensorDataset):
    num_classes = 2

    def __init__(self, *, train: bool, size: int):
        points = torch.rand(size, 2, generator=torch.Generator().manual_seed(int(train)))
        super().__init__(points, (points.sum(1) > 1).long())
""",
    "conf/data/squares.yaml": "_target_: muster.train.data.squares.Squares\nsize: 200\n",
    "train/models/line.py": """
from torch import nn


class Line(nn.Linear):
    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int, bias: bool):
        super().__init__(input_shape[0], num_classes, bias=bias)
""",
    "conf/model/line.yaml": "_target_: muster.train.models.line.Line\nbias: true\n",
    "train/strategies/patient.py": '''
import time

from muster.train.strategies.single import Single


class Patient(Single):
    """Waits a little in each step."""

    def __init__(self, *, pause_s: float):
        self.pause_s = pause_s

    def step(self, step, batches):
        time.sleep(self.pause_s)
        return super().step(step, batches)
''',
    "conf/strategy/patient.yaml": "_target_: muster.train.strategies.patient.Patient\npause_s: 0.001\n",
    "muster/loggers/tally.py": '''
from collections import Counter
from pathlib import Path

from muster.loggers.base import Logger


class Tally(Logger):
    """Counts the records of each kind."""

    def __init__(self, folder: Path):
        self.path, self.counts = folder / "tally.txt", Counter()

    def log(self, record):
        self.counts[record["kind"]] += 1
        self.path.write_text(str(dict(self.counts)))
''',
    "conf/loggers/tally.yaml": "# @package loggers.tally\n_target_: muster.loggers.tally.Tally\n",
}
FILES["muster/checkpoint/backends/sqlite.py"] = (ROOT / "tests/kit/parts/backends.py").read_text()


def test_each_part_is_one_file_and_at_most_one_yaml(tmp_path):
    kit = tmp_path / "kit"
    for room in ("muster", "train", "conf"):
        shutil.copytree(ROOT / room, kit / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        assert not (kit / name).exists()
        (kit / name).write_text(text)
    storage = f"checkpoint.storage='muster.checkpoint.backends.sqlite.Sqlite://{tmp_path}/checkpoints.db'"
    line = ("data=squares", "model=line", "strategy=patient", "loggers=[tensorboard,tally]", storage)
    env = {"PYTHONPATH": str(kit)}
    run(tmp_path / "run", *line, "max_steps=10", "data.size=150", env=env)
    result = run(tmp_path / "run", *line, "max_steps=20", "data.size=150", env=env)
    assert result.events("resume")[0]["step"] == 10 and len(result.losses) == 20
    assert set(result.weights) == {"weight", "bias"} and (tmp_path / "checkpoints.db").stat().st_size > 0
    assert "'train': 10" in (result.folder / "tally.txt").read_text()
    mistake = run(tmp_path / "other", *line, "model.bias=perhaps", ok=False, env=env)
    assert mistake.code == 2 and "model.bias=perhaps" in mistake.said[0], mistake.out


def test_a_logger_that_fails_never_fails_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Broken:\n    def log(self, record):\n        raise RuntimeError('the server is gone')\n"
        "    def advance(self, step):\n        pass\n    def close(self):\n        raise OSError('still gone')\n"
    )
    result = run(tmp_path / "run", "+loggers.mine._target_=mine.Broken", "max_steps=3", "epochs=1")
    assert len(result.losses) == 3 and result.outcome["outcome"] == "done"
    assert [line for line in result.said if "Broken has failed" in line] == result.said, result.out


def test_a_project_with_yaml_of_its_own(tmp_path):
    """examples/points, as its page says; the folder lies outside of the kit."""
    shutil.copytree(ROOT / "examples/points", tmp_path / "points")
    line = ("+experiment=points", "epochs=12", "--config-dir", "conf")
    result = run(tmp_path / "points/run", *line, ranks=2, cwd=tmp_path / "points", quiet=False)
    assert result.lines("eval")[-1]["accuracy"] > 0.9, result.lines("eval")
    assert Path(result.folder / "report.html").exists()
