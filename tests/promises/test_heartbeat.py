"""Whose fault it is that nobody moves; the real processes are in test_faults.py."""

import json
import os
import signal
import threading
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit.clock import ManualClock
from kit.until import until
from torch.distributed import TCPStore

from muster.clock import SYSTEM
from muster.faults.heartbeat import DESERTED_S, EMERGENCY, HEARD_S, Heartbeat, period_s
from muster.faults.heartbeat_summary import Echo, Survey
from muster.faults.phase import (
    BACKWARD,
    COLLECTIVE,
    FIRST_S,
    LONG_S,
    Phase,
    Phases,
    Stillness,
    cuda_is_busy,
    main_thread,
)
from muster.faults.preemption import Preemption
from muster.faults.rank_at_fault import NAMED, Outlook, fault, last, left_out, outlook, silence
from muster.process import STOP_SIGNALS
from muster.world.environment import Environment
from muster.world.exposed_communication import Waiting

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")


def phase(number, *, waiting=False, age_s=10.0, limit_s=5.0, host="n1", gradients=0):
    return Phase(1, number, f"step {number}", age_s, limit_s, waiting, "mine.py:3 (forward)", host, gradients)


def test_the_fewest_phases_are_last():
    assert last({0: phase(7, waiting=True), 1: phase(6), 2: phase(7)}) == [1]


def test_of_equals_the_one_in_its_own_code_is_last():
    assert last({0: phase(7, waiting=True), 1: phase(7, waiting=True), 2: phase(7)}) == [2]
    assert last({0: phase(7, waiting=True), 1: phase(7, waiting=True)}) == [0, 1]


@pytest.fixture
def clock():
    return ManualClock()


def limits(own, clock, durations, kind="step"):
    found = []
    for number, seconds in enumerate(durations):
        own.enter(kind, number)
        found.append(own.limit_s)
        clock.sleep(seconds)
    return found


def test_a_phase_may_take_longer_while_nothing_is_known_of_it(clock):
    """Two first ones, then the timeout, unless such a phase is known to take longer."""
    own = Phases(timeout_s=5.0, start_s=9.0, clock=clock)
    assert own.limit_s == 9.0
    assert limits(own, clock, [100, 1, 1, 1, 4, 1]) == [FIRST_S, FIRST_S, 5.0, 5.0, 5.0, 12.0]
    own.enter("save", 6)
    assert own.limit_s == LONG_S


@pytest.mark.parametrize("waits_in", [COLLECTIVE, BACKWARD, ""])
def test_a_first_phase_may_compile_and_not_wait_in_one_collective(clock, monkeypatch, waits_in):
    monkeypatch.setattr("muster.faults.phase.code_position", lambda: ("mine.py:3 (main)", waits_in))
    own = Phases(timeout_s=5.0, start_s=9.0, clock=clock)
    own.enter("step", 0)
    clock.sleep(300.0)
    assert own.now(1).limit_s == FIRST_S, "it has been elsewhere until now"
    own.still_s = 5.0
    assert own.now(2).limit_s == (5.0 if waits_in == COLLECTIVE else FIRST_S)


@pytest.mark.parametrize("busy", [True, False])
def test_whose_device_is_not_done_waits_wherever_its_code_stands(clock, busy):
    """On CUDA a rank that waits for the others in a collective stands where it reads a value, as in float(loss)."""
    own = Phases(timeout_s=4.0, start_s=9.0, device_is_busy=lambda: busy, clock=clock)
    own.enter("step", 3)
    assert not own.now(1).waiting, "nothing is looked up while all goes well"
    clock.sleep(2.0)
    assert own.now(2).waiting is busy


def test_a_device_with_an_error_does_not_end_the_heartbeat(monkeypatch):
    """The beat's thread would take it, a RuntimeError, for the loss of the store, and the rank for silent."""

    def broken(_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "current_stream", broken)
    assert not cuda_is_busy(torch.device("cuda", 0))


