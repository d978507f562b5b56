"""What tests on an accelerator need: the device, and their skip, with its reason, where there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from graphoffload import testing
from graphoffload.runtime import ops
from graphoffload.runtime.device import AcceleratorDevice
from graphoffload.runtime.transfer import Runtime


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """Return the accelerator."""
    if not torch.accelerator.is_available():
        pytest.skip("this machine has no accelerator")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@pytest.fixture
def cuda(gpu: torch.device) -> torch.device:
    """Return the accelerator, which must be CUDA: the test delays a stream, or reads CUDA's own counts."""
    if gpu.type != "cuda":
        pytest.skip(f"needs CUDA; the accelerator here is {gpu.type}")
    return gpu


@pytest.fixture(autouse=True)
def quiet(gpu: torch.device) -> Iterator[None]:
    """Leave no work and no garbage of one test to the next."""
    torch.accelerator.synchronize(gpu)
    yield
    torch.accelerator.synchronize(gpu)
    gc.collect()


@pytest.fixture
def runtime(gpu: torch.device) -> Iterator[Runtime]:
    """Install a runtime of this test's own; what it did must be free of races.

    Without a clock nothing is seen to come back too soon to be worth moving. In programs as short as those of tests
    everything would be, and from the second step on nothing would move.
    """
    made = Runtime(AcceleratorDevice(gpu), recording=True)
    made.device.elapsed = lambda one, two: None  # type: ignore[method-assign]
    with ops.installed(gpu, made):
        yield made
        made.device.before_copy = None
        gc.collect()
        made.synchronize()
        testing.check_log(made)
