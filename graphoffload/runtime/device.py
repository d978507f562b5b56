"""Say what the runtime needs of a device, and give it on any accelerator that torch knows.

The runtime speaks of three streams by the names that the event lists use: "compute" is whatever stream is current for
the calling thread, looked up at every use; "d2h" and "h2d" are the two copy streams, so that both directions of the link
run at once. A *token* is a point on a stream that another stream, or the host, can wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from graphoffload.errors import UsageError
from graphoffload.ordering.events import COMPUTE, D2H, H2D
from graphoffload.planning.machine import Machine
from graphoffload.runtime.chunks import PinnedChunks, RegisteredChunks
from graphoffload.runtime.memory import ChunkSource

BeforeCopy = Callable[[str], None]
"""Called with "d2h" or "h2d" while that stream is current, just before a copy is queued on it."""


class Device(Protocol):
    """Name the operations on streams and memory that the runtime is built from."""

    device: torch.device
    before_copy: BeforeCopy | None

    def record(self, stream: str) -> Any:
        """Return a token for the work issued to `stream` so far."""

    def wait(self, stream: str, token: Any) -> None:
        """Make later work on `stream` wait for `token`; the host goes on."""

    def compute_stream(self) -> Any:
        """Return the stream that is current for this thread."""

    def wait_on(self, compute_stream: Any, token: Any) -> None:
        """Make later work on a compute stream that was current earlier wait for `token`."""

    def copy(self, stream: str, dest: torch.Tensor, src: torch.Tensor, *, cuts: Sequence[int] = ()) -> None:
        """Queue a copy of flat bytes on a copy stream, split at the offsets in `cuts`."""

    def done(self, token: Any) -> bool:
        """Say whether `token` has been reached, without waiting."""

    def elapsed(self, one: Any, two: Any) -> float | None:
        """Return the seconds from one token to another; None until both are reached, and where there is no clock."""

    def memory(self) -> MemoryReading | None:
        """Read the device memory in use, in the order of issue; None where that is not known."""

    def see(self, label: str, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of tensors on the device, where a ledger is kept."""

    def synchronize(self, token: Any) -> None:
        """Make the host wait for `token`."""

    def synchronize_copies(self) -> None:
        """Make the host wait for everything on both copy streams."""

    def spoil(self, tensor: torch.Tensor) -> None:
        """Overwrite the extent of a tensor, whose contents are undefined from here on, where that helps to find faults."""

    def spoil_unshared(self, tensor: torch.Tensor) -> None:
        """Do as `spoil`, if this reference is the last to the memory."""

    def capturing(self) -> bool:
        """Say whether the compute stream is being captured into a graph of the device."""

    def refuse_capture(self) -> None:
        """Raise `UsageError` while the compute stream is being captured into a graph of the device."""

    def chunks(self) -> ChunkSource:
        """Return the source of host memory that this device copies from and to fastest."""


class MemoryReading(NamedTuple):
    """Hold bytes of device memory: in use now, the most ever in use (since somebody reset it), and ever allocated."""

    current: int
    peak: int
    total: int


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the extent of a strided tensor as flat bytes.

    The extent runs from the first to the last element in memory, gaps and overlaps included, so that one plain copy moves
    padded, transposed and expanded layouts alike, whatever the dtype. Shape: `(extent in bytes,)`.
    """
    itemsize = tensor.element_size()
    nbytes = extent_nbytes(tensor)
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * itemsize, (nbytes,), (1,))


def with_lazy_bits(tensor: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """View `tensor` with the conjugate and negative bits of `like`: bytes move as they are, the bits say what they mean."""
    if like.is_conj():
        tensor = tensor.conj()
    if like.is_neg():
        tensor = torch.ops.aten._neg_view.default(tensor)
    return tensor


def extent_nbytes(tensor: torch.Tensor) -> int:
    """Count the bytes from the first to the last element of a strided tensor; 0 if it has none."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def machine_of(device: torch.device | str) -> Machine:
    """Return the machine to plan for when none was named: the device's own, by its name, or a generic one."""
    kind = torch.device(device or "cpu")
    if kind.type == "cpu":
        return Machine.named("virtual")
    return Machine.for_device_name(torch.get_device_module(kind).get_device_name(kind))


