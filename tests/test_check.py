"""The checker: each kind of fault, and how it is told."""

from __future__ import annotations

import pytest

from graphoffload.errors import InternalError, OrderingError
from graphoffload.ordering.check import assert_ordered, check
from graphoffload.ordering.events import Event, Finding


def run(stream: str, label: str = "", **accesses: str) -> Event:
    return Event(stream, "run", label, **{verb: tuple(names.split()) for verb, names in accesses.items()})


def record(stream: str, token: str) -> Event:
    return Event(stream, "record", token=token)


def wait(stream: str, token: str) -> Event:
    return Event(stream, "wait", token=token)


def kinds(*events: Event) -> list[tuple[str, int, int | None]]:
    return [(finding.kind, finding.index, finding.other) for finding in check(events)]


def test_nothing_happens_and_nothing_is_found() -> None:
    assert check(()) == ()


def test_work_of_one_stream_is_ordered() -> None:
    assert kinds(run("compute", writes="x"), run("compute", reads="x", writes="x"), run("compute", frees="x")) == []


def test_two_streams_without_a_wait_race() -> None:
    events = (run("compute", writes="x"), run("d2h", reads="x"))
    message = "reads x, and nothing orders that after event 0"
    assert check(events) == (Finding("race", message, 1, 0, "x"),)


def test_a_record_and_a_wait_order_two_streams() -> None:
    assert kinds(run("compute", writes="x"), record("compute", "t"), wait("d2h", "t"), run("d2h", reads="x")) == []


def test_a_record_before_the_work_does_not_cover_it() -> None:
    events = (record("compute", "t"), run("compute", writes="x"), wait("d2h", "t"), run("d2h", reads="x"))
    assert kinds(*events) == [("race", 3, 1)]


def test_a_wait_by_another_stream_does_not_help() -> None:
    events = (run("compute", writes="x"), record("compute", "t"), wait("h2d", "t"), run("d2h", reads="x"))
    assert kinds(*events) == [("race", 3, 0)]


def test_order_is_transitive_over_streams() -> None:
    events = (
        run("compute", writes="x"),
        record("compute", "t"),
        wait("d2h", "t"),
        record("d2h", "u"),
        wait("h2d", "u"),
        run("h2d", writes="x"),
    )
    assert kinds(*events) == []


def test_streams_may_be_many_and_have_any_name() -> None:
    names = [f"stream {i}" for i in range(20)]
    assert len(kinds(run("first", writes="x"), *(run(name, reads="x") for name in names))) == 20


def test_reads_do_not_race_with_reads() -> None:
    events = (
        run("compute", writes="x"),
        record("compute", "t"),
        wait("d2h", "t"),
        run("d2h", reads="x"),
        run("compute", reads="x"),
    )
    assert kinds(*events) == []


def test_a_write_must_come_after_each_streams_reads() -> None:
    shared = (run("compute", writes="x"), record("compute", "t"), wait("d2h", "t"), wait("h2d", "t"))
    reads = (run("d2h", reads="x"), run("h2d", reads="x"), record("d2h", "u"))
    assert kinds(*shared, *reads, wait("compute", "u"), run("compute", writes="x")) == [("race", 8, 5)]


@pytest.mark.parametrize("verb", ["writes", "allocs", "frees"])
def test_to_write_to_allocate_and_to_free_conflict_with_a_read(verb: str) -> None:
    events = (run("compute", writes="x"), record("compute", "t"), wait("d2h", "t"), run("d2h", reads="x"))
    assert kinds(*events, run("compute", **{verb: "x"})) == [("race", 4, 3)]


def test_a_race_is_found_where_the_read_comes_first() -> None:
    assert kinds(run("d2h", reads="x"), run("compute", writes="x")) == [("before-write", 0, None), ("race", 1, 0)]


@pytest.mark.parametrize("verb", ["reads", "frees"])
def test_what_nothing_has_written_cannot_be_used(verb: str) -> None:
    assert kinds(run("compute", **{verb: "x"})) == [("before-write", 0, None)]


@pytest.mark.parametrize("verb", ["reads", "writes", "frees"])
def test_what_was_freed_cannot_be_used(verb: str) -> None:
    assert kinds(run("compute", allocs="x", frees="x"), run("compute", **{verb: "x"})) == [("after-free", 1, 0)]


def test_a_write_does_not_bring_freed_memory_back_but_an_allocation_does() -> None:
    freed = (run("compute", allocs="x"), run("compute", frees="x"))
    assert kinds(*freed, run("compute", writes="x"), run("compute", reads="x")) == [
        ("after-free", 2, 1),
        ("after-free", 3, 2),
    ]
    assert kinds(*freed, run("compute", allocs="x"), run("compute", reads="x")) == []


def test_an_event_reads_before_it_frees() -> None:
    assert kinds(run("compute", allocs="x"), run("compute", reads="x", frees="x")) == []


def test_a_wait_for_a_token_that_nobody_recorded() -> None:
    assert kinds(wait("d2h", "t"), record("compute", "t")) == [("unrecorded", 0, None)]


def test_such_a_wait_orders_nothing() -> None:
    events = (run("compute", writes="x"), wait("d2h", "t"), record("compute", "t"), run("d2h", reads="x"))
    assert kinds(*events) == [("unrecorded", 1, None), ("race", 3, 0)]


def test_a_token_recorded_twice() -> None:
    assert kinds(record("compute", "t"), record("d2h", "t")) == [("recorded-twice", 1, 0)]


def test_findings_are_in_issue_order_and_each_is_there_once() -> None:
    events = (run("compute", writes="x"), run("d2h", reads="x", frees="x"), wait("h2d", "t"), run("h2d", reads="y"))
    assert kinds(*events) == [("race", 1, 0), ("race", 1, 0), ("unrecorded", 2, None), ("before-write", 3, None)]
    assert len(set(check(events))) == len(check(events))


# --- the thin form that raises ----------------------------------------------------------------------------------------


def test_ordered_events_pass() -> None:
    assert_ordered((run("compute", writes="x"), run("compute", reads="x")))


def test_the_error_shows_each_finding_below_its_event_and_then_the_program() -> None:
    quiet = [run("compute", f"quiet_{i}", writes="z") for i in range(20)]
    events = [*quiet, run("compute", "mul_3", writes="device:mul_3"), run("d2h", "copy", reads="device:mul_3"), *quiet]
    with pytest.raises(OrderingError) as caught:
        assert_ordered(events, program="def forward(self): ...")
    lines = str(caught.value).splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:2] == ["21", "d2h"])
    assert lines[at].split() == ["21", "d2h", "run", "copy", "reads", "device:mul_3"]
    assert lines[at + 1].strip() == "^ race: reads device:mul_3, and nothing orders that after event 20"
    assert lines[-1] == "def forward(self): ..."
    shown = [int(line.split()[0]) for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert shown == list(range(17, 25))
    assert [line.strip() for line in lines].count("...") == 2
    assert isinstance(caught.value, InternalError)


def test_the_error_stays_short_when_everything_is_wrong() -> None:
    events = [run("compute", reads=f"x{i}") for i in range(500)]
    with pytest.raises(OrderingError) as caught:
        assert_ordered(events)
    assert "500 finding(s)" in str(caught.value)
    assert "and 480 more finding(s)" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 60
