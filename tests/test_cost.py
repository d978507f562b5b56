"""Arithmetic and traffic of nodes, and measured times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphoffload.graphs.cost import flops_of
from graphoffload.graphs.timing import measured_steps
from graphoffload.planning.values import Facts, Step
from tests.pairs import Pair, capture, facts_of


def step(facts: Facts, op: str) -> Step:
    """Return the first step of an operator."""
    return next(step for step in facts.steps if step.op.startswith(op))


@pytest.mark.parametrize("dynamic", [False, True])
def test_matrix_products_count_multiply_and_add_and_their_tensors(dynamic: bool) -> None:
    pair = capture(nn.Linear(8, 16), torch.randn(4, 8), dynamic=dynamic)
    product = step(facts_of(pair), "aten.addmm")
    assert product.flops == 2 * 4 * 8 * 16
    assert product.nbytes == 4 * (4 * 8 + 8 * 16 + 16 + 4 * 16)
    assert product.dtype == "float32"


def test_views_and_elements_cost_nothing() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        a, b = x.sin().t().split(4, 0)
        return (a.exp() * b).sum()

    facts = facts_of(capture(f, torch.randn(4, 8, requires_grad=True)))
    free = [item for item in facts.forward if item.op in ("aten.t.default", "getitem", "aten.split.Tensor")]
    assert len(free) >= 3
    assert all(item.flops == item.nbytes == 0 for item in free)


@pytest.mark.parametrize(("causal", "halves"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_counts_its_scores_once_and_half_of_them_when_causal(
    causal: bool, halves: int, grouped: bool
) -> None:
    def f(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=grouped)

    heads = 4
    q = torch.randn(2, heads, 32, 8, requires_grad=True)
    k = torch.randn(2, 2 if grouped else heads, 32, 8)
    facts = facts_of(capture(f, q, k))
    forward = [item for item in facts.forward if "scaled_dot_product" in item.op]
    if not forward:
        pytest.skip("this torch decomposes this attention into products")
    assert forward[0].flops == 2 * 2 * heads * 32 * 32 * (8 + 8) // halves
    backward = [item for item in facts.backward if "scaled_dot_product" in item.op]
    assert backward[0].flops == 2 * 2 * heads * 32 * 32 * (3 * 8 + 2 * 8) // halves


def test_convolution_counts_forward_and_backward() -> None:
    facts = facts_of(capture(nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 8, 8, requires_grad=True)))
    one_way = 2 * 2 * 4 * 8 * 8 * 3 * 9
    assert step(facts, "aten.convolution.default").flops == one_way
    assert step(facts, "aten.convolution_backward.default").flops == 2 * one_way


def test_an_expanded_input_is_read_once_and_a_lookup_reads_what_it_picks() -> None:
    def f(x: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(3, 4, 8), functional.embedding(tokens, table).view(3, 8, 2)).sum()

    pair = capture(f, torch.randn(4, 8), torch.randn(1000, 16, requires_grad=True), torch.zeros(3, dtype=torch.int64))
    facts = facts_of(pair)
    lookup = step(facts, "aten.embedding.default")
    assert lookup.nbytes == 2 * 3 * 16 * 4 + 3 * 8
    assert step(facts, "aten.bmm.default").nbytes == 4 * (4 * 8 + 3 * 8 * 2 + 3 * 4 * 2)


@torch.library.custom_op("graphoffload_tests::unheard_of", mutates_args=())
def unheard_of(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unheard_of.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


unheard_of.register_autograd(lambda context, gradient: gradient)


def test_an_unknown_operator_counts_its_tensors_and_is_not_fused() -> None:
    pair = capture(lambda x: unheard_of(x.sin()).cos().sum(), torch.randn(4, 8, requires_grad=True))
    for fused in (False, True):
        item = step(facts_of(pair, fused=fused), "graphoffload_tests.unheard_of")
        assert (item.flops, item.nbytes) == (0, 2 * 4 * 8 * 4)


# --- Measured times ---------------------------------------------------------------------------------------------------


def _measured(pair: Pair, **options: Any) -> tuple[Facts, tuple[Step, ...]]:
    facts = facts_of(pair)
    return facts, measured_steps(pair.forward, facts.forward, device=torch.device("cpu"), **options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_steps_with_a_cost_are_measured_and_nothing_else_changes(dynamic: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    facts, steps = _measured(capture(model, torch.randn(4, 8), dynamic=dynamic))
    assert [item.name for item in steps] == [item.name for item in facts.forward]
    for before, after in zip(facts.forward, steps, strict=True):
        assert (before.op, before.flops, before.nbytes) == (after.op, after.flops, after.nbytes)
        assert (after.seconds is not None and after.seconds > 0) == bool(before.flops or before.nbytes)


def test_equal_nodes_are_measured_once() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    _, steps = _measured(capture(model, torch.randn(4, 8, requires_grad=True)))
    times = {item.seconds for item in steps if item.op == "aten.addmm.default"}
    assert len(times) == 1
    assert None not in times


def test_fused_nodes_and_nodes_that_cannot_run_alone_keep_the_estimate() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    _, steps = _measured(capture(model, torch.randn(4, 8)), fused=True)
    by_op = {item.op: item.seconds for item in steps}
    assert by_op["aten.tanh.default"] is None
    assert by_op["aten.addmm.default"] is not None
    lookup = capture(
        lambda table, tokens: functional.embedding(tokens, table).view(torch.int32).float() * table.sum(),
        torch.randn(0, 4, requires_grad=True),
        torch.zeros(0, dtype=torch.int64),
    )
    _measured(lookup)  # an operator that refuses made-up inputs is no error


def test_measuring_leaves_random_state_as_it_was() -> None:
    pair = capture(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    _measured(pair)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operator_that_is_run_with_its_random_state_counts_as_it_does_alone() -> None:
    """In a region torch runs a random operator inside another one, which saves its state or hands it back."""
    graph = torch.fx.Graph()
    query, state = graph.placeholder("query"), graph.placeholder("state")
    query.meta["val"] = torch.empty(2, 4, 64, 8, dtype=torch.bfloat16, device="meta")
    state.meta["val"] = torch.empty(16, dtype=torch.uint8)
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    alone = graph.call_function(attention, (query, query, query, 0.5))
    saving = graph.call_function(torch.ops.higher_order.run_and_save_rng_state, (attention, query, query, query, 0.5))
    again = graph.call_function(torch.ops.higher_order.run_with_rng_state, (state, attention, query, query, query, 0.5))
    assert flops_of(alone) > 0
    assert flops_of(saving) == flops_of(again) == flops_of(alone)
