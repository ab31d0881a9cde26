"""Weights & Biases logger. `pip install wandb`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Literal

import wandb
import yaml

from muster.loggers.base import Logger
from muster.loggers.tensorboard import scalars


class Wandb(Logger):
    """One W&B run per run folder. A resumed run continues it; steps already logged are not sent again.

    `mode`: offline writes to `folder`/wandb, for `wandb sync` later; None: from WANDB_MODE.

    Source: https://docs.wandb.ai/ref/python/init
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        project: str,
        entity: str | None,
        mode: Literal["online", "offline", "disabled"] | None,
    ):
        kept = folder / "wandb-run-id"
        if not kept.exists():
            kept.write_text(secrets.token_hex(4), encoding="utf-8")
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(
            project=project, entity=entity, mode=mode, name=name, dir=str(folder), id=kept.read_text(encoding="utf-8"), resume="allow",
            config=yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")), settings=settings,
        )  # fmt: skip

    def log(self, record: dict[str, Any]) -> None:
        if values := scalars(record):
            self._run.log(values, step=record["step"])  # wandb ignores steps that it already has

    def close(self) -> None:
        self._run.finish()
