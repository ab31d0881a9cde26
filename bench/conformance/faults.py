"""The faults. Each is a function that trains once under it; an unfinished launch is repeated, as a scheduler would."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.conformance.launches import Hung, Launches, fill, marked, small_disk, until
from bench.conformance.ledger import Ledger
from bench.conformance.parts import EPOCHS, HOLD, SAVE_EVERY
from bench.conformance.trainers.base import Trainer

RANKS = 2
LAUNCHES = 3
"""After as many the run is said not to finish."""
EARLIEST, LATEST = 32, 80
"""Faults come in these steps: every trainer has saved by then, and none is near its end."""
GOODPUT_S, BETWEEN_S, ENDLESS = 60.0, 30.0, 10_000
DISK = "8m"


@dataclass
class Scene:
    """One run of one trainer in a folder of its own.

    at: the times of the faults. facts: further observations. limit_s: seconds after which a launch without its next
    event counts as hung and is ended.
    """

    trainer: Trainer
    place: Path
    random: random.Random
    limit_s: float
    folder: Path = field(init=False)
    at: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place.mkdir(parents=True)
        self.folder, self.ledger = self.place / "run", Ledger(self.place / "ledger")
        self.launches = Launches(self.ledger.folder, self.place / "log")

    def start(self, *, ranks: int = RANKS, max_restarts: int = 0, epochs: int = EPOCHS) -> Any:
        return self.launches.start(
            self.trainer.command(self.folder, epochs=epochs), ranks=ranks, max_restarts=max_restarts
        )

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for `condition`. Raises Hung."""
        until(condition, what, limit_s=self.limit_s)

    def reach(self, step: int) -> None:
        """Wait until `step` begins or no process is left. Raises Hung."""
        self.until(lambda: self.ledger.furthest() >= step or self.ended(), f"step {step}")

    def some_step(self) -> None:
        self.reach(self.random.randint(EARLIEST, LATEST))

    def ended(self) -> bool:
        return all(launch.poll() is not None for launch in self.launches.started)

    def fault(self) -> None:
        """Record the time of a fault: now."""
        self.at.append(time.time())

    def finish(self, *, ranks: int = RANKS) -> None:
        """Launch again until a launch exits with 0, at most `LAUNCHES` times in total. Raises Hung."""
        self.until(self.ended, "end")
        while self.launches.started[-1].returncode and len(self.launches.started) < LAUNCHES:
            self.start(ranks=ranks)
            self.until(self.ended, "end")

    def kill_rank(self) -> None:
        """Send SIGKILL to a random rank of the newest attempt, if it still runs."""
        victim = self.ledger.rank(self.random.randrange(RANKS))
        self.fault()
        if victim in marked(self.launches.mark):
            os.kill(victim, signal.SIGKILL)

    def kill_all(self) -> None:
        self.fault()
        self.launches.kill()


def nothing(scene: Scene) -> None:
    """undisturbed, once more"""
    scene.start()
    scene.finish()


def rank_killed(scene: Scene) -> None:
    """SIGKILL of a rank, twice, at random steps"""
    scene.start(max_restarts=3)
    for step in sorted(scene.random.sample(range(EARLIEST, LATEST + SAVE_EVERY), 2)):
        scene.reach(step)
        if not scene.ended():
            scene.kill_rank()
    scene.finish()


def all_killed(scene: Scene) -> None:
    """SIGKILL of everything at a random step"""
    scene.start()
    scene.some_step()
    scene.kill_all()
    scene.start()
    scene.finish()


def terminated(scene: Scene) -> None:
    """SIGTERM to torchrun, loader workers alive"""
    launch = scene.start()
    scene.some_step()
    scene.fault()
    launch.terminate()
    scene.until(scene.ended, "end after SIGTERM")
    scene.facts["seconds to leave"] = round(time.time() - scene.at[-1], 1)
    scene.start()
    scene.finish()


def world_changed(scene: Scene) -> None:
    """everything killed, resumed with one rank"""
    scene.start()
    scene.some_step()
    scene.kill_all()
    scene.start(ranks=1)
    scene.finish(ranks=1)


