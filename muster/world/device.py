"""Choose the device and the torch.distributed backend of this rank."""

from __future__ import annotations

import socket

import torch

from muster.errors import ConfigError
from muster.world.environment import Environment
from muster.world.group_options import GroupOptions


def choose_device(options: GroupOptions, environment: Environment) -> torch.device:
    """Return this rank's device: `gpus[local_rank]` if given, else `local_rank`, else the CPU.

    Raises ConfigError, listing the valid choices: the device does not exist, or there are more local ranks than GPUs.
    """
    if options.device == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there == 0:
        if options.device == "cuda" or options.gpus:
            given = "device=cuda" if options.device == "cuda" else f"gpus={options.gpus}"
            raise ConfigError(f"{given}, but this machine ({socket.gethostname()}) has no CUDA device: use device=cpu")
        return torch.device("cpu")
    chosen = list(options.gpus or range(there))
    if absent := [gpu for gpu in chosen if not 0 <= gpu < there]:
        raise ConfigError(
            f"gpus={chosen}: there is no device {absent[0]} on {socket.gethostname()}; valid: 0 to {there - 1}"
        )
    if environment.local_world_size > len(chosen):
        raise ConfigError(
            f"{environment.local_world_size} processes on {socket.gethostname()} for {len(chosen)} GPUs: "
            f"use --nproc-per-node={len(chosen)}, or device=cpu"
        )
    return torch.device("cuda", chosen[environment.local_rank])


def choose_backend(options: GroupOptions, device: torch.device) -> str:
    """Return the backend: gloo on CPU; on CUDA nccl for CUDA tensors and gloo for the few small CPU tensors.

    Raises ConfigError: nccl without CUDA devices.
    """
    backend = options.backend
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("dist.backend=nccl needs CUDA devices, and this run is on the CPU: use dist.backend=gloo")
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend != "gloo" else "gloo"
