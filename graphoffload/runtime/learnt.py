"""What one model's eager steps have taught: kept from step to step, for as long as the model lives.

People write `with saved_tensors(policy, model=model):` inside the loop, so a context lives for one step. What is learnt, and
the pinned memory, must outlive it: they belong to the model, or, where none is given, to the code that makes the context.
One weak map leads from there to here; with the model, or the code, all of this goes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch

from graphoffload.ordering.events import COMPUTE
from graphoffload.planning.machine import Machine
from graphoffload.planning.policy import Policy
from graphoffload.runtime.device import machine_of
from graphoffload.runtime.foresight import Foresight, Program
from graphoffload.runtime.ops import runtime_for
from graphoffload.runtime.owned import Owned
from graphoffload.runtime.parcels import Episode, Parcel
from graphoffload.runtime.room import Moment, Room
from graphoffload.runtime.tally import Tally

_MARKS = 4096


class Learnt:
    """Hold what is shared by the contexts of one owner, policy and machine. Use it under its `lock`."""

    def __init__(self, machine: Machine | None, owned: Owned) -> None:
        # Forward runs on the user's threads and backward on autograd's. Re-entrant: an unpack may run Python of the user.
        self.lock = threading.RLock()
        self.machine = machine
        self.owned = owned
        self.foresight: Foresight[Parcel, Moment] = Foresight()
        self.has_moved = False
        self.has_warned = False
        self._rooms: dict[torch.device, Room] = {}
        self._parcels: dict[int, list[weakref.ref[Parcel]]] = {}
        self._gone: deque[int] = deque()
        self._marks: deque[tuple[Program[Moment], int, Room, Any, Any, float]] = deque(maxlen=_MARKS)

    def room(self, device: torch.device) -> Room:
        """Return the room on a device; a new one when another runtime was installed there."""
        runtime = runtime_for(device)
        room = self._rooms.get(device)
        if room is None or room.runtime is not runtime:
            machine = self.machine or machine_of(device)
            room = Room(
                runtime,
                machine.in_flight_bound,
                in_flight_bound=machine.in_flight_nbytes,
                seconds_per_byte=1 / machine.h2d_bytes_per_second,
            )
            self._rooms[device] = room
        return room

    def known_room(self, device: torch.device) -> Room | None:
        """Return the room on a device if it was used already."""
        return self._rooms.get(device)

    @property
    def rooms(self) -> tuple[Room, ...]:
        """Return the rooms used so far."""
        return tuple(self._rooms.values())

    def parcel_with(self, tensor: torch.Tensor, storage: torch.UntypedStorage, version: int) -> Parcel | None:
        """Return a live parcel that this tensor is inside of, with its present contents."""
        for reference in self._parcels.get(storage._cdata, ()):
            parcel = reference()
            if parcel is not None and parcel.covers(tensor, version):
                return parcel
        return None

    def enlist(self, parcel: Parcel, storage: torch.UntypedStorage) -> None:
        """Let later packs find the parcel."""
        self._forget()
        address = storage._cdata
        # The parcel keeps the storage's address from being used for another, so an entry that is alive is never stale.
        self._parcels.setdefault(address, []).append(weakref.ref(parcel, lambda _: self._gone.append(address)))

    def mark(self, episode: Episode, place: int, parcel: Parcel) -> None:
        """Note when compute came to need a parcel: whether that was too soon is seen at the next `begin`."""
        departed = parcel.slot.departed
        if episode.program is not None and departed is not None:
            needed = parcel.room.runtime.device.record(COMPUTE)
            trip = parcel.nbytes * parcel.room.seconds_per_byte
            self._marks.append((episode.program, place, parcel.room, departed.native, needed, trip))

    def begin(self) -> Episode:
        """Begin an episode, and learn from the copies of those before it."""
        while self._marks:
            program, place, room, departed, needed, trip = self._marks[0]
            spare = room.runtime.device.elapsed(departed, needed)
            if spare is None:
                break  # not there yet, and so neither are those behind it; or there is no clock
            self._marks.popleft()
            if spare < trip:
                # It was needed before it could have come back: it would wait, or never have left. Not started again.
                program.late.add(place)
        return self.foresight.begin()

    def close(self, episode: Episode) -> None:
        """Note that an episode is asked for its values: it packs no more."""
        if not episode.closed:
            episode.close()
            for room in self.rooms:
                room.is_new = False

    def run_ahead(self, episode: Episode, tally: Tally) -> None:
        """Start the reloads that are expected next, as far as there is room."""
        rooms = [room for room in self.rooms if not room.runtime.device.capturing()]
        if not rooms:
            return  # nothing of ours may become a part of somebody's CUDA graph
        for room in rooms:
            room.clear_sources(episode.until())
        self._start_expected(episode, rooms, tally)
        if episode.is_over():
            # The next call may be far off, and the queue must not keep what nobody will read.
            for room in rooms:
                room.clear()
        for room in rooms:
            room.go_on()

    def _start_expected(self, episode: Episode, rooms: list[Room], tally: Tally) -> None:
        for place, parcel, is_next in episode.upcoming():
            if parcel.has_source() or parcel.room not in rooms:
                continue  # it need not come back as long as it has not left
            # The very next is started in any case; the others must not take its place.
            if not is_next and not parcel.room.allows(parcel.nbytes, episode.until(place)):
                return
            try:
                parcel.start()
            except torch.OutOfMemoryError:
                return  # what is needed now may still fit
            parcel.ahead = True
            parcel.room.enter(parcel.nbytes)
            tally.reload(parcel.nbytes)

    def _forget(self) -> None:
        while self._gone:
            address = self._gone.popleft()
            alive = [reference for reference in self._parcels.get(address, ()) if reference() is not None]
            if alive:
                self._parcels[address] = alive
            else:
                self._parcels.pop(address, None)


_LEARNT: weakref.WeakKeyDictionary[Any, dict[Any, Learnt]] = weakref.WeakKeyDictionary()
_LEARNT_LOCK = threading.Lock()


def learnt_of(model: torch.nn.Module | None, code: Any, policy: Policy, machine: Machine | None) -> Learnt:
    """Return what is known about `model`, or about the contexts made by `code`, under a policy and a machine."""
    with _LEARNT_LOCK:
        known = _LEARNT.setdefault(code if model is None else model, {})
        key = (policy, machine)
        if key not in known:
            known[key] = Learnt(machine, Owned(model))
        return known[key]
