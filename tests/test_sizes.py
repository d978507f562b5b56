"""Sizes: what people write, what is refused, and what is printed."""

from __future__ import annotations

from typing import Any

import pytest

from graphoffload.errors import PolicyError, UsageError
from graphoffload.planning.sizes import format_nbytes, parse_nbytes


class Indexed:
    """Stand for integers that are not int, as arrays' elements are."""

    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        (2e9, 2_000_000_000),
        (Indexed(), 7),
        ("4096", 4096),
        ("12GiB", 12 * 2**30),
        ("5.5GB", 5_500_000_000),
        ("300MB", 300_000_000),
        (" 1.5 KiB ", 1536),
        ("2kb", 2000),
        (".5 tib", 2**39),
        ("1 TB", 10**12),
        ("7B", 7),
        ("+3B", 3),
        ("-0", 0),
        ("0.1GB", 100_000_000),
        ("1.9B", 1),
    ],
)
def test_sizes_are_read(size: Any, nbytes: int) -> None:
    assert parse_nbytes(size) == nbytes


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (True, "True, which is not a size"),
        (-1, "cannot be negative"),
        ("-1GB", "cannot be negative"),
        (float("nan"), "nan, which is not a finite number"),
        (float("inf"), "inf, which is not a finite number"),
        (float("-inf"), "not a finite number"),
        (0.5, "not a whole number of bytes"),
        ("nan", "cannot be read as a size"),
        ("", "cannot be read as a size"),
        ("GB", "cannot be read as a size"),
        ("1e9", "cannot be read as a size"),
        ("12 GiB please", "cannot be read as a size"),
        ("12 gigs", "'gigs' is no unit of memory"),
        ("12Gb/s", "cannot be read as a size"),
        (None, "is a NoneType"),
        ([1], "is a list"),
    ],
)
def test_what_is_no_size_is_refused_with_the_argument_named(size: Any, message: str) -> None:
    with pytest.raises(UsageError, match="budget is") as caught:
        parse_nbytes(size, what="budget")
    assert message in str(caught.value)


def test_the_error_is_of_the_kind_that_was_asked_for() -> None:
    with pytest.raises(PolicyError):
        parse_nbytes("12 gigs", error=PolicyError)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (117_440_512, "117.4 MB"),
        (5_500_000_000, "5.5 GB"),
        (999_999, "1 MB"),
        (10**15, "1000 TB"),
        (-2000, "-2 kB"),
    ],
)
def test_sizes_are_printed_for_people(nbytes: int | None, text: str) -> None:
    assert format_nbytes(nbytes) == text
