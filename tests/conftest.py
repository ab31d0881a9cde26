"""Fixtures of all tests. Files that killed launches leave in the temporary folder are deleted after the session."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import Counter
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest
from kit import warm
from kit.docker import CACHE, CI, build, skip, works
from kit.job import ROOT
from kit.kubernetes import SCRIPT as KUBERNETES
from kit.kubernetes import Cluster
from kit.newcomer import Newcomer, built
from kit.slurm import SCRIPT, Slurm
from kit.stacks import pytest_timeout_set_timer  # noqa: F401  # a hook
from kit.until import until

pytest_plugins = ["kit.failures"]
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
is_unit, began_cpu_s, began_at = False, 0.0, 0.0


def refuse_processes(event, _arguments):
    assert not (is_unit and event in STARTS), f"a test marked unit starts no process, and this is {event}"


sys.addaudithook(refuse_processes)


@pytest.fixture(autouse=True)
def no_process(request):
    """Make a test marked `unit` fail if it starts a process."""
    global is_unit
    is_unit = request.node.get_closest_marker("unit") is not None
    yield
    is_unit = False


def pytest_configure(config):
    tempfile.gettempdir()  # pytest's own folders stay at their usual place
    config.scratch = tempfile.mkdtemp(prefix="muster-")
    os.environ["TMPDIR"] = config.scratch
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait do not spin on a processor that others need


def pytest_unconfigure(config):
    shutil.rmtree(config.scratch, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Put the long tests first. Of a test marked `nightly(but=[...])`, the cases with these ids are for `make test`, too."""
    kept, named = set(), set()
    for item in items:
        for mark in item.iter_markers("nightly"):
            for case in mark.kwargs.get("but", ()):
                named.add((item.function, case))
                if item.callspec.id == case:
                    kept.add((item.function, case))
                    item.own_markers.remove(mark)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and named != kept:
        raise pytest.UsageError(f"nightly(but=...) names cases that there are not: {named - kept}")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def everything(config):
    """Whether the nightly tests run, too."""
    return "not nightly" not in config.option.markexpr


def pytest_runtest_logstart():
    global began_cpu_s, began_at
    began_cpu_s, began_at = warm.cpu_s(), time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", warm.cpu_s() - began_cpu_s))
    report = yield
    item.has_failed = getattr(item, "has_failed", False) or report.failed
    if call.when == "teardown" and item.has_failed:
        end_children(began_at)
    return report


def end_children(since):
    """Kill the processes that a test has started and left: others would wait for the processor with them."""
    shared = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in shared and child.create_time() > since - 1:  # it is known to a second
                child.kill()


def pytest_terminal_summary(terminalreporter):
    """Print the dearest tests and files, and what tests have measured."""
    ended = [each for each in terminalreporter.stats.get("", []) if each.when == "teardown"]
    spent = [(dict(each.user_properties)["cpu_s"], each.nodeid) for each in ended]
    shown = terminalreporter.config.getoption("durations") or 0
    files = Counter()
    for cpu_s, test in spent:
        files[test.partition("::")[0]] += cpu_s
    for cpu_s, test in sorted(spent, reverse=True)[:shown]:
        terminalreporter.write_line(f"{cpu_s:7.2f} CPU s  {test}")
    for file, cpu_s in files.most_common(shown):
        terminalreporter.write_line(f"{cpu_s:7.2f} CPU s  {file}, of {files.total():.0f}")
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties if report.when == "call" else []:
            if name == "measured":
                terminalreporter.write_line(f"measured: {value}")


def pytest_collection_finish(session):
    """Start builds of a quarter of an hour early, while other tests run; the fixture waits for them."""
    cluster = Cluster(CACHE / "kubernetes")
    wanted = everything(session.config) and any(
        "kubernetes" in getattr(item, "fixturenames", ()) for item in session.items
    )
    if wanted and CI and os.getuid() == 0 and shutil.which("go") and not cluster.built():
        cluster.folder.mkdir(parents=True, exist_ok=True)
        with (cluster.folder / "build.log").open("a") as log:
            subprocess.Popen([KUBERNETES, "build", cluster.folder], stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="session")
