"""Scenarios of the eager path about when backward comes: never, in part, twice, later, or in another order."""

from __future__ import annotations

import gc

import pytest
import torch
from eager_training import (
    EVERYTHING,
    assert_empty,
    assert_next_step_is_right,
    gradients,
    offloading,
    plain_gradients,
    rows,
    same_as_plain,
    saving,
)
from subjects import Mlp
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from training import assert_same_bits, fresh

from graphoffload.planning.policy import KeepAll


@pytest.fixture
def device():
    with offloading() as device:
        yield device


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp()


# --- rank 11: never unpacked -----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = Mlp(depth=2), Mlp(depth=2), Mlp(depth=2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.used(self.frozen(x)), self.unused(x)


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
def test_a_branch_that_nobody_uses(device, inside):
    """Rank 11: one of two outputs is dropped, and a tower is frozen. Its slots go when the output does."""

    def step(model, context):
        with context:
            used, unused = model(rows(0))
            if inside:
                used.sum().backward()
        if not inside:
            used.sum().backward()
        return used, unused

    torch.manual_seed(0)
    stats = same_as_plain(Branches(), step)
    assert 0 < stats.prefetch_hits + stats.prefetch_misses < stats.moved  # some were never asked for


class Experts(nn.Module):
    """Send each row to one expert; one may get no row at all."""

    def __init__(self, *, count=4):
        super().__init__()
        self.router = nn.Linear(16, count)
        self.experts = nn.ModuleList(Mlp(depth=1) for _ in range(count))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            where = (chosen == index).nonzero().flatten()
            result = result.index_add(0, where, expert(x[where]) * weights[where, index, None])
        return result


def test_experts_that_get_no_rows_or_others_each_step(device):
    """Ranks 11 and 25: the rows of an expert vary from step to step, down to none; its empty tensors have no bytes to move."""
    seeds = iter([seed for seed in range(8) for _ in ("plain", "ours")])

    def step(model, context):
        x = rows(next(seeds), count=3)
        with context:
            loss = model(x).square().sum()
        loss.backward()
        return x.grad

    torch.manual_seed(0)
    stats = same_as_plain(Experts(), step, steps=8)
    assert stats.moved
    assert "it has no bytes" in stats.kept_nbytes_by_reason


def test_backward_is_never_called(model, device):
    """Rank 11: the loss is dropped; slots go with it, and the next step is right."""
    context = saving(model)
    for seed in range(4):
        with context:
            loss = model(rows(seed)).sum()
        assert device.stats().slots > 0
        del loss
        assert_empty(device)
    assert context.stats().reloads == 0
    assert_next_step_is_right(context, model, device)
    pinned = device.stats().pinned_nbytes
    assert_next_step_is_right(context, model, device)
    assert device.stats().pinned_nbytes == pinned


def test_a_loss_dropped_inside_the_block(model, device):
    """Rank 11: forwards follow one another in one block and none is kept, so nothing on the host is either."""
    context = saving(model)
    with context:
        for seed in range(4):
            model(rows(seed)).sum()
            assert_empty(device)
        loss = model(rows(5)).sum()
    loss.backward()
    assert_same_bits(gradients(model), plain_gradients(model, 5))


def test_an_output_that_is_kept_makes_no_cycle(device):
    """Rank 11 (probe P15): autograd would never free a value that holds itself; exp saves its own output."""
    gc.disable()
    try:
        for policy in (KeepAll(), EVERYTHING):
            with saving(policy=policy):
                y = rows(0).exp()
            dropped = StorageWeakRef(y.untyped_storage())
            del y
            device.runtime.synchronize()
            assert dropped.expired(), policy
        assert device.stats().slots == 0
    finally:
        gc.enable()


