"""The three kinds of jobs on a real Kubernetes, with the real operators: to the end, and through faults."""

import copy
import fcntl
import json
import re
import subprocess
import time

import pytest
import yaml
from kit.deaths import kill_rank
from kit.job import ROOT, run
from kit.kubernetes import KINDS, NODES, KubernetesJob, Space
from kit.ledger import RECORDED, assert_exact

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900, func_only=True)]
STEPS = 240
ARGUMENTS = (
    *RECORDED, "virtual_world_size=4", "batch_size=12", f"max_steps={STEPS}", "log.every_steps=1", "log.report=false",
    "log.tensorboard=false", "checkpoint.every_steps=50", "dist.timeout_s=30",
)  # fmt: skip
SLOWLY = (*ARGUMENTS, "model._target_=kit.parts.models.Paced")


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


def at_work(space, kind, *arguments, step=30, ranks=2):
    job = KubernetesJob(space, kind, *SLOWLY, *arguments)
    job.apply()
    job.reach(step, timeout_s=150)
    job.gather(ranks)
    return job


def ends_as(job, plain):
    """Done, with torchrun's losses and weights, bit for bit, and each sample in its step."""
    job.until(job.succeeded, "good end", timeout_s=240, every_s=1)
    result = job.result()
    assert result.outcome["outcome"] == "done"
    assert_exact(job.space.volume / "ledger", steps=STEPS, batch_size=12)
    assert (result.losses, result.sha256) == (plain.losses, plain.sha256)
    return result


@pytest.mark.nightly
@pytest.mark.alone
def test_an_api_server_that_comes_back_is_not_missed(space, plain):
    job = at_work(space, "pytorchjob", ranks=3)
    job.pace(1)
    before, resumed, containers = (
        job.step(),
        len(job.result().events("resume")),
        [each["containerID"].rpartition("/")[2] for pod in job.pods() for each in pod["status"]["containerStatuses"]],
    )
    assert space.cluster.script("api", "down").returncode == 0
    try:
        job.reach(before + 10)  # whoever trains needs nobody there
        kill_rank(1, *containers)
        job.until(lambda: any(line.get("event") == "survived" for line in job.lines()), "birth of rank 1")
    finally:
        done = space.cluster.script("api", "up", timeout_s=150)
    assert done.returncode == 0, done.stderr
    job.pace(0.1)
    result = ends_as(job, plain)
    assert len(result.events("resume")) == resumed, (
        "no pod was disturbed, and the rank that died was restarted in place in its own"
    )


@pytest.mark.nightly(but=["once"])
@pytest.mark.parametrize("kind, times", [*((kind, 3) for kind in KINDS), ("pytorchjob", 1)], ids=[*KINDS, "once"])
def test_pods_deleted_and_evicted_in_the_middle_lose_nothing(space, plain, record_property, kind, times):
    job = at_work(space, kind)
    assert job.nodes() == set(NODES), "spread, with one run folder"
    for what, index, fault in (("deleted", 1, delete), ("deleted", 0, delete), ("evicted", 1, evict))[:times]:
        job.gather(timeout_s=90)  # an Indexed Job's back-off takes a while
        seconds = job.next_step(lambda: fault(job, index), timeout_s=240)  # noqa: B023
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
        job.until(lambda: progress(job).get("progressPercentage") == 100, "its end", timeout_s=60)
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


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_override_fails_once_and_says_why(space, kind):
    job = KubernetesJob(space, kind, "modell=mlp")
    job.apply()
    job.until(job.failed, "failure of the job", timeout_s=240, every_s=0.5)
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


@pytest.mark.nightly
def test_deleted_and_applied_again_it_goes_on(space, plain):
    job = at_work(space, "pytorchjob")
    job.delete()  # returns before the pods have saved, as it does for a user
    job.until(lambda: job.result().outcome["outcome"] == "preempted", "saved place", timeout_s=90)
    assert job.step() < STEPS
    job.apply()
    result = ends_as(job, plain)
    assert result.events("resume")


