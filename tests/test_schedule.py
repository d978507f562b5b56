"""The schedule against examples computed by hand. Steps last one second and the link moves ten bytes a second."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fact_strategies import facts as any_facts
from fact_strategies import machines
from hypothesis import given
from small_facts import facts, machine, storage

from graphoffload.planning.machine import Machine
from graphoffload.planning.profile import memory_over_time
from graphoffload.planning.schedule import Copy, Stall, hidden_storages, make_transfers, simulate, step_seconds
from graphoffload.planning.values import Facts, Step

# One storage, everything hidden


def test_a_transfer_hides_and_stands_as_late_as_arrives_in_time() -> None:
    # A (20 bytes, 2 s a copy) is made in step 0 and used until step 1; b4 starts at 9 s. Out: 1 s to 3 s, which is the end
    # of f2. Back: 7 s to 9 s, and b2 starts at 7 s.
    a = storage("A", 20, birth=0, used=1, back=9)
    program = facts([a], forward=5, backward=5)
    (transfer,) = make_transfers(program, [a], machine())
    assert (transfer.offload_after, transfer.release_after, transfer.wait) == ("A", "f2", True)
    assert (transfer.reload_before, transfer.ready_before) == ("b2", "b4")
    assert (transfer.offload_start, transfer.offload_end, transfer.released) == (1.0, 3.0, 3.0)
    assert (transfer.reload_start, transfer.reload_end, transfer.needed) == (7.0, 9.0, 9.0)
    timeline = simulate(program, machine(), [transfer])
    assert timeline.seconds == 10.0
    assert timeline.exposed_seconds == 0.0
    assert timeline.stalls == ()
    assert memory_over_time(program, [transfer]) == [20, 20, 20, 0, 0, 0, 0, 20, 20, 20]


def test_release_is_not_before_the_last_forward_use() -> None:
    a = storage("A", 20, birth=0, used=4, back=9)
    (transfer,) = make_transfers(facts([a], forward=6, backward=5), [a], machine())
    assert transfer.release_after == "f4"


def test_latency_counts_once_a_copy() -> None:
    # 0.5 s of latency: out 1 s to 3.5 s, released at the end of f3; back 6.5 s to 9 s, so before b1, which starts at 6 s.
    a = storage("A", 20, birth=0, back=9)
    (transfer,) = make_transfers(facts([a], forward=5, backward=5), [a], machine(copy_latency_seconds=0.5))
    assert (transfer.offload_end, transfer.release_after, transfer.reload_before) == (3.5, "f3", "b1")
    # The reload is issued when b1 starts, so it runs from 6 s.
    assert (transfer.reload_start, transfer.reload_end) == (6.0, 8.5)


def test_a_reload_goes_behind_views_that_take_no_time() -> None:
    a = storage("A", 20, birth=0, back=10)
    program = facts([a], forward=5, backward=6)
    view = replace(program.backward[3], seconds=0.0)
    program = replace(program, backward=(*program.backward[:3], view, *program.backward[4:]))
    # b5 starts at 9 s and b2 at 7 s, as does nothing after it.
    (transfer,) = make_transfers(program, [a], machine())
    assert transfer.reload_before == "b2"


# Several storages


def test_offloads_queue_and_reloads_are_laid_from_the_back() -> None:
    # Out: A 1-3, B 3-5. B is needed at b2 (10 s), A at b4 (12 s). Back, laid from the back: A 10-12, B 8-10.
    a, b = storage("A", 20, birth=0, back=12), storage("B", 20, birth=1, back=10)
    program = facts([a, b], forward=8, backward=5)
    second, first = make_transfers(program, [a, b], machine())
    assert (second.storage, first.storage) == ("B", "A"), "transfers are in order of return"
    assert (first.offload_start, first.offload_end, first.release_after) == (1.0, 3.0, "f2")
    assert (second.offload_start, second.offload_end, second.release_after) == (3.0, 5.0, "f4")
    assert (second.reload_before, second.reload_start, second.reload_end) == ("b0", 8.0, 10.0)
    assert (first.reload_before, first.reload_start, first.reload_end) == ("b2", 10.0, 12.0)


def test_reloads_that_would_meet_are_moved_apart() -> None:
    # Both are needed at b4 (12 s), and the link brings one at a time: A 10-12, B 8-10 or the other way round.
    a, b = storage("A", 20, birth=0, back=12), storage("B", 20, birth=1, back=12)
    first, second = make_transfers(facts([a, b], forward=8, backward=5), [a, b], machine())
    assert [first.reload_start, first.reload_end, second.reload_start, second.reload_end] == [8.0, 10.0, 10.0, 12.0]
    assert [first.reload_before, second.reload_before] == ["b0", "b2"]


def test_what_has_not_left_when_forward_ends_is_handed_over() -> None:
    # Forward ends at 3 s. A is out at 3 s; B's copy runs until 5 s.
    a, b = storage("A", 20, birth=0, back=9), storage("B", 20, birth=1, back=8)
    program = facts([a, b], forward=3, backward=7)
    second, first = make_transfers(program, [a, b], machine())
    assert (first.release_after, first.wait) == ("f2", True)
    assert (second.release_after, second.wait) == ("f2", False)
    # B's memory goes at its own ready: b5 starts at 8 s. Back: B 6-8 (b3), A 8-9 would be late, so A 7-9 and B 5-7.
    assert (second.reload_start, second.reload_end, first.reload_start, first.reload_end) == (5.0, 7.0, 7.0, 9.0)
    assert second.released == 8.0


def test_a_reload_never_starts_before_its_own_offload_has_ended() -> None:
    # Forward is one step; the copy out runs from 1 s to 3 s, and b0 needs A at once: it waits until 5 s.
    a = storage("A", 20, birth=0, back=1)
    program = facts([a], forward=1, backward=1)
    (transfer,) = make_transfers(program, [a], machine())
    timeline = simulate(program, machine(), [transfer])
    assert (transfer.reload_start, transfer.reload_end, transfer.needed) == (3.0, 5.0, 1.0)
    assert timeline.stalls == (Stall(1, "A", 4.0),)
    assert (timeline.seconds, timeline.exposed_seconds) == (6.0, 4.0)
    assert (timeline.starts, timeline.ends) == ((0.0, 5.0), (1.0, 6.0))


# Both ways at once


def test_both_ways_share_the_link_while_both_are_busy() -> None:
    # Alone each way moves 10 bytes a second, together 10 in all, so 5 each. A: out 1-3. B: out from 3 s, when it is made.
    # A is needed at b0 (4 s): back from 4 s. B has 30 - 10 bytes left at 4 s. Together until A is back: 20 bytes at 5 a
    # second, 8 s; B then has none left either.
    a, b = storage("A", 20, birth=0, back=4), storage("B", 30, birth=2, used=3, back=5)
    program = facts([a, b], forward=4, backward=4)
    half = machine(duplex_bytes_per_second=10.0)
    transfers = make_transfers(program, [a, b], half)
    timeline = simulate(program, half, transfers)
    assert timeline.offloads == (Copy("A", 1.0, 3.0), Copy("B", 3.0, 8.0))
    assert timeline.reloads[0] == Copy("A", 4.0, 8.0)
    # Alone again: B comes back in 3 s.
    assert timeline.reloads[1] == Copy("B", 8.0, 11.0)


# Windows


def link_bound(count: int) -> Facts:
    """Return a program that makes a storage of 10 bytes in every step: offloaded, at one byte a second, all at 10 s each."""
    names = "ABCDEFGH"[:count]
    storages = [storage(name, 10, birth=index, back=2 * count - 1 - index) for index, name in enumerate(names)]
    return facts(storages, forward=count, backward=count)


def test_windows_bound_memory_where_the_link_is_the_bottleneck() -> None:
    # Eight storages, 10 s a copy, 1 s a step. The link is busy both ways from 1 s: out until 81 s, and back, last one first,
    # until 161 s; the last backward step ends at 162 s whatever the windows are. So the narrowest is free.
    slow = machine(d2h_bytes_per_second=1.0, h2d_bytes_per_second=1.0)
    program = link_bound(8)
    transfers = make_transfers(program, program.storages, slow)
    timeline = simulate(program, slow, transfers)
    assert timeline.seconds == pytest.approx(162.0)
    profile = memory_over_time(program, transfers)
    assert max(memory_over_time(program)) == 80
    # In forward the storage just made and the one on its way out; in backward the one in use and the one on its way back.
    assert max(profile) == 20
    # All but the last were waited for at the step after; the last is handed over.
    assert [transfer.wait for transfer in transfers] == [False] + [True] * 7


def test_the_in_flight_budget_is_kept_even_when_it_costs_time() -> None:
    # A is followed by eight steps that make nothing, so that its copy hides; with no bytes allowed in flight compute waits.
    a = storage("A", 20, birth=0, back=17)
    program = facts([a], forward=9, backward=9)
    (hidden,) = make_transfers(program, [a], machine())
    assert (hidden.release_after, hidden.released) == ("f2", 3.0)
    (waited,) = make_transfers(program, [a], machine(in_flight_nbytes=0))
    assert (waited.release_after, waited.wait, waited.released) == ("A", True, 3.0)
    assert simulate(program, machine(in_flight_nbytes=0), [waited]).stalls == (Stall(0, "A", 2.0),)


@given(any_facts(), machines(budgets=False))
def test_no_placement_of_the_same_copies_is_much_faster(program: Facts, drawn: Machine) -> None:
    # Nothing comes back sooner than when every reload is issued at once and nothing waits in forward. The schedule may be
    # slower by what it spends for memory: 1 % or 1 ms.
    alone = replace(drawn, duplex_bytes_per_second=None)
    movable = [one for one in program.storages if not one.immovable and one.nbytes]
    transfers = make_transfers(program, movable, alone)
    at_once = [
        replace(one, release_after=program.forward[-1].name, wait=False, reload_before=program.backward[0].name)
        for one in transfers
    ]
    fastest = simulate(program, alone, at_once).seconds
    assert simulate(program, alone, transfers).seconds <= fastest + max(0.01 * fastest, 1e-3) + 1e-9


def test_nothing_to_move() -> None:
    program = facts([], forward=2, backward=2)
    assert make_transfers(program, [], machine()) == ()
    timeline = simulate(program, machine())
    assert (timeline.seconds, timeline.exposed_seconds, timeline.offloads, timeline.reloads) == (4.0, 0.0, (), ())


# Hidden storages


def test_hidden_storages_are_taken_in_order_of_birth_while_forward_lasts() -> None:
    # Forward lasts 6 s: A out 1-3, B 3-5; C would be out at 7 s. All could come back in time.
    storages = [storage(name, 20, birth=index, back=17 - index) for index, name in enumerate("ABC")]
    program = facts(storages, forward=6, backward=12)
    assert hidden_storages(program, machine(), min_nbytes=0, slack=0.0) == {"A", "B"}
    assert hidden_storages(program, machine(), min_nbytes=21, slack=0.0) == frozenset()


def test_hidden_storages_can_come_back_before_they_are_needed() -> None:
    # Both are out in time, but A is needed one second after forward ends and comes back in two.
    a, b = storage("A", 20, birth=0, back=7), storage("B", 20, birth=1, back=15)
    program = facts([a, b], forward=6, backward=12)
    assert hidden_storages(program, machine(), min_nbytes=0, slack=0.0) == {"B"}


def test_hidden_storages_are_movable() -> None:
    fixed = storage("A", 20, birth=0, back=17, immovable=("it is a module output",))
    held = storage("B", 20, birth=-1, back=17, held=True)
    unknown = storage("C", None, birth=1, back=17)
    program = facts([fixed, unknown, held], forward=6, backward=12)
    assert hidden_storages(program, machine(), min_nbytes=0, slack=0.0) == frozenset()


# The roofline


def test_a_step_is_as_slow_as_the_slower_of_arithmetic_and_traffic() -> None:
    roof = Machine("roof", 1.0, 1.0, 100.0, (("bfloat16", 1000.0), ("float32", 10.0)), step_seconds=0.5)
    assert step_seconds(Step("s", "mm", flops=2000, nbytes=100, dtype="bfloat16"), roof) == 2.5
    assert step_seconds(Step("s", "add", flops=100, nbytes=300, dtype="bfloat16"), roof) == 3.5
    # An unknown dtype is as slow as the slowest known one.
    assert step_seconds(Step("s", "mm", flops=20, nbytes=1, dtype="int8"), roof) == 2.5
    assert step_seconds(Step("s", "view"), roof) == 0.0
    assert step_seconds(Step("s", "mm", flops=2000, nbytes=100, dtype="bfloat16", seconds=7.0), roof) == 7.0
    assert step_seconds(Step("s", "view", seconds=0.0), roof) == 0.0
