"""All-reduce by hand: right, with the bytes that theory says, timed and fitted."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.job import environment
from kit.ranks import on_ranks

from bench.scale.check import job, measure, stepper
from bench.scale.strategies import ddp
from muster.collectives.__main__ import main, parse, world_sizes
from muster.collectives.algorithm import Network, fit
from muster.collectives.collective import ALGORITHMS, Collective, collectives, sum_of
from muster.collectives.measure import Bench
from muster.errors import ConfigError, MusterError

COUNTS = (1, 3, 7, 64, 1001)
NAMES = [each.name for each in ALGORITHMS]
WORLD_SIZES = st.integers(2, 2**14)


def whatever_a_rank_sees():
    """Of every collective, world size and length: whether it was exact on this rank, and what it sent."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    bench, seen = Bench(torch.device("cpu"), backend="gloo", rounds=1), {}
    for size in (2, 3, 4, 5):
        link = bench.link(size)
        for each in bench.collectives if link else ():
            for count in COUNTS:
                before = link.sent_bytes
                exact = each.is_exact(link, count, torch.device("cpu"))
                seen[size, each.name, count] = (exact, link.sent_bytes - before)
    bench.collectives = [Collective("ours", lambda tensor, link: tensor, sum_of), *bench.collectives]
    try:
        bench.measure(world_sizes=[2], sizes=[8])
    except MusterError as error:
        seen["broken"] = str(error)
    turns = {size: stepper(bench.link(size)) for size in (1, 2, 4)}
    seen["ddp"] = measure(turns, rounds=1, steps=1)
    return seen


@pytest.fixture(scope="module")
def seen():
    return on_ranks(whatever_a_rank_sees, 5)


