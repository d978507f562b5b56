"""Compile a model one block at a time, as large models are, and offload in each block.

Runs on an accelerator where there is one, and on the virtual device elsewhere.
"""

import contextlib

import torch

import graphoffload
from graphoffload import policies
from graphoffload.testing import virtual_device


def main() -> None:
    """Train one step and say what moved in each block."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(64, 4, dim_feedforward=256, batch_first=True, dropout=0.1)
    model = torch.nn.TransformerEncoder(block, num_layers=3, enable_nested_tensor=False).to(device)
    with virtual_device() if accelerator is None else contextlib.nullcontext():
        for layer in model.layers:
            layer.compile(backend=graphoffload.backend(policies.OffloadAll(min_nbytes=0), compiler="aot_eager"))
        model(torch.randn(8, 32, 64, device=device)).square().mean().backward()
        for index, layer in enumerate(model.layers):
            for plan in graphoffload.plans(layer):
                print(f"block {index}: {plan.offloaded_nbytes:,} bytes in {len(plan.transfers)} transfers")


if __name__ == "__main__":
    main()
