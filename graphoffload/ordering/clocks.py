"""Happens-before, by vector clocks over the streams.

The clock of an event maps each other stream to the index of the last of that stream's "run" events that is certain to
have ended when the event starts. Work of the event's own stream is ordered by issue, so it needs no entry. Only "run"
events count: nothing can tell whether a bare `record` or `wait` has been passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphoffload.ordering.events import Event

Clock = Mapping[str, int]


def clocks_of(events: Sequence[Event]) -> list[Clock]:
    """Give each event its clock, after the join where it is a wait.

    A wait for a token that no earlier event recorded orders nothing, as on a device; of two records the later counts.
    """
    now: dict[str, Clock] = {}
    ran: dict[str, int] = {}
    tokens: dict[str, Clock] = {}
    clocks: list[Clock] = []
    for index, event in enumerate(events):
        stream = event.stream
        clock = now.setdefault(stream, {})
        if event.kind == "run":
            ran[stream] = index
        elif event.kind == "record":
            tokens[event.token] = {**clock, stream: ran.get(stream, -1)}
        else:
            clock = now[stream] = _join(clock, tokens.get(event.token, {}), stream)
        clocks.append(clock)
    return clocks


def _join(clock: Clock, other: Clock, own: str) -> Clock:
    """Take the later of two clocks, entry by entry."""
    gained = {stream: index for stream, index in other.items() if stream != own and index > clock.get(stream, -1)}
    return {**clock, **gained} if gained else clock


def happens_before(events: Sequence[Event], clocks: Sequence[Clock], first: int, then: int) -> bool:
    """Say whether run event `first`, issued earlier, has certainly ended when event `then` starts."""
    stream = events[first].stream
    return stream == events[then].stream or clocks[then].get(stream, -1) >= first


def without_covered_waits(events: Sequence[Event]) -> tuple[Event, ...]:
    """Drop each wait for something that its stream knows already to have happened.

    Such a wait follows from others by transitivity (the copy streams run first in, first out; a reload's allocation
    comes after a release that waited for the copy out). Dropping it changes no clock. What is left of a list in which
    each wait stands right before the work that needs it loses no further wait without a race (law 6).
    """
    last: dict[str, Clock] = {}
    recorded: set[str] = set()
    kept: list[Event] = []
    for event, clock in zip(events, clocks_of(events), strict=True):
        if event.kind == "record":
            recorded.add(event.token)
        # A wait for a token that nothing has recorded is a fault, for the checker to find: it stays.
        if event.kind != "wait" or event.token not in recorded or clock != last.get(event.stream, {}):
            kept.append(event)
        last[event.stream] = clock
    return tuple(kept)