@pytest.mark.nightly
def test_a_drained_node_gives_the_job_back(space, plain):
    """Both nodes, of this job alone: others may be at work there, too."""
    job = at_work(space, "indexed-job")
    kubectl = space.cluster.kubectl
    job.pace(1)
    space.kubectl("label", "pods", "--all", f"drained={space.name}")
    kubectl("cordon", *NODES)
    try:
        line = ["--delete-emptydir-data", "--ignore-daemonsets", "--force", "--timeout=100s"]
        kubectl("drain", *NODES, f"--pod-selector=drained={space.name}", *line, timeout_s=120)
        job.until(lambda: job.result().outcome["outcome"] == "preempted", "saved place", timeout_s=30)
        time.sleep(3)
        assert not [pod for pod in job.pods() if pod["status"]["phase"] == "Running"], "nowhere to go"
    finally:
        kubectl("uncordon", *NODES)
    job.pace(0.1)
    ends_as(job, plain)


@pytest.mark.nightly
@pytest.mark.alone
def test_a_lost_node_costs_no_more_than_the_steps_since_the_last_checkpoint(space, plain, record_property):
    """It falls silent, and somebody says that it will not come back, as k8s/README.md has it."""
    job = at_work(space, "pytorchjob", step=60, ranks=3)  # a pod that came later would be a restart, too
    script, kubectl, node = space.cluster.script, space.cluster.kubectl, NODES[1]
    lost = [pod["metadata"]["name"] for pod in job.pods() if pod["spec"]["nodeName"] == node]
    assert lost
    gone = "node.kubernetes.io/out-of-service"
    before = len(job.result().events("resume"))
    job.until(lambda: any((job.folder / "checkpoints").glob("step-*[0-9]")), "checkpoint")
    saved = max(int(path.name.removeprefix("step-")) for path in (job.folder / "checkpoints").glob("step-*[0-9]"))

    def lose():
        assert script("node", "down").returncode == 0
        kubectl("wait", f"node/{node}", "--for=condition=Ready=Unknown", "--timeout=90s")
        kubectl("taint", "node", node, f"{gone}=nodeshutdown:NoExecute")

    try:
        seconds = job.next_step(lose, timeout_s=200)
        result = ends_as(job, plain)
        assert job.nodes() == {NODES[0]}
    finally:
        up = script("node", "up", timeout_s=150)
        kubectl("taint", "node", node, f"{gone}-", ok=False)
    assert up.returncode == 0, up.stderr
    record_property("measured", f"pytorchjob, node of {' and '.join(lost)} lost: {seconds:.1f} s to the next step")
    step = result.events("resume")[before]["step"]
    assert step == saved or (step > saved and step % 50 == 0), "from the last checkpoint: nobody had time to save"


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), timeout=5)"


@pytest.mark.nightly
def test_the_network_policy_keeps_strangers_out_of_both_nodes_and_ranks_in(space):
    job = at_work(space, "pytorchjob", "max_steps=3000", step=1)
    template = copy.deepcopy(job.documents[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])
    template["containers"][0] |= {"command": ["python3", "-m", "http.server", "8000"], "args": []}
    strangers = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"on-{node}"}, "spec": {**template, "nodeName": node}}
        for node in NODES
    ]
    space.cluster.apply(space.name, strangers)
    space.kubectl(
        "wait", "pod", *(each["metadata"]["name"] for each in strangers), "--for=condition=Ready", "--timeout=120s"
    )
    pods = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in job.pods()}
    strange = {name: pods.pop(name) for name in list(pods) if name.startswith("on-")}
    assert job.nodes() == set(NODES) and len(pods) == 3

    def reached(pods, addresses, port):
        return [
            (pod, address)
            for pod in pods
            for address in addresses
            if space.cluster.script(
                "on", "kubectl", "-n", space.name, "exec", pod, "--", "python3", "-c", CONNECT, address, str(port)
            ).returncode
            == 0
        ]

    head = pods[job.pod(0)], 23456
    job.until(lambda: len(reached(strange, strange.values(), 8000)) == 4, "way between the nodes", timeout_s=30)
    assert len(reached(pods, head[:1], head[1])) == 3, "ranks reach the rendezvous"
    assert not reached(strange, head[:1], head[1]), "strangers do not"
    assert not reached(pods, strange.values(), 8000), "nor do ranks reach strangers"
    space.kubectl("delete", "networkpolicy", "muster")
    job.until(lambda: len(reached(strange, head[:1], head[1])) == 2, "strangers without the policy", timeout_s=30)


