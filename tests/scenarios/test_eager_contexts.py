"""Scenarios of the eager path about contexts: nested and used again, left by an exception, and in threads (rank 12)."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from dataclasses import dataclass

import pytest
import torch
from eager_training import (
    EVERYTHING,
    assert_empty,
    assert_next_step_is_right,
    assert_saves_plainly,
    gradients,
    offloading,
    plain_gradients,
    rows,
    same_as_plain,
    saving,
)
from subjects import Mlp
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from training import assert_same_bits, fresh, outcome

import graphoffload
from graphoffload.errors import PolicyError
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import ByName, KeepAll
from graphoffload.runtime.keep import active


@pytest.fixture
def device():
    with offloading() as device:
        yield device


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp()


# --- rank 12: contexts -----------------------------------------------------------------------------------------------------


def test_backward_after_the_object_is_gone(model, device):
    """Rank 12: the graph needs nothing but what it holds."""
    context = graphoffload.saved_tensors(EVERYTHING, model=model)
    with context:
        loss = model(rows(0)).sum()
    want = plain_gradients(model, 0)
    del context
    gc.collect()
    loss.backward()
    assert_same_bits(gradients(model), want)


def test_backward_after_the_model_is_gone(device):
    """What is learnt belongs to the model; what autograd holds does not."""
    torch.manual_seed(0)
    model, x, y = Mlp(), rows(0), rows(0)
    model.requires_grad_(False)
    model(y).sum().backward()
    with graphoffload.saved_tensors(EVERYTHING, model=model):
        loss = model(x).sum()
    del model
    gc.collect()
    loss.backward()
    assert torch.equal(x.grad, y.grad)


def test_only_the_innermost_context_fires(model, device):
    """Rank 12 (probe R18): each value is shown to one context, and the outer one works again afterwards."""
    outer, inner = saving(model), saving(model, KeepAll())
    with outer:
        x = model.layers[0](rows(0)).sin()
        before = outer.stats().packed
        assert active() is outer
        with inner:
            assert active() is inner
            x = model.layers[1](x).sin()
        assert outer.stats().packed == before
        assert inner.stats().packed > 0
        assert active() is outer
        y = model.layers[2](x).sin()
    assert active() is None
    assert outer.stats().packed > before
    assert inner.stats().moved == 0
    y.sum().backward()

    def plain(model, x):
        for layer in model.layers:
            x = layer(x).sin()
        return x.sum()

    twin = fresh(model)
    plain(twin, rows(0)).backward()
    assert_same_bits(gradients(model), gradients(twin))


def test_one_object_nested_in_itself(model, device):
    """Rank 12: the hooks are there as often as it was entered, and go one by one."""

    def step(model, context):
        x = rows(0)
        with context:
            y = model.layers[0](x).sin()
            with context:
                y = model.layers[1](y).sin()
                with context:
                    z = model.layers[2](y).sin()
                y.sum().backward(retain_graph=True)
            z = z.exp()
        z.sum().backward()
        return x.grad

    assert same_as_plain(model, step).moved
    assert_saves_plainly()


def test_one_object_used_again_and_again(model, device):
    """Rank 12: its counts are totals."""
    context = saving(model)
    assert_next_step_is_right(context, model, device)
    first = context.stats()
    for _ in range(3):
        assert_next_step_is_right(context, model, device)
    assert context.stats().moved == 4 * first.moved
    assert context.stats().moved_nbytes == 4 * first.moved_nbytes


def test_hooks_of_the_user_around_and_inside(device):
    """The innermost hooks are asked, whoever's they are."""
    seen = []

    def note(tensor):
        seen.append(tensor)
        return tensor

    def run(inner, outer):
        x = rows(0)
        with outer:
            a = x.sin()
            with inner:
                b = a.exp()
            c = b.cos()
        c.sum().backward()
        return x.grad

    want = run(contextlib.nullcontext(), contextlib.nullcontext())
    context = saving()
    assert torch.equal(run(saved_tensors_hooks(note, lambda tensor: tensor), context), want)
    assert len(seen) == 1
    assert context.stats().packed == 2
    assert torch.equal(run(context, saved_tensors_hooks(note, lambda tensor: tensor)), want)
    assert len(seen) == 3
    assert context.stats().packed == 3
    assert torch.equal(run(save_on_cpu(), context), want)
    assert torch.equal(run(context, save_on_cpu()), want)


