"""The eager path on a real device: memory that is really freed, and what else a program does around it.

Checkpointing, CUDA graphs, compiled regions, exceptions, memory that outlives its node, and memory that runs out.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from eager_programs import (
    LONG,
    MIB,
    Block,
    assert_equal,
    assert_nothing_left,
    batch,
    chain,
    gradients,
    network,
    saved_tensors,
    slow,
)
from striking import Striking, strike
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphoffload
from graphoffload.ordering.events import D2H, H2D
from graphoffload.planning.machine import Machine
from graphoffload.runtime.transfer import Runtime

pytestmark = [
    pytest.mark.gpu,
    # Gradients are added up on another stream than they are made on: torch says that this costs time.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

BYTES = 16 * MIB  # the allocator gives such blocks exactly
LENGTH = 8


def leaf(device: torch.device, nbytes: int = BYTES) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(nbytes // 4, device=device, generator=generator).requires_grad_()


# Memory


def test_device_memory_falls_by_what_moved_and_host_memory_is_exact(cuda: torch.device, runtime: Runtime) -> None:
    x, context = leaf(cuda), saved_tensors()
    before = torch.cuda.memory_allocated(cuda)
    for step in range(4):
        moved = context.stats().moved_nbytes
        with context:
            y = chain(x, LENGTH)
        runtime.synchronize()  # what is in flight has arrived
        moved = context.stats().moved_nbytes - moved
        assert torch.cuda.memory_allocated(cuda) - before == BYTES + (LENGTH * BYTES - moved)
        stats = runtime.stats()
        assert stats.host_nbytes == moved
        assert context.stats().host_nbytes == moved
        if step == 0:
            assert moved == LENGTH * BYTES
            assert stats.pinned_nbytes == moved
        assert moved >= (LENGTH - 2) * BYTES, "only what comes back at once may stay"
        y.backward(torch.ones_like(y))
        x.grad = None
        del y
        assert torch.cuda.memory_allocated(cuda) == before
        assert_nothing_left(runtime)
    stats = context.stats()
    assert stats.pinned_peak_nbytes <= 1.05 * stats.host_peak_nbytes
    assert stats.reloaded_nbytes <= stats.moved_nbytes
    assert runtime.stats().pageable_fallbacks == 0


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
    assert stats.exposed_seconds is not None


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


# Checkpointing


def _reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def _non_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def _nested(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, y * 1.5, use_reentrant=False) * y

    return checkpoint(inner, x, use_reentrant=False)


def _in_part(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(checkpoint(block, x, use_reentrant=False))


def _early_stop(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def region(y: torch.Tensor) -> torch.Tensor:
        return block(y).sin() + 1  # what comes after the last saved tensor is not computed again

    return checkpoint(region, x, use_reentrant=False)


@pytest.mark.parametrize("flavour", [_reentrant, _non_reentrant, _nested, _in_part, _early_stop])
@pytest.mark.parametrize("where", ["backward outside", "backward inside"])
def test_checkpointing(
    where: str, flavour: Callable[[nn.Module, torch.Tensor], torch.Tensor], cuda: torch.device, runtime: Runtime
) -> None:
    model = network(cuda, depth=3)
    context = saved_tensors(model)
    slow(runtime, D2H, H2D)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = flavour(block, x)
        return x

    for step in range(3):
        x = batch(cuda, seed=step)
        want = gradients(model, x, seed=step, forward=forward)
        if where == "backward outside":
            got = gradients(model, x, context, seed=step, forward=forward, striking=Striking(cuda))
        else:
            with context:  # what recomputation saves is shown to the context as well
                got = gradients(model, x, seed=step, forward=forward)
        assert_equal(got, want)
    assert context.stats().moved > 0
    assert_nothing_left(runtime)


# What else a program does


def test_a_capture_inside_the_context_keeps_and_is_right(cuda: torch.device, runtime: Runtime) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(cuda)
    static = torch.randn(64, 256, device=cuda)
    context = saved_tensors(model)
    side = torch.cuda.Stream()

    def step(use: Any) -> torch.Tensor:
        with use:
            loss = model(static).square().mean()
        loss.backward()
        return loss

    def captured(use: Any) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                step(use)
        torch.cuda.current_stream().wait_stream(side)
        model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(use)
        return graph, [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    plain, want = captured(contextlib.nullcontext())
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphoffload.GraphOffloadWarning)
        ours, got = captured(context)
    moved = context.stats().moved
    assert moved > 0, "the steps before the capture moved"
    assert any("captur" in why for why in context.stats().kept_nbytes_by_reason)
    for seed in range(3):
        static.copy_(torch.randn(64, 256, device=cuda, generator=torch.Generator(cuda).manual_seed(seed)))
        plain.replay()
        ours.replay()
        torch.cuda.synchronize()
        for expected, found in zip(want, got, strict=True):
            assert torch.equal(found, expected)
    with torch.cuda.stream(side):
        model.zero_grad(set_to_none=True)
        step(context)
    torch.cuda.synchronize()
    assert context.stats().moved > moved, "after the capture all is as before"


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")


def test_an_exception_in_backward_leaves_everything_as_it_was(cuda: torch.device, runtime: Runtime) -> None:
    x, context = leaf(cuda), saved_tensors()
    want = torch.autograd.grad(chain(x, 4).sum(), x)[0]
    slow(runtime, D2H, H2D, cycles=LONG // 4)
    stream = torch.accelerator.current_stream(cuda)
    before = torch.cuda.memory_allocated(cuda)
    for _ in range(3):
        with context:
            y = chain(Raises.apply(chain(x, 4)), 4)
        with pytest.raises(ValueError, match="on purpose"):
            y.sum().backward()
        assert torch.accelerator.current_stream(cuda) == stream
        assert graphoffload.active() is None
        del y
        strike(cuda, BYTES)  # a reload that was started ahead may still be written
        with context:
            y = chain(x, 4)
        strike(cuda, BYTES)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
        del y
    assert_nothing_left(runtime)
    assert torch.cuda.memory_allocated(cuda) == before


def test_an_exception_in_forward_leaves_everything_as_it_was(cuda: torch.device, runtime: Runtime) -> None:
    x, context = leaf(cuda), saved_tensors()
    slow(runtime, D2H, cycles=LONG // 4)
    stream, before = torch.accelerator.current_stream(cuda), torch.cuda.memory_allocated(cuda)
    for _ in range(3):
        with pytest.raises(ValueError, match="on purpose"), context:
            y = chain(x, 4)
            raise ValueError("on purpose")
        assert graphoffload.active() is None
        assert torch.accelerator.current_stream(cuda) == stream
        packed = context.stats().packed
        chain(x, 4)
        assert context.stats().packed == packed
        del y
    assert_nothing_left(runtime)
    assert torch.cuda.memory_allocated(cuda) == before


def test_keep_opts_a_region_out(cuda: torch.device, runtime: Runtime) -> None:
    x, context = leaf(cuda), saved_tensors()
    want = torch.autograd.grad(chain(chain(chain(x, 2), 3), 2).sum(), x)[0]
    with context:
        y = chain(x, 2)
        moved = context.stats().moved
        with graphoffload.keep():
            y = chain(y, 3)
        assert context.stats().moved == moved
        y = chain(y, 2)
    assert context.stats().moved == moved + 2
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


@pytest.mark.slow
def test_a_compiled_region_inside(cuda: torch.device, runtime: Runtime) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(128), Block(128), Block(128)).to(cuda)
    model.eval()
    middle = torch.compile(model[1], fullgraph=True)  # nothing of ours may break the graph
    context = saved_tensors(model)
    slow(runtime, D2H, H2D)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model[2](middle(model[0](x)))

    for step in range(3):
        x = batch(cuda, seed=step)
        assert_equal(gradients(model, x, context, forward=forward), gradients(model, x, forward=forward))
    stats = context.stats()
    assert stats.compiled_nbytes > 0
    assert stats.moved_nbytes > stats.compiled_nbytes
    assert_nothing_left(runtime)
    torch._dynamo.reset()


def test_tensors_on_the_host_among_those_on_the_device(cuda: torch.device, runtime: Runtime) -> None:
    x, context = torch.randn(MIB, requires_grad=True), saved_tensors()

    def program() -> torch.Tensor:
        return (x.sin() * 2).to(cuda).sin().cpu().exp().sum()

    want = torch.autograd.grad(program(), x)[0]
    for _ in range(2):
        with context:
            loss = program()
        assert torch.equal(torch.autograd.grad(loss, x)[0], want)
    assert 1 <= context.stats().moved <= 2
    assert any("host" in why for why in context.stats().kept_nbytes_by_reason)


def layouts(device: torch.device) -> dict[str, torch.Tensor]:
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
        "sparse": torch.eye(4, device=device).to_sparse(),
    }


@pytest.mark.parametrize("name", [*layouts(torch.device("cpu"))])
def test_every_layout_comes_back_as_it_was(name: str, cuda: torch.device, runtime: Runtime) -> None:
    context = saved_tensors()
    slow(runtime, D2H, H2D)
    for _ in range(2):
        torch.manual_seed(0)
        tensor = layouts(cuda)[name]
        want, size, layout = tensor.detach().clone(), tensor.size(), tensor.layout
        strides = None if tensor.layout is torch.sparse_coo else (tensor.stride(), tensor.is_conj(), tensor.is_neg())
        packed = context.pack(tensor)
        del tensor
        strike(cuda, 512, 4096, 64 * 96 * 4)
        back = context.unpack(packed)
        strike(cuda, 512, 4096, 64 * 96 * 4)
        assert (back.device, back.dtype, back.size(), back.layout) == (cuda, want.dtype, size, layout)
        if strides is not None:
            assert (back.stride(), back.is_conj(), back.is_neg()) == strides
            assert torch.equal(_comparable(back), _comparable(want))
        else:
            assert torch.equal(back.to_dense(), want.to_dense())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor


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
    # A node needs its gradient, what came back, the cosine and the product; a fifth block would be one that runs ahead.
    assert all(blocks < 4 for blocks in failed), failed


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
