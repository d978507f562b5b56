"""What the runtime needs of a device, on an accelerator that is played by recorded calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphoffload import errors
from graphoffload.errors import MachineError, UsageError
from graphoffload.ordering.events import COMPUTE, D2H, H2D
from graphoffload.runtime import device as device_module
from graphoffload.runtime import measure
from graphoffload.runtime.chunks import PinnedChunks, RegisteredChunks
from graphoffload.runtime.device import AcceleratorDevice, extent_nbytes, flat_bytes, with_lazy_bits

calls: list[tuple[Any, ...]] = []


class Stream:
    """Stand in for torch.Stream."""

    made = 0

    def __init__(self, device: torch.device | None = None, name: str = "") -> None:
        self.name = name or ("d2h", "h2d")[Stream.made % 2]
        Stream.made += 1

    def wait_event(self, event: Event) -> None:
        calls.append(("wait", self.name, event.on))

    def synchronize(self) -> None:
        calls.append(("synchronize", self.name))

    def __enter__(self) -> Stream:
        calls.append(("enter", self.name))
        return self

    def __exit__(self, *args: object) -> None:
        calls.append(("exit", self.name))


class Event:
    """Stand in for torch.Event."""

    def __init__(self, device: torch.device | None = None, *, enable_timing: bool = False) -> None:
        self.on = ""

    def record(self, stream: Stream) -> None:
        self.on = stream.name

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        calls.append(("host waits", self.on))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> AcceleratorDevice:
    calls.clear()
    Stream.made = 0
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(name="user 1"))
    return AcceleratorDevice(torch.device("cpu"))


def test_the_compute_stream_is_looked_up_at_every_use(
    played: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert played.record(COMPUTE).on == "user 1"
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(name="user 2"))
    assert played.record(COMPUTE).on == "user 2"
    played.wait(COMPUTE, played.record(D2H))
    assert calls == [("wait", "user 2", "d2h")]
    played.wait_on(Stream(name="user 1"), played.record(H2D))
    assert calls[1:] == [("wait", "user 1", "h2d")]


def test_copies_run_on_their_own_stream_after_the_hook_and_in_pieces(played: AcceleratorDevice) -> None:
    seen: list[tuple[str, list[tuple[Any, ...]]]] = []
    played.before_copy = lambda stream: seen.append((stream, list(calls)))
    dest, src = torch.zeros(10, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8)
    played.copy(H2D, dest, src, cuts=(3, 7))
    assert seen == [("h2d", [("enter", "h2d")])]
    assert calls == [("enter", "h2d"), ("exit", "h2d")]
    assert torch.equal(dest, src)


def test_the_stream_is_left_when_the_copy_raises(played: AcceleratorDevice) -> None:
    with pytest.raises(RuntimeError):
        played.copy(D2H, torch.zeros(3), torch.zeros(2))
    assert calls[-1] == ("exit", "d2h")


def test_the_host_waits_for_one_token_or_for_both_copy_streams(played: AcceleratorDevice) -> None:
    token = played.record(D2H)
    assert played.done(token)
    played.synchronize(token)
    played.synchronize_copies()
    assert calls == [("host waits", "d2h"), ("synchronize", "d2h"), ("synchronize", "h2d")]


def test_memory_is_not_spoiled_on_a_real_device(played: AcceleratorDevice) -> None:
    tensor = torch.ones(4)
    played.spoil(tensor)
    assert tensor.tolist() == [1] * 4


def test_capture_is_refused_on_cuda_only(played: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    played.refuse_capture()
    played.device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="CUDA graph capture"):
        played.refuse_capture()


class Cudart:
    """Stand in for torch.cuda.cudart()."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # the driver's name
        calls.append(("register", nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        calls.append(("unregister",))
        return self.code


@pytest.mark.parametrize(("code", "works"), [(0, True), (2, False)])
def test_cuda_memory_is_registered_exactly_and_a_failure_is_forgotten(
    code: int, works: bool, played: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.device = torch.device("cuda:0")
    monkeypatch.setattr(device_module, "cudart", lambda: Cudart(code))
    monkeypatch.setattr(played, "_forget_last_error", lambda: calls.append(("forget",)))
    chunks = played.chunks()
    assert isinstance(chunks, RegisteredChunks)
    chunk = chunks.grow(5000, after=None)
    assert (chunk is not None) is works
    assert calls == ([("register", 8192, 1)] if works else [("register", 8192, 1), ("forget",)])
    if chunk is not None:
        chunks.shrink(chunk)
        assert calls[-1] == ("unregister",)


def test_other_accelerators_take_what_torch_pins(played: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = played.chunks()
    assert isinstance(chunks, PinnedChunks)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device, pin_memory: empty(n, dtype=dtype, device=device))
    chunk = chunks.grow(5000, after=None)
    assert chunk is not None
    assert chunk.nbytes == 8192
    assert chunk.owner is not None


def test_torch_failing_to_pin_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(torch, "empty", refuse)
    assert PinnedChunks().grow(5000, after=None) is None


# Extents


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.zeros(4, 8), 128),
        (torch.zeros(4, 8).t(), 128),
        (torch.zeros(4, 8)[:, :3], 4 * (3 * 8 + 3)),
        (torch.zeros(4, 1).expand(4, 8), 16),
        (torch.zeros(()), 4),
        (torch.zeros(0, 5), 0),
        (torch.zeros(3, dtype=torch.complex128), 48),
        (torch.zeros(5, dtype=torch.bool), 5),
    ],
)
def test_the_extent_runs_from_the_first_to_the_last_element(tensor: torch.Tensor, nbytes: int) -> None:
    assert extent_nbytes(tensor) == nbytes
    assert flat_bytes(tensor).shape == (nbytes,)


def test_flat_bytes_alias_the_tensor() -> None:
    whole = torch.zeros(4, 8)
    part = whole[1:, 2:]
    flat_bytes(part).fill_(0xFF)
    assert part.isnan().all()
    assert not whole[0].isnan().any()
    assert whole.flatten()[10:].isnan().all(), "gaps inside the extent included"


def test_lazy_bits_go_along() -> None:
    values = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(with_lazy_bits(values, like=values.conj()), values.conj())
    negative = values.conj().imag
    plain = torch.randn(4)
    assert torch.equal(with_lazy_bits(plain, like=negative), -plain)


# Measuring


def test_measuring_without_an_accelerator_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(MachineError, match=r'Machine.named\("h200"\)'):
        measure.measure_machine()
    with pytest.raises(errors.UsageError):
        measure.measure_machine("cuda")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", "not an accelerator"),
        ("nonsense", "is not a device"),
        (3.5, "is not a device"),
        ("cuda:7", "has 1 of them"),
    ],
)
def test_measuring_what_is_not_there_is_refused(device: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    with pytest.raises(MachineError, match=message):
        measure.measure_machine(device)
