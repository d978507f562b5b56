"""Find host memory that a device copies from and to fast, and keep account of free address ranges."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from graphoffload.errors import SlotError
from graphoffload.runtime.memory import Chunk, Token, later_of

PAGE = mmap.PAGESIZE


@dataclass(slots=True)
class _Range:
    begin: int
    end: int
    after: Token | None


class FreeRanges:
    """Keep the free ranges of an address space: sorted, disjoint, merged with their neighbours."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(free.begin, free.end) for free in self._ranges])

    @property
    def nbytes(self) -> int:
        """Count the free bytes."""
        return sum(free.end - free.begin for free in self._ranges)

    def tail(self, top: int) -> int:
        """Count the free bytes that end at address `top`."""
        last = self._ranges[-1] if self._ranges else None
        return last.end - last.begin if last is not None and last.end == top else 0

    def take(self, size: int) -> tuple[int, Token | None] | None:
        """Take the lowest range of `size` bytes; None if there is none."""
        for index, free in enumerate(self._ranges):
            if free.end - free.begin >= size:
                begin = free.begin
                free.begin += size
                if free.begin == free.end:
                    del self._ranges[index]
                return begin, free.after
        return None

    def give(self, begin: int, end: int, after: Token | None = None) -> None:
        """Add a range and merge it with its neighbours."""
        index = bisect.bisect_left(self._ranges, begin, key=lambda free: free.begin)
        before = self._ranges[index - 1] if index else None
        behind = self._ranges[index] if index < len(self._ranges) else None
        if (before is not None and before.end > begin) or (behind is not None and behind.begin < end):
            raise SlotError(f"host memory [{begin:#x}, {end:#x}) was freed twice")
        added = _Range(begin, end, after)
        if before is not None and before.end == begin:
            added.begin, added.after = before.begin, later_of(added.after, before.after)
            index -= 1
            del self._ranges[index]
        if behind is not None and behind.begin == end:
            added.end, added.after = behind.end, later_of(added.after, behind.after)
            del self._ranges[index]
        self._ranges.insert(index, added)

    def remove(self, begin: int, end: int) -> bool:
        """Take out exactly [begin, end); False, and nothing done, if it is not all free."""
        for index, free in enumerate(self._ranges):
            if free.begin <= begin and end <= free.end:
                rest = [_Range(free.begin, begin, free.after), _Range(end, free.end, free.after)]
                self._ranges[index : index + 1] = [part for part in rest if part.begin < part.end]
                return True
        return False


class RegisteredChunks:
    """Reserve address space, and pin it chunk by chunk, each directly behind the other.

    `pin(address, nbytes)` says whether it worked. Untouched address space costs no memory. With the default functions
    nothing is pinned: that is the host memory of a device that is the host.
    """

    def __init__(
        self,
        *,
        pin: Callable[[int, int], bool] = lambda address, nbytes: True,
        unpin: Callable[[int], None] = lambda address: None,
        reserve_nbytes: int | None = None,
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._reserve_nbytes = reserve_nbytes or _address_space_nbytes()
        self._space: mmap.mmap | None = None
        self._base = 0
        self._free = FreeRanges()

    def _reserve(self) -> None:
        flags = {}
        if sys.platform.startswith("linux"):
            no_reserve = 0x4000  # MAP_NORESERVE, which the mmap module does not name in every Python
            flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve}
        self._space = mmap.mmap(-1, self._reserve_nbytes, **flags)
        first = ctypes.c_char.from_buffer(self._space)
        self._base = ctypes.addressof(first)
        del first  # else the map could never be closed
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            # Huge pages are pinned several times faster. A forked child must not share pinned pages: after its first
            # write the device would go on writing to pages that are no longer ours.
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):  # a kernel without it; both are improvements, not needs
                    self._space.madvise(getattr(mmap, advice))
        self._free.give(self._base, self._base + self._reserve_nbytes)

    def grow(self, nbytes: int, *, after: int | None) -> Chunk | None:
        """Pin whole pages, directly behind `after` if that address space is free."""
        nbytes = -(-nbytes // PAGE) * PAGE
        while self._space is None and self._reserve_nbytes >= nbytes:
            # A system that counts untouched addresses as memory may refuse the first, generous, stretch.
            with contextlib.suppress(OSError, OverflowError):
                self._reserve()
                break
            self._reserve_nbytes //= 2
        if after is not None and self._free.remove(after, after + nbytes):
            address = after
        else:
            taken = self._free.take(nbytes)
            if taken is None:
                return None
            address = taken[0]
        if not self._pin(address, nbytes):
            self._free.give(address, address + nbytes)
            return None
        return Chunk(address, nbytes)

    def shrink(self, chunk: Chunk) -> None:
        """Unpin the chunk and give its pages, but not its addresses, back to the system."""
        self._unpin(chunk.address)
        if self._space is not None and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                self._space.madvise(mmap.MADV_DONTNEED, chunk.address - self._base, chunk.nbytes)
        self._free.give(chunk.address, chunk.address + chunk.nbytes)

    def close(self) -> None:
        """Give the address space back; every chunk must have been given back before."""
        if self._space is not None:
            self._space.close()
            self._space, self._free = None, FreeRanges()


def _address_space_nbytes() -> int:
    # Twice the machine's memory leaves room for holes; a 32-bit or otherwise odd system gets a modest stretch.
    try:
        return 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 1 << 36


class PinnedChunks:
    """Take chunks from torch's pinned allocator: powers of two, since it rounds up to one in any case."""

    def grow(self, nbytes: int, *, after: int | None) -> Chunk | None:
        """Return a power of two of at least `nbytes`, wherever torch has it."""
        nbytes = 1 << max(nbytes - 1, PAGE - 1).bit_length()
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return None
        return Chunk(memory.data_ptr(), nbytes, memory)

    def shrink(self, chunk: Chunk) -> None:
        """Let torch have the memory: the chunk's owner is the only reference to it."""

    def close(self) -> None:
        """Have nothing left to do."""
