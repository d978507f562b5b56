"""Deal with hooks that are not ours, and with what they make of host tensors."""

from __future__ import annotations

import torch

from graphoffload._torch import top_saved_tensors_hooks
from graphoffload.runtime.device import flat_bytes, with_lazy_bits
from graphoffload.runtime.slots import SlotOwner


def hooks_may_read_hosts() -> bool:
    """Say whether autograd shows this thread's saved tensors to hooks that are not ours: those may read them at once."""
    top = top_saved_tensors_hooks()
    return top is not None and not getattr(getattr(top[0], "__self__", None), "keeps_slots", False)


def bring_foreign(host: torch.Tensor, owner: SlotOwner | None, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device whose runtime does not own its slot, if it has one."""
    if owner is not None:
        # A slot of another device: its copy streams and ours do not know each other, so the host waits.
        owner.runtime.settle(owner.slot)
    # Without a slot a hook of the user replaced the host tensor by a copy. Nothing of ours keeps that memory alive, so the
    # copy is on the compute stream and, for the host's side, complete on return.
    dest = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    if host.numel():
        flat_bytes(dest).copy_(flat_bytes(host))
    return with_lazy_bits(dest, like=host)
