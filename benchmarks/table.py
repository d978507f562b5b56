"""Write docs/measured.md from the results files: `python benchmarks/table.py`. No number on that page is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GB = 10**9
HEADER = """# Measured

Written by `benchmarks/table.py` from the files in `benchmarks/results/`; `python benchmarks/w1_compiled.py` on a machine with a
GPU makes such a file. The workload is a Llama of 8 layers (hidden 4096, MLP 14336, 32 heads, vocabulary 32000) in bf16 on
2 x 8192 tokens, forward and backward without an optimizer; its head is outside the compiled model and never sets the peak.
*Peak* is the most device memory allocated, parameters and gradients included. *First step* is compilation from cold caches,
pinning, and the step. Rows of one table are of one run.
"""


def main() -> None:
    """Write the page."""
    parts = [HEADER]
    for path in sorted((ROOT / "benchmarks" / "results").glob("w1-compiled-*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        timed = [row for row in rows if "step_seconds" in row]
        compared = [row for row in rows if "comparison" in row]
        date = path.name.removeprefix("w1-compiled-")[:10]
        if timed:
            parts += [
                f"## Run {rows[0]['run']}, {date}, {timed[0]['device']}, torch {timed[0]['torch']}\n",
                _timed(timed),
            ]
            parts += [_link(row["machine"], timed) for row in rows if "machine" in row]
        if compared:
            parts += [f"## Run {rows[0]['run']}, {date}: to the bit\n", _compared(compared)]
    (ROOT / "docs" / "measured.md").write_text("\n".join(parts).rstrip() + "\n")


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
    for row in rows:
        if len(row["step_seconds_all"]) >= 100:
            first, last = row["reserved_first_last"]
            lines.append(
                f"\n{row['variant']}: reserved memory {first} bytes after the first and {last} after the last step, "
                f"allocated {row['allocated_first_last'][0]} and {row['allocated_first_last'][1]}, "
                f"pinned {row['host_first_last'][0]} and {row['host_first_last'][1]}; the host ran ahead of the device."
            )
    return "\n".join(lines) + "\n"


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