def test_a_place_where_hooks_are_forbidden(model, device):
    """Entering raises torch's own error, and leaves no trace: neither hooks nor, for a policy by module, hooks of modules."""
    context = saving(model, ByName(modules="layers.*"))
    with disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here"):
            context.__enter__()
        assert not model._forward_hooks
        assert not model.layers[0]._forward_pre_hooks
    assert_next_step_is_right(context, model, device)
    assert not model._forward_hooks
    assert not model.layers[0]._forward_pre_hooks


def test_anomaly_detection(model, device):
    """It looks at what backward computes; nothing of ours makes it cry."""

    def step(model, context):
        with torch.autograd.set_detect_anomaly(True), context:
            loss = model(rows(0)).sum()
            loss.backward()

    assert same_as_plain(model, step).moved


# --- rank 12: exceptions ---------------------------------------------------------------------------------------------------


class FaultError(Exception):
    """What goes wrong in these tests."""


@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_an_exception_in_forward(model, device, caught):
    """Rank 12: hooks are popped, what was packed goes, and the next step is right."""

    def fail():
        model.layers[1](model.layers[0](rows(1)).sin().exp())
        raise FaultError

    context = saving(model)
    assert_next_step_is_right(context, model, device)
    for _ in range(3):
        if caught == "outside":
            with pytest.raises(FaultError), context:
                fail()
        else:
            with context:
                with pytest.raises(FaultError):
                    fail()
                loss = model(rows(2)).sum()
            model.zero_grad()
            loss.backward()
            assert_same_bits(gradients(model), plain_gradients(model, 2))
            del loss
        assert_saves_plainly()
        assert_empty(device)
        assert_next_step_is_right(context, model, device)


@dataclass(frozen=True)
class Failing:
    """A policy that raises, or answers nonsense, for the third value."""

    says: str

    def decide(self, value, ledger):
        if ledger.offloaded_nbytes < 600:
            return Action.OFFLOAD
        if self.says == "nothing":
            raise FaultError("the policy")
        return self.says


@pytest.mark.parametrize(("says", "error"), [("nothing", FaultError), ("OFFLOAD", PolicyError)])
def test_an_exception_in_the_policy(model, device, says, error):
    """Rank 12: it comes out of the operator that saved, as it is."""
    context, good = saving(model, Failing(says)), saving(model)
    for _ in range(2):
        with pytest.raises(error), context:
            model(rows(0))
        assert_saves_plainly()
        assert_empty(device)
        assert_next_step_is_right(good, model, device)


class Trouble(torch.autograd.Function):
    """Raise on demand, in backward, before or after the saved tensor was asked for."""

    where = None

    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        if Trouble.where == "before":
            raise FaultError
        x, _ = ctx.saved_tensors
        if Trouble.where == "after":
            raise FaultError
        return gradient * x.cos()


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_an_exception_in_backward(model, device, monkeypatch, where, inside):
    """Rank 12: reloads under way are let go, and a retained graph can be walked again."""

    def forward(model, x):
        return (model.layers[1](Trouble.apply(model.layers[0](x).exp())) ** 2).sin().sum()

    context = saving(model)
    for _ in range(3):
        twin = fresh(model)
        forward(twin, rows(0)).backward()
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            loss = forward(model, rows(0))
            if not inside:
                stack.close()
            with monkeypatch.context() as patch:
                patch.setattr(Trouble, "where", where)
                with pytest.raises(FaultError):
                    loss.backward(retain_graph=True)
            model.zero_grad()
            loss.backward()
        assert_same_bits(gradients(model), gradients(twin))
        del loss
        assert_saves_plainly()
        assert_empty(device)


