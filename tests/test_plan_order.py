"""The events of a plan: exactly which, in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_plans import Move, plan_of

from graphoffload.errors import StalePlanError
from graphoffload.ordering.check import check
from graphoffload.ordering.events import Event
from graphoffload.ordering.show import show_event
from graphoffload.planning.order import events_of_plan
from graphoffload.planning.plan import Plan

MOVE = Move("a", carried=1, last_use=3, released=4, reloaded=2, ready=4, first=5, last=6)


def lines(events: tuple[Event, ...]) -> list[str]:
    return [" ".join(show_event(event).split()) for event in events]


def kinds(plan: Plan) -> set[tuple[str, str]]:
    return {(finding.kind, finding.subject) for finding in check(events_of_plan(plan))}


def test_a_plan_without_transfers_has_no_events() -> None:
    assert events_of_plan(plan_of()) == ()


def test_a_transfer_whose_release_waits() -> None:
    """The reload needs no wait for its own copy out: its memory is allocated after the release, which waited for that."""
    assert lines(events_of_plan(plan_of(MOVE))) == [
        "compute run f1 allocates device:a",
        "compute run offload a allocates host:a",
        "compute record offload a offload:a",
        "d2h wait offload a offload:a",
        "d2h run offload a reads device:a, writes host:a",
        "d2h record offload a d2h:a",
        "compute run f3 reads device:a",
        "compute wait release a d2h:a",
        "compute run release a frees device:a",
        "compute run reload a allocates reload:a",
        "compute record reload a reload:a",
        "h2d wait reload a reload:a",
        "h2d run reload a reads host:a, writes reload:a",
        "h2d record reload a h2d:a",
        "compute wait ready a h2d:a",
        "compute run ready a frees host:a",
        "compute run b5 reads reload:a",
        "compute run b6 frees reload:a",
    ]


def test_a_transfer_whose_release_hands_over() -> None:
    """Nothing on the compute stream has waited for the copy out, so the reload must."""
    assert lines(events_of_plan(plan_of(replace(MOVE, wait=False))))[7:17] == [
        "compute run release a reads device:a",
        "compute record release a release:a",
        "queue wait release a release:a",
        "queue wait release a d2h:a",
        "queue run release a frees device:a",
        "compute run reload a allocates reload:a",
        "compute record reload a reload:a",
        "h2d wait reload a reload:a",
        "h2d wait reload a d2h:a",
        "h2d run reload a reads host:a, writes reload:a",
    ]


def test_a_release_need_not_wait_for_a_copy_that_a_later_copy_of_the_stream_covers() -> None:
    early = replace(MOVE, storage="late_release", carried=0, released=6)
    labels = [(event.stream, event.label) for event in events_of_plan(plan_of(early, MOVE)) if event.kind == "wait"]
    assert ("compute", "release a") in labels
    assert ("compute", "release late_release") not in labels


def test_at_one_position_offloads_come_before_releases_and_reloads_before_readies() -> None:
    first = Move("a", carried=1, last_use=1, released=2, reloaded=3, ready=3, first=3, last=3)
    then = Move("b", carried=2, last_use=2, released=2, reloaded=3, ready=3, first=3, last=3)
    work = [
        event.label
        for event in events_of_plan(plan_of(first, then))
        if event.stream == "compute" and event.kind == "run"
    ]
    assert work == [
        *("f1", "offload a"),
        *("f2", "offload b", "release a", "release b"),
        *("reload a", "reload b", "ready a", "ready b", "b3"),
    ]


def test_an_input_is_there_before_forward_begins() -> None:
    events = events_of_plan(plan_of(replace(MOVE, carried=-1)))
    assert lines(events)[:2] == ["compute run input_a allocates device:a", "compute run offload a allocates host:a"]
    assert check(events) == ()


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ({"released": 2}, ("after-free", "device:a")),
        ({"ready": 6}, ("race", "reload:a")),
        ({"reloaded": 6, "ready": 6}, ("before-write", "reload:a")),
        ({"reloaded": 5, "ready": 4}, ("unrecorded", "h2d:a")),
        ({"last": 4, "first": 6}, ("after-free", "reload:a")),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_a_wrong_plan_is_found_out(fault: dict[str, int], found: tuple[str, str], wait: bool) -> None:
    assert kinds(plan_of(replace(MOVE, wait=wait))) == set()
    assert found in kinds(plan_of(replace(MOVE, wait=wait, **fault)))


def test_a_release_before_the_offload_is_found_out() -> None:
    plan = plan_of(MOVE)
    early = replace(plan, transfers=(replace(plan.transfers[0], release_after="f0"),))
    assert {("unrecorded", "d2h:a"), ("before-write", "device:a")} <= kinds(early)


def test_a_plan_that_moves_one_storage_twice_is_found_out() -> None:
    plan = plan_of(MOVE)
    twice = replace(plan, transfers=plan.transfers * 2)
    assert {("recorded-twice", "d2h:a"), ("after-free", "device:a")} <= kinds(twice)


@pytest.mark.parametrize("part", ["offload_after", "release_after", "reload_before", "ready_before", "storage"])
def test_a_plan_that_names_what_it_does_not_have_is_stale(part: str) -> None:
    plan = plan_of(MOVE)
    stale = replace(plan, transfers=(replace(plan.transfers[0], **{part: "elsewhere"}),))
    with pytest.raises(StalePlanError, match="elsewhere"):
        events_of_plan(stale)
