"""Tensors of every layout, for what must bring each back as it was."""

from __future__ import annotations

import torch


def layouts(device: torch.device) -> dict[str, torch.Tensor]:
    """Return a tensor of each layout and type that moves as bytes, by name."""
    whole = torch.randn(64, 96, device=device)
    return {
        "dense": whole,
        "transposed": whole.t(),
        "sliced": whole[:, 2:5],
        "offset": whole[3:],
        "small part": whole[5:6, 7:9],
        "expanded": torch.randn(6, 1, device=device).expand(6, 5),
        "channels last": torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
        "scalar": torch.randn((), device=device),
        "empty": torch.randn(0, 3, device=device),
        "bool": torch.tensor([True, False, True], device=device),
        "int64": torch.arange(7, device=device),
        "bfloat16": torch.randn(1001, device=device).bfloat16(),
        "float8": torch.randn(64, device=device).to(torch.float8_e4m3fn),
        "conjugate": torch.randn(40, dtype=torch.complex64, device=device).conj(),
        "negative": torch.randn(40, dtype=torch.complex64, device=device).conj().imag,
    }
