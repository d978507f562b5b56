"""The schedule: where each offload, release, reload and ready goes, so that copies hide behind compute and memory is low.

Offloads start right after production and run in order. A release stands after the first step at which its copy will have
ended. Reloads are laid from the back to the front, each as late as arrives in time. Where the link is the bottleneck nothing
arrives in time, and then only *windows* bound the memory: how many bytes may be on their way out before compute waits for
them (`in_flight`), and how many may be on their way back before they are used (`returning`). Some sizes of both are tried,
and the plan with the lowest peak among the fast ones is taken.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from graphoffload.planning.machine import Machine
from graphoffload.planning.placement import Placed
from graphoffload.planning.plan import Transfer
from graphoffload.planning.profile import memory_over_time, memory_when_moved
from graphoffload.planning.timeline import Copy as Copy
from graphoffload.planning.timeline import Run, run_transfers, step_ends
from graphoffload.planning.timeline import Stall as Stall
from graphoffload.planning.timeline import Timeline as Timeline
from graphoffload.planning.timeline import simulate as simulate
from graphoffload.planning.timeline import step_seconds as step_seconds
from graphoffload.planning.values import Facts, Storage

SLOWER_AT_MOST = 0.01
"""A plan may be this fraction slower than the fastest one for the sake of a lower peak ..."""
SLOWER_SECONDS = 1e-3
"""... or this many seconds, whichever is more."""
WINDOWS = (None, 4, 2, 1)
"""Window sizes that are tried, in multiples of the largest storage; None: no bound. Widest first: it wins ties."""

ON_TIME = 1e-9
"""Seconds by which a reload may be late and still count as in time: rounding must not make one leave a step earlier."""


class _Release(NamedTuple):
    position: int
    wait: bool
    copied: float


def make_transfers(facts: Facts, storages: Sequence[Storage], machine: Machine) -> tuple[Transfer, ...]:
    """Place the transfers of the given storages, and fill in their simulated times. In order of return.

    Laws: law 2 (no set is iterated, ties are broken by order). Every reload stands at or before its first backward use;
    every release at or after the last forward use. Storages that only their copies still need never come to more than
    `machine.in_flight_bound` bytes, so that no hand-over has to wait.
    Storages must be movable and of known size. Near-linear in steps and storages, times the number of windows tried.
    """
    if not storages:
        return ()
    ordered = sorted(storages, key=lambda one: one.carried_at)
    times, bound = step_ends(facts, machine), machine.in_flight_bound
    largest = max(one.nbytes or 0 for one in ordered)
    # A dict for its order: most windows change nothing, and a placement that was seen is not run again.
    seen: dict[tuple[Placed, ...], None] = {}
    for in_flight in _window_sizes(largest, cap=bound):
        for returning in _window_sizes(largest, cap=None):
            seen[_place(facts, ordered, machine, times=times, in_flight=in_flight, returning=returning)] = None
    runs = [(run_transfers(one, machine, times=times, forward_steps=len(facts.forward)), one) for one in seen]
    fastest = times[-1] + min(run.delay for run, _ in runs)
    allowed = fastest + max(SLOWER_AT_MOST * fastest, SLOWER_SECONDS)
    kept = memory_over_time(facts)
    run, places = min(
        (pair for pair in runs if times[-1] + pair[0].delay <= allowed),
        key=lambda pair: (max(memory_when_moved(kept, pair[1], in_flight_nbytes=bound)), pair[0].delay),
    )
    return tuple(_transfer(facts, place, run) for place in places)


def hidden_storages(facts: Facts, machine: Machine, *, min_nbytes: int, slack: float) -> frozenset[str]:
    """Choose storages whose copies hide behind compute: out before forward ends, back in time, in order of birth.

    Law: run without a window on the way back, compute waits at most `slack` of the step's seconds for them. `min_nbytes`:
    smaller ones are left out.
    """
    if not facts.forward:
        return frozenset()
    times, count = step_ends(facts, machine), len(facts.forward)
    free, leaving = 0.0, []
    for storage in sorted(facts.storages, key=lambda one: one.carried_at):
        if storage.immovable or storage.held or storage.carried_at < 0 or (storage.nbytes or 0) < max(1, min_nbytes):
            continue
        end = max(free, times[storage.carried_at + 1]) + _copy_seconds(storage, machine, machine.d2h_bytes_per_second)
        if end <= times[count]:
            leaving.append(storage)
            free = end
    chosen = _back_in_time(leaving, machine, times=times, forward_end=times[count])
    low, high = 0, len(chosen)
    while low < high:
        middle = (low + high + 1) // 2
        places = _place(facts, chosen[:middle], machine, times=times, in_flight=machine.in_flight_bound, returning=None)
        if run_transfers(places, machine, times=times, forward_steps=count).delay <= slack * times[-1]:
            low = middle
        else:
            high = middle - 1
    return frozenset(storage.name for storage in chosen[:low])


def _back_in_time(
    storages: Sequence[Storage], machine: Machine, *, times: Sequence[float], forward_end: float
) -> list[Storage]:
    """Keep the storages that can come back after forward has ended and before they are needed."""
    kept = set()
    start = float("inf")
    for storage in sorted(storages, key=lambda one: one.first_backward_use, reverse=True):
        seconds = _copy_seconds(storage, machine, machine.h2d_bytes_per_second)
        earlier = min(start, times[storage.first_backward_use]) - seconds
        if earlier >= forward_end:
            kept.add(storage.name)
            start = earlier
    return [storage for storage in storages if storage.name in kept]


def _window_sizes(largest: int, *, cap: int | None) -> list[int | None]:
    sizes: list[int | None] = []
    for times in WINDOWS:
        size = None if times is None else times * largest
        if cap is not None:
            size = cap if size is None else min(size, cap)
        if size not in sizes:
            sizes.append(size)
    return sizes


def _copy_seconds(storage: Storage, machine: Machine, rate: float) -> float:
    return machine.copy_latency_seconds + (storage.nbytes or 0) / rate


def _place(
    facts: Facts,
    storages: Sequence[Storage],
    machine: Machine,
    *,
    times: Sequence[float],
    in_flight: int | None,
    returning: int | None,
) -> tuple[Placed, ...]:
    """Place the transfers of storages, which are in order of `carried_at`, under two windows. In order of return."""
    count = len(facts.forward)
    releases, delay = _releases(storages, machine, times=times, last=count - 1, window=in_flight)
    order = sorted(range(len(storages)), key=lambda index: (storages[index].first_backward_use, index))
    back = [storages[index] for index in order]
    left = [releases[index] for index in order]
    back_link = _BackLink(machine, busy_until=max(one.copied for one in left))
    starts = _backward_starts(back, back_link, left, times=[time + delay for time in times[count:]], first=count)
    wanted = _wanted_starts(back, back_link, left, starts=starts, first=count)
    reloads = _reloads(back, wanted=wanted, starts=starts, first=count, window=returning)
    return tuple(
        Placed(
            storage=storage.name,
            nbytes=storage.nbytes or 0,
            offload=storage.carried_at,
            release=release.position,
            wait=release.wait,
            reload=position,
            ready=storage.first_backward_use,
        )
        for storage, release, position in zip(back, left, reloads, strict=True)
    )


def _releases(
    storages: Sequence[Storage], machine: Machine, *, times: Sequence[float], last: int, window: int | None
) -> tuple[list[_Release], float]:
    """Release each storage after the first step at which its copy has ended and it is used no more, or sooner for the window.

    Where more than `window` bytes are only waiting for their copies, compute waits for the earliest of them. What has not
    left when forward ends (after step `last`) is handed over, without a wait.
    Returns the releases, and how late compute is at the end of forward.
    """
    carried: defaultdict[int, list[int]] = defaultdict(list)
    unused: defaultdict[int, list[int]] = defaultdict(list)
    for index, storage in enumerate(storages):
        carried[storage.carried_at].append(index)
        unused[max(storage.carried_at, storage.last_forward_use)].append(index)
    copied = [0.0] * len(storages)
    releases: dict[int, _Release] = {}
    waiting: list[tuple[float, int]] = []
    delay = free = 0.0
    held = 0
    # The end of forward is looked at too, though nothing may happen there: it is the last chance for a release.
    for position in sorted({*carried, *unused, last}):
        for index in carried[position]:
            seconds = _copy_seconds(storages[index], machine, machine.d2h_bytes_per_second)
            copied[index] = free = max(free, times[position + 1] + delay) + seconds
        while waiting and waiting[0][0] <= times[position + 1] + delay:
            end, index = heapq.heappop(waiting)
            held -= storages[index].nbytes or 0
            since = max(storages[index].carried_at, storages[index].last_forward_use)
            releases[index] = _Release(_first_step_ending_at(end - delay, times, since, position), True, end)
        for index in unused[position]:
            heapq.heappush(waiting, (copied[index], index))
            held += storages[index].nbytes or 0
        while waiting and (waiting[0][0] <= times[position + 1] + delay or (window is not None and held > window)):
            end, index = heapq.heappop(waiting)
            held -= storages[index].nbytes or 0
            releases[index] = _Release(position, True, end)
            delay = max(delay, end - times[position + 1])
    return [releases.get(index, _Release(last, False, copied[index])) for index in range(len(storages))], delay


def _first_step_ending_at(moment: float, times: Sequence[float], since: int, until: int) -> int:
    """Return the first step in [since, until] that ends at `moment` or later; `until` is known to."""
    return min(max(bisect_left(times, moment) - 1, since), until)


@dataclass(frozen=True)
class _BackLink:
    """Estimate copies back: the link is slower while offloads still run, which is until `busy_until`."""

    machine: Machine
    busy_until: float

    def end(self, storage: Storage, start: float) -> float:
        """Return when a copy back ends that starts then."""
        seconds = _copy_seconds(storage, self.machine, self.machine.h2d_bytes_per_second)
        beside = max(0.0, self.busy_until - start)
        shared = min(seconds, beside * self.machine.both_ways_factor)
        return start + shared / self.machine.both_ways_factor + (seconds - shared)

    def start(self, storage: Storage, end: float) -> float:
        """Return when a copy back must start to end then."""
        seconds = _copy_seconds(storage, self.machine, self.machine.h2d_bytes_per_second)
        alone = min(seconds, max(0.0, end - self.busy_until))
        return end - alone - (seconds - alone) / self.machine.both_ways_factor


def _backward_starts(
    back: Sequence[Storage], link: _BackLink, left: Sequence[_Release], *, times: Sequence[float], first: int
) -> list[float]:
    """Return when each backward step starts if reloads run without a pause and compute waits for each at its first use.

    `times` are the starts if compute does not wait; no reload starts before its own offload has ended.
    """
    free = times[0]
    waits: list[tuple[int, float]] = []
    late = 0.0
    for storage, release in zip(back, left, strict=True):
        free = link.end(storage, max(free, release.copied))
        needed = storage.first_backward_use - first
        if free > times[needed] + late:
            late = free - times[needed]
            waits.append((needed, late))
    starts = list(times)
    for (since, by), (until, _) in pairwise([*waits, (len(times), 0.0)]):
        starts[since:until] = [time + by for time in times[since:until]]
    return starts


def _wanted_starts(
    back: Sequence[Storage], link: _BackLink, left: Sequence[_Release], *, starts: Sequence[float], first: int
) -> list[float]:
    """Lay reloads, given in order of return, from the back to the front: one at a time, each as late as arrives in time.

    None starts before its own offload has ended.
    """
    wanted = [0.0] * len(back)
    following = float("inf")
    for place in reversed(range(len(back))):
        end = min(starts[back[place].first_backward_use - first], following)
        following = wanted[place] = max(link.start(back[place], end), left[place].copied)
    return wanted


def _reloads(
    back: Sequence[Storage], *, wanted: Sequence[float], starts: Sequence[float], first: int, window: int | None
) -> list[int]:
    """Return the position that each reload stands before: the last that is not late, or later where the window says so.

    A reload waits until fewer than `window` bytes are back but not yet ready. One at least is always allowed, and none
    stands after its first use.
    """
    positions: list[int] = []
    outstanding = done = 0
    position = first
    for place, storage in enumerate(back):
        needed, nbytes = storage.first_backward_use, storage.nbytes or 0
        # Never before the one in front of it: the stream runs them in this order.
        position = min(max(position, first + bisect_right(starts, wanted[place] + ON_TIME) - 1), needed)
        while True:
            while done < place and back[done].first_backward_use <= position:
                outstanding -= back[done].nbytes or 0
                done += 1
            if window is None or not outstanding or outstanding + nbytes <= window or position >= needed:
                break
            position = min(back[done].first_backward_use, needed)
        positions.append(position)
        outstanding += nbytes
    return positions


def _transfer(facts: Facts, place: Placed, run: Run) -> Transfer:
    first = len(facts.forward)
    out, back = run.link.offloads[place.storage], run.link.reloads[place.storage]
    return Transfer(
        storage=place.storage,
        carrier=facts.storage_by_name[place.storage].carrier,
        nbytes=place.nbytes,
        offload_after=facts.forward[place.offload].name,
        release_after=facts.forward[place.release].name,
        wait=place.wait,
        reload_before=facts.backward[place.reload - first].name,
        ready_before=facts.backward[place.ready - first].name,
        offload_start=out.start,
        offload_end=out.end or 0.0,
        released=run.dropped[place.storage],
        reload_start=back.start,
        reload_end=back.end or 0.0,
        needed=run.needed[place.storage],
    )
