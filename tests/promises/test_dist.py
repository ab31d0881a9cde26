"""How ranks find each other and talk: meetings, failures that all must hear of, shared folders, and what it costs."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from datetime import timedelta
from types import SimpleNamespace

import pytest
from kit import hosts
from kit.job import QUIET, ROOT, by_hand, command, environment, finish, free_port, start
from kit.ranks import on_ranks
from kit.until import until
from torch.distributed import TCPStore

from muster.errors import ConfigError, CrashLoop, DataError, MusterError, Preempted, RankLost, final, of_code
from muster.faults.preemption import Agreement, Preemption
from muster.world.environment import Environment
from muster.world.rendezvous.meeting import meet
from muster.world.rendezvous.meeting_keys import Lobby
from muster.world.rendezvous.network import Stopped, check_descriptors, check_interface
from muster.world.rendezvous.port import listener
from muster.world.store_keys import StoreKeys


@pytest.fixture
def store(monkeypatch):
    """A rendezvous store that outlives attempts, as torchrun's does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


@pytest.fixture
def arrived(monkeypatch):
    """The ranks whose hellos lie in the store, in the order in which they came."""
    came, arrive = [], Lobby.arrive

    def noted(self, meeting, hello):
        number = arrive(self, meeting, hello)
        came.append(hello["rank"])
        return number

    monkeypatch.setattr(Lobby, "arrive", noted)
    return came


class Visitor(threading.Thread):
    """One rank's `meet`, as a thread."""

    def __init__(self, rank, size, **arguments):
        super().__init__(daemon=True)
        self.place = Environment(rank, size, rank, size)
        self.arguments = {"alike": None, "error": None, "timeout_s": 20.0, **arguments}
        self.met = self.error = None
        self.start()

    def run(self):
        try:
            self.met = meet(self.place, **self.arguments)
        except (MusterError, KeyError) as error:  # also of one that outlives its test, and so the store and its address
            self.error = error


def together(*visitors, timeout_s=20):
    for visitor in visitors:
        visitor.join(timeout_s)
        assert not visitor.is_alive()
    return [visitor.met and visitor.met.attempt for visitor in visitors]


def test_a_store_that_outlives_attempts_never_mixes_them(store):
    """Five attempts; in each, some ranks come before their rank 0, while the one before is all there is."""
    attempts = set()
    for number in range(5):
        early = [Visitor(rank, 4) for rank in (1, 2)[: number % 3]]
        time.sleep(0.2)
        late = [Visitor(rank, 4) for rank in range(4) if rank not in [visitor.place.rank for visitor in early]]
        ids = together(*early, *late)
        assert len({*ids}) == 1 and None not in ids
        attempts.add(ids[0])
    assert len(attempts) == 5


@pytest.mark.unit
def test_a_meeting_that_rank_0_left_is_gone_on_from(store, arrived):
    """Rank 1 has arrived where rank 0 then died without a verdict: the next rank 0 fetches it."""
    dead = Visitor(0, 3, timeout_s=60.0)  # waits for rank 2, as it did when it died
    waiting = Visitor(1, 3)
    until(lambda: arrived == [1], "arrival", timeout_s=20)
    fresh = [Visitor(0, 3)]
    # Or the "dead" one, which here is alive, would hear rank 2.
    until(lambda: Lobby(store).newest() == 2, "meeting of its own", timeout_s=20)
    fresh.append(Visitor(2, 3))
    ids = together(waiting, *fresh)
    assert len({*ids}) == 1 and None not in ids
    assert dead.is_alive(), "and nobody believes in the dead one's meeting"


@pytest.mark.unit
def test_a_rank_that_arrived_and_died_is_replaced_by_its_successor(store, arrived):
    first = Visitor(0, 3)
    Visitor(1, 3)  # dies, say, and comes again
    until(lambda: arrived == [1], "arrival", timeout_s=20)
    second = Visitor(1, 3)
    until(lambda: arrived == [1, 1], "second arrival", timeout_s=20)  # or rank 2 may complete the meeting without it
    ids = together(second, Visitor(2, 3), first)
    assert len({*ids}) == 1 and None not in ids