def cudart() -> Any:
    """Return torch's binding of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class AcceleratorDevice:
    """Drive one accelerator through `torch.accelerator`, `torch.Stream` and `torch.Event`."""

    def __init__(self, device: torch.device) -> None:
        torch.empty(0, device=device)  # a device that nobody has used yet has no streams to give
        self.device = device
        self.before_copy: BeforeCopy | None = None
        self._copies = {D2H: torch.Stream(device=device), H2D: torch.Stream(device=device)}

    def _stream(self, name: str) -> torch.Stream:
        # Never cached: the user, or autograd's threads, may compute on another stream at the next call.
        return self.compute_stream() if name == COMPUTE else self._copies[name]

    def compute_stream(self) -> torch.Stream:
        """Return the current stream of the device."""
        return torch.accelerator.current_stream(self.device)

    def wait_on(self, compute_stream: torch.Stream, token: torch.Event) -> None:
        """Make `compute_stream` wait for `token`."""
        compute_stream.wait_event(token)

    def record(self, stream: str) -> torch.Event:
        """Return an event recorded on `stream`."""
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(self._stream(stream))
        return event

    def wait(self, stream: str, token: torch.Event) -> None:
        """Make `stream` wait for `token`."""
        self._stream(stream).wait_event(token)

    def copy(self, stream: str, dest: torch.Tensor, src: torch.Tensor, *, cuts: Sequence[int] = ()) -> None:
        """Queue the copy on the copy stream named `stream`."""
        with self._copies[stream]:
            if self.before_copy is not None:
                self.before_copy(stream)
            begin = 0
            for end in (*cuts, dest.numel()):
                dest[begin:end].copy_(src[begin:end], non_blocking=True)
                begin = end

    def done(self, token: torch.Event) -> bool:
        """Query the event."""
        return token.query()

    def elapsed(self, one: torch.Event, two: torch.Event) -> float | None:
        """Read the device's clock at both events."""
        return one.elapsed_time(two) / 1e3 if one.query() and two.query() else None

    def memory(self) -> MemoryReading | None:
        """Ask torch's allocator."""
        if self.device.type != "cuda":
            return None
        # Not memory_stats(), which flattens a hundred other counts at every call.
        stats = torch.cuda.memory_stats_as_nested_dict(self.device).get("allocated_bytes")
        if stats is None:
            return None
        counts = stats["all"]
        return MemoryReading(counts["current"], counts["peak"], counts["allocated"])

    def see(self, label: str, tensors: Iterable[torch.Tensor]) -> None:
        """Have nothing to note: the allocator counts."""

    def synchronize(self, token: torch.Event) -> None:
        """Block the host until the event is reached."""
        token.synchronize()

    def synchronize_copies(self) -> None:
        """Block the host until both copy streams are empty."""
        for stream in self._copies.values():
            stream.synchronize()

    def spoil(self, tensor: torch.Tensor) -> None:
        """Leave the memory as it is: writing it would cost bandwidth."""

    def spoil_unshared(self, tensor: torch.Tensor) -> None:
        """Leave the memory as it is."""

    def capturing(self) -> bool:
        """Say whether a CUDA graph is being captured on the compute stream."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def refuse_capture(self) -> None:
        """Raise while a CUDA graph is being captured: slots and waits would be frozen into it."""
        if self.capturing():
            raise UsageError("graphoffload cannot run under CUDA graph capture; use another compile mode")

    def chunks(self) -> ChunkSource:
        """Pin ordinary memory exactly on CUDA; take what torch's pinned allocator gives elsewhere."""
        if self.device.type == "cuda" and torch.version.hip is None:
            return RegisteredChunks(pin=self._register, unpin=self._unregister)
        return PinnedChunks()

    def _register(self, address: int, nbytes: int) -> bool:
        portable = 1  # cudaHostRegisterPortable: pinned for every context, as torch's own pinned memory is.
        if int(cudart().cudaHostRegister(address, nbytes, portable)) == 0:
            return True
        self._forget_last_error()
        return False

    def _unregister(self, address: int) -> None:
        if int(cudart().cudaHostUnregister(address)) != 0:
            self._forget_last_error()

    def _forget_last_error(self) -> None:
        # The CUDA runtime keeps the code of a failed call and would raise it from the next, innocent, kernel launch.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device).add_(1)
