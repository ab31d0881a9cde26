"""A sweep's runs have plain names, its table shows what differs with the best first, and its folder stands for its best run."""

import json
import os

import pytest
from kit.job import environment, run
from kit.warm import run as start

from muster.errors import ConfigError
from muster.report.results import Result, best_in, ranked
from muster.report.sweep import SweptJob, print_table
from muster.train.config.command_line import readable
from muster.train.config.sweeper import folder_of

QUIET = ("log.report=false", "log.tensorboard=false", "log.progress=none")


def rows(out):
    """The cells of a table's rows."""
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in out.splitlines() if row.startswith("│")]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A folder with a finished sweep of four runs, and its output."""
    folder = tmp_path_factory.mktemp("swept")
    line = ["-m", "name=grid", "optimizer.lr=0.001,0.3", "model.hidden=[64],[32,32]", "seed=choice(1)", "max_steps=12"]
    line += ["eval.every_steps=6", "checkpoint.best=accuracy", *QUIET]
    code, out = start(line, [environment(COLUMNS="120")], cwd=folder, timeout_s=90)
    assert code == 0, out
    return folder, out


def test_the_table_shows_what_differs_and_the_best_first(swept):
    folder, out = swept
    head = next(line for line in out.splitlines() if line.startswith("┃"))
    names = [name.strip() for name in head.strip("┃").split("┃")]
    assert names[:2] == ["optimizer.lr", "model.hidden"], "seed is the same in all"
    assert "exit code" not in names and names[-1] == ""
    found = [float(row[names.index("accuracy")]) for row in rows(out)]
    assert found == sorted(found, reverse=True) and len(found) == 4
    assert [row[-1] for row in rows(out)] == ["best", "", "", ""] and rows(out)[0][0] == "0.3"
    best = ranked([Result.of(path) for path in (folder / "runs/grid").iterdir()])[0]
    assert f"best: runs/grid/{best.folder.name} (accuracy {found[0]:.4g} at step {best.step})" in out


def test_folders_need_no_quotes(swept):
    folder, _ = swept
    names = {path.name for path in (folder / "runs/grid").iterdir()}
    assert names == {f"lr-{lr}_hidden-{width}_seed-1" for lr in ("0.001", "0.3") for width in ("64", "32-32")}
    for name in names:
        assert [each.value() for each in readable([f"init_from=runs/grid/{name}"])] == [f"runs/grid/{name}"]


def test_a_sweep_s_folder_stands_for_its_best_run(swept, tmp_path):
    folder, _ = swept
    best = ranked([Result.of(path) for path in (folder / "runs/grid").iterdir()])[0]
    code, out = start(
        ["runs/grid", "--json"], [environment()], cwd=folder, timeout_s=60, module="muster.train.evaluate"
    )
    said, values = out.splitlines()
    assert code == 0 and said.startswith("muster: runs/grid holds 4 runs: taking runs/grid/lr-0.3"), out
    assert json.loads(values)["accuracy"] == pytest.approx(best.values["accuracy"])
    assert json.loads(values)["weights"].endswith(f"{best.folder.name}/checkpoints/step-{best.step:08d}")

    width = "64" if "hidden-64" in best.folder.name else "32,32"
    line = (f"init_from={folder}/runs/grid", f"model.hidden=[{width}]", "max_steps=1", "optimizer.lr=1e-9")
    result = run(tmp_path / "run", *line)
    assert result.lines("eval")[-1]["accuracy"] == pytest.approx(best.values["accuracy"]), result.out
    assert f"taking {folder}/runs/grid/{best.folder.name}, the best by accuracy" in result.out


@pytest.mark.unit
def test_names_of_a_sweep_s_folders():
    assert folder_of(["optimizer.lr=0.1", "model.hidden=[7, 8]"]) == "lr-0.1_hidden-7-8"
    assert folder_of(["model.dropout=0.1", "+data.dropout=0.2"]) == "model.dropout-0.1_data.dropout-0.2"
    assert folder_of(["model=convnet", "own.x='plain'"]) == "model-convnet_x-plain"
    assert folder_of([]) == ""
    digest = folder_of(["init_from=https://me:secret@host/x?y"])
    assert "secret" not in digest and digest.startswith("init_from-https_")


@pytest.mark.unit
def test_runs_are_ranked_by_loss_where_no_metric_was_chosen(tmp_path):
    evaluations = {"a": 0.3, "b": 0.1, "c": None}
    for name, loss in evaluations.items():
        (tmp_path / name).mkdir()
        line = {"kind": "eval", "step": 4, "epoch": 0, "loss": loss, "accuracy": 0.5}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/metrics.jsonl").write_text("")
    results = [Result.of(tmp_path / name) for name in "abcd"]
    assert [result.folder.name for result in ranked(results)] == ["b", "a", "c", "d"]
    best, line = best_in(tmp_path)
    assert best.folder == tmp_path / "b" and "the best by loss (0.1 at step 4)" in line
    assert best_in(tmp_path / "b") is None and best_in(tmp_path / "nowhere") is None
    for name in "ab":
        os.remove(tmp_path / name / "metrics.jsonl")
    with pytest.raises(ConfigError, match="none has a finite loss"):
        best_in(tmp_path)


@pytest.mark.unit
def test_a_job_that_failed_comes_last_and_is_never_the_best(tmp_path, capsys):
    print_table([SweptJob(None, 2, {"lr": "bad"}), SweptJob(None, 2, {"lr": "worse"})])
    out = capsys.readouterr().out
    assert [row[:2] for row in rows(out)] == [["bad", "2"], ["worse", "2"]] and "best" not in out


LAUNCHER = """
from hydra.core.config_store import ConfigStore
from hydra._internal.core_plugins.basic_launcher import BasicLauncher

class Own(BasicLauncher):
    pass

ConfigStore.instance().store(group="hydra/launcher", name="own", node={"_target_": "hydra_plugins.own.Own"})
"""


def test_another_launcher_is_refused_with_what_to_write(tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins/own.py").write_text(LAUNCHER)
    for name in ("submitit_local", "own"):
        line = ["-m", f"hydra/launcher={name}", "optimizer.lr=0.1,0.2", "max_steps=1", *QUIET]
        env = environment()
        env["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
        code, out = start(line, [env], cwd=tmp_path, timeout_s=60)
        assert code == 2 and len(out.splitlines()) == 1, out
        assert "hydra/launcher=" in out and "python slurm/submit.py -m" in out and "cluster=local" in out
    code, out = start(["hydra/sweepr=ax"], [environment()], cwd=tmp_path, timeout_s=60)
    assert code == 2 and "did you mean hydra/sweeper?" in out and "hydra/launcher" in out
