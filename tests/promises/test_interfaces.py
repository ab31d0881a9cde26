"""Two hosts meet whatever their own names resolve to at home, and with IPv6 alone: the trainer and a user's own script."""

import subprocess
import sys

import pytest
from kit import hosts
from kit.job import QUIET, environment, free_port

from muster.world.rendezvous import interfaces

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones == 2
dist.destroy_process_group()
"""
OF_SIX = ("fd77::1", "fd77::2")


@pytest.fixture
def launched(tmp_path):
    """Launch a job on two hosts that know themselves by `own`, and each other by its address.

    Their default routes lead nowhere, unless they have IPv6.
    """

    def launch(*words, addresses, own=None, head="host-a"):
        job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": str(free_port() - 10000), "GRACE_S": "30", "HEAD": head}
        processes = []
        four = ":" not in addresses[0]
        with hosts.two_hosts(addresses=addresses, blind=four, default=four) as names:
            for node, host in enumerate(names):
                name = f"host-{'ab'[node]}"
                known = tmp_path / f"hosts-{node}"
                lines = [f"{address} host-{letter}" for address, letter in zip(addresses, "ab", strict=True)]
                lines[node] = "\n".join(f"{each} {name}" for each in own or [addresses[node]])
                known.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
                env = environment(
                    **job, SLURM_NODEID=str(node), SLURMD_NODENAME=addresses[node] if own is None else name
                )
                line = [sys.executable, "-m", "train.launch", "node", *words]
                log = (tmp_path / f"log-{node}").open("w")
                processes.append(
                    subprocess.Popen(
                        hosts.named(host, name, known, *line), env=env, cwd=tmp_path, stdout=log, stderr=log
                    )
                )
            codes = [each.wait(timeout=120) for each in processes]
        assert codes == [0, 0], [(tmp_path / f"log-{node}").read_text() for node in range(2)]

    try:
        with hosts.two_hosts():
            pass
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("network namespaces cannot be made here")
    return launch


@pytest.mark.nightly(but=["192.168"])
@pytest.mark.parametrize("net", ["192.168.77", "10.77.0"], ids=["192.168", "10"])
def test_hosts_that_know_themselves_as_127_0_1_1_train_together(tmp_path, launched, net):
    """As on Debian. Of two addresses gloo connects to the smaller: with 10.*, 127.0.0.1 would never be connected to."""
    launched(
        f"output_dir={tmp_path / 'run'}", *QUIET, "max_steps=2", addresses=(f"{net}.1", f"{net}.2"), own=["127.0.1.1"]
    )


@pytest.mark.nightly(but=["alone"])
@pytest.mark.parametrize(
    "own", [["127.0.1.1"], ["127.0.1.1", "192.168.77.1"], ["::1", "192.168.77.1"]], ids=["alone", "first", "IPv6"]
)
def test_a_script_s_hosts_that_know_themselves_as_127_0_1_1_meet(tmp_path, launched, own):
    (tmp_path / "my.py").write_text(SCRIPT)
    launched("--", "my.py", addresses=("192.168.77.1", "192.168.77.2"), own=own)


@pytest.mark.nightly
@pytest.mark.parametrize("head", ["host-a", OF_SIX[0]])
def test_hosts_with_ipv6_alone_train_together(tmp_path, launched, head):
    launched(f"output_dir={tmp_path / 'run'}", *QUIET, "max_steps=2", addresses=OF_SIX, head=head)


@pytest.mark.unit
def test_the_interface_that_leads_to_a_loopback_address_is_the_loopback_s(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interfaces.own_address("127.0.0.1") == "127.0.0.1" and interfaces.interface_to("127.0.0.1", str) == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interfaces.own_address("anywhere") == "127.0.0.1"
