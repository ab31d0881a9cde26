"""Whose fault it is that nobody moves: pure functions over what the ranks have posted.

- Whoever gives no sign of life is lost: stopped, or behind a cut link.
- Whoever is furthest behind hangs: it entered fewer phases, or is in code of its own while the others wait for it.
- Whoever is behind but still within its time (a long save, a first compile) excuses the others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from train.errors import RankLost
from train.faults.phase import Phase

NAMED = 8  # ranks that a verdict names at most


@dataclass(frozen=True)
class Standing:
    """One rank as a verdict speaks of it."""

    rank: int
    host: str | None
    name: str
    where: str
    limit_s: float
    silent_s: float


@dataclass(frozen=True)
class Outlook:
    """What rank 0 makes of all ranks, small whatever their number. `behind` is empty while not all have a phase."""

    silent: list[Standing]
    behind: list[Standing]
    number: int
    waiting: bool
    overdue: bool
    all_behind: bool

    def is_behind(self, phase: Phase) -> bool:
        """Whether a rank in `phase` is one of those that all others wait for."""
        return bool(self.behind) and (phase.number, phase.waiting) == (self.number, self.waiting)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Outlook:
        lists = {name: [Standing(**one) for one in said[name]] for name in ("silent", "behind")}
        return cls(**{**said, **lists})


def last(phases: dict[int, Phase]) -> list[int]:
    """The ranks that all others wait for: fewest phases entered, and of those the ones in code of their own."""
    behind = min((phase.number, phase.waiting) for phase in phases.values())
    return [rank for rank, phase in sorted(phases.items()) if (phase.number, phase.waiting) == behind]


def outlook(phases: dict[int, Phase | None], *, silent_s: dict[int, float], quiet_s: float) -> Outlook:
    """What is to be said of all ranks: `silent_s` seconds without a sign of life, of which `quiet_s` mean nothing."""
    longest = sorted(silent_s, key=lambda rank: -silent_s[rank])[:NAMED]
    silent = [standing(rank, phases[rank], silent_s[rank]) for rank in sorted(longest) if silent_s[rank] > quiet_s]
    known = {rank: phase for rank, phase in phases.items() if phase}
    if len(known) < len(phases):
        return Outlook(silent, [], 0, False, overdue=False, all_behind=False)
    culprits = last(known)
    behind = [standing(rank, known[rank], silent_s.get(rank, 0.0)) for rank in culprits[: NAMED // 2]]
    first = known[culprits[0]]
    return Outlook(
        silent,
        behind,
        first.number,
        first.waiting,
        overdue=all(known[rank].overdue for rank in culprits),
        all_behind=len(culprits) == len(known) > 1,
    )


def standing(rank: int, phase: Phase | None, silent_s: float) -> Standing:
    if phase is None:
        return Standing(rank, None, f"rank {rank} (start-up)", "", 0.0, silent_s)
    name = f"rank {rank} on {phase.host} ({phase.label})"
    return Standing(rank, phase.host, name, phase.where or "code that it has not named", phase.limit_s, silent_s)


def silence(seen: Outlook | None, seconds: float, *, told: str, me: int) -> RankLost | None:
    """Who has given no sign of life for `seconds`, apart from `me`, which knows better."""
    gone = [one for one in (seen.silent if seen else []) if one.silent_s > seconds and one.rank != me]
    if not gone:
        return None
    return RankLost(f"{', '.join(one.name for one in gone)} {told}", rank=gone[0].rank, host=gone[0].host)


def fault(seen: Outlook | None, mine: Phase, *, timeout_s: float, patient: bool) -> RankLost | None:
    """Why the rank in the phase `mine` must leave now; None while it has to wait. `patient`: the culprit may still say so."""
    if not seen or not seen.overdue or (patient and not seen.is_behind(mine)):
        return None
    told = f"for dist.timeout_s={timeout_s:g}"
    where = "; ".join(f"{one.name} stands in {one.where}" for one in seen.behind)
    if seen.all_behind:
        return RankLost(
            f"all ranks have stood still {told}: {where}: collectives that do not match, or a network that loses data"
        )
    first = seen.behind[0]
    return RankLost(f"{where} and has not moved {told} or longer", rank=first.rank, host=first.host)
