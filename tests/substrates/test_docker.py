"""The images and the compose cluster, on a real Docker engine, with nodes that are really killed."""

import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from kit import script as mine
from kit.deaths import kill_rank
from kit.docker import Compose, build
from kit.job import ROOT, pace, run
from kit.ledger import RECORDED, assert_exact
from kit.newcomer import LOOP
from kit.until import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

ARGS = " ".join(
    (
        *RECORDED,
        "batch_size=10",
        "checkpoint.every_steps=20",
        "log.every_steps=1",
        "dist.timeout_s=10",
        "log.report=false",
    )
)
TIMES = {}


@pytest.fixture(scope="module", autouse=True)
def say_times(engine, request):
    yield
    seconds = json.dumps({name: round(value, 1) for name, value in TIMES.items()})
    request.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\nmeasured seconds: {seconds}")


def docker(engine, *command, ok=True):
    done = subprocess.run(["docker", *command], env=engine, capture_output=True, text=True, timeout=120)
    assert not ok or done.returncode == 0, done.stderr
    return done


@pytest.mark.nightly
def test_an_edit_rebuilds_in_seconds(engine, tmp_path):
    """In a copy, and under another name: a cluster beside this test loads muster:cpu."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tmp_path / file, follow_symlinks=False)
    (tmp_path / "train/edited.txt").touch()
    TIMES["rebuild after an edit"] = build(engine, "cpu", tmp_path, name="edited")
    history = docker(engine, "history", "--no-trunc", "--format", "{{.CreatedBy}}", "edited:cpu").stdout
    docker(engine, "image", "rm", "edited:cpu")
    assert history.index("COPY") < history.index("install.sh"), "code lies above dependencies"


@pytest.mark.nightly(but=["cpu"])
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_an_image_keeps_no_secret_and_runs_as_a_plain_user(engine, target, request):
    if target == "gpu":
        request.getfixturevalue("gpu_image")
    config = json.loads(docker(engine, "image", "inspect", f"muster:{target}").stdout)[0]["Config"]
    assert config["User"] == "1000:1000" and config["Entrypoint"] == ["tini", "--"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert not [setting for setting in config["Env"] if "CERT" in setting or "PIP" in setting]
    # A login shell, as enroot starts one.
    shell = "id -u; ls -A /run/secrets 2>/dev/null; python3 -c 'import torch, torchvision; print(torch.__version__)'"
    out = docker(engine, "run", "--rm", "--network=none", f"muster:{target}", "sh", "-lc", shell).stdout.split()
    assert out[0] == "1000" and out[1:] and out[1].startswith("2."), out


@pytest.mark.nightly
def test_an_index_of_cpu_wheels_is_the_cpu_image_s_alone(engine):
    """The GPU image is built from what is there, and the CPU image asks the index, which nobody serves."""
    line = ("buildx", "build", "-f", "docker/Dockerfile", "--build-arg", "TORCH_INDEX=http://127.0.0.1:9/none", ".")
    built = {
        target: subprocess.run(
            ["docker", *line, "--target", target], cwd=ROOT, env=engine, capture_output=True, text=True, timeout=300
        )
        for target in ("cpu", "gpu")
    }
    assert built["gpu"].returncode == 0, built["gpu"].stderr[-2000:]
    assert built["cpu"].returncode and "127.0.0.1" in built["cpu"].stderr, built["cpu"].stderr[-2000:]


@pytest.mark.nightly
def test_the_gpu_image_has_what_infiniband_needs(engine, gpu_image):
    shell = "ldconfig -p | grep -c -e libibverbs.so.1 -e librdmacm.so.1; python3 -c 'import torch; print(torch.cuda.nccl.version())'"
    out = docker(engine, "run", "--rm", "--network=none", gpu_image, "sh", "-c", shell).stdout.split("\n")
    assert int(out[0]) >= 2 and out[1].startswith("(2,")


@pytest.mark.nightly
def test_one_container_trains_with_a_read_only_root(engine):
    sandbox = [
        "--network=none",
        "--read-only",
        "--tmpfs=/tmp",
        "--tmpfs=/job/runs:uid=1000",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
    ]
    line = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "train", "max_steps=5"]
    out = docker(engine, "run", "--rm", *sandbox, "muster:cpu", *line).stdout
    assert "done: step=5" in out


@pytest.mark.nightly
def test_sigterm_reaches_the_workers(engine):
    name = "muster-test-sigterm"
    docker(engine, "rm", "-f", name, ok=False)
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "train", "epochs=100000"]
    docker(engine, "run", "-d", "--name", name, "--network=none", "muster:cpu", *torchrun)

    def said():  # asked anew each time: a follower of an old engine may lose the last lines
        done = docker(engine, "logs", name)
        return done.stdout + done.stderr

    until(lambda: "\nstep 20/" in said(), "step 20", timeout_s=150, every_s=0.3, said=said)
    docker(engine, "stop", "--time", "30", name)
    assert "preempted: step=" in said(), said()
    docker(engine, "rm", "-f", name)


def test_up_trains_to_the_end_as_one_process_does(engine, tmp_path):
    """The same losses and weights, bit for bit, as one process on this machine."""
    common = ["max_steps=40", "log.every_steps=1", "batch_size=50", "virtual_world_size=6"]
    plain = run(tmp_path / "plain", *common, ranks=1)
    with Compose(engine, tmp_path, args=" ".join((*common, *pace(0.25)))) as cluster:  # for a node that comes late
        process = cluster.up()
        assert process.wait(timeout=240) == 0, cluster.log
        result = cluster.result()
        assert {event["world_size"] for event in result.lines("event") if "world_size" in event} >= {3}, result.out
        assert (result.losses, result.sha256) == (plain.losses, plain.sha256)
        assert (result.folder / "model.pt").stat().st_uid == 1000


@pytest.mark.nightly
def test_a_slip_ends_everything_before_a_node_starts(engine, tmp_path):
    with Compose(engine, tmp_path, args="lr=3") as cluster:
        assert cluster.up().wait(timeout=280) != 0
        log = cluster.log
        assert "did you mean optimizer.lr?" in log and "node-1  |" not in log


@pytest.mark.nightly
def test_the_doctor_looks_at_the_same_containers(engine, tmp_path):
    with Compose(engine, tmp_path, args="") as cluster:
        cluster.files += (ROOT / "docker/doctor.yaml",)
        assert cluster.up().wait(timeout=280) == 0, cluster.log
        told = json.loads((cluster.runs / "doctor.json").read_text())["checks"]
        assert {"ranks", "links", "speed"} <= {result["check"] for result in told}, told
        assert all(len(result["ranks"]) == 3 for result in told), told


def test_killed_nodes_the_first_included_and_one_that_returns(engine, tmp_path):
    with Compose(engine, tmp_path, args=f"{ARGS} max_steps=600") as cluster:
        process = cluster.up()
        TIMES["up, to the first step"] = cluster.until(lambda: cluster.step() >= 1, "first step")
        cluster.until(lambda: cluster.step() >= 45 and cluster.world_size() == 3, "three nodes at work")
        before, nodes = len(cluster.attempts()), [f"muster-node-{n}" for n in (1, 2, 3)]
        containers = docker(engine, "inspect", "--format={{.Id}}", *nodes).stdout.split()
        for rank in (0, 2):  # alone: its container, its supervisor and the other ranks stay
            kill_rank(rank, *containers)
            cluster.until(lambda: rank in survivals(cluster), f"birth of rank {rank}")  # noqa: B023
            cluster.reach(cluster.step() + 5)
        assert {0, 2} <= {*survivals(cluster)}, cluster.log[
            -5000:
        ]  # and rank 1 if gloo did not tell it (faults/heartbeat.py)
        assert len(cluster.attempts()) == before
        for victim, left in (("muster-node-2", 2), ("muster-node-1", 1)):
            TIMES[f"{victim} killed, to the next step"] = cluster.next_step(partial(cluster.docker, "kill", victim))
            assert cluster.world_size() == left
        TIMES["node started again, to the group's next step"] = cluster.next_step(
            lambda: cluster.docker("start", "muster-node-2")
        )
        assert cluster.world_size() == 2
        assert process.wait(timeout=200) == 0, cluster.log[-5000:]
        assert_exact(cluster.runs / "ledger", steps=600, batch_size=10)
        assert list(cluster.result().losses) == list(range(1, 601))
        assert not list((cluster.result().folder / "checkpoints").glob(".*"))


@pytest.mark.nightly
def test_a_cut_off_node_writes_nothing_and_the_rest_goes_on(engine, tmp_path):
    with Compose(engine, tmp_path, args=f"{ARGS} max_steps=500") as cluster:
        process = cluster.up()
        cluster.until(lambda: cluster.step() >= 30 and cluster.world_size() == 3, "three nodes at work")
        first = rank_zero(cluster)  # the node that writes
        TIMES["rank 0's node cut off, to the next step (timeout 10 s)"] = cluster.next_step(
            lambda: cluster.docker("network", "disconnect", "muster_job", first)
        )
        cluster.docker("network", "connect", "muster_job", first)
        cluster.until(lambda: process.poll() is not None, "the end", timeout_s=200)
        assert_exact(cluster.runs / "ledger", steps=500, batch_size=10)
        assert list(cluster.result().losses) == list(range(1, 501))


def test_stop_saves_once_and_up_resumes(engine, tmp_path):
    args = ARGS.replace("checkpoint.every_steps=20", "checkpoint.every_steps=1000")
    with Compose(engine, tmp_path, args=f"{args} max_steps=100000") as cluster:
        process = cluster.up()
        cluster.until(lambda: cluster.step() >= 40 and cluster.world_size() == 3, "three nodes at work")
        cluster.run("stop")
        process.wait(timeout=200)
        assert cluster.result().outcome["outcome"] == "preempted" and cluster.result().outcome["exit_code"] == 75
        at = cluster.result().outcome["step"]
        assert max(path.name for path in (cluster.result().folder / "checkpoints").iterdir()) == f"step-{at:08d}"
        cluster.env["ARGS"] = f"{args} max_steps={at + 100}"
        again = cluster.up()
        TIMES["up after stop, to the next step"] = cluster.until(lambda: cluster.step() > at, "resumes")
        assert again.wait(timeout=200) == 0
        assert cluster.result().events("resume")[-1]["step"] >= at
        assert_exact(cluster.runs / "ledger", steps=at + 100, batch_size=10)


@pytest.mark.nightly
def test_a_script_of_ones_own_survives_a_killed_node_stops_and_goes_on(engine, tmp_path):
    """`up` ends with it, although it keeps no records that the store could read."""
    code = tmp_path / "code"
    code.mkdir()
    mine.write(code)
    args = "-- 'src/my script.py' --out=/job/runs --steps=300 --step-s=0.1 'a b'"
    with Compose(engine, tmp_path, args=args, CODE=str(code)) as cluster:
        process = cluster.up()
        cluster.until(lambda: len(mine.steps(cluster.runs)) >= 20, "20 steps")
        cluster.docker("kill", "muster-node-2")
        cluster.until(lambda: len(mine.steps(cluster.runs)) >= 60, "steps of the other nodes")
        cluster.run("stop")
        process.wait(timeout=200)
        said = cluster.run("logs")  # what `up` follows it may lose the end of
        assert re.search(r'"a b"\] threads 1', said) and "rank 0 left with exit code 75" in said, said
        stopped = mine.steps(cluster.runs)[-1]
        assert cluster.up().wait(timeout=200) == 0, cluster.log
        assert mine.steps(cluster.runs)[-2:] == [298, 299] and stopped + 1 in mine.attempts(cluster.runs)
        assert json.loads((cluster.runs / "compose/launch.json").read_text())["exit_code"] == 0


@pytest.mark.nightly
def test_a_script_that_always_fails_ends_the_cluster(engine, tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    mine.write(code)
    args = "-- 'src/my script.py' --out=/job/runs --fault=always"
    with Compose(engine, tmp_path, args=args, CODE=str(code), MAX_RESTARTS="1") as cluster:
        cluster.up().wait(timeout=280)
        said = cluster.run("logs")
        assert "left with exit code 3" in said and len(mine.attempts(cluster.runs, rank=2)) <= 3, said


def survivals(cluster):
    """The ranks that have died and were restarted in place."""
    return [line["rank"] for line in cluster.lines() if line.get("event") == "survived"]


def rank_zero(cluster):
    """The container that holds rank 0: the one that prints."""
    for n in (1, 2, 3):
        logs = subprocess.run(
            ["docker", "logs", "--tail", "3", f"muster-node-{n}"], env=cluster.env, capture_output=True, text=True
        )
        if "step " in logs.stdout:
            return f"muster-node-{n}"
    raise AssertionError("no node prints")


@pytest.mark.nightly
def test_a_newcomers_own_loop_by_the_command_that_init_printed(engine, newcomer):
    """With the wheel alone, on the kit's image; a node is killed, and the others go on without it."""
    command = newcomer.printed("containers")
    up = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=newcomer.project, env=engine, text=True,
                          stdout=(newcomer.project.parent / "up.log").open("w"), stderr=subprocess.STDOUT)  # fmt: skip
    try:
        newcomer.reach(20, timeout_s=300)
        newcomer.gather(3)
        newcomer.next_step(lambda: docker(engine, "kill", "my-job-node-2"))
        assert up.wait(timeout=200) == 0, newcomer.log
        newcomer.assert_exact()
        assert newcomer.attempts()[-1]["world_size"] == 2
        assert (newcomer.folder / "model.pt").stat().st_uid == 1000
    finally:
        down = command.replace("up --build", "down --timeout 1")
        subprocess.run(["bash", "-c", down], cwd=newcomer.project, env=engine, capture_output=True, timeout=120)


