"""The eager path on a real device: memory is really freed, outlives its node where it must, and may run out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_programs import (
    BYTES,
    LONG,
    MIB,
    assert_nothing_left,
    chain,
    leaf,
    saved_tensors,
    slow,
)
from striking import strike
from torch import nn

import graphoffload
from graphoffload.ordering.events import D2H, H2D
from graphoffload.planning.machine import Machine
from graphoffload.runtime.transfer import Runtime

pytestmark = [
    pytest.mark.gpu,
    # Gradients are added up on another stream than they are made on: torch says that this costs time.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

LENGTH = 8


# Memory


def test_device_memory_falls_by_what_moved_and_host_memory_is_exact(cuda: torch.device, runtime: Runtime) -> None:
    x, context = leaf(cuda), saved_tensors()
    before = torch.cuda.memory_allocated(cuda)
    for _ in range(4):
        moved = context.stats().moved_nbytes
        with context:
            y = chain(x, LENGTH)
        runtime.synchronize()  # what is in flight has arrived
        assert context.stats().moved_nbytes - moved == LENGTH * BYTES
        assert torch.cuda.memory_allocated(cuda) - before == BYTES  # the result
        stats = runtime.stats()
        assert stats.host_nbytes == context.stats().host_nbytes == stats.pinned_nbytes == LENGTH * BYTES
        y.backward(torch.ones_like(y))
        x.grad = None
        del y
        assert torch.cuda.memory_allocated(cuda) == before
        assert_nothing_left(runtime)
    stats = context.stats()
    assert stats.pinned_peak_nbytes <= 1.05 * stats.host_peak_nbytes
    assert stats.reloaded_nbytes <= stats.moved_nbytes
    assert runtime.stats().pageable_fallbacks == 0


def test_what_comes_back_at_once_is_not_started_again(cuda: torch.device, runtime: Runtime) -> None:
    del runtime.device.elapsed  # with the device's own clock
    x = leaf(cuda)
    want = torch.autograd.grad(chain(x, LENGTH).sum(), x)[0]
    for pause in (0, LONG):
        context = saved_tensors()
        if not pause:
            slow(runtime, D2H, H2D)
        for _ in range(5):
            with context:
                y = chain(x, LENGTH)
            if pause:
                torch.cuda._sleep(pause)  # long enough for all to leave and to come back
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
            del y
            torch.cuda.synchronize()  # the next forward sees how it was
        runtime.device.before_copy = None
        stats = context.stats()
        kept = sum(nbytes for why, nbytes in stats.kept_nbytes_by_reason.items() if "at once" in why)
        assert stats.moved_nbytes + kept == 5 * LENGTH * BYTES
        assert (kept == 0) if pause else (kept > 0)
        assert stats.exposed_seconds is not None
        assert stats.exposed_seconds > 0
    assert_nothing_left(runtime)


def test_one_storage_saved_many_times_moves_once(cuda: torch.device, runtime: Runtime) -> None:
    x, context = leaf(cuda), saved_tensors()

    def program() -> torch.Tensor:
        h = x * 2
        return (h.sin() + h.cos() + h * h + h[1:].exp().sum() + h.view(2, -1).t().exp().sum()).sum()

    want = torch.autograd.grad(program(), x)[0]
    with context:
        loss = program()
    # h, and the results of the two exp, which are saved as well.
    assert context.stats().moved == 3
    strike(cuda, BYTES)
    assert torch.equal(torch.autograd.grad(loss, x)[0], want)


def test_fifty_steps_run_ahead_are_flat(cuda: torch.device, runtime: Runtime) -> None:
    x = leaf(cuda)
    slow(runtime, D2H, H2D)
    torch.cuda.empty_cache()
    machine = Machine.named("h200").with_budgets(in_flight=4 * BYTES)
    context = saved_tensors(machine=machine)

    def step() -> None:
        with context:
            y = chain(x, LENGTH)
        y.backward(torch.ones_like(y))
        x.grad = None

    torch.cuda.reset_peak_memory_stats(cuda)
    step()
    unavoidable = torch.cuda.max_memory_allocated(cuda)  # the first forward waits for every copy
    for _ in range(9):
        step()
    torch.cuda.reset_peak_memory_stats(cuda)
    seen = []
    for _ in range(50):
        step()
        pinned = runtime.stats().pinned_nbytes
        seen.append((torch.cuda.memory_allocated(cuda), torch.cuda.memory_reserved(cuda), pinned))
    allocated, reserved, pinned = (set(column) for column in zip(*seen, strict=True))
    assert len(allocated) == 1
    assert len(pinned) == 1
    assert len(reserved) == 1, reserved
    # One reload is always started ahead of its need.
    assert torch.cuda.max_memory_allocated(cuda) <= unavoidable + BYTES
    stats = context.stats()
    assert stats.in_flight_peak_nbytes <= 4 * BYTES
    assert stats.pinned_peak_nbytes <= 1.05 * stats.host_peak_nbytes
    assert stats.moved == 60 * LENGTH


def test_two_hundred_steps_of_varying_sizes_pin_within_the_law(cuda: torch.device, runtime: Runtime) -> None:
    context = saved_tensors()
    sizes = (torch.rand(200, generator=torch.Generator().manual_seed(0)) * MIB + 2 * MIB).int().tolist()
    for n in sizes:
        x = leaf(cuda, 4 * n)
        with context:
            y = chain(x, 4)
        y.backward(torch.ones_like(y))
        del x, y
    stats = context.stats()
    assert stats.moved >= 200
    assert stats.pinned_peak_nbytes <= 1.05 * stats.host_peak_nbytes
    assert_nothing_left(runtime)


def test_the_host_budget_is_never_passed(cuda: torch.device, runtime: Runtime) -> None:
    x = leaf(cuda)
    context = saved_tensors(machine=Machine.named("h200").with_budgets(host_budget=3 * BYTES))
    want = torch.autograd.grad(chain(x, LENGTH).sum(), x)[0]
    for _ in range(3):
        with context:
            y = chain(x, LENGTH)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
        del y
    stats = context.stats()
    assert 0 < stats.host_peak_nbytes <= 3 * BYTES
    assert 0 < stats.pinned_peak_nbytes <= 3 * BYTES
    assert any("budget" in why for why in stats.kept_nbytes_by_reason)


@pytest.mark.filterwarnings("ignore:graphoffload:graphoffload.GraphOffloadWarning")  # frozen, there is nothing to move
@pytest.mark.parametrize("how", ["given", "not given", "re-pointed", "tied", "frozen"])
def test_parameters_never_move(how: str, cuda: torch.device, runtime: Runtime) -> None:
    torch.manual_seed(0)
    width, rows, depth = 512, 64, 4
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).to(cuda)
    if how == "tied":
        for layer in list(model)[1:]:
            layer.weight = model[0].weight
    context = graphoffload.saved_tensors(
        graphoffload.policies.OffloadAll(min_nbytes=0), model=None if how == "not given" else model
    )
    for step in range(3):
        if how == "re-pointed":  # as FSDP does
            flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            for parameter, part in zip(model.parameters(), flat.split(width * width), strict=True):
                parameter.data = part.view(width, width)
        x = torch.randn(rows, width, device=cuda)
        if how == "frozen":
            model.requires_grad_(False)
            x.requires_grad_()
        want = _weight_gradients(model, x)
        before = context.stats()
        with context:
            y = model(x)
        after = context.stats()
        y.sum().backward()
        inputs = 0 if how == "frozen" else depth * rows * width * 4
        assert after.moved_nbytes - before.moved_nbytes <= inputs
        if step == 0:
            assert after.moved_nbytes == inputs
        kept = {why: nbytes for why, nbytes in after.kept_nbytes_by_reason.items() if "parameter" in why}
        assert sum(kept.values()) > 0
        tensors = [x] if how == "frozen" else list(model.parameters())
        for tensor, expected in zip(tensors, want, strict=True):
            assert torch.equal(tensor.grad, expected)
            tensor.grad = None


def _weight_gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x] if x.requires_grad else list(model.parameters())
    return list(torch.autograd.grad(model(x).sum(), leaves))


# Memory that came back and outlives its node


class GivesItsSavedTensor(torch.autograd.Function):
    """Give a view of the saved tensor as a gradient, and keep the tensor besides."""

    kept: list[torch.Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return (parameter * factor).sum()

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        GivesItsSavedTensor.kept.append(factor)
        return factor.view(-1).view(factor.shape), None


def test_what_came_back_outlives_its_node(cuda: torch.device, runtime: Runtime) -> None:
    context = saved_tensors()
    slow(runtime, D2H, H2D)
    for step in range(3):
        parameters = [leaf(cuda, 4 * MIB) for _ in range(4)]
        factors = [torch.full((MIB,), float(step + 2 * n + 1), device=cuda) for n in range(4)]
        with context:
            loss = sum(GivesItsSavedTensor.apply(p, factor * 3) for p, factor in zip(parameters, factors, strict=True))
        first = loss.grad_fn.next_functions[1][0].saved_tensors[0]
        strike(cuda, 4 * MIB, blocks=8)
        loss.backward()
        del loss
        gc.collect()
        strike(cuda, 4 * MIB, blocks=8)
        for parameter, factor in zip(parameters, factors, strict=True):
            assert torch.equal(parameter.grad, factor * 3)
        assert torch.equal(first, factors[-1] * 3)
        kept = GivesItsSavedTensor.kept
        assert [int(tensor[0]) for tensor in reversed(kept)] == [int(factor[0]) * 3 for factor in factors]
        assert all(bool((tensor == tensor[0]).all()) for tensor in kept)
        kept.clear()
    del first
    assert context.stats().moved > 0
    assert_nothing_left(runtime)


# Memory that runs out


@pytest.fixture
def capped(cuda: torch.device) -> Iterator[Callable[[int], None]]:
    """Return a function that leaves so many bytes beyond what is allocated now; the cap is gone at the end."""

    def cap(nbytes: int) -> None:
        torch.cuda.synchronize(cuda)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(cuda).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved(cuda) + nbytes) / total), cuda)

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0, cuda)


def test_a_reload_ahead_gives_way_where_memory_is_short(
    cuda: torch.device, runtime: Runtime, capped: Callable[[int], None]
) -> None:
    n = 64 * MIB
    x, ones = leaf(cuda, n), torch.ones(n // 4, device=cuda)
    want = torch.autograd.grad(chain(x, LENGTH), x, ones)[0].cpu()
    failed = []
    for blocks in (12, 8, 6, 5, 4, 3, 2, 1):
        context = saved_tensors()
        for _ in range(2):
            with context:
                y = chain(x, LENGTH)
            torch.autograd.grad(y, x, ones)
            del y
        with context:
            y = chain(x, LENGTH)
        runtime.synchronize()
        capped(blocks * n + 32 * MIB)
        try:
            found = torch.autograd.grad(y, x, ones)[0]
            assert torch.equal(found.cpu(), want)
        except torch.OutOfMemoryError:
            failed.append(blocks)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, cuda)
        found = y = None
        assert_nothing_left(runtime)
        with context:
            y = chain(x, LENGTH)
        assert torch.equal(torch.autograd.grad(y, x, ones)[0].cpu(), want)
        y = None
    # A node needs its gradient, what came back, the cosine and the product, and one block runs ahead: that one was there
    # before the program asked for its last, so it cannot give way any more.
    assert all(blocks < 6 for blocks in failed), failed


def test_a_pack_that_finds_no_host_memory_keeps_or_is_pageable_and_right(
    cuda: torch.device, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, context = leaf(cuda), saved_tensors()
    want = torch.autograd.grad(chain(x, 4).sum(), x)[0]
    monkeypatch.setattr(runtime.pool, "_grow", lambda size: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphoffload.GraphOffloadWarning)
        for _ in range(2):
            with context:
                y = chain(x, 4)
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
            del y
    assert runtime.stats().pinned_nbytes == 0
    assert_nothing_left(runtime)
