"""Know the memory of parameters and buffers: it stays, whatever a policy says."""

from __future__ import annotations

import weakref

import torch
from torch import nn


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
        """Say whether this plain tensor on `storage` is, or views, a parameter or buffer."""
        if type(tensor) is nn.Parameter or storage._cdata in self._storages:
            return True
        base = tensor._base
        return base is not None and isinstance(base, (nn.Parameter, nn.Buffer))


def _addresses(tensor: torch.Tensor) -> list[int]:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    try:
        return [local.untyped_storage()._cdata]
    except (RuntimeError, NotImplementedError):
        return []  # a kind without a storage (sparse, a wrapper): it is kept for its kind
