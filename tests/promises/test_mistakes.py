"""A user's mistake in a part of their own is one line with the place in their code, and nothing comes after it."""

import re
from pathlib import Path

import pytest
from kit.job import ROOT, run
from torch._utils import KeyErrorMessage

from muster.code_location import described, kind_and_message

SOURCE = ROOT / "tests/kit/parts/mistakes.py"
OWN = "kit.parts.mistakes"
BASE = ("batch_size=8", "max_steps=3", f"data._target_={OWN}.Data", f"model._target_={OWN}.Net")


def model(name):
    return f"model._target_={OWN}.{name}"


def data(name):
    return f"data._target_={OWN}.{name}"


def loss(name):
    return f"objective._target_={OWN}.{name}"


# The mark of the line to be named -> overrides, exit code, what the line says beside the place.
MISTAKES = {
    "forgotten return": ([model("NoReturn")], 2, "NoReturn.forward returns None", "write `return"),
    "tuple": ([model("Tuple")], 2, "a tuple of (a Tensor [8, 3] float32, a Tensor [8, 4] float32)", "objective._target_="),
    "hugging face": ([model("HuggingFace")], 2, "returns a SimpleNamespace", "write objective=model_loss"),
    "cut off": ([model("Detached")], 2, "a Tensor [8, 3] float32 without a gradient", "remove detach()"),
    "wrong shape": (
        [model("Narrow")],
        2,
        "layer = Linear(in_features=10, out_features=3, bias=True) got a Tensor [8, 4] float32",
        "write in_features=4",
    ),
    "no picture": ([model("Convolving")], 2, "0 = Conv2d(3, 4, ", "fix that line, or the shape of the data"),
    "one input of two": ([model("Several")], 2, "takes (x, mask)", "loader.batch="),
    "raises in forward": ([model("Raising")], 1, "ValueError: no such thing", "outcome.json"),
    "raises in the constructor": ([model("Unbuilt")], 1, "AttributeError", "outcome.json"),
    "vector": ([loss("vector")], 2, "returns a Tensor [8] float32 as the loss", "write `return loss.mean()`"),
    "none": ([loss("none")], 2, "returns None as the loss", "write `return"),
    "number": ([loss("number")], 2, "returns a float as the loss", "without .item()"),
    "raises in the loss": ([loss("raising")], 1, "IndexError", "outcome.json"),
    "sums by name": ([loss("Bare")], 2, "Bare.metrics returns a Tensor [] float32", "write `return {name: sum"),
    "dict": ([data("Dicts")], 2, "a dict of points [8, 4] float32, label [8] int64", "loader.batch="),
    "float64": ([data("Doubles")], 2, "a Tensor [8, 4] float64", "write .float()"),
    "labels out of range": ([data("Beyond")], 3, "label 3, but the model has 3 classes, 0 to 2", "num_classes"),
    "each with each": (
        [data("Values"), model("OneColumn"), "objective._target_=torch.nn.MSELoss"],
        2,
        "MSELoss would compare each with each of the targets, a Tensor [8] float32",
        "write .squeeze(-1) in the model",
    ),
    "float labels": ([data("FloatLabels")], 3, "labels [8] int64, but the data has [8] torch.float32", "write .long()"),
    "classes": ([data("Counted")], 3, "classes is 3", "write self.num_classes = 3"),
    "no number of classes": (
        [data("Uncounted"), model("ForClasses")],
        2,
        "needs num_classes, which the data set Uncounted (mistakes.py",
        "write self.num_classes = ... there, or +model.num_classes=",
    ),
    "no length": ([data("NoLength")], 3, "no __len__", "write `def __len__(self)`"),
    "unreadable": ([data("Unreadable")], 3, "ValueError: no such sample", "loader.on_bad_sample=skip"),
    "raises in the data set": ([data("Misspelt")], 1, "has no attribute 'points' (reading sample ", "outcome.json"),
    "raises in a transform": ([data("Transformed")], 1, "TypeError: unsupported operand", "outcome.json"),
    "raises RuntimeError in the data set": ([data("Stuck")], 1, "RuntimeError: no such decoder (reading sample 21) (", "outcome.json"),
    "pictures": (
        [data("Pictures")],
        3,
        "a tuple of (a PIL Image, a Tensor [] int64)",
        "write +data.transform._target_=torchvision.transforms.ToTensor",
    ),
    "ragged": ([data("Ragged")], 3, "a Tensor [1] float32", "loader.collate_fn="),
    "hole": ([data("Hole")], 3, " is None", "write `return"),
    "missing file": ([data("Absent")], 3, "cannot read /nowhere/points.csv", "set +data.path to where"),
    "missing file of a sample": ([data("AbsentLate")], 3, "FileNotFoundError", "loader.on_bad_sample=skip"),
    "forgotten return in collate_fn": ([f"loader.collate_fn={OWN}.forgetful"], 3, "loader.collate_fn returns None", "write `return"),
    "three parts of collate_fn": ([f"loader.collate_fn={OWN}.three"], 3, "loader.collate_fn returns 3 parts", "loader.batch="),
    "float64 of collate_fn": ([f"loader.collate_fn={OWN}.doubles"], 2, "a Tensor [8, 4] float64", "write .float()"),
    "raises in collate_fn": ([f"loader.collate_fn={OWN}.collate"], 1, "TypeError: list indices", "outcome.json"),
    "raises in the adapter": ([f"loader.batch={OWN}.adapter"], 1, "TypeError: list indices", "outcome.json"),
    "raises in a callback": ([f"+callbacks.a._target_={OWN}.Hook"], 1, "no_such_thing", "outcome.json"),
    "raises in a metric": ([f"+metrics.a._target_={OWN}.Metric"], 1, "has no attribute 'total'", "outcome.json"),
}  # fmt: skip


