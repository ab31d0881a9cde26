"""The doctor says what is wrong with a cluster: each check has a test in which it fails and names the cause."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.job import ROOT, environment, run

from muster.doctor.base import Visit
from muster.doctor.checks import compiler
from muster.doctor.checks.gpus import told
from muster.doctor.lint import lint
from muster.doctor.show import bad_host, verdict
from muster.doctor.visit import all_checks
from muster.doctor.visit import judged as judged_of

CHECKS = {check.name: check for check in all_checks()}
GOOD = {
    "ranks": {"world_size": 2, "meant": None, "slurm": ""},
    "addresses": {
        "master": "one",
        "master_is": ["10.0.0.1"],
        "own": ["10.0.0.1"],
        "interface": "",
        "mtus": {"eth0": 1500},
    },
    "clocks": {"time": 1000.0},
    "versions": {"python": "3.11", "torch": "2.15", "cuda": "", "nccl": "", "gpu": "", "kit": "1", "machine": "x"},
    "processors": {"usable": [0, 1, 2, 3], "quota": None, "threads": 2, "local_world_size": 1, "asked": 4},
    "memory": {"free": 8.0, "shared": 4.0, "files": 4096, "ranks": 1, "workers": 2},
    "folder": {"path": "runs/a", "at": "/runs", "free": 50.0, "writable": True, "seen": True, "speed": 300.0},
    "links": {"links": {}},
    "speed": {"gflops": 100.0, "sums": {}},
    "gpus": {"gpu": "", "there": 0},
    "compiler": {"has_gpu": True, "compiler": "/usr/bin/gcc", "error": ""},
    "ports": {"range": "32768 to 60999", "free": 28000, "master": "29500"},
}
GPU = {"free": 0.99, "gib": 80.0, "there": 1, "driver": "570.1", "celsius": 40, "ecc": 0, "slowed": False}
ON_0, ON_1 = {**GPU, "gpu": "GPU-a"}, {**GPU, "gpu": "GPU-b"}


def judged(name, *changes, visit=None):
    """The findings of a check on a rank on each of as many hosts as there are `changes` of good facts."""
    ranks = [
        {"rank": rank, "host": f"host{rank}", "local_rank": 0, **GOOD[name], **change}
        for rank, change in enumerate(changes)
    ]
    CHECKS[name].summary(ranks)
    return CHECKS[name].judge(ranks, visit or Visit("runs/run"))


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.unit
def test_nothing_is_said_of_a_cluster_that_is_well(name):
    assert judged(name, {}, {}) == [] and judged(name, {}) == []


@pytest.mark.unit
def test_every_check_has_facts_here():
    assert CHECKS.keys() == GOOD.keys()


@pytest.mark.parametrize(
    "name, changes, fails, says",
    [
        ("ranks", [{"meant": 4}, {}], True, "2 of 4 ranks are here, on host0, host1"),
        ("ranks", [{"slurm": "7"}, {"slurm": "8"}], True, "2 Slurm jobs have met: 7, 8"),
        ("addresses", [{"master_is": ["127.0.0.1"]}, {}], True, "MASTER_ADDR=one is loopback on host0"),
        ("addresses", [{}, {"master_is": []}], True, "has no address on host1"),
        ("addresses", [{}, {"master_is": ["10.0.0.9"]}], True, "not one host: 10.0.0.1 on host0; 10.0.0.9 on host1"),
        ("addresses", [{}, {"own": ["127.0.1.1"]}], False, "the host name of host1 resolves to a loopback address"),
        ("addresses", [{}, {"mtus": {"eth0": 9000}}], False, "MTU of eth0 differs: 1500 on host0; 9000 on host1"),
        ("clocks", [{}, {"time": 1000.0}, {"time": 1090.0}], False, "host2 by +90.0 s"),
        ("versions", [{}, {"torch": "2.11"}], True, "torch differs: 2.15 on host0; 2.11 on host1"),
        ("versions", [{}, {"python": "3.12"}], False, "python differs"),
        ("processors", [{}, {"threads": 9}], False, "host1: 1 ranks start 9 threads on 4 processors"),
        ("processors", [{}, {"quota": 1.5}], False, "on 1.5 processors"),
        ("processors", [{"usable": [0]}, {}], True, "asked for 4 processors per task, but only 1 can be used"),
        ("memory", [{}, {"free": 0.4}], True, "host1: 0.4 GiB of memory"),
        ("memory", [{}, {"shared": 0.06}], True, "host1: 0.06 GiB of /dev/shm"),
        ("memory", [{}, {"files": 256}], False, "at most 256 file descriptors"),
        ("folder", [{}, {"seen": False}], True, "not the folder that rank 0 writes to on host1"),
        ("folder", [{"writable": False}, {}], True, "cannot be written to on host0"),
        ("folder", [{"free": 0.2}, {}], True, "0.20 GB are free"),
        ("folder", [{}, {"speed": 3.0}], False, "3 MB/s on host1"),
        ("links", [{"links": {"0-1": [1e-4, 900.0], "0-2": [1e-4, 20.0]}}, {"links": {"1-2": [1e-4, 950.0]}}, {}], False, "ranks 0 on host0 and 2 on host2 talk at 20 MB/s, most at 900"),
        ("gpus", [ON_0, {**ON_1, "free": 0.5}], False, "rank 1 on host1: 50% of 80 GiB of GPU memory are free"),
        ("gpus", [ON_0, {**ON_1, "free": 0.1}], True, "rank 1 on host1: 10% of 80 GiB"),
        ("gpus", [ON_0, {**ON_1, "ecc": 3}], True, "rank 1 on host1: 3 uncorrected memory errors"),
        ("gpus", [ON_0, {**ON_1, "slowed": True, "celsius": 91}], False, "rank 1 on host1: the GPU slows itself down at 91"),
        ("gpus", [ON_0, {**ON_1, "driver": "560.2"}], False, "the driver differs: 570.1 on host0; 560.2 on host1"),
        ("gpus", [ON_0, ON_0], True, "rank 1 on host1 and rank 0 have the same GPU, GPU-a"),
        ("gpus", [{"there": 8}, {"there": 8}], False, "host0 has 8 GPUs, but training uses the CPU"),
        ("compiler", [{}, {"compiler": ""}], False, "host1: there is no C compiler"),
        ("compiler", [{}, {"error": "CalledProcessError: gcc"}], False, "host1: torch.compile fails: CalledProcessError"),
        ("ports", [{}, {"free": 12}], False, "host1: 12 ports are free of 32768 to 60999"),
        ("ports", [{}, {"range": "50000 to 50100"}], False, "differs: 32768 to 60999 on host0; 50000 to 50100 on host1"),
        ("ports", [{}, {"master": "29501"}], True, "MASTER_PORT differs: 29500 on host0; 29501 on host1"),
        ("speed", [{}, {"gflops": 40.0}, {}], False, "rank 1 on host1 multiplies at 40 GFLOP/s, most at 100"),
    ],
)  # fmt: skip
@pytest.mark.unit
def test_what_is_wrong_is_named_with_its_host_and_a_remedy(name, changes, fails, says):
    found = judged(name, *changes)
    assert [finding for finding in found if says in finding.what and finding.fails is fails and finding.remedy], found


@pytest.fixture
def compiled(monkeypatch):
    """On a device that is the CPU: what is given to torch.compile, which `compiled` sets."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))

    def by(function):
        monkeypatch.setattr(torch, "compile", function)

    return by


