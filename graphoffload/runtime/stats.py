"""What a runtime counts, and what the eager path does."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphoffload.planning.sizes import format_nbytes


@dataclass(frozen=True)
class TransferStats:
    """Count what a runtime did since it was made. Bytes, except where a name says otherwise.

    `host_nbytes` is what slots hold now, `pinned_nbytes` what is pinned for them, `in_flight_nbytes` the sources whose
    release did not wait and that are still on the device. `slots` is how many slots are alive; `abandoned` how many went
    while a copy of theirs was under way; `waits` how many hand-overs had to make compute wait. `exposed_seconds` is how long
    compute stood still in waits for copies, by the device's clock, as far as they are over; None where there is no clock.
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
    exposed_seconds: float | None = None


@dataclass(frozen=True)
class SavedTensorsStats:
    """Count what a `saved_tensors` object did since it was made. Bytes, except where a name says otherwise.

    `packed` tensors were shown to it, `moved` storages were copied out, `reloads` copied back. `kept_nbytes_by_reason`
    counts each storage once a forward. `prefetch_hits` are values that were on the device, or on their way, when backward
    asked; `prefetch_misses` had to be started then. `compiled_nbytes` is what moved out of compiled regions.

    Of the devices used, whoever else uses them: `exposed_seconds`, the time that compute stood still for copies (None where
    there is no clock); `in_flight_peak_nbytes`, sources kept only for their copy out; `ahead_peak_nbytes`, reloads started
    before they were asked for; `host_*`, what slots hold; `pinned_*`, what is pinned for them. `notes` are for people.
    """

    packed: int = 0
    moved: int = 0
    moved_nbytes: int = 0
    reloads: int = 0
    reloaded_nbytes: int = 0
    kept_nbytes_by_reason: dict[str, int] = field(default_factory=dict)
    compiled_nbytes: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    exposed_seconds: float | None = None
    in_flight_peak_nbytes: int = 0
    ahead_peak_nbytes: int = 0
    host_nbytes: int = 0
    host_peak_nbytes: int = 0
    pinned_nbytes: int = 0
    pinned_peak_nbytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def packed_nbytes(self) -> int:
        """Count the bytes that were shown, each storage once a forward: those that moved and those that stayed."""
        return self.moved_nbytes + self.kept_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Count the bytes that stayed, over all reasons."""
        return sum(self.kept_nbytes_by_reason.values())

    def __str__(self) -> str:
        exposed = "no clock" if self.exposed_seconds is None else f"{self.exposed_seconds * 1e3:.1f} ms"
        lines = [
            f"packed    {self.packed} tensors",
            f"moved     {format_nbytes(self.moved_nbytes)} in {self.moved} storages; {self.reloads} reloads",
            f"kept      {format_nbytes(self.kept_nbytes)}",
            *(
                f"          {format_nbytes(nbytes)}: {why}"
                for why, nbytes in sorted(self.kept_nbytes_by_reason.items(), key=lambda item: (-item[1], item[0]))
            ),
            f"prefetch  {self.prefetch_hits} hits, {self.prefetch_misses} misses; waited for copies: {exposed}",
            f"peaks     in flight {format_nbytes(self.in_flight_peak_nbytes)}, ahead {format_nbytes(self.ahead_peak_nbytes)}, "
            f"on the host {format_nbytes(self.host_peak_nbytes)}, pinned {format_nbytes(self.pinned_peak_nbytes)}",
            *(f"note      {note}" for note in self.notes),
        ]
        return "\n".join(lines)
