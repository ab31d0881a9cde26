"""The package: a wheel from a clone, an sdist, and the wheel built from it, each used from an empty folder."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from kit.job import ROOT, environment
from kit.newcomer import built

pytestmark = pytest.mark.long
HOSTILE = {"train.py": "raise SystemExit('theirs')\n", "conf/config.yaml": "name: theirs\n", "slurm/job.sh": "exit 9\n"}


def python(*line, cwd, **more):
    env = {**environment(), **more}
    return subprocess.run(
        [sys.executable, *map(str, line)], cwd=cwd, env=env, capture_output=True, text=True, timeout=200
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel built from a clone, and the wheel built from the sdist of that clone."""
    place = tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    clone = place / "clone"
    for name in filter(None, files.split("\0")):
        target = clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        else:
            target.write_bytes((ROOT / name).read_bytes())
    with tarfile.open(built(clone, "sdist", place / "sdist")) as archive:
        archive.extractall(place / "unpacked", filter="data")
    [unpacked] = (place / "unpacked").iterdir()
    return {"clone": built(clone, "wheel", place / "one"), "sdist": built(unpacked, "wheel", place / "two")}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_clone(wheels):
    assert contents(wheels["clone"]) == contents(wheels["sdist"])


def test_all_is_in_one_package(wheels):
    names = contents(wheels["clone"])
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"muster"}
    [facts] = [text.decode() for name, text in names.items() if name.endswith("METADATA")]
    extras = {"wandb", "mlflow", "metrics", "onnx", "s3", "gcs"}
    assert {*re.findall(r"^Provides-Extra: (.*)$", facts, re.M)} == extras, "what the kit's own tests need is no extra"
    for folder, place in (("conf", "muster/train/conf"), ("slurm", "muster/templates/slurm"), ("k8s", "muster/templates/k8s")):  # fmt: skip
        ours = {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.*") if path.is_file()}
        kept = {name for name in ours if not name.endswith(".pyc") and not name.startswith("logs/")}
        assert kept and kept == {
            name.removeprefix(f"{place}/")
            for name in names
            if name.startswith(f"{place}/") and "." in name.rpartition("/")[2]
        }


@pytest.mark.nightly(but=["first"])
@pytest.mark.parametrize("commands", ["first", "all"])
def test_the_wheel_works_where_a_project_has_files_of_the_same_names(wheels, tmp_path, commands):
    """The wheel of the sdist, which is that of the clone, see above."""
    site, project = tmp_path / "site", tmp_path / "project"
    with zipfile.ZipFile(wheels["sdist"]) as archive:
        archive.extractall(site)
    for name, text in HOSTILE.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)

    def muster(*line):
        done = python(*line, cwd=project, PYTHONPATH=str(site))
        assert done.returncode == 0 and "theirs" not in done.stdout + done.stderr, done.stderr
        return done.stdout

    two = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "muster")
    assert "world_size=2" in muster(*two, "output_dir=run", "max_steps=4")
    assert "accuracy" in muster("-m", "muster", "evaluate", "run")
    assert "-m muster [overrides]" in (said := muster("-m", "muster", "--help")) and "-m train" not in said
    if commands == "first":
        return
    where = muster("-c", "import muster.train.run; print(muster.train.run.__file__)")
    assert where.startswith(str(site))
    assert "done: step=6" in muster("-m", "muster", "output_dir=run", "max_steps=6", "checkpoint.accept_changes=true")
    assert 'model = muster.load("run")' in muster("-m", "muster", "load", "run")
    assert "x.pt2: inputs float32 [B, 1, 8, 8]" in muster("-m", "muster", "export", "run", "--output", "x.pt2")
    assert str(project / "run") in muster("-m", "muster", "launch", "check", "output_dir=run", "max_steps=4")
    assert "report.html" in muster("-m", "muster", "report", "run")
    call = "import muster; print(muster.launch(len, 'four', nproc=2), muster.callbacks.Callback.__name__)"
    assert "[4, 4] Callback" in muster("-c", call)
