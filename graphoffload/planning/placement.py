"""Where transfers stand, by positions instead of names: what the profile and the timeline compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphoffload.errors import StalePlanError
from graphoffload.planning.plan import Transfer
from graphoffload.planning.values import Facts


class Placed(NamedTuple):
    """Hold the positions of one transfer: its offload and its release stand after forward steps, the rest before backward's."""

    storage: str
    nbytes: int
    offload: int
    release: int
    wait: bool
    reload: int
    ready: int


def placed(facts: Facts, transfers: Sequence[Transfer]) -> list[Placed]:
    """Look up the positions of transfers, in the same order. Raises `StalePlanError` for names the facts do not have."""
    first = len(facts.forward)
    return [
        Placed(
            transfer.storage,
            transfer.nbytes,
            _position(facts.forward_index, transfer.offload_after, "forward"),
            _position(facts.forward_index, transfer.release_after, "forward"),
            transfer.wait,
            first + _position(facts.backward_index, transfer.reload_before, "backward"),
            first + _position(facts.backward_index, transfer.ready_before, "backward"),
        )
        for transfer in transfers
    ]


def _position(index: Mapping[str, int], name: str, where: str) -> int:
    if name not in index:
        raise StalePlanError(f"the plan names the {where} node {name!r}, and these facts have none of that name")
    return index[name]


def forced_drops(places: Sequence[Placed], *, in_flight_nbytes: int | None) -> dict[str, Placed]:
    """Say, for each handed-over storage that leaves the queue at a hand-over, at whose hand-over that is.

    The queue is first in, first out. At each hand-over first those at its head leave whose copies are known to have ended
    (because compute waited for that copy or for a later one); then the new source enters; then the oldest are waited for
    until `in_flight_nbytes` is kept, which may be the new one itself. None: no bound.
    """
    if all(place.wait for place in places):
        return {}
    order = sorted(range(len(places)), key=lambda index: places[index].offload)
    turn = {places[index].storage: place for place, index in enumerate(order)}
    forced: dict[str, Placed] = {}
    queue: list[Placed] = []
    copied = -1  # D2H runs in order, so whoever waited for this turn has waited for all before it
    # A stable sort: releases at one place stand in plan order.
    for place in sorted(places, key=lambda one: one.release):
        if place.wait:
            copied = max(copied, turn[place.storage])
            continue
        leaving = 0
        while leaving < len(queue) and turn[queue[leaving].storage] <= copied:
            leaving += 1
        queue.append(place)
        held = sum(one.nbytes for one in queue[leaving:])
        while in_flight_nbytes is not None and held > in_flight_nbytes:
            held -= queue[leaving].nbytes
            copied = max(copied, turn[queue[leaving].storage])
            leaving += 1
        forced.update((one.storage, place) for one in queue[:leaving])
        del queue[:leaving]
    return forced


def last_position_of_source(place: Placed, forced: Mapping[str, Placed]) -> int:
    """Return the last position at which the memory that forward made is still on the device."""
    if place.wait:
        return place.release
    if place.storage in forced:
        # It leaves the queue inside the hand-over of a storage, which stands right after this step.
        return forced[place.storage].release
    # Its own ready stands right before the step that needs it.
    return place.ready - 1
