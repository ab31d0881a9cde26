"""How an attempt ends: the first cause said once for all ranks, outcome.json, and the exit code."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import MusterError, RankLost, one_line, say
from train.faults import agent
from train.faults.heartbeat import BEAT_S, Heartbeat

if TYPE_CHECKING:
    from train.dist.world import World

FIRST_CAUSE_WAIT_S = 1.0  # a rank that fails by itself says so at once; one that was killed says nothing
SILENCE_S = 0.3  # and beats no more


def leave(
    error: BaseException,
    world: World | None,
    folder: Path | None,
    *,
    step: int | None,
    heartbeat: Heartbeat | None,
    lost: bool = False,
) -> int:
    """Report `error` once for all ranks, write outcome.json, and give the exit code."""
    from train.dist.network import Unheard
    from train.faults import attempts as outcome

    code = error.exit_code if isinstance(error, MusterError) else 1
    agent.tell(error)
    if lost or isinstance(error, RankLost):
        agent.end_if_stuck()
    if world is None:
        if isinstance(error, Unheard) or os.environ.get("RANK", "0") == "0" or not isinstance(error, MusterError):
            tell(error)
        agent.end_restarts(code)
        return code
    if heartbeat:
        heartbeat.enter("leaving after step", step or 0)
    if lost:
        if heartbeat:
            heartbeat.watch()
        if first := world.board.first_failure(
            FIRST_CAUSE_WAIT_S, enough=lambda: heartbeat and heartbeat.silence(SILENCE_S)
        ):
            return quit_group(world, heartbeat, int(first["exit_code"]))
        time.sleep(2 * BEAT_S)  # the store may be gone so suddenly that nobody has noticed yet
        error = (heartbeat and heartbeat.silence(SILENCE_S)) or RankLost(
            f"rank {world.rank} on {socket.gethostname()} lost contact with another rank, which gave no reason: {one_line(error)[:300]}"
        )
    told = outcome.read(folder) if folder else {}
    if isinstance(error, RankLost) and told.get("attempt") == world.attempt and told.get("outcome") != outcome.RUNNING:
        return quit_group(world, heartbeat, int(told["exit_code"]))  # the first cause, from a rank that is gone
    known = isinstance(error, MusterError)
    record = {
        "outcome": error.outcome if isinstance(error, MusterError) else "failed",
        "exit_code": code,
        "step": step,
        "rank": world.rank,
        "failed_host": socket.gethostname(),
        "error": one_line(error) if known else f"{type(error).__name__}: {one_line(error)}",
        "traceback": traceback.format_exc() if lost or not known else None,
    }
    if isinstance(error, RankLost) and error.rank is not None:
        record |= {"rank": error.rank, "failed_host": error.host}
    won, first = world.board.claim_failure(record)
    if won:
        tell(error)
        if folder and folder.is_dir() and outcome.is_latest(folder, world.attempt):
            kept = {key: value for key, value in outcome.read(folder).items() if key in ("furthest", "idle_attempts")}
            with contextlib.suppress(MusterError):  # it could not be written; the line above said why
                outcome.write(folder, attempt=world.attempt, **{**kept, **first})
    return quit_group(world, heartbeat, int(first["exit_code"]) if known else code)


def quit_group(world: World, heartbeat: Heartbeat | None, code: int) -> int:
    """Leave without waiting for ranks that may be gone: destroying a broken group can block."""
    agent.end_restarts(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if world.size > 1:
        world.leave(gone=heartbeat.gone if heartbeat else 0)
        os._exit(code)
    return code


def tell(error: BaseException) -> None:
    """One line for what a person can act on; the traceback for what is a defect."""
    if isinstance(error, MusterError):
        say(f"muster: {error.outcome.replace('_', ' ')}: {one_line(error)}")
    else:
        traceback.print_exception(error)
