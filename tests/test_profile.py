"""Memory over time against examples computed by hand, and the in-flight queue against the runtime's rules."""

from __future__ import annotations

from typing import Any

import pytest
from fact_strategies import facts as any_facts
from fact_strategies import machines
from hypothesis import given
from small_facts import facts, storage

from graphoffload.errors import StalePlanError
from graphoffload.planning.machine import Machine
from graphoffload.planning.placement import forced_drops, placed
from graphoffload.planning.plan import Transfer
from graphoffload.planning.planner import make_plan
from graphoffload.planning.policy import OffloadAll
from graphoffload.planning.profile import Life, lives, memory_over_time, memory_when_moved, peak
from graphoffload.planning.values import Buffer, Facts


def transfer(
    name: str, nbytes: int, *, after: str, release: str, wait: bool = True, reload: str, ready: str
) -> Transfer:
    times: dict[str, Any] = dict.fromkeys(
        ("offload_start", "offload_end", "released", "reload_start", "reload_end", "needed"), 0.0
    )
    return Transfer(name, name, nbytes, after, release, wait, reload, ready, **times)


def test_a_program_without_steps_has_no_memory() -> None:
    empty = facts([], forward=0, backward=0)
    assert memory_over_time(empty) == []
    assert peak(empty) == 0


def test_lives_are_inclusive_at_both_ends() -> None:
    # Two storages kept, a parameter all along, a transient from step 1 to step 2.
    a, b = storage("A", 5, birth=0, back=4, last=5), storage("B", 7, birth=2, back=3)
    buffers = [Buffer("weight", 100, "parameter", -1, 5), Buffer("t", 20, "transient", 1, 2)]
    program = facts([a, b], forward=3, backward=3, buffers=buffers)
    #            f0   f1   f2   b0   b1   b2
    # weight    100  100  100  100  100  100
    # t               20   20
    # A           5    5    5    5    5    5
    # B                     7    7
    assert memory_over_time(program) == [105, 125, 132, 112, 105, 105]
    assert peak(program) == 132


def test_a_held_storage_lives_to_the_end_and_counts_once() -> None:
    x = storage("x", 30, birth=-1, back=3, held=True, immovable=("it is an input",))
    program = facts([x], forward=3, backward=3, values=[])
    assert lives(program) == [Life(-1, 5, 30, "held", "x")]
    assert memory_over_time(program) == [30] * 6


def test_unknown_sizes_are_not_guessed() -> None:
    assert memory_over_time(facts([storage("A", None, birth=0, back=2)], forward=2, backward=2)) == [0, 0, 0, 0]


def test_a_waited_release_frees_from_the_next_step_on_and_a_reload_counts_from_its_step() -> None:
    a = storage("A", 8, birth=1, back=7, last=8)
    program = facts([a], forward=5, backward=5)
    moved = transfer("A", 8, after="A", release="f2", reload="b1", ready="b2")
    #                                          f0 f1 f2 f3 f4 b0 b1 b2 b3 b4
    assert memory_over_time(program, [moved]) == [0, 8, 8, 0, 0, 0, 8, 8, 8, 0]
    assert lives(program, [moved]) == [Life(1, 2, 8, "saved", "A"), Life(6, 8, 8, "reloaded", "A")]


def test_a_handed_over_source_is_there_until_its_own_ready_beside_its_reload() -> None:
    a = storage("A", 8, birth=1, back=5, last=5)
    program = facts([a], forward=3, backward=4)
    moved = transfer("A", 8, after="A", release="f2", wait=False, reload="b1", ready="b2")
    #                                          f0 f1 f2 b0  b1 b2 b3
    assert memory_over_time(program, [moved]) == [0, 8, 8, 8, 16, 8, 0]


def test_the_queue_forces_out_the_oldest_when_its_bound_is_passed() -> None:
    a, b, c = (storage(name, 10, birth=index, back=7 - index) for index, name in enumerate("ABC"))
    program = facts([a, b, c], forward=4, backward=4)
    moved = [
        transfer(name, 10, after=name, release="f3", wait=False, reload="b0", ready=f"b{3 - index}")
        for index, name in enumerate("ABC")
    ]
    places = placed(program, moved)
    assert forced_drops(places, in_flight_nbytes=None) == {}
    assert forced_drops(places, in_flight_nbytes=30) == {}
    assert {name: by.storage for name, by in forced_drops(places, in_flight_nbytes=20).items()} == {"A": "C"}
    # A source that is too big for the queue by itself leaves it at its own hand-over: a wait after all.
    assert {name: by.storage for name, by in forced_drops(places, in_flight_nbytes=0).items()} == {
        "A": "A",
        "B": "B",
        "C": "C",
    }
    # A is gone from b0 on; its reload is there from b0 on. B and C are there twice until their readys.
    #                                                               f0  f1  f2  f3  b0  b1  b2  b3
    assert memory_over_time(program, moved, in_flight_nbytes=20) == [10, 20, 30, 30, 50, 40, 20, 10]
    assert memory_over_time(program, moved, in_flight_nbytes=0) == [10, 20, 30, 30, 30, 30, 20, 10]


def test_the_queue_lets_go_at_a_hand_over_of_what_compute_has_waited_past() -> None:
    # D2H runs A, B, C. A is handed over, then compute waits for B, so A's copy has ended too: C's hand-over sees it.
    a, b, c = (storage(name, 10, birth=index, back=8 - index) for index, name in enumerate("ABC"))
    program = facts([a, b, c], forward=5, backward=4)
    moved = [
        transfer("A", 10, after="A", release="C", wait=False, reload="b3", ready="b3"),
        transfer("B", 10, after="B", release="f3", reload="b2", ready="b2"),
        transfer("C", 10, after="C", release="f4", wait=False, reload="b1", ready="b1"),
    ]
    assert {name: by.storage for name, by in forced_drops(placed(program, moved), in_flight_nbytes=None).items()} == {
        "A": "C"
    }
    #                                          f0  f1  f2  f3  f4  b0  b1  b2  b3
    assert memory_over_time(program, moved) == [10, 20, 30, 30, 20, 10, 10, 10, 10]


@given(any_facts(), machines())
def test_moving_within_a_known_profile_gives_the_same_as_from_the_start(program: Facts, machine: Machine) -> None:
    transfers = make_plan(program, OffloadAll(min_nbytes=0), machine).transfers
    bound = machine.in_flight_bound
    moved = memory_when_moved(memory_over_time(program), placed(program, transfers), in_flight_nbytes=bound)
    assert moved == memory_over_time(program, transfers, in_flight_nbytes=bound)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"after": "b1"}, "forward node 'b1'"),
        ({"release": "zz"}, "forward node 'zz'"),
        ({"reload": "f1"}, "backward node 'f1'"),
    ],
)
def test_a_plan_of_other_graphs_is_refused_by_name(place: dict[str, str], message: str) -> None:
    program = facts([storage("A", 8, birth=0, back=3)], forward=3, backward=2)
    places = {"after": "A", "release": "f2", "reload": "b0", "ready": "b0", **place}
    with pytest.raises(StalePlanError, match=message):
        memory_over_time(program, [transfer("A", 8, **places)])
