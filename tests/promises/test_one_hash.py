"""virtual_world_size: one hash of the weights at every world size, through kills and resumes at other ones."""

import hashlib
import json
import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.job import by_hand, finish, hold, pace, reached, run, start, wait_for
from kit.loopback import nodes
from kit.ranks import on_ranks

from muster.errors import ConfigError
from muster.sample_plan import Share, leaves_of
from muster.train.config.choices import options
from muster.train.config.compose import compose
from muster.train.config.parts import build
from muster.train.strategies.base import check_slices
from muster.world.reduce.tree import subtrees, tree_sum

# Seven slices of 31 samples or fewer: none divides another. Dropout, batch norm, a layer that not all slices use,
# augmentation, bf16, accumulation, Adam, clipping.
LINE = (
    "model._target_=kit.parts.models.Fickle",
    "precision=bf16",
    "data.augment=true",
    "optimizer=adamw",
    "grad_clip=0.5",
    "batch_size=31",
    "micro_batch_size=3",
    "virtual_world_size=7",
    "eval.every_steps=10",
    "checkpoint.every_steps=4",
    "max_steps=50",
)
OTHER = {"ATEN_CPU_CAPABILITY": "default"}
"""torch as on a processor that has no wide vectors."""


def tree(values):
    """The tree, written down as its definition."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [sum(pair[1:], pair[0]) for pair in pairs]
    return values[0]


def numbers(leaves, length=5):
    """Values whose sum depends on the order."""
    return torch.randn(leaves, length, generator=torch.Generator().manual_seed(leaves)) * 10.0 ** torch.arange(length)


@given(leaves=st.integers(1, 40), data=st.data())
@settings(max_examples=200, deadline=None)
@pytest.mark.unit
def test_the_sum_is_that_of_one_tree_however_its_leaves_are_divided(leaves, data):
    size = data.draw(st.integers(1, leaves))
    values, given_by_ranks, most = numbers(leaves), {}, 0
    for rank in range(size):
        mine = leaves_of(rank, size, leaves)
        nodes = subtrees(mine, leaves)
        most = max(most, len(nodes))
        for level, index in nodes:
            covered = range(index << level, min((index + 1) << level, leaves))
            assert set(covered) <= set(mine)
            given_by_ranks[level, index] = tree(list(values[covered.start : covered.stop])).clone()
    assert torch.equal(tree_sum(given_by_ranks, leaves), tree(list(values)))
    assert most <= 2 * leaves.bit_length()
    if leaves % size == 0 and (leaves // size).bit_count() == 1 and leaves.bit_count() == 1:
        assert most == 1, "a power of two moves the bytes of an all-reduce"


@given(
    count=st.integers(1, 60), slices=st.integers(1, 12), data=st.data(), micro=st.one_of(st.none(), st.integers(1, 9))
)
@settings(deadline=None)
@pytest.mark.unit
def test_the_cuts_are_the_same_at_every_world_size(count, slices, data, micro):
    size = data.draw(st.integers(1, slices))
    alone = Share(0, 1, micro, slices).cuts(count)
    assert [cut for rank in range(size) for cut in Share(rank, size, micro, slices).cuts(count)] == alone
    assert [index for _, begin, end in alone for index in range(begin, end)] == list(range(count))
    assert all(0 < end - begin <= (micro or count) for _, begin, end in alone)


def exchanged(per_host):
    import os

    import torch.distributed as dist

    from muster.world.environment import Environment
    from muster.world.group import start
    from muster.world.group_options import GroupOptions
    from muster.world.reduce.hierarchical import find_hosts
    from muster.world.reduce.tree import TreeSum

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Environment(rank, size, rank % per_host, per_host, rank // per_host)
    world = start(GroupOptions(shared_memory=False), place)
    hosts = find_hosts(world, "always")
    assert (hosts is None) == (per_host == 1) and find_hosts(world, "never") is None
    totals = []
    for leaves in (size, size + 1, 8, 13):
        total = TreeSum(leaves, rank=rank, world_size=size, hosts=hosts)
        for leaf in leaves_of(rank, size, leaves):
            total.add(leaf, numbers(leaves, 10)[leaf].clone())
        totals.append(total.total().tolist())
    dist.destroy_process_group()
    return totals


@pytest.mark.nightly(but=["3-1"])
@pytest.mark.parametrize("ranks, per_host", [(2, 1), (3, 1), (4, 2), (6, 2), (6, 3)])
def test_ranks_exchange_what_joins_their_subtrees(ranks, per_host):
    expected = [tree(list(numbers(leaves, 10))).tolist() for leaves in (ranks, ranks + 1, 8, 13)]
    assert on_ranks(exchanged, ranks, per_host) == [expected] * ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """On one rank, as a plain process."""
    return run(tmp_path_factory.mktemp("hash") / "run", *LINE)


def digest(result):
    return hashlib.sha256((result.folder / "model.pt").read_bytes()).hexdigest()


def values(result):
    """All that metrics.jsonl says of training and evaluation, but for times."""
    kept = [line for line in result.metrics if line["kind"] in ("train", "eval")]
    return [{key: value for key, value in line.items() if "_s" not in key and key != "time"} for line in kept]


@pytest.mark.parametrize("ranks, extra", [(2, "loader.num_workers=1"), (3, "checkpoint.every_steps=1000")])
def test_the_number_of_ranks_leaves_no_trace(tmp_path, alone, ranks, extra):
    result = run(tmp_path / "run", *LINE, extra, ranks=ranks)
    assert digest(result) == digest(alone)
    assert values(result) == values(alone)


@pytest.mark.nightly
def test_nor_do_hosts_whose_ranks_add_up_first(tmp_path, alone):
    """Two agents of two ranks, one of which dies on the way and is restarted in place."""
    line = (*LINE, "dist.shared_memory=false", "dist.hierarchical=always", *pace(0.1))
    line = (*line, *hold(40, until=tmp_path / "killed"))
    with nodes(tmp_path / "run", *line, nnodes="2", nproc=2, cold=False) as job:
        agents = [job.start(), job.start()]
        wait_for(tmp_path / "run", reached(20), process=agents[0])
        os.kill(job.ranks(agents[1])[0], signal.SIGKILL)
        (tmp_path / "killed").touch()
        assert job.ended() == [0, 0], job.log
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if line.get("event") == "survived"], lines
    assert hashlib.sha256((tmp_path / "run/model.pt").read_bytes()).hexdigest() == digest(alone)


def decided(network_s):
    import os

    from muster.world.environment import Environment
    from muster.world.group import start
    from muster.world.group_options import GroupOptions
    from muster.world.reduce import hierarchical

    rank = int(os.environ["RANK"])
    world = start(GroupOptions(shared_memory=False), Environment(rank, 4, rank % 2, 2, rank // 2))
    assert hierarchical.find_hosts(world, "auto") is None, "two ranks on a host are too few"
    hierarchical.FEWEST, seconds = 2, iter([0.001, network_s])
    hierarchical._seconds = lambda *_: next(seconds)
    return hierarchical.find_hosts(world, "auto") is not None


@pytest.mark.nightly
@pytest.mark.parametrize("network_s, goes", [(0.0049, False), (0.0051, True)])
def test_sums_go_by_hosts_if_the_network_is_ten_times_slower_than_memory(network_s, goes):
    """Half of the bytes leave a host of two."""
    assert on_ranks(decided, 4, network_s) == [goes] * 4


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["in-place", "data"])
def test_a_parameter_that_the_forward_pass_changes_is_refused(tmp_path, how):
    """Each rank would change it as often as it has slices. A buffer has one hash."""
    line = ("model._target_=kit.parts.models.Teacher", "virtual_world_size=8", "max_steps=3", "eval.every_steps=off")
    refused = run(tmp_path / "refused", *line, f"+model.how={how}", ok=False)
    assert refused.code == 2 and len(refused.said) == 1, refused.out
    assert "has changed the parameter teacher" in refused.said[0] and "keep it in a buffer" in refused.said[0]
    if how == "data":
        one, two = (run(tmp_path / f"of-{ranks}", *line, "+model.how=buffer", ranks=ranks) for ranks in (1, 2))
        assert one.sha256 == two.sha256


def test_sums_by_hosts_are_refused_where_no_such_sum_is(tmp_path):
    result = run(tmp_path / "run", "dist.hierarchical=always", ok=False)
    assert result.code == 2 and "dist.hierarchical=always is of virtual_world_size alone" in result.said[0], result.out
    result = run(
        tmp_path / "one", *LINE, "dist.hierarchical=always", "dist.shared_memory=false", "max_steps=2", ranks=2
    )
    assert "dist.hierarchical=always has no effect: it needs several hosts" in result.out


def test_nor_do_kills_and_resumes_at_other_world_sizes(tmp_path, alone):
    for ranks, until in ((3, 9), (1, 21), (2, 33)):
        process = start(tmp_path / "run", *LINE, *pace(0.1), *hold(until + 2), ranks=ranks)
        wait_for(tmp_path / "run", reached(until), process=process)
        process.send_signal(signal.SIGKILL if ranks == 3 else signal.SIGTERM)
        process.communicate(timeout=60)
    result = run(tmp_path / "run", *LINE, ranks=4)
    assert {event["world_size"] for event in result.events("resume")} == {1, 2, 4}
    assert digest(result) == digest(alone)
    assert values(result) == values(alone)


@pytest.mark.quick
def test_what_it_cannot_do_is_said(tmp_path):
    for overrides, ranks, said in (
        (("virtual_world_size=1",), 2, "virtual_world_size=1 is less than the world size 2"),
        (("virtual_world_size=2", "compile=true"), None, "virtual_world_size=2 and compile=true"),
    ):
        result = run(tmp_path / "refused", *overrides, ranks=ranks, ok=False)
        assert said in result.said[0] and not (tmp_path / "refused/outcome.json").exists(), result.out


@pytest.mark.parametrize("name", sorted({*options("strategy")} - {"ddp", "single"}))
@pytest.mark.unit
def test_strategies_that_cannot_refuse_it(name):
    config = compose([f"strategy={name}", "virtual_world_size=8"])
    with pytest.raises(ConfigError, match="virtual_world_size=8 requires strategy=ddp or strategy=single"):
        check_slices(config, build(config.strategy), 2)


@pytest.mark.nightly
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this processor has no other kind to show"
)
def test_processors_that_round_otherwise_are_said(tmp_path):
    """Ranks of two kinds, then a resume on the one kind that the first rank has not."""
    line = ("virtual_world_size=2", "max_steps=10", "checkpoint.every_steps=5")
    run(tmp_path / "one", *line, env=OTHER)
    other = run(tmp_path / "one", *line[:1], "max_steps=12")
    (text,) = [event["text"] for event in other.events("note")]
    assert "DEFAULT, torch" in text and text.endswith("the hash will be another") and text in other.out
    again = run(tmp_path / "one", *line[:1], "max_steps=14")
    assert len(again.events("note")) == 1, "of the checkpoint it resumes from"
    ranks = [
        start(tmp_path / "two", *line, env={**place, **(OTHER if rank else {})})
        for rank, place in enumerate(by_hand(2))
    ]
    results = [finish(process, tmp_path / "two") for process in ranks]
    assert [result.code for result in results] == [0, 0], [result.out for result in results]
    (text,) = [event["text"] for event in results[0].events("note") if "dist.survive" not in event["text"]]
    assert "the ranks compute on" in text and "another assignment of slices to them" in text and text in results[0].out


def test_other_threads_are_refused(tmp_path, alone):
    result = run(alone.folder, *LINE, "max_steps=51", env={"OMP_NUM_THREADS": "2"}, ok=False)
    assert result.code == 2 and "trained with 1 threads a rank, and this is 2" in result.said[0], result.out
