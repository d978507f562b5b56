"""The four operators: exact fakes, right schemas, and the way from a device to its runtime."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphoffload import testing
from graphoffload.runtime import ops
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.runtime.transfer import Runtime
from graphoffload.runtime.virtual import VirtualDevice

CPU = torch.device("cpu")


def layouts() -> dict[str, torch.Tensor]:
    """Name one tensor for each kind of layout and dtype that may be saved."""
    torch.manual_seed(0)
    whole = torch.randn(6, 8)
    return {
        "dense": whole,
        "transposed": whole.t(),
        "sliced": whole[:, 2:5],
        "offset": whole[3:],
        "strided": whole[::2, ::3],
        "expanded": torch.randn(6, 1).expand(6, 5),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(7),
        "bfloat16": torch.randn(5).bfloat16(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
    }


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor


def round_trip(src: torch.Tensor, *, wait: bool = True) -> torch.Tensor:
    host = OFFLOAD(src, "s")
    RELEASE(host, src, wait)
    dest = RELOAD(host, CPU)
    READY(dest, host)
    return dest


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("name", sorted(layouts()))
def test_a_round_trip_keeps_values_and_layout(name: str, virtual: bool, wait: bool) -> None:
    src = layouts()[name]
    expected = comparable(src).resolve_conj().resolve_neg().clone()
    if virtual:
        with testing.virtual_device() as device:
            back = round_trip(src, wait=wait)
        testing.check_log(device)
    else:
        back = round_trip(src, wait=wait)
    assert back.dtype == src.dtype
    assert (back.is_conj(), back.is_neg()) == (src.is_conj(), src.is_neg())
    assert (back.size(), back.stride(), back.storage_offset()) == (src.size(), src.stride(), 0)
    assert torch.equal(comparable(back), expected)


@pytest.mark.parametrize("name", sorted(layouts()))
def test_the_fakes_are_exact(name: str) -> None:
    src = layouts()[name]
    host = OFFLOAD(src, "s")
    RELEASE(host, src, True)
    with FakeTensorMode() as mode:
        fake_src, fake_host = mode.from_tensor(src), mode.from_tensor(host)
        fakes = OFFLOAD(fake_src, "s"), RELOAD(fake_host, CPU)
        assert RELEASE(fake_host, fake_src, True) is None
        assert READY(fake_host, fake_host) is None
    for fake, real in zip(fakes, (host, RELOAD(host, CPU)), strict=True):
        for what in ("size", "stride", "storage_offset", "is_conj", "is_neg"):
            assert getattr(fake, what)() == getattr(real, what)(), what
        assert (fake.dtype, fake.device) == (real.dtype, real.device)
        assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


def test_the_fake_of_offload_is_on_the_cpu_and_that_of_reload_on_the_device() -> None:
    with FakeTensorMode():
        src = torch.empty_strided((4, 3), (1, 4), device="cuda")
        host = OFFLOAD(src, "s")
        dest = RELOAD(host, torch.device("cuda:0"))
    assert host.device == CPU
    assert dest.device == torch.device("cuda:0")
    assert host.stride() == dest.stride() == (1, 4)


# float8: opcheck compares by arithmetic that torch does not have for it.
@pytest.mark.parametrize("name", sorted(layouts().keys() - {"float8"}))
def test_opcheck_passes(name: str) -> None:
    src = layouts()[name]
    host = OFFLOAD(src, "s")
    torch.library.opcheck(OFFLOAD, (src, "s"))
    RELEASE(host, src, True)
    torch.library.opcheck(RELEASE, (host, src, True))
    torch.library.opcheck(RELEASE, (host, src, False))
    torch.library.opcheck(RELOAD, (host, CPU))
    torch.library.opcheck(READY, (RELOAD(host, CPU), host))


def test_the_schemas_declare_what_pins_order_and_lifetime() -> None:
    assert str(RELEASE._schema) == "graphoffload::release(Tensor(a!) host, Tensor src, bool wait, bool last=True) -> ()"
    assert str(READY._schema) == "graphoffload::ready(Tensor(a!) dest, Tensor host) -> ()"
    assert str(OFFLOAD._schema) == "graphoffload::offload(Tensor src, str storage) -> Tensor"
    assert str(RELOAD._schema) == "graphoffload::reload(Tensor host, Device device) -> Tensor"
    for operator in (OFFLOAD, RELEASE, RELOAD, READY):
        assert torch.Tag.flexible_layout in operator.tags


def test_autograd_does_not_see_the_copies() -> None:
    src = torch.randn(4, requires_grad=True)
    host = OFFLOAD(src * 1, "s")
    assert not host.requires_grad
    RELEASE(host, src, True)
    dest = RELOAD(host, CPU)
    assert not dest.requires_grad


def test_a_device_has_one_runtime_for_as_long_as_somebody_keeps_it() -> None:
    runtime = ops.runtime_for("cpu")
    assert ops.runtime_for(CPU) is runtime
    gone = weakref.ref(runtime)
    del runtime
    gc.collect()
    assert gone() is None


def test_a_live_slot_keeps_its_runtime() -> None:
    host = OFFLOAD(torch.randn(8), "s")
    gc.collect()
    runtime = ops.runtime_for(CPU)
    assert runtime.stats().slots == 1
    gone = weakref.ref(runtime)
    del runtime, host
    gc.collect()
    assert gone() is None


def test_only_an_installed_virtual_device_makes_the_cpu_a_device() -> None:
    assert not ops.on_device("cpu")
    with testing.virtual_device() as outer:
        assert ops.on_device("cpu")
        assert ops.runtime_for("cpu") is outer.runtime
        with testing.virtual_device() as inner:
            assert ops.runtime_for("cpu") is inner.runtime
        assert ops.runtime_for("cpu") is outer.runtime
    assert not ops.on_device("cpu")


def test_a_plain_runtime_on_the_cpu_is_not_a_device() -> None:
    runtime = ops.runtime_for("cpu")
    assert not ops.on_device("cpu")
    assert runtime.log is None


def test_a_device_that_this_machine_does_not_have_is_not_a_device() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert not ops.on_device("cuda:0")


def test_a_slot_comes_back_through_the_runtime_that_made_it() -> None:
    src = torch.randn(8)
    expected = src.clone()
    with testing.virtual_device() as first:
        host = OFFLOAD(src, "s")
        RELEASE(host, src, True)
        with ops.installed("cpu", Runtime(VirtualDevice())):
            dest = RELOAD(host, CPU)
            READY(dest, host)
    assert torch.equal(dest, expected)
    assert first.stats().readies == 1


def test_installing_survives_an_exception() -> None:
    with pytest.raises(KeyError), testing.virtual_device():
        raise KeyError
    assert not ops.on_device("cpu")
