"""Scenarios of the eager path about memory: whose it is (rank 2), that it moves once, that the peak falls, and the bounds."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from eager_training import (
    EVERYTHING,
    OWNED,
    VIRTUAL,
    KeepsByItself,
    Moves,
    gradients,
    offloading,
    plain_gradients,
    rows,
    same_as_plain,
    saving,
)
from subjects import Block, Decoder, Mlp
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_bits, fresh

import graphoffload
from graphoffload.planning.policy import OffloadAll

ROW = 16 * 4
"""Bytes of a row of sixteen numbers."""


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


@pytest.mark.parametrize("regions", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", OWNERS)
def test_no_byte_of_a_parameter_or_buffer_moves(device, moves, name, regions):
    """Rank 2: what the model owns is known by its storage, however it is saved, in regions that are run again too."""
    torch.manual_seed(0)
    ours = OWNERS[name]()

    def step(model, context):
        x = rows(0)
        with context:
            y = checkpoint(model, x, use_reentrant=False) if regions else model(x)
            y.sum().backward()
        return x.grad

    plain, context = fresh(ours), saving(ours)
    for _ in range(3):
        have, want = step(ours, context), step(plain, graphoffload.keep())
        assert torch.equal(have, want)
    assert_same_bits(gradients(ours), gradients(plain))
    assert context.stats().moved
    assert context.stats().kept_nbytes_by_reason[OWNED] > 0
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


# --- once, and no more than it shows ---------------------------------------------------------------------------------------


def test_one_storage_saved_by_many_operators_moves_once(device):
    """Probe P6: a tensor saved by five operators, and views of it, are one copy out and one back."""

    def step(model, context):
        x = rows(0)
        with context:
            h = x * 1
            y = h.sin() + h.cos() + h * h + h.t().exp().t() + h.view(2, -1).tanh().view(4, 16) + h[:, :8].sin().sum()
            del h
        y.sum().backward()
        return x.grad

    stats = same_as_plain(nn.Module(), step)
    # h; what exp, and tanh, return. Each once a step.
    assert stats.moved == 3 * 3
    assert stats.moved_nbytes == 3 * 3 * 4 * ROW
    assert stats.reloads <= stats.moved


def test_a_base_and_its_views(device, moves):
    """The storage moves as a whole if a view shows much of it; what follows, base or view, comes along."""
    x = rows(0)
    context = saving()
    for _ in range(3):
        with context:
            base = x * 1
            y = base[1:].sin().sum() + base.sin().sum() + base[0].sin().sum()
            del base
        y.backward()
    assert moves.nbytes == [4 * ROW] * 3


class Attention(nn.Module):
    """Project to query, key and value at once."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return (query @ key.t()) @ value


def test_parts_of_one_projection_move_once(device, moves):
    """Query, key and value are three parts of one storage: its bytes move once."""
    torch.manual_seed(0)
    model = Attention()
    context = saving(model)
    for _ in range(3):
        train(model, context)
    x, projection, product = 4 * ROW, 3 * 4 * ROW, 4 * 4 * 4
    assert sorted(moves.nbytes) == sorted([x, projection, product] * 3)


