"""Say what a test needs that a machine may lack, and skip it there with the reason."""

from __future__ import annotations

import os
import shutil

import pytest

needs_cpp_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name),
    reason="Inductor compiles C++ on the CPU, and this machine has no C++ compiler",
)
