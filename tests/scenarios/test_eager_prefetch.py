"""Scenarios of the eager path about prefetch: followed, wrong, changed from step to step, or never asked for."""

from __future__ import annotations

import contextlib

import pytest
import torch
from eager_training import assert_empty, gradients, offloading, rows, saving
from subjects import Mlp
from torch import nn
from training import assert_same_bits, fresh

DEPTH = 6


@pytest.fixture
def device():
    with offloading() as device:
        yield device


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp(depth=DEPTH)


def counted(context, work):
    """Do the work; return the hits and the misses that it made."""
    before = context.stats()
    work()
    after = context.stats()
    return after.prefetch_hits - before.prefetch_hits, after.prefetch_misses - before.prefetch_misses


def train(model, context, x):
    with context:
        loss = model(x).sum()
    loss.backward()


def test_the_order_is_guessed_at_first_and_then_known(model, device):
    """Every value was on its way when it was asked for, from the second step on; in the first, last in first out is right."""
    context = saving(model)
    for step in range(4):
        hits, misses = counted(context, lambda: train(model, context, rows(0, count=32)))
        # Of the first value to come back nobody could know; later its source is still there.
        assert (hits, misses) == (3 * DEPTH - 1, 1) if step == 0 else hits >= 3 * DEPTH - 1
        assert hits + misses == 3 * DEPTH
    stats = context.stats()
    assert stats.ahead_peak_nbytes > 0
    assert stats.reloads < stats.moved  # what has not left yet need not come back


def test_what_was_learnt_outlives_the_object(model, device):
    """The usual `with saved_tensors(policy, model=model)` in a loop: a new object each step, and it knows the order."""

    def reversed_backwards(context):
        x = rows(0)
        with context:
            outputs = [(x * (1 + index)).sin().exp() for index in range(6)]
        for output in outputs:  # first in first out, unlike the guess
            output.sum().backward()

    first = saving(model)
    _, misses = counted(first, lambda: reversed_backwards(first))
    for _ in range(3):
        later = saving(model)
        _, fewer = counted(later, lambda context=later: reversed_backwards(context))
        assert fewer < misses
    other = saving(nn.Module())
    _, again = counted(other, lambda: reversed_backwards(other))
    assert again == misses


def branches(context, order):
    """Save in several branches, and bring them back in the given order; return the gradients in it."""
    x = rows(0, count=8)
    with context:
        outputs = [(x * (1 + index)).sin().exp().sum() for index in range(4)]
    found = []
    for index in order:
        found += torch.autograd.grad(outputs[index], x)
        outputs[index] = None
    return found


def test_an_order_that_changes_is_learnt_anew(device):
    """Rank 23: right in every step; worse in the step of the change only; and unasked reloads are not left over."""
    context = saving()
    misses = []
    for order in [(0, 1, 2, 3)] * 3 + [(2, 0, 3, 1)] * 3 + [(3, 2, 1, 0)] * 3:
        want = branches(contextlib.nullcontext(), order)
        have = []
        _, missed = counted(context, lambda order=order, have=have: have.extend(branches(context, order)))
        misses.append(missed)
        assert all(torch.equal(mine, other) for mine, other in zip(have, want, strict=True))
        assert_empty(device)
    for change in (3, 6):
        assert misses[change + 2] <= misses[change + 1] <= misses[change]
        assert misses[change + 2] <= misses[change - 1]


@pytest.mark.parametrize("asked", [(), (1,), (0, 2), (3,)], ids=str)
def test_reloads_that_nobody_asks_for(device, asked):
    """Rank 11: what came ahead of time for a branch that is dropped is let go with it, and its room is free again."""
    context = saving()
    for order in [(3, 2, 1, 0)] * 2 + [asked] * 3 + [(3, 2, 1, 0)] * 2:
        want = branches(contextlib.nullcontext(), order)
        have = branches(context, order)
        assert all(torch.equal(mine, other) for mine, other in zip(have, want, strict=True))
        assert_empty(device)
    (room,) = context._learnt.rooms
    room.allows(0, ())  # takes note of what was given up
    assert room.ahead_nbytes == 0


def test_programs_that_take_turns(model, device):
    """Batches of two ranks, as training and validation: each program has an order of its own, and none spoils the other's."""
    context, plain = saving(model), fresh(model)
    for step in range(8):
        x = rows(step) if step % 2 else rows(step)[None, :, None]
        model.zero_grad()
        plain.zero_grad()
        hits, misses = counted(context, lambda x=x: train(model, context, x))
        plain(x).sum().backward()
        assert_same_bits(gradients(model), gradients(plain))
        assert hits + misses == 3 * DEPTH
        assert step < 2 or misses <= 1


def test_many_programs(model, device):
    """More programs than are remembered: the oldest are forgotten, which costs time and nothing else."""
    context = saving(model)
    x = rows(0)
    for length in [*range(1, 45), 3, 44, 1]:
        with context:
            y = x * 1
            for _ in range(length):
                y = y.sin()
        (have,) = torch.autograd.grad(y.sum(), x)
        z = x * 1
        for _ in range(length):
            z = z.sin()
        (want,) = torch.autograd.grad(z.sum(), x)
        assert torch.equal(have, want)
        del y
        assert_empty(device)


def test_a_forward_longer_than_any_before(model, device):
    """The same beginning, then more: what was learnt of the beginning is used, and the rest is as new."""
    context = saving(model)
    x = rows(0)
    for length in (2, 2, 5, 5, 3, 8):
        with context:
            y = x * 1
            for _ in range(length):
                y = y.sin().exp()
        (have,) = torch.autograd.grad(y.sum().sin(), x)
        z = x * 1
        for _ in range(length):
            z = z.sin().exp()
        (want,) = torch.autograd.grad(z.sum().sin(), x)
        assert torch.equal(have, want)


def test_no_room_ahead(model, device):
    """A device that is full: only one reload at a time runs ahead, and it still follows the order."""
    context = saving(model)
    for _ in range(4):
        train(model, context, rows(0, count=32))
    one = 32 * 16 * 4
    assert context.stats().ahead_peak_nbytes >= one
    (room,) = context._learnt.rooms
    assert room.ahead_nbytes == 0


@pytest.mark.parametrize("spare", [0.0, -1.0, 1.0, None])
def test_what_comes_back_at_once_is_not_moved_again(model, device, monkeypatch, spare):
    """Trap 16, with a clock: `spare` is how long before it was needed a copy had ended; None: no clock. The bits are equal."""
    monkeypatch.setattr(device.runtime.device, "elapsed", lambda ended, needed: spare)
    plain, context = fresh(model), saving(model)
    reason = "it comes back at once"
    for step in range(3):
        train(plain, contextlib.nullcontext(), rows(step))
        moved = context.stats().moved
        train(model, context, rows(step))
        stays = step > 0 and spare is not None and spare <= 0
        assert (context.stats().moved == moved) == stays
        assert (reason in context.stats().kept_nbytes_by_reason) == stays
    assert_same_bits(gradients(model), gradients(plain))