@pytest.mark.nightly
def test_the_kits_image_from_its_wheel_trains_in_a_read_only_root(engine, wheel, tmp_path, request):
    """On a base that has the requirements already, and nothing else of the kit's image."""
    base, image = "muster-test-base", "muster-test-wheel"
    request.addfinalizer(lambda: docker(engine, "image", "rm", "--force", image, base, ok=False))
    bare = "FROM muster:cpu\nUSER root\nRUN userdel muster && rm -rf /opt/muster\nENV PYTHONPATH=\n"
    (tmp_path / "bare.Dockerfile").write_text(bare)
    docker(engine, "build", "-f", str(tmp_path / "bare.Dockerfile"), "-t", base, str(tmp_path))
    (tmp_path / "docker").mkdir()
    for name in ("docker/wheel.Dockerfile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / "docker")
    shutil.copy(wheel, tmp_path / "docker")
    bundle = os.environ.get("SSL_CERT_FILE", "")
    secrets = ["--secret", f"id=ca,src={bundle}"] if Path(bundle).is_file() else []
    built = ["build", "--build-arg", f"BASE={base}", "-f", f"{tmp_path}/docker/wheel.Dockerfile", "-t", image]
    docker(engine, *built, *secrets, f"{tmp_path}/docker")
    (tmp_path / "my_loop.py").write_text(LOOP)
    sandbox = ("--network=none", "--read-only", "--tmpfs=/tmp", "--tmpfs=/job/runs:uid=1000", "--cap-drop=ALL")
    mine = ("-v", f"{tmp_path / 'my_loop.py'}:/job/my_loop.py:ro", "-e", "PACE=0")
    launch = ("torchrun", "--standalone", "--nproc-per-node=2", "my_loop.py")
    assert "done: step=" in docker(engine, "run", "--rm", *sandbox, *mine, image, *launch).stdout
