"""Sums through the memory that ranks of one host have in common."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from kit.job import run
from kit.ranks import on_ranks
from kit.until import until

SIZES = (1, 3, 1000, 524_288, 524_289, 1_300_000)  # a slot holds 524,288 numbers of four bytes


def opened():
    from kit.stepping import world

    from muster.world.reduce.shared_memory import share_memory

    here = world()
    return here, share_memory(here)


def numbers(rank, size, round_=0):
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return torch.randn(size, generator=generator) * 10.0 ** torch.randint(-3, 4, (size,), generator=generator)


def sums():
    here, memory = opened()
    assert memory
    for size in SIZES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            parts = [(numbers(rank, size).to(dtype) * 0.5) for rank in range(here.size)]
            expected = sum(parts[1:], parts[0].clone())
            mine = numbers(here.rank, size).to(dtype)
            memory.add_up(mine, scale=0.5)
            assert torch.equal(mine, expected), (size, dtype)
    for round_ in range(300):  # ranks in a hurry: sizes change, nobody waits for anybody but in the sum
        size = 1 + (round_ * 7919) % 3000
        mine = numbers(here.rank, size, round_)
        memory.add_up(mine)
        parts = [numbers(rank, size, round_) for rank in range(here.size)]
        assert torch.equal(mine, sum(parts[1:], parts[0].clone())), round_
    for round_ in range(300):  # what is shown is read after others may have shown the next
        posted = memory.post([float(here.rank), round_ / 7])
        if here.rank == round_ % here.size:
            time.sleep(0.001)
        assert posted() == [[float(rank), round_ / 7] for rank in range(here.size)], round_
    return True


@pytest.mark.nightly(but=["3"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_has_the_sum_in_the_order_of_ranks(ranks):
    assert on_ranks(sums, ranks) == [True] * ranks


def wait_for_one_that_dies():
    here, memory = opened()
    mine = torch.ones(5)
    memory.add_up(mine)
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(torch.distributed.DistBackendError, match="rank 1 has ended while others waited for it"):
        memory.add_up(mine)
    return time.monotonic() - began


def test_a_rank_that_dies_is_noticed_at_once():
    (seconds,) = on_ranks(wait_for_one_that_dies, 2, lost=[1])
    assert seconds < 30


def stand_still_while_the_last_sum_ends():
    here, memory = opened()
    other = int(here.gather(os.getpid())[1])
    if here.rank == 0:

        def is_in_futex():
            return Path(f"/proc/{other}/syscall").read_text().startswith("202 ")

        until(lambda: memory._counters[16] == memory._count + 1 and is_in_futex(), "rank 1 in the sum", timeout_s=30)
        os.kill(other, signal.SIGSTOP)
        rank = os.getpid()
        if not os.fork():
            until(lambda: os.getppid() != rank, "end of rank 0", timeout_s=30)
            os.kill(other, signal.SIGCONT)
            os._exit(0)
    mine = torch.ones(5)
    memory.add_up(mine)
    return mine.tolist()


def test_a_sum_that_is_there_is_taken_from_a_rank_that_has_ended_since():
    """As on a busy machine, at the end of a run."""
    assert on_ranks(stand_still_while_the_last_sum_ends, 2) == [[2.0] * 5] * 2


def wait_for_one_that_sleeps():
    here, memory = opened()
    memory.add_up(torch.ones(5))
    if here.rank == 1:
        time.sleep(2.0)
    began = time.thread_time()
    memory.add_up(torch.ones(5))
    return time.thread_time() - began


def test_who_waits_does_not_burn_its_core():
    assert max(on_ranks(wait_for_one_that_sleeps, 2)) < 0.2


def alone(what):
    from muster.world.reduce import shared_memory

    rank = os.environ["RANK"]
    if what == "host":
        shared_memory._host = lambda: rank
    if what == "mapping" and rank == "1":
        shared_memory._open = lambda *_: None
    return opened()[1] is None


@pytest.mark.nightly(but=["host"])
@pytest.mark.parametrize("what", ["host", "mapping"])
def test_all_go_through_gloo_where_one_cannot_take_part(what):
    assert on_ranks(alone, 2, what) == [True, True]


@pytest.mark.nightly(but=["many"])
@pytest.mark.parametrize("buckets", [(), ("strategy.bucket_cap_mb=0.01",)], ids=["one bucket", "many"])
def test_a_run_is_the_same_to_the_bit_with_two_ranks(tmp_path, buckets):
    line = ("model=convnet", "max_steps=15", "micro_batch_size=20", *buckets)
    here, there = (run(tmp_path / on, *line, f"dist.shared_memory={on}", ranks=2) for on in ("true", "false"))
    assert here.sha256 == there.sha256 and here.losses == there.losses
