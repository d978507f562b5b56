"""Scenarios of the eager path about memory that is the model's own (rank 2): not one byte of it moves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from eager_training import (
    EVERYTHING,
    OWNED,
    Moves,
    gradients,
    offloading,
    rows,
    same_as_plain,
    saving,
)
from subjects import Mlp
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_bits, fresh

import graphoffload


@pytest.fixture
def device():
    with offloading() as device:
        yield device


@pytest.fixture
def moves(device):
    return Moves.of(device)


# --- rank 2: parameters and buffers ----------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen base, saved as a view because its input needs a gradient, and an adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = (self.base(x) + self.up(self.down(x))).sin()
        return x


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.embed = nn.Embedding(12, 16)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        ids = x.detach().abs().argmax(-1) % 12
        return self.head(self.mix(self.embed(ids) + x).sin()) + F.linear(x, self.embed.weight)


class Sliced(nn.Module):
    """A weight that is only ever used as some view of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        x = (x @ self.weight.t()).sin() @ self.weight[:, 8:]
        return (x @ self.weight.view(2, 8, 16)[1]).sin() * self.weight[3].exp().expand(4, -1) * self.weight.diagonal()


class Buffered(nn.Module):
    """Buffers saved as they are, as views, and through an operator that returns a view."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.rand(16).exp())
        self.register_buffer("table", torch.randn(32, 16), persistent=False)

    def forward(self, x):
        x = self.linear(x) * self.scale + (self.linear(x).sin() @ self.table.t()) @ self.table
        return self.norm(x) * self.table[4:8].unsqueeze(0).squeeze(0)


OWNERS = {"frozen base": Lora, "tied head": Tied, "views of a weight": Sliced, "buffers": Buffered}


def train(model, context):
    x = rows(0)
    with context:
        y = model(x)
    y.sum().backward()
    return x.grad


@pytest.mark.parametrize("regions", ["none", "not reentrant", "reentrant"])
@pytest.mark.parametrize("name", OWNERS)
def test_no_byte_of_a_parameter_or_buffer_moves(device, moves, name, regions):
    """Rank 2: what the model owns is known by its storage, however it is saved, in regions that are run again too."""
    torch.manual_seed(0)
    ours = OWNERS[name]()

    def step(model, context):
        x = rows(0)
        with context:
            y = model(x) if regions == "none" else checkpoint(model, x * 1, use_reentrant=regions == "reentrant")
            y.sum().backward()
        return x.grad

    plain, context = fresh(ours), saving(ours)
    for _ in range(3):
        assert torch.equal(step(ours, context), step(plain, graphoffload.keep()))
    assert_same_bits(gradients(ours), gradients(plain))
    assert context.stats().moved
    # A region that is not reentrant has hooks of its own inside.
    assert (OWNED in context.stats().kept_nbytes_by_reason) == (regions != "not reentrant")
    assert moves.of_memory(*ours.parameters(), *ours.buffers()) == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_buffer_given_to_a_region(device, moves, use_reentrant):
    """Rank 2: what a region is given is what it saves; a buffer, a weight or a view of one among it stays."""
    torch.manual_seed(0)
    ours = Buffered()

    def body(x, table, weight):
        return (x @ weight).sin() @ table.t()

    def step(model, context):
        x = rows(0)
        with context:
            y = checkpoint(body, x * 1, model.table[4:], model.linear.weight.t(), use_reentrant=use_reentrant)
            y.sum().backward()
        return x.grad

    plain, context = fresh(ours), saving(ours)
    for _ in range(3):
        assert torch.equal(step(ours, context), step(plain, graphoffload.keep()))
    assert torch.equal(ours.linear.weight.grad, plain.linear.weight.grad)
    assert context.stats().moved
    assert context.stats().kept_nbytes_by_reason[OWNED] >= ours.table.nbytes + ours.linear.weight.nbytes
    assert moves.of_memory(*ours.parameters(), *ours.buffers()) == 0


@pytest.mark.parametrize("name", ["frozen base", "tied head", "views of a weight"])
def test_parameters_are_known_without_the_model(device, moves, name):
    """Rank 2: by their type, and as the base of the views that are saved."""
    torch.manual_seed(0)
    model = OWNERS[name]()
    for _ in range(3):
        context = graphoffload.saved_tensors(EVERYTHING)
        train(model, context)
        assert context.stats().moved
    assert moves.of_memory(*model.parameters()) == 0


def test_a_parameter_that_is_pointed_elsewhere_between_steps(device, moves):
    """Rank 2: sharded training points `.data` to other memory; the storages are read anew at each entering."""
    torch.manual_seed(0)
    model, weights = Sliced(), [torch.randn(16, 16) / 4 for _ in range(4)]
    context = saving(model)
    for weight in weights:
        model.weight.data = weight
        model.weight.grad = None
        have = train(model, context)
        plain = Sliced()
        plain.weight.data = weight.clone()
        want = train(plain, graphoffload.keep())
        assert torch.equal(have, want)
        assert torch.equal(model.weight.grad, plain.weight.grad)
    assert moves.of_memory(*weights) == 0
    assert context.stats().moved


def test_a_parameter_that_is_pointed_elsewhere_inside_the_block(device, moves):
    """Rank 2: gathered in the middle of forward, freed and gathered again: still a parameter, whatever its memory."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    shards = [layer.weight.detach().clone() for _ in range(3)]
    context = saving(layer)
    for _ in range(3):
        x = rows(0)
        with context:
            y = x * 1
            for shard in shards:
                layer.weight.data = shard
                y = layer(y).sin()
        y.sum().backward()
    assert moves.of_memory(*shards) == 0
    assert context.stats().moved


