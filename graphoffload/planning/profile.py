"""Memory over time: which memory lives from where to where, with a plan's transfers or without any."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from graphoffload.planning.placement import Placed, forced_drops, last_position_of_source, placed
from graphoffload.planning.plan import Transfer
from graphoffload.planning.values import Facts, Storage


class Life(NamedTuple):
    """Describe memory that is on the device from position `born` through position `dies`, both inclusive.

    `kind` is a buffer's kind, or for a storage: "held" (the caller has it too), "saved" (as forward made it), or "reloaded"
    (the memory it comes back to).
    """

    born: int
    dies: int
    nbytes: int
    kind: str
    name: str


def lives(facts: Facts, transfers: Sequence[Transfer] = (), *, in_flight_nbytes: int | None = None) -> list[Life]:
    """List every life on the device: of buffers, and of storages as the transfers cut them in two.

    Law 13: on the virtual device, where no copy ends before something waits for it, these are the exact times.
    A source with a waited release is there through the step it is released after; one that is handed over is there until a
    later hand-over forces it out of the bounded queue, or until its own `ready`, whichever comes first. A reloaded storage
    is there from the step it is reloaded before, through its last use. `in_flight_nbytes` bounds the queue (None: no bound).
    Storages of unknown size are not counted. Sizes are bytes.
    """
    found = [Life(one.born, one.dies, one.nbytes, one.kind, one.name) for one in facts.buffers]
    places = placed(facts, transfers)
    moved = {place.storage: place for place in places}
    forced = forced_drops(places, in_flight_nbytes=in_flight_nbytes)
    for storage in facts.storages:
        if storage.nbytes is None:
            continue
        place = moved.get(storage.name)
        if place is None:
            kind = "held" if storage.held else "saved"
            found.append(Life(storage.birth, _end(facts, storage), storage.nbytes, kind, storage.name))
            continue
        gone = last_position_of_source(place, forced)
        found.append(Life(storage.birth, gone, storage.nbytes, "saved", storage.name))
        found.append(Life(place.reload, storage.last_backward_use, place.nbytes, "reloaded", storage.name))
    return found


def _end(facts: Facts, storage: Storage) -> int:
    return len(facts.steps) - 1 if storage.held else storage.last_backward_use


def memory_over_time(
    facts: Facts, transfers: Sequence[Transfer] = (), *, in_flight_nbytes: int | None = None
) -> list[int]:
    """Return the bytes on the device while each step runs, forward then backward. Linear in steps and lives."""
    return _summed(lives(facts, transfers, in_flight_nbytes=in_flight_nbytes), len(facts.steps))


def memory_when_moved(before: Sequence[int], places: Sequence[Placed], *, in_flight_nbytes: int | None) -> list[int]:
    """Return the memory over time with storages moved, from that with everything kept.

    Law: equal to `memory_over_time` with these transfers. Does not look at what does not move, so that many placements of
    one program can be compared.
    """
    forced = forced_drops(places, in_flight_nbytes=in_flight_nbytes)
    # Away from after the source is gone until the reload; there twice if the reload comes before the source is gone.
    changes = [0] * (len(before) + 1)
    for place in places:
        changes[last_position_of_source(place, forced) + 1] -= place.nbytes
        changes[place.reload] += place.nbytes
    return list(map(operator.add, before, accumulate(changes)))


def _summed(found: Iterable[Life], count: int) -> list[int]:
    changes = [0] * (count + 1)
    for life in found:
        born, dies = max(life.born, 0), min(life.dies, count - 1)
        if born <= dies:
            changes[born] += life.nbytes
            changes[dies + 1] -= life.nbytes
    return list(accumulate(changes[:count]))


def peak(facts: Facts, transfers: Sequence[Transfer] = (), *, in_flight_nbytes: int | None = None) -> int:
    """Return the most bytes on the device at one time; 0 for a program without steps."""
    return max(memory_over_time(facts, transfers, in_flight_nbytes=in_flight_nbytes), default=0)
