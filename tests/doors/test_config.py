"""Choices by name, parts of a user's own by import path, and the README's lines."""

import re
import subprocess
import sys

import pytest
import torch
from kit import warm
from kit.job import ROOT, environment, run

from muster.errors import DataError
from muster.train.config.choices import options
from muster.train.config.compose import compose
from muster.train.config.differences import differences, to_dict
from muster.train.config.help import markdown
from muster.train.config.keys import GROUPS, Config
from muster.train.objectives.language_modeling import LanguageModeling

TINY = {
    "mlp": [],
    "convnet": [],
    "resnet18": ["data=synthetic", "data.image_shape=[3,16,16]"],
    "resnet50": ["data=synthetic", "data.image_shape=[1,72,72]"],
    "vit": ["model.num_layers=1"],
    "gpt": [
        "data=text",
        "objective=language_modeling",
        "data.block_size=16",
        "model.num_layers=1",
        "data.pattern=json/*.py",
    ],
}
SHORT = ("data.num_samples=64", "batch_size=8", "max_steps=2")


@pytest.mark.nightly(but=["mlp", "convnet", "resnet18", "vit", "gpt"])
@pytest.mark.parametrize("model", TINY)
def test_every_model_trains(tmp_path, model):
    short = SHORT if "data=synthetic" in TINY[model] else SHORT[1:]
    result = run(tmp_path / "run", f"model={model}", *TINY[model], *short, ranks=2 if model == "resnet50" else None)
    assert all(weight.isfinite().all() for weight in result.weights.values())
    assert len(result.losses) == 2 and result.lines("eval")


@pytest.mark.nightly(but=["optimizer=adamw", "scheduler=cosine", "precision=bf16"])
@pytest.mark.parametrize(
    "choice",
    [
        "optimizer=adamw",
        "scheduler=cosine",
        "scheduler=step",
        "precision=bf16",
        "precision=fp16",
        "grad_clip=0.01",
        "deterministic=true",
        "strategy.static_graph=true",
    ],
)
def test_every_choice_trains(tmp_path, choice):
    result = run(tmp_path / "run", choice, "model=convnet", "max_steps=30", "micro_batch_size=20", ranks=2)
    losses = list(result.losses.values())
    if choice != "grad_clip=0.01":
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    if choice.startswith("scheduler=cosine"):
        rates = [line["lr"] for line in result.lines("train")]
        assert rates[0] == pytest.approx(0.1) and rates[-1] < 0.002 and rates == sorted(rates, reverse=True)


def test_clipping_bounds_the_update(tmp_path):
    """With plain SGD the weights move by lr * clip at most, whatever the gradient, also when it was scaled for fp16."""
    for precision in ("fp32", "fp16"):
        one = run(
            tmp_path / f"{precision}1",
            "optimizer.momentum=0",
            "optimizer.lr=1.0",
            "grad_clip=0.01",
            f"precision={precision}",
            "max_steps=1",
        )
        two = run(
            tmp_path / f"{precision}2",
            "optimizer.momentum=0",
            "optimizer.lr=1.0",
            "grad_clip=0.01",
            f"precision={precision}",
            "max_steps=2",
        )
        moved = torch.stack([(two.weights[name] - weight).norm() for name, weight in one.weights.items()]).norm()
        assert moved == pytest.approx(0.01, rel=1e-2)
        assert one.lines("train")[0]["grad_norm"] > 0.1


@pytest.mark.nightly
def test_compile(tmp_path):
    result = run(tmp_path / "run", "compile=true", "max_steps=3", ranks=2, timeout_s=240)
    assert not [name for name in result.weights if "_orig_mod" in name or name.startswith("module.")]


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_compiled_language_model_and_its_loss_train_as_they_are(tmp_path):
    """The last batch of an epoch is smaller, and evaluation is not compiled."""
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question: " * 20)
    line = ("data=text", f"data.root={tmp_path}", "data.pattern=*.txt", "data.block_size=16", "batch_size=10")
    line += ("model=gpt", "model.num_layers=1", "model.num_heads=2", "model.hidden_dim=16", "precision=bf16")
    line += ("objective=language_modeling", "optimizer=adamw", "eval.every_steps=4")
    eager = run(tmp_path / "eager", *line, "max_steps=8")
    compiled = run(tmp_path / "compiled", *line, "max_steps=8", "compile=true", timeout_s=400)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-2)
    values = [[each["loss"] for each in result.lines("eval")] for result in (eager, compiled)]
    assert values[1] == pytest.approx(values[0], rel=1e-2)


