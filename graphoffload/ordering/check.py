"""The checker: judge an event list, whoever made it, by happens-before.

It looks at each resource as FastTrack does (Flanagan and Freund, PLDI 2009): if all accesses so far are ordered, then a
new one is ordered after all of them as soon as it is ordered after the last write and, where it writes itself, after
each stream's last read since. So one pass is enough, linear in the number of accesses; and a resource without a finding
has no unordered pair at all (law 7). Of a resource with a race at least one racing pair is reported, not every pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graphoffload.errors import OrderingError
from graphoffload.ordering.clocks import clocks_of, happens_before
from graphoffload.ordering.events import Event, Finding, Verb, accesses
from graphoffload.ordering.show import show_findings


def check(events: Sequence[Event]) -> tuple[Finding, ...]:
    """Return every fault found in `events`, in issue order.

    Keeps laws 5 to 7. The kinds: "race" (two accesses of one resource, at least one a write, that nothing orders),
    "before-write" (a read or free of what nothing has written), "after-free" (an access after the free, before a new
    allocation), "unrecorded" (a wait for a token that no earlier event recorded), "recorded-twice".
    """
    # One event that reads and frees a resource meets the same conflict twice; it is one finding.
    found = dict.fromkeys((*_token_faults(events), *_memory_faults(events)))
    return tuple(sorted(found, key=lambda finding: finding.index))


def assert_ordered(events: Sequence[Event], *, program: str = "") -> None:
    """Raise OrderingError if `check` finds anything, with the events around each finding, then the text `program`."""
    findings = check(events)
    if findings:
        where = f"\nin:\n{program}" if program else ""
        raise OrderingError(
            f"memory accesses are not in order, {len(findings)} finding(s); this is a fault of graphoffload, not of "
            f"your program: please report it with this message.\n{show_findings(events, findings)}{where}"
        )


def _token_faults(events: Sequence[Event]) -> Iterator[Finding]:
    recorded: dict[str, int] = {}
    for index, event in enumerate(events):
        if event.kind == "record":
            if event.token in recorded:
                message = f"token {event.token} is recorded a second time"
                yield Finding("recorded-twice", message, index, recorded[event.token], event.token)
            recorded[event.token] = index
        elif event.kind == "wait" and event.token not in recorded:
            message = f"waits for token {event.token}, which nothing before it recorded"
            yield Finding("unrecorded", message, index, None, event.token)


@dataclass
class _Memory:
    """Follow one resource: its last write (None before any), whether it is freed, each stream's reads since the write."""

    written: int | None = None
    freed: bool = False
    reads: dict[str, int] = field(default_factory=dict)


def _memory_faults(events: Sequence[Event]) -> Iterator[Finding]:
    clocks = clocks_of(events)
    memories: defaultdict[str, _Memory] = defaultdict(_Memory)
    for index, event in enumerate(events):
        if event.kind != "run":
            continue
        for verb, resource in accesses(event):
            memory = memories[resource]
            if memory.written is None and verb in ("reads", "frees"):
                yield Finding("before-write", f"{verb} {resource}, which nothing has written", index, None, resource)
            if memory.freed and verb != "allocates":
                yield Finding("after-free", f"{verb} {resource} after it was freed", index, memory.written, resource)
            for other in _conflicting(memory, verb):
                if not happens_before(events, clocks, other, index):
                    message = f"{verb} {resource}, and nothing orders that after event {other}"
                    yield Finding("race", message, index, other, resource)
            if verb == "reads":
                memory.reads[event.stream] = index
            else:
                memories[resource] = _Memory(index, freed=verb == "frees" or (verb == "writes" and memory.freed))


def _conflicting(memory: _Memory, verb: Verb) -> Iterator[int]:
    """List the accesses that the next one must come after."""
    if memory.written is not None:
        yield memory.written
    if verb != "reads":
        yield from memory.reads.values()
