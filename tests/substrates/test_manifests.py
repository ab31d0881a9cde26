"""The manifests: strictly valid, in agreement with the code, and played on Docker with what each API injects."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time

import kubeflow.training
import kubeflow_trainer_api.models as trainer
import kubernetes_validate
import pytest
import yaml
from kit.docker import for_plain_user, skip
from kit.job import ROOT, Job, environment, run
from kit.kubernetes import KINDS
from kit.ledger import RECORDED, assert_exact

from muster import errors
from muster.launcher import kubernetes
from muster.launcher import spec as launch
from muster.launcher.substrate import here

K8S = ROOT / "k8s"


def documents(path):
    return [document for document in yaml.safe_load_all((K8S / path).read_text()) if document]


def everything():
    paths = sorted(path for path in K8S.rglob("*.yaml") if path.name != "kustomization.yaml" and not path.is_symlink())
    return [(str(path.relative_to(K8S)), document) for path in paths for document in documents(path.relative_to(K8S))]


def lost(given, kept, where=""):
    """What a typed model silently dropped or changed."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{where}/{key}"
            else:
                yield from lost(value, kept[key], f"{where}/{key}")
    elif isinstance(given, list):
        for number, value in enumerate(given):
            yield from (
                lost(value, kept[number], f"{where}[{number}]") if number < len(kept or []) else [f"{where}[{number}]"]
            )
    elif given != kept:
        yield f"{where}: {given!r} became {kept!r}"


def check(document):
    """Raises ValueError if the API would not take it, or would drop part of it."""
    kind = document["kind"]
    try:
        if kind == "PyTorchJob":
            response = type("Response", (), {"data": json.dumps(document)})()
            api = kubeflow.training.ApiClient()
            kept = api.sanitize_for_serialization(api.deserialize(response, "KubeflowOrgV1PyTorchJob"))
            as_pods(document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])
        elif kind in ("TrainJob", "TrainingRuntime"):
            kept = getattr(trainer, f"TrainerV1alpha1{kind}").from_dict(document).to_dict()
            if kind == "TrainingRuntime":
                as_pods(document["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])
        else:
            kubernetes_validate.validate(document, "1.32", strict=True)
            return
    except Exception as error:
        raise ValueError(f"{kind}: {error}") from error
    if dropped := list(lost(document, kept)):
        raise ValueError(f"{kind}: {dropped}")


def as_pods(template):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **template["metadata"]},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, "1.32", strict=True)


@pytest.mark.parametrize(
    ("path", "document"), everything(), ids=lambda value: value if isinstance(value, str) else value["kind"]
)
@pytest.mark.unit
def test_manifests_are_strictly_valid(path, document):
    check(document)


MUTATIONS = {
    "unknown field": lambda node: node.update(runPolici={}),
    "wrong type": lambda node: node.update({next(iter(node)): [[1]]}),
}


@pytest.mark.parametrize(
    ("path", "document"), everything(), ids=lambda value: value if isinstance(value, str) else value["kind"]
)
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.unit
def test_the_validation_can_fail(path, document, mutation):
    spoiled = copy.deepcopy(document)
    MUTATIONS[mutation](spoiled["spec"])
    with pytest.raises(ValueError):
        check(spoiled)


@pytest.mark.unit
def test_a_missing_field_is_found():
    job = documents(KINDS["pytorchjob"])[0]
    del job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(ValueError):
        check(job)
    with pytest.raises(ValueError):
        check({key: value for key, value in documents(KINDS["trainjob"])[1].items() if key != "spec"} | {"spec": {}})


@pytest.mark.unit
def test_apply_sees_what_kustomize_sees():
    """`kubectl apply -f k8s/` reads the folder's own files, which are those of the base."""
    assert sorted(path.name for path in K8S.glob("*.yaml")) == sorted(
        path.name for path in (K8S / "base").glob("*.yaml") if path.name != "kustomization.yaml"
    )
    assert all(path.resolve() == (K8S / "base" / path.name).resolve() for path in K8S.glob("*.yaml"))


def overlay(folder):
    """What kubectl makes of an overlay."""
    if not shutil.which("kubectl"):
        skip("kubectl is not installed")
    out = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    return list(yaml.safe_load_all(out.stdout))


