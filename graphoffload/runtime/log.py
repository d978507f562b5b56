"""Write down what the runtime does, as the events that the one checker judges."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphoffload.ordering.alphabet import device, host
from graphoffload.ordering.events import COMPUTE, D2H, H2D, Event


@dataclass
class RuntimeLog:
    """Hold the runtime's own events, in the order of issue.

    Names are unique over the life of the log: slot number 7 of storage `mul_3` is `mul_3#7`. The work between our
    operators is not seen; it is stood in for by one write where a source is offloaded and one read where a reload is ready.
    Host memory is used again by later slots: the first copy into it frees, on its own stream, the slots that were there,
    so that a missing wait for a copy out of one of them shows.
    """

    events: list[Event] = field(default_factory=list)
    _places: list[tuple[int, int, str]] = field(default_factory=list)

    def record(self, stream: str, serial: int) -> None:
        """Note that `stream` made a token."""
        self.events.append(Event(stream, "record", token=f"t{serial}"))

    def wait(self, stream: str, serial: int, *, why: str) -> None:
        """Note that `stream` waits for a token, and which edge that is."""
        self.events.append(Event(stream, "wait", label=why, token=f"t{serial}"))

    def produced(self, slot: str) -> None:
        """Note that compute has made the source."""
        self.events.append(Event(COMPUTE, "run", label=f"produce {slot}", allocs=(device(slot),)))

    def offloaded(self, slot: str, *, begin: int, end: int) -> None:
        """Note the copy out, into host memory [begin, end)."""
        overlaps = [place for place in self._places if place[0] < end and begin < place[1]]
        if overlaps:
            self._places = [place for place in self._places if place not in overlaps]
            frees = tuple(name for _, _, name in overlaps)
            self.events.append(Event(D2H, "run", label=f"reuse the memory of {', '.join(frees)}", frees=frees))
        self._places.append((begin, end, host(slot)))
        event = Event(D2H, "run", label=f"offload {slot}", allocs=(host(slot),), reads=(device(slot),))
        self.events.append(event)

    def dropped(self, slot: str) -> None:
        """Note that the memory of the source went back: whoever gets it may write at once."""
        self.events.append(Event(COMPUTE, "run", label=f"release {slot}", frees=(device(slot),)))

    def allocated(self, slot: str, resource: str) -> None:
        """Note that a reload's memory was allocated; earlier compute may still be using it for something else."""
        self.events.append(Event(COMPUTE, "run", label=f"allocate for {slot}", allocs=(resource,)))

    def reloaded(self, slot: str, resource: str) -> None:
        """Note the copy in."""
        event = Event(H2D, "run", label=f"reload {slot}", reads=(host(slot),), writes=(resource,))
        self.events.append(event)

    def consumed(self, slot: str, resource: str) -> None:
        """Note that compute reads what came back."""
        self.events.append(Event(COMPUTE, "run", label=f"ready {slot}", reads=(resource,)))

    def abandoned(self, slot: str, resource: str) -> None:
        """Note that the memory of a reload that nobody will read went back."""
        self.events.append(Event(COMPUTE, "run", label=f"abandon {slot}", frees=(resource,)))