@pytest.mark.nightly(but=["2", "5"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_rank_gets_the_exact_result_whatever_divides(seen, size):
    for name in (each.name for each in collectives("gloo")):
        for count in COUNTS:
            assert [ranks[size, name, count][0] for ranks in seen[:size]] == [True] * size, (name, count)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
def test_bytes_are_those_of_theory(seen, algorithm, size):
    for count in COUNTS:
        sent = [ranks[size, algorithm.name, count][1] for ranks in seen[:size]]
        assert sum(sent) == 2 * (size - 1) * 4 * count
        rounding = 4 * algorithm.cost(size, 1).messages  # a chunk that does not divide is one value longer
        assert abs(max(sent) - algorithm.cost(size, 4 * count).busiest_bytes) <= rounding
    assert max(ranks[size, algorithm.name, 64][1] for ranks in seen[:size]) == pytest.approx(
        algorithm.cost(size, 256).busiest_bytes, rel=0 if size in (2, 4) else 0.05
    )


def test_a_wrong_result_is_an_error_on_every_rank(seen):
    messages = {ranks["broken"] for ranks in seen}
    assert len(messages) == 1 and "ours gave a wrong result over 2 ranks and 8 bytes" in messages.pop()


def test_ddp_sends_what_the_model_says(seen):
    """As the kernel has counted it; messages have headers and a step a barrier."""
    times, sent = seen[0]["ddp"]
    assert all(seconds > 0 for seconds in times.values())
    for size, nbytes in sent.items():
        expected = ddp(job(Network(0.0, 0.0), seconds=1.0), size).sent_bytes
        assert expected <= nbytes <= expected * 1.01 + 10_000, size


@given(size=WORLD_SIZES, nbytes=st.integers(4, 2**40), more=st.integers(1, 2**40))
@pytest.mark.unit
def test_more_bytes_or_ranks_never_take_less_time(size, nbytes, more):
    network = Network(alpha_s=1e-5, beta_s=1e-9)
    for algorithm in ALGORITHMS:
        cost = algorithm.cost(size, nbytes)
        assert network.seconds(algorithm.cost(size, nbytes + more)) > network.seconds(cost)
        power = 1 << size.bit_length()  # a surplus rank costs more than the next power of two
        assert network.seconds(algorithm.cost(2 * power, nbytes)) >= network.seconds(algorithm.cost(power, nbytes))


@given(size=WORLD_SIZES, nbytes=st.integers(4, 2**40))
@pytest.mark.unit
def test_costs_stand_as_the_literature_has_them(size, nbytes):
    naive, tree, ring, halving = (each.cost(size, nbytes) for each in ALGORITHMS)
    bound = 2 * (size - 1) / size * nbytes  # of any all-reduce, on every rank
    assert ring.busiest_bytes == pytest.approx(bound)
    assert all(cost.busiest_bytes >= bound / 2 - 1 for cost in (naive, tree, halving))
    assert tree.messages <= halving.messages + 2 and halving.messages <= tree.messages + 2
    assert tree.messages <= min(naive.messages, ring.messages)
    if size & (size - 1) == 0:
        assert halving.busiest_bytes == pytest.approx(bound) and halving.messages == tree.messages


@given(alpha=st.floats(1e-7, 1e-3), beta=st.floats(1e-12, 1e-8))
@pytest.mark.unit
def test_the_fit_finds_the_constants_again(alpha, beta):
    sizes = [4**power for power in range(5, 15)]
    found = fit(sizes, [alpha + beta * nbytes for nbytes in sizes])
    assert found.alpha_s == pytest.approx(alpha, rel=1e-4) and found.beta_s == pytest.approx(beta, rel=1e-4)


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=9))
@pytest.mark.unit
def test_no_constant_of_the_fit_is_below_zero(seconds):
    found = fit([4**power for power in range(len(seconds))], seconds)
    assert found.alpha_s >= 0 and found.beta_s >= 0 and found.alpha_s + found.beta_s > 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--ranks=1"], "a world of 1 rank has no rank to send to"),
        (["--world-sizes=2,9"], "--world-sizes=9 in a world of 4 ranks: use 2 to 4"),
        (["--sizes=big"], "--sizes=big are not sizes"),
        (["--sizes=2"], "at least one float32"),
        (["--rounds=0"], "use 1 or more"),
        (["--speed"], "unrecognized arguments: --speed"),
    ],
)
@pytest.mark.unit
def test_a_slip_of_the_keyboard_is_one_line_and_exit_2(arguments, said, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("muster: config error: ") and said in err and err.count("\n") == 1


@pytest.mark.unit
def test_a_launcher_with_one_rank_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main([]) == 2 and "a world of 1 rank" in capsys.readouterr().err


@pytest.mark.unit
def test_which_world_sizes_are_measured():
    assert world_sizes(parse([]), 4) == [2, 3, 4]
    assert world_sizes(parse([]), 24) == [2, 3, 4, 8, 16, 24]
    assert world_sizes(parse(["--world-sizes=5,2"]), 24) == [2, 5]
    with pytest.raises(ConfigError):
        world_sizes(parse(["--world-sizes=1"]), 24)


@pytest.mark.nightly
def test_a_run_by_itself_leaves_a_picture_and_the_figures(tmp_path):
    options = ["--ranks=3", "--sizes=4KiB,10000", "--rounds=1", f"--out={tmp_path / 'out'}"]
    done = subprocess.run(
        [sys.executable, "-m", "train.collectives", *options],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out/collectives.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "out/collectives.json").read_text())
    assert "processors (" in figures["setting"] and "load average" in figures["setting"], "on what it was measured"
    found = {(each["world_size"], each["nbytes"], each["name"]) for each in figures["measured"]}
    names = [*NAMES, "gloo all_reduce", "gloo all_gather", "gloo broadcast"]
    assert found == {(size, nbytes, name) for size in (2, 3) for nbytes in (4096, 10000) for name in names}
    assert all(each["seconds"] > 0 for each in figures["measured"])
    assert all(len(each["sent_bytes"]) == each["world_size"] for each in figures["measured"])
    assert all(
        min(each["sent_bytes"]) >= 10000
        for each in figures["measured"]
        if each["name"] == "gloo all_gather" and each["nbytes"] == 10000
    )
    assert figures["network"]["alpha_s"] + figures["network"]["beta_s"] > 0
    assert all(name in done.stdout for name in names) and "GB/s" in done.stdout
