"""`graphoffload.transform`: a plan, readable graphs, and a callable that trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import Compiler, assert_same_bits, fresh, fresh_inputs, train_step

import graphoffload
from graphoffload.errors import PolicyError, UnsupportedGraphError, UsageError
from graphoffload.planning.policy import KeepAll, OffloadAll
from graphoffload.testing import virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.down(torch.sin(self.up(x).relu())).square()


@pytest.fixture(autouse=True)
def device():
    torch._dynamo.reset()
    with virtual_device() as device:
        yield device


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp()


def test_the_callable_trains_like_eager(model):
    x = torch.randn(4, 8, requires_grad=True)
    eager, eager_x = fresh(model), fresh_inputs(x)
    made = graphoffload.transform(model, x, policy=EVERYTHING)
    assert made.plan.transfers
    for _ in range(3):
        have = train_step(made, [x], module=model)
        want = train_step(eager, [eager_x], module=eager)
        assert_same_bits(have, want)


def test_nothing_is_executed(model):
    x = torch.randn(4, 8, requires_grad=True)
    state = torch.get_rng_state()
    graphoffload.transform(model, x, policy=EVERYTHING)
    assert model.calls == 0
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_the_graphs_are_readable(model):
    made = graphoffload.transform(model, torch.randn(4, 8), policy=EVERYTHING)
    assert isinstance(made.forward, torch.fx.GraphModule)
    assert isinstance(made.backward, torch.fx.GraphModule)
    for operator in ("offload", "release"):
        assert made.forward.code.count(f"torch.ops.graphoffload.{operator}.default(") == len(made.plan.transfers)
    for operator in ("reload", "ready"):
        assert made.backward.code.count(f"torch.ops.graphoffload.{operator}.default(") == len(made.plan.transfers)


def test_the_graphs_are_those_that_run(model, device):
    made = graphoffload.transform(model, x := torch.randn(4, 8), policy=EVERYTHING)
    made(x).sum().backward()
    ran = [sample.label for sample in device.ledger.samples if sample.label != "inputs"]
    graphs = (made.forward.graph, made.backward.graph)
    assert ran == [node.name for graph in graphs for node in graph.nodes if node.op == "call_function"]


def test_transforming_often_leaves_training_compiled(model):
    """Dynamo counts captures per code and gives up after eight; looking at ten policies must not use them up."""
    x = torch.randn(4, 8)
    for min_nbytes in range(10):
        assert graphoffload.transform(model, x, policy=OffloadAll(min_nbytes=min_nbytes)).plan.decisions
    compile_ = Compiler(EVERYTHING)
    torch.compile(model, backend=graphoffload.backend(EVERYTHING, compiler="aot_eager", on_plan=compile_.plans.append))(
        x
    )
    assert compile_.moved


def test_functions(device):
    def function(x, y):
        return (x.sin() @ y).exp().sin(), x + 1

    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    made = graphoffload.transform(function, x, y, policy=EVERYTHING)
    assert_same_bits(train_step(made, fresh_inputs([x, y])), train_step(function, fresh_inputs([x, y])))


def test_keeping_everything_inserts_nothing(model):
    made = graphoffload.transform(model, torch.randn(4, 8), policy=KeepAll())
    assert not made.plan.transfers
    assert "graphoffload" not in made.forward.code + made.backward.code


def test_other_shapes_are_captured_anew(model):
    made = graphoffload.transform(model, torch.randn(4, 8), policy=EVERYTHING)
    x = torch.randn(6, 8, requires_grad=True)
    eager = fresh(model)
    have = train_step(made, [x], module=model)
    assert_same_bits(have, train_step(eager, [fresh_inputs(x)], module=eager))


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
def test_partitioners(model, partitioner):
    made = graphoffload.transform(model, torch.randn(4, 8), policy=EVERYTHING, partitioner=partitioner)
    assert made.plan.transfers


def test_without_a_gradient_there_is_nothing_to_transform():
    with pytest.raises(UnsupportedGraphError, match="no output of the function needs a gradient"):
        graphoffload.transform(torch.sin, torch.randn(3))


def test_a_graph_break_is_refused():
    def function(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    with pytest.raises(UnsupportedGraphError, match="one graph"):
        graphoffload.transform(function, torch.randn(3, requires_grad=True))


def test_bad_arguments(model):
    with pytest.raises(PolicyError):
        graphoffload.transform(model, torch.randn(4, 8), policy="all")
    with pytest.raises(UsageError):
        graphoffload.transform(model, torch.randn(4, 8), partitioner="mincut")
    with pytest.raises(UsageError):
        graphoffload.transform(model, torch.randn(4, 8), machine="abacus")


def test_an_error_of_the_function_comes_out(model):
    with pytest.raises(Exception, match="9"):
        graphoffload.transform(model, torch.randn(4, 9))
