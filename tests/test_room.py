"""Room: what runs ahead stays below the memory that the program takes in any case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from graphoffload.runtime.device import MemoryReading
from graphoffload.runtime.room import Moment, Room


@dataclass
class Device:
    """Tell the memory that a test sets; `total` and `peak` follow."""

    runtime: Any = None
    current: int = 0
    peak: int = 0
    total: int = 0
    knows: bool = True

    def memory(self) -> MemoryReading | None:
        return MemoryReading(self.current, self.peak, self.total) if self.knows else None

    def allocate(self, nbytes: int) -> None:
        self.current += nbytes
        self.total += nbytes
        self.peak = max(self.peak, self.current)

    def free(self, nbytes: int) -> None:
        self.current -= nbytes


@dataclass
class Queue:
    """Stand in for the runtime: sources in flight, oldest first."""

    device: Device = field(default_factory=Device)
    sources: list[int] = field(default_factory=list)

    @property
    def sources_in_flight_nbytes(self) -> int:
        return sum(self.sources)

    def drop_oldest(self) -> bool:
        if not self.sources:
            return False
        self.device.free(self.sources.pop(0))
        return True

    def send(self, nbytes: int) -> None:
        """Put a source, whose memory is there already, in flight."""
        self.sources.append(nbytes)


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def room(queue: Queue) -> Room:
    return Room(queue, bound=100)  # type: ignore[arg-type]


def test_a_first_forward_keeps_nothing_in_flight(queue: Queue, room: Room):
    for _ in range(5):
        queue.device.allocate(10)
        queue.send(10)
        room.moment()
        room.clear_sources()
        assert queue.sources == []
    assert room.ceiling_nbytes == 0  # all of it could be let go


def test_sources_may_fly_below_the_ceiling(queue: Queue, room: Room):
    queue.device.allocate(50)  # the program itself takes this much,
    room.moment()
    queue.device.free(30)  # and later less
    assert room.ceiling_nbytes == 50
    for nbytes in (10, 10, 15):
        queue.device.allocate(nbytes)
        queue.send(nbytes)
        room.moment()
        room.clear_sources()
    # 20 of its own, and 10 + 15 of three: the oldest had to go.
    assert queue.sources == [10, 15]
    assert room.ceiling_nbytes == 50


def test_the_ceiling_counts_what_rose_between_two_moments(queue: Queue, room: Room):
    queue.device.allocate(10)
    moment = room.moment()
    queue.device.allocate(40)  # a kernel's own workspace
    queue.device.free(40)
    room.moment()
    assert (moment.level_nbytes, moment.need_nbytes) == (10, 50)
    assert room.ceiling_nbytes == 50


def test_what_is_allocated_piece_by_piece_counts_no_more_than_the_peak(queue: Queue, room: Room):
    moment = room.moment()
    for _ in range(10):
        queue.device.allocate(40)
        queue.device.free(40)
    room.moment()
    assert moment.need_nbytes == 40


def test_what_was_started_ahead_is_no_need_of_the_program(queue: Queue, room: Room):
    queue.device.allocate(10)
    moment = room.moment()
    queue.device.allocate(25)
    room.enter(25)
    room.go_on()
    queue.device.allocate(5)
    room.moment()
    assert (moment.level_nbytes, moment.need_nbytes) == (10, 15)
    assert room.ceiling_nbytes == 15


def test_reloads_are_allowed_below_the_ceiling(queue: Queue, room: Room):
    queue.device.allocate(100)
    room.moment()
    queue.device.free(40)
    queue.device.allocate(20)
    room.enter(20)
    assert room.allows(20, [Moment(room, 60, 60)])
    assert not room.allows(21, [Moment(room, 60, 60)])
    # The program itself rises by 15 before this one is asked for.
    assert not room.allows(10, [Moment(room, 60, 60), Moment(room, 60, 75)])
    assert room.allows(5, [Moment(room, 60, 60), Moment(room, 60, 75)])
    # Nothing is known about what comes.
    assert not room.allows(1, [])


def test_reloads_that_nobody_asks_for_count_no_more(queue: Queue, room: Room):
    room.enter(20)
    assert (room.ahead_nbytes, room.ahead_peak_nbytes) == (20, 20)
    room.given_up.append(20)
    room.moment()
    assert room.ahead_nbytes == 0


def test_a_bound_of_the_user_holds_below_the_ceiling_too(queue: Queue):
    room = Room(queue, bound=100, in_flight_bound=15)  # type: ignore[arg-type]
    queue.device.allocate(1000)
    room.moment()
    queue.device.free(900)
    for nbytes in (5, 10, 10):
        queue.device.allocate(nbytes)
        assert room.admits(nbytes)
        queue.send(nbytes)
    assert queue.sources == [10]
    assert not room.admits(16)  # it must be waited for at once
    assert queue.sources == []


def test_without_a_level_the_bound_counts(queue: Queue, room: Room):
    queue.device.knows = False
    for _ in range(12):
        queue.send(10)
        room.moment()
        room.clear_sources()
    assert sum(queue.sources) == 100
    room.enter(90)
    assert room.allows(10, [Moment(room, 0, 0)])
    assert not room.allows(11, [Moment(room, 0, 0)])


def test_moments_of_other_devices_do_not_count(queue: Queue, room: Room):
    queue.device.allocate(100)
    room.moment()
    queue.device.free(50)
    room.enter(1)
    other = Room(queue, bound=0)  # type: ignore[arg-type]
    assert room.allows(50, [Moment(room, 50, 50), Moment(other, 0, 10**9)])


def test_what_ran_ahead_does_not_lift_the_ceiling(queue: Queue, room: Room):
    queue.device.allocate(100)
    room.moment()
    queue.device.free(50)
    moment = room.moment()
    queue.device.allocate(50)
    room.enter(50)
    room.go_on()
    # The program's own 20 go beyond the ceiling together with what runs ahead, which is not its fault.
    queue.device.allocate(20)
    queue.device.free(20)
    room.moment()
    assert queue.device.peak == 120
    assert room.ceiling_nbytes == 100
    assert moment.need_nbytes == 70


def test_a_program_that_has_grown_lifts_the_ceiling(queue: Queue, room: Room):
    queue.device.allocate(100)
    room.moment()
    queue.device.allocate(100)
    queue.send(20)
    room.moment()
    # What was allocated since the moment before may all have been there at one time.
    assert room.ceiling_nbytes == 200
    room.clear_sources()
    assert queue.sources == [20]
