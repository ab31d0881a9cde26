"""Whose fault it is that nobody moves; the real processes are in test_faults.py."""

from types import SimpleNamespace

import pytest

from train.faults import heartbeat
from train.faults.heartbeat import FIRST_S, LONG_S, Heartbeat, Place, last


def place(sections, *, waiting=False, age_s=10.0, limit_s=5.0):
    return Place(1, sections, f"step {sections}", age_s, limit_s, waiting, "mine.py:3 (forward)", "n1")


def test_the_fewest_sections_are_last():
    assert last({0: place(7, waiting=True), 1: place(6), 2: place(7)}) == [1]


def test_of_equals_the_one_in_its_own_code_is_last():
    assert last({0: place(7, waiting=True), 1: place(7, waiting=True), 2: place(7)}) == [2]
    assert last({0: place(7, waiting=True), 1: place(7, waiting=True)}) == [0, 1]


@pytest.fixture
def beat(monkeypatch):
    """A heartbeat of rank 0 in a world of three, and a clock that is set by hand."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock.now)
    watch = Heartbeat(
        SimpleNamespace(rank=0, size=3, is_first=True), timeout_s=5.0, start_s=9.0, on_hang=lambda _: None
    )
    return watch, clock


def limits(watch, clock, durations, kind="step"):
    found = []
    for number, seconds in enumerate(durations):
        watch.begin(kind, number)
        found.append(watch._section[2])
        clock.now += seconds
    return found


def test_a_section_may_take_longer_while_nothing_is_known_of_it(beat):
    """Two first ones, then the timeout, unless such a section is known to take longer."""
    assert limits(*beat, [100, 1, 1, 1, 4, 1]) == [FIRST_S, FIRST_S, 5.0, 5.0, 5.0, 12.0]
    beat[0].begin("save", 6)
    assert beat[0]._section[2] == LONG_S


def test_who_is_busy_within_its_time_excuses_the_others(beat):
    watch, _ = beat
    watch._section = (7, "step 7", 5.0, -10.0)
    watch._others = {1: place(7, waiting=True), 2: place(6, limit_s=LONG_S)}
    assert watch._fault(patient=False) is None
    watch._others[2] = place(6)
    assert watch._fault(patient=True) is None, "the culprit may still say so itself"
    found = watch._fault(patient=False)
    assert found and found.rank == 2 and "rank 2 on n1 (step 6) stands in mine.py:3 (forward)" in str(found)
