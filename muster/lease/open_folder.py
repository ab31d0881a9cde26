"""The run's folder: claimed by one attempt, resumed from the checkpoints and records of earlier attempts."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from muster import outcome
from muster.checkpoint.commit import SEEN_WITHIN_S, Saved, Storage
from muster.checkpoint.resume import find_checkpoint
from muster.errors import CrashLoop, MusterError, RankLost, StorageError, say, storage_error
from muster.files import replace_file
from muster.lease import folder_lease
from muster.lease.folder_lease import Claimant, Lease
from muster.lease.storage_lease import StorageLease
from muster.loggers.jsonl import last_step
from muster.outcome import Commit, Outcome
from muster.world.environment import asked_for
from muster.world.group import World

Refusal = Callable[[Saved], MusterError | None]
"""Returns the error that forbids resuming from a checkpoint, or None."""

SEE_AGAIN_S = 0.1
OF_A_RUN = (
    "checkpoints",
    "metrics.jsonl",
    "timing.jsonl",
    "config.yaml",
    "model.json",
    "outcome.json",
    "model.pt",
    "tensorboard",
    "report.html",
    "best.json",
    "profile",
)


@dataclass(frozen=True)
class RunOptions:
    """Where a run's files are, how it resumes, and when it gives up.

    output_dir: the run's folder. config: text of its config.yaml; empty: it is written later.
    storage: folder or URL for checkpoints; None: `checkpoints/` in `output_dir`.
    resume: `auto`, `never` (start over at each launch), or a path or URL to start from.
    timeout_s: seconds without progress after which a rank is ended.
    max_idle_attempts, max_idle_preemptions: consecutive failures and preemptions without progress before CrashLoop.
    """

    output_dir: Path
    config: str = ""
    storage: str | None = None
    resume: str = "auto"
    timeout_s: float = 300.0
    max_idle_attempts: int = 3
    max_idle_preemptions: int = 100

    @property
    def checkpoints(self) -> Storage:
        return Storage(self.storage or str(self.output_dir / "checkpoints"))


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, claimed by this attempt.

    before: record of the previous attempt. saved: checkpoint to resume from, if any. is_done: the run had finished.
    lease: this attempt's claim on the folder; rank 0 only. storage_lease: its claim on `checkpoint.storage`, if that is set.
    """

    path: Path
    before: Outcome
    saved: Saved | None
    is_done: bool
    lease: Lease | None
    storage_lease: StorageLease | None

    def newest_step(self, options: RunOptions) -> int | None:
        """Return the step of the run's own newest checkpoint, from which it resumes; None if that is another run's."""
        is_own = self.saved is not None and self.saved.storage.root == options.checkpoints.root
        return self.saved.step if self.saved and is_own else None

    def may_commit(self) -> bool:
        """Return True if no other attempt has taken over the run. Rank 0 only. Raises Lost if its storage was taken."""
        if self.lease and not self.lease.is_held():
            return False
        if self.storage_lease:
            self.storage_lease.check()
        return True


def claim_folder(
    options: RunOptions,
    world: World,
    *,
    stopping: Callable[[], bool],
    on_loss: Callable[[RankLost], object],
    on_request: Callable[[str], object],
    stands: Callable[[], bool],
) -> Lease | None:
    """Claim the run's folder and return the claim; None on other ranks than 0. Collective.

    `stopping` returns whether this process has received a stop request. `on_loss`, `on_request`, `stands`: see `Lease`.

    Raises MusterError: another attempt uses the folder, or it cannot be written; see `folder_lease.look`.
    """
    path, own, held = options.output_dir, Claimant.own(world.attempt, world.agents), list[Lease]()
    wait_s = min(options.timeout_s + folder_lease.HELD_S, folder_lease.WAIT_S)

    def claim() -> None:
        after = folder_lease.look(path, own, wait_s=wait_s, stopping=stopping)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error("use output_dir:", error, path) from error
        held.append(Lease(path, own, after=after, on_loss=on_loss, on_request=on_request, stands=stands))

    world.on_first(claim)
    return held[0] if held else None


def open_folder(options: RunOptions, world: World, held: Lease | None, *, refusal: Refusal) -> RunFolder:
    """Choose the checkpoint to resume from, and record that this attempt runs in the folder that it has claimed. Collective.

    The command is refused before anything of the run is changed. Rank 0 reads and chooses for all ranks: two ranks that read
    the folder themselves may see different files.

    Raises MusterError: the folder belongs to another run, is damaged, or cannot be written; see errors.py.
    """
    path = options.output_dir
    _see_claim(path, world, held)
    record, over = world.on_first(lambda: _before(path, options, world))
    before = Outcome.of(record)
    look = partial(_resume_point, options, world, before, refusal=refusal)
    saved = None if over else look()
    storage_lease = owner_of(options, world)
    if storage_lease and world.on_first(lambda: _own(storage_lease, before, saved)) and not over:
        saved = look()
    is_done = world.on_first(lambda: _take_over(path, options, world, before, saved, held, over=over))
    return RunFolder(path, before, saved, is_done, held, storage_lease)


def keep_folder(options: RunOptions, world: World, held: Lease | None) -> RunFolder:
    """Record that this attempt continues the run in the folder it has claimed, whose state its ranks hold. Collective.

    Raises MusterError.
    """
    path = options.output_dir
    _see_claim(path, world, held)
    before = Outcome.of(world.on_first(lambda: outcome.read(path)))
    if storage_lease := owner_of(options, world):
        world.on_first(lambda: storage_lease.claim(before))
    now = replace(before, attempt=world.attempt, token=held.token if held else 0, agents=tuple(world.agents))
    world.on_first(lambda: outcome.write(path, replace(now, outcome=outcome.RUNNING)))
    return RunFolder(path, before, None, is_done=False, lease=held, storage_lease=storage_lease)


