"""Scenario of the eager path: each parameter is stepped, and its gradient dropped, while backward goes on."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from eager_training import EVERYTHING, offloading
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphoffload

STEPS = 4


class Tied(nn.Module):
    """Attend with dropout between an embedding and a head that share their weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 20)
        self.head.weight = self.embed.weight

    def forward(self, ids, *, regions):
        h = self.embed(ids)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if regions else layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def train(surroundings, *, in_backward, regions):
    """Return the losses, and all parameters at the end."""
    model = Tied()
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    if in_backward:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        ids = torch.randint(20, (2, 8))
        with surroundings(model):
            loss = model(ids, regions=regions)
        loss.backward()
        losses.append(loss.detach())
        if in_backward:
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            for parameter in model.parameters():
                step(parameter)
    return torch.stack(losses), [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("regions", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["after backward", "in backward"])
def test_the_same_losses_and_parameters(in_backward, regions):
    """Parameters change in place while values that were saved before come back: every bit as without offloading."""
    losses, parameters = train(lambda model: contextlib.nullcontext(), in_backward=in_backward, regions=regions)
    with offloading() as device:
        ours, mine = train(
            lambda model: graphoffload.saved_tensors(EVERYTHING, model=model), in_backward=in_backward, regions=regions
        )
        assert device.stats().offloaded_nbytes > 0
    assert torch.equal(ours, losses)
    assert all(map(torch.equal, mine, parameters))