def test_a_rank_needs_some_ten_operations_to_meet_however_long_it_waits(store):
    visitors = [Visitor(rank, 8) for rank in range(1, 8)]
    time.sleep(2)
    visitors.append(Visitor(0, 8))
    together(*visitors)
    assert max(visitor.met.operations.total() for visitor in visitors[:-1]) <= 10


def test_told_to_stop_while_meeting_all_that_came_leave(store, arrived):
    flag = threading.Event()
    visitors = [Visitor(rank, 4, stopping=flag.is_set if rank == 2 else lambda: False) for rank in range(3)]
    until(lambda: sorted(arrived) == [1, 2], "arrivals", timeout_s=20)
    began = time.monotonic()
    flag.set()
    together(*visitors)
    assert all(isinstance(visitor.error, Stopped) for visitor in visitors)
    assert time.monotonic() - began < 40
    again = [Visitor(rank, 2) for rank in range(2)]
    assert len({*together(*again)}) == 1, "and the next attempt hears nothing of it"


def test_told_to_stop_and_rank_0_never_comes(store):
    began = time.monotonic()
    alone = Visitor(1, 2, stopping=lambda: True, timeout_s=300.0)
    together(alone, timeout_s=60)
    assert isinstance(alone.error, Stopped) and time.monotonic() - began < 60


def boards(store, size):
    attempt = uuid.uuid4().hex
    return [StoreKeys(store.clone(), attempt=attempt, rank=rank, size=size) for rank in range(size)]


@pytest.mark.unit
def test_the_first_failure_wins_and_knows_it(store):
    """Two ranks that accuse the same third one post the same words; still only one of them speaks."""
    first, second = boards(store, 2)
    assert second.claim_failure({"rank": 7}) == (True, {"rank": 7})
    assert first.claim_failure({"rank": 7}) == (False, {"rank": 7})
    assert first.first_failure(0.1) == {"rank": 7}


@pytest.mark.unit
def test_no_key_is_left_per_save(store):
    ranks = boards(store, 3)

    def save(number):
        for store_keys in ranks:
            store_keys.post_part(number, {"files": {str(store_keys.rank): number}})
        parts = ranks[0].parts(number, 5)
        assert [part["files"] for part in parts] == [{str(rank): number} for rank in range(3)]
        ranks[0].end_save(number, None)
        assert [store_keys.save_end(number, 5) for store_keys in ranks[1:]] == [None, None]

    for number in range(1, 5):
        save(number)
    before = store.num_keys()
    for number in range(5, 25):
        save(number)
    assert store.num_keys() == before


@pytest.mark.unit
def test_a_save_that_a_rank_gave_up_fails_even_if_that_rank_is_ahead(store):
    first, second = boards(store, 2)
    first.post_part(1, {"files": {}})
    second.post_part(1, {"failed": "disk full"})
    second.post_part(2, {"files": {}})
    assert [("failed" in part) for part in first.parts(1, 5)] == [False, True]


def preempted(store, *, begun, signalled):
    watchers, preemptions = [], []
    for store_keys, number in zip(boards(store, len(begun)), begun, strict=True):
        preemption = Preemption()
        place = Environment(store_keys.rank, len(begun))
        watcher = Agreement(
            SimpleNamespace(size=len(begun), rank=store_keys.rank, store_keys=store_keys, environment=place), preemption
        )
        for _ in range(number):
            assert watcher.proceed()
        watchers.append((watcher, store_keys))
        preemptions.append(preemption)
    preemptions[signalled].request()
    until(lambda: all(watcher._holding for watcher, _ in watchers), "word to all", timeout_s=60)
    return watchers