def _see_claim(path: Path, world: World, held: Lease | None) -> None:
    """Check that every rank sees rank 0's new claim: the folder must be shared. Collective. Raises StorageError."""
    token = world.broadcast(held.token if held else None)
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := folder_lease.newest_claim(path)[0] == token) and time.monotonic() < deadline:
        time.sleep(SEE_AGAIN_S)
    where = f"output_dir={path} on {socket.gethostname()}"
    wrong = f"{where} is not the folder that rank 0 writes to: use one that all nodes share"
    world.together(None if seen else StorageError(wrong))


def _before(path: Path, options: RunOptions, world: World) -> tuple[dict[str, object], bool]:
    record = outcome.read(path)
    over = options.resume == "never" and not Outcome.of(record).is_same_launch(world.agents)
    return ({} if over else record), over


def _resume_point(options: RunOptions, world: World, before: Outcome, *, refusal: Refusal) -> Saved | None:
    """Return the checkpoint to resume from, or None. Collective. Raises MusterError if `refusal` forbids its use."""
    saved, bad = find_checkpoint(options.checkpoints, options.resume, world, before.checkpoint)
    for line in bad if world.is_first else []:
        say(f"muster: quarantined a bad checkpoint: {line}")
    world.together(refusal(saved) if saved else None)
    return saved


def owner_of(options: RunOptions, world: World) -> StorageLease | None:
    """Return the claim on `checkpoint.storage`; None if it is not set, as the lease covers the run's own folder."""
    if not options.storage:
        return None
    return StorageLease(options.checkpoints, folder=options.output_dir, attempt=world.attempt, agents=world.agents)


def _own(storage_lease: StorageLease, before: Outcome, saved: Saved | None) -> bool:
    """Claim the storage. Return True if its previous owner saved a checkpoint newer than `saved` before the claim."""
    storage_lease.claim(before)
    return max(storage_lease.storage.steps(), default=-1) > (saved.step if saved else -1)


def _take_over(
    path: Path,
    options: RunOptions,
    world: World,
    before: Outcome,
    saved: Saved | None,
    held: Lease | None,
    *,
    over: bool,
) -> bool:
    """Record this attempt as the running one; return True if the run had finished. Raises CrashLoop, StorageError."""
    if over:
        _set_aside(path, options)
    options.checkpoints.clear()
    furthest = max(saved.step if saved else 0, last_step(path), before.step or 0)
    failures, stops = before.idle(furthest)
    cause = (None if before.outcome == outcome.PREEMPTED else before.error) or before.cause
    now = Outcome(
        outcome=outcome.RUNNING, attempt=world.attempt, token=held.token if held else 0, agents=tuple(world.agents), step=furthest,
        world_size=world.size, asked_for=asked_for(world.environment.local_world_size),
        furthest=furthest, idle_attempts=failures, idle_preemptions=stops, cause=cause, failure_before=before.failure,
        checkpoint=_newest(options, saved),
    )  # fmt: skip
    outcome.write(path, now)
    if failures > options.max_idle_attempts:
        raise CrashLoop(
            f"{failures} consecutive attempts got no further than step {furthest}, the last one {before.outcome}: "
            f"{before.error or cause or 'killed'}. Fix the cause and run the same command again"
        )
    if stops > options.max_idle_preemptions:
        raise CrashLoop(
            f"the run was stopped {stops} times in a row before it got further than step {furthest}: give it more "
            "time, raise max_idle_preemptions, and run the same command again"
        )
    if options.config:
        replace_file(path / "config.yaml", lambda draft: draft.write_text(options.config, encoding="utf-8"))
    return before.outcome == outcome.DONE and (path / "model.pt").exists()


def _newest(options: RunOptions, saved: Saved | None) -> Commit | None:
    """Return the run's own newest checkpoint: a newer one that was noted has been found bad."""
    is_own = saved is not None and saved.storage.root == options.checkpoints.root
    return {"step": saved.step, "path": saved.path} if saved and is_own else None


def _set_aside(path: Path, options: RunOptions) -> None:
    """Move an earlier run in this folder to `previous-N`: starting over loses nothing."""
    there = [path / name for name in OF_A_RUN if (path / name).exists()]
    if there:
        numbers = (int(match[1]) for old in path.iterdir() if (match := re.fullmatch(r"previous-(\d+)", old.name)))
        aside = path / f"previous-{1 + max(numbers, default=0)}"
        try:
            aside.mkdir()
            for each in there:
                each.rename(aside / each.name)
        except OSError as error:
            raise storage_error("set the earlier run aside:", error) from error
    if options.storage:
        options.checkpoints.start_over()
    options.checkpoints.prepare()


def note_left(folder: Path, *, step: int, total_steps: int) -> None:
    """Record that an attempt leaves the run to be continued, and does not count. Rank 0 only. Raises StorageError."""
    now = outcome.last(folder)
    stops = max(0, now.idle_preemptions - 1)
    left = replace(now, outcome=outcome.PREEMPTED, exit_code=0, step=step, total_steps=total_steps)
    outcome.write(folder, replace(left, idle_preemptions=stops))


def note_end(folder: Path, *, step: int, total_steps: int) -> None:
    """Record that the run is done. Rank 0 only. Raises StorageError."""
    now = outcome.last(folder)
    outcome.write(folder, replace(now, outcome=outcome.DONE, exit_code=0, step=step, total_steps=total_steps))
