"""`muster.load` and `muster export`: a run's model with its weights, without the run's data and ranks."""

import json
import subprocess
import sys

import pytest
import torch
from kit.job import environment, run
from kit.parts.exported import Moody, Net
from torch import nn

import muster
from muster.errors import ConfigError
from muster.train.data.digits import Digits
from muster.train.export import main as export
from muster.train.load import main as show

GAN = """
import torch, muster
from torch import nn

with muster.Job("run", tensorboard=False) as job:
    generator, critic, data = nn.Linear(2, 3), nn.Linear(3, 1), torch.randn(8, 2)
    both = [*generator.parameters(), *critic.parameters()]
    job.track(generator=generator, critic=critic, optimizer=torch.optim.Adam(both))
    for batch in job.batches(torch.utils.data.TensorDataset(data), batch_size=4, epochs=1):
        critic(generator(batch[0])).mean().backward()
        job.step()
torch.save([generator.state_dict(), critic.state_dict()], "expected.pt")
"""


def python(folder, *line):
    return subprocess.run(
        [sys.executable, *line], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )


def accuracy(model):
    """Of the test split of the digits, computed here."""
    test = Digits(train=False, augment=False)
    images, labels = (
        torch.stack([torch.as_tensor(test[index][part]) for index in range(len(test))]) for part in (0, 1)
    )
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


@pytest.mark.nightly
def test_a_model_has_the_accuracy_that_the_run_evaluated_at_each_checkpoint(tmp_path, monkeypatch, capsys):
    line = ("model=convnet", "model.width=4", "callbacks=[ema]", "callbacks.ema.decay=0.8", "max_steps=12")
    often = ("eval.every_steps=4", "checkpoint.every_steps=4", "checkpoint.best=loss", "checkpoint.keep=9")
    trained = run(tmp_path / "run", *line, *often, ranks=2)
    monkeypatch.chdir("/")  # neither the folder nor the data is this process's
    values = {each["step"]: each for each in trained.lines("eval")}
    best = json.loads((trained.folder / "best.json").read_text())["step"]
    for checkpoint, step in ((None, 12), ("newest", 12), (4, 4), ("step-00000008", 8), ("best", best)):
        model = muster.load(trained.folder, checkpoint=checkpoint)
        assert not model.training and accuracy(model) == pytest.approx(values[step]["accuracy"]), checkpoint
    assert show([str(trained.folder), "--checkpoint", "4"]) == 0
    shown = capsys.readouterr().out
    assert "ConvNet(num_classes=10, input_shape=[1, 8, 8], width=4)" in shown and "float32 [B, 1, 8, 8]" in shown
    assert f"accuracy {values[4]['accuracy']:.6g}" in shown and "step-00000004, step 4" in shown
    # While a finished run trains on, model.pt is older than its checkpoints. And of a run of before, the data are read.
    (trained.folder / "outcome.json").write_text(json.dumps({**trained.outcome, "outcome": "running"}))
    (trained.folder / "model.json").unlink()
    assert show([str(trained.folder)]) == 0 and "checkpoints/step-00000012, step 12" in capsys.readouterr().out
    filled = muster.load(trained.folder, into=type(model)(input_shape=[1, 8, 8], num_classes=10, width=4))
    assert accuracy(filled) == accuracy(muster.load(trained.folder)) == pytest.approx(values[12]["accuracy"])
    with pytest.raises(ConfigError, match=r"is \[4, 1, 3, 3\] there and \[8, 1, 3, 3\] in this model"):
        muster.load(trained.folder, into=type(model)(input_shape=[1, 8, 8], num_classes=10, width=8))


@pytest.mark.nightly(but=["fsdp"])
@pytest.mark.parametrize(
    "line", [("strategy=fsdp",), ("strategy=pipeline",), ("strategy=local_sgd",)], ids=lambda line: line[0][9:]
)
def test_a_model_that_was_in_pieces_is_one(tmp_path, line):
    trained = run(tmp_path / "run", *line, "model.hidden=[16]", "max_steps=6", "checkpoint.every_steps=3", ranks=2)
    done, newest, early = (muster.load(trained.folder, checkpoint=each) for each in (None, "newest", 3))
    assert accuracy(newest) == pytest.approx(trained.lines("eval")[-1]["accuracy"])
    for name, value in done.state_dict().items():
        assert torch.equal(value, trained.weights[name]) and torch.equal(value, newest.state_dict()[name])
    assert not torch.equal(early[1].weight, done[1].weight)


OWN = ("data._target_=kit.parts.exported.Points", "max_steps=3", "batch_size=16")