def place(mark):
    lines = SOURCE.read_text().splitlines()
    [number] = [at for at, line in enumerate(lines, 1) if line.endswith(f"# here: {mark}")]
    return f"mistakes.py:{number}"


def check(result, mark, *, code, said=1):
    """`said`: of the lines of the kit; the last one, and nothing after it, names the place and what to do."""
    _, expected, given, remedy = MISTAKES[mark]
    assert result.code == code, result.out
    assert len(result.said) == said, result.out
    for text in (place(mark), given, remedy):
        assert text in result.said[-1], f"{text} is not in: {result.said[-1]}"
    assert result.outcome["exit_code"] == expected
    if expected == 1:
        assert Path(re.search(r"traceback is in (\S+)", result.said[-1])[1]) == result.folder / "outcome.json"
        assert "Traceback (most recent call last)" in result.outcome["traceback"]
        assert f'{SOURCE.name}", line {place(mark).partition(":")[2]}, in' in result.outcome["traceback"]


@pytest.mark.nightly(
    but=[
        "no picture",
        "raises in forward",
        "none",
        "dict",
        "labels out of range",
        "float labels",
        "no length",
        "raises in the data set",
        "forgotten return in collate_fn",
        "raises in a callback",
        "raises in a metric",
        "raises in the constructor",
    ]
)
@pytest.mark.parametrize("mark", MISTAKES)
def test_a_mistake_is_one_line_with_its_place(tmp_path, mark):
    overrides, code, *_ = MISTAKES[mark]
    result = run(tmp_path / "run", *BASE, *overrides, ok=False)
    check(result, mark, code=code)
    assert "Traceback" not in result.out and 'File "' not in result.out
    assert result.out.splitlines()[-1] == result.said[-1], "something comes after it"


def test_a_layer_without_a_deterministic_form_is_named_with_the_key(tmp_path):
    refused = run(tmp_path / "run", *BASE, model("Puts"), "deterministic=true", ok=False)
    assert refused.code == 2 and len(refused.said) == 1, refused.out
    assert "put_ has no deterministic form" in refused.said[0] and "deterministic=false" in refused.said[0]
    run(tmp_path / "allowed", *BASE, model("Puts"))


@pytest.mark.nightly
def test_a_compiler_that_is_missing_is_one_line(tmp_path):
    env = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    refused = run(tmp_path / "run", "compile=true", "max_steps=2", "eval.every_steps=off", ok=False, env=env, cold=True)
    assert refused.code == 2 and len(refused.said) == 1 and "finds no compiler that works" in refused.said[0], (
        refused.out
    )


def test_what_is_never_evaluated_is_said(tmp_path):
    result = run(tmp_path / "run", *BASE, data("Untested"))
    notes = [event["text"] for event in result.events("note")]
    assert len(notes) == 1 and "nothing is evaluated" in notes[0] and "no parameter train" in notes[0], result.out
    assert not result.lines("eval")
    empty = run(tmp_path / "empty", *BASE, data("EmptyTest"), ok=False)
    assert empty.code == 3 and "no test samples" in empty.said[0] and "eval.every_steps=off" in empty.said[0], empty.out


@pytest.mark.parametrize("never", [data("Untested"), "eval.every_steps=off"])
@pytest.mark.parametrize("needs", ["checkpoint.best=accuracy", "callbacks=[early_stopping]"])
def test_what_needs_an_evaluation_is_refused_where_none_comes(tmp_path, never, needs):
    result = run(tmp_path / "run", *BASE, never, needs, ok=False)
    assert result.code == 2 and len(result.said) == 1, result.out
    for text in (needs.partition("=")[0], never.rpartition("=")[2], "needs evaluations"):
        assert text in result.said[0]


def test_a_batch_of_samples_left_out_by_collate_fn_is_no_mistake(tmp_path):
    """Samples that are None are its affair."""
    run(tmp_path / "run", *BASE, data("Hole"), f"loader.collate_fn={OWN}.leave_out", "eval.every_steps=off")