def test_a_gradient_of_a_device_with_an_error_is_not_computed_and_raises_nothing(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def query(self):
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    weight = torch.nn.Parameter(torch.ones(2))
    waiting = Waiting(SimpleNamespace(device=torch.device("cuda", 0)), [weight])
    waiting.begin()
    (weight * 2).sum().backward()
    waiting.end()
    assert waiting.computed() == 0, "the main thread reports the error"


def seen(**ranks):
    return outlook({int(rank[1:]): one for rank, one in ranks.items()}, silent_s={}, quiet_s=0.2)


def test_who_is_busy_within_its_time_excuses_the_others():
    mine = phase(7)
    busy = seen(r0=mine, r1=phase(7, waiting=True), r2=phase(6, limit_s=LONG_S))
    assert fault(busy, mine, timeout_s=5, patient=False) is None
    hung = seen(r0=mine, r1=phase(7, waiting=True), r2=phase(6))
    assert fault(hung, mine, timeout_s=5, patient=True) is None, "the culprit may still say so itself"
    assert fault(hung, phase(6), timeout_s=5, patient=True), "which it does"
    found = fault(hung, mine, timeout_s=5, patient=False)
    assert found and found.rank == 2 and "rank 2 on n1 (step 6) is in mine.py:3 (forward)" in str(found)


def test_a_device_that_hangs_is_named_although_the_code_of_all_waits_alike():
    """It has one gradient less than those whose devices wait for it; its code may even be ahead of theirs."""
    mine = phase(9, waiting=True, gradients=4)
    hung = seen(r0=mine, r1=phase(9, waiting=True, gradients=4), r2=phase(10, waiting=True, gradients=3))
    found = fault(hung, mine, timeout_s=5, patient=False)
    assert found and found.rank == 2 and "its device with gradients that the others have" in str(found)
    posted = Outlook.of_json(json.loads(json.dumps(hung.as_json())))
    assert posted.is_behind(phase(10, waiting=True, gradients=3)) and not posted.is_behind(mine)


def test_the_device_tells_how_many_steps_it_has_computed(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            done.append(False)
            self.number = len(done) - 1

        def record(self):
            pass

        def query(self):
            return done[self.number]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    weight = torch.nn.Parameter(torch.ones(2))
    waiting = Waiting(SimpleNamespace(device=torch.device("cuda", 0)), [weight])
    for _ in range(3):
        waiting.begin()
        (weight * 2).sum().backward()
        waiting.end()
    assert len(done) == 6 and waiting.computed() == 0, "an event at the gradient and one at the end of the exchange"
    done[0] = True
    assert waiting.computed() == 1
    done[4] = True
    assert waiting.computed() == 1, "in order"
    done[2] = True
    assert waiting.computed() == 3
    assert Waiting(SimpleNamespace(device=torch.device("cpu")), [weight]).computed() == 0


def test_all_behind_is_nobodys_fault_alone():
    found = fault(seen(r0=phase(7), r1=phase(7)), phase(7), timeout_s=5, patient=True)
    assert found and found.rank is None and "collectives that do not match" in str(found)


@pytest.mark.parametrize(("calls", "waiting", "is_left_out"), [(2, True, True), (3, True, False), (2, False, False)])
def test_a_call_that_a_rank_ahead_has_left_out_is_named(calls, waiting, is_left_out):
    """If the one ahead has made it, the network has lost data; if it waits for nobody, it may be about to make it."""
    behind, ahead = replace(phase(6, waiting=True), calls=3), replace(phase(7, waiting=waiting), calls=calls)
    slow = replace(phase(8, waiting=True, gradients=0), calls=4)  # its device is behind, its code is not
    assert left_out(seen(r0=replace(ahead, gradients=1), r1=slow), slow) is None
    found = left_out(seen(r0=ahead, r1=behind), behind)
    assert bool(found) == is_left_out and left_out(seen(r0=ahead, r1=behind), ahead) is None
    assert not found or "rank 1 on n1 (step 6) is in mine.py:3 (forward), a call for all ranks that rank 0" in str(
        found
    )


def test_nothing_is_judged_before_all_have_a_phase():
    early = seen(r0=phase(0), r1=None)
    assert fault(early, phase(0), timeout_s=5, patient=False) is None
    assert "rank 1 (start-up)" in str(
        silence(outlook({0: phase(0), 1: None}, silent_s={1: 3.0}, quiet_s=0.2), 1.0, symptom="is silent", me=0)
    )


def test_who_is_silent_is_named_but_not_oneself():
    world = {rank: phase(7, host=f"n{rank}") for rank in range(3)}
    said = outlook(world, silent_s={0: 0.0, 1: 4.0, 2: 4.0}, quiet_s=0.2)
    found = silence(said, 3.0, symptom="sends no heartbeat", me=2)
    assert found and (found.rank, found.host) == (1, "n1") and "rank 2" not in str(found)
    assert silence(said, 5.0, symptom="", me=0) is None


def test_what_rank_0_posts_stays_small_and_survives_the_way():
    world = {rank: phase(7) for rank in range(5000)}
    said = outlook(world, silent_s=dict.fromkeys(world, 9.0), quiet_s=0.2)
    assert len(said.silent) == NAMED and len(json.dumps(said.as_json())) < 4096
    assert Outlook.of_json(json.loads(json.dumps(said.as_json()))) == said


def board_of(beats):
    return SimpleNamespace(beats=lambda: [*beats], first_beat=lambda: beats[0], beat_lag=2)


def test_a_rank_that_posts_nothing_new_is_silent_and_one_that_was_not_looked_at_is_not(clock):
    beats = [b"", json.dumps({"phase": vars(phase(7))}).encode()]
    survey = Survey(SimpleNamespace(size=2, rank=0, store_keys=board_of(beats)), 0.1, clock=clock)
    for _ in range(10):
        survey.look(phase(7), is_wanted=False)
        clock.sleep(0.1)
    assert survey.gone == 1 and survey.outlook and [one.rank for one in survey.outlook.silent] == [1]
    clock.sleep(30)  # this process was stopped itself
    survey.look(phase(7), is_wanted=True)
    assert survey.gone == 0 and survey.outlook and not survey.outlook.silent


def test_the_others_see_that_rank_0_posts_nothing_new(clock):
    beats = [json.dumps({"phase": vars(phase(7)), "outlook": None}).encode()]
    echo = Echo(SimpleNamespace(size=2, rank=1, store_keys=board_of(beats)), 0.1, clock=clock)
    echo.begin()
    for _ in range(5):
        echo.look(phase(7), is_wanted=True)
        clock.sleep(0.1)
    assert echo.first_silent_s == pytest.approx(0.5) and echo.first_name == "rank 0 on n1 (step 7)"
    beats[0] = json.dumps({"phase": vars(phase(8)), "outlook": None}).encode()
    echo.look(phase(7), is_wanted=True)
    assert echo.first_silent_s == 0.0


def test_beats_grow_rarer_with_the_world_but_not_too_rare_for_the_timeout():
    def of(nodes, each, timeout_s=300):
        return period_s(Environment(world_size=nodes * each, local_world_size=each), timeout_s)

    assert of(1, 2) == of(27, 1) == of(27, 8) == 0.1
    assert of(128, 8) == of(128, 1) == pytest.approx(0.465, abs=0.001)
    assert of(100_000, 1, 40) == 5 and of(100_000, 8, 40) == 2.5, "several periods within the timeout"


def test_a_rank_that_waits_for_a_silent_rank_0_leaves_at_the_timeout(clock):
    beats = [json.dumps({"phase": vars(phase(7)), "outlook": None}).encode()]
    store_keys, began = board_of(beats), clock.now
    world = SimpleNamespace(
        size=2, rank=1, is_first=False, device=CPU, store_keys=store_keys, environment=Environment(), calls=Counter()
    )
    own = Heartbeat(world, timeout_s=5.0, start_s=5.0, on_hang=print, clock=clock)
    own.enter("step", 7)
    own.enter("step", 8)
    own.enter("step", 9)  # the first two may take longer
    while not (found := own._verdict()) and clock.now - began < 60:
        own.eye.look(own.phases.now(1), is_wanted=True)
        clock.sleep(0.1)
    assert found and found.rank == 0 and "rank 0 on n1 (step 7) sends no heartbeat" in str(found)
    assert 4.8 < clock.now - began < 5.2


@pytest.fixture
def standing(clock):
    """A heartbeat of rank 1 whose main thread stands where `place` says, and what has reached it."""
    beats = [json.dumps({"phase": vars(phase(7)), "outlook": None}).encode()]
    said = SimpleNamespace(place=(1, 1), failed=False, stopped=False, beats=True)
    store_keys = SimpleNamespace(
        **vars(board_of(beats)), has_failure=lambda: said.failed, post_beat=lambda text, every_s: None
    )
    world = SimpleNamespace(
        size=2, rank=1, is_first=False, device=CPU, store_keys=store_keys, environment=Environment(), calls=Counter()
    )
    still = Stillness(place=lambda: said.place, clock=clock)
    options = {"stillness": still, "is_asked_to_stop": lambda: said.stopped, "clock": clock}
    own = Heartbeat(world, timeout_s=300.0, start_s=300.0, on_hang=print, **options)
    own.enter("step", 7)

    def passes(seconds):
        """The verdict after `seconds` at most, and how many have passed."""
        for tenth in range(round(seconds * 10)):
            if found := own._verdict():
                return found, tenth / 10
            if said.beats:
                beats[0] = json.dumps({"phase": vars(phase(7, age_s=clock.now)), "outlook": None}).encode()
            own.eye.look(own.phases.now(1), is_wanted=True)
            own._one_has_failed = own._is_still and store_keys.has_failure()
            clock.sleep(0.1)
        return None, seconds

    return said, own, passes


def test_a_rank_that_stands_still_leaves_when_another_has_failed(standing):
    said, _, passes = standing
    assert passes(10) == (None, 10), "a step may take long"
    said.failed = True
    found, seconds = passes(10)
    assert found and "another rank has failed" in str(found) and HEARD_S <= seconds < HEARD_S + 0.3


def test_a_rank_that_moves_or_waits_for_its_own_checkpoint_hears_of_a_failure_by_itself(standing):
    said, own, passes = standing
    said.failed, said.place = True, None  # in Thread.join, say
    assert passes(10) == (None, 10)
    for step in range(8, 18):
        own.enter("step", step)
        said.place = (1, 1)
        assert passes(1) == (None, 1), "where the same line runs again in another step"


def test_a_rank_that_saves_the_last_step_or_waits_for_that_is_let_be(standing):
    said, own, passes = standing
    said.failed = said.stopped = True
    own.enter(EMERGENCY, 7)
    assert passes(20) == (None, 20)


def test_after_a_sigterm_a_rank_that_stands_still_waits_for_ranks_that_live(standing):
    said, _, passes = standing
    said.stopped = True
    assert passes(30) == (None, 30), "a preempted rank may be waited for"
    said.beats = False
    found, seconds = passes(10)
    assert (
        found
        and found.rank == 0
        and "sends no heartbeat" in str(found)
        and DESERTED_S - 0.2 < seconds < DESERTED_S + 0.5
    )


@pytest.mark.parametrize("device, after_s", [("cpu", None), ("cuda", 300 / 4)])
def test_on_a_gpu_a_rank_that_stands_still_leaves_others_that_are_silent(standing, device, after_s):
    """With a static rendezvous no SIGTERM comes from another node, and NCCL may wait for ever."""
    said, own, passes = standing
    own.world.device = torch.device(device)
    assert passes(30) == (None, 30), "a step may take long"
    said.beats = False
    found, seconds = passes(100)
    assert bool(found) == bool(after_s)
    assert not found or ("rank 0" in str(found) and after_s - 0.2 < seconds < after_s + 0.5)


def test_after_a_pause_of_its_own_a_rank_does_not_take_others_for_silent(standing):
    """As of the whole host: SIGSTOP and SIGCONT of all ranks, or a machine that is moved."""
    said, own, passes = standing
    own.world.device, said.beats = torch.device("cuda"), False
    assert passes(10) == (None, 10)
    own.clock.sleep(200)
    assert own._verdict() is None and passes(70) == (None, 70)
    assert passes(10)[0], "and then they are"


@pytest.mark.parametrize("device, after_s", [("cpu", None), ("cuda", HEARD_S)])
def test_on_a_gpu_a_rank_that_stands_still_leaves_when_the_store_is_gone(standing, device, after_s):
    _, own, passes = standing
    own.world.device = torch.device(device)
    assert passes(5) == (None, 5)
    own._store_is_gone = True
    found, seconds = passes(30)
    assert bool(found) == bool(after_s) and (not found or after_s - 0.2 < seconds < after_s + 0.3)


@pytest.mark.parametrize(("launcher", "lost"), [(None, "rank 0 on"), (1, "rank 0's rendezvous store on")])
def test_a_store_whose_process_has_ended_is_lost(standing, monkeypatch, launcher, lost):
    """With a supervisor the store has a process of its own, and rank 0 may be alive."""
    monkeypatch.setattr("muster.process._launcher", launcher)
    _, own, _ = standing
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    own.world.store_keys.post_beat, own.clock = lambda text, every_s: client.set("beat/1", text), SYSTEM
    del store
    own._exchange()
    assert str(own.silence(1.0)).startswith(lost)


def test_another_error_of_the_exchange_is_not_taken_for_a_lost_store_and_ends_no_heartbeat(standing, capsys):
    _, own, _ = standing
    sent = []

    def post(text, *, every_s):
        if len(sent) < 2:
            sent.append("")
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        sent.append(text)
        own._ended.set()

    own.world.store_keys.post_beat, own.clock = post, SYSTEM
    own._exchange()
    assert sent[-1] and own.silence(1.0) is None and not own._store_is_gone
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_main_thread_that_waits_for_another_one_is_not_still():
    """As for the writer of a checkpoint."""
    seen = []
    looking = threading.Thread(target=lambda: seen.append(until(lambda: main_thread() is None, "join", timeout_s=5)))
    looking.start()
    looking.join()
    assert seen


def test_a_stop_signal_is_known_to_other_threads_before_its_handler_runs():
    preemption, before = Preemption(), {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        preemption.install()
        assert not preemption.has_arrived()
        os.write(preemption._arrivals[1], bytes([signal.SIGCHLD]))
        assert not preemption.has_arrived(), "another signal"
        os.write(preemption._arrivals[1], bytes([signal.SIGTERM]))  # as Python's part in C does, at once
        assert preemption.has_arrived() and not preemption.signalled
    finally:
        preemption.uninstall()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_heartbeat_does_not_keep_what_counts_gradients(clock):
    """A strategy holds the process group: while it lives, other ranks wait for connections that nobody uses."""

    class Counting:
        def computed(self):
            return 3

    phases, counting = Phases(timeout_s=5, start_s=5, clock=clock), Counting()
    phases.count_gradients(counting.computed)
    assert phases.now(1).gradients == 3
    held = weakref.ref(counting)
    del counting
    assert held() is None and phases.now(2).gradients == 0
