"""Ranks that share a GPU, for what NCCL does between ranks on a machine with one GPU.

NCCL refuses two ranks of a host on one device. With this folder in PYTHONPATH each rank is alone on a node of its own, as it
seems, and NCCL connects them by sockets, as it does nodes. Its start, its collectives, their timeouts and what a rank does
that waits in it are real; NVLink and InfiniBand are not there, and speeds mean nothing: the ranks take turns on the device.
"""

import os

if "RANK" in os.environ:
    os.environ |= {
        "NCCL_HOSTID": f"rank-{os.environ['RANK']}",
        "GROUP_RANK": os.environ["RANK"],
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
