"""Find the rank that blocks the others: pure functions over the posted phases.

- A silent rank is lost: stopped, or behind a cut link.
- The rank furthest behind hangs: its device has computed the gradients of fewer steps, it has entered fewer phases, or it runs its
  own code while the others wait for it.
- A rank that is behind but within its time limit (a long save, a first compile) excuses the others.
- A rank that is behind in a call that one ahead of it has not made waits for ever: the code makes it on some ranks only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from muster.errors import ConfigError, RankLost
from muster.faults.phase import Phase

NAMED = 8  # the most ranks that an outlook names


@dataclass(frozen=True)
class Standing:
    rank: int
    host: str | None
    name: str
    where: str
    limit_s: float
    silent_s: float


@dataclass(frozen=True)
class Outlook:
    """Rank 0's summary of all ranks, of bounded size. `behind` is empty until all have posted a phase."""

    silent: list[Standing]
    behind: list[Standing]
    gradients: int
    number: int
    waiting: bool
    overdue: bool
    all_behind: bool
    still_s: float = 0.0
    skipped_by: str = ""
    """A rank that is ahead, and has not made the call in which the ranks behind wait."""

    def is_behind(self, phase: Phase) -> bool:
        """Whether a rank in `phase` is one that all others wait for."""
        return bool(self.behind) and progress(phase) == (self.gradients, self.number, self.waiting)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Outlook:
        lists = {name: [Standing(**one) for one in said[name]] for name in ("silent", "behind")}
        return cls(**{**said, **lists})


def progress(phase: Phase) -> tuple[int, int, bool]:
    """Return how far a rank is, to compare. The device comes first: a queue lets code run ahead of one that hangs."""
    return phase.gradients, phase.number, phase.waiting


def last(phases: dict[int, Phase]) -> list[int]:
    """Return the ranks that all others wait for."""
    behind = min(map(progress, phases.values()))
    return [rank for rank, phase in sorted(phases.items()) if progress(phase) == behind]


def outlook(phases: dict[int, Phase | None], *, silent_s: dict[int, float], quiet_s: float) -> Outlook:
    """`silent_s`: since each rank's last new beat. `quiet_s`: silence that is normal."""
    longest = sorted(silent_s, key=lambda rank: -silent_s[rank])[:NAMED]
    silent = [standing_of(rank, phases[rank], silent_s[rank]) for rank in sorted(longest) if silent_s[rank] > quiet_s]
    known = {rank: phase for rank, phase in phases.items() if phase}
    if len(known) < len(phases):
        return Outlook(silent, [], 0, 0, False, overdue=False, all_behind=False)
    culprits = last(known)
    behind = [standing_of(rank, known[rank], silent_s.get(rank, 0.0)) for rank in culprits[: NAMED // 2]]
    first = known[culprits[0]]
    if first.gradients < min((p.gradients for rank, p in known.items() if rank not in culprits), default=0):
        behind = [replace(one, where=f"{one.where}, its device with gradients that the others have") for one in behind]
    ahead = sorted({*known} - {*culprits})
    skips = next((rank for rank in ahead if _skips(known[rank], first)), None)
    return Outlook(
        silent,
        behind,
        first.gradients,
        first.number,
        first.waiting,
        overdue=all(known[rank].overdue for rank in culprits),
        all_behind=len(culprits) == len(known) > 1,
        still_s=min(known[rank].still_s for rank in culprits),
        skipped_by="" if skips is None else standing_of(skips, known[skips], 0.0).name,
    )


def _skips(ahead: Phase, behind: Phase) -> bool:
    """Whether a rank whose code is ahead has made fewer calls than the one that is behind; both wait, so neither is about to make one."""
    return ahead.waiting and behind.waiting and ahead.number > behind.number and ahead.calls < behind.calls


def standing_of(rank: int, phase: Phase | None, silent_s: float) -> Standing:
    if phase is None:
        return Standing(rank, None, f"rank {rank} (start-up)", "", 0.0, silent_s)
    name = f"rank {rank} on {phase.host} ({phase.label})"
    return Standing(rank, phase.host, name, phase.where or "unnamed code", phase.limit_s, silent_s)


def silence(seen: Outlook | None, seconds: float, *, symptom: str, me: int) -> RankLost | None:
    """Return an error that names the ranks silent for `seconds`, except `me`; None if there are none."""
    gone = [one for one in (seen.silent if seen else []) if one.silent_s > seconds and one.rank != me]
    if not gone:
        return None
    return RankLost(f"{', '.join(one.name for one in gone)} {symptom}", rank=gone[0].rank, host=gone[0].host)


def left_out(seen: Outlook | None, mine: Phase) -> ConfigError | None:
    """Return an error if the rank in `mine` is in a call that a rank ahead has not made."""
    if not seen or not seen.skipped_by or not seen.is_behind(mine):
        return None
    name, where = seen.behind[0].name, seen.behind[0].where
    return ConfigError(
        f"{name} is in {where}, a call for all ranks that {seen.skipped_by} has left out: make it on all ranks, or on none"
    )


def fault(seen: Outlook | None, mine: Phase, *, timeout_s: float, patient: bool) -> RankLost | None:
    """Return why the rank in `mine` must leave now; None while it must wait. `patient`: let the rank at fault report itself first."""
    if not seen or not seen.overdue or (patient and not seen.is_behind(mine)):
        return None
    period = f"for dist.timeout_s={timeout_s:g}"
    where = "; ".join(f"{one.name} is in {one.where}" for one in seen.behind)
    if seen.all_behind:
        return RankLost(
            f"no rank has made progress {period}: {where}: collectives that do not match, as a pass of DistributedDataParallel that not all ranks make "
            "(docs/loop-recipes.md, Passes that hang), or a network that loses data",
            hangs=True,
        )
    first = seen.behind[0]
    return RankLost(
        f"{where} and has made no progress {period} or longer", rank=first.rank, host=first.host, hangs=True
    )
