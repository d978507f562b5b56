"""Scenarios of the eager path about activation checkpointing: ranks 9 and 19, and memory that outlives its node."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from eager_training import EVERYTHING, offloading
from region_training import (
    ACTIVATION,
    BASE,
    ROWS,
    WIDTH,
    Net,
    assert_trains_as_plain,
    directly,
    plainly,
    reentrantly,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphoffload
from graphoffload._torch import saved_tensors_hooks_are_active
from graphoffload.errors import UsageError


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


# --- rank 9, the seed's bug as a kind: reloaded memory that outlives its node -----------------------------------------------


class HalfSquare(torch.autograd.Function):
    """Its gradient, for a gradient of one, is the very tensor that it saved."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(x)
        ctx.kept = kept
        return x.square().sum() / 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.kept is not None:
            ctx.kept.append(x)
        return x.view(-1)[:].view_as(x), None


class GivesItsMemoryAway(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in "123")
        self.run = run

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return self.run(lambda a: HalfSquare.apply(a, None), x)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("run", [directly, plainly, reentrantly], ids=["plain", "region", "reentrant"])
def test_a_gradient_may_be_a_view_of_reloaded_memory(x, run, backward_inside):
    """The gradient of `HalfSquare` is what it saved; the nodes behind it read it when its own node is long over."""
    stats = assert_trains_as_plain(
        GivesItsMemoryAway(run), x, backward_inside=backward_inside, loss=lambda output: output
    )
    assert stats.reloads


def test_the_gradient_of_a_leaf_may_be_reloaded_memory(x):
    """The leaf's own `.grad` is a view of what came back, and stays right while later steps move other things."""
    with offloading():
        with graphoffload.saved_tensors(EVERYTHING):
            loss = HalfSquare.apply(x, None)
        loss.backward()
        assert torch.equal(x.grad, x)
        model, other = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
        for _ in range(3):
            with graphoffload.saved_tensors(EVERYTHING):
                result = model(other).sin().cos()
            result.sum().backward()
        assert torch.equal(x.grad, x)


@pytest.mark.parametrize("run", [plainly, reentrantly, graphoffload.checkpoint], ids=["torch", "reentrant", "ours"])
@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
def test_a_recomputation_may_save_reloaded_memory_again(x, run, backward_inside):
    """The region's input comes back, and the operators run again save it and views of it; two regions share it."""

    def body(layer, a):
        return layer(a.view(2, -1).view_as(a) * a) + a.t().exp().t()

    class Twice(Net):
        def forward(self, x):
            x = self.first(x).sin()
            return self.last(self.run(self.body, self.layers[0], x) * self.run(self.body, self.layers[1], x))

    stats = assert_trains_as_plain(Twice(run, body), x, backward_inside=backward_inside)
    assert stats.moved >= 2 * 3  # the first layer's output, and the shared input of the regions, in each step


@pytest.mark.parametrize("run", [directly, plainly, reentrantly], ids=["plain", "region", "reentrant"])
def test_a_user_may_keep_what_came_back(x, run):
    """`ctx.saved_tensors`, kept in a list over three steps, still hold what was saved in each."""
    kept, saved = [], []

    class Keeping(GivesItsMemoryAway):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x).sin()
            saved.append(x.detach().clone())
            return self.run(lambda a: HalfSquare.apply(a, kept), x)

    model = Keeping(run)
    with offloading():
        for _ in range(3):
            with graphoffload.saved_tensors(EVERYTHING, model=model):
                loss = model(x)
            loss.backward()
        del loss
        gc.collect()
        assert len(kept) == 3
        for have, want in zip(kept, saved, strict=True):
            assert torch.equal(have, want)
        kept.clear()


# --- rank 19: the flavours ------------------------------------------------------------------------------------------------


def nested(region, x):
    return plainly(lambda a: plainly(region, plainly(torch.sin, a) * a) + a, x)


def nested_in_reentrant(region, x):
    return reentrantly(lambda a: plainly(region, a) + a, x)