@pytest.mark.parametrize("name", ["cpu", "gpu", "kueue", "debug"])
def test_overlays_build_and_are_valid(name):
    built = overlay(K8S / "overlays" / name)
    assert sorted(document["kind"] for document in built) == ["NetworkPolicy", "PersistentVolumeClaim", "PyTorchJob"]
    for document in built:
        check(document)
    job = next(document for document in built if document["kind"] == "PyTorchJob")
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["image"] == ("muster:gpu" if name == "gpu" else "muster:cpu")
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == (job["spec"]["nprocPerNode"] if name == "gpu" else None)


def test_what_the_gpu_overlay_has_commented_out_is_valid_as_well(tmp_path):
    """RDMA and NUMA: nobody has tried them, so at least the API would take them."""
    shutil.copytree(K8S / "base", tmp_path / "base")
    text = (K8S / "overlays/gpu/kustomization.yaml").read_text()
    text, number = re.subn(r"^( +)# (- \{|- op:|  path:|  value:)", r"\1\2", text, flags=re.M)
    assert number == 5
    (tmp_path / "overlays/gpu").mkdir(parents=True)
    (tmp_path / "overlays/gpu/kustomization.yaml").write_text(text)
    job = next(document for document in overlay(tmp_path / "overlays/gpu") if document["kind"] == "PyTorchJob")
    check(job)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["rdma/hca"] == "1"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert (values["NUMA_BINDING"], values["OMP_NUM_THREADS"]) == ("node", "4")


def pod(job):
    """The pod template of a job and how many pods it has."""
    for document in documents(KINDS[job]):
        spec = document["spec"]
        if document["kind"] == "PyTorchJob":
            return spec["pytorchReplicaSpecs"]["Worker"]["template"], spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
        if document["kind"] == "TrainingRuntime":
            return spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"], spec["mlPolicy"][
                "numNodes"
            ]
        if document["kind"] == "Job":
            return spec["template"], spec["completions"]
    raise AssertionError(job)


