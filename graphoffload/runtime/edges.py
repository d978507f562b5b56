"""Name the waits between the streams."""

from __future__ import annotations

import enum


class Edge(enum.Enum):
    """Name each wait by what would go wrong without it."""

    PRODUCED = "the source is computed"
    VACATED = "the slot's memory is no longer read for an earlier slot"
    DEPARTED = "the source is copied out"
    BOUNDED = "the bytes in flight are bounded"
    ALLOCATED = "the memory is no longer used by earlier compute"
    COMPLETE = "the slot's own copy out has ended"
    ARRIVED = "the reload has ended"
    ABANDONED = "a copy that nobody waits for has ended"
    SEEN = "the host saw that the source is copied out"