def test_an_exception_in_a_hook_of_the_user(model, device):
    """Rank 12 (probe R20): whatever hooks raise, in pack, in unpack, or on a gradient, is theirs, and later steps are fine."""

    def fail(*_):
        raise KeyError("the user's")

    def run(pack, unpack):
        h = model(rows(0))
        with saved_tensors_hooks(pack, unpack):
            y = h.sin()
        y.exp().sum().backward()

    context = saving(model)
    for pack, unpack in ((fail, lambda one: one), (lambda one: one, fail)):
        with pytest.raises(KeyError, match="the user's"), context:
            run(pack, unpack)
        assert_saves_plainly()
        assert_next_step_is_right(context, model, device)
    with context:
        h = model.layers[0](rows(0))
        h.register_hook(fail)
        y = model.layers[1](h).sin().sum()
    with pytest.raises(KeyError, match="the user's"):
        y.backward()
    del h, y
    assert_empty(device)
    assert_next_step_is_right(context, model, device)


def test_no_memory_for_a_reload(model, device, monkeypatch):
    """Rank 12: out of memory in unpack comes out as torch's error; memory that only waits for copies is let go first."""
    context = saving(model)
    assert_next_step_is_right(context, model, device)
    reload, fails = device.runtime.reload, []

    def failing(host):
        if fails and fails.pop():
            raise torch.OutOfMemoryError("none left")
        return reload(host)

    monkeypatch.setattr(device.runtime, "reload", failing)
    model.zero_grad()
    with context:
        loss = model(rows(0)).sum()
    fails.append(True)
    loss.backward()  # the second try succeeds
    assert not fails
    assert_same_bits(gradients(model), plain_gradients(model, 0))
    with context:
        loss = model(rows(0)).sum()
    device.runtime.synchronize()  # nothing is left of the sources
    fails += [True] * 100
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        loss.backward()
    fails.clear()
    del loss
    assert_empty(device)
    assert_next_step_is_right(context, model, device)


def test_no_memory_on_the_host(model, device, monkeypatch):
    """Rank 12: where the host has no memory either, the error comes out of the operator that saved."""
    context = saving(model)
    take, count = device.runtime.pool.take, []

    def failing(nbytes):
        count.append(nbytes)
        if len(count) == 4:
            raise MemoryError("no host memory")
        return take(nbytes)

    monkeypatch.setattr(device.runtime.pool, "take", failing)
    with pytest.raises(MemoryError, match="no host memory"), context:
        model(rows(0)).sum().backward()
    assert_saves_plainly()
    assert_empty(device)
    assert_next_step_is_right(context, model, device)


# --- rank 12: threads ------------------------------------------------------------------------------------------------------


def in_threads(*work):
    """Run each function in a thread of its own, begun together; raise what the first of them raised."""
    faults, barrier = [], threading.Barrier(len(work))

    def run(one):
        try:
            barrier.wait()
            one()
        except BaseException as fault:  # noqa: BLE001 - raised below, in the main thread
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


@pytest.mark.parametrize("shared", ["nothing", "the model's weights", "the context"])
def test_threads_that_train(device, shared):
    """Two threads train at the same time through one runtime; every step of each is right."""
    torch.manual_seed(0)
    models = [Mlp(), Mlp()]
    contexts = [saving(model) for model in models]
    if shared == "the context":
        contexts = [saving()] * 2
    if shared == "the model's weights":
        models[1].load_state_dict(models[0].state_dict())
        contexts = [saving(models[0])] * 2

    def train(index):
        for step in range(10):
            twin = fresh(models[index])
            x, y = rows(100 * index + step), rows(100 * index + step)
            with contexts[index]:
                loss = models[index](x).sum()
            twin(y).sum().backward()
            models[index].zero_grad()
            loss.backward()
            assert_same_bits(
                outcome((), inputs=x, module=models[index]),
                outcome((), inputs=y, module=twin),
            )

    in_threads(functools.partial(train, 0), functools.partial(train, 1))
    assert contexts[0].stats().moved


def test_a_context_is_one_threads_affair(device):
    """Hooks are thread-local: another thread saves plainly, and learns no episode of this one."""
    context = saving()
    with context:
        in_threads(assert_saves_plainly)
        y = rows(0).sin().exp()
        in_threads(assert_saves_plainly)
    y.sum().backward()


def test_backward_in_another_thread(model, device):
    """Forward in one thread, backward in another, then forward again in the first."""
    context = saving(model)
    for _ in range(3):
        model.zero_grad()
        with context:
            loss = model(rows(0)).sum()
        in_threads(loss.backward)
        del loss
        assert_same_bits(gradients(model), plain_gradients(model, 0))
        assert_empty(device)
