"""The numerics of a run: seeds, determinism, threads, and the kind of processor that rounds."""

from __future__ import annotations

import os

import torch

from muster.data.generators import key_of, seed_process
from muster.timing.timing_file import environment
from muster.train.config.keys import Config
from muster.world.group import World


def set_numerics(config: Config) -> None:
    """Set seeds, determinism, the precision of products on GPUs, and thread count. Must be called before the first tensor is created."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    exact = config.deterministic or config.virtual_world_size is not None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        not exact if config.tf32 is None else config.tf32
    )
    if config.virtual_world_size and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # torchrun's default; the rounding of a sum depends on the number of threads
    seed_process(config.seed)


def kinds_of(world: World) -> list[str]:
    """Return the kinds of processor that the ranks compute on. Collective."""
    return sorted({*world.gather(kind_of(world))})


def kind_of(world: World) -> str:
    """Return GPU or processor model and torch version: besides the order, the last bits of a sum depend on them."""
    here = environment()
    return f"{here['gpu' if world.device.type == 'cuda' else 'processor']}, torch {here['torch']}"


def seed_all(seed: int, rank: int, *, step: int) -> None:
    """Seed this rank's generators, for dropout and the like, from seed, rank and step.

    The step matters on resume at another world size, where the checkpoint's generator states do not fit: without it,
    dropout masks would repeat those of the first steps.
    """
    seed_process(key_of(seed, rank, step) if step else key_of(seed, rank))
