"""Sizes as people write them ("12GiB", "300MB", 4096) and as programs need them (bytes)."""

from __future__ import annotations

import math
import operator
import re
from decimal import Decimal

from graphoffload.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TEXT = re.compile(r"\s*(?P<sign>[+-]?)\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-z]*)\s*")
_HOW = 'give bytes as an int, or a string such as "12GiB", "5.5GB" or "300MB"'


def parse_nbytes(size: object, *, what: str = "size", error: type[UsageError] = UsageError) -> int:
    """Read a size in bytes from an int, a whole float, or a string with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB).

    Law: `parse_nbytes(n) == n` for every int n >= 0. A fraction of a byte is dropped. `what` names the argument in messages.
    Raises `error` for NaN, infinite, negative and boolean sizes, unknown units and other types.
    """
    if isinstance(size, str):
        return _parse_text(size, what=what, error=error)
    if isinstance(size, bool):
        raise error(f"{what} is {size!r}, which is not a size: {_HOW}")
    if isinstance(size, float):
        if not math.isfinite(size):
            raise error(f"{what} is {size!r}, which is not a finite number of bytes: {_HOW}")
        if size != int(size):
            raise error(f"{what} is {size!r}, which is not a whole number of bytes: {_HOW}")
        number = int(size)
    else:
        try:
            number = operator.index(size)  # type: ignore[arg-type]  # the point is to ask
        except TypeError:
            raise error(f"{what} is a {type(size).__name__}: {_HOW}") from None
    if number < 0:
        raise error(f"{what} is {size!r}, and a size cannot be negative: {_HOW}")
    return number


def _parse_text(text: str, *, what: str, error: type[UsageError]) -> int:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise error(f"{what} is {text!r}, which cannot be read as a size: {_HOW}")
    unit = match["unit"].lower()
    if unit not in _UNITS:
        raise error(
            f"{what} is {text!r}, and {match['unit']!r} is no unit of memory: use B, kB, MB, GB, TB (powers of 1000) or "
            "KiB, MiB, GiB, TiB (powers of 1024)"
        )
    number = int(Decimal(match["number"]) * _UNITS[unit])
    if match["sign"] == "-" and number:
        raise error(f"{what} is {text!r}, and a size cannot be negative: {_HOW}")
    return number


def format_nbytes(nbytes: int | None) -> str:
    """Write a size for people, in decimal units with three or four digits: "117 MB", "5.5 GB"; "unknown" for None."""
    if nbytes is None:
        return "unknown"
    if abs(nbytes) < 1000:
        return f"{nbytes} B"
    scaled = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB"):
        scaled /= 1000
        # 999.95 would round up to "1000 kB"; the next unit says it better.
        if abs(scaled) < 999.95 or unit == "TB":
            break
    digits = f"{scaled:.1f}" if abs(scaled) >= 10 else f"{scaled:.2f}"
    return f"{digits.rstrip('0').rstrip('.')} {unit}"