@pytest.mark.nightly
def test_fewer_ranks_than_asked_for_are_said(space):
    """Two pods of three find a place: the elastic job begins, and says with how many."""
    job = KubernetesJob(space, "pytorchjob", *SLOWLY, "max_steps=600")
    limit = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "two"}, "spec": {"hard": {"pods": "2"}}}
    space.cluster.apply(space.name, [limit])
    space.kubectl("wait", "quota/two", "--for=jsonpath={.status.hard.pods}=2", "--timeout=60s")
    job.apply()
    # The operator makes no Service while the quota refuses a pod: pod 1 does not find pod 0, and is replaced after 40 s.
    job.gather(2, timeout_s=300)
    job.until(lambda: job.step() >= 5, "steps of those who came")
    job.until(job.succeeded, "end", timeout_s=240, every_s=0.5)
    outcome = job.result().outcome
    assert (outcome["world_size"], outcome["asked_for"]) == (2, 3)
    assert any("trains with 2 of the 3 requested ranks" in line["text"] for line in job.result().events("note"))


@pytest.mark.nightly
def test_overlays_are_taken_by_the_api(space):
    for overlay in ("cpu", "gpu", "kueue", "debug"):
        said = space.insist("apply", "--dry-run=server", "-k", str(ROOT / "k8s/overlays" / overlay))
        assert "pytorchjob.kubeflow.org/muster" in said, overlay


@pytest.mark.nightly
def test_the_overlay_debug_runs_the_doctor(space):
    space.insist("apply", "-k", str(ROOT / "k8s/overlays/debug"))
    job = KubernetesJob(space, "pytorchjob")
    job.until(job.succeeded, "good end of the doctor", timeout_s=200, every_s=1)
    told = json.loads((space.volume / "doctor.json").read_text())["checks"]
    assert {result["check"] for result in told} >= {"ranks", "links", "speed"}
    assert len(told[0]["ranks"]) == 3


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_newcomers_own_loop_by_the_commands_that_init_printed(space, kubernetes, engine, newcomer, tmp_path):
    """In the image that its project builds; a pod is deleted, and the run goes on where it stopped."""
    newcomer.moves_to(space.volume)
    [build] = re.findall("^docker build .* my-job:1 .*$", (newcomer.project / "MUSTER.md").read_text(), re.M)
    done = subprocess.run(["bash", "-c", build], cwd=newcomer.project, env=engine, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = kubernetes.script("add", "my-job:1", timeout_s=300, env=engine)
    assert done.returncode == 0, done.stderr
    line = ["env", f"KUBECONFIG={configured(space, tmp_path)}", "bash", "-c", newcomer.printed("Kubernetes")]
    done = kubernetes.script("on", *line, cwd=newcomer.project)
    assert done.returncode == 0, done.stderr
    newcomer.reach(20, timeout_s=240)
    newcomer.gather(3)
    newcomer.next_step(lambda: space.kubectl("delete", "pod", "my-job-worker-1", "--wait=false"), timeout_s=240)
    space.kubectl("wait", "pytorchjob/my-job", "--for=condition=Succeeded", "--timeout=240s", timeout_s=260)
    newcomer.assert_exact()


def configured(space, folder):
    """Write a kubeconfig whose namespace is the test's, and return its path."""
    config = yaml.safe_load(space.cluster.kubectl("config", "view", "--raw", "--flatten"))
    config["contexts"][0]["context"]["namespace"] = space.name
    (folder / "config").write_text(yaml.safe_dump(config))
    return folder / "config"
