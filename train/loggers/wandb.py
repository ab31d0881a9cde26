"""Weights & Biases. `pip install wandb`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Literal

import wandb
import yaml

from train.loggers.base import Logger
from train.loggers.tensorboard import scalars


class Wandb(Logger):
    """One run there for one folder here: a resumed run goes on with it, and a step that it has is not sent again.

    mode: online, offline (`folder`/wandb, to be sent later with `wandb sync`) or disabled; none: as WANDB_MODE has it.

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
            kept.write_text(secrets.token_hex(4))
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(
            project=project, entity=entity, mode=mode, name=name, dir=str(folder), id=kept.read_text(), resume="allow",
            config=yaml.safe_load((folder / "config.yaml").read_text()), settings=settings,
        )  # fmt: skip

    def log(self, record: dict[str, Any]) -> None:
        if values := scalars(record):
            self._run.log(values, step=record["step"])  # which leaves out a step that is behind the run's own

    def close(self) -> None:
        self._run.finish()