def test_all_ranks_go_on_to_the_furthest_and_stop_there(store):
    """At a cost that does not grow with their number, but for the last one's single read."""
    for watcher, store_keys in preempted(store, begun=[3, 5, 4], signalled=0):
        stopped_at = {0: 3, 1: 5, 2: 4}[store_keys.rank]
        while watcher.proceed():
            stopped_at += 1
        assert stopped_at == 5
        assert sum(store_keys.operations[name] for name in ("set", "add", "multi_get")) <= 1 + 2 + 3 + 1, (
            store_keys.operations
        )
        watcher.close()


def collectives(sizes):
    from muster.world.group import start as start_world
    from muster.world.group_options import GroupOptions

    world = start_world(GroupOptions(), Environment.from_env())
    rank, told = world.rank, {}
    told["gather"] = world.gather({"rank": rank, "text": "é" * rank})
    told["broadcast"] = world.broadcast(rank, source=2)
    told["named"] = world.sum_named({"a": 1.0, f"only {rank}": float(rank)} if rank else {})
    told["lowest"] = [world.lowest(rank >= 1), world.lowest(False)]
    world.same("what", "one", remedy="mend it")
    for name, ask in {
        "same": lambda: world.same("data", "x" if rank < 2 else "y", remedy="mend it"),
        "failed": lambda: world.together(CrashLoop(f"mine {rank}") if rank else None),
    }.items():
        try:
            ask()
        except MusterError as error:
            told[name] = [error.exit_code, str(error)]
            told["origin"] = error.origin
    told["operations"] = world.store_keys.operations.total()
    world.close()
    return told


def test_collectives_of_a_run():
    values = on_ranks(collectives, 3, None)
    for rank, told in enumerate(values):
        assert told["gather"] == [{"rank": other, "text": "é" * other} for other in range(3)]
        assert told["broadcast"] == 2 and told["lowest"] == [1, None]
        assert told["named"] == {"a": 2.0, "only 1": 1.0, "only 2": 2.0}
        assert told["same"][0] == 3 and "data y on rank 2" in told["same"][1] and "mend it" in told["same"][1]
        assert told["failed"] == [7, "mine 1" if rank == 1 else "rank 1: mine 1"]
        assert told["origin"] == (None if rank == 1 else (1, socket.gethostname()))
    assert max(told["operations"] for told in values[1:]) <= 12, "none of it goes through the store"


