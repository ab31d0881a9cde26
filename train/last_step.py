"""The save of the last step by one of the ranks that are left, when another is lost for good: see muster/job/rescue.py."""

from __future__ import annotations

from typing import Any

import torch

from muster.errors import StorageError
from muster.faults.heartbeat import RESCUE
from muster.faults.notes import Notes
from muster.job.folder import RunFolder
from muster.job.rescue import check_finite, last_lines, rescue
from muster.train.course import ENDED, LOGGED
from muster.train.loop import Run, epoch, is_time_to_evaluate, is_time_to_log, position
from muster.train.strategies.replicas.buffers import OBJECTIVE
from muster.train.strategies.replicas.replicated import Replicas


def save_last_step(run: Run, folder: RunFolder, notes: Notes, *, is_changed: bool) -> None:
    """Save the last step of `run`, or wait for another rank that does. Every rank that is left must call it.

    is_changed: the next step has changed parameters, though it is not done.
    The lost rank's part of the loss since the last `train` line is lost. A line that was due at this step has none.
    """
    noted = notes.read(run.step - 1) if run.step else None
    is_whole = run.progress.stage >= ENDED and not run.callbacks.are_cut_short and not is_changed
    run.running.enter(RESCUE)

    def save() -> None:
        assert noted
        _save(run, buffers=noted[1], drawn=noted[0]["drawn"])

    can = noted and is_whole and _is_followed(run) and _has_common_buffers(run) and folder.may_commit()
    rescue(run.world, folder, step=run.step, save=save if can else None)


def _is_followed(run: Run) -> bool:
    """Return True if the notes are of the end of the step: they are no longer written once buffers change outside of it."""
    assert isinstance(run.strategy, Replicas)
    return run.strategy.optimizer_step.before_sum is not None


def _has_common_buffers(run: Run) -> bool:
    """Return True if training goes on with this rank's buffers.

    Where each rank has its own, DDP broadcasts rank 0's in the next step, but not those of the objective. An evaluation
    before that needs those of all, and so do the weights of a run that is over.
    """
    assert isinstance(run.strategy, Replicas)
    buffers = run.strategy.optimizer_step.buffers
    if buffers.agree or buffers.none_here():
        return True
    are_broadcast = not any(name.startswith(OBJECTIVE) for name in buffers.own)
    return run.world.is_first and are_broadcast and not run.is_over and not is_time_to_evaluate(run)


def _save(run: Run, *, buffers: dict[str, torch.Tensor], drawn: bool) -> None:
    """Write and commit a checkpoint alone.

    buffers: this rank's at the end of the step, which the next has changed. drawn: see `Draws`.
    """
    assert isinstance(run.strategy, Replicas)
    step, best = run.strategy.optimizer_step, run.progress.best
    if best and (run.running.checkpoints.newest_step or 0) < best["step"] < run.step:
        raise StorageError(f"the best checkpoint, of step {best['step']}, was still being written")
    if run.callbacks.are_within:
        run.callbacks.on_checkpoint(run)
    step.buffers.put(buffers)
    check_finite(step.parameters, run.step)
    lines = last_lines(run.running)
    if run.progress.stage < LOGGED and is_time_to_log(run):
        lines.append(_line_without_loss(run))
    beside = {"step": run.step, "recent": lines, "unlogged": run.window.samples, "drawn": drawn}
    state = {**step.replica(), **run.callbacks.state()}
    run.running.checkpoints.save_alone(state=state, position={**position(run), **beside})


def _line_without_loss(run: Run) -> dict[str, Any]:
    result, samples = run.progress.result, run.course.plan.samples_before(run.step)
    assert result
    since, seconds = run.records.since_last()
    known = {"kind": "train", "step": run.step, "epoch": epoch(run), "loss": None, "lr": run.strategy.lr}
    speed = round((samples - since) / seconds, 1)
    return {**known, "grad_norm": float(result.grad_norm), "samples": samples, "samples_per_s": speed}
