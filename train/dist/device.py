"""Which device and which backend of torch.distributed this rank uses."""

from __future__ import annotations

import socket

import torch

from train.config.keys import Backend, Config, Device
from train.dist.place import Place
from train.errors import ConfigError


def choose_device(config: Config, place: Place) -> torch.device:
    """The device of this rank: `gpus[local_rank]` where given, else `local_rank`, else the CPU.

    Raises:
        ConfigError: it is not there; says what is.
    """
    if config.device is Device.cpu:
        return torch.device("cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there == 0:
        if config.device is Device.cuda or config.gpus:
            given = "device=cuda" if config.device is Device.cuda else f"gpus={config.gpus}"
            raise ConfigError(f"{given}, but this machine ({socket.gethostname()}) has no CUDA device: use device=cpu")
        return torch.device("cpu")
    chosen = config.gpus or list(range(there))
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


def choose_backend(config: Config, device: torch.device) -> str:
    """gloo for CPU; on CUDA nccl for tensors there and gloo for the few small ones that live on the host."""
    backend = config.dist.backend
    if backend is Backend.nccl and device.type != "cuda":
        raise ConfigError("dist.backend=nccl needs CUDA devices, and this run is on the CPU: use dist.backend=gloo")
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend is not Backend.gloo else "gloo"
