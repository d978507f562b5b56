"""Measure how long compute stood still for copies, by the device's own clock."""

from __future__ import annotations

from collections import deque
from typing import Any

from graphoffload.ordering.events import COMPUTE
from graphoffload.runtime.device import Device

_PENDING = 4096  # pairs of events; more than a step makes, so that nothing is lost before the next look


class Stalls:
    """Note each wait of the compute stream, and add up later what it cost.

    A wait costs the time from when compute came to it until the copy had ended, if that is positive. Nothing here makes the
    host or the device wait: a wait that is not over yet is counted at a later look.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending: deque[tuple[Any, Any]] = deque(maxlen=_PENDING)
        self._seconds: float | None = None

    def expect(self, token: Any) -> None:
        """Note that compute is about to wait for `token`."""
        self._pending.append((self._device.record(COMPUTE), token))
        if len(self._pending) == _PENDING:
            self.seconds()

    def seconds(self) -> float | None:
        """Return the seconds of all waits that are over; None where there is no clock."""
        while self._pending:
            came, token = self._pending[0]
            stall = self._device.elapsed(came, token)
            if stall is None:
                break
            self._pending.popleft()
            self._seconds = (self._seconds or 0.0) + max(stall, 0.0)
        return self._seconds