def test_evaluation_between_forward_and_backward(model, device):
    """Rank 11 (probe P17): no_grad, inference_mode and eval inside the block save nothing and do no harm."""
    context = saving(model)
    with context:
        loss = model(rows(0)).sum()
        packed, slots = context.stats().packed, device.stats().slots
        with torch.no_grad():
            assert torch.equal(model(rows(1)), fresh(model)(rows(1)))
        with torch.inference_mode():
            model(rows(2).detach())
        model.eval()
        with torch.no_grad():
            model(rows(3))
        model.train()
    with context, torch.no_grad():
        model(rows(4))
    with torch.inference_mode(), context:
        model(rows(4).detach())
    assert (context.stats().packed, device.stats().slots) == (packed, slots)
    loss.backward()
    assert_same_bits(gradients(model), plain_gradients(model, 0))


def test_an_evaluation_that_saves_is_a_program_of_its_own(model, device):
    """Rank 11: validation without no_grad saves for nobody, every few steps; training goes on as it was."""
    context = saving(model)
    for seed in range(6):
        if seed % 3 == 2:
            model.eval()
            with context:
                model(rows(seed, count=7)).sum()
            model.train()
        assert_next_step_is_right(context, model, device)


# --- more than one backward ------------------------------------------------------------------------------------------------


def test_a_second_backward(model, device):
    """Each backward through a kept graph brings everything back; without `retain_graph` a second one raises as ever."""
    context = saving(model)
    for _ in range(3):
        model.zero_grad()
        with context:
            loss = model(rows(0)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same_bits(gradients(model), plain_gradients(model, 0, 0))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        del loss
        assert_empty(device)


def test_a_backward_to_some_leaves_and_then_to_the_rest(model, device):
    """A part of the graph is walked first: what it asks for twice comes twice, in whatever order."""

    def step(model, context):
        x = rows(0)
        with context:
            loss = model(x).sum()
        last, *others = [*model.parameters()][::-1]
        loss.backward(inputs=[last], retain_graph=True)
        loss.backward(inputs=others[-2:], retain_graph=True)
        loss.backward(inputs=[*others[:-2], x])
        return x.grad

    assert same_as_plain(model, step).moved


def test_gradients_asked_for_several_times(model, device):
    """`autograd.grad` of several outputs, to several inputs, over one graph."""

    def step(model, context):
        x, y = rows(0), rows(1)
        with context:
            first = model(x)
            second = (first * model(y)).sin()
        found = [*torch.autograd.grad(second.sum(), [x, y], retain_graph=True)]
        for row in range(3):
            found += torch.autograd.grad(first[row].sum(), [x, model.layers[1].weight], retain_graph=True)
        found += torch.autograd.grad(second[0].sum(), [y])
        return found

    assert same_as_plain(model, step).moved


def test_saved_values_read_from_the_graph(device):
    """A node's `_saved_*` attributes are an unpack like any other, also in between packs and after another."""
    context = saving()
    for _ in range(3):
        with context:
            h = rows(0) * 2
            y = h.sin()
            assert torch.equal(y.grad_fn._saved_self, h)
            z = y.exp()
        assert torch.equal(z.grad_fn._saved_result, z)
        assert torch.equal(z.grad_fn._saved_result, z)
        z.sum().backward()


def test_batched_backwards(device):
    """A jacobian row by row, and all rows under vmap: hooks run inside vmap then, on plain memory."""

    def f(x):
        return (x * 2).sin() * (x * 3).exp()

    x = rows(0, count=1).detach()
    for vectorize in (False, True):
        want = torch.autograd.functional.jacobian(f, x, vectorize=vectorize)
        for _ in range(3):
            with saving() as context:
                have = torch.autograd.functional.jacobian(f, x, vectorize=vectorize)
            assert torch.equal(have, want)
            assert context.stats().moved


# --- rank 23: order and multiplicity ---------------------------------------------------------------------------------------


ORDERS = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]


