"""The three kinds of jobs on a real Kubernetes, with the real operators: to the end, and through faults."""

import fcntl
import json
import re
import subprocess
import time

import pytest
import yaml
from kit.deaths import kill_rank
from kit.job import ROOT, run
from kit.kubernetes import KINDS, KubernetesJob, Space
from kit.ledger import RECORDED, assert_exact

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600, func_only=True)]
STEPS = 240
ARGUMENTS = (
    *RECORDED, "virtual_world_size=4", "batch_size=12", f"max_steps={STEPS}", "log.every_steps=1", "log.report=false",
    "log.tensorboard=false", "checkpoint.every_steps=50", "dist.timeout_s=30",
)  # fmt: skip
SLOWLY = (*ARGUMENTS, "+model.delay_s=0.1")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same run by torchrun on this machine."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "ledger").mkdir()
    return run(folder / "run", *ARGUMENTS, "+model.delay_s=0", env={"LEDGER": str(folder / "ledger")}, ranks=2)


@pytest.fixture
def space(kubernetes, tmp_path, request):
    """A namespace; beside those of other pytests, unless the test disturbs all of them."""
    alone = request.node.get_closest_marker("alone")
    with (kubernetes.folder / "alone.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield from namespace(kubernetes, tmp_path, request)


def namespace(kubernetes, tmp_path, request):
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    claim = "my-job-runs" if "newcomer" in request.fixturenames else "muster-runs"
    with Space(kubernetes, tmp_path, f"{name}-{time.time_ns() % 10**6}", claim=claim) as space:
        yield space


def at_work(space, kind, *arguments, step=30):
    job = KubernetesJob(space, kind, *SLOWLY, *arguments)
    job.apply()
    job.until(lambda: job.step() >= step and job.world_size() >= 2, "two pods at work", timeout_s=150, every_s=0.2)
    return job


def ends_as(job, plain):
    """Done, with torchrun's losses and weights, bit for bit, and each sample in its step."""
    job.until(job.succeeded, "good end", timeout_s=240, every_s=1)
    result = job.result()
    assert result.outcome["outcome"] == "done"
    assert_exact(job.space.volume / "ledger", steps=STEPS, batch_size=12)
    assert (result.losses, result.sha256) == (plain.losses, plain.sha256)
    return result


@pytest.mark.alone
def test_an_api_server_that_comes_back_is_not_missed(space, plain):
    job = at_work(space, "pytorchjob")
    before, containers = (
        job.step(),
        [each["containerID"].rpartition("/")[2] for pod in job.pods() for each in pod["status"]["containerStatuses"]],
    )
    assert space.cluster.script("api", "down").returncode == 0
    try:
        job.reach(before + 40)  # whoever trains needs nobody there
        kill_rank(1, *containers)
        job.until(lambda: any(line.get("event") == "survived" for line in job.lines()), "birth of rank 1")
    finally:
        done = space.cluster.script("api", "up", timeout_s=150)
    assert done.returncode == 0, done.stderr
    result = ends_as(job, plain)
    assert len(result.events("resume")) == 0, "no pod was disturbed, and the rank that died was born again in its own"


@pytest.mark.parametrize("kind", KINDS)
def test_pods_deleted_and_evicted_in_the_middle_lose_nothing(space, plain, record_property, kind):
    job = at_work(space, kind)
    for what, index, fault in (("deleted", 1, delete), ("deleted", 0, delete), ("evicted", 1, evict)):
        # An Indexed Job's back-off takes a while.
        job.until(lambda: job.world_size() >= 2, "two pods at work", timeout_s=90)
        seconds = job.next_step(lambda: fault(job, index), timeout_s=150)  # noqa: B023
        record_property("measured", f"{kind}, pod {index} {what}: {seconds:.1f} s to the next step")
    if kind == "trainjob":
        job.until(
            lambda: 0 < (progress(job).get("progressPercentage") or 0) < 100,
            "progress in the job's status",
            timeout_s=60,
        )
    result = ends_as(job, plain)
    assert result.events("preempted"), "it was saved on the way"
    if kind == "trainjob":
        job.until(lambda: progress(job).get("progressPercentage") == 100, "its end", timeout_s=20)
        told = {each["name"]: float(each["value"]) for each in progress(job)["metrics"]}
        assert told["step"] == STEPS and told["loss"] == pytest.approx(result.losses[max(result.losses)], rel=1e-5)


def progress(job):
    return json.loads(job.space.kubectl("get", "trainjob", "muster", "-o", "json"))["status"].get("trainerStatus", {})


def delete(job, index):
    job.space.kubectl("delete", "pod", job.pod(index), "--wait=false")


def evict(job, index):
    """As a drain does it, by the API's own resource."""
    space, pod = job.space, job.pod(index)
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": space.name}}
    place = f"/api/v1/namespaces/{space.name}/pods/{pod}/eviction"
    space.cluster.kubectl("create", "--raw", place, "-f", "-", text=json.dumps(body))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_override_fails_once_and_says_why(space, kind):
    job = KubernetesJob(space, kind, "modell=mlp")
    began = time.monotonic()
    job.apply()
    job.until(job.failed, "failure of the job", timeout_s=120, every_s=0.5)
    assert time.monotonic() - began < 90
    told = (
        space.kubectl("get", "events", "-o", "json")
        + space.kubectl("get", "pods", "-o", "json")
        + json.dumps(job.failed())
    )
    assert "modell" in told, "the last line stands where kubectl describe shows it"
    names = {pod["metadata"]["name"] for pod in job.pods()}
    time.sleep(6)
    assert {pod["metadata"]["name"] for pod in job.pods()} <= names, "not tried again"
    assert not job.attempts()


def test_deleted_and_applied_again_it_goes_on(space, plain):
    job = at_work(space, "pytorchjob")
    job.delete()
    assert job.result().outcome["outcome"] == "preempted" and job.step() < STEPS
    job.apply()
    result = ends_as(job, plain)
    assert result.events("resume")


def test_a_drained_node_gives_the_job_back(space, plain):
    """Of this job alone: others may be at work on the node, too."""
    job = at_work(space, "indexed-job")
    kubectl, node = space.cluster.kubectl, "muster-node"
    space.kubectl("label", "pods", "--all", f"drained={space.name}")
    kubectl("cordon", node)
    try:
        line = ["--delete-emptydir-data", "--ignore-daemonsets", "--force", "--timeout=100s"]
        kubectl("drain", node, f"--pod-selector=drained={space.name}", *line, timeout_s=120)
        job.until(lambda: job.result().outcome["outcome"] == "preempted", "saved place", timeout_s=30)
        time.sleep(3)
        assert not [pod for pod in job.pods() if pod["status"]["phase"] == "Running"], "nowhere to go"
    finally:
        kubectl("uncordon", node)
    ends_as(job, plain)


def test_fewer_ranks_than_asked_for_are_said(space):
    """Two pods of three find a place: the elastic job begins, and says with how many."""
    job = KubernetesJob(space, "pytorchjob", *SLOWLY, "max_steps=600")
    limit = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "two"}, "spec": {"hard": {"pods": "2"}}}
    space.cluster.apply(space.name, [limit])
    space.kubectl("wait", "quota/two", "--for=jsonpath={.status.hard.pods}=2", "--timeout=60s")
    job.apply()
    # The operator makes no Service while the quota refuses a pod: pod 1 does not find pod 0, and is replaced after 40 s.
    job.until(lambda: job.world_size() == 2 and job.step() >= 5, "steps of those who came", timeout_s=240)
    job.until(job.succeeded, "end", timeout_s=240, every_s=0.5)
    outcome = job.result().outcome
    assert (outcome["world_size"], outcome["asked_for"]) == (2, 3)
    assert any("trains with 2 of the 3 requested ranks" in line["text"] for line in job.result().events("note"))


