"""The pool of pinned memory: exact, reused, bounded, and honest about what it could not pin."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import threading
import warnings
from collections.abc import Iterable

import pytest
import torch

from graphoffload.errors import GraphOffloadWarning, SlotError
from graphoffload.runtime.chunks import PAGE, FreeRanges, RegisteredChunks
from graphoffload.runtime.memory import Block, Token
from graphoffload.runtime.pinned import ALIGNMENT, PinnedPool

MIB = 1 << 20


class PinLog:
    """Stand in for the driver: count what is pinned, and refuse past a cap."""

    def __init__(self, cap: int | None = None) -> None:
        self.cap = cap
        self.pinned: dict[int, int] = {}
        self.calls = 0

    def pin(self, address: int, nbytes: int) -> bool:
        self.calls += 1
        if self.cap is not None and self.nbytes + nbytes > self.cap:
            return False
        for begin, size in self.pinned.items():
            assert address + nbytes <= begin or begin + size <= address, "pinned twice"
        self.pinned[address] = nbytes
        return True

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    @property
    def nbytes(self) -> int:
        return sum(self.pinned.values())


def pool_on(driver: PinLog, *, reserve_nbytes: int = 1 << 32, budget_nbytes: int | None = None) -> PinnedPool:
    source = RegisteredChunks(pin=driver.pin, unpin=driver.unpin, reserve_nbytes=reserve_nbytes)
    return PinnedPool(source, budget_nbytes=budget_nbytes)


def give_all(pool: PinnedPool, blocks: Iterable[Block]) -> None:
    for block in blocks:
        pool.give(block)


def assert_within_law(pool: PinnedPool) -> None:
    assert pool.counts.pinned_peak_nbytes <= 1.05 * pool.counts.in_use_peak_nbytes


def test_pinning_is_exact_to_the_page_just_above_a_power_of_two() -> None:
    driver = PinLog()
    pool = pool_on(driver)
    block = pool.take(MIB + 1)
    assert driver.nbytes == pool.counts.pinned_nbytes == MIB + PAGE
    assert block.address % ALIGNMENT == 0


def test_blocks_can_be_written_and_do_not_overlap() -> None:
    pool = pool_on(PinLog())
    sizes = [1, 511, 512, 513, 4096, 100_000]
    blocks = [pool.take(size) for size in sizes]
    for value, block in enumerate(blocks):
        ctypes.memset(block.address, value + 1, block.nbytes)
    for value, block in enumerate(blocks):
        assert ctypes.string_at(block.address, block.nbytes) == bytes([value + 1]) * block.nbytes


def test_a_pool_that_grew_by_small_chunks_serves_large_blocks() -> None:
    driver = PinLog()
    pool = pool_on(driver)
    give_all(pool, [pool.take(64 * PAGE) for _ in range(16)])
    assert driver.calls == 16
    block = pool.take(16 * 64 * PAGE)
    assert driver.calls == 16, "nothing new was pinned"
    assert block.cuts == tuple(k * 64 * PAGE for k in range(1, 16)), "one copy may not span two chunks"


def test_blocks_inside_one_chunk_have_no_cuts() -> None:
    pool = pool_on(PinLog())
    pool.reserve([1000, 2000, 3000])
    assert [pool.take(size).cuts for size in (1000, 2000, 3000)] == [(), (), ()]


def test_reserve_pins_once_and_only_what_is_missing() -> None:
    driver = PinLog()
    pool = pool_on(driver)
    pool.reserve([MIB] * 10)
    assert (driver.calls, driver.nbytes) == (1, 10 * MIB)
    pool.reserve([MIB] * 10)
    assert (driver.calls, driver.nbytes) == (1, 10 * MIB)
    blocks = [pool.take(MIB) for _ in range(10)]
    assert driver.calls == 1
    give_all(pool, blocks[::2])
    give_all(pool, blocks[1::2])
    pool.reserve([MIB] * 12)
    assert (driver.calls, driver.nbytes) == (2, 12 * MIB)


def test_the_same_step_again_pins_nothing() -> None:
    driver = PinLog()
    pool = pool_on(driver)
    rng = random.Random(0)
    sizes = [rng.randrange(1, MIB) for _ in range(40)]
    give_all(pool, [pool.take(size) for size in sizes])
    calls = driver.calls
    for step in range(20):
        blocks = [pool.take(size) for size in sizes]
        give_all(pool, reversed(blocks) if step % 2 else blocks)
    assert driver.calls == calls
    assert_within_law(pool)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reserve", [True, False])
def test_two_hundred_steps_of_varying_sizes_stay_within_the_law(seed: int, reserve: bool) -> None:
    rng = random.Random(seed)
    driver = PinLog()
    pool = pool_on(driver, reserve_nbytes=1 << 36)
    for _ in range(200):
        scale = rng.uniform(0.5, 1.0)
        sizes = [int(scale * rng.choice([MIB, 3 * MIB, 5 * MIB + 1, 12 * MIB])) for _ in range(rng.randrange(20, 30))]
        if reserve:
            pool.reserve(sizes)
        blocks = [pool.take(size) for size in sizes]
        rng.shuffle(blocks)
        give_all(pool, blocks)
        assert driver.nbytes == pool.counts.pinned_nbytes
    assert_within_law(pool)
    assert pool.counts.pageable_fallbacks == 0


@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_in_flight_stay_within_the_law(seed: int) -> None:
    # One forward, one backward, as pipelines run them: the oldest of four micro-batches goes as a new one comes.
    rng = random.Random(seed)
    pool = pool_on(PinLog(), reserve_nbytes=1 << 36)
    sizes = [rng.randrange(MIB, 4 * MIB) for _ in range(20)]
    alive: list[list[Block]] = []
    for _ in range(200):
        if len(alive) == 4:
            give_all(pool, reversed(alive.pop(0)))
        alive.append([pool.take(size) for size in sizes])
    assert_within_law(pool)


def test_unsuitable_free_memory_is_given_back_before_more_is_pinned() -> None:
    driver = PinLog()
    pool = pool_on(driver)
    low, middle, high = (pool.take(8 * MIB) for _ in range(3))
    pool.give(low)
    pool.give(high)
    large = pool.take(12 * MIB)  # fits neither hole by itself; the last one grows
    assert pool.counts.pinned_nbytes == driver.nbytes <= 1.05 * pool.counts.in_use_peak_nbytes
    pool.give(middle)
    pool.give(large)
    assert_within_law(pool)


def test_the_budget_is_never_passed_and_the_rest_is_pageable() -> None:
    pool = pool_on(PinLog(), budget_nbytes=MIB)
    first = pool.take(MIB)
    with pytest.warns(GraphOffloadWarning, match="Raise the host budget, or offload less"):
        second = pool.take(MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = pool.take(2 * MIB)
    assert (second.pageable is None, pool.counts.pageable_fallbacks, pool.counts.pageable_nbytes) == (False, 2, 3 * MIB)
    assert pool.counts.in_use_nbytes == 4 * MIB
    give_all(pool, [first, second, third])
    assert (pool.counts.in_use_nbytes, pool.counts.pageable_nbytes) == (0, 0)
    assert pool.take(MIB).pageable is None


def test_a_driver_that_refuses_makes_blocks_pageable() -> None:
    pool = pool_on(PinLog(cap=MIB))
    pool.take(MIB)
    with pytest.warns(GraphOffloadWarning, match="could not be pinned"):
        assert pool.take(1).pageable is not None


def test_a_system_that_is_strict_about_address_space_gives_what_it_can() -> None:
    pool = pool_on(PinLog(), reserve_nbytes=1 << 62)
    assert pool.take(MIB).pageable is None


def test_no_address_space_makes_blocks_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no address space")

    monkeypatch.setattr(mmap, "mmap", refuse)
    pool = pool_on(PinLog())
    with pytest.warns(GraphOffloadWarning):
        assert pool.take(1).pageable is not None


def test_a_warning_that_is_an_error_leaves_the_counts_right() -> None:
    pool = pool_on(PinLog(), budget_nbytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(GraphOffloadWarning):
            pool.take(MIB)
    assert (pool.counts.in_use_nbytes, pool.counts.pageable_nbytes, pool.counts.pageable_fallbacks) == (0, 0, 0)


def test_trim_gives_back_free_chunks_and_waits_for_copies_first() -> None:
    driver = PinLog()
    order: list[str] = []

    def unpin(address: int) -> None:
        order.append("unpin")
        driver.unpin(address)

    source = RegisteredChunks(pin=driver.pin, unpin=unpin, reserve_nbytes=1 << 30)
    pool = PinnedPool(source, quiesce=lambda: order.append("quiesce"))
    kept, gone = pool.take(MIB), pool.take(2 * MIB)
    assert pool.trim() == 0
    pool.give(gone)
    assert pool.trim() == 2 * MIB
    assert order == ["quiesce", "unpin"]
    assert driver.nbytes == MIB
    assert pool.take(2 * MIB).address == gone.address, "the addresses are used again"
    ctypes.memset(kept.address, 1, kept.nbytes)


def test_trimmed_memory_is_returned_to_the_system() -> None:
    pool = pool_on(PinLog())
    block = pool.take(MIB)
    ctypes.memset(block.address, 7, block.nbytes)
    pool.give(block)
    pool.trim()
    again = pool.take(MIB)
    assert again.address == block.address
    assert ctypes.string_at(again.address, 16) == bytes(16), "fresh pages"


def test_close_unpins_everything_after_the_copies() -> None:
    driver = PinLog()
    pool = pool_on(driver)
    pool.take(MIB)
    pool.give(pool.take(MIB))
    pool.close()
    assert driver.nbytes == pool.counts.pinned_nbytes == 0


def test_the_next_block_learns_of_the_last_copy_out_of_its_memory() -> None:
    pool = pool_on(PinLog())
    one, two = pool.take(4096), pool.take(4096)
    pool.give(one, after=Token(5, None))
    pool.give(two, after=Token(3, None))
    merged = pool.take(8192)
    assert merged.after == Token(5, None), "the later of two on one stream"
    pool.give(merged)
    assert pool.take(512).after == Token(5, None), "not forgotten by a slot without a reload"
    fresh = pool.take(1 << 20)
    assert fresh.after in (None, Token(5, None))


def test_giving_back_twice_raises() -> None:
    pool = pool_on(PinLog())
    block = pool.take(4096)
    pool.give(block)
    with pytest.raises(SlotError, match="freed twice"):
        pool.give(block)


def test_threads_get_disjoint_blocks() -> None:
    pool = pool_on(PinLog())
    taken: list[Block] = []

    def take() -> None:
        mine = [pool.take(5000) for _ in range(50)]
        give_all(pool, mine[::2])
        taken.extend(mine[1::2])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted((block.address, block.address + block.size) for block in taken)
    assert len(spans) == 100
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_free_ranges_stay_sorted_disjoint_and_merged() -> None:
    rng = random.Random(0)
    ranges, taken, size = FreeRanges(), set(range(64)), 64
    for _ in range(2000):
        at = rng.randrange(size)
        if at in taken:
            ranges.give(at, at + 1)
            taken.discard(at)
        else:
            assert ranges.remove(at, at + 1)
            taken.add(at)
        free = list(ranges)
        assert free == sorted(free)
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(free)), "merged"
        assert {k for begin, end in free for k in range(begin, end)} == set(range(size)) - taken
        assert ranges.nbytes == size - len(taken)


def test_memory_is_a_torch_tensor_that_can_be_copied() -> None:
    pool = pool_on(PinLog())
    block = pool.take(4096)
    flat = torch.frombuffer((ctypes.c_char * block.nbytes).from_address(block.address), dtype=torch.uint8)
    flat.copy_(torch.arange(4096).to(torch.uint8))
    assert flat[255] == 255