def truncated(scene: Scene) -> None:
    """newest checkpoint cut to half"""

    def cut(path: Path) -> None:
        os.truncate(path, path.stat().st_size // 2)

    spoil(scene, cut)


def flipped(scene: Scene) -> None:
    """one bit of the newest checkpoint flipped"""
    spoil(scene, flip)


def spoil(scene: Scene, harm: Callable[[Path], None]) -> None:
    scene.start()
    scene.some_step()
    scene.kill_all()
    path = scene.trainer.newest_file(scene.folder)
    scene.facts["spoiled"] = str(path.relative_to(scene.folder))
    harm(path)
    scene.start()
    scene.finish()


def flip(path: Path) -> None:
    """Flip the highest mantissa bit of a float32 in the middle of the file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 8 * 4 + 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


def twice(scene: Scene) -> None:
    """a second launch of the same run"""
    scene.start()
    scene.some_step()
    if scene.ended():
        raise Hung(f"the first launch ended with {scene.launches.codes()} before the second began")
    before, hold = scene.ledger.attempts(), scene.ledger.folder / HOLD.name
    hold.touch()
    second = scene.start()
    try:
        scene.until(lambda: second.poll() is not None or scene.ledger.attempts() != before, "news of the second")
    finally:
        hold.unlink()
    scene.until(scene.ended, "end of both")
    scene.facts["second trained too"] = scene.ledger.attempts() != before


def disk_full(scene: Scene) -> None:
    """disk full for two saves"""
    with small_disk(scene.place / "disk", DISK) as (namespace, inside):
        scene.launches = Launches(scene.ledger.folder, scene.place / "log", namespace=namespace)
        scene.folder = scene.place / "disk" / "run"
        scene.start()
        scene.some_step()
        scene.fault()
        freed = scene.ledger.furthest() + 2 * scene.trainer.save_every

        def filled() -> bool:
            fill(inside)
            return scene.ledger.furthest() >= freed or scene.ended()

        try:
            scene.until(filled, f"step {freed} on a full disk")
        finally:
            (inside / "filler").unlink()
        scene.facts["failed on the full disk"] = scene.ended()
        scene.finish()
        scene.folder = Path(shutil.copytree(inside / "run", scene.place / "run"))


def goodput(scene: Scene) -> None:
    """goodput, a rank killed every 30 s"""
    scene.start(max_restarts=9, epochs=ENDLESS)
    scene.reach(1)
    begun = time.time()
    for number in range(int(GOODPUT_S / BETWEEN_S)):
        wait(scene, begun + (number + 0.5) * BETWEEN_S)
        scene.kill_rank()
    wait(scene, begun + GOODPUT_S)
    steps = scene.ledger.furthest()
    scene.launches.kill()
    scene.facts |= {"seconds": round(time.time() - begun, 1), "steps": steps}


def wait(scene: Scene, moment: float) -> None:
    """Wait until the time `moment`; launch an ended job again."""
    while time.time() < moment:
        if scene.ended():
            scene.start(max_restarts=9, epochs=ENDLESS)
        time.sleep(0.1)


@dataclass(frozen=True)
class Fault:
    """One fault. same_weights: whether the weights are comparable with those of the undisturbed run."""

    act: Callable[[Scene], None]
    same_weights: bool = True

    @property
    def title(self) -> str:
        return str(self.act.__doc__)


FAULTS = {
    "none": Fault(nothing),
    "rank": Fault(rank_killed),
    "all": Fault(all_killed),
    "term": Fault(terminated),
    "world": Fault(world_changed, same_weights=False),
    "truncated": Fault(truncated),
    "flipped": Fault(flipped),
    "twice": Fault(twice),
    "full": Fault(disk_full),
    "goodput": Fault(goodput),
}


def play(scene: Scene, fault: Fault) -> None:
    """Train under `fault`, and kill every process that is left."""
    try:
        fault.act(scene)
    except Hung as hung:
        scene.facts["hung"] = str(hung)
    finally:
        scene.launches.kill()
