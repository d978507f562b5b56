"""Refinement: one event list does all that another asks, in an order at least as strict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphoffload.ordering.clocks import clocks_of, happens_before
from graphoffload.ordering.events import COMPUTE, Event, Finding, accesses

Access = tuple[str, str, str, str]
"""One access: stream, verb, resource and, where reads must be told apart, label."""


def refines(pair_events: Sequence[Event], plan_events: Sequence[Event]) -> tuple[Finding, ...]:
    """Return every way in which the events of the rewritten pair fail to refine those of the plan.

    Keeps law 10. On the plan's resources the pair does the same work per stream in the same order (only compute may
    read more often than the plan, which names a storage's first and last reads alone), and whatever the plan orders,
    the pair orders. The kinds: "missing" (`index` points into the plan's events), "extra", "misplaced" and "unordered"
    (`index` and `other` point into the pair's).
    """
    places, missing = _places(pair_events, plan_events)
    return (
        *missing,
        *_extra(pair_events, plan_events),
        *_misplaced(pair_events, plan_events, places),
        *_unordered(pair_events, plan_events, places),
    )


def _accesses(event: Event) -> Iterator[Access]:
    for verb, resource in accesses(event):
        yield event.stream, verb, resource, event.label if verb == "reads" else ""


def _places(pair: Sequence[Event], plan: Sequence[Event]) -> tuple[dict[int, tuple[int, int]], list[Finding]]:
    """Find for each run event of the plan the first and the last event of the pair that does a part of it."""
    at = {access: index for index, event in enumerate(pair) for access in _accesses(event)}
    places: dict[int, tuple[int, int]] = {}
    missing: list[Finding] = []
    for index, event in enumerate(plan):
        asked = tuple(_accesses(event))
        for stream, verb, resource, _ in (access for access in asked if access not in at):
            message = f"nothing on {stream} {verb} {resource} as {event.label!r} does in the plan"
            missing.append(Finding("missing", message, index, None, resource))
        found = [at[access] for access in asked if access in at]
        if found:
            places[index] = min(found), max(found)
    return places, missing


def _extra(pair: Sequence[Event], plan: Sequence[Event]) -> Iterator[Finding]:
    """Find accesses to the plan's resources that the plan does not have; compute may read more often."""
    asked = {access for event in plan for access in _accesses(event)}
    known = {resource for _, _, resource, _ in asked}
    seen: set[Access] = set()
    for index, event in enumerate(pair):
        for access in _accesses(event):
            stream, verb, resource, _ = access
            if resource in known and (access not in asked or access in seen) and (stream, verb) != (COMPUTE, "reads"):
                message = f"{event.label!r} on {stream} {verb} {resource}, which the plan does not ask"
                yield Finding("extra", message, index, None, resource)
            seen.add(access)


def _misplaced(pair: Sequence[Event], plan: Sequence[Event], places: dict[int, tuple[int, int]]) -> Iterator[Finding]:
    last: dict[str, int] = {}
    for index, (begin, end) in places.items():
        stream = plan[index].stream
        before = last.get(stream, -1)
        if begin < before:
            message = f"{pair[begin].label!r} comes before {pair[before].label!r} on {stream}, but after it in the plan"
            yield Finding("misplaced", message, begin, before)
        last[stream] = max(end, before)


def _unordered(pair: Sequence[Event], plan: Sequence[Event], places: dict[int, tuple[int, int]]) -> Iterator[Finding]:
    """Find orders across streams that the plan has and the pair lacks."""
    plan_clocks, pair_clocks = clocks_of(plan), clocks_of(pair)
    for index, (begin, _) in places.items():
        for known in plan_clocks[index].values():  # each stream's last known event stands for all before it
            if known in places:
                _, end = places[known]
                if end > begin or not happens_before(pair, pair_clocks, end, begin):
                    message = f"in the plan {pair[end].label!r} ends before {pair[begin].label!r} starts"
                    yield Finding("unordered", message, begin, end)
