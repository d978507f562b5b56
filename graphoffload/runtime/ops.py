"""The four operators that stand in rewritten graphs, and the way from a device to its runtime.

Schemas say what compilers need to keep order and lifetimes: `release` and `ready` declare that they write their first
argument, so nothing that reads it moves across them; the tensor that a copy uses is an argument to the end of the copy.
`release` only reads its source: were it declared written, a compiler would have to compute everything that still reads the
source before it, which changes what it fuses and so the numbers. `last` says that nothing reads the source afterwards; a
compiler that may read it later (see lowering.py) passes False, and then the virtual device does not spoil it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from graphoffload.runtime.device import AcceleratorDevice, with_lazy_bits
from graphoffload.runtime.transfer import Runtime, runtime_of
from graphoffload.runtime.virtual import VirtualDevice

_RUNTIMES: weakref.WeakValueDictionary[torch.device, Runtime] = weakref.WeakValueDictionary()
_RUNTIMES_LOCK = threading.Lock()  # two threads must not each make a runtime for one device

# A compiler may hand over any layout: what `offload` has to read is settled in lowering.py, and a host tensor or a reload
# keeps the layout that it was made with.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_LIBRARY = torch.library.Library("graphoffload", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("offload(Tensor src, str storage) -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]
_LIBRARY.define("release(Tensor(a!) host, Tensor src, bool wait, bool last=True) -> ()", tags=_TAGS)  # type: ignore[no-untyped-call]
_LIBRARY.define("reload(Tensor host, Device device) -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]
_LIBRARY.define("ready(Tensor(a!) dest, Tensor host) -> ()", tags=_TAGS)  # type: ignore[no-untyped-call]

OFFLOAD = torch.ops.graphoffload.offload.default
RELEASE = torch.ops.graphoffload.release.default
RELOAD = torch.ops.graphoffload.reload.default
READY = torch.ops.graphoffload.ready.default


def runtime_for(device: torch.device | str) -> Runtime:
    """Return the runtime of a device, made at the first call.

    The caller keeps it: only weak references are kept here, and with the last strong one its streams and pinned memory go.
    On a CPU without an installed virtual device the copies simply run at once.
    """
    runtime = _RUNTIMES.get(device)  # type: ignore[arg-type]  # a name is found below
    if runtime is None:
        key = _indexed(torch.device(device))
        with _RUNTIMES_LOCK:
            runtime = _RUNTIMES.get(key)
            if runtime is None:
                runtime = Runtime(VirtualDevice(late=False) if key.type == "cpu" else AcceleratorDevice(key))
                _RUNTIMES[key] = runtime
    return runtime


@contextlib.contextmanager
def installed(device: torch.device | str, runtime: Runtime) -> Iterator[Runtime]:
    """Make `runtime` the one of `device` inside the block; slots made in it keep it beyond."""
    key = _indexed(torch.device(device))
    before = _RUNTIMES.get(key)
    _RUNTIMES[key] = runtime
    try:
        yield runtime
    finally:
        if before is None:
            _RUNTIMES.pop(key, None)
        else:
            _RUNTIMES[key] = before


def virtual_runtime() -> Runtime | None:
    """Return the runtime of the virtual device that is installed; None if there is none."""
    runtime = _RUNTIMES.get(torch.device("cpu"))
    return runtime if runtime is not None and getattr(runtime.device, "late", False) else None


def on_device(device: torch.device | str) -> bool:
    """Say whether tensors on `device` take device memory: on an accelerator, or on a CPU with a virtual device installed."""
    device = torch.device(device)
    if device.type == "cpu":
        return virtual_runtime() is not None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    if str(device) == device.type:  # no index
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _offload(src: torch.Tensor, storage: str) -> torch.Tensor:
    return runtime_for(src.device).offload(src, storage)


def _release(host: torch.Tensor, src: torch.Tensor, wait: bool, last: bool = True) -> None:
    # The slot knows its runtime, even after another was installed for the device.
    (runtime_of(host) or runtime_for(src.device)).release(host, wait=wait, last=last)


def _reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    runtime = runtime_of(host)
    if runtime is None or runtime.device.device != _indexed(device):
        runtime = runtime_for(device)
    return runtime.reload(host)


def _ready(dest: torch.Tensor, host: torch.Tensor) -> None:
    runtime = runtime_of(host)
    if runtime is not None and runtime.device.device == dest.device:
        runtime.ready(dest, host)


def _fake_offload(src: torch.Tensor, _storage: str) -> torch.Tensor:
    return with_lazy_bits(torch.empty_strided(src.size(), src.stride(), dtype=src.dtype, device="cpu"), like=src)


def _fake_reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return with_lazy_bits(torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device), like=host)


_LIBRARY.impl("offload", _offload, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("release", _release, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("reload", _reload, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("ready", _ready, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
for _name in ("offload", "release", "reload", "ready"):
    # Bytes move as they are, and the lazy bits go along. Rewritten graphs lie below autograd: nothing is to be recorded.
    for _key in ("Conjugate", "Negative", "Autograd"):
        _LIBRARY.impl(_name, torch.library.fallthrough_kernel, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("graphoffload::offload", _fake_offload, lib=_LIBRARY)
torch.library.register_fake("graphoffload::release", lambda host, src, wait, last=True: None, lib=_LIBRARY)
torch.library.register_fake("graphoffload::reload", _fake_reload, lib=_LIBRARY)
torch.library.register_fake("graphoffload::ready", lambda dest, host: None, lib=_LIBRARY)