def test_a_count_may_be_a_plain_number(tmp_path):
    result = run(tmp_path / "run", *BASE, loss("Counts"), "log.train_metrics=true")
    assert 0 <= result.lines("eval")[-1]["accuracy"] <= 1 and result.lines("eval")[-1]["per_class"] > 0


@pytest.mark.nightly
def test_a_metric_that_takes_no_dict_is_named(tmp_path):
    f1 = ("+metrics.f1._target_=torchmetrics.F1Score", "+metrics.f1.task=multiclass", "+metrics.f1.num_classes=3")
    result = run(tmp_path / "run", *BASE, model("Named"), loss("named"), *f1, ok=False)
    assert result.code == 2 and len(result.said) == 1, result.out
    for text in ("metrics.f1", "a dict of class [30, 3] float32", "picks the tensors"):
        assert text in result.said[0].replace("[8, 3]", "[30, 3]"), result.said[0]


@pytest.mark.parametrize(
    "kind, mark", [("Misspelt", "raises in the data set"), ("Stuck", "raises RuntimeError in the data set")]
)
def test_a_worker_of_the_loader_is_no_other_case(tmp_path, kind, mark):
    result = run(tmp_path / "run", *BASE, data(kind), "loader.num_workers=1", ok=False)
    check(result, mark, code=1)
    assert "Traceback" not in result.out and "DataLoader worker" not in result.said[0]


def test_a_picture_is_named_also_where_the_model_asks_for_the_shape(tmp_path):
    given = (data("Pictures"), "model._target_=muster.train.models.mlp.Mlp", "+model.hidden=[8]")
    result = run(tmp_path / "run", *BASE, *given, ok=False)
    assert result.code == 3 and len(result.said) == 1 and "a PIL Image" in result.said[0], result.out
    assert place("pictures") in result.said[0] and "torchvision.transforms.ToTensor" in result.said[0]


@pytest.mark.nightly(but=["wrong shape"])
@pytest.mark.parametrize("mark", ["forgotten return", "wrong shape", "labels out of range", "raises in forward"])
def test_on_two_ranks_the_one_cause_stands_last(tmp_path, mark):
    """torchrun's own report comes after every failure: what it ends with is the cause."""
    overrides, *_ = MISTAKES[mark]
    result = run(tmp_path / "run", *BASE, *overrides, ranks=2, ok=False)
    assert len(result.said) == 1 and place(mark) in result.said[0], result.out
    assert result.out.count("Traceback (most recent call last)") == 1, "of torchrun itself"
    *_, last, border = result.out.splitlines()
    assert last.lstrip().startswith("traceback : ") and place(mark) in last and set(border) == {"="}, result.out


def test_the_rank_that_failed_is_the_root_cause(tmp_path):
    """Rank 0 has lost it, and torchrun's report would begin with whoever wrote first."""
    given = (model("Raising"), "+model.rank=1", "+model.at=2")
    result = run(tmp_path / "run", *BASE, *given, ranks=2, ok=False)
    failed, saved = result.said
    assert place("raises in forward") in failed and "rank 0 has saved step 1" in saved, result.out
    assert result.outcome["rank"] == 1, result.out
    assert place("raises in forward") in result.out.splitlines()[-2], result.out
    assert "ValueError: no such thing" in result.out.splitlines()[-2]


def test_an_error_is_recorded_without_the_cause_of_an_attempt_before(tmp_path):
    run(tmp_path / "run", *BASE, model("Raising"), "+model.at=2", ok=False)
    second = (model("Raising"), "+model.at=2", f"+callbacks.a._target_={OWN}.Hook", "checkpoint.accept_changes=true")
    result = run(tmp_path / "run", *BASE, *second, ok=False)
    assert "no_such_thing" in result.outcome["error"] and result.code == 1, result.out
    assert "no such thing" not in str(result.outcome.get("cause", "")), result.outcome


def test_a_mistake_that_comes_again_is_not_restarted_for_ever(tmp_path):
    result = run(tmp_path / "run", *BASE, model("Raising"), ranks=1, torchrun=("--max-restarts=9",), ok=False)
    assert result.outcome["exit_code"] == 7 and len(result.events("start")) == 2, result.out
    assert place("raises in forward") in result.said[-1] and "the same error at the same place" in result.said[-1]


@pytest.mark.unit
def test_values_are_described_in_a_few_words():
    assert described(None) == "None"
    assert described([1, "a"]) == "a list of (an int, a str)"
    assert described({str(n): n for n in range(9)}).endswith("3 int, ...")
    assert described((None,) * 9) == "a tuple of (None, None, None, None, ...)"


@pytest.mark.unit
def test_the_message_of_a_worker_s_error_is_the_first_one():
    text = 'Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x["b"]\nKeyError: \'b\'\n'
    assert kind_and_message(KeyError(KeyErrorMessage(text))) == ("KeyError", "'b'")
