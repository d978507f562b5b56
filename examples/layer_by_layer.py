"""Compile a model one block at a time, as large models are, and offload in each block.

Runs on an accelerator where there is one, and on the virtual device elsewhere.
"""

import contextlib

import torch

import graphoffload
from graphoffload import policies
from graphoffload.testing import virtual_device


class Block(torch.nn.Module):
    """Normalise, widen, narrow, add; with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and what the block adds to it."""
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + torch.nn.functional.dropout(self.down(hidden), 0.1)


def main() -> None:
    """Train one step and say what moved in each compiled graph: blocks of one class share theirs."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(64) for _ in range(3))).to(device)
    plans: list[graphoffload.Plan] = []
    backend = graphoffload.backend(policies.OffloadAll(min_nbytes=0), compiler="aot_eager", on_plan=plans.append)
    with virtual_device() if accelerator is None else contextlib.nullcontext():
        for block in model:
            block.compile(backend=backend)
        model(torch.randn(8, 32, 64, device=device)).square().mean().backward()
    for index, plan in enumerate(plans):
        print(f"graph {index}: {plan.offloaded_nbytes:,} bytes in {len(plan.transfers)} transfers")
        assert plan.offloaded_nbytes > 0


if __name__ == "__main__":
    main()