def test_overlays_are_taken_by_the_api(space):
    for overlay in ("cpu", "gpu", "kueue", "debug"):
        said = space.insist("apply", "--dry-run=server", "-k", str(ROOT / "k8s/overlays" / overlay))
        assert "pytorchjob.kubeflow.org/muster" in said, overlay


def test_the_overlay_debug_runs_the_doctor(space):
    space.insist("apply", "-k", str(ROOT / "k8s/overlays/debug"))
    job = KubernetesJob(space, "pytorchjob")
    job.until(job.succeeded, "good end of the doctor", timeout_s=200, every_s=1)
    told = json.loads((space.volume / "doctor.json").read_text())["checks"]
    assert {result["check"] for result in told} >= {"ranks", "links", "speed"}
    assert len(told[0]["ranks"]) == 3


def test_the_lines_of_the_readme_as_printed(space, kubernetes, tmp_path):
    """The first block of k8s/README.md, in a shell, in a namespace of its own."""
    readme = (ROOT / "k8s/README.md").read_text()
    block = re.search(r"```[^\n]*\n(.*?)```", readme, re.S)[1]
    config = configured(space, tmp_path)
    space.cluster.apply(
        space.name, [*KubernetesJob(space, "pytorchjob").documents], "--dry-run=server"
    )  # its webhook answers
    line = ["env", f"KUBECONFIG={config}", "bash", "-euxc", block]
    done = kubernetes.script("on", *line, cwd=ROOT, timeout_s=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "muster created" in done.stdout and re.search(r"step \d+/", done.stdout), done.stdout[-3000:]
    assert (space.volume / "muster/checkpoints").is_dir(), "the volume, and with it the run, stays"


def test_a_newcomers_own_loop_by_the_commands_that_init_printed(space, kubernetes, engine, newcomer, tmp_path):
    """In the image that its project builds; a pod is deleted, and the run goes on where it stopped."""
    newcomer.moves_to(space.volume)
    [build] = re.findall("^docker build .* my-job:latest .*$", (newcomer.project / "MUSTER.md").read_text(), re.M)
    done = subprocess.run(["bash", "-c", build], cwd=newcomer.project, env=engine, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = kubernetes.script("add", "my-job:latest", env=engine)
    assert done.returncode == 0, done.stderr
    line = ["env", f"KUBECONFIG={configured(space, tmp_path)}", "bash", "-c", newcomer.printed("Kubernetes")]
    done = kubernetes.script("on", *line, cwd=newcomer.project)
    assert done.returncode == 0, done.stderr
    newcomer.until(lambda: newcomer.step() >= 20 and newcomer.world_size() >= 2, "two pods at work", timeout_s=150)
    newcomer.next_step(lambda: space.kubectl("delete", "pod", "my-job-worker-1", "--wait=false"), timeout_s=150)
    space.kubectl("wait", "pytorchjob/my-job", "--for=condition=Succeeded", "--timeout=110s")
    newcomer.assert_exact()


def configured(space, folder):
    """Write a kubeconfig whose namespace is the test's, and return its path."""
    config = yaml.safe_load(space.cluster.kubectl("config", "view", "--raw", "--flatten"))
    config["contexts"][0]["context"]["namespace"] = space.name
    (folder / "config").write_text(yaml.safe_dump(config))
    return folder / "config"
