"""Keep what runs ahead on a device below the memory that the program takes in any case.

The *level* is the device memory in use. Some of it is there only so that copies may overlap compute: sources whose copy out
is under way, and reloads that nobody has asked for yet. At each *moment*, a pack or an unpack of a large value, the level
without those is noted, and at the next moment how far it may have risen in between: what a moment *needs* is the two
together. The *ceiling* is the most that any moment has needed: the program reaches it whatever we do. A program that comes
again needs at each moment about what it needed the last time, so what runs ahead may fill the rest up to the ceiling, and
costs no memory at the peak. Above it sources are waited for, and no reload is started early but the very next.

How far the level rose between two moments is told only where the allocator's peak was made in between. Else it is at most
what was allocated in between, and at most what was missing to the peak: enough to be left free the next time, but no reason
to raise the ceiling, since what ran ahead may have made that peak.

Where a device cannot tell its memory, both kinds are bounded by a number of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from graphoffload.runtime.device import MemoryReading
from graphoffload.runtime.transfer import Runtime


@dataclass(eq=False, slots=True)
class Moment:
    """Hold one moment of a program on one device, in bytes: the level without what runs ahead, and what is needed next."""

    room: Room
    level_nbytes: int
    need_nbytes: int


@dataclass(eq=False)
class Room:
    """Hold the ceiling of one device, and what is reloaded ahead on it, in bytes. `bound` holds where there is no level.

    `in_flight_bound` is the user's, for sources. `is_new` until the first forward on the device has ended. `given_up`:
    reloads ahead whose parcels are gone. `_open` is the latest moment, `_at` the reading that its interval begins with.
    `_is_present`: the program has not gone on from it yet; `_is_fresh`: and nothing was done since the reading.
    """

    runtime: Runtime
    bound: int
    in_flight_bound: int | None = None
    seconds_per_byte: float = 0.0
    is_new: bool = True
    ceiling_nbytes: int = 0
    ahead_nbytes: int = 0
    ahead_peak_nbytes: int = 0
    given_up: deque[int] = field(default_factory=deque)
    _open: Moment | None = None
    _at: MemoryReading | None = None
    _is_present: bool = False
    _is_fresh: bool = False

    def moment(self) -> Moment:
        """Note a moment, and end the one before. Run ahead only now, and call `go_on` then."""
        moment = Moment(self, 0, 0)
        now = self.runtime.device.memory()
        if now is not None:
            before, at = self._open, self._at
            if before is not None and at is not None:
                # At most: what was allocated in between, or what was missing to the peak.
                before.need_nbytes = before.level_nbytes + max(min(now.total - at.total, now.peak - at.current), 0)
                if now.peak > at.peak:
                    # Known, for the peak was made in between; an older peak may be due to what ran ahead then.
                    self._raise_ceiling(now.peak - (at.current - before.level_nbytes))
            self._open, self._is_present = moment, True
            self._begin(now)
        return moment

    def go_on(self) -> None:
        """Let the program go on from the present moment: what it allocates from here on is its own."""
        if self._is_present and not self._is_fresh and (now := self.runtime.device.memory()) is not None:
            self._begin(now)
        self._is_present = self._is_fresh = False

    def _begin(self, now: MemoryReading) -> None:
        self._at, self._is_fresh = now, True
        level = now.current - self._running_ahead()
        self._raise_ceiling(level)
        if self._open is not None:
            self._open.level_nbytes = self._open.need_nbytes = level

    def _raise_ceiling(self, nbytes: int) -> None:
        self.ceiling_nbytes = max(self.ceiling_nbytes, nbytes)

    def _now(self) -> MemoryReading | None:
        """Read the memory, unless nothing was done since the present moment was noted."""
        return self._at if self._is_fresh else self.runtime.device.memory()

    def admits(self, nbytes: int) -> bool:
        """Say whether one more source may be in flight under the user's bound, and let older ones go for it."""
        if self.in_flight_bound is None:
            return True
        while self.runtime.sources_in_flight_nbytes + nbytes > self.in_flight_bound:
            if not self._drop_oldest():
                return False
        return True

    def clear_sources(self, coming: Sequence[Moment] = ()) -> None:
        """Wait for the oldest copies out until there is room for what `coming`, last time, needed; or nothing is in flight."""
        need = self._rise(coming)
        while self._is_over(need) and self._drop_oldest():
            pass

    def clear(self) -> None:
        """Wait for every copy out."""
        while self._drop_oldest():
            pass

    def allows(self, nbytes: int, coming: Sequence[Moment]) -> bool:
        """Say whether there is room for a reload of so many bytes now, to be asked for after the moments of `coming`."""
        return bool(coming) and not self._is_over(nbytes + self._rise(coming), nbytes)

    def insist(self, start: Callable[[], None]) -> None:
        """Start a reload that cannot be put off; if memory is short, let the sources in flight go first."""
        try:
            start()
        except torch.OutOfMemoryError:
            self.clear()
            start()

    def enter(self, nbytes: int) -> None:
        """Count a reload that was started ahead."""
        self._is_fresh = False
        self.ahead_nbytes += nbytes
        self.ahead_peak_nbytes = max(self.ahead_peak_nbytes, self.ahead_nbytes)

    def leave(self, nbytes: int) -> None:
        """Count one that was asked for, or that nobody will ask for any more."""
        self._is_fresh = False
        self.ahead_nbytes -= nbytes

    def _rise(self, coming: Sequence[Moment]) -> int:
        here = [moment for moment in coming if moment.room is self]
        return max((moment.need_nbytes for moment in here), default=0) - here[0].level_nbytes if here else 0

    def _is_over(self, more_nbytes: int, ahead_nbytes: int = 0) -> bool:
        now = self._now()
        if now is None:
            return max(self.runtime.sources_in_flight_nbytes, self.ahead_nbytes + ahead_nbytes) > self.bound
        self._raise_ceiling(now.current - self._running_ahead())
        return now.current + more_nbytes > self.ceiling_nbytes

    def _drop_oldest(self) -> bool:
        self._is_fresh = False
        return self.runtime.drop_oldest()

    def _running_ahead(self) -> int:
        while self.given_up:
            self.leave(self.given_up.popleft())
        return self.runtime.sources_in_flight_nbytes + self.ahead_nbytes