def test_a_small_part_of_a_large_storage_moves_alone(device, moves):
    """Two rows of a thousand: those two, from an address that keeps their alignment. Other parts are parcels of their own."""
    x = torch.randn(1000, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    (y[10:12] * 1).sum().backward()
    want = torch.zeros(1000, 16)
    want[101:103], want[700:701] = x[101:103].detach().cos(), x[700:701].detach().cos()
    for _ in range(3):
        with saving() as context:
            h = x * 1
            z = h[101:103].sin().sum() + h[700:701].sin().sum()
        (have,) = torch.autograd.grad(z, x)
        assert torch.equal(have, want)
        assert context.stats().moved == 2
    assert all(2 * ROW <= nbytes < 2 * ROW + 512 or ROW <= nbytes < ROW + 512 for nbytes in moves.nbytes)


def test_each_consumer_has_a_tensor_of_its_own(device):
    """Size, stride and offset are each save's own, and what one consumer does to its tensor's looks does not reach another."""
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            seen.append((tuple(x.shape), x.stride(), x.storage_offset(), x))
            assert not x.requires_grad
            x.t_() if x.ndim == 2 else x.unsqueeze_(0)
            return gradient.expand(seen[-1][0]).clone()

    x = rows(0)
    for _ in range(3):
        with saving():
            h = x * 1
            y = (
                Looks.apply(h)
                + Looks.apply(h.detach()[1:, ::2].requires_grad_())
                + Looks.apply(h.t())
                + Looks.apply(h[2])
            )
            del h
        y.backward()
        looks = {(shape, stride) for shape, stride, _, _ in seen}
        assert looks == {((4, 16), (16, 1)), ((3, 8), (16, 2)), ((16, 4), (1, 16)), ((16,), (1,))}
        assert len({id(tensor) for *_, tensor in seen}) == 4
        assert len({tensor.untyped_storage().data_ptr() for *_, tensor in seen}) == 1
        seen.clear()


# --- the peak, and the bounds ----------------------------------------------------------------------------------------------


def peak_of(device, model, context, *, steps, count=64):
    """Return the highest level of the ledger in each of some steps."""
    peaks = []
    for seed in range(steps):
        device.ledger.reset()
        with context:
            loss = model(rows(seed, count=count)).sum()
        loss.backward()
        del loss
        peaks.append(device.peak_nbytes)
    return peaks


@pytest.mark.parametrize(
    "make", [functools.partial(Mlp, depth=12), lambda: nn.Sequential(*(Block() for _ in "123456"))]
)
def test_the_peak_falls(device, make):
    """Every step takes a fraction of the memory; the later ones, in which copies overlap, no more than the first."""
    torch.manual_seed(0)
    model = make()

    def run(*args):
        x, context = args[0].unsqueeze(0) if isinstance(model, nn.Sequential) else args[0], None
        return model(x)

    kept = peak_of(device, run, saving(policy=KeepsByItself()), steps=2)
    ours = peak_of(device, run, saving(model), steps=5)
    assert max(ours) < min(kept) / 2
    assert max(ours[1:]) <= ours[0] * 1.1
    assert graphoffload.keep is not None


@pytest.mark.parametrize("budget", [0, 700, 2000, 5000])
def test_the_host_budget_is_never_passed(device, budget):
    """Law 4: what does not fit stays on the device, with that reason, and all is right."""
    torch.manual_seed(0)
    model = Mlp(depth=4)
    machine = VIRTUAL.with_budgets(host_budget=budget)
    policy = OffloadAll(min_nbytes=0)
    if budget == 0:
        with pytest.warns(graphoffload.GraphOffloadWarning, match="host budget"):
            stats = same_as_plain(model, train, policy=policy, machine=machine)
        assert stats.moved == 0
    else:
        stats = same_as_plain(model, train, policy=policy, machine=machine)
        assert stats.moved
    assert stats.host_peak_nbytes <= budget
    (reason,) = [why for why in stats.kept_nbytes_by_reason if "host budget" in why]
    assert stats.kept_nbytes_by_reason[reason] > 0
    # It is this context's affair: the next one knows nothing of it.
    free = same_as_plain(model, train)
    assert not any("host budget" in why for why in free.kept_nbytes_by_reason)
    assert device.stats().pageable_fallbacks == 0


@pytest.mark.parametrize("bound", [0, 300, 1000])
def test_the_bound_in_flight_is_held(device, bound):
    """Sources that are kept for their copy alone are at most so many bytes, and gradients do not care."""
    torch.manual_seed(0)
    stats = same_as_plain(Mlp(depth=6), train, machine=VIRTUAL.with_budgets(in_flight=bound), steps=5)
    assert stats.moved
    assert stats.in_flight_peak_nbytes <= bound


def test_the_devices_own_bound_in_flight_is_held():
    """Likewise where the runtime was given one."""
    torch.manual_seed(0)
    with offloading(in_flight_nbytes=600):
        stats = same_as_plain(Mlp(depth=6), train, steps=5)
    assert stats.moved
    assert stats.in_flight_peak_nbytes <= 600


def test_no_pinned_memory_left(device):
    """Rank 12: a device whose pinned memory is used up takes pageable memory, which is said once, and all is right."""
    torch.manual_seed(0)
    model = Mlp()
    with offloading(host_budget_nbytes=1024):
        context = saving(model)
        with pytest.warns(graphoffload.GraphOffloadWarning, match="could not be pinned"):
            loss_of = train(model, context)
        assert loss_of is not None
        assert context.stats().pinned_peak_nbytes <= 1024
    assert_same_bits(gradients(model), plain_gradients(model, 0))


def test_sizes_that_vary(device):
    """Rank 20: forty steps of other sizes; host memory follows the largest, is used again, and all of it is given back."""
    torch.manual_seed(0)
    model, sizes = Mlp(), [8 + 37 * step % 120 for step in range(40)]
    plain, context, most = fresh(model), saving(model), 0
    for seed, size in enumerate(sizes):
        device.runtime.pool.counts.in_use_peak_nbytes = 0
        model.zero_grad()
        plain.zero_grad()
        with context:
            loss = model(rows(seed, count=size)).sum()
        loss.backward()
        plain(rows(seed, count=size)).sum().backward()
        assert_same_bits(gradients(model), gradients(plain))
        most = max(most, context.stats().host_peak_nbytes)
        assert context.stats().host_nbytes == 0
    stats = context.stats()
    assert stats.pinned_peak_nbytes <= 1.1 * most + 16 * 512
    assert device.runtime.trim() == stats.pinned_nbytes
    assert device.stats().pinned_nbytes == 0


def test_everything_is_given_back_with_the_model(device):
    """What was learnt goes with the model, and nothing of ours keeps it, or what it computed, alive."""
    import gc
    import weakref

    torch.manual_seed(0)
    model = Decoder(depth=1)
    ids = torch.randint(32, (2, 8))
    context = graphoffload.saved_tensors(EVERYTHING, model=model)
    for _ in range(3):
        with context:
            loss = model(ids)
        loss.backward()
    gone = weakref.ref(model)
    del model, context, loss
    gc.collect()
    assert gone() is None
