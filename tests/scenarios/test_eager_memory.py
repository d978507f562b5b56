"""Scenarios of the eager path about memory: that it moves once, that the peak falls, and the bounds."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from eager_training import (
    EVERYTHING,
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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from training import assert_same_bits, fresh

import graphoffload
from graphoffload.planning.policy import OffloadAll, OffloadBytes

ROW = 16 * 4
"""Bytes of a row of sixteen numbers."""


@pytest.fixture
def device():
    with offloading() as device:
        yield device


@pytest.fixture
def moves(device):
    return Moves.of(device)


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
        seen.clear()


def train(model, context):
    x = rows(0)
    with context:
        y = model(x)
    y.sum().backward()
    return x.grad


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


class Blocks(nn.Sequential):
    def forward(self, x):
        return super().forward(x.unsqueeze(0))


@pytest.mark.parametrize(
    ("make", "largest"),
    [(lambda: Mlp(depth=12), 64 * ROW), (lambda: Blocks(*(Block() for _ in "123456")), 4 * 64 * ROW)],
    ids=["mlp", "blocks"],
)
def test_the_peak_falls(device, make, largest):
    """Every step takes a fraction of the memory.

    The later ones, in which copies overlap, take no more than the first but for the one reload that is always ahead.
    """
    torch.manual_seed(0)
    model = make()
    kept = peak_of(device, model, saving(policy=KeepsByItself()), steps=2)
    ours = peak_of(device, model, saving(model), steps=5)
    assert max(ours) < min(kept) / 2
    assert max(ours[1:]) <= ours[0] + largest


def test_a_retained_graph_holds_host_memory_only(device):
    """What came back is let go with the last reader of it, though the graph, and so the values, stay for another backward."""
    torch.manual_seed(0)
    model = Mlp(depth=12)
    context = saving(model)
    for _ in range(3):
        with context:
            loss = model(rows(0, count=64)).sum()
        device.runtime.synchronize()
        level = device.runtime.device.memory().current
        for _ in range(2):
            loss.backward(retain_graph=True)
            device.runtime.synchronize()
            assert device.runtime.device.memory().current <= level
            assert device.stats().host_nbytes == 12 * 3 * 64 * ROW


@pytest.mark.parametrize("budget", [0, 700, 2000, 3000])
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


def test_no_pinned_memory_left():
    """Rank 12: a device whose pinned memory is used up takes pageable memory, which is said once, and all is right."""
    torch.manual_seed(0)
    model = Mlp()
    want = plain_gradients(model, 0)
    with offloading(host_budget_nbytes=300):
        context = saving(model)
        with pytest.warns(graphoffload.GraphOffloadWarning, match="could not be pinned"):
            train(model, context)
        assert context.stats().pinned_peak_nbytes <= 300
        assert_same_bits(gradients(model), want)


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


@pytest.mark.parametrize("amount", ["64kB", "128kB", "200kB", "1GB"])
def test_what_runs_ahead_costs_at_most_one_parcel(device, amount):
    """Rank 21: from the second step on copies overlap compute, in the memory that the kept values leave as they come back.

    These come back first, one by one: nothing but the room may decide how much is reloaded meanwhile.
    """
    parcel = 16_384
    context = graphoffload.saved_tensors(OffloadBytes(amount, min_nbytes=0), model=nn.Module())
    peaks = []
    for _ in range(5):
        device.ledger.reset()
        x = torch.randn(parcel // 4, requires_grad=True)
        with context:
            h = x
            for _ in range(16):
                h = h.sin()
        h.sum().backward()
        del h
        peaks.append(device.peak_nbytes)
    kept = 16 - context.stats().moved // 5
    # Beside what is kept: the value in use, the one that comes after it, and the one reload that is always ahead.
    assert max(peaks) <= (kept + 3) * parcel
    assert context.stats().prefetch_misses < context.stats().prefetch_hits


class Counting(TorchDispatchMode):
    """Show the ledger every tensor that an operator reads or makes, as an allocator would see them."""

    def __init__(self, ledger):
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ledger.tick(
            str(func), [leaf for leaf in pytree.tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
        )
        return out


@pytest.mark.parametrize("in_flight", [None, 4 * 16_384])
@pytest.mark.parametrize("amount", ["64kB", "128kB", "1GB"])
def test_the_peak_does_not_creep(device, amount, in_flight):
    """Rank 21: with all that operators allocate counted, and the allocator's peak never reset, the peak is the first step's."""
    machine = graphoffload.Machine.named("virtual").with_budgets(in_flight=in_flight)
    policy = OffloadBytes(amount, min_nbytes=0)
    context = graphoffload.saved_tensors(policy, model=nn.Module(), machine=machine)
    peaks = []
    for _ in range(12):
        begin = len(device.ledger.samples)
        x = torch.randn(4096, requires_grad=True)
        with Counting(device.ledger):
            with context:
                h = x * 2
                for _ in range(16):
                    h = h.sin()
            h.backward(torch.ones_like(h))
        del h
        peaks.append(max(sample.nbytes for sample in device.ledger.samples[begin:]))
    assert set(peaks) == {peaks[0]}
