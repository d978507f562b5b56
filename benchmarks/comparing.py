"""Compare the loss and every gradient of a model, to the bit, without holding more than two sets of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def gradients(model: nn.Module, loss_of_step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Return the loss and the gradient of every trained parameter after one forward and backward; `model` keeps none."""
    model.zero_grad(set_to_none=True)
    loss = loss_of_step()
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in _trained(model))]
    model.zero_grad(set_to_none=True)
    return found


def labels_of(model: nn.Module) -> list[str]:
    """Name what `gradients` returns, in its order."""
    return ["loss", *(name for name, parameter in model.named_parameters() if parameter.requires_grad)]


def descend(model: nn.Module, found: list[torch.Tensor], *, rate: float = 1e-2) -> None:
    """Move the weights by plain SGD along the gradients that `gradients` returned."""
    with torch.no_grad():
        for parameter, gradient in zip(_trained(model), found[1:], strict=True):
            parameter.sub_(gradient, alpha=rate)


def differences(labels: list[str], left: list[torch.Tensor], right: list[torch.Tensor]) -> list[str]:
    """Name what differs, and by how much."""
    return [
        f"{label} by {(a.double() - b.double()).abs().max().item():.3g} of {a.double().abs().max().item():.3g}"
        for label, a, b in zip(labels, left, right, strict=True)
        if not torch.equal(a, b)
    ]


def comparison_row(comparison: str, steps: int, found: list[str], **more: Any) -> dict[str, Any]:
    """Make the row of one comparison."""
    return {"comparison": comparison, "steps": steps, "differences": found[:20], "equal": not found, **more}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
