"""Know which kinds of tensor are bytes in memory, and where the bytes of the others are.

A *plain* tensor is exactly a `torch.Tensor` or `nn.Parameter`, strided, with a storage of its own: any dtype, complex,
boolean and float8 among them, and views with a lazy conjugate or negative bit. A few kinds wrap one plain tensor and are
moved by it: a DTensor by its local tensor, a jagged nested tensor by its values. Every other kind stays, with a reason. A
subclass that nobody here has thought of stays too, even one that can take itself apart: what else it knows about its
bytes (scales, caches, a transposed copy) would go stale without a sign, and a subclass in Python only may carry
attributes that no copy of bytes brings back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphoffload._torch import AsyncCollectiveTensor, DTensor, FakeTensor, JaggedTensor, dispatch_bits, dispatch_keys

_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_LAZY = dispatch_bits("Conjugate", "Negative")
_DEVICES = ("CPU", "CUDA", "HPU", "MTIA", "PrivateUse1", "XPU")
# Listed is what a plain tensor may be, so that a kind which a later torch adds is not taken for one.
_PLAIN = _LAZY | dispatch_bits(
    *_DEVICES, *(f"Autocast{device}" for device in _DEVICES), "ADInplaceOrView", "AutogradCPU", "AutogradPrivateUse1"
)
_NOT_PLAIN = ~_PLAIN
_MARKS = (
    (
        dispatch_bits("FuncTorchBatched", "FuncTorchGradWrapper"),
        "it is wrapped by torch.func (vmap, grad and the like), which no copy can be",
    ),
    (dispatch_bits("Functionalize"), "it is wrapped by functionalization, which no copy can be"),
    (dispatch_bits("ZeroTensor"), "it is a zero tensor, which has no memory"),
)


@dataclass(frozen=True, slots=True)
class Body:
    """Hold the plain strided tensor with a tensor's bytes, and the way back from a copy of it.

    main: its storage is what moves. Writes through the wrapper need not raise its version (a DTensor's do not), and writes
        to it do not raise the wrapper's: who watches for changes in place watches both.
    rebuild: takes a tensor with the size, stride, dtype and lazy bits of `main`, and returns one of the original kind that
        asks for no gradient. It neither keeps the original's bytes alive nor communicates. None: that tensor will do.
    """

    main: torch.Tensor
    rebuild: Callable[[torch.Tensor], torch.Tensor] | None


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is nothing but strided memory, so that it can be moved as it is.

    One look at its dispatch keys, which no `TorchFunctionMode` sees: this is asked of every saved tensor.
    """
    return type(tensor) in _PLAIN_TYPES and not dispatch_keys(tensor).raw_repr() & _NOT_PLAIN


def body_of(tensor: torch.Tensor) -> Body | str:
    """Return where the bytes of a tensor that is not plain are; or, as one clause, the reason why its kind stays.

    Of a collective under way the compute stream waits for the end: the operator that saves it is about to do so anyway.
    """
    kind = type(tensor)
    if kind in _PLAIN_TYPES:
        return _why_not_plain(tensor)
    if kind is DTensor:
        return _body_of_distributed(tensor)
    if kind is JaggedTensor:
        return _body_of_jagged(tensor)
    if kind is AsyncCollectiveTensor:
        local = _waited_for(tensor)
        # Waited for, it is the plain tensor: that is what its operators work on.
        return Body(local, None) if is_plain(local) else _why_it_stays(local)
    return _why_it_stays(tensor)


@dataclass(frozen=True, slots=True)
class _Distribute:
    """Make a DTensor of a local tensor."""

    spec: Any

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        # The spec itself, not `__tensor_unflatten__`: that loses the order of shards in 2.11 and, in all versions, how
        # strided shards are meant.
        made: torch.Tensor = DTensor(local, self.spec, requires_grad=False)
        return made


@dataclass(frozen=True, slots=True)
class _Nest:
    """Make a jagged tensor of its values; `parts` and `context` are the rest of what it was flattened to.

    The very same offsets, or lengths: torch knows the ragged size by them, and only equal sizes go into one operator.
    """

    parts: dict[str, torch.Tensor]
    context: dict[str, Any]
    size: tuple[Any, ...]
    stride: tuple[Any, ...]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        inner = {"_values": values, **self.parts}
        made: torch.Tensor = JaggedTensor.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return made


def _body_of_distributed(tensor: Any) -> Body | str:
    local = _waited_for(tensor._local_tensor)
    if not is_plain(local):
        return f"of its local tensor: {_why_it_stays(local)}"
    if (dispatch_keys(tensor).raw_repr() ^ dispatch_keys(local).raw_repr()) & _LAZY:
        # A DTensor takes its lazy bits from the local tensor that it is made of; here they were set by another way.
        return "it is a lazy conjugate or negative, which a copy of bytes would lose"
    return Body(_without_history(local), _Distribute(tensor._spec))


def _body_of_jagged(tensor: Any) -> Body | str:
    if not is_plain(tensor._values):
        return f"of its values: {_why_it_stays(tensor._values)}"
    if dispatch_keys(tensor).raw_repr() & _LAZY:
        return "it is a lazy conjugate or negative, which a copy of bytes would lose"
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names if name != "_values"}
    return Body(
        _without_history(tensor._values),
        _Nest(parts, {**context, "requires_grad": False}, tuple(tensor.size()), tuple(tensor.stride())),
    )


def _waited_for(local: Any) -> torch.Tensor:
    """Return the plain result of a collective under way; anything else as it is."""
    if AsyncCollectiveTensor is not None and type(local) is AsyncCollectiveTensor:
        local = local.trigger_wait()
    return local  # type: ignore[no-any-return]


def _without_history(main: torch.Tensor) -> torch.Tensor:
    # What holds it until the copy has ended must not hold a graph.
    return main.detach() if main.requires_grad else main


def _why_it_stays(tensor: torch.Tensor) -> str:
    """Say why a tensor that is not plain is not moved. Of a subclass nothing but the type is read: reading may run its code."""
    if type(tensor) in _PLAIN_TYPES:
        return _why_not_plain(tensor)
    if isinstance(tensor, FakeTensor):
        return "it is a fake tensor, which has no memory"
    return f"it is a tensor subclass ({type(tensor).__name__}) that graphoffload does not know"


def _why_not_plain(tensor: torch.Tensor) -> str:
    keys = dispatch_keys(tensor).raw_repr()
    for mark, why in _MARKS:
        if keys & mark:
            return why
    if tensor.layout != torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}, not strided"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.is_quantized:
        return "it is a quantized tensor"
    return f"it is on {tensor.device}, which is not offloaded"
