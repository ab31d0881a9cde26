"""Which device and which backend of torch.distributed this rank uses."""

from __future__ import annotations

import socket

import torch

from train.dist.options import GroupOptions
from train.dist.place import Place
from train.errors import ConfigError


def choose_device(options: GroupOptions, place: Place) -> torch.device:
    """The device of this rank: `gpus[local_rank]` where given, else `local_rank`, else the CPU.

    Raises:
        ConfigError: it is not there; says what is.
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
    if place.local_world_size > len(chosen):
        raise ConfigError(
            f"{place.local_world_size} processes on {socket.gethostname()} for {len(chosen)} GPUs: "
            f"use --nproc-per-node={len(chosen)}, or device=cpu"
        )
    return torch.device("cuda", chosen[place.local_rank])


def choose_backend(options: GroupOptions, device: torch.device) -> str:
    """gloo for CPU; on CUDA nccl for tensors there and gloo for the few small ones that live on the host."""
    backend = options.backend
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("dist.backend=nccl needs CUDA devices, and this run is on the CPU: use dist.backend=gloo")
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend != "gloo" else "gloo"
