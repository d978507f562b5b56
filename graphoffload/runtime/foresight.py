"""Foresee in which order packed values come back: as they did the last time that the program packed the same way.

Theory of operation. The packs of one forward are an *episode*: those from entering a context, or from the first pack after
an unpack, up to the first unpack. What an episode packs, as the sequence of its keys, names a *program*. A program remembers
in which order its places (indices of packs) were first unpacked the last time, and that order is expected again; a program
that was never seen is expected to come back last in, first out. Nothing rests on the guess but time: what comes in another
order is reloaded when it is asked for, and the next episode of the program expects the new order.

While an episode still packs, it is taken for the latest program that began with the same keys, so that what was learnt about
a place is known there. No tensor is known here; a lock is the caller's affair.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

REMEMBERED = 32
"""How many programs are remembered, the latest used: regions of a network, training and evaluation, several models."""


class Returning(Protocol):
    """Name what this file needs to know of a parcel."""

    @property
    def is_coming(self) -> bool:
        """Say whether a reload is under way or the memory is back."""


Parcel = TypeVar("Parcel", bound=Returning)
Moment = TypeVar("Moment")


@dataclass(eq=False)
class Program(Generic[Moment]):
    """Hold what was learnt about one sequence of packs.

    `order`: places by first unpack, of the episode that came back last. `late`: places that were needed again too soon for
    a round trip. `mutated`: places whose source was changed in place after it was packed. `packing` and `unpacking`: what
    the moments needed that time, by place and in order; `positions`: where in that order a place came first.
    """

    keys: list[Hashable]
    order: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    mutated: set[int] = field(default_factory=set)
    packing: dict[int, Moment] = field(default_factory=dict)
    unpacking: list[Moment] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Episode(Generic[Parcel, Moment]):
    """Follow the packs of one forward, and then their unpacks."""

    foresight: Foresight[Parcel, Moment]
    keys: list[Hashable] = field(default_factory=list)
    program: Program[Moment] | None = None
    closed: bool = False
    parcels: dict[int, weakref.ref[Parcel]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    came: set[int] = field(default_factory=set)
    packing: dict[int, Moment] = field(default_factory=dict)
    unpacking: list[Moment] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    _expected: list[int] = field(default_factory=list)
    _last_unpacking: list[Moment] = field(default_factory=list)
    _last_positions: dict[int, int] = field(default_factory=dict)
    _cursor: int = 0
    _now: int = 0

    def enter(self, key: Hashable) -> int:
        """Note a pack; return its place."""
        place = len(self.keys)
        self.keys.append(key)
        program = self.program
        if program is None or place >= len(program.keys) or program.keys[place] != key:
            self.program = self.foresight.beginning_with(self.keys) if place == 0 or program is not None else None
        return place

    def is_late(self, place: int) -> bool:
        """Say whether the value at a place is known to come back at once."""
        return self.program is not None and place in self.program.late

    def is_mutated(self, place: int) -> bool:
        """Say whether the value at a place is known to be changed in place."""
        return self.program is not None and place in self.program.mutated

    def close(self) -> None:
        """Take the packs so far for all: the first unpack has come."""
        if not self.closed:
            self.closed = True
            program = self.program = self.foresight.of(self.keys)
            self._expected = program.order or list(range(len(self.keys) - 1, -1, -1))
            self._last_unpacking, self._last_positions = program.unpacking, program.positions
            # From here on this episode is the last time; whoever comes next follows it as far as it has got.
            program.order, program.packing = self.order, self.packing
            program.unpacking, program.positions = self.unpacking, self.positions

    def note(self, place: int) -> None:
        """Note the first unpack of a parcel's place."""
        self.came.add(place)
        self.order.append(place)

    def look(self, place: int, moment: Moment) -> None:
        """Note the moment of an unpack, of a parcel or of a large value that was kept."""
        self.positions.setdefault(place, len(self.unpacking))
        self.unpacking.append(moment)
        # By place: where one more value is kept than the last time, the others are still found.
        self._now = self._last_positions.get(place, self._now)

    def is_over(self) -> bool:
        """Say whether all that was expected has come back, or is gone."""
        return self._cursor >= len(self._expected)

    def after_pack(self, place: int) -> Sequence[Moment]:
        """Return the moment of this pack the last time."""
        moment = None if self.program is None else self.program.packing.get(place)
        return () if moment is None else (moment,)

    def until(self, place: int | None = None) -> Sequence[Moment]:
        """Return the moments of the last time from the present unpack to the one that asks for a place; or just this one."""
        end = self._now + 1 if place is None else self._last_positions.get(place, 0)
        return self._last_unpacking[self._now : end]

    def upcoming(self) -> Iterator[tuple[int, Parcel, bool]]:
        """Go through the parcels that are expected next and that are neither back nor on their way.

        Each with its place, and whether it is the very next: no other is on its way before it.
        """
        expected, is_first, is_next = self._expected, True, True
        for index in range(self._cursor, len(expected)):
            place = expected[index]
            reference = self.parcels.get(place)
            parcel = None if reference is None or place in self.came else reference()
            if parcel is None:
                if is_first:
                    self._cursor = index + 1
                continue
            is_first = False
            if not parcel.is_coming:
                yield place, parcel, is_next
            is_next = False


class Foresight(Generic[Parcel, Moment]):
    """Remember programs."""

    def __init__(self) -> None:
        self._programs: list[Program[Moment]] = []  # latest used last

    def begin(self) -> Episode[Parcel, Moment]:
        """Begin an episode."""
        return Episode(self)

    def of(self, keys: list[Hashable]) -> Program[Moment]:
        """Return the program that packs just these keys, made if it was never seen."""
        found = next((program for program in reversed(self._programs) if program.keys == keys), None)
        if found is None:
            found = Program[Moment](list(keys))
        else:
            self._programs.remove(found)
        self._programs.append(found)
        del self._programs[:-REMEMBERED]
        return found

    def beginning_with(self, keys: list[Hashable]) -> Program[Moment] | None:
        """Return the latest program that begins with these keys."""
        count = len(keys)
        return next((program for program in reversed(self._programs) if program.keys[:count] == keys), None)
