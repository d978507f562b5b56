"""Hold pinned host memory, and give out exact parts of it.

Theory of operation. torch's pinned allocator rounds each block up to a power of two and pins it when asked, which wastes up
to half of the memory and takes 0.67 s a GiB. The pool pins *chunks* of just the size that is missing, one directly after
the other in one reserved stretch of address space, and gives out *blocks*: the lowest free range that is large enough.
Neighbouring free ranges merge over chunk borders, so a pool that has grown by many small chunks serves large blocks as
well as one that grew by a single chunk, and a step that allocates, and then frees, the same total under other sizes needs
no new memory. A copy may not span two separately pinned chunks, so a block lists the borders inside it (`cuts`).

A free range remembers the last token of a copy *out of* it: the next block there starts with a copy *into* it, which must
wait for that one on its stream (no host wait). Copies into the range need no memory: they share one stream, in order.
"""

from __future__ import annotations

import bisect
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from graphoffload.errors import GraphOffloadWarning
from graphoffload.runtime.chunks import FreeRanges
from graphoffload.runtime.memory import Block, Chunk, ChunkSource, Token, later_of

ALIGNMENT = 512


@dataclass
class PoolCounts:
    """Count what the pool holds and held, in bytes; `pageable_fallbacks` counts blocks that could not be pinned."""

    pinned_nbytes: int = 0
    pinned_peak_nbytes: int = 0
    in_use_nbytes: int = 0
    in_use_peak_nbytes: int = 0
    pageable_fallbacks: int = 0
    pageable_nbytes: int = 0
    growths: int = 0
    _warned: bool = field(default=False, repr=False)


class PinnedPool:
    """Give out blocks of pinned memory, growing by what is missing, within `budget_nbytes` of pinned memory.

    Law: pinned bytes stay within 1.05 of the most bytes in use at one time, where the source gives exact chunks. When the
    budget is reached or pinning fails, a block is pageable: slower, but right; it is counted, and warned of once.

    `quiesce` makes the host wait for every copy; it is called before memory is unpinned.
    """

    SLACK = 1.05

    def __init__(
        self, source: ChunkSource, *, budget_nbytes: int | None = None, quiesce: Callable[[], None] = lambda: None
    ) -> None:
        self.budget_nbytes = budget_nbytes
        self.counts = PoolCounts()
        self._source = source
        self._quiesce = quiesce
        self._chunks: list[Chunk] = []  # sorted by address
        self._free = FreeRanges()
        # Forward runs on the user's threads and backward on autograd's; both take blocks and give them back.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Block:
        """Return a block of `nbytes`, pinned if that can be done."""
        size = _aligned(nbytes)
        with self._lock:
            counts = self.counts
            taken = self._free.take(size)
            if taken is None:
                self._trim_for(size, in_use_nbytes=counts.in_use_nbytes + nbytes)
                if self._grow(size):
                    taken = self._free.take(size)
            if taken is None:
                block = self._pageable(nbytes)
            else:
                address, after = taken
                block = Block(address, nbytes, size, self._cuts(address, nbytes), after)
            counts.in_use_nbytes += nbytes
            counts.in_use_peak_nbytes = max(counts.in_use_peak_nbytes, counts.in_use_nbytes)
            return block

    def give(self, block: Block, *, after: Token | None = None) -> None:
        """Take a block back; `after` is the last copy out of it."""
        with self._lock:
            self.counts.in_use_nbytes -= block.nbytes
            if block.pageable is not None:
                self.counts.pageable_nbytes -= block.nbytes
                block.pageable = None
                return
            self._free.give(block.address, block.address + block.size, later_of(after, block.after))

    def reserve(self, sizes: Iterable[int]) -> None:
        """Pin enough for blocks of these sizes at one time, in one go, if it is not there yet."""
        with self._lock:
            missing = sum(_aligned(size) for size in sizes) - self._free.nbytes
            if missing > 0:
                self._grow(missing + self._free.tail(self._top()))

    def trim(self) -> int:
        """Unpin every chunk that no block is in; return how many bytes that gave back."""
        with self._lock:
            empty = [chunk for chunk in self._chunks if self._free.remove(chunk.address, chunk.address + chunk.nbytes)]
            if not empty:
                return 0
            # A block that was given back may still be the target of a copy under way.
            self._quiesce()
            for chunk in empty:
                self._chunks.remove(chunk)
                self.counts.pinned_nbytes -= chunk.nbytes
                self._source.shrink(chunk)
            return sum(chunk.nbytes for chunk in empty)

    def close(self) -> None:
        """Unpin everything, blocks given back or not; nobody may use one any more."""
        with self._lock:
            self._quiesce()
            while self._chunks:
                self._source.shrink(self._chunks.pop())
            self._source.close()
            self._free = FreeRanges()
            self.counts.pinned_nbytes = 0

    def _top(self) -> int:
        return self._chunks[-1].address + self._chunks[-1].nbytes if self._chunks else 0

    def _trim_for(self, size: int, *, in_use_nbytes: int) -> None:
        peak = max(self.counts.in_use_peak_nbytes, in_use_nbytes)
        if self.counts.pinned_nbytes + self._missing(size) > self.SLACK * peak:
            # Free memory that does not fit is given back before more is pinned: that is what keeps the law.
            self.trim()

    def _grow(self, size: int) -> bool:
        missing = self._missing(size)
        if self.budget_nbytes is not None and self.counts.pinned_nbytes + missing > self.budget_nbytes:
            return False
        chunk = self._source.grow(missing, after=self._top() or None)
        if chunk is not None and missing < size and chunk.address != self._top():
            # It did not join the free tail that was counted on, so it must hold the block alone.
            self._source.shrink(chunk)
            chunk = self._source.grow(size, after=None)
        if chunk is None:
            return False
        bisect.insort(self._chunks, chunk, key=lambda chunk: chunk.address)
        self._free.give(chunk.address, chunk.address + chunk.nbytes)
        self.counts.growths += 1
        self.counts.pinned_nbytes += chunk.nbytes
        self.counts.pinned_peak_nbytes = max(self.counts.pinned_peak_nbytes, self.counts.pinned_nbytes)
        return True

    def _missing(self, size: int) -> int:
        return size - self._free.tail(self._top())

    def _cuts(self, address: int, nbytes: int) -> tuple[int, ...]:
        first = bisect.bisect_right(self._chunks, address, key=lambda chunk: chunk.address)
        last = bisect.bisect_left(self._chunks, address + nbytes, key=lambda chunk: chunk.address)
        return tuple(chunk.address - address for chunk in self._chunks[first:last])

    def _pageable(self, nbytes: int) -> Block:
        counts = self.counts
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if not counts._warned:
            counts._warned = True
            warnings.warn(
                f"graphoffload: {nbytes} bytes of host memory could not be pinned (pinned now: {counts.pinned_nbytes}, "
                f"budget: {self.budget_nbytes}); pageable memory is used, and copies to it are several times slower. "
                "Raise the host budget, or offload less.",
                GraphOffloadWarning,
                stacklevel=2,
            )
        counts.pageable_fallbacks += 1
        counts.pageable_nbytes += nbytes
        return Block(memory.data_ptr(), nbytes, 0, pageable=memory)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