@pytest.mark.parametrize("contexts", ["one each", "one for all"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_micro_batches_in_flight(model, device, order, contexts):
    """Rank 23: several forwards, then their backwards: first in first out, last in first out, or neither."""

    def step(model, context):
        if contexts == "one for all":
            with context:
                losses = [model(rows(seed)).sum() for seed in range(4)]
        else:
            losses = []
            for seed in range(4):
                with context:
                    losses.append(model(rows(seed)).sum())
        for index in order:
            losses[index].backward()
            losses[index] = None

    stats = same_as_plain(model, step, steps=4)
    assert 0 < stats.moved <= stats.prefetch_hits + stats.prefetch_misses  # every one came back


def test_the_order_of_backwards_changes_from_step_to_step(model, device):
    """Rank 23: what was learnt in one step is wrong in the next, and costs time only."""
    orders = iter([order for order in (*ORDERS, *ORDERS[::2]) for _ in ("plain", "ours")])

    def step(model, context):
        losses = []
        for seed in range(4):
            with context:
                losses.append(model(rows(seed, count=seed + 1)).sum())
        for index in next(orders):
            losses[index].backward()

    assert same_as_plain(model, step, steps=5).moved


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Mlp(depth=2), Mlp(depth=2)


@pytest.mark.parametrize(
    "schedule",
    ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 F2 B2 F3 B1 B3"],
    ids=["1F1B", "all forward", "mixed"],
)
def test_a_pipeline(device, schedule):
    """Rank 23: two stages with a cut between, forwards and backwards of micro-batches interleaved."""

    def step(model, context):
        cuts = {}
        for kind, micro in [(one[0], int(one[1])) for one in schedule.split(" ")]:
            if kind == "F":
                with context:
                    middle = model.first(rows(micro))
                inlet = middle.detach().requires_grad_()
                with context:
                    loss = model.second(inlet).sum()
                cuts[micro] = middle, inlet, loss
            else:
                middle, inlet, loss = cuts.pop(micro)
                loss.backward()
                middle.backward(inlet.grad)

    torch.manual_seed(0)
    assert same_as_plain(Stages(), step, steps=4).moved


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
def test_gradient_accumulation(model, device, inside):
    """Rank 23: gradients add up over micro-batches, an optimizer steps in place, over and over."""
    plain = fresh(model)
    context = saving(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        for micro in range(3):
            with context:
                loss = model(rows(10 * step + micro)).sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            plain(rows(10 * step + micro)).sum().backward()
        assert_same_bits(gradients(model), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert context.stats().moved


def test_one_block_around_the_whole_training(model, device):
    """The context is entered once; backward, optimizer and all steps are inside."""
    plain = fresh(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, plain)]
    context = saving(model)
    with context:
        for step in range(5):
            optimizers[0].zero_grad()
            model(rows(step)).sum().backward()
            optimizers[0].step()
            assert_empty(device)
    for step in range(5):
        optimizers[1].zero_grad()
        plain(rows(step)).sum().backward()
        optimizers[1].step()
    assert_same_bits(gradients(model), gradients(plain))
    assert context.stats().prefetch_hits > 0


class Shared(nn.Module):
    """One layer called several times, another skipped now and then."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = Mlp(depth=1), Mlp(depth=1)

    def forward(self, x):
        x = self.layer(self.layer(x))
        return self.layer(self.other(x))


def test_a_layer_that_is_called_often(device):
    """Rank 23: the same layer three times, and once more on what it has seen before."""

    def step(model, context):
        x = rows(0)
        with context:
            y = model(x) + model.layer(x)
        y.sum().backward()
        return x.grad

    torch.manual_seed(0)
    assert same_as_plain(Shared(), step).moved


def test_layers_dropped_at_random(device):
    """Rank 23: layers are left out by chance (LayerDrop), so that hardly two steps save the same."""
    chosen = [(1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 0), (1, 1, 1, 1), (1, 0, 1, 1), (0, 1, 1, 0)]
    calls = iter([one for one in chosen for _ in ("plain", "ours")])

    def step(model, context):
        with context:
            x = rows(0) * 1
            for layer, runs in zip(model.layers, next(calls), strict=True):
                x = x + layer(x).sin().exp() if runs else x
        x.sum().backward()

    torch.manual_seed(0)
    assert same_as_plain(Mlp(depth=4), step, steps=6).moved
