"""Laws 5, 6, 7 and 10: plans are race-free, every wait is needed, the checker is right, rewritten pairs refine their plans.

Plans are drawn here, not made by the planner: each part of a transfer stands anywhere it may, so the laws hold for any planner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from pairs import Partition, capture
from programs import Program
from small_plans import plans, plans_for
from strategies import programs
from tight import facts_of

from graphoffload.graphs.order import events_of_pair
from graphoffload.graphs.rewrite import rewrite
from graphoffload.ordering.check import check
from graphoffload.ordering.clocks import clocks_of, happens_before, without_covered_waits
from graphoffload.ordering.events import Event, accesses
from graphoffload.ordering.refine import refines
from graphoffload.planning.order import events_of_plan
from graphoffload.planning.plan import Plan
from graphoffload.runtime.ops import READY, RELEASE

# --- a second opinion: run the streams in every way that the waits allow ----------------------------------------------


def blocked_by(events: Sequence[Event]) -> dict[int, int]:
    """Map each wait to the record that it waits for: the last one before it in issue order; none, and it waits for nothing."""
    records: dict[str, int] = {}
    blocks: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.kind == "record":
            records[event.token] = index
        elif event.kind == "wait" and event.token in records:
            blocks[index] = records[event.token]
    return blocks


def next_events(events: Sequence[Event], done: frozenset[int]) -> Iterator[int]:
    """List the events that may run next: the first of each stream that is not done, unless it is a wait that must wait."""
    blocks = blocked_by(events)
    started: set[str] = set()
    for index, event in enumerate(events):
        if index not in done and event.stream not in started:
            started.add(event.stream)
            if index not in blocks or blocks[index] in done:
                yield index


def reachable(events: Sequence[Event]) -> set[frozenset[int]]:
    """Find every set of done events that some interleaving passes through."""
    start: frozenset[int] = frozenset()
    seen, new = {start}, [start]
    while new:
        done = new.pop()
        for index in next_events(events, done):
            after = done | {index}
            if after not in seen:
                seen.add(after)
                new.append(after)
    return seen


def always_before(events: Sequence[Event], states: set[frozenset[int]], first: int, then: int) -> bool:
    """Say whether `first` comes before `then` in every interleaving."""
    return not any(then in done and first not in done for done in states)


def conflicts(first: Event, then: Event) -> set[str]:
    """List the resources that both access and at least one of them writes, allocates or frees."""
    mine, theirs = set(accesses(first)), set(accesses(then))
    return {r for (v, r), (w, s) in itertools.product(mine, theirs) if r == s and not v == w == "reads"}


# --- event lists ------------------------------------------------------------------------------------------------------

STREAMS = st.sampled_from(("compute", "d2h", "h2d"))
SOME = st.lists(st.sampled_from(("x", "y")), max_size=1).map(tuple)


@st.composite
def event_lists(draw: st.DrawFn, *, most: int = 9, wild: bool = False) -> list[Event]:
    """Draw a list in which every token is recorded once, before it is waited for; a wild one waits for others as well."""
    events: list[Event] = []
    tokens: list[str] = ["t"] if wild else []
    for index in range(draw(st.integers(1, most))):
        kinds = ("run", "run", "record", "wait") if tokens else ("run", "run", "record")
        stream, kind = draw(STREAMS), draw(st.sampled_from(kinds))
        if kind == "run":
            some = {verb: draw(SOME) for verb in ("reads", "writes", "allocs", "frees")}
            events.append(Event(stream, "run", f"e{index}", **some))
        elif kind == "record":
            tokens.append(f"t{index}")
            events.append(Event(stream, "record", f"e{index}", token=tokens[-1]))
        else:
            events.append(Event(stream, "wait", f"e{index}", token=draw(st.sampled_from(tokens))))
    return events


def racy(events: Sequence[Event]) -> set[str]:
    """List the resources about which the checker reports a race."""
    return {finding.subject for finding in check(events) if finding.kind == "race"}


# --- law 7 ------------------------------------------------------------------------------------------------------------


@given(event_lists())
def test_clocks_order_exactly_what_every_interleaving_orders(events: list[Event]) -> None:
    clocks, states = clocks_of(events), reachable(events)
    runs = [index for index, event in enumerate(events) if event.kind == "run"]
    for first, then in itertools.combinations(runs, 2):
        expected = always_before(events, states, first, then)
        assert happens_before(events, clocks, first, then) == expected, (first, then)


@given(event_lists())
def test_a_race_is_reported_if_and_only_if_some_interleaving_swaps_a_conflict(events: list[Event]) -> None:
    states = reachable(events)
    swapped = {
        resource
        for first, then in itertools.combinations(range(len(events)), 2)
        if not always_before(events, states, first, then)
        for resource in conflicts(events[first], events[then])
    }
    for finding in check(events):
        if finding.kind == "race":
            assert finding.other is not None
            assert not always_before(events, states, finding.other, finding.index)
            assert finding.subject in conflicts(events[finding.other], events[finding.index])
    assert racy(events) == swapped


@given(event_lists(), st.data())
def test_without_findings_every_interleaving_reads_the_same(events: list[Event], data: st.DataObject) -> None:
    """A list without races means one thing, and reads of nothing or of freed memory are reported whatever the timing."""
    findings = check(events)
    if any(finding.kind == "race" for finding in findings):
        return
    issue_order, done = list(range(len(events))), frozenset[int]()
    drawn: list[int] = []
    while len(drawn) < len(events):
        drawn.append(data.draw(st.sampled_from(sorted(next_events(events, done)))))
        done |= {drawn[-1]}
    read, bad = run(events, issue_order)
    assert run(events, drawn) == (read, bad)
    reported = {f.index for f in findings if f.kind in ("before-write", "after-free")}
    assert bad == reported


def run(events: Sequence[Event], order: Sequence[int]) -> tuple[dict[tuple[int, str], int], set[int]]:
    """Run events one at a time. Return what each read saw (the index of the writer), and which events did the impossible."""
    written: dict[str, int] = {}
    freed: set[str] = set()
    read: dict[tuple[int, str], int] = {}
    bad: set[int] = set()
    for index in order:
        for verb, resource in accesses(events[index]):
            if (resource not in written and verb in ("reads", "frees")) or (resource in freed and verb != "allocates"):
                bad.add(index)
            if verb == "reads":
                read[index, resource] = written.get(resource, -1)
            else:
                written[resource] = index
            if verb == "allocates":
                freed.discard(resource)
            elif verb == "frees":
                freed.add(resource)
    return read, bad


@given(event_lists(wild=True))
def test_dropping_covered_waits_hides_no_fault(events: list[Event]) -> None:
    def found(events: Sequence[Event]) -> list[tuple[str, str]]:
        return [(finding.kind, finding.subject) for finding in check(events)]

    assert found(without_covered_waits(events)) == found(events)


@given(event_lists())
def test_dropping_covered_waits_changes_no_order(events: list[Event]) -> None:
    kept = list(without_covered_waits(events))
    work = [index for index, event in enumerate(events) if event.kind == "run"]
    left = [index for index, event in enumerate(kept) if event.kind == "run"]
    assert [kept[index] for index in left] == [events[index] for index in work]
    before, after = clocks_of(events), clocks_of(kept)
    for (i, k), (j, m) in itertools.combinations(zip(work, left, strict=True), 2):
        assert happens_before(events, before, i, j) == happens_before(kept, after, k, m)
    assert list(without_covered_waits(kept)) == kept


# --- laws 5 and 6 -----------------------------------------------------------------------------------------------------


@given(plans())
def test_a_plan_is_race_free(plan: Plan) -> None:
    assert check(events_of_plan(plan)) == ()


@given(plans())
def test_each_wait_of_a_plan_is_needed(plan: Plan) -> None:
    events = events_of_plan(plan)
    for index, event in enumerate(events):
        if event.kind == "wait":
            assert "race" in {finding.kind for finding in check(events[:index] + events[index + 1 :])}, event


@given(plans())
def test_a_plan_refines_itself_and_nothing_that_lacks_a_wait(plan: Plan) -> None:
    events = events_of_plan(plan)
    assert refines(events, events) == ()
    for index, event in enumerate(events):
        if event.kind == "wait":
            found = {finding.kind for finding in refines(events[:index] + events[index + 1 :], events)}
            assert found == {"unordered"}, event


@given(plans())
def test_a_plan_lists_each_piece_of_work_once(plan: Plan) -> None:
    """Per transfer: one copy each way; each memory is allocated once and freed once."""
    done = [access for event in events_of_plan(plan) for access in accesses(event)]
    for transfer in plan.transfers:
        for resource in ("device", "host", "reload"):
            name = f"{resource}:{transfer.storage}"
            assert done.count(("allocates", name)) == done.count(("frees", name)) == 1
        assert done.count(("writes", f"host:{transfer.storage}")) == 1
        assert done.count(("writes", f"reload:{transfer.storage}")) == 1


# --- laws 5, 6 and 10 over generated programs -------------------------------------------------------------------------

MANY = settings.default.max_examples if settings.default else 25
rare = settings(
    max_examples=max(3, MANY // 3), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@rare
@given(programs(dynamic=None), st.sampled_from(("min_cut", "default")), st.data())
def test_a_rewritten_pair_refines_its_plan_and_needs_each_of_its_waits(
    program: Program, partition: Partition, data: st.DataObject
) -> None:
    note(program.source)
    pair = capture(program.module(), *program.inputs(), partition=partition, dynamic=program.dynamic)
    plan = data.draw(plans_for(facts_of(pair)))
    graphs = rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)
    events, planned = events_of_pair(*graphs, num_fwd_outputs=pair.num_fwd_outputs), events_of_plan(plan)
    assert check(planned) == ()
    assert check(events) == ()
    assert refines(events, planned) == ()
    for index, event in enumerate(events):
        if event.kind == "wait":
            assert "race" in {finding.kind for finding in check(events[:index] + events[index + 1 :])}, event
    for half in graphs:
        for node in [node for node in half.graph.nodes if node.target in (RELEASE, READY)]:
            following, arguments = node.next, node.args
            half.graph.erase_node(node)
            assert check(events_of_pair(*graphs, num_fwd_outputs=pair.num_fwd_outputs)), f"the loss of {node.name}"
            with half.graph.inserting_before(following):
                half.graph.create_node("call_function", node.target, arguments, name=node.name)