class Scale(torch.autograd.Function):
    """Saves two tensors at once, as the last thing that a region does."""

    @staticmethod
    def forward(ctx, x, scale):
        y = x * scale
        ctx.save_for_backward(x, scale, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, scale, y = ctx.saved_tensors
        return grad * scale + 0 * y, (grad * x).sum()


def ending_in_a_function(region, x):
    return plainly(lambda a: Scale.apply(region(a), a.mean()), x)


def without_early_stop(region, x):
    return plainly(region, x, early_stop=False)


def with_odd_arguments(region, x):
    return plainly(lambda a, none, number, flag, text: region(a) * number, x, None, 3, True, "text")


def with_odd_arguments_reentrantly(region, x):
    return reentrantly(lambda a, none, number, flag, text: region(a) * number, x, None, 3, True, "text")


FLAVOURS = [
    plainly,
    reentrantly,
    nested,
    nested_in_reentrant,
    ending_in_a_function,
    without_early_stop,
    with_odd_arguments,
    with_odd_arguments_reentrantly,
    graphoffload.checkpoint,
]


@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("run", FLAVOURS, ids=lambda run: getattr(run, "__name__", str(getattr(run, "keywords", ""))))
def test_every_flavour_of_checkpoint(x, run, backward_inside):
    stats = assert_trains_as_plain(Net(run), x, backward_inside=backward_inside)
    # At least what goes into the three regions, of each step; the parameters are never among what moves.
    assert stats.moved_nbytes >= 3 * 3 * ACTIVATION
    assert stats.reloads


def test_what_a_region_makes_is_not_moved(x):
    """Trap 14: only a region's input moves. What it computes again in backward is left to the region."""
    stats = assert_trains_as_plain(Net(plainly), x, steps=1)
    assert stats.moved_nbytes == BASE


def test_the_reentrant_kind_packs_what_it_runs_again(x):
    """With backward inside the block its recomputation is a forward like any other, and its values are moved too."""
    outside = assert_trains_as_plain(Net(reentrantly), x, steps=1)
    inside = assert_trains_as_plain(Net(reentrantly), x, steps=1, backward_inside=True)
    assert inside.moved > outside.moved


@pytest.mark.parametrize("preserve_rng_state", [True, False])
@pytest.mark.parametrize("run", [plainly, reentrantly, graphoffload.checkpoint], ids=["torch", "reentrant", "ours"])
def test_dropout_inside_regions(x, run, preserve_rng_state):
    """Rank 6: the mask of backward is that of forward; moving values draws no random number of the program's."""

    def body(layer, a):
        return F.dropout(layer(a), 0.5) * F.dropout(a, 0.25)

    run = functools.partial(run, preserve_rng_state=preserve_rng_state)
    assert assert_trains_as_plain(Net(run, body), x).moved


@pytest.mark.parametrize("run", [plainly, nested, graphoffload.checkpoint], ids=["torch", "nested", "ours"])
def test_two_backwards_through_a_kept_graph(x, run):
    """Each recomputes, so each brings the regions' inputs back."""
    model = Net(run)
    want = model(x)
    want.sum().backward(retain_graph=True)
    once = x.grad.clone()
    want.sum().backward()
    twice = x.grad.clone()
    x.grad = None
    with offloading():
        with graphoffload.saved_tensors(EVERYTHING, model=model) as context:
            result = model(x)
        result.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, once)
        first = context.stats().reloads
        result.sum().backward()
        assert torch.equal(x.grad, twice)
        assert context.stats().reloads > first
        del result


def test_a_backward_of_a_part_and_then_of_the_rest(x):
    """`autograd.grad` to a tensor in the middle, then `backward`: each region is recomputed when it is needed."""

    def run(model, x):
        middle = model.layers[0](model.first(x).sin())
        middle = plainly(model.layers[1], middle)
        result = plainly(model.layers[2], middle).square().sum()
        (part,) = torch.autograd.grad(result, middle, retain_graph=True)
        result.backward()
        return part, x.grad

    model = Net(plainly)
    want = run(model, x)
    x.grad = None
    with offloading():
        with graphoffload.saved_tensors(EVERYTHING, model=model):
            part, grad = run(model, x)
        assert torch.equal(part, want[0])
        assert torch.equal(grad, want[1])


@pytest.mark.parametrize("run", [plainly, reentrantly, graphoffload.checkpoint], ids=["torch", "reentrant", "ours"])
def test_an_exception_while_a_region_is_run_again(x, run):
    """It reaches the user, hooks and slots are as before, and the next step is right."""
    calls = []

    def body(layer, a):
        calls.append(None)
        if len(calls) == 3 + 2:  # in backward, in the middle region
            raise KeyError("in the middle of backward")
        return layer(a)

    model = Net(run, body)
    with offloading():
        context = graphoffload.saved_tensors(EVERYTHING, model=model)
        with pytest.raises(KeyError, match="in the middle"), context:
            model(x).sum().backward()
        assert not saved_tensors_hooks_are_active()
        assert context.stats().moved
    x.grad = None
    assert_trains_as_plain(model, x)


# --- rank 19: tensors given by keyword ------------------------------------------------------------------------------------


class ByKeyword(nn.Module):
    """Its regions take one tensor by keyword and two inside a list in a dict."""

    def __init__(self, run):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.run = run

    def body(self, a, *, gate, pair, power=2):
        return self.second(a * gate).sin() * pair["both"][0] + pair["both"][1] ** power

    def forward(self, x):
        a = self.first(x)
        return self.run(self.body, a, gate=a + 1, pair={"both": [a + 2, (a + 3)], "none": None}, power=3)


def test_torchs_checkpoint_hides_tensors_given_by_keyword(x):
    """They are kept on the device by the region, and the bytes say that nobody could see them."""
    stats = assert_trains_as_plain(ByKeyword(plainly), x, steps=1)
    # The layer's input, and the region's one positional tensor.
    assert stats.moved_nbytes == 2 * ACTIVATION
    assert_trains_as_plain(ByKeyword(plainly), x, backward_inside=True)


def test_our_checkpoint_shows_tensors_given_by_keyword(x):
    stats = assert_trains_as_plain(ByKeyword(graphoffload.checkpoint), x, steps=1)
    assert stats.moved_nbytes == (2 + 3) * ACTIVATION
    assert_trains_as_plain(ByKeyword(graphoffload.checkpoint), x, steps=3, backward_inside=True)


def test_our_checkpoint_lets_go_of_them(x):
    """Nothing but the context holds them between forward and backward."""
    model = ByKeyword(graphoffload.checkpoint)
    storages = []

    def body(a, *, gate, pair, power):
        storages.extend(StorageWeakRef(t.untyped_storage()) for t in (gate, *pair["both"]))
        return ByKeyword.body(model, a, gate=gate, pair=pair, power=power)

    model.body = body
    with offloading() as device:
        with graphoffload.saved_tensors(EVERYTHING, model=model):
            result = model(x)
        while device.runtime.drop_oldest():
            pass
        assert [storage.expired() for storage in storages] == [True] * 3
        result.sum().backward()


def test_our_checkpoint_is_never_reentrant(x):
    with pytest.raises(UsageError, match="reentrant"):
        graphoffload.checkpoint(torch.sin, x, use_reentrant=True)
