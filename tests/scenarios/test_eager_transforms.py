"""Scenarios of the eager path about gradients of gradients, torch.func, and `keep`."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from eager_training import (
    assert_saves_plainly,
    gradients,
    offloading,
    plain_gradients,
    rows,
    same_as_plain,
    saving,
)
from subjects import Mlp
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from training import assert_same_bits, fresh

import graphoffload
from graphoffload.runtime.keep import active


@pytest.fixture
def device():
    with offloading() as device:
        yield device


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp()


# --- higher order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_gradients_of_gradients(model, device, inside):
    """Probe P18: backward with `create_graph` saves values itself, shown to the context where that is still entered."""

    def step(model, context):
        x = rows(0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            y = model(x)
            if not inside:
                stack.close()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
            (curve.sum() + slope.norm()).backward()
        return x.grad, slope, curve

    assert same_as_plain(model, step).moved


def test_a_penalty_on_the_gradient_in_every_step(model, device):
    """The usual use: the norm of the input's gradient is part of the loss."""
    context, plain = saving(model), fresh(model)

    def loss_of(model, x):
        y = model(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()

    for seed in range(3):
        model.zero_grad()
        plain.zero_grad()
        with context:
            loss = loss_of(model, rows(seed))
        loss.backward()
        loss_of(plain, rows(seed)).backward()
        assert_same_bits(gradients(model), gradients(plain))


def test_numerical_gradients(device):
    """torch's own checks against differences, first and second order, fast and slow, batched ones among them."""

    def f(x):
        h = (x * 2).sin()
        return h * h.exp(), h.cumsum(0).tanh()

    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    with saving() as context:
        assert torch.autograd.gradcheck(f, (x,), check_batched_grad=True)
        assert torch.autograd.gradgradcheck(f, (x,))
    assert context.stats().moved


def test_forward_mode_over_reverse(device):
    """A dual number's tangent is not in its memory; what comes back has it all the same, and backward a tangent of its own."""

    def both(context):
        x, direction = rows(0), rows(1).detach()
        with forward_ad.dual_level():
            with context:
                h = forward_ad.make_dual(x, direction) * 2
                y = h.sin() * h.exp()
            (slope,) = torch.autograd.grad(y.sum(), x)
            return forward_ad.unpack_dual(slope)

    want = both(contextlib.nullcontext())
    for _ in range(3):
        context = saving()
        have = both(context)
        assert context.stats().moved
        assert torch.equal(have.primal, want.primal)
        assert torch.equal(have.tangent, want.tangent)


# --- torch.func ------------------------------------------------------------------------------------------------------------


def test_vmap_inside(device):
    """torch.vmap works under hooks; what it saves is wrapped, and stays."""
    context = saving()
    with torch.no_grad():
        weight = rows(1, count=16)
    x = rows(0)
    y = rows(0)
    with context:
        result = torch.vmap(lambda row: (row @ weight).sin().exp())(x).sin()
    result.sum().backward()
    torch.vmap(lambda row: (row @ weight).sin().exp())(y).sin().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert context.stats().moved


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "grad_and_value": lambda f, x: torch.func.grad_and_value(f)(x)[0],
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(()))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside(device, name):
    """They raise torch's error, with a note that names the way out; on that way they work."""

    def f(x):
        return x.sin().exp().sum()

    x = rows(0).detach()
    want = TRANSFORMS[name](f, x)
    context = saving()
    with pytest.raises(RuntimeError) as caught, context:
        TRANSFORMS[name](f, x)
    assert any("graphoffload.keep()" in note for note in caught.value.__notes__)
    assert_saves_plainly()
    with context:
        y = x.clone().requires_grad_().sin()
        with graphoffload.keep():
            slope = TRANSFORMS[name](f, x)
        assert active() is context
        y = y.exp()
    assert torch.equal(slope, want)
    y.sum().backward()
    assert torch.equal(TRANSFORMS[name](f, x), want)


def test_an_error_of_another_kind_has_no_note(device):
    """The hint is for torch.func alone."""
    with pytest.raises(RuntimeError) as caught, saving():
        raise RuntimeError("saved the day")
    assert not getattr(caught.value, "__notes__", [])


