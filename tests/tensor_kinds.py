"""Tensors of every kind, for the tests of kinds: each maker takes nothing and returns a new tensor, the same every time."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

Maker = Callable[[], torch.Tensor]


def numbers(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return the same random numbers for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=dtype)


class Tagged(torch.Tensor):
    """A subclass in Python only, which carries what no copy of its bytes would."""


class Scaled(torch.Tensor):
    """Wrap integers with a scale, as quantised weights do; `zero` is None, as an unused part of such a wrapper is."""

    whole: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, whole.size(), dtype=scale.dtype, device=whole.device)
        made.whole, made.scale, made.zero = whole, scale, zero
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [name for name in ("whole", "scale", "zero") if getattr(self, name) is not None], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["whole"], inner["scale"], inner.get("zero"))

    def plain(self) -> torch.Tensor:
        """Return what it stands for."""
        zero = 0 if self.zero is None else self.zero
        return (self.whole - zero).to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].whole, args[0].scale, args[0].zero)
        args, kwargs = pytree.tree_map_only(Scaled, Scaled.plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def scaled() -> Scaled:
    """Return a wrapper around integers."""
    whole = torch.arange(64, dtype=torch.int8).reshape(8, 8) % 13
    return Scaled(whole, torch.tensor(0.25))


def quantized() -> torch.Tensor:
    """Return a tensor of torch's own quantised kind, which torch is about to give up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(numbers(4, 4), 0.1, 0, torch.qint8)


def sparse_rows() -> torch.Tensor:
    """Return a sparse matrix by its rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.relu(numbers(8, 8)).to_sparse_csr()


def strided_nested() -> torch.Tensor:
    """Return a nested tensor of the older layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([numbers(2, 3), numbers(4, 3)])


def jagged(*, requires_grad: bool = False) -> torch.Tensor:
    """Return rows of three lengths, eight wide."""
    parts = [numbers(length, 8, seed=length) for length in (3, 1, 4)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad)


def jagged_with_holes() -> torch.Tensor:
    """Return a jagged view of a padded tensor: its parts do not follow on one another."""
    return torch.nested.narrow(
        numbers(3, 5, 8), 1, torch.tensor([0, 1, 0]), torch.tensor([3, 1, 5]), layout=torch.jagged
    )


PLAIN: dict[str, Maker] = {
    "contiguous": lambda: numbers(4, 6),
    "parameter": lambda: torch.nn.Parameter(numbers(4, 6)),
    "buffer": lambda: torch.nn.Buffer(numbers(4, 6)),
    "scalar": lambda: numbers(1)[0],
    "zero-dimensional": lambda: torch.tensor(1.5),
    "empty": lambda: numbers(0, 5),
    "empty inside": lambda: numbers(4, 0, 3).transpose(0, 2),
    "empty slice": lambda: numbers(8, 4)[3:3],
    "expanded": lambda: numbers(4, 1).expand(4, 6),
    "expanded scalar": lambda: numbers(1)[0].expand(3, 5),
    "padded": lambda: torch.as_strided(numbers(64), (4, 6), (10, 1)),
    "padded at an offset": lambda: torch.as_strided(numbers(64), (4, 6), (10, 1), 3),
    "overlapping": lambda: torch.as_strided(numbers(12), (4, 6), (2, 1)),
    "sliced": lambda: numbers(8, 8)[1:7, 2:5],
    "stepped": lambda: numbers(9, 8)[::2, ::3],
    "transposed": lambda: numbers(6, 4).t(),
    "permuted": lambda: numbers(2, 3, 4, 5).permute(3, 0, 2, 1),
    "channels last": lambda: numbers(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "channels last sliced": lambda: numbers(2, 6, 4, 4).to(memory_format=torch.channels_last)[:, 1:4],
    "unfolded": lambda: numbers(16).unfold(0, 4, 2),
    "bool": lambda: numbers(4, 6) > 0,
    "uint8": lambda: torch.arange(24, dtype=torch.uint8).reshape(4, 6),
    "int64": lambda: torch.arange(24).reshape(4, 6).t(),
    "uint16": lambda: torch.arange(24).to(torch.uint16),
    "half": lambda: numbers(4, 6).half(),
    "bfloat16": lambda: numbers(4, 6).bfloat16(),
    "double": lambda: numbers(4, 6, dtype=torch.float64),
    "float8 e4m3": lambda: numbers(4, 6).to(torch.float8_e4m3fn),
    "float8 e5m2 sliced": lambda: numbers(8, 8).to(torch.float8_e5m2)[1:7, 2:5],
    "float8 e8m0": lambda: numbers(4, 6).to(torch.float8_e8m0fnu),
    "complex": lambda: numbers(4, 6, dtype=torch.complex64),
    "conjugate": lambda: numbers(4, 6, dtype=torch.complex64).conj(),
    "conjugate transposed": lambda: numbers(6, 4, dtype=torch.complex128).mH,
    "negative": lambda: numbers(4, 6, dtype=torch.complex64).conj().imag,
    "negative conjugate": lambda: torch._neg_view(numbers(4, 6, dtype=torch.complex64)).conj(),
    "real part": lambda: numbers(4, 6, dtype=torch.complex64).real,
}
"""Strided memory of torch's own types, which moves as it is."""

KEPT: dict[str, tuple[Maker, str]] = {
    "sparse": (lambda: torch.relu(numbers(8, 8)).to_sparse(), "its layout is sparse_coo, not strided"),
    "sparse rows": (sparse_rows, "its layout is sparse_csr, not strided"),
    "quantized": (quantized, "it is a quantized tensor"),
    "nested": (strided_nested, "it is a nested tensor"),
    "meta": (lambda: torch.empty(4, 6, device="meta"), "it is on meta, which is not offloaded"),
    "zero": (lambda: torch._efficientzerotensor(4, 6), "it is a zero tensor, which has no memory"),
    "wrapper": (scaled, "it is a tensor subclass (Scaled) that graphoffload does not know"),
    "subclass": (
        lambda: numbers(4, 6).as_subclass(Tagged),
        "it is a tensor subclass (Tagged) that graphoffload does not know",
    ),
}
"""What stays for its kind, with the reason."""
if torch.backends.mkldnn.is_available():
    KEPT["mkldnn"] = (lambda: numbers(4, 6).to_mkldnn(), "its layout is _mkldnn, not strided")


@contextlib.contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """Give a mesh of this process alone, on CPU; it must be the first of the process, and is gone afterwards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def distributed(mesh: DeviceMesh, local: torch.Tensor | None = None) -> DTensor:
    """Return a tensor sharded by its rows."""
    return DTensor.from_local(numbers(4, 6) if local is None else local, mesh, [Shard(0)])


def bits(tensor: torch.Tensor) -> bytes:
    """Return the values of a plain tensor as bytes, whatever they mean."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def looks(tensor: torch.Tensor) -> dict[str, Any]:
    """Return all that a consumer of a plain tensor can see of it, values included."""
    return {
        "type": type(tensor),
        "size": tuple(tensor.size()),
        "stride": tensor.stride(),
        "offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "layout": tensor.layout,
        "conjugate": tensor.is_conj(),
        "negative": tensor.is_neg(),
        "requires_grad": tensor.requires_grad,
        "channels last": tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last),
        "bits": bits(tensor),
    }


__all__ = [
    "KEPT",
    "PLAIN",
    "Maker",
    "Scaled",
    "Tagged",
    "bits",
    "distributed",
    "jagged",
    "jagged_with_holes",
    "looks",
    "mesh_of_one",
    "numbers",
    "scaled",
    "sparse_rows",
]