@pytest.mark.unit
def test_the_loss_of_a_language_model_is_compiled_for_training_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda function: lambda *given: calls.append(1) or function(*given))
    loss, outputs = LanguageModeling(), torch.randn(2, 5, 7, requires_grad=True)
    targets = torch.randint(7, (2, 5))
    before = loss(outputs, targets)
    assert not calls
    loss.compile_loss()
    assert torch.equal(loss(outputs, targets), before) and len(calls) == 1
    total, count = loss.metrics(outputs, targets)["loss"]
    assert (float(total), int(count)) == (pytest.approx(10 * float(before)), 10) and len(calls) == 1
    assert torch.equal(loss(outputs, targets.byte()), before) and len(calls) == 1, "Inductor takes no bytes"
    wide = torch.randn(1, 2, 256, requires_grad=True)
    assert loss(wide, torch.tensor([[8, 255]], dtype=torch.uint8)).isfinite()
    with pytest.raises(DataError, match="label 300, but the model has 256 classes"):
        loss(wide, torch.tensor([[8, 300]]))


def test_the_default_run_learns(tmp_path):
    result = run(tmp_path / "run", ranks=2)
    assert result.lines("eval")[-1]["accuracy"] >= 0.97, result.lines("eval")


def test_parts_of_ones_own(tmp_path):
    own = [
        "data._target_=kit.parts.data.Tokens",
        "+data.noise=0.05",
        "model._target_=torch.nn.Linear",
        "+model.in_features=4",
        "+model.out_features=3",
    ]
    own += [
        "objective._target_=kit.parts.objectives.MeanSquares",
        "optimizer._target_=torch.optim.RMSprop",
        "optimizer.lr=0.01",
    ]
    result = run(tmp_path / "run", *own, "batch_size=7", "max_steps=30", ranks=2)
    assert set(result.weights) == {"weight", "bias"}
    assert result.losses[30] < result.losses[1]
    assert set(result.lines("eval")[-1]) == {"kind", "step", "epoch", "loss"}


@pytest.mark.nightly
def test_the_readme_example_runs_as_printed(tmp_path):
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n# mine\.py\n(.*?)```", text, re.S)[1]
    line = re.search(r"^\$? ?(torchrun .*mine\.Net.*)$", text, re.M)[1]
    assert len([row for row in code.splitlines() if row.strip()]) <= 10
    (tmp_path / "mine.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    arguments = line.split()[1:]
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*torchrun, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "points" / "model.pt").exists()


@pytest.mark.parametrize("experiment", [path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")])
def test_experiments_compose(experiment):
    line = [f"+experiment={experiment}", "--cfg", "job"]
    code, out = warm.run(line, [environment()], cwd=ROOT, timeout_s=60)
    assert code == 0 and f"name: {experiment}" in out, out


def test_help_lists_what_there_is():
    done = subprocess.run(
        [sys.executable, "-m", "train", "--help"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    for group in GROUPS:
        assert re.search(rf"^ *{group} +{', '.join(options(group))}$", done.stdout, re.M), group
    for key in to_dict(Config()):
        assert f"\n{key}:" in done.stdout


@pytest.mark.unit
def test_differences_name_what_matters():
    before = to_dict(compose([]))
    assert differences(before, compose(["seed=3", "epochs=20", "output_dir=elsewhere"])) == ["seed: 0 -> 3"]
    assert differences(before, compose(["strategy.bucket_cap_mb=1", "loggers=[]"])) == []
    assert differences(before, compose(["model.hidden=[7]"])) == ["model.hidden: [512] -> [7]"]


@pytest.mark.unit
def test_the_docs_say_each_key_as_the_code_has_it():
    """`muster config` prints the table."""
    assert markdown() in (ROOT / "docs/keys.md").read_text()


def test_another_target_takes_only_what_was_given_for_it(tmp_path):
    """Adam by import path at its own rate, not at SGD's; and in a yaml a value may be the replaced option's by chance."""
    assert to_dict(compose(["optimizer._target_=torch.optim.Adam"]).optimizer) == {"_target_": "torch.optim.Adam"}
    given = compose(["optimizer._target_=torch.optim.Adam", "optimizer.lr=0.1"]).optimizer
    assert given.values == {"lr": 0.1}
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/model").mkdir()
    (tmp_path / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\noptimizer: {_target_: torch.optim.Adam, lr: 0.1}\n"
    )
    (tmp_path / "conf/model/mine.yaml").write_text("_target_: kit.parts.models.Stateful\n")
    line = ("+experiment=mine", "model=mine", "max_steps=2", "--config-dir", str(tmp_path / "conf"))
    result = run(tmp_path / "run", *line)
    config = (result.folder / "config.yaml").read_text()
    assert (
        "optimizer:\n  _target_: torch.optim.Adam\n  lr: 0.1\nscheduler" in config
        and "kit.parts.models.Stateful" in config
    )
