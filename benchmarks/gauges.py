"""Read time and memory of the device that a benchmark runs on: a GPU, or at toy size the virtual device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from graphoffload import testing


class Gauge:
    """Read a GPU's clocks and counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def name(self) -> str:
        """Return the device's name."""
        return torch.cuda.get_device_name(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Measure peaks from now on."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def allocated(self) -> int:
        """Return the bytes of live tensors."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the most bytes of live tensors since the reset."""
        return torch.cuda.max_memory_allocated(self.device)

    def reserved(self) -> int:
        """Return the bytes that the allocator holds."""
        return torch.cuda.memory_reserved(self.device)

    def peak_reserved(self) -> int:
        """Return the most bytes that the allocator held since the reset."""
        return torch.cuda.max_memory_reserved(self.device)

    def torch_pinned(self) -> int:
        """Return the most bytes that torch's own pinned allocator held: what peers pin."""
        return int(torch.cuda.memory.host_memory_stats().get("allocated_bytes.peak", 0))


class VirtualGauge(Gauge):
    """Read the virtual device's ledger, which is looked at when a tensor is packed or unpacked only."""

    def __init__(self, run: testing.VirtualRun) -> None:
        super().__init__(torch.device("cpu"))
        self._run = run

    def name(self) -> str:
        """Say what it is."""
        return "virtual device"

    def synchronize(self) -> None:
        """Have nothing to wait for."""

    def reset_peak(self) -> None:
        """Forget the samples, and not what is alive."""
        self._run.ledger.samples.clear()

    def allocated(self) -> int:
        """Return the bytes of the storages seen so far that are still alive."""
        return self._run.ledger.tick("now", ())

    def peak(self) -> int:
        """Return the largest sample."""
        return self._run.peak_nbytes

    def reserved(self) -> int:
        """Return zero: there is no allocator."""
        return 0

    def peak_reserved(self) -> int:
        """Return zero: there is no allocator."""
        return 0

    def torch_pinned(self) -> int:
        """Return zero: nothing is pinned."""
        return 0


@contextlib.contextmanager
def gauge() -> Iterator[Gauge]:
    """Give the gauge of the GPU; without one, install the virtual device and give its gauge."""
    if torch.cuda.is_available():
        yield Gauge(torch.device("cuda", 0))
        return
    with testing.virtual_device(recording=False) as run:
        yield VirtualGauge(run)
