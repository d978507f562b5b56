"""Say what the rows of an eager run must reach, and what they reach.

Each target is a ratio of two rows of the same run, found by their `role`, or a property of one row. One whose rows are not
there is not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GB = 10**9
KEPT, MOVED = "all kept", "all moved"


@dataclass(frozen=True)
class Target:
    """Name something to reach, the bound, what was measured, and whether that is within the bound."""

    what: str
    must: str
    have: str
    met: bool


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """Return the targets that the rows of one run can answer, in the order of the tables."""
    by_role = {row["role"]: row for row in rows if row.get("role") and "step_seconds" in row}
    return [
        *_steps(by_role),
        *_pinned(by_role),
        *_lora(by_role),
        *_flat(by_role),
        *_equal([row for row in rows if "comparison" in row]),
        *_cost({row["variant"]: row for row in rows if "cost_seconds_per_tensor" in row}),
    ]


def _steps(by_role: dict[str, dict[str, Any]]) -> Iterator[Target]:
    """Compare steps with plain eager, and with each peer at its peak or lower."""
    ours, plain = by_role.get("partial"), by_role.get("eager")
    if ours and plain:
        yield _ratio(f"W1, {_gb(ours['moved_nbytes'])} moved: step against plain", ours, plain, 1.02)
    for role, peer, name, bound in (
        ("at_trl", "trl", "TRL", 0.70),
        ("everything", "torchtune", "torchtune", 0.75),
        ("tight", "torchtune", "torchtune", 0.75),
    ):
        ours, other = by_role.get(role), by_role.get(peer)
        if ours and other:
            yield _peak(f"W1, {ours['variant']}: peak against {name}'s", ours, other)
            yield _ratio(f"W1, {ours['variant']}: step against {name}'s", ours, other, bound)


def _pinned(by_role: dict[str, dict[str, Any]]) -> Iterator[Target]:
    for role in ("partial", "at_trl", "everything", "w2_ours"):
        row = by_role.get(role)
        if row and row.get("host_used_peak_nbytes"):
            ratio = row["pinned_peak_nbytes"] / row["host_used_peak_nbytes"]
            what = f"{row['workload']}, {row['variant']}: pinned against the most in use"
            yield Target(what, "≤ 1.05", f"{ratio:.3f} ({_gb(row['pinned_peak_nbytes'])})", ratio <= 1.05)


def _lora(by_role: dict[str, dict[str, Any]]) -> Iterator[Target]:
    ours, trl, plain = by_role.get("w2_ours"), by_role.get("w2_trl"), by_role.get("w2_checkpoint")
    if ours and trl:
        yield _peak("W2, checkpointing + offload: peak against TRL's", ours, trl)
    if ours and plain:
        yield _ratio("W2, checkpointing + offload: step against checkpointing alone", ours, plain, 1.003)


def _flat(by_role: dict[str, dict[str, Any]]) -> Iterator[Target]:
    row = by_role.get("flat")
    if row:
        grown = {
            name: row[f"{name}_first_last"][1] - row[f"{name}_first_last"][0]
            for name in ("allocated", "reserved", "host")
        }
        have = ", ".join(f"{name} {nbytes:+d}" for name, nbytes in grown.items())
        steps = len(row["step_seconds_all"])
        yield Target(f"W1, {steps} steps run ahead: growth in bytes", "0", have, all(n <= 0 for n in grown.values()))


def _equal(rows: list[dict[str, Any]]) -> Iterator[Target]:
    if rows:
        wrong = [row["comparison"] for row in rows if not row["equal"]]
        have = f"all {len(rows)} comparisons" if not wrong else f"different: {'; '.join(wrong)}"
        yield Target("W1, losses and gradients against plain eager", "equal to the bit", have, not wrong)


def _cost(by_name: dict[str, dict[str, Any]]) -> Iterator[Target]:
    for what in (KEPT, MOVED):
        ours = [row for name, row in by_name.items() if name.startswith("graphoffload") and name.endswith(what)]
        peers = [row for name, row in by_name.items() if name.startswith("TRL") and name.endswith(what)]
        if ours and peers:
            mine, other = (row["cost_seconds_per_tensor"] * 1e6 for row in (ours[0], peers[0]))
            yield Target(
                f"CPU a small tensor, {what}, against TRL's", f"< {other:.1f} us", f"{mine:.1f} us", mine < other
            )


def _ratio(what: str, ours: dict[str, Any], other: dict[str, Any], bound: float) -> Target:
    ratio = ours["step_seconds"] / other["step_seconds"]
    times = f"{ours['step_seconds'] * 1e3:.1f} ms, {other['step_seconds'] * 1e3:.1f} ms"
    return Target(what, f"≤ {bound}", f"{ratio:.4f} ({times})", ratio <= bound)


def _peak(what: str, ours: dict[str, Any], other: dict[str, Any]) -> Target:
    mine, theirs = ours["peak_nbytes"], other["peak_nbytes"]
    return Target(what, f"≤ {_gb(theirs)}", _gb(mine), mine <= theirs)


def _gb(nbytes: int) -> str:
    return f"{nbytes / GB:.2f} GB"
