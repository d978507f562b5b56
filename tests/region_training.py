"""Train programs with checkpointed regions beside plain twins of theirs, on the virtual device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from eager_training import EVERYTHING, STEPS, offloading
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_bits, fresh, fresh_inputs, is_finite, outcome, train_step, weighted_sum

import graphoffload
from graphoffload.planning.policy import Policy
from graphoffload.runtime.stats import SavedTensorsStats

ROWS, WIDTH = 16, 32
ACTIVATION = ROWS * WIDTH * 4
"""The bytes of one value of `Net`."""
BASE = 7 * ACTIVATION
"""What moves of `Net` in a step: its input, that of sin, of the three regions, of the last layer, and of cos."""

plainly = functools.partial(checkpoint, use_reentrant=False)
reentrantly = functools.partial(checkpoint, use_reentrant=True)


def directly(region: Callable[..., Any], *args: Any) -> Any:
    """Run a region as if it were none."""
    return region(*args)


def assert_trains_as_plain(
    module: nn.Module,
    *inputs: Any,
    policy: Policy = EVERYTHING,
    backward_inside: bool = False,
    steps: int = STEPS,
    loss: Callable[[Any], Any] = weighted_sum,
) -> SavedTensorsStats:
    """Train a module and a copy of it, plainly and under `saved_tensors`, and raise on any different bit in any step.

    The first step learns in which order values come back, the later ones follow it. At the end nothing may be in a slot.
    """
    plain, ours = fresh(module), fresh(module)
    plain_inputs, our_inputs = fresh_inputs(inputs), fresh_inputs(inputs)
    with offloading():
        context = graphoffload.saved_tensors(policy, model=ours)
        for step in range(steps):
            want = train_step(plain, plain_inputs, module=plain, seed=step, loss=loss)
            assert is_finite(want)
            torch.manual_seed(step)
            with context:
                outputs = ours(*our_inputs)
                if backward_inside:
                    loss(outputs).backward()
            if not backward_inside:
                loss(outputs).backward()
            assert_same_bits(outcome(outputs, inputs=(our_inputs, {}), module=ours), want)
            del outputs
        return context.stats()


class Net(nn.Module):
    """Three regions one after the other, each run by `run`, with something before, between and after."""

    def __init__(self, run: Callable[..., Any], body: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in "123"
        )
        self.run, self.body = run, body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sin()
        for layer in self.layers:
            region = layer if self.body is None else functools.partial(self.body, layer)
            x = x + self.run(region, x)
        return self.last(x).cos()
