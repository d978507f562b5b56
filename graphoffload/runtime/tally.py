"""Count what one `saved_tensors` object did."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphoffload.errors import GraphOffloadWarning
from graphoffload.runtime.room import Room
from graphoffload.runtime.stats import SavedTensorsStats


@dataclass(eq=False)
class Tally:
    """Hold the running counts; `kept` in bytes by reason, each storage once an episode."""

    packed: int = 0
    moved: int = 0
    moved_nbytes: int = 0
    reloads: int = 0
    reloaded_nbytes: int = 0
    compiled_nbytes: int = 0
    hits: int = 0
    misses: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def keep(self, why: str, nbytes: int) -> None:
        """Count a storage that stays."""
        self.kept[why] = self.kept.get(why, 0) + nbytes

    def move(self, nbytes: int, *, is_compiled: bool) -> None:
        """Count a storage that leaves, with the value that was packed."""
        self.packed += 1
        self.moved += 1
        self.moved_nbytes += nbytes
        self.compiled_nbytes += nbytes if is_compiled else 0

    def reload(self, nbytes: int) -> None:
        """Count a copy back."""
        self.reloads += 1
        self.reloaded_nbytes += nbytes

    def note(self, text: str) -> None:
        """Keep a note for the report, and warn of it, once."""
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(f"graphoffload: {text}", GraphOffloadWarning, stacklevel=2)

    def stats(self, rooms: Sequence[Room]) -> SavedTensorsStats:
        """Return the counts, with those of the devices that were used."""
        notes = list(self.notes)
        if self.compiled_nbytes:
            notes.append(
                "compiled regions saved some of this: all values of a region come back together when its backward begins, so "
                'memory does not fall inside it; torch.compile(..., backend="graphoffload") moves each in its time'
            )
        counts = [room.runtime.stats() for room in rooms]
        exposed = [one.exposed_seconds for one in counts if one.exposed_seconds is not None]
        return SavedTensorsStats(
            packed=self.packed,
            moved=self.moved,
            moved_nbytes=self.moved_nbytes,
            reloads=self.reloads,
            reloaded_nbytes=self.reloaded_nbytes,
            kept_nbytes_by_reason=dict(self.kept),
            compiled_nbytes=self.compiled_nbytes,
            prefetch_hits=self.hits,
            prefetch_misses=self.misses,
            exposed_seconds=sum(exposed) if exposed else None,
            in_flight_peak_nbytes=sum(one.in_flight_peak_nbytes for one in counts),
            ahead_peak_nbytes=sum(room.ahead_peak_nbytes for room in rooms),
            host_nbytes=sum(one.host_nbytes for one in counts),
            host_peak_nbytes=sum(one.host_peak_nbytes for one in counts),
            pinned_nbytes=sum(one.pinned_nbytes for one in counts),
            pinned_peak_nbytes=sum(one.pinned_peak_nbytes for one in counts),
            notes=tuple(notes),
        )
