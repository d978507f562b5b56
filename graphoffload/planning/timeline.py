"""The timeline: when every step and every copy runs, for transfers already placed. Compute, D2H and H2D each run in order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from graphoffload.planning.machine import Machine
from graphoffload.planning.placement import Placed, forced_drops, placed
from graphoffload.planning.plan import Transfer
from graphoffload.planning.values import Facts, Step


@dataclass(frozen=True)
class Copy:
    """Describe one copy of the timeline. Times are seconds from the start of forward."""

    storage: str
    start: float
    end: float


@dataclass(frozen=True)
class Stall:
    """Describe compute standing still: right after forward step `position`, or right before backward step `position`."""

    position: int
    storage: str
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """Hold a simulated training step.

    `starts` and `ends` are by position; `offloads` and `reloads` are in the order in which the copy streams run them;
    `dropped` and `needed` map storages to when their device memory is given up, and to when compute comes to their `ready`.
    `exposed_seconds` is what compute waited for copies. Times are seconds from the start of forward.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    offloads: tuple[Copy, ...]
    reloads: tuple[Copy, ...]
    stalls: tuple[Stall, ...]
    dropped: tuple[tuple[str, float], ...]
    needed: tuple[tuple[str, float], ...]
    seconds: float
    exposed_seconds: float


def step_seconds(step: Step, machine: Machine) -> float:
    """Estimate a step: measured seconds if there are any, else the roofline and a kernel's fixed cost.

    The slower of arithmetic and memory traffic bounds it. Zero for what launches nothing (a view, a getitem).
    """
    if step.seconds is not None:
        return step.seconds
    if not step.flops and not step.nbytes:
        return 0.0
    arithmetic = step.flops / machine.flops_for(step.dtype) if step.flops else 0.0
    return max(arithmetic, step.nbytes / machine.memory_bytes_per_second) + machine.step_seconds


class _Transit:
    """Hold one copy on its way: fixed latency first, then bytes."""

    __slots__ = ("end", "latency", "nbytes", "start", "storage")

    def __init__(self, storage: str, nbytes: int, latency: float) -> None:
        self.storage = storage
        self.latency = latency
        self.nbytes = float(nbytes)
        self.start = -1.0
        self.end: float | None = None


