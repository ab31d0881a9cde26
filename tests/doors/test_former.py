"""Import paths of earlier versions."""

import subprocess
import sys

import pytest
from kit.job import ROOT, environment

import muster.plan
import muster.train.loop
from muster.train.former import present


@pytest.mark.unit
@pytest.mark.parametrize(
    "before, now",
    [
        ("train.models.mlp.Mlp", "muster.train.models.mlp.Mlp"),
        ("train.plan.Plan", "muster.plan.Plan"),
        ("train.launch.spec", "muster.launcher.spec"),
        ("train.strategies.ddp_rpc.DdpRpc", "muster.train.strategies.rpc.ddp_rpc.DdpRpc"),
        ("trainer.Net", "trainer.Net"),
        ("mine.train.Net", "mine.train.Net"),
        (None, None),
    ],
)
def test_a_path_of_an_earlier_version_is_read(before, now):
    assert present(before) == now


@pytest.mark.unit
def test_a_module_is_one_whatever_it_is_imported_as():
    import train.plan

    import train.loop

    assert train.loop is muster.train.loop and train.plan is muster.plan
    assert muster.train.loop.__spec__.name == "muster.train.loop"
    with pytest.raises(ModuleNotFoundError):
        import train.nothing


def test_a_projects_own_train_is_left_alone(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/__init__.py").write_text("")
    (tmp_path / "train/models.py").write_text("class Net: ...")
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from muster.train.former import present\n"
        "assert present('train.models.Net') == 'train.models.Net'\n"
        "import train.models, muster.train.models\n"
        "assert train.models is not muster.train.models and train.models.Net\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly(but=["report"])
@pytest.mark.parametrize("tool", ["launch", "report", "evaluate", "doctor", "collectives"])
def test_in_a_clone_the_tools_have_their_earlier_names(tool):
    line = [sys.executable, "-m", f"train.{tool}", "--help"]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and f"muster {tool}" in done.stdout, done.stderr