def engine():
    """The environment for `docker`, with the image muster:cpu built. Several pytest processes share one engine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    pid = CACHE / "docker/dockerd.pid"
    with (CACHE / "docker.change").open("w") as change, (CACHE / "docker.use").open("w") as use:
        fcntl.flock(change, fcntl.LOCK_EX)
        fcntl.flock(use, fcntl.LOCK_SH)
        env = _engine()
        fcntl.flock(change, fcntl.LOCK_UN)
        yield env
        fcntl.flock(change, fcntl.LOCK_EX)
        with contextlib.suppress(BlockingIOError):  # another pytest still needs it, and ends it
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if pid.exists():
                # Otherwise each change of the requirements would leave an earlier image of 6 GB. Not while others use the
                # engine: what they build then anew is another image, without the layers that a cluster has loaded.
                for prune in (("image", "prune", "--force"), ("builder", "prune", "--force", "--keep-storage=8gb")):
                    subprocess.run(["docker", *prune], env=env, capture_output=True, timeout=120)
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(number := int(pid.read_text()), signal.SIGTERM)
                    until(lambda: not os.path.exists(f"/proc/{number}"), "end of the engine", timeout_s=60)
                pid.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def gpu_image(engine):
    """The image muster:gpu; its requirements are those of the CPU image, which are there."""
    build(engine, "gpu")
    return "muster:gpu"


def _engine():
    env = dict(os.environ)
    ours = CACHE / "docker"
    if not works(env, "docker", "info"):
        if not (CI and os.getuid() == 0):
            skip(
                "no Docker engine answers here (docker info): start one, or run as root with CI=true to have one installed"
            )
        setup = subprocess.run([ROOT / "tests/substrates/docker.sh", ours], capture_output=True, text=True)
        if setup.returncode:
            pytest.fail(f"no Docker engine could be started: {(ours / 'setup.log').read_text()[-3000:]}", pytrace=False)
    if (ours / "config").is_dir():
        env["DOCKER_CONFIG"] = str(ours / "config")
    if not works(env, "docker", "compose", "version") or not works(env, "docker", "buildx", "version"):
        skip("docker compose (v2) or buildx is missing")
    build(env, "cpu")
    return env


@pytest.fixture(scope="module")
def slurm():
    if sys.platform != "linux" or os.getuid() != 0 or not (CI or shutil.which("slurmctld")):
        skip("a Slurm cluster of our own needs Linux, root and slurm-wlm (or CI=true, to have it installed)")
    folder = CACHE / "slurm"
    subprocess.run([SCRIPT, "stop", folder], capture_output=True, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (folder / "start.log").open("w") as log:
        done = subprocess.run([SCRIPT, "start", folder], stdout=log, stderr=subprocess.STDOUT, timeout=400)
    if done.returncode:
        skip(f"no Slurm could be started: {(folder / 'start.log').read_text()[-2000:]}")
    yield Slurm(folder)
    subprocess.run([SCRIPT, "stop", folder], capture_output=True, timeout=60)


@pytest.fixture(scope="session")
def kubernetes_is_built(request):
    """Skip where no Kubernetes is built, before an engine is started for it."""
    if Cluster(CACHE / "kubernetes").built():
        return
    if not everything(request.config):
        pytest.skip(
            "Kubernetes is not built here: `make test-all` builds it in a quarter of an hour; its manifests are tested"
        )
    if sys.platform != "linux" or os.getuid() != 0 or not shutil.which("go"):
        skip("a Kubernetes of our own needs Linux, root and Go 1.24 or newer, from whose modules it is built")
    if not CI:
        skip("a Kubernetes of our own is built in a quarter of an hour: CI=true has it built")


@pytest.fixture(scope="session")
def kubernetes(kubernetes_is_built, engine):
    """A cluster of two nodes with the operators and the image muster:cpu. Several pytest processes share it."""
    cluster = Cluster(CACHE / "kubernetes")
    cluster.folder.mkdir(parents=True, exist_ok=True)
    with (CACHE / "kubernetes.change").open("w") as change, (CACHE / "kubernetes.use").open("w") as use:
        fcntl.flock(change, fcntl.LOCK_EX)
        with contextlib.suppress(BlockingIOError):  # another pytest has started it
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _start_kubernetes(cluster, engine)
        fcntl.flock(use, fcntl.LOCK_SH)
        fcntl.flock(change, fcntl.LOCK_UN)
        yield cluster
        fcntl.flock(change, fcntl.LOCK_EX)
        with contextlib.suppress(BlockingIOError):  # another pytest still needs it, and ends it
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            cluster.script("stop", timeout_s=300)


def _start_kubernetes(cluster, engine):
    cluster.script("stop", timeout_s=300)
    with (cluster.folder / "start.log").open("w") as log:
        for line, most_s in ((["build"], 3600), (["load", "muster:cpu"], 1800), (["start"], 900)):
            done = cluster.script(*line, timeout_s=most_s, log=log, env=engine)
            if done.returncode:
                skip(f"no Kubernetes ({line[0]}): {(cluster.folder / 'start.log').read_text()[-3000:]}")


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repository at a path with a blank."""
    root = tmp_path / "my repo"
    root.mkdir()
    for name in ("train", "conf", "slurm"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.log"))
    (root / "slurm/logs").mkdir(exist_ok=True)
    return root


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this repository."""
    return built(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def newcomer(wheel, tmp_path):
    """An empty folder with the wheel installed, in which `muster init` has written the files of all substrates."""
    return Newcomer(tmp_path, wheel, "slurm", "docker", "k8s", "--loop")


@pytest.fixture
def own_python(tmp_path):
    """A Python with this one's packages, in a folder with a torchrun that the test writes."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "all.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def torchrun(script):
        (place / "bin/torchrun").write_text(f"#!/bin/bash\n{script}\n")
        (place / "bin/torchrun").chmod(0o755)
        return place / "bin"

    return torchrun
