"""Stand in for a device on the CPU: copies as late as the waits allow, memory poisoned, and a ledger of device bytes.

Theory of operation. Compute is the CPU itself and runs at once. A copy is only queued on its stream; it runs when something
waits for a token recorded behind it: compute, the host, or the other copy stream, and then with everything that it waits for
itself. That is the latest moment a device may choose. Memory whose contents are undefined holds poison, so a wait that is
missing gives NaN every time instead of a rare wrong number: a source that is released too early is poisoned before the copy
reads it, a slot or a reload that is read too early is poison still.

The early side has one rule. A copy may also run *too early*, before the compute that it depends on; compute that has run
cannot be undone, so a copy that was not told to wait for compute since the copy before it moves poison.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from graphoffload._torch import storage_use_count
from graphoffload.ordering.events import COMPUTE, D2H, H2D
from graphoffload.runtime.chunks import RegisteredChunks
from graphoffload.runtime.device import BeforeCopy, MemoryReading, extent_nbytes
from graphoffload.runtime.memory import ChunkSource
from graphoffload.runtime.slots import is_slot


@dataclass(eq=False, slots=True)
class VirtualToken:
    """Mark a point on a stream. `awaited` says whether compute or the host has waited for it."""

    stream: str
    reached: bool = False
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class _Copy:
    # Addresses, and a reference to the device's side only: a program with a missing wait must read poison, never memory
    # that went back to the system. The host's side belongs to the pool, which waits before it gives memory back; a
    # reference to a tensor there would keep its slot from being abandoned.
    dest: int
    src: int | None  # None: poison
    nbytes: int
    keeps: torch.Tensor


@dataclass(slots=True)
class _VirtualStream:
    queue: deque[_Copy | VirtualToken | tuple[VirtualToken]] = field(default_factory=deque)
    knows_compute: bool = False


class VirtualDevice:
    """Queue copies until something waits for them; with `late=False`, run them at once and poison nothing."""

    def __init__(self, *, late: bool = True, ledger: Ledger | None = None) -> None:
        self.device = torch.device("cpu")
        self.before_copy: BeforeCopy | None = None
        self.ledger = ledger
        self.late = late
        self._streams = {D2H: _VirtualStream(), H2D: _VirtualStream()}

    def record(self, stream: str) -> VirtualToken:
        """Return a token; one of compute is reached at once."""
        token = VirtualToken(stream, reached=stream == COMPUTE or not self.late)
        if not token.reached:
            self._streams[stream].queue.append(token)
        return token

    def wait(self, stream: str, token: VirtualToken) -> None:
        """Run what `token` stands for if compute waits; note the wait if a copy stream does."""
        if stream == COMPUTE:
            token.awaited = True
            self._reach(token)
            return
        waiting = self._streams[stream]
        if token.stream == COMPUTE:
            waiting.knows_compute = True
        elif not token.reached:
            waiting.queue.append((token,))

    def compute_stream(self) -> str:
        """Name the one compute stream."""
        return COMPUTE

    def wait_on(self, compute_stream: str, token: VirtualToken) -> None:
        """Run what `token` stands for."""
        self.wait(COMPUTE, token)

    def copy(self, stream: str, dest: torch.Tensor, src: torch.Tensor, *, cuts: Sequence[int] = ()) -> None:
        """Queue the copy."""
        if self.before_copy is not None:
            self.before_copy(stream)
        copying = self._streams[stream]
        # A wait for compute serves one copy: compute has moved on by the next.
        data = src.data_ptr() if copying.knows_compute or not self.late else None
        copy = _Copy(dest.data_ptr(), data, dest.numel(), src if stream == D2H else dest)
        copying.knows_compute = False
        if self.late:
            copying.queue.append(copy)
        else:
            _run(copy)

    def done(self, token: VirtualToken) -> bool:
        """Say no until somebody waited for this very token: a copy never ends by itself."""
        return token.awaited

    def elapsed(self, one: VirtualToken, two: VirtualToken) -> float | None:
        """Have no clock."""
        return None

    def memory(self) -> MemoryReading | None:
        """Read the ledger."""
        return None if self.ledger is None else self.ledger.reading()

    def see(self, label: str, tensors: Iterable[torch.Tensor]) -> None:
        """Show the tensors to the ledger."""
        if self.ledger is not None:
            self.ledger.tick(label, tensors)

    def synchronize(self, token: VirtualToken) -> None:
        """Run what `token` stands for."""
        token.awaited = True
        self._reach(token)

    def synchronize_copies(self) -> None:
        """Run every queued copy."""
        for name in (D2H, H2D):
            self._reach(self.record(name))

    def spoil(self, tensor: torch.Tensor) -> None:
        """Poison the bytes: all ones, which is NaN for floats; true for booleans, which have no other value to spare."""
        if self.late:
            # Written behind torch's back: poison is not an in-place operation of the program.
            ctypes.memset(tensor.data_ptr(), 1 if tensor.dtype is torch.bool else 0xFF, extent_nbytes(tensor))

    def spoil_unshared(self, tensor: torch.Tensor) -> None:
        """Poison the bytes if nobody but the caller can reach them."""
        storage = tensor.untyped_storage()
        if self.late and storage_use_count(storage._cdata) == 2:  # the tensor's own reference, and the one just made
            self.spoil(tensor)

    def capturing(self) -> bool:
        """Say no."""
        return False

    def refuse_capture(self) -> None:
        """Have nothing to refuse."""

    def chunks(self) -> ChunkSource:
        """Return ordinary memory."""
        return RegisteredChunks()

    def _reach(self, token: VirtualToken) -> None:
        queue = self._streams[token.stream].queue if token.stream != COMPUTE else deque()
        while not token.reached:
            match queue.popleft():
                case VirtualToken() as passed:
                    passed.reached = True
                case (awaited,):
                    self._reach(awaited)
                case _Copy() as copy:
                    _run(copy)


def _run(copy: _Copy) -> None:
    if copy.src is None:
        ctypes.memset(copy.dest, 0xFF, copy.nbytes)
    else:
        ctypes.memmove(copy.dest, copy.src, copy.nbytes)


@dataclass(frozen=True, slots=True)
class Sample:
    """Record the live device bytes while a node ran."""

    label: str
    nbytes: int


class Ledger:
    """Measure the live device bytes: the sum over all storages ever shown to it that are still alive.

    It keeps weak references only, so it never changes what it measures. Slots are host memory and do not count.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.peak_nbytes = 0
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._live_nbytes = 0
        self._seen_nbytes = 0
        self._gone: deque[int] = deque()  # a callback may run anywhere, so it only leaves a note
        self._lock = threading.Lock()  # two threads may run graphs on one device

    def tick(self, label: str, tensors: Iterable[torch.Tensor]) -> int:
        """Take note of new tensors, and add a sample; return its bytes."""
        with self._lock:
            for tensor in tensors:
                self._see(tensor)
            nbytes = self._count()
            self.samples.append(Sample(label, nbytes))
            self.peak_nbytes = max(self.peak_nbytes, nbytes)
            return nbytes

    def reading(self) -> MemoryReading:
        """Read the bytes that are alive now, the largest sample, and all bytes ever seen, without a sample."""
        with self._lock:
            return MemoryReading(self._count(), self.peak_nbytes, self._seen_nbytes)

    def reset(self) -> None:
        """Forget the samples and the storages seen so far."""
        with self._lock:
            self.samples.clear()
            self._live.clear()
            self._gone.clear()
            self._live_nbytes = self.peak_nbytes = 0

    def _count(self) -> int:
        while self._gone:
            self._live_nbytes -= self._live.pop(self._gone.popleft())[1]
        return self._live_nbytes

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or is_slot(tensor):
            return
        self._count()  # first, since the address of one that is gone may be that of this one
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            # torch keeps one Python object for a storage as long as the storage lives.
            reference = weakref.ref(storage, lambda _: self._gone.append(address))
            self._live[address] = (reference, storage.nbytes())
            self._live_nbytes += storage.nbytes()
            self._seen_nbytes += storage.nbytes()
