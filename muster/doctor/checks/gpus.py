"""Check that each rank has a GPU of its own with free memory, no memory errors, no throttling and the same driver."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from muster.doctor.base import Check, Facts, Finding, Visit
from muster.world.group import World

FREE = 0.8
"""Minimum free share of a device's memory."""
HOT = 85.0  # degrees Celsius
ASKED = (
    "uuid",
    "driver_version",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.hw_slowdown",
)
TIMEOUT_S = 10.0


class Gpus(Check):
    name = "gpus"

    def look(self, world: World, visit: Visit) -> dict[str, Any]:
        if world.device.type != "cuda":
            return {"gpu": "", "there": torch.cuda.device_count()}
        free, total = torch.cuda.mem_get_info(world.device)
        uuid = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
        return {
            "gpu": uuid,
            "there": torch.cuda.device_count(),
            "free": free / total,
            "gib": total / 2**30,
            **told(uuid, asked()),
        }

    def judge(self, ranks: Sequence[Facts], visit: Visit) -> list[Finding]:
        found: list[Finding] = []
        users: dict[str, Facts] = {}
        for facts in ranks:
            where = f"rank {facts['rank']} on {facts['host']}"
            if not facts["gpu"]:
                continue
            if other := users.get(facts["gpu"]):
                both = f"{where} and rank {other['rank']} have the same GPU, {facts['gpu']}"
                found.append(
                    Finding(
                        both, "start as many processes as there are GPUs, or give each rank its own with gpus=[...]"
                    )
                )
            users[facts["gpu"]] = facts
            if facts["free"] < FREE:
                said = f"{where}: {facts['free']:.0%} of {facts['gib']:.0f} GiB of GPU memory are free"
                found.append(
                    Finding(
                        said,
                        "end the other process there: nvidia-smi names it",
                        fails=facts["free"] < FREE / 4,
                        host=facts["host"],
                    )
                )
            if facts.get("ecc"):
                said = f"{where}: {facts['ecc']} uncorrected memory errors since the driver was loaded ({facts['gpu']})"
                found.append(Finding(said, "drain the node and reset or replace the GPU", host=facts["host"]))
            if facts.get("slowed") or (facts.get("celsius") or 0) > HOT:
                said = f"{where}: the GPU slows itself down at {facts.get('celsius')} °C ({facts['gpu']})"
                found.append(Finding(said, "look at cooling and power of that node", fails=False))
        if (drivers := {facts.get("driver") for facts in users.values()}) and len(drivers) > 1:
            each = "; ".join(f"{facts.get('driver')} on {facts['host']}" for facts in users.values())
            found.append(Finding(f"the driver differs: {each}", "install the same everywhere", fails=False))
        if idle := [facts for facts in ranks if not facts["gpu"] and facts["there"]]:
            said = f"{idle[0]['host']} has {idle[0]['there']} GPUs, but training uses the CPU"
            found.append(Finding(said, "leave out device=cpu, or ask for no GPUs", fails=False))
        return found

    def summary(self, ranks: Sequence[Facts]) -> str:
        used = [facts for facts in ranks if facts["gpu"]]
        return (
            f"{len(used)} in use, {min(facts['free'] for facts in used):.0%} free at least" if used else "none in use"
        )


def asked() -> str:
    """Return nvidia-smi's values for all devices as CSV; empty if it is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return ""
    line = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.stdout if done.returncode == 0 else ""


def told(uuid: str, text: str) -> dict[str, Any]:
    """Parse the values of one device. A value that the device does not have (`[N/A]`) is left out.

    Source: `nvidia-smi --help-query-gpu`.
    """
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(ASKED) and row[0] == uuid:
            _, driver, celsius, ecc, slowed = row
            numbers = {"celsius": celsius, "ecc": ecc}
            known = {name: int(value) for name, value in numbers.items() if value.isdigit()}
            return {"driver": driver, "slowed": slowed == "Active", **known}
    return {}