def test_a_model_of_ones_own_is_pasted_into_a_notebook_and_exported(tmp_path, monkeypatch, capsys):
    trained = run(tmp_path / "run", *OWN, "model._target_=kit.parts.exported.Net", "+model.width=4")
    monkeypatch.chdir(tmp_path)
    assert show(["run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "kit.parts.exported.Net(num_classes=2, width=4)" in shown[0]
    points, kinds = torch.randn(7, 3), torch.arange(7) % 5
    torch.save((points, kinds), "inputs.pt")
    use = "import torch; torch.save((model(*torch.load('inputs.pt')), model.seen), 'outputs.pt')"
    done = python(tmp_path, "-c", "\n".join([*shown[-2:], use]))
    assert done.returncode == 0, done.stderr
    outputs, seen = torch.load("outputs.pt")
    assert seen == 48, "a buffer that only checkpoints have"
    expected = points @ trained.weights["hidden.weight"].T + trained.weights["hidden.bias"]
    expected = torch.tanh(expected + trained.weights["kinds.weight"][kinds])
    torch.testing.assert_close(outputs, expected @ trained.weights["head.weight"].T + trained.weights["head.bias"])

    assert export(["run"]) == 0 and "{points: float32 [B, 3], kind: int64 [B]}" in capsys.readouterr().out
    program = torch.export.load("run/model.pt2").module()
    torch.testing.assert_close(program(points=points, kind=kinds), outputs)
    reference = pytest.importorskip("onnx.reference").ReferenceEvaluator("run/model.onnx")
    [found] = reference.run(None, {"points": points.numpy(), "kind": kinds.numpy()})
    torch.testing.assert_close(torch.tensor(found), outputs.detach())


def test_what_is_exported_is_compared_with_the_model_and_what_cannot_be_is_said(tmp_path, monkeypatch, capsys):
    trained = run(
        tmp_path / "run", *OWN, "model._target_=kit.parts.exported.Moody", "loader.batch=kit.parts.exported.two"
    )
    kept = {path.name for path in trained.folder.iterdir()}
    assert export([str(trained.folder)]) == 2
    said = capsys.readouterr()
    assert "model.pt2 is not written" in said.err and "that differ by" in said.err and len(said.err.splitlines()) == 1
    assert {path.name for path in trained.folder.iterdir()} == kept
    monkeypatch.setattr(Moody, "forward", Net.forward)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert export([str(trained.folder), "--output", str(tmp_path / "x.onnx")]) == 2
    assert "ONNX needs onnxscript: pip install" in capsys.readouterr().err and not (tmp_path / "x.onnx").exists()
    assert export([str(trained.folder)]) == 0
    said = capsys.readouterr()
    assert "model.pt2: inputs (float32 [B, 3], int64 [B])" in said.out and "no ONNX file: ONNX needs" in said.err
    assert {path.name for path in trained.folder.iterdir()} == {*kept, "model.pt2"}


@pytest.mark.nightly
def test_a_jobs_run_fills_the_modules_of_its_script(tmp_path, monkeypatch, capsys):
    done = python(tmp_path, "-c", GAN)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    expected = torch.load("expected.pt")
    made = muster.load("run", into={"generator": nn.Linear(2, 3), "critic": nn.Linear(3, 1)})
    for module, state in zip(made.values(), expected, strict=True):
        assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(
        muster.load("run", into={"critic": nn.Linear(3, 1)}, checkpoint=2)["critic"].weight, made["critic"].weight
    )
    assert show(["run"]) == 0
    assert 'modules = muster.load("run", into={"critic": critic, "generator": generator})' in capsys.readouterr().out
    for into, said in (
        (None, "is a run of muster.Job, whose model is built by its own script"),
        (nn.Linear(2, 3), "has no module named model, but critic, generator"),
        ({"writer": nn.Linear(2, 3)}, "has no module writer: it has critic, generator"),
        ({"critic": nn.Linear(2, 1)}, r"weight is \[1, 3\] there and \[1, 2\] in this model"),
        ({"critic": "critic"}, "into=str is not a torch.nn.Module"),
    ):
        with pytest.raises(ConfigError, match=said):
            muster.load("run", into=into)
    assert export(["run"]) == 2 and "is a run of muster.Job" in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.parametrize("tool", [show, export])
@pytest.mark.parametrize("given", [["nowhere"], ["nowhere", "--checkpoint", "best"]])
def test_a_folder_without_a_run_is_refused_in_one_line(tool, given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool(given) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "nowhere is not a run's folder: it has no readable config.yaml" in said[0]
