"""Scenarios of the eager path about caches that forward fills and reads, in checkpointed regions and outside them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from eager_training import (
    Moves,
    gradients,
    offloading,
    rows,
    same_as_plain,
    saving,
)
from subjects import Block
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_bits, fresh


@pytest.fixture
def device():
    with offloading() as device:
        yield device


def train(model, context, x=None, *, inside=False):
    x = rows(0) if x is None else x
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        loss = model(x).sum()
        if not inside:
            stack.close()
        loss.backward()
    return loss, x.grad if x.requires_grad else None


class Rotary(nn.Module):
    """Turn by angles from a cache, which is a buffer from the start or is filled when it is first needed."""

    def __init__(self, *, lazily):
        super().__init__()
        self.block = Block()
        self.register_buffer("cache", None, persistent=False)
        self.lazily = lazily
        if not lazily:
            self.fill()

    def fill(self):
        angles = torch.arange(8.0)[:, None] * torch.arange(1.0, 9.0)
        self.cache = torch.cat([angles.cos(), angles.sin()], -1)

    def forward(self, x):
        if self.cache is None or (self.lazily and self.cache.shape[0] < x.shape[1]):
            self.fill()
        cos, sin = self.cache[: x.shape[1]].chunk(2, -1)
        even, odd = x.chunk(2, -1)
        return self.block(torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1))


class Rotated(nn.Module):
    def __init__(self, run, *, lazily):
        super().__init__()
        self.layers = nn.ModuleList(Rotary(lazily=lazily) for _ in "123")
        self.run = run

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return x


RUNS = {
    "directly": lambda layer, x: layer(x),
    "in regions": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "in reentrant regions": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("lazily", [False, True], ids=["from the start", "when needed"])
def test_cached_buffers(device, run, lazily, inside):
    """A cache is read in forward and in what is run again: the same memory, right in every step, and never moved.

    One that is filled inside the first forward is new to that step, and a buffer like any other from the next one on.
    """
    torch.manual_seed(0)
    model = Rotated(RUNS[run], lazily=lazily)
    moves = Moves.of(device)
    plain, context = fresh(model), saving(model)
    for number in range(4):
        x, y = (
            torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(number), requires_grad=True) for _ in "12"
        )
        model.zero_grad()
        plain.zero_grad()
        have = train(model, context, x, inside=inside)
        want = train(plain, contextlib.nullcontext(), y)
        assert all(torch.equal(mine, other) for mine, other in zip(have, want, strict=True))
        assert_same_bits(gradients(model), gradients(plain))
        if number == 0 and lazily:
            moves.ranges.clear()
    assert context.stats().moved
    assert moves.of_memory(*(layer.cache for layer in model.layers)) == 0


def test_a_cache_that_is_no_buffer(device):
    """Angles kept as an attribute: nobody says that they are the model's, so they may move, and come back right."""
    angles = {}

    def turn(x):
        if "cos" not in angles:
            angles["cos"] = torch.linspace(0, 3, 16).cos()
        return x.sin() * angles["cos"]

    def step(model, context):
        x = rows(0)
        with context:
            y = checkpoint(turn, model(x), use_reentrant=False)
            y = checkpoint(turn, y, use_reentrant=False) * angles["cos"]
        y.sum().backward()
        return x.grad

    kept = torch.linspace(0, 3, 16).cos()
    assert same_as_plain(nn.Linear(16, 16), step, steps=4).moved
    assert torch.equal(angles["cos"], kept)
