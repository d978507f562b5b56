"""`graphoffload.plans`: a compiled model tells the plans it runs, and asking keeps nothing alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload.errors import UsageError
from graphoffload.planning.policy import KeepAll, OffloadAll
from graphoffload.testing import virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)


@pytest.fixture(autouse=True)
def device():
    torch._dynamo.reset()
    with virtual_device() as device:
        yield device
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sin() + x


class Stack(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def everything(**options):
    return graphoffload.backend(EVERYTHING, compiler="aot_eager", **options)


def test_a_compiled_module():
    seen = []
    compiled = torch.compile(Stack(), backend=everything(on_plan=seen.append))
    assert graphoffload.plans(compiled) == ()
    compiled(torch.randn(3, 4)).sum().backward()
    assert graphoffload.plans(compiled) == tuple(seen)
    assert seen[0].transfers


def test_a_module_of_torch():
    """Dynamo calls modules whose code is torch's own through a wrapper."""
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), backend=everything())
    compiled(torch.randn(3, 4)).sum().backward()
    assert len(graphoffload.plans(compiled)) == 1


def test_a_module_compiled_in_place():
    model = Stack()
    model.compile(backend=everything())
    model(torch.randn(3, 4)).sum().backward()
    assert len(graphoffload.plans(model)) == 1


def test_a_function():
    @torch.compile(backend=everything())
    def function(x):
        return (x @ x.t()).sin().sum()

    assert graphoffload.plans(function) == ()
    function(torch.randn(3, 4, requires_grad=True)).backward()
    assert len(graphoffload.plans(function)) == 1


# Dynamo itself looks at the `.grad` of a layer's input, and hides the warning from all but those who make it an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_layers_compiled_one_by_one():
    model = Stack(3)
    for block in model.blocks:
        block.compile(backend=everything())
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    found = graphoffload.plans(model)
    assert found
    assert all(plan.transfers for plan in found)


def test_two_models_do_not_mix():
    offloads = torch.compile(Stack(1), backend=everything())
    keeps = torch.compile(Stack(2), backend=graphoffload.backend(KeepAll(), compiler="aot_eager"))
    offloads(torch.randn(3, 4)).sum().backward()
    keeps(torch.randn(3, 4)).sum().backward()
    (one,) = graphoffload.plans(offloads)
    (other,) = graphoffload.plans(keeps)
    assert one.transfers
    assert not other.transfers


def test_inference_has_no_plan():
    compiled = torch.compile(Stack(), backend=everything())
    with torch.no_grad():
        compiled(torch.randn(3, 4))
    assert graphoffload.plans(compiled) == ()


def test_asking_keeps_nothing_alive():
    model = Stack()
    compiled = torch.compile(model, backend=everything())
    compiled(torch.randn(3, 4)).sum().backward()
    graphoffload.plans(compiled)
    gone = weakref.ref(model)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_something_else():
    for thing in (3, torch.randn(3), len):
        with pytest.raises(UsageError, match="takes a compiled model or function"):
            graphoffload.plans(thing)