class Flat(nn.Module):
    """One flat parameter; before forward the layers' weights are set to views of it, as fully sharded training does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in "123")
        self.flat = nn.Parameter(torch.cat([layer.weight.detach().flatten() for layer in self.layers]) / 2)
        for layer in self.layers:
            del layer.weight

    def forward(self, x):
        for layer, part in zip(self.layers, self.flat.split(256), strict=True):
            layer.weight = part.view(16, 16)
            x = x + layer(x).sin()
            del layer.weight
        return x


@pytest.mark.parametrize("known", [True, False], ids=["with model", "without"])
def test_weights_that_are_views_of_a_flat_parameter(device, moves, known):
    """Rank 2: zero bytes, with the model given or not, also when the flat memory is another in each step."""
    torch.manual_seed(0)
    model = Flat()
    plain, flats = fresh(model), []
    for step in range(3):
        context = graphoffload.saved_tensors(EVERYTHING, model=model if known else None)
        flats.append(model.flat.detach().clone())
        model.flat.data = flats[-1]
        model.zero_grad()
        plain.zero_grad()
        assert torch.equal(train(model, context), train(plain, graphoffload.keep())), step
        assert torch.equal(model.flat.grad, plain.flat.grad), step
        assert context.stats().moved
    assert moves.of_memory(*flats) == 0


def test_modules_that_are_added_later_and_parts_of_the_model(device, moves):
    """Parameters registered between steps count from the next entering on; so do those of a model's parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16))
    context = saving(model)
    for _ in range(3):
        train(model, context)
        model.append(nn.Linear(16, 16))
        model[-1].register_buffer("extra", torch.rand(16))
    assert moves.of_memory(*model.parameters(), *model.buffers()) == 0


def test_a_copy_of_a_weight_is_no_weight(device, moves):
    """What autocast makes of a weight is freed after forward like any activation, so it may move; the weight may not."""
    torch.manual_seed(0)
    model = Mlp()

    def step(model, context):
        x = rows(0)
        with torch.autocast("cpu", dtype=torch.bfloat16), context:
            loss = model(x).float().sum()
        loss.backward()
        return x.grad

    assert same_as_plain(model, step).moved