@pytest.mark.parametrize("job", KINDS)
def test_manifests_agree_with_the_code(job):
    template, _ = pod(job)
    spec, container = template["spec"], template["spec"]["containers"][0]
    done = subprocess.run(
        [sys.executable, "-m", "muster", "launch", "check", *container["args"]],
        cwd="/tmp",
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert "/job" + done.stdout.strip().removeprefix("/tmp") == "/job/runs/muster" and "/job/runs" in mounts
    assert container["command"] == ["tini", "--", "python3", "-m", "muster", "launch", "node"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    settings = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert settings["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert spec["terminationGracePeriodSeconds"] == int(settings["GRACE_S"])
    made = here({"HOSTNAME": "muster-worker-0", **variables(job, 0)})
    timeout_s = int(launch.environment(made.spec(variables(job, 0)))["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 30 <= timeout_s < spec["terminationGracePeriodSeconds"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert (
        volumes[mounts["/job/runs"]]["persistentVolumeClaim"]["claimName"]
        == documents("base/volume.yaml")[0]["metadata"]["name"]
    )
    assert container["securityContext"]["readOnlyRootFilesystem"] and container["securityContext"]["capabilities"] == {
        "drop": ["ALL"]
    }
    assert spec["securityContext"]["runAsUser"] == 1000 and not spec["automountServiceAccountToken"]
    selector = documents("base/network-policy.yaml")[0]["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= template["metadata"]["labels"].items()


def variables(job, index, address="10.1.0.7"):
    """The whole environment of a pod."""
    template, pods = pod(job)
    name, given = injected(job, index, pods)
    own = {entry["name"]: entry.get("value", address) for entry in template["spec"]["containers"][0]["env"]}
    return {"HOSTNAME": name.split(".")[0], **own, **given}


@pytest.mark.nightly(but=["pytorchjob-7-75-143"])
@pytest.mark.parametrize("job, before, after, code", [
    ("pytorchjob", 7, None, 143), ("pytorchjob", None, None, 143), ("pytorchjob", 75, 7, 7), ("pytorchjob", 7, 75, 143),
    ("indexed-job", 7, None, 1), ("indexed-job", None, None, 1), ("indexed-job", 75, 7, 7), ("indexed-job", 7, 75, 75),
    ("trainjob", 7, None, 1), ("trainjob", None, None, 1), ("trainjob", 75, 7, 7), ("trainjob", 7, 75, 75),
])  # fmt: skip
def test_a_pod_ends_as_its_own_attempt_did(tmp_path, own_python, job, before, after, code):
    """An outcome.json that an earlier attempt left says nothing of agents that never met."""
    _, _, _, *command = pod(job)[0]["spec"]["containers"][0]["command"]
    folder = tmp_path / "run"
    folder.mkdir()
    if before:
        (folder / "outcome.json").write_text(f'{{"exit_code": {before}, "attempt": "1"}}')
    writes = f'echo \'{{"exit_code": {after}, "attempt": "2"}}\' >{folder}/outcome.json; ' if after else ""
    place = own_python(f"{writes}exit 1")
    env = environment(**variables(job, 0), PATH=f"{place}:{os.environ['PATH']}")
    line = [place / "python3", *command, f"output_dir={folder}"]
    assert subprocess.run(line, env=env, cwd=tmp_path, timeout=60).returncode == code


@pytest.mark.parametrize("job, agent, code", [
    ("pytorchjob", 0, 0), ("pytorchjob", 75, 143), ("pytorchjob", 69, 143), ("pytorchjob", 3, 3),
    ("indexed-job", 0, 0), ("indexed-job", 75, 75), ("indexed-job", 69, 1), ("indexed-job", 1, 7),
    ("trainjob", 0, 0), ("trainjob", 75, 75), ("trainjob", 69, 1), ("trainjob", 2, 2),
])  # fmt: skip
def test_a_pod_ends_as_its_script_did(tmp_path, own_python, job, agent, code):
    """Its args are `-- my.py ...`. 75 and lost nodes start it again, a script that has failed ends the job."""
    _, _, _, *command = pod(job)[0]["spec"]["containers"][0]["command"]
    (tmp_path / "my.py").touch()
    place = own_python(f'printf "%s\\n" "$@" >{tmp_path}/words; exit {agent}')
    env = environment(**variables(job, 0), PATH=f"{place}:{os.environ['PATH']}")
    line = [place / "python3", *command, "--", "my.py", "--lr", "1e-3", "a b"]
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    words = (tmp_path / "words").read_text().splitlines()
    assert done.returncode == code and words[-4:] == ["my.py", "--lr", "1e-3", "a b"], done
    assert f"--max-restarts={0 if job == 'trainjob' else 3}" in words
    assert ("muster: my.py: " in done.stderr) == (agent != 0), done


@pytest.mark.unit
def test_permanent_failures_are_those_of_the_code():
    job = next(document for document in documents(KINDS["indexed-job"]) if document["kind"] == "Job")
    runtime = documents(KINDS["trainjob"])[0]["spec"]["template"]["spec"]
    of_pods = runtime["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    final = {kind.exit_code for kind in errors.MusterError.__subclasses__()} - {1, 8, 75}
    for rules in (job["spec"]["podFailurePolicy"]["rules"], of_pods):
        rule = next(rule for rule in rules if rule["action"] == "FailJob")
        assert set(rule["onExitCodes"]["values"]) == final == {*errors.final()}
    # Without it the JobSet would start the failed job again, and again.
    assert {"name": "permanent", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]} in runtime[
        "failurePolicy"
    ]["rules"]
    assert runtime["failurePolicy"]["maxRestarts"] > 0, "what a restart can mend is restarted"
    container = job["spec"]["template"]["spec"]["containers"][0]
    settings = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(settings["NNODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    service = documents(KINDS["indexed-job"])[0]
    assert settings["HEAD"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert [port["port"] for port in service["spec"]["ports"]] == [kubernetes.PORT]
    assert [port["containerPort"] for port in container["ports"]] == [kubernetes.PORT]


@pytest.mark.unit
def test_the_operators_own_policy_reaches_torchrun():
    """minReplicas, maxReplicas and maxRestarts are PyTorchJob's to say; the manifest says nothing of the rendezvous."""
    elastic = documents(KINDS["pytorchjob"])[0]["spec"]["elasticPolicy"]
    assert set(elastic) == {"minReplicas", "maxReplicas", "maxRestarts"}
    line = launch.command(kubernetes.pytorchjob(variables("pytorchjob", 1)), [])
    assert {"--nnodes=1:3", "--max-restarts=100", "--nproc-per-node=1", "--local-addr=10.1.0.7"} <= set(line)


def injected(job, index, pods):
    """What the API's controller puts into pod `index`, and the names that cluster DNS gives it."""
    if job == "pytorchjob":
        spec = documents(KINDS[job])[0]["spec"]
        elastic = spec["elasticPolicy"]
        return f"muster-worker-{index}", {
            "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "muster-worker-0:23456",  # whatever the manifest leaves out
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_MAX_RESTARTS": str(elastic["maxRestarts"]), "PET_NPROC_PER_NODE": spec["nprocPerNode"], "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
    if job == "trainjob":
        job_trainer = documents(KINDS[job])[1]["spec"]["trainer"]
        return f"muster-node-0-{index}.muster", {
            "PET_NNODES": str(pods), "PET_NPROC_PER_NODE": str(job_trainer["numProcPerNode"]), "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "muster-node-0-0.muster", "PET_MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": str(index),
        }  # fmt: skip
    return f"muster-{index}.muster", {"JOB_COMPLETION_INDEX": str(index)}


class Pods(Job):
    """One container a pod on a network of their own, restarted as the job's policy has it."""

    def __init__(self, env, folder, job, *arguments):
        self.env, self.job, self.prefix = env, job, f"muster-test-{job}"
        self.template, self.count = pod(job)
        self.arguments = ["name=muster", "output_dir=runs/muster", *arguments]
        self.runs, self.tests = folder / "runs", folder / "tests"
        super().__init__(self.runs / "muster")
        for_plain_user(self.runs, self.tests)

    def __enter__(self):
        self.__exit__()  # what a test run that was killed may have left
        self.docker("network", "create", "--internal", "--subnet=172.31.77.0/24", self.prefix)
        for index in range(self.count):
            self.start(index)
        return self

    def __exit__(self, *_):
        for index in range(self.count):
            self.docker("rm", "-f", f"{self.prefix}-{index}", ok=False)
        self.docker("network", "rm", self.prefix, ok=False)

    def start(self, index):
        name, _ = injected(self.job, index, self.count)
        container = self.template["spec"]["containers"][0]
        address = f"172.31.77.{10 + index}"
        env = {**variables(self.job, index, address), "PYTHONPATH": "/opt/muster:/tests", "LEDGER": "/job/runs/ledger"}
        user = self.template["spec"]["securityContext"]
        entrypoint, *command = container["command"]
        self.docker(
            "run", "-d", "--name", f"{self.prefix}-{index}", "--network", self.prefix, "--network-alias", name, "--ip", address,
            "--hostname", name.split(".")[0], "--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--read-only", "--tmpfs", "/tmp",
            "--cap-drop=ALL", "--security-opt=no-new-privileges", "--shm-size=256m", "-v", f"{self.runs}:/job/runs", "-v", f"{self.tests}:/tests:ro",
            *(word for key, value in env.items() for word in ("-e", f"{key}={value}")),
            "--entrypoint", entrypoint, container["image"], *command, *self.arguments,
        )  # fmt: skip

    def docker(self, *command, ok=True):
        done = subprocess.run(["docker", *command], env=self.env, capture_output=True, text=True, timeout=120)
        assert not ok or done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def code(self, index):
        """The exit code of a pod that has ended, else None."""
        status, code = self.docker(
            "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", f"{self.prefix}-{index}"
        ).split()
        return int(code) if status == "exited" else None

    def until_all_succeed(self, timeout_s=200):
        """Play the controller: a pod that failed is started again, until all have ended well."""
        self.until(self.all_succeeded, "good end of all pods", timeout_s=timeout_s, every_s=0.5)

    def all_succeeded(self):
        codes = [self.code(index) for index in range(self.count)]
        failed = [index for index, code in enumerate(codes) if code]
        if failed and self.job == "trainjob":  # static rendezvous: the job is restarted as a whole
            failed = range(self.count)
        for restart in (self.delete, self.start):
            for index in failed[: None if self.job == "trainjob" else 1]:
                restart(index)
        return codes == [0] * self.count

    def delete(self, index):
        """As kubectl delete pod does: SIGTERM, and SIGKILL after the grace period."""
        self.docker(
            "stop", "--time", str(self.template["spec"]["terminationGracePeriodSeconds"]), f"{self.prefix}-{index}"
        )
        self.docker("rm", "-f", f"{self.prefix}-{index}")

    @property
    def log(self):
        return "\n".join(
            self.docker("logs", "--tail", "40", f"{self.prefix}-{index}", ok=False) for index in range(self.count)
        )


@pytest.mark.nightly
@pytest.mark.docker
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", KINDS)
def test_pods_train_as_one_machine_does_and_survive_a_deletion(engine, tmp_path, job):
    """The same losses and weights, bit for bit, although a pod was deleted in the middle; the sample ledger is exact."""
    arguments = (
        *RECORDED,
        "virtual_world_size=4",
        "batch_size=12",
        "max_steps=200",
        "log.every_steps=1",
        "log.report=false",
        "checkpoint.every_steps=50",
        "dist.timeout_s=30",
    )
    (tmp_path / "ledger").mkdir()
    plain = run(tmp_path / "plain", *arguments, "+model.delay_s=0", env={"LEDGER": str(tmp_path / "ledger")}, ranks=2)
    with Pods(engine, tmp_path, job, *arguments, "model._target_=kit.parts.models.Paced") as pods:
        pods.reach(30, timeout_s=240)
        pods.gather()
        pods.pace(1)  # the others must not end before pod 1 is back
        before = len(pods.attempts())
        pods.delete(1)
        pods.start(1)
        pods.until(
            lambda: pods.all_succeeded() or (len(pods.attempts()) > before and pods.world_size() >= 2),
            "return of pod 1",
            timeout_s=200,
            every_s=0.5,
        )
        pods.pace(0.1)
        pods.until_all_succeed()
        result = pods.result()
        assert result.events("preempted") and result.events("resume")
        assert_exact(pods.runs / "ledger", steps=200, batch_size=12)
        assert (result.losses, result.sha256) == (plain.losses, plain.sha256)


@pytest.mark.nightly
@pytest.mark.docker
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", KINDS)
@pytest.mark.parametrize(("mistake", "code"), [("modell=mlp", 2), ("data=mnist", 3)])
def test_a_permanent_failure_has_its_own_exit_code(engine, tmp_path, job, mistake, code):
    with Pods(engine, tmp_path, job, mistake) as pods:
        pods.until(lambda: pods.code(0) is not None, "end of pod 0", timeout_s=120, every_s=0.5)
        assert pods.code(0) == code, pods.log


@pytest.mark.kubeconfig
@pytest.mark.timeout(900)
def test_on_any_cluster_that_kubeconfig_names():
    """Apply k8s/ in a namespace of its own, delete a worker on the way, see the job end: needs PyTorchJob and muster:cpu there."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip(
            "KUBECONFIG names no cluster: kind, minikube or a real one, with the training operator and the image muster:cpu"
        )
    space = f"muster-test-{time.time_ns() % 10**9}"

    def kubectl(*line):
        return subprocess.run(["kubectl", "--namespace", space, *line], capture_output=True, text=True, timeout=120)

    made = kubectl("create", "namespace", space)
    assert made.returncode == 0, made.stderr
    try:
        applied = kubectl("apply", "-f", str(K8S))
        assert applied.returncode == 0, applied.stderr
        deleted, out, state = False, "", ""
        for _ in range(400):
            out = kubectl("logs", "-l", "app.kubernetes.io/instance=muster", "--tail=5").stdout
            if not deleted and re.search(r"^step \d\d+/", out, re.M):
                assert kubectl("delete", "pod", "muster-worker-1", "--wait=false").returncode == 0
                deleted = True
            state = kubectl("get", "pytorchjob", "muster", "-o", "jsonpath={.status.conditions[-1:].type}").stdout
            if state in ("Succeeded", "Failed"):
                break
            time.sleep(2)
        assert state == "Succeeded" and deleted, out
    finally:
        kubectl("delete", "namespace", space, "--wait=false")
