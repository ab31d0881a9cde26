"""The ranks of a node share memory, and one of them at a time talks to the rendezvous store for all."""

import os
import signal
import sys
import uuid
from pathlib import Path

import pytest
from kit.job import pace
from kit.ledger import RECORDED, assert_exact
from kit.loopback import nodes, variable
from kit.ranks import on_ranks
from kit.until import until
from torch.distributed import TCPStore

from muster.world.node_memory import HEAD, NodeMemory
from muster.world.store_client import Connections
from muster.world.store_keys import StoreKeys

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks of a node share memory on Linux alone")
SHARED = Path("/dev/shm")
stores = []


def left():
    return [*SHARED.glob(f"muster-{os.geteuid()}-*")]


def memories(count, *, of=None):
    name = f"muster-test-{uuid.uuid4().hex}"
    return [NodeMemory.open(name, index, of or count) for index in range(count)]


def boards(size, per_node, *, singles=()):
    """Boards of `size` ranks; the ranks in `singles` could not map their node's memory.

    They share a connection, so that the store carries out their requests in order: it does not answer a `set`.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores.append(store)  # it ends with its object
    shared = Connections(store)
    attempt, made = uuid.uuid4().hex, []
    for first in range(0, size, per_node):
        for index, memory in enumerate(memories(per_node)):
            node = None if first + index in singles else memory
            rank = first + index
            made.append(StoreKeys(store, attempt=attempt, rank=rank, size=size, connections=shared, node=node))
    for store_keys in made:
        store_keys.post_beat("")
    return made


def beat(store_keys, number):
    return f'{{"beat": {number}, "rank": {store_keys.rank}}}'


@pytest.mark.unit
@pytest.mark.parametrize(
    "singles, keys", [((), 2), ((0,), 3), ((4, 5), 4)], ids=["all share", "rank 0 does not", "two do not"]
)
def test_rank_0_reads_a_key_of_each_other_node_and_sees_every_beat(singles, keys):
    first, *others = boards(9, 3, singles=singles)
    assert first.beats() == [b""] * 9
    for number in (1, 2):
        before = [store_keys.operations.total() for store_keys in (first, *others)]
        for store_keys in others:
            store_keys.post_beat(beat(store_keys, number), every_s=0.0)  # every one is due: the last has all
        assert first.beats()[1:] == [beat(store_keys, number).encode() for store_keys in others]
        read, *_ = (
            store_keys.operations.total() - earlier
            for store_keys, earlier in zip((first, *others), before, strict=True)
        )
        assert read == keys
    assert first.beat_lag == 4


@pytest.mark.unit
def test_a_node_posts_once_a_period_whoever_posts():
    first, *others = boards(6, 3)
    node = others[2:]  # ranks 3, 4 and 5
    first.beats()
    before = sum(store_keys.operations.total() for store_keys in node)
    for number in range(50):
        for store_keys in node:
            store_keys.post_beat(beat(store_keys, number), every_s=1000.0)
    assert sum(store_keys.operations.total() for store_keys in node) == before, (
        "the first post of all is not old enough"
    )
    for number in range(3):  # ranks 3 and 4 are stopped: rank 5 posts for them, what they last wrote
        node[2].post_beat(beat(node[2], 100 + number), every_s=0.0)
    assert [b"49" in said for said in first.beats()[3:5]] == [True, True] and b"102" in first.beats()[5]


@pytest.mark.unit
def test_what_one_rank_of_a_node_asked_the_others_know():
    *_, asks, reads = boards(4, 2)
    before = asks.operations.total(), reads.operations.total()
    assert [asks.asked_to_stop(every_s=1000.0) for _ in range(9)] == [False] * 9
    assert not reads.asked_to_stop(every_s=1000.0)
    assert (asks.operations.total(), reads.operations.total()) == (before[0] + 1, before[1])
    asks.ask_to_stop()
    assert reads.asked_to_stop(every_s=1000.0) and asks.asked_to_stop(every_s=1000.0)
    assert reads.operations.total() == before[1]


@pytest.mark.unit
def test_a_request_of_another_node_is_seen_when_the_next_question_is_due():
    first, _, here, beside = boards(4, 2)
    assert not here.asked_to_stop(every_s=1000.0)
    first.ask_to_stop()
    assert not beside.asked_to_stop(every_s=1000.0), "not yet asked again"
    assert beside.asked_to_stop(every_s=0.0) and here.asked_to_stop(every_s=1000.0)


@pytest.mark.unit
def test_a_half_written_beat_is_not_read():
    one, other = memories(2)
    one.write(7, "whole")
    other.write(8, "this, too")
    assert other.read() == {7: b"whole", 8: b"this, too"}
    one._memory[one._start(0) + HEAD.size] ^= 1
    assert other.read() == {7: b"whole", 8: b"this, too"}, "what was read before"
    assert one.read() == {8: b"this, too"}, "it has read nothing before"
    one.write(7, "anew")
    assert one.read() == other.read() == {7: b"anew", 8: b"this, too"}
    with pytest.raises(ValueError, match="bytes"):
        one.write(7, "x" * 5000)


@pytest.mark.unit
def test_the_file_goes_when_all_have_mapped_it_and_is_of_this_user_alone():
    name = f"muster-test-{uuid.uuid4().hex}"
    first = NodeMemory.open(name, 0, 2)
    assert (SHARED / name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="not of this user"):
        NodeMemory.open(name, 2, 3)  # another size
    second = NodeMemory.open(name, 1, 2)
    assert first.token == second.token and not [*SHARED.glob(f"{name}*")]
    lonely = NodeMemory.open(name, 0, 2)
    lonely.unlink()
    assert not [*SHARED.glob(f"{name}*")] and lonely.token != first.token
    (SHARED / name).symlink_to("/dev/null")
    try:
        with pytest.raises(OSError):
            NodeMemory.open(name, 0, 2)
    finally:
        (SHARED / name).unlink()


def maps_and_writes(name):
    import os

    from muster.world.node_memory import NodeMemory

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    memory = NodeMemory.open(name, rank, size)
    for number in range(2000):
        memory.write(rank, f"{rank} {number} " + "x" * number + f" {number}")
        for other, said in memory.read().items():
            whose, first, _, last = said.decode().split(" ")
            assert (int(whose), first) == (other, last), said[:40]
    return memory.token


@pytest.mark.nightly
def test_processes_that_come_at_once_map_the_same_memory_and_read_whole_beats():
    name = f"muster-test-{uuid.uuid4().hex}"
    tokens = on_ranks(maps_and_writes, 4, name)
    assert len({*tokens}) == 1 and not [*SHARED.glob(f"{name}*")]


@pytest.mark.nightly
@pytest.mark.parametrize("place", [0, 1])
def test_a_stopped_rank_beside_others_on_another_node_is_named(tmp_path, place):
    """Whether or not it was the one that posted for its node."""
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    line = (*RECORDED, "batch_size=12", "checkpoint.every_steps=10", *pace(0.05), "max_steps=60")
    line = (*line, "dist.timeout_s=6", "dist.survive=false")
    before = left()
    with nodes(tmp_path / "run", *line, nnodes="2", nproc=2, LEDGER=str(ledger)) as cluster:
        agents = [cluster.start(), cluster.start()]
        cluster.reach(25)
        cluster.until(lambda: {*left()} <= {*before}, "end of all names")  # other tests' are there for moments
        ranks = {int(variable(pid, "RANK")): pid for agent in agents for pid in cluster.workers(agent)}
        with cluster.slowly():
            cluster.next_step(lambda: os.kill(ranks[2 + place], signal.SIGSTOP))
        assert f"rank {2 + place} on" in cluster.result().events("restart")[0]["cause"]
        assert cluster.ended() == [0, 0], cluster.log
        assert_exact(ledger, steps=60, batch_size=12)
    until(lambda: {*left()} <= {*before}, "end of all names", timeout_s=60)
