"""A plan as text for people: one row a saved value, and the totals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphoffload.planning.plan import Action, Decision, Plan, Transfer
from graphoffload.planning.sizes import format_nbytes
from graphoffload.planning.values import Size, Storage, Value

COLUMNS = (
    "value",
    "module",
    "operator",
    "source",
    "shape",
    "dtype",
    "bytes",
    "action",
    "leaves",
    "released",
    "back",
    "reason",
)


def plan_table(plan: Plan, *, biggest: int | None = None) -> str:
    """Print one row a saved value, the `biggest` storages first when a number is given, else in order of birth."""
    storages: Iterable[Storage] = plan.facts.storages
    if biggest is not None:
        storages = sorted(plan.facts.storages, key=lambda one: (-(one.nbytes or 0), one.birth))[:biggest]
    values = plan.facts.value_by_name
    decisions = {decision.value: decision for decision in plan.decisions}
    transfers = {transfer.storage: transfer for transfer in plan.transfers}
    rows = [
        _row(values[name], decisions[name], transfers.get(storage.name), first=index == 0)
        for storage in storages
        for index, name in enumerate(storage.members)
    ]
    return align([COLUMNS, *rows])


def plan_totals(plan: Plan) -> str:
    """Print the totals and predictions of a plan, with and without it."""
    saved = plan.kept_nbytes + plan.offloaded_nbytes
    lines = [
        f"saved for backward   {format_nbytes(saved)} in {len(plan.facts.storages)} storages ({len(plan.facts.values)} values)",
        f"  kept               {format_nbytes(plan.kept_nbytes)}",
        f"  offloaded          {format_nbytes(plan.offloaded_nbytes)} in {len(plan.transfers)} transfers",
        f"recomputed           {format_nbytes(plan.recomputed_nbytes)}",
        f"host memory          {format_nbytes(plan.host_peak_nbytes)}",
        f"predicted peak       {format_nbytes(plan.predicted_peak_nbytes)}"
        f" (without the plan {format_nbytes(plan.predicted_peak_nbytes_without)})",
        f"predicted seconds    {format_seconds(plan.predicted_seconds)}"
        f" (without the plan {format_seconds(plan.predicted_seconds_without)};"
        f" {format_seconds(plan.exposed_seconds)} of waiting for copies)",
    ]
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """Print the whole plan: every saved value, then the totals."""
    return f"{plan_table(plan)}\n\n{plan_totals(plan)}"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out in columns, left aligned, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def format_seconds(seconds: float) -> str:
    """Write seconds in the unit that reads best."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"


def _row(value: Value, decision: Decision, transfer: Transfer | None, *, first: bool) -> tuple[str, ...]:
    # Bytes are those of the storage and stand at its first value only: a column that is summed must count storages once.
    nbytes = (
        "(shared)" if not first else "unknown" if value.storage_nbytes is None else format_nbytes(value.storage_nbytes)
    )
    times = ("", "", "")
    if transfer is not None and decision.action is Action.OFFLOAD:
        released = (
            f"{format_seconds(transfer.released)} after {transfer.release_after}" if transfer.wait else "in flight"
        )
        times = (
            f"{format_seconds(transfer.offload_start)} after {transfer.offload_after}",
            released,
            f"{format_seconds(transfer.reload_start)} before {transfer.reload_before}",
        )
    return (
        value.label or value.name,
        value.module_path,
        value.op,
        value.source,
        _shape(value.shape),
        value.dtype,
        nbytes,
        decision.action.value,
        *times,
        decision.reason,
    )


def _shape(shape: tuple[Size, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
