"""Programs and slow copies for tests on a device, and what is compared of them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from striking import Striking
from torch import nn

import graphoffload
from graphoffload.policies import OffloadAll
from graphoffload.runtime.transfer import Runtime

MIB = 1 << 20
LONG = 100_000_000  # cycles: some 50 ms, far longer than the copies and kernels of a test
SHORT = 2_000_000  # some 1 ms
ALL = OffloadAll(min_nbytes=0)
BYTES = 16 * MIB  # the allocator gives such blocks exactly


def slow(runtime: Runtime, *streams: str, cycles: int = SHORT) -> None:
    """Put a long kernel before each copy on the named streams."""
    runtime.device.before_copy = lambda stream: torch.cuda._sleep(cycles) if stream in streams else None


def nobody() -> nn.Module:
    """Return a module without parameters: what is learnt belongs to it, so that tests learn nothing from each other."""
    return nn.Module()


def saved_tensors(model: nn.Module | None = None, **options: Any) -> graphoffload.saved_tensors:
    return graphoffload.saved_tensors(options.pop("policy", ALL), model=nobody() if model is None else model, **options)


class Block(nn.Module):
    """Attend and transform: views of one storage, norms, a softmax, dropout, weights saved as transposed views."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.split(self.before(x)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) / 8, -1)
        x = x + self.out(nn.functional.dropout(weights, 0.1, training=self.training) @ value)
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


def network(device: torch.device, *, depth: int = 4, width: int = 128, seed: int = 0) -> nn.Sequential:
    """Return blocks in a row."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(width) for _ in range(depth))).to(device)


def batch(device: torch.device, *, seed: int = 0, width: int = 128) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(4, 256, width, device=device, generator=generator)


def leaf(device: torch.device, nbytes: int = BYTES) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(nbytes // 4, device=device, generator=generator).requires_grad_()


def chain(x: torch.Tensor, length: int = 8) -> torch.Tensor:
    """Save `length` tensors that nobody else holds, each of the size of `x`; return another of that size."""
    h = x * 2
    for _ in range(length):
        h = h.sin()
    return h


def gradients(
    model: nn.Module,
    x: torch.Tensor,
    context: Any = None,
    *,
    seed: int | None = 0,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    striking: Striking | None = None,
) -> dict[str, torch.Tensor]:
    """Return the loss and all gradients of a step, with the generator seeded (not where threads share it)."""
    if seed is not None:
        torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    with striking.between_modules() if striking else contextlib.nullcontext():
        with context if context is not None else contextlib.nullcontext():
            loss = (forward or model)(x).float().square().mean()
        if striking:
            striking.between_nodes(loss)
        loss.backward()
    found = {"loss": loss.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    wrong = [name for name in want if not torch.equal(got[name], want[name])]
    assert wrong == []


def assert_nothing_left(runtime: Runtime) -> None:
    gc.collect()
    runtime.synchronize()
    stats = runtime.stats()
    assert (stats.slots, stats.host_nbytes, stats.in_flight_nbytes) == (0, 0, 0)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
