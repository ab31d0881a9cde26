"""Read environment variables, with an error message for each invalid value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muster.errors import ConfigError


def text(env: Mapping[str, str], name: str) -> str:
    """Raises ConfigError: not set, or empty."""
    if not (given := env.get(name, "").strip()):  # a file with line ends of Windows leaves a carriage return
        by = "the launcher sets it, or the manifest that starts this node"
        if "SLURM_JOB_ID" in env:
            by = "in an interactive allocation start all nodes by `bash slurm/ddp.sbatch`, which sets it"
        raise ConfigError(f"{name} is not set: {by}")
    return given


def whole(
    env: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0, most: int | None = None
) -> int:
    """Return a whole number from `least` to `most`; an empty variable counts as not set. Raises ConfigError."""
    given = env.get(name, "").strip() or (text(env, name) if default is None else str(default))
    if not given.isascii() or not given.isdigit() or int(given) < least or (most is not None and int(given) > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}={given} is not valid: use a whole number {span}")
    return int(given)


def one_of(env: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return one of `choices`; empty if not set. Raises ConfigError."""
    given = env.get(name, "").strip()
    if given and given not in choices:
        raise ConfigError(f"{name}={given} is not valid; valid: {', '.join(choices)}")
    return given


def port(env: Mapping[str, str], *, default: int) -> int:
    """Return MASTER_PORT, at which the nodes meet. Raises ConfigError."""
    return whole(env, "MASTER_PORT", default=default, least=1, most=65535)
