"""What a runtime counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransferStats:
    """Count what a runtime did since it was made. Bytes, except where a name says otherwise.

    `host_nbytes` is what slots hold now, `pinned_nbytes` what is pinned for them, `in_flight_nbytes` the sources whose
    release did not wait and that are still on the device. `slots` is how many slots are alive; `abandoned` how many went
    while a copy of theirs was under way; `waits` how many hand-overs had to make compute wait.
    """

    offloads: int = 0
    releases: int = 0
    reloads: int = 0
    readies: int = 0
    offloaded_nbytes: int = 0
    reloaded_nbytes: int = 0
    slots: int = 0
    abandoned: int = 0
    waits: int = 0
    foreign_reloads: int = 0
    in_flight_nbytes: int = 0
    in_flight_peak_nbytes: int = 0
    host_nbytes: int = 0
    host_peak_nbytes: int = 0
    pinned_nbytes: int = 0
    pinned_peak_nbytes: int = 0
    pageable_nbytes: int = 0
    pageable_fallbacks: int = 0
