"""Know the memory of parameters and buffers: it stays, whatever a policy says."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from graphoffload.runtime.kinds import body_of, is_plain


class Owned:
    """Hold the storages of one model's parameters and buffers, as they are at the last `refresh`.

    By storage, so that views, tied weights and frozen weights count. Without a model, and for parameters that are pointed
    to other memory in the middle of a forward (FSDP), a parameter is also known by its type, and a view of one by its base.
    """

    def __init__(self, model: nn.Module | None) -> None:
        # Weak: what is learnt about a model is kept by the model itself.
        self._model = None if model is None else weakref.ref(model)
        self._storages: frozenset[int] = frozenset()

    def refresh(self) -> None:
        """Read the storages anew."""
        model = None if self._model is None else self._model()
        if model is not None:
            found = set()
            for tensors in (model.parameters(), model.buffers()):
                for tensor in tensors:
                    found.update(_addresses(tensor))
            self._storages = frozenset(found)

    def owns(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Say whether this tensor, whose bytes are in `storage`, is, or views, a parameter or buffer."""
        if storage._cdata in self._storages or type(tensor) is nn.Parameter:
            return True
        if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
            return True
        base = tensor._base
        return base is not None and isinstance(base, (nn.Parameter, nn.Buffer))


def _addresses(tensor: torch.Tensor) -> list[int]:
    body = tensor if is_plain(tensor) else body_of(tensor)
    if isinstance(body, str):
        return []  # it is kept for its kind
    return [(body if isinstance(body, torch.Tensor) else body.main).untyped_storage()._cdata]
