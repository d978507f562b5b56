"""Print events for people, with findings beside their lines."""

from __future__ import annotations

from collections.abc import Sequence

from graphoffload.ordering.events import Event, Finding, accesses

AROUND = 3
"""How many events to show before and after each one that a finding names."""


def show_event(event: Event) -> str:
    """Write one event on one line."""
    what = ", ".join(f"{verb} {resource}" for verb, resource in accesses(event)) if event.kind == "run" else event.token
    return f"{event.stream:8}{event.kind:8}{event.label:24}{what}".rstrip()


def show_findings(events: Sequence[Event], findings: Sequence[Finding], *, most: int = 20) -> str:
    """Print a window of `events` around each of the first `most` findings, each finding below its line.

    Left-out stretches show as a line of dots.
    """
    shown = findings[:most]
    named = [index for finding in shown for index in (finding.index, finding.other) if index is not None]
    window = sorted({near for i in named for near in range(max(0, i - AROUND), min(len(events), i + AROUND + 1))})
    lines: list[str] = []
    previous = -1
    for index in window:
        if index != previous + 1:
            lines.append("      ...")
        lines.append(f"{index:6}  {show_event(events[index])}")
        lines.extend(f"      ^ {finding.kind}: {finding.message}" for finding in shown if finding.index == index)
        previous = index
    if previous + 1 < len(events):
        lines.append("      ...")
    if len(findings) > most:
        lines.append(f"      and {len(findings) - most} more finding(s)")
    return "\n".join(lines)