def formed_again():
    import io

    import torch
    from torch.distributed import destroy_process_group

    from muster.world.group import form_group
    from muster.world.group_options import GroupOptions

    for _ in range(3):
        store_keys = SimpleNamespace(group_store=TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        form_group(GroupOptions(), Environment(), store_keys, backend="gloo", device=torch.device("cpu"))
        destroy_process_group()
    sys.stderr = io.StringIO()
    sys.excepthook(ValueError, ValueError("mine"), None)
    return sys.stderr.getvalue()


def test_the_trace_of_a_rank_has_its_number_once_however_often_ranks_were_restarted_in_place():
    assert on_ranks(formed_again, 1) == ["[rank0]: ValueError: mine\n"]


def prepared(folders):
    from muster.world.group import start as start_world
    from muster.world.group_options import GroupOptions

    rank = int(os.environ["RANK"])
    place = Environment(rank, 4, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2)  # two nodes of two
    world = start_world(GroupOptions(), place)
    with world.local_first(folders[rank // 2]) as goes_first:
        if goes_first:
            time.sleep(0.5)
        at = time.monotonic()
    world.close()
    return goes_first, at


@pytest.mark.parametrize("is_shared", [True, False])
def test_one_rank_of_all_that_see_the_same_folder_downloads(tmp_path, is_shared):
    """A folder that is not there yet counts as the part of its path that is."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    folders = [str(tmp_path / ("a" if is_shared else name) / "data/raw") for name in ("a", "b")]
    found = on_ranks(prepared, 4, folders)
    assert [first for first, _ in found] == [True, False, not is_shared, False]
    begun = [at for first, at in found if first]
    assert all(at >= max(begun) for first, at in found if not first)
    assert not [*tmp_path.rglob(".muster*")]


@pytest.mark.parametrize("change", ["other samples", "fewer samples"])
def test_nodes_whose_data_differ_are_named(tmp_path, change):
    roots = [tmp_path / "n0", tmp_path / "n1"]
    for number, root in enumerate(roots):
        root.mkdir()
        text = "all work and no play makes jack a dull boy. " * 200
        if number and change == "other samples":
            text = text.replace("jack", "jill")
        (root / "input.py").write_text(text if not number or change == "other samples" else text[:-1000])
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = ("data=text", "model=gpt", "objective=language_modeling", "max_steps=2", "dist.start_timeout_s=120")
    ranks = [
        start(tmp_path / "run", *line, f"data.root={root}", env={**env, "RANK": str(rank)})
        for rank, root in enumerate(roots)
    ]
    results = [finish(process, tmp_path / "run", timeout_s=120) for process in ranks]
    assert [result.code for result in results] == [3, 3], results[0].out + results[1].out
    said = [line for result in results for line in result.said]
    assert len(said) == 1 and "on rank 1 (" in said[0] and "data.root" in said[0], said


@pytest.mark.unit
def test_too_few_descriptors_for_the_world_are_said(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    check_descriptors(Environment(1, 512, 1, 8))
    with pytest.raises(ConfigError, match=r"ulimit -n is 1024 .* 1024 ranks need 1152"):
        check_descriptors(Environment(1, 1024, 1, 8))


@pytest.mark.unit
def test_errors_know_their_code_and_whether_a_retry_can_help():
    assert isinstance(of_code(3, "gone"), DataError) and str(of_code(3, "gone")) == "gone"
    assert isinstance(of_code(75, ""), Preempted) and type(of_code(99, "")) is MusterError
    assert {*final()} == {2, 3, 4, 5, 6, 7} and final()[6] == "diverged"
    assert RankLost.retry and Preempted.retry and Stopped.retry and not ConfigError.retry


@pytest.mark.nightly(but=["0.6"])
@pytest.mark.parametrize("delay_s", [0.6, 1.2, 1.8, 2.4, 3.0])
def test_sigterm_at_any_moment_of_the_start(tmp_path, delay_s):
    """To one rank alone, before or after it can take it: both leave, soon, and neither calls it a mistake."""
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = ("max_steps=100000", "dist.start_timeout_s=20", "checkpoint.every_steps=100000")
    ranks = [start(tmp_path / "run", *line, env={**env, "RANK": str(rank)}) for rank in (0, 1)]
    time.sleep(delay_s)
    ranks[1].send_signal(signal.SIGTERM)
    codes = [finish(process, tmp_path / "run", timeout_s=120).code for process in ranks]
    assert codes in ([75, 75], [2, -15], [2, 75]), codes  # the last if rank 0 comes 10 s later


def takes_sigterm(pid):
    """Whether it has a handler of its own for it (proc_pid_status(5))."""
    caught = next(line for line in open(f"/proc/{pid}/status") if line.startswith("SigCgt")).split()[1]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.nightly
def test_the_store_of_rank_0_listens_at_the_masters_address_alone(tmp_path):
    """It authenticates nobody: who may connect to this host by another address has no answer there."""
    (place, _) = by_hand(2)
    port = int(place["MASTER_PORT"])
    first = start(tmp_path / "run", "max_steps=1", env=place, cold=True)
    try:
        until(lambda: listens(port), "store", timeout_s=60)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=5):
            pass
    finally:
        first.terminate()
        first.communicate()


@pytest.mark.parametrize(
    ("answers", "listens_at"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["127.0.1.1"], None),  # Debian's own name of a host: elsewhere it is another address
        (["127.0.0.1", "192.0.2.7"], None),
        (["192.0.2.7"], None),  # a service's, none of this host's
    ],
)
@pytest.mark.unit
def test_a_store_listens_at_one_address_only_where_all_clients_come_by_it(monkeypatch, answers, listens_at):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in answers]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    name = "127.0.0.1" if answers == ["127.0.0.1"] else "node-7"
    at = listener(name, 0)
    assert (at and at.getsockname()[0]) == listens_at
    if at:
        at.close()


def test_both_told_to_stop_leave_without_waiting_for_the_third(tmp_path):
    port = free_port()
    env = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = ("max_steps=9", "dist.start_timeout_s=300")
    ranks = [start(tmp_path / "run", *line, env={**env, "RANK": str(rank)}) for rank in (0, 1)]
    deadline = time.monotonic() + 90
    while not (all(takes_sigterm(process.pid) for process in ranks) and listens(port)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    began = time.monotonic()
    for process in ranks:
        process.send_signal(signal.SIGTERM)
    results = [finish(process, tmp_path / "run", timeout_s=90) for process in ranks]
    assert [result.code for result in results] == [75, 75], [result.out for result in results]
    assert time.monotonic() - began < 60, "not dist.start_timeout_s"
    assert len(results[0].said) == 1 and "preempted" in results[0].said[0] and not results[1].said


def test_a_store_that_is_lost_while_ranks_meet_is_no_mistake_of_the_config(tmp_path):
    """Its host is killed: each rank says so in a line of its own, as nobody can speak for all, and a restart may help."""
    port = free_port()
    store = subprocess.Popen([sys.executable, "-m", "train.launch", "store", "--port", str(port)], env=environment())
    try:
        until(lambda: listens(port), "store", timeout_s=60)
        env = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        ranks = [start(tmp_path / "run", "max_steps=9", env={**env, "RANK": str(rank)}) for rank in (0, 1)]
        seen = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
        until(lambda: seen.add("meet/1/arrivals", 0) == 1, "arrival of rank 1", timeout_s=60)
    finally:
        store.kill()
        store.wait()
    for rank, process in enumerate(ranks):
        result = finish(process, tmp_path / "run", timeout_s=30)
        assert result.code == 1 and "Traceback" not in result.out, result.out
        assert len(result.said) == 1 and f"rank lost: rank {rank} on " in result.said[0], result.out
        assert "lost the rendezvous store at 127.0.0.1 while the ranks met" in result.said[0]


@pytest.mark.nightly
def test_talk_is_counted(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.talk", "--ranks=8", "--seconds=1"],
        env=environment(), capture_output=True, text=True, timeout=100, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and "| idle, a beat in 0.1 s |" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def two_hosts():
    """Two network namespaces with a link, and a second interface in each that leads nowhere. Gives their names."""
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    with hosts.two_hosts(blind=True) as names:
        yield names


@pytest.mark.long
def test_hosts_that_cannot_reach_each_other_are_named(tmp_path, two_hosts):
    """They meet at the store, but the interface that they were told to use leads nowhere."""
    line = command(f"output_dir={tmp_path / 'run'}", *QUIET, "max_steps=2", "dist.start_timeout_s=15", ranks=None)
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    common["GLOO_SOCKET_IFNAME"] = "other"
    ranks = [
        subprocess.Popen(
            hosts.inside(host, *line),
            env=environment(RANK=str(rank), **common),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        )
        for rank, host in enumerate(two_hosts)
    ]  # fmt: skip
    results = [
        finish(process, tmp_path / "run", timeout_s=150) for process in ranks
    ]  # most of it is gloo waiting to connect, 84 s on a quiet machine
    first = results[0]
    assert first.code == 1 and "(10.88.1.1) cannot open a connection to rank 1 on" in first.out, first.out
    assert "(10.88.2.1): open all ports" in first.out and "GLOO_SOCKET_IFNAME" in first.out, first.out
    assert results[1].code == 1, results[1].out


@pytest.mark.unit
def test_an_interface_that_a_host_has_not_is_named_before_the_ranks_meet(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,none0")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME names none0, and .* has only .*lo"):
        check_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    check_interface()
