"""Options and profiles of the whole test suite."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Capturing and splitting a graph takes long and a varying time, so examples have no deadline. "ci" draws the same examples
# every time, so that a red run can be had again; "long" looks further.
settings.register_profile(
    "ci",
    max_examples=25,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("ci"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        default=False,
        help="write the golden files of tests/golden anew from what the library does now, instead of comparing",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    absent = pytest.mark.skip(reason="this machine has no accelerator")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(absent)