# --- keep ------------------------------------------------------------------------------------------------------------------


def test_keep_around_the_head(model, device):
    """What is saved inside is saved by autograd itself: not packed, not counted, and checked for changes as ever."""

    def step(model, context):
        x = rows(0)
        with context:
            h = model(x)
            packed = context.stats().packed if graphoffload_is_on(context) else 0
            with graphoffload.keep():
                assert_saves_plainly()
                loss = h.exp().log_softmax(-1)[:, 0].sum()
            assert not graphoffload_is_on(context) or context.stats().packed == packed
        loss.backward()
        return x.grad

    def graphoffload_is_on(context):
        return isinstance(context, graphoffload.saved_tensors)

    assert same_as_plain(model, step).moved
    with saving() as context:
        with graphoffload.keep():
            h = rows(0) * 2
            y = h.sin()
        h.detach().zero_()
    assert context.stats().packed == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_keep_in_keep_and_a_context_in_keep(model, device):
    """Each opens and closes on its own."""
    outer, inner = saving(model), saving(model)
    with outer:
        with graphoffload.keep():
            with graphoffload.keep():
                assert active() is None
            assert active() is None
            with inner:
                assert active() is inner
                with graphoffload.keep():
                    assert_saves_plainly()
                assert active() is inner
                loss = model(rows(0)).sum()
            assert active() is None
        assert active() is outer
    assert outer.stats().packed == 0
    assert inner.stats().moved
    loss.backward()
    assert_same_bits(gradients(model), plain_gradients(model, 0))


def test_keep_lifts_all_contexts_that_are_nested(device):
    """One `keep` is enough, however many of our contexts are around, and they come back in their order."""
    one, two = saving(), saving()
    with one, two, one:
        with graphoffload.keep():
            assert_saves_plainly()
        assert active() is one
    with one, two:
        with graphoffload.keep():
            assert_saves_plainly()
        assert active() is two
    assert_saves_plainly()


def test_keep_outside_of_any_context(model):
    """It does nothing, also as a decorator."""
    with graphoffload.keep():
        assert_saves_plainly()

    @graphoffload.keep()
    def decorated():
        assert_saves_plainly()

    decorated()
    with saving():
        decorated()
    assert_saves_plainly()


def test_keep_leaves_the_hooks_of_others(device):
    """Those around ours stay in force inside; where theirs are innermost, ours are out of play anyway."""
    seen = []
    theirs = saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor)
    with theirs, saving() as context, graphoffload.keep():
        rows(0).sin()
    assert len(seen) == 1
    with saving() as context:
        with theirs, graphoffload.keep():
            rows(0).sin()
        y = rows(0).sin()
    assert len(seen) == 2
    assert context.stats().packed == 1
    y.sum().backward()


def test_keep_and_an_exception(device):
    """The hooks are back in place when it is caught inside, and gone when it is not."""
    context = saving()
    with context:
        with pytest.raises(RuntimeError), graphoffload.keep():
            raise RuntimeError
        assert active() is context
    with pytest.raises(RuntimeError), context, graphoffload.keep():
        raise RuntimeError
    assert_saves_plainly()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_keep_in_a_checkpointed_region(model, device, use_reentrant, inside):
    """A region has hooks of its own while it runs, and ours are not there to lift; run again in backward it is the same."""

    def body(layer, x):
        with graphoffload.keep():
            y = layer(x).sin()
        return y.exp()

    def step(model, context):
        x = rows(0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            h = x * 1
            for layer in model.layers:
                h = h + checkpoint(body, layer, h, use_reentrant=use_reentrant)
            loss = h.sin().sum()
            if not inside:
                stack.close()
            loss.backward()
        return x.grad

    assert same_as_plain(model, step).moved


def test_a_region_in_keep(model, device):
    """Turned round: the region as a whole is left out."""

    def step(model, context):
        x = rows(0)
        with context:
            h = x.sin()
            with graphoffload.keep():
                h = checkpoint(model.layers[0], h, use_reentrant=False)
            loss = model.layers[1](h).exp().sum()
        loss.backward()
        return x.grad

    assert same_as_plain(model, step).moved