class Link:
    """Run both copy streams forward in time; lives inside one run.

    Each way runs its copies in order of issue. While both ways move bytes, each keeps `both_ways_factor` of its speed. A
    reload starts no earlier than the end of its own offload, and holds up the reloads behind it, as a stream does.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._now = 0.0
        self._out: deque[_Transit] = deque()
        self._back: deque[_Transit] = deque()
        self.offloads: dict[str, _Transit] = {}
        self.reloads: dict[str, _Transit] = {}

    def offload(self, storage: str, nbytes: int, now: float) -> None:
        """Issue a copy to the host."""
        self._run_until(now)
        self.offloads[storage] = transit = _Transit(storage, nbytes, self._machine.copy_latency_seconds)
        self._out.append(transit)

    def reload(self, storage: str, nbytes: int, now: float) -> None:
        """Issue a copy back."""
        self._run_until(now)
        self.reloads[storage] = transit = _Transit(storage, nbytes, self._machine.copy_latency_seconds)
        self._back.append(transit)

    def end_of(self, transit: _Transit) -> float:
        """Run until this copy has ended, and return when that is."""
        while transit.end is None:
            self._run_one_phase(None)
        return transit.end

    def drain(self) -> None:
        """Run until every copy has ended."""
        while self._out or self._back:
            self._run_one_phase(None)

    def _run_until(self, now: float) -> None:
        while self._now < now and (self._out or self._back):
            self._run_one_phase(now)
        self._now = max(self._now, now)

    def _run_one_phase(self, now: float | None) -> None:
        """Run to the next moment at which a copy ends its latency or its bytes, or to `now` if that is earlier."""
        machine = self._machine
        out = self._out[0] if self._out else None
        back = self._back[0] if self._back else None
        if back is not None and self.offloads[back.storage].end is None:
            back = None
        both = out is not None and back is not None and not out.latency and not back.latency
        factor = machine.both_ways_factor if both else 1.0
        phases = []
        if out is not None:
            phases.append((out, self._out, machine.d2h_bytes_per_second * factor))
        if back is not None:
            phases.append((back, self._back, machine.h2d_bytes_per_second * factor))
        lasts = [transit.latency or transit.nbytes / rate for transit, _, rate in phases]
        span = min(lasts)
        if now is not None and self._now + span > now:
            span = now - self._now
        for (transit, queue, rate), last in zip(phases, lasts, strict=True):
            if transit.start < 0:
                transit.start = self._now
            # What ends is set to nothing left, rather than counted down to it, so that rounding leaves no crumbs.
            ends = last <= span
            if transit.latency:
                transit.latency = 0.0 if ends else transit.latency - span
                ends = ends and not transit.nbytes
            else:
                transit.nbytes = 0.0 if ends else max(0.0, transit.nbytes - span * rate)
            if ends:
                transit.end = self._now + span
                queue.popleft()
        self._now += span


@dataclass
class Run:
    """Hold what running placed transfers gives: copies, stalls, and how long compute stood still so far.

    `delays`: by the position of the first step that is late by that much. `first`: the position of backward's first step.
    """

    link: Link
    first: int
    delay: float = 0.0
    delays: dict[int, float] = field(default_factory=dict)
    stalls: list[Stall] = field(default_factory=list)
    dropped: dict[str, float] = field(default_factory=dict)
    needed: dict[str, float] = field(default_factory=dict)


def step_ends(facts: Facts, machine: Machine) -> list[float]:
    """Return when each step ends if compute never waits, and 0.0 before them: step i runs from item i to item i + 1."""
    return list(accumulate((step_seconds(step, machine) for step in facts.steps), initial=0.0))


def run_transfers(places: Sequence[Placed], machine: Machine, *, times: Sequence[float], forward_steps: int) -> Run:
    """Run compute and both copy streams, in the order in which the plan's events are issued.

    `times` are `step_ends`. Compute is at `times` plus what it has waited so far, so steps without events cost nothing.
    """
    run = Run(Link(machine), forward_steps)
    forced = forced_drops(places, in_flight_nbytes=machine.in_flight_bound)
    before, after = defaultdict[int, list[Placed]](list), defaultdict[int, list[Placed]](list)
    releases, readys = defaultdict[int, list[Placed]](list), defaultdict[int, list[Placed]](list)
    for place in places:
        after[place.offload].append(place)
        releases[place.release].append(place)
        before[place.reload].append(place)
        readys[place.ready].append(place)
    for position in sorted({*before, *after, *releases, *readys}):
        if position < forward_steps:
            end = times[position + 1]
            for place in after[position]:
                run.link.offload(place.storage, place.nbytes, end + run.delay)
            for place in releases[position]:
                for storage in _given_up(place, forced):
                    _wait(run, run.link.end_of(run.link.offloads[storage]), end, position, storage)
                    run.dropped[storage] = end + run.delay
        else:
            start = times[position]
            for place in before[position]:
                run.link.reload(place.storage, place.nbytes, start + run.delay)
            for place in readys[position]:
                run.needed[place.storage] = start + run.delay
                _wait(run, run.link.end_of(run.link.reloads[place.storage]), start, position, place.storage)
                run.dropped.setdefault(place.storage, start + run.delay)
    run.link.drain()
    return run


def _wait(run: Run, until: float, now: float, position: int, storage: str) -> None:
    if until > now + run.delay:
        run.stalls.append(Stall(position, storage, until - now - run.delay))
        run.delay = until - now
        # A forward stall stands after its step and makes the next one late; a backward stall stands before its step.
        run.delays[position + (position < run.first)] = run.delay


def _given_up(place: Placed, forced: Mapping[str, Placed]) -> list[str]:
    if place.wait:
        return [place.storage]
    return [storage for storage, by in forced.items() if by.storage == place.storage]


def simulate(facts: Facts, machine: Machine, transfers: Sequence[Transfer] = ()) -> Timeline:
    """Run a training step in numbers: every step, every copy, every wait, in the order of the plan's events.

    Law: the seconds are the sum of the steps' and `exposed_seconds`, which is zero without transfers.
    Of the transfers names and order are read, not times. The machine's `in_flight_bound` bounds what is handed over.
    Near-linear in steps and transfers.
    """
    times, first = step_ends(facts, machine), len(facts.forward)
    run = run_transfers(placed(facts, transfers), machine, times=times, forward_steps=first)
    delays = []
    delay = 0.0
    for position in range(len(facts.steps)):
        delay = run.delays.get(position, delay)
        delays.append(delay)
    return Timeline(
        starts=tuple(start + delay for start, delay in zip(times, delays, strict=False)),
        ends=tuple(end + delay for end, delay in zip(times[1:], delays, strict=True)),
        offloads=_copies(run.link.offloads),
        reloads=_copies(run.link.reloads),
        stalls=tuple(run.stalls),
        dropped=tuple(sorted(run.dropped.items())),
        needed=tuple(sorted(run.needed.items())),
        seconds=times[-1] + run.delay,
        exposed_seconds=run.delay,
    )


def _copies(transits: Mapping[str, _Transit]) -> tuple[Copy, ...]:
    return tuple(Copy(one.storage, one.start, one.end) for one in transits.values() if one.end is not None)
