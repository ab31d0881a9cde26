"""A real Kubernetes for the tests: tests/substrates/kubernetes.sh, and a job on it seen through its volume."""

from __future__ import annotations

import copy
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from kit.docker import for_plain_user
from kit.job import ROOT, Job

SCRIPT = ROOT / "tests/substrates/kubernetes.sh"
KINDS = {
    "pytorchjob": "base/pytorchjob.yaml",
    "indexed-job": "indexed-job/indexed-job.yaml",
    "trainjob": "trainjob/trainjob.yaml",
}
NODES = ("muster-node-1", "muster-node-2")
"""The first has the operators, too."""
LAGS_S = 120.0  # after an API server that was away for 25 s it was 59 s
RESOURCE = {"pytorchjob": "pytorchjob", "indexed-job": "job", "trainjob": "trainjob"}
PODS = {"pytorchjob": "muster-worker-{}", "indexed-job": "muster-{}-", "trainjob": "muster-node-0-{}-"}
"""What the name of pod N begins with."""


class Cluster:
    """`kubectl` on the cluster in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def built(self) -> bool:
        return (self.folder / "bin/trainer").exists()

    def script(
        self, action: str, *arguments: str, timeout_s: float = 120, log: IO[str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        line = [str(SCRIPT), action, str(self.folder), *arguments]
        out, err = (log, subprocess.STDOUT) if log else (subprocess.PIPE, subprocess.PIPE)
        return subprocess.run(line, stdout=out, stderr=err, text=True, timeout=timeout_s, **options)

    def kubectl(self, *arguments: str, ok: bool = True, timeout_s: float = 120, text: str | None = None) -> str:
        done = self.script("on", "kubectl", *arguments, timeout_s=timeout_s, input=text)
        assert not ok or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, namespace: str, documents: Sequence[dict[str, Any]], *options: str) -> None:
        """Apply manifests; retry when a webhook times out or lags behind the API server, as under load."""
        self.insist("-n", namespace, "apply", *options, "-f", "-", text=yaml.safe_dump_all(documents))

    def insist(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl until no webhook times out or lags: such a request has changed nothing."""
        lags = "failed calling webhook", "must be created before the TrainJob"  # it does not see the runtime yet
        deadline = time.monotonic() + LAGS_S
        while True:
            done = self.script("on", "kubectl", *arguments, input=text)
            if done.returncode == 0:
                return done.stdout
            lagging = any(words in done.stderr for words in lags) and time.monotonic() < deadline
            assert lagging, f"kubectl {' '.join(arguments)}: {done.stderr}"
            time.sleep(2)


class Space:
    """A namespace that enforces PodSecurity `restricted`, with a volume of its own: a folder of this machine."""

    def __init__(self, cluster: Cluster, folder: Path, name: str, *, claim: str = "muster-runs"):
        self.cluster, self.name, self.claim, self.volume = cluster, name, claim, folder / "volume"
        for_plain_user(self.volume, self.volume / "tests")

    def __enter__(self) -> Space:
        labels = {"pod-security.kubernetes.io/enforce": "restricted", "muster-test": "true"}
        volume = {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": self.name},
            "spec": {
                "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteMany"], "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(self.volume)}, "claimRef": {"namespace": self.name, "name": self.claim},
            },
        }  # fmt: skip
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name, "labels": labels}}
        self.cluster.apply("default", [space, volume])
        return self

    def __exit__(self, *_: object) -> None:
        self.kubectl("delete", "pytorchjob,trainjob,job", "--all", "--wait=false", ok=False)
        self.kubectl("delete", "pods", "--all", "--grace-period=1", "--timeout=60s", ok=False)
        self.cluster.kubectl("delete", "namespace", self.name, "--wait=false", ok=False)
        self.cluster.kubectl("delete", "pv", self.name, "--wait=false", ok=False)

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments, **options)

    def insist(self, *arguments: str) -> str:
        return self.cluster.insist("-n", self.name, *arguments)


class KubernetesJob(Job):
    """A job of one of the three kinds: its manifest with other arguments, and the parts of the tests in the volume."""

    def __init__(self, space: Space, kind: str, *arguments: str):
        self.space, self.kind = space, kind
        super().__init__(space.volume / "muster")
        self.documents = copy.deepcopy(
            [each for each in yaml.safe_load_all((ROOT / "k8s" / KINDS[kind]).read_text()) if each]
        )
        container = containers(self.documents)[0]
        container["args"] = ["name=muster", *arguments]
        container["env"] += [
            {"name": "PYTHONPATH", "value": "/opt/muster:/job/runs/tests"},
            {"name": "LEDGER", "value": "/job/runs/ledger"},
        ]

    def apply(self) -> None:
        around = [yaml.safe_load((ROOT / "k8s" / name).read_text()) for name in ("volume.yaml", "network-policy.yaml")]
        self.space.cluster.apply(self.space.name, [*around, *self.documents])

    def delete(self) -> None:
        self.space.kubectl("delete", RESOURCE[self.kind], "muster", "--timeout=110s")

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Return the true conditions by type."""
        text = self.space.kubectl("get", RESOURCE[self.kind], "muster", "-o", "json", ok=False)
        found = json.loads(text).get("status", {}).get("conditions", []) if text else []
        return {each["type"]: each for each in found if each["status"] == "True"}

    def succeeded(self) -> bool:
        conditions = self.conditions()
        assert "Failed" not in conditions, f"{conditions}\n{self.log}"
        return bool(conditions.keys() & {"Succeeded", "Complete"})

    def failed(self) -> dict[str, Any] | None:
        return self.conditions().get("Failed")

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.space.kubectl("get", "pods", "-o", "json"))["items"]
        return found

    def pod(self, index: int) -> str:
        """Return the name of the present pod `index`."""
        begins = PODS[self.kind].format(index)
        alive = [
            p
            for p in self.pods()
            if p["metadata"]["name"].startswith(begins) and not p["metadata"].get("deletionTimestamp")
        ]
        assert alive, f"no pod {begins}\n{self.log}"
        name: str = max(alive, key=lambda each: each["metadata"]["creationTimestamp"])["metadata"]["name"]
        return name

    def nodes(self) -> set[str]:
        return {pod["spec"].get("nodeName", "none yet") for pod in self.pods()}

    @property
    def log(self) -> str:
        seen = [self.space.kubectl("get", what, "-o", "wide", ok=False) for what in ("nodes", "pods")]
        seen.append(self.space.kubectl("get", "nodes", "-o", "jsonpath={.items[*].spec.taints}", ok=False))
        seen.append(self.space.kubectl("get", "events", "--sort-by=.lastTimestamp", ok=False)[-3000:])
        for pod in self.pods():
            lines = self.space.kubectl("logs", pod["metadata"]["name"], "--tail=80", ok=False).splitlines()
            seen.append("\n".join(line for line in lines if "frame #" not in line))  # of C++
        return "\n".join(seen)


def containers(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the containers of all pods in manifests, at any depth."""
    found: list[dict[str, Any]] = []

    def look(node: Any) -> None:
        if isinstance(node, dict):
            found.extend(node.get("containers", []))
        for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            look(each)

    look(list(documents))
    return found
