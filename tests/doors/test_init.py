"""`muster init`: a project of one's own gets the files that each substrate needs, and none of its own is changed."""

import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from kit.job import ROOT, environment

from muster.errors import ConfigError
from muster.init.project import SUBSTRATES, files, project


def init(folder, *arguments):
    line = [sys.executable, "-m", "muster", "init", *arguments]
    return subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "My Job").mkdir()
    return tmp_path / "My Job"


@pytest.mark.unit
@pytest.mark.parametrize("loop", [False, True], ids=["trainer", "loop"])
def test_no_name_of_the_kits_own_example_is_left(place, loop):
    wanted = files(project(place, name=None, image=None, loop=loop), [*SUBSTRATES])
    for name, text in wanted.items():
        if name.startswith("k8s/"):
            for each in filter(None, yaml.safe_load_all(text)):
                words = str(each).replace("'app.kubernetes.io/part-of': 'muster'", "").replace("muster', 'launch", "")
                assert "muster" not in words and "convnet" not in words and "my-job" in words, words
    compose = yaml.safe_load(wanted["docker/compose.yaml"])
    assert compose["name"] == "my-job" and compose["services"]["node"]["image"] == "my-job:1"
    assert compose["services"]["node"]["build"] == {"context": "..", "dockerfile": "docker/Dockerfile"}
    assert compose["services"]["node"]["volumes"] == ["${RUNS:-../runs}:/job/runs"], "nothing hides a project's src"
    pods = yaml.safe_load(wanted["k8s/pytorchjob.yaml"])["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    args = pods["containers"][0]["args"]
    assert args == (
        ["--", "my_loop.py"] if loop else ["name=my-job", "data._target_=mine.Points", "model._target_=mine.Net"]
    )


@pytest.mark.unit
def test_the_words_of_a_script_stay_what_they_are_everywhere(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "my train.py").touch()
    mine = project(place, name=None, image=None, loop=False, script="'my train.py' --lr 1e-3 -v 'say \"a\"'")
    wanted, words = files(mine, [*SUBSTRATES]), ["--", "my train.py", "--lr", "1e-3", "-v", 'say "a"']
    assert not {"mine.py", "my_loop.py"} & wanted.keys()
    pods = yaml.safe_load(wanted["k8s/pytorchjob.yaml"])["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pods["containers"][0]["args"] == words
    given = yaml.safe_load(wanted["docker/compose.yaml"])["services"]["node"]["environment"]["ARGS"]
    assert shlex.split(given.removeprefix("${ARGS:-").removesuffix("}")) == words
    assert f'set -- {shlex.join(words)} "$@"' in wanted["slurm/ddp.sbatch"] and repr(words) in wanted["slurm/submit.py"]
    assert not [name for name, text in wanted.items() if "Hydra" in text and name != "docker/constraints.txt"]
    assert "\n#   RUN pip install" in wanted["docker/Dockerfile"]
    (place / "requirements.txt").touch()
    mine = project(place, name=None, image=None, loop=True)
    assert "\nRUN pip install" in files(mine, ["docker"])["docker/Dockerfile"]
    with pytest.raises(ConfigError, match=r"gone\.py is not a file"):
        project(place, name=None, image=None, loop=False, script="gone.py")


@pytest.mark.unit
def test_whoever_needs_an_image_gets_what_builds_it(place):
    mine = project(place, name=None, image="registry.example/me/job:1", loop=True)
    for substrate, has_image in (("slurm", False), ("docker", True), ("k8s", True)):
        wanted = files(mine, [substrate])
        assert (
            {"docker/Dockerfile", "docker/wheel.Dockerfile", "docker/constraints.txt", ".dockerignore"} <= wanted.keys()
        ) == has_image
        assert ("docker build -f docker/Dockerfile -t registry.example/me/job:1 ." in wanted["MUSTER.md"]) == has_image


@pytest.mark.unit
@pytest.mark.parametrize("name", ["", "My_Job", "-job", "9", "x" * 41, "on", "null"])
def test_a_name_that_kubernetes_refuses_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="give --name"):
        project(tmp_path, name=name or None, image=None, loop=False) if name else project(
            tmp_path / "_", name=None, image=None, loop=False
        )


def test_files_that_are_there_are_left_and_their_difference_is_shown(place):
    (place / "slurm").mkdir()
    (place / "slurm/ddp.sbatch").write_text("#!/bin/bash\nmine\n")
    first = init(place, "slurm")
    assert first.returncode == 0 and "wrote      slurm/job.sh" in first.stdout, first.stderr
    assert (place / "slurm/ddp.sbatch").read_text() == "#!/bin/bash\nmine\n" and "    -mine" in first.stdout
    assert (place / "slurm/job.sh").read_bytes() == (ROOT / "slurm/job.sh").read_bytes()
    assert not (place / "k8s").exists() and (place / "slurm/logs").is_dir()
    again = init(place, "slurm")
    assert again.returncode == 0 and "wrote" not in again.stdout
    assert init(place, "slurm", "--check").returncode == 1
    (place / "slurm/ddp.sbatch").unlink()
    init(place, "slurm")
    checked = init(place, "slurm", "--check")
    assert checked.returncode == 0 and not checked.stdout, checked.stdout
    (place / ".gitignore").write_text("runs\n.venv/\n# wandb\n")
    assert (
        "left as is .gitignore, which has no .env, __pycache__, data, docker/*.whl, mlruns, wandb\n"
        in init(place, "slurm").stdout
    )
    (place / "mine.py").write_text("# all my own\n")
    for again in (init(place, "slurm"), init(place, "slurm", "--check")):
        assert again.returncode == 0 and "mine.py" not in again.stdout, "the example is its user's"


def test_what_stands_in_the_place_of_a_file_is_told_in_one_line(place):
    (place / "slurm").mkdir()
    (place / "slurm/ddp.sbatch").write_bytes(b"\xff")  # no text at all: still shown as different, and left
    (place / "MUSTER.md").mkdir()
    result = init(place, "slurm")
    assert result.returncode == 5 and "left as is slurm/ddp.sbatch" in result.stdout
    assert result.stderr.count("\n") == 1 and "cannot read" in result.stderr and "MUSTER.md" in result.stderr
    shutil.rmtree(place / "slurm")
    (place / "slurm").write_text("")
    result = init(place, "slurm")
    assert result.returncode == 5 and result.stderr.count("\n") == 1 and "cannot write" in result.stderr


def test_mistakes_are_one_line(place):
    for arguments, code, says in (
        (["slrm"], 2, "did you mean slurm"),
        (["--name=a_b"], 2, "give --name"),
        (["--script=gone.py"], 2, "gone.py is not a file"),
        (["--script=a 'b"], 2, "close every quote"),
        (["--script=--lr 3"], 2, "give a script"),
    ):
        done = init(place, *arguments)
        assert done.returncode == code and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.nightly
def test_the_example_trains_by_the_command_that_is_printed(place):
    init(place, "slurm", "--trainer")
    [line] = [line for line in (place / "MUSTER.md").read_text().splitlines() if "this machine" in line]
    command = (
        line.split("`")[1].replace("torchrun", f"{sys.executable} -m torch.distributed.run --standalone")
        + " max_steps=3"
    )
    done = subprocess.run(
        command, shell=True, cwd=place, env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "done: step=3" in done.stdout, done.stderr


def test_submit_prints_its_batch_script_in_a_project_without_slurm(place):
    init(place, "slurm", "--loop", "--gpus=4")
    for words, submitted in (((), "-- my_loop.py"), (("--", "my_loop.py", "--lr", "1"), "-- my_loop.py --lr 1")):
        line = [sys.executable, "slurm/submit.py", "--dry-run", "cluster.nodes=2", *words]
        done = subprocess.run(line, cwd=place, env=environment(), capture_output=True, text=True, timeout=100)
        assert done.returncode == 0 and "#SBATCH --job-name=my-job" in done.stdout, done.stderr
        assert "#SBATCH --gpus-per-node=4" in done.stdout and "#SBATCH --cpus-per-task=16" in done.stdout, done.stdout
        assert done.stdout.endswith(f"# job 0: {submitted}\n"), done.stdout


@pytest.mark.parametrize(
    ("kind", "given", "started"),
    [
        ("--loop", [], ["--", "my_loop.py"]),
        ("--loop", ["--lr", "a -- b"], ["--", "my_loop.py", "--lr", "a -- b"]),
        ("--loop", ["--", "other.py"], ["--", "other.py"]),
        (
            "--trainer",
            ["batch_size=8"],
            ["name=my-job", "data._target_=mine.Points", "model._target_=mine.Net", "batch_size=8"],
        ),
    ],
)
@pytest.mark.parametrize("script", ["ddp", "container"])
def test_a_batch_script_starts_the_project_s_own_job(place, script, kind, given, started):
    init(place, "slurm", kind)
    (place / "slurm/job.sh").write_text('printf "%s\\n" "$@"\n')
    line = ["bash", f"slurm/{script}.sbatch", *given]
    env = environment(SLURM_SUBMIT_DIR=str(place), IMAGE="none.sif")
    done = subprocess.run(line, cwd=place, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == started, done.stderr


@pytest.mark.unit
def test_gpus_are_asked_for_wherever_a_process_gets_one(place):
    wanted = files(project(place, name=None, image=None, loop=True, gpus=8), [*SUBSTRATES])
    for name in ("pytorchjob.yaml", "trainjob/trainjob.yaml", "indexed-job/indexed-job.yaml"):
        text = wanted[f"k8s/{name}"]
        assert text.count('nvidia.com/gpu: "8"') == 2 and "sizeLimit: 16Gi" in text, text
        assert any(each in text for each in ('nprocPerNode: "8"', "numProcPerNode: 8", 'NPROC, value: "8"')), text
        assert all(yaml.safe_load_all(text))
    for script in ("ddp", "container"):
        assert "\n#SBATCH --gpus-per-node=8\n" in wanted[f"slurm/{script}.sbatch"]
    with pytest.raises(ConfigError, match="--gpus=-1 is out of range"):
        project(place, name=None, image=None, loop=True, gpus=-1)