def on_gpu(local_rank):
    environment = SimpleNamespace(local_rank=local_rank)
    return CHECKS["compiler"].look(
        SimpleNamespace(device=torch.device("cuda", 0), environment=environment), Visit("runs/run")
    )


def broken(_):
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


@pytest.mark.unit
def test_one_rank_of_a_host_compiles_a_kernel_for_its_gpu(compiled):
    compiled(lambda function: function)
    assert on_gpu(0)["error"] == "" and on_gpu(0)["has_gpu"]
    compiled(lambda function: lambda values: 4 * values)
    assert on_gpu(0)["error"] == "the compiled function computes another sum"
    compiled(broken)
    assert "Failed to find C compiler" in on_gpu(0)["error"] and "\n" not in on_gpu(0)["error"]
    assert on_gpu(1)["error"] == "", "another rank of the host does"
    cpu = SimpleNamespace(device=torch.device("cpu"))
    assert not CHECKS["compiler"].look(cpu, Visit("runs/run"))["has_gpu"], "where nothing is compiled by Triton"


@pytest.mark.unit
@pytest.mark.parametrize("there, chosen, found", [
    ({"gcc", "clang"}, None, "gcc"), ({"clang"}, None, "clang"), ({"gcc", "icx"}, "icx", "icx"), (set(), None, None),
])  # fmt: skip
def test_the_compiler_is_the_one_that_triton_takes(there, chosen, found, monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setenv("CC", chosen or "")
    assert compiler.find() == found


@pytest.mark.unit
def test_one_host_of_several_may_be_bad_and_what_is_between_hosts_is_nobody_s():
    def of(*findings, hosts=("a", "b")):
        found = [{"what": "", "remedy": "", "fails": fails, "host": host} for host, fails in findings]
        return bad_host([{"check": "memory", "ranks": [{"host": host} for host in hosts], "findings": found}])

    assert of(("b", True)) == of(("b", True), ("a", False), ("b", True)) == "b"
    assert of() == of(("b", False)) == of(("a", True), ("b", True)) == of(("b", True), ("", True)) == ""
    assert of(("b", True), hosts=("b",)) == "", "the job has no other"
    assert [each.host for each in judged("memory", {}, {"free": 0.1})] == ["host1"]
    assert [each.host for each in judged("folder", {}, {"seen": False})] == [""], "of two, either may lack the mount"
    assert [each.host for each in judged("folder", {}, {"seen": False}, {})] == ["host1"]


@pytest.mark.unit
def test_a_check_that_no_rank_can_make_is_not_here_and_one_that_some_cannot_is_a_warning():
    """As on a system without /proc; if only one node has none, it differs from the others."""
    check = CHECKS["ports"]
    sees = {"rank": 0, "host": "a", "local_rank": 0, **GOOD["ports"]}
    blind = {"rank": 1, "host": "b", "local_rank": 0, "cannot": "FileNotFoundError: /proc"}
    none = judged_of(check, [blind], Visit("runs/a"))
    assert not none["here"] and none["findings"] == [] and "/proc" in none["seen"]
    some = judged_of(check, [sees, blind], Visit("runs/a"))
    assert some["here"] and "rank 1 on b could not look" in some["findings"][0]["what"]
    assert not some["findings"][0]["fails"]
    results = [{"check": "ports", "ranks": [blind], **none}]
    assert verdict(results) == "this cluster can train, with 1 rank on 1 host"


def doctor(folder, *arguments, ranks=None, before=()):
    launcher = [] if ranks is None else ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return subprocess.run(
        [*before, sys.executable, "-m", *launcher, "muster", "doctor", *arguments],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.unit
def test_what_nvidia_smi_prints_is_understood():
    """Lines as the tool's own help describes them; a value that a device does not have is `[N/A]`."""
    text = "GPU-a, 570.86.10, 41, 0, Not Active\nGPU-b, 570.86.10, 88, [N/A], Active\n"
    assert told("GPU-a", text) == {"driver": "570.86.10", "celsius": 41, "ecc": 0, "slowed": False}
    assert told("GPU-b", text) == {"driver": "570.86.10", "celsius": 88, "slowed": True}
    assert told("GPU-c", text) == {} and told("GPU-a", "No devices were found") == {}


@pytest.mark.nightly
def test_a_machine_that_can_train(tmp_path):
    done = doctor(tmp_path, "output_dir=runs/a", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "runs/doctor.json").read_text())
    assert found["ok"] and {check["check"] for check in found["checks"]} == CHECKS.keys()
    assert all(len(check["ranks"]) == 2 for check in found["checks"])
    assert (tmp_path / "runs/links.png").exists() and "GFLOP/s" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("this cluster can train, with 2 ranks on 1 host")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # nothing is left where one stands


@pytest.mark.nightly
def test_a_rank_that_is_not_there_fails_the_visit(tmp_path):
    done = doctor(tmp_path, "--quick", "--expect", "3", ranks=2)
    assert done.returncode == 1 and "fail: ranks: 2 of 3 ranks are here" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("this cluster cannot train yet: mend first ranks: 2 of 3 ranks")
    assert json.loads((tmp_path / "runs/doctor.json").read_text())["failed"] == ["ranks"]


@pytest.mark.nightly
def test_more_threads_than_processors_are_seen(tmp_path):
    done = doctor(tmp_path, "--quick", ranks=2, before=("taskset", "-c", "0"))
    assert done.returncode == 0 and "2 ranks start 2 threads on 1 processors" in done.stdout, done.stdout


def test_a_run_may_ask_the_doctor_first(tmp_path):
    well = run(tmp_path / "well", "doctor=true", "max_steps=2", ranks=2)
    assert well.outcome["outcome"] == "done"
    ill = run(tmp_path / "ill", "doctor=true", "max_steps=2", ok=False, env={"SLURM_CPUS_PER_TASK": "900"})
    assert ill.code == 2 and "Slurm was asked for 900 processors" in ill.said[-1], ill.out
    assert not (tmp_path / "ill/checkpoints").exists()


SBATCH = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:USR1@120
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun torchrun -m train
"""


@pytest.mark.parametrize(
    "change, line, says",
    [
        (("#SBATCH --nodes", "# SBATCH --nodes"), 2, "without a blank"),
        (("#SBATCH --nodes", "##SBATCH --mem=1G\n#SBATCH --nodes"), None, None),
        (
            ("export SRUN", "# >>> conda <<<conda\nx=$((1 << 5)) # SRUN_CPUS_PER_TASK\nbc <<<EOF\nexport OTHER"),
            9,
            "does not inherit",
        ),
        (("export SRUN", "export OTHER"), 6, "does not inherit"),
        (("srun torchrun", 'time srun -c "$SLURM_CPUS_PER_TASK" torchrun --nnodes=4 # PET_NNODES'), None, None),
        (("export SRUN", "export OTHER"), 6, "srun does not inherit --cpus-per-task"),
        (
            ("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n", "cd code && "),
            5,
            "srun does not inherit --cpus-per-task",
        ),
        (("export SRUN", "# cd code; srun hostname\necho srun; export SRUN"), None, None),
        (("#SBATCH --signal=B:USR1@120\n", ""), 1, "--signal=B:USR1@120"),
        (("srun torchrun", "echo begins\n#SBATCH --time=1\nsrun torchrun"), 7, "after the first command"),
        (("srun torchrun", "export PET_NNODES=2\nsrun torchrun --nnodes=4"), 7, "wins over PET_NNODES"),
        (("=2\n", "=2\r\n"), 2, "carriage return"),
    ],
)
@pytest.mark.unit
def test_mistakes_in_a_batch_script(tmp_path, change, line, says):
    (tmp_path / "job.sbatch").write_text(SBATCH)
    assert lint([tmp_path]) == [] and change[0] in SBATCH
    (tmp_path / "job.sbatch").write_bytes(SBATCH.replace(*change).encode())
    found = lint([tmp_path])
    assert len(found) == (says is not None), found
    assert not says or (found[0].startswith(f"{tmp_path}/job.sbatch:{line}: ") and says in found[0]), found


MANIFEST = """apiVersion: v1
kind: Service
metadata: {name: ranks}
spec: {clusterIP: None}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
spec:
  trainer: {numNodes: 2}
  podTemplate:
    terminationGracePeriodSeconds: 120
    command: [torchrun, --rdzv-endpoint=ranks.default:29500]
"""


@pytest.mark.parametrize(
    "change, says",
    [
        (("spec: {clusterIP: None}", "spec: {}"), "a Service that spreads over all pods"),
        (("spec: {clusterIP: None}", "spec:"), "a Service that spreads over all pods"),
        (("spec: {clusterIP: None}", "spec: {selector: {app: ranks}}"), "a Service that spreads over all pods"),
        (("spec: {clusterIP: None}", "spec: {selector: {app: ranks, apps.kubernetes.io/pod-index: '0'}}"), None),
        (("  trainer: {numNodes: 2}\n", "  suspend: !env 2024-13-45\n"), "without spec.trainer"),
        (("  trainer: {numNodes: 2}\n", "  trainer: *unknown\n"), "not valid YAML"),
        (("GracePeriodSeconds: 120", "GracePeriodSeconds: 10"), "killed after 10 s"),
        (("  trainer: {numNodes: 2}\n", "  runtimeRef: {name: torch}\n"), "without spec.trainer"),
    ],
)
@pytest.mark.unit
def test_mistakes_in_a_manifest(tmp_path, change, says):
    (tmp_path / "job.yaml").write_text(MANIFEST)
    assert lint([tmp_path]) == []
    (tmp_path / "job.yaml").write_text(MANIFEST.replace(*change))
    found = lint([tmp_path])
    assert len(found) == (says is not None) and (not says or says in found[0]), found


CLAIM = """\
kind: PersistentVolumeClaim
metadata: {name: team-a-runs}
spec: {accessModes: [ReadWriteOnce]}
---
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master: {restartPolicy: ExitCode, template: {volumes: [{persistentVolumeClaim: {claimName: team-a-runs}}]}}
    Worker: {replicas: 3, restartPolicy: ExitCode}
"""
CONTINUED = """\
#!/bin/bash
#SBATCH --nodes=2 --cpus-per-task=8
  # a comment
#SBATCH --signal=B:USR1@120
cat > other.sbatch <<EOF
#SBATCH --nodes=3
EOF
srun \\
  --cpus-per-task=8 torchrun train.py
"""


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("one-pod.yaml", CLAIM, None),
        ("more-pods.yaml", CLAIM.replace("Master: {", "Master: {replicas: 2, "), "write ReadWriteMany"),
        ("another.yaml", CLAIM.replace("claimName: team-a-", "claimName: team-b-"), None),
        ("another.yaml", CLAIM.replace("claimName: team-a-runs", "claimName: team-a-runs-2"), None),
        ("slip.yaml", CLAIM.replace("claimName: team-a-runs", "claimName: team-a-rnus"), "do you mean team-a-runs?"),
        ("list.yaml", "kind: Service\nmetadata: {name: [a]}\nspec: {}\n", None),
        ("itself.yaml", f"{CLAIM}  more: &more {{again: *more}}\n", None),
        ("tag.yaml", "a: !!timestamp x\n", "not valid YAML"),
        ("etcd.yaml", "kind: Deployment\nspec: {terminationGracePeriodSeconds: 5}\n", None),
        ("used.yaml", "kind: TrainJob\nspec: {trainer: {command: [torchrun, --nnodes=$(PET_NNODES)]}}\n", None),
        ("continued.sbatch", CONTINUED, None),
        ("lost.sbatch", CONTINUED.replace("--cpus-per-task=8 torchrun", "bash -c torchrun"), "does not inherit"),
        (
            "kit.sbatch",
            CONTINUED.replace("cat >", 'source "$(dirname "$0")/slurm/job.sh"\ncat >').replace("B:", ""),
            "write B:USR1",
        ),
    ],
)
@pytest.mark.unit
def test_a_file_as_people_write_it(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    found = lint([tmp_path])
    assert len(found) == bool(says) and (not says or says in found[0]), found


@pytest.mark.parametrize(
    "path, change, line, says",
    [
        ("slurm/ddp.sbatch", ("#SBATCH --signal=B:USR1@120\n", ""), 1, "--signal=B:USR1@120"),
        ("slurm/ddp.sbatch", ("--signal=B:USR1@120", "--signal=USR1@120"), None, "write B:USR1@120"),
        ("slurm/ddp.sbatch", ("--ntasks-per-node=1", "--ntasks-per-node=2"), None, "write 1; NPROC"),
        ("k8s/base/pytorchjob.yaml", ("restartPolicy: ExitCode", "restartPolicy: OnFailure"), 28, "write ExitCode"),
        ("k8s/base/pytorchjob.yaml", ("restartPolicy: ExitCode", "restartPolicy: Never"), 28, "preempted pod"),
        ("k8s/base/pytorchjob.yaml", ("POD_NAME", "NAME_OF_POD"), None, None),
        ("k8s/base/pytorchjob.yaml", ("restartPolicy: ExitCode", "<<: {restartPolicy: ExitCode}"), None, None),
        ("k8s/base/pytorchjob.yaml", ("        spec:\n", "        spec: {\n"), None, "not valid YAML"),
        (
            "k8s/indexed-job/indexed-job.yaml",
            ("completions: 2", "completions: 4"),
            None,
            "completions 4, parallelism 2",
        ),
        ("k8s/indexed-job/indexed-job.yaml", ('NNODES, value: "2"', 'NNODES, value: "3"'), None, "NNODES 3"),
        ("k8s/indexed-job/indexed-job.yaml", ("muster-0.muster}", "muster}"), None, "write muster-0.muster"),
        ("k8s/indexed-job/indexed-job.yaml", ("muster-0.muster}", "muster-0.muster.team.svc}"), None, None),
        ("k8s/indexed-job/indexed-job.yaml", ("subdomain: muster\n", "hostname: a\n"), None, "without subdomain"),
        (
            "k8s/indexed-job/indexed-job.yaml",
            ("clusterIP: None", "type: ClusterIP"),
            None,
            "a Service that is not headless",
        ),
        (
            "docker/compose.yaml",
            ("stop_grace_period: 60s", "stop_grace_period: 1s"),
            78,
            "GRACE_S gives its ranks 60 s",
        ),
        ("docker/compose.yaml", ("    stop_grace_period: 60s\n", ""), 1, "kills a node 10s after"),
        ("docker/compose.yaml", ("stop_grace_period: 60s", "stop_grace_period: 1m30s"), None, None),
        ("docker/compose.yaml", ("stop_grace_period: 60s", "stop_grace_period: 1.2.3s"), None, "1.2.3s"),
    ],
)
@pytest.mark.unit
def test_one_change_of_what_we_ship_is_found(tmp_path, path, change, line, says):
    shipped, copy = (ROOT / path).read_text(), tmp_path / Path(path).name
    copy.write_text(shipped)
    assert lint([copy]) == [] and change[0] in shipped
    copy.write_text(shipped.replace(*change))
    found = lint([copy])
    assert bool(found) == bool(says), found
    assert not says or (says in found[0] and (line is None or found[0].startswith(f"{copy}:{line}: "))), found


@pytest.mark.unit
def test_a_pod_on_its_nodes_network_is_told_its_name(tmp_path):
    shipped, copy = (ROOT / "k8s/base/pytorchjob.yaml").read_text(), tmp_path / "job.yaml"
    shares = shipped.replace("enableServiceLinks: false", "hostNetwork: True")
    copy.write_text(shares)
    assert lint([copy]) == []
    copy.write_text(shares.replace("POD_NAME", "NAME_OF_POD"))
    [found] = lint([copy])
    assert "add POD_NAME" in found


def test_what_we_ship_has_no_mistake(tmp_path):
    done = doctor(ROOT, "--lint", "slurm", "k8s", "docker")
    assert done.returncode == 0 and "0 mistakes found" in done.stdout, done.stdout
    (tmp_path / "README.md").touch()
    for path, says in (
        ("nowhere", "there is no such file"),
        ("README.md", "no batch script"),
        (".", "no batch script"),
    ):
        none = doctor(tmp_path, "--lint", path)
        assert none.returncode == 2 and says in none.stderr, none.stderr


@pytest.mark.unit
def test_a_claim_of_another_name_or_for_one_node_is_found_among_the_files(tmp_path):
    shutil.copytree(ROOT / "k8s/base", tmp_path / "base")
    (job := tmp_path / "base/pytorchjob.yaml").write_text(
        job.read_text().replace("claimName: muster-runs", "claimName: mustr-runs")
    )
    [found] = lint([tmp_path / "base"])
    assert "claimName mustr-runs: no file has that claim; do you mean muster-runs?" in found and f"{job}:" in found
    shutil.copy(ROOT / "k8s/base/pytorchjob.yaml", job)
    (claim := tmp_path / "base/volume.yaml").write_text(claim.read_text().replace("ReadWriteMany]", "ReadWriteOnce]"))
    [found] = lint([tmp_path / "base"])
    assert "the claim muster-runs is ReadWriteOnce" in found and f"{job}:" in found
    claim.write_text(claim.read_text().replace("name: muster-runs", "name: [others]"))
    assert lint([tmp_path / "base"]) == [], "made elsewhere"
