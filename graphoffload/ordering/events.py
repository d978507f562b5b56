"""Events: what happens on which stream, in the order the host issues it.

Three producers make these lists (the plan, the rewritten graphs, the runtime's own log) and one checker judges them.

Streams: "compute", "d2h", "h2d", and "queue", the runtime's in-flight queue, which is no stream of the device but frees
memory at a moment of its own. Work on one stream runs in issue order; nothing orders two streams but a `wait` for a
token that an earlier `record` of the other stream made.

Resources are strings: `device:S` (the device memory of storage S as forward made it), `host:S` (its slot),
`reload:S` (the device memory it comes back to). To *allocate* and to *free* are writes: the memory may be somebody
else's before the one and after the other. A resource's life starts with its first write; once it is freed, only an
allocation starts another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

COMPUTE, D2H, H2D, QUEUE = "compute", "d2h", "h2d", "queue"
Verb = Literal["allocates", "reads", "writes", "frees"]


@dataclass(frozen=True)
class Event:
    """Describe one thing issued to one stream.

    `kind` is "run" (allocates, reads, writes and frees resources, in this order), "record" (makes `token`), or "wait"
    (the stream goes on only once `token`, recorded earlier in issue order, is reached). `label` names the node for
    people.
    """

    stream: str
    kind: str
    label: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    token: str = ""
    allocs: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()


def accesses(event: Event) -> Iterator[tuple[Verb, str]]:
    """List what an event does to which resource, in order."""
    for resource in event.allocs:
        yield "allocates", resource
    for resource in event.reads:
        yield "reads", resource
    for resource in event.writes:
        yield "writes", resource
    for resource in event.frees:
        yield "frees", resource


@dataclass(frozen=True)
class Finding:
    """Report one fault: what, at which index of the event list, against which other index (or None), about what.

    `subject` is the resource, or for faults of tokens the token.
    `kind` is one of "race", "before-write", "after-free", "unrecorded" and "recorded-twice" (of the checker),
    "missing", "extra", "misplaced" and "unordered" (of the refinement).
    """

    kind: str
    message: str
    index: int
    other: int | None = None
    subject: str = ""
