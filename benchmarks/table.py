"""Write docs/measured.md from the results files: `python benchmarks/table.py`. No number on that page is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eager_targets import targets

ROOT = Path(__file__).resolve().parents[1]
GB = 10**9
HEADER = """# Measured

Written by `benchmarks/table.py` from the files in `benchmarks/results/`; `python benchmarks/w1_compiled.py` on a machine with a
GPU makes such a file. The workload is a Llama of 8 layers (hidden 4096, MLP 14336, 32 heads, vocabulary 32000) in bf16 on
2 x 8192 tokens, forward and backward without an optimizer; its head is outside the compiled model and never sets the peak.
*Peak* is the most device memory allocated, parameters and gradients included. *First step* is compilation from cold caches,
pinning, and the step. Rows of one table are of one run.
"""
EAGER_HEADER = """## Eager

`python benchmarks/w1_eager.py` makes these rows. W1 is the workload above, not compiled. W2 is LoRA (r = 16 on all
projections) on 32 layers of the same shape, 1 x 32768 tokens, each layer checkpointed. Peaks are those after the first steps,
in which graphoffload learns the program; *waited* is the time a step that compute stood still for copies, by the device's
clock. TRL and torchtune are their `OffloadActivations`, with streams and otherwise as they come.
"""


def main() -> None:
    """Write the page."""
    results = ROOT / "benchmarks" / "results"
    parts = [HEADER]
    for path in sorted(results.glob("w1-compiled-*.jsonl")):
        parts += _compiled(_rows(path), path.name.removeprefix("w1-compiled-")[:10])
    eager = sorted(results.glob("w1-eager-*.jsonl"))
    if eager:
        parts.append(EAGER_HEADER)
    for path in eager:
        parts += _eager(_rows(path), path.name.removeprefix("w1-eager-")[:10])
    (ROOT / "docs" / "measured.md").write_text("\n".join(parts).rstrip() + "\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _compiled(rows: list[dict[str, Any]], date: str) -> list[str]:
    """Write what one run of w1_compiled.py measured."""
    parts = []
    timed = [row for row in rows if "step_seconds" in row]
    compared = [row for row in rows if "comparison" in row]
    if timed:
        parts += [f"## Run {rows[0]['run']}, {date}, {timed[0]['device']}, torch {timed[0]['torch']}\n", _timed(timed)]
        parts += [_link(row["machine"], timed) for row in rows if "machine" in row]
    if compared:
        parts += [f"## Run {rows[0]['run']}, {date}: to the bit\n", _compared(compared)]
    return parts


def _eager(rows: list[dict[str, Any]], date: str) -> list[str]:
    """Write what one run of w1_eager.py measured, and what of it must be reached."""
    rows = [row for row in rows if "error" not in row]
    cost = [row for row in rows if "cost_seconds_per_tensor" in row]
    timed = [row for row in rows if "step_seconds" in row and row not in cost]
    compared = [row for row in rows if "comparison" in row]
    about = next((f", {row['device']}, torch {row['torch']}" for row in rows if "torch" in row), "")
    parts = [f"### Run {rows[0]['run']}, {date}{about}\n"] if rows else []
    parts += [_eager_timed(timed)] if timed else []
    parts += [_compared(compared)] if compared else []
    parts += [_cost(cost)] if cost else []
    found = targets(rows)
    if found:
        lines = ["| | must reach | reached |", "|---|---|---|"]
        lines += [f"| {one.what} | {one.must} | {one.have}{'' if one.met else ' (missed)'} |" for one in found]
        parts.append("\n".join(lines) + "\n")
    return parts


def _eager_timed(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | | step | peak | pinned | moved a step | waited a step | first step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        moved = row.get("moved_nbytes")
        waited = row.get("exposed_seconds")
        lines.append(
            f"| {row['workload']} | {row['variant']} | {row['step_seconds'] * 1e3:.1f} ms | {_gb(row['peak_nbytes'])} | "
            f"{_gb(row['host_nbytes']) if row['host_nbytes'] else ''} | "
            f"{_gb(moved) + ' in ' + str(row['transfers']) if moved else ''} | "
            f"{'' if waited is None else f'{waited * 1e3:.1f} ms'} | {row['first_step_seconds']:.1f} s |"
        )
    lines += [text for row in rows if (text := _flat(row))]
    return "\n".join(lines) + "\n"


def _cost(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"What a saved tensor costs the CPU, packed and unpacked once: {rows[0]['workload']}, "
        f"{rows[0]['packed']} saved tensors a step.\n",
        "| | step | over plain, a tensor |",
        "|---|---|---|",
    ]
    lines += [
        f"| {row['variant']} | {row['step_seconds'] * 1e3:.2f} ms | {row['cost_seconds_per_tensor'] * 1e6:.1f} µs |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _timed(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | step | peak | predicted peak | pinned | moved | first step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        moved = "moved_nbytes" in row
        lines.append(
            f"| {row['variant']} | {row['step_seconds'] * 1e3:.1f} ms | {row['peak_nbytes'] / GB:.2f} GB | "
            f"{_gb(row['predicted_peak_nbytes']) if moved else ''} | {_gb(row['host_nbytes']) if moved else ''} | "
            f"{_gb(row['moved_nbytes']) + ' in ' + str(row['transfers']) if moved else ''} | "
            f"{row['first_step_seconds']:.1f} s |"
        )
    lines += [text for row in rows if (text := _flat(row))]
    return "\n".join(lines) + "\n"


def _flat(row: dict[str, Any]) -> str:
    """Say whether memory grew over many steps; nothing for a row of few."""
    if len(row["step_seconds_all"]) < 100:
        return ""
    first, last = row["reserved_first_last"]
    return (
        f"\n{row['variant']}: reserved memory {first} bytes after the first and {last} after the last step, "
        f"allocated {row['allocated_first_last'][0]} and {row['allocated_first_last'][1]}, "
        f"pinned {row['host_first_last'][0]} and {row['host_first_last'][1]}; the host ran ahead of the device."
    )


def _link(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Compare "everything" with what the link allows: all bytes out, then all bytes back."""
    lines = []
    for row in rows:
        if "everything" in row["variant"]:
            nbytes, out, back = row["moved_nbytes"], machine["d2h_bytes_per_second"], machine["h2d_bytes_per_second"]
            bound = nbytes / out + nbytes / back
            lines.append(
                f"The link, measured in this run: {out / GB:.1f} GB/s out, {back / GB:.1f} GB/s back. {_gb(nbytes)} each way "
                f"take at least {bound * 1e3:.0f} ms; the step took {row['step_seconds'] / bound:.3f} times that."
            )
    return "\n".join(lines) + "\n"


def _compared(rows: list[dict[str, Any]]) -> str:
    lines = ["| comparison | steps | losses and all gradients |", "|---|---|---|"]
    lines += [f"| {row['comparison']} | {row['steps']} | {'equal' if row['equal'] else 'different'} |" for row in rows]
    return "\n".join(lines) + "\n"


def _gb(nbytes: int) -> str:
    return f"{nbytes / GB:.2f} GB"


if __name__ == "__main__":
    main()
