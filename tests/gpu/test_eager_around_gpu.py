"""The eager path on a real device beside what else a program does: checkpointing, threads, CUDA graphs, compiled regions,
exceptions, host tensors, every layout.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_programs import (
    BYTES,
    LONG,
    MIB,
    Block,
    assert_equal,
    assert_nothing_left,
    batch,
    chain,
    gradients,
    leaf,
    network,
    saved_tensors,
    slow,
)
from layouts import layouts
from striking import Striking, strike
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphoffload
from graphoffload.ordering.events import D2H, H2D
from graphoffload.runtime.keep import active
from graphoffload.runtime.transfer import Runtime

pytestmark = [
    pytest.mark.gpu,
    # Gradients are added up on another stream than they are made on: torch says that this costs time.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

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


# Threads


def test_two_threads_with_models_of_their_own(cuda: torch.device, runtime: Runtime) -> None:
    slow(runtime, D2H, H2D)
    models = [network(cuda, depth=2, seed=seed).eval() for seed in range(2)]
    inputs = [batch(cuda, seed=seed) for seed in range(2)]
    wants = [gradients(model, x) for model, x in zip(models, inputs, strict=True)]
    torch.accelerator.synchronize(cuda)
    wrong: list[object] = []
    start = threading.Barrier(2)

    def train(index: int) -> None:
        try:
            context = saved_tensors(models[index])
            with torch.Stream(device=cuda):
                start.wait()
                for _ in range(8):
                    got = gradients(models[index], inputs[index], context, seed=None)
                    wrong.extend(name for name in got if not torch.equal(got[name], wants[index][name]))
        except Exception as error:  # noqa: BLE001  # a thread's error must reach the test
            wrong.append(error)

    _in_threads(train)
    assert wrong == []
    assert_nothing_left(runtime)


def test_two_threads_with_one_context(cuda: torch.device, runtime: Runtime) -> None:
    slow(runtime, D2H, H2D)
    context = saved_tensors()
    inputs = [batch(cuda, seed=seed).requires_grad_() for seed in range(2)]
    wants = [torch.autograd.grad(chain(x, 4 + 4 * n).sum(), x)[0] for n, x in enumerate(inputs)]
    torch.accelerator.synchronize(cuda)
    wrong: list[object] = []
    start = threading.Barrier(2)

    def train(index: int) -> None:
        try:
            with torch.Stream(device=cuda):
                start.wait()
                for _ in range(10):
                    with context:
                        y = chain(inputs[index], 4 + 4 * index)
                    found = torch.autograd.grad(y.sum(), inputs[index])[0]
                    if not torch.equal(found, wants[index]):
                        wrong.append(index)
        except Exception as error:  # noqa: BLE001  # a thread's error must reach the test
            wrong.append(error)

    _in_threads(train)
    assert wrong == []
    assert_nothing_left(runtime)


def _in_threads(train: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
        assert active() is None
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
        with contextlib.suppress(ValueError), context:
            y = chain(x, 4)
            raise ValueError("on purpose")
        assert active() is None
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
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor on a GPU, of float32 models
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's own look at its input
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
    assert context.stats().moved == 2, "the one that is on the device, twice"
    assert any("host" in why for why in context.stats().kept_nbytes_by_reason)


@pytest.mark.parametrize("name", [*layouts(torch.device("cpu")), "sparse"])
def test_every_layout_comes_back_as_it_was(name: str, cuda: torch.device, runtime: Runtime) -> None:
    context = saved_tensors()
    slow(runtime, D2H, H2D)
    for _ in range(2):
        torch.manual_seed(0)
        tensor = torch.eye(4, device=cuda).to_sparse() if name == "sparse" else layouts(cuda)[name]
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
