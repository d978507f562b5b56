"""Scenarios of the eager path about changes in place (ranks 1 and 18): an error as in plain PyTorch, or the old value."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from eager_training import CHANGED, STEPS, offloading, rows, same_as_plain, saving
from torch import nn

from graphoffload.planning.policy import FirstOf, KeepAll, OffloadAll, Only


@pytest.fixture
def device():
    with offloading() as device:
        yield device


def error_of(program, context):
    """Return what the program's backward raises."""
    with pytest.raises(RuntimeError) as caught:
        program(context)
    return str(caught.value)


def result_of(program):
    """Return what the program returns and nothing, or nothing and what it raises."""
    try:
        return program(), ""
    except RuntimeError as error:
        return None, str(error)


def facts(message):
    """Return what autograd says of a tensor that was changed: its shape, the version it has, and the one it had."""
    found = re.search(
        r"inplace operation: \[\S+ (\[.*?\])\].*is at version (\d+); expected version (\d+) instead", message
    )
    assert found, message
    return found.groups()


# --- a value that stays ----------------------------------------------------------------------------------------------------


def an_intermediate(context):
    with context:
        h = rows(0) * 2
        y = h.sin()
    with torch.no_grad():
        h.add_(1)
    y.sum().backward()


def a_leaf(context):
    x = rows(0)
    with context:
        y = x.sin()
    with torch.no_grad():
        x.mul_(2)
        x.mul_(2)
    y.sum().backward()


def an_output(context):
    with context:
        y = (rows(0) * 2).exp()
    y.detach().mul_(0)
    y.sum().backward()


def a_view(context):
    with context:
        h = rows(0) * 2
        y = h[1:, ::2].sin()
    with torch.no_grad():
        h[0].zero_()  # another part: autograd counts by storage
    y.sum().backward()


def by_an_operator_with_a_history(context):
    with context:
        h = rows(0) * 2
        y = h.sin()
        h.mul_(3)
    (y * h).sum().backward()


def a_weight(context):
    layer = nn.Linear(16, 16)
    with context:
        y = layer(rows(0))
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with torch.no_grad():
        layer.weight.add_(1)
    y.sum().backward()


def indices(context):
    where = torch.tensor([0, 2, 1])
    with context:
        y = rows(0)[where].sin() + nn.Embedding(4, 16)(where)
    where.add_(1)
    y.sum().backward()


def a_mask(context):
    h = rows(0) * 2
    mask = h > 0
    with context:
        y = h.masked_fill(mask, 0)
    mask.logical_not_()
    y.sum().backward()


CHANGES = [an_intermediate, a_leaf, an_output, a_view, by_an_operator_with_a_history, a_weight, indices, a_mask]


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_kept_value_that_is_changed(device, change):
    """Rank 1 (probes P10 and R21): hooks switch autograd's check off; what it would have said is said all the same."""
    want = error_of(change, contextlib.nullcontext())
    for _ in range(STEPS):
        have = error_of(change, saving(policy=KeepAll()))
        assert facts(have) == facts(want)
        assert CHANGED in have
        assert "set_detect_anomaly" in have


def test_a_parameter_that_is_changed(device):
    """Rank 1 (probe P10e): a parameter stays under any policy, so the step of an optimizer in between raises."""
    want = facts(error_of(a_weight, contextlib.nullcontext()))
    for _ in range(STEPS):
        assert facts(error_of(a_weight, saving())) == want


def test_a_change_that_plain_pytorch_permits(device):
    """What is not needed, or is saved only after the change, may be changed; so may what nobody saved."""

    def step(model, context):
        x = rows(0)
        with context:
            h = F.relu(model(x).add_(1), inplace=True)  # saves its own output
            y = F.dropout(h * 2, 0.5, inplace=True)
            y = y.exp_().clone()
            y.add_(1)
        (y + h).sum().backward()
        return x.grad

    for policy in (KeepAll(), OffloadAll(min_nbytes=0)):
        same_as_plain(nn.Linear(16, 16), step, policy=policy)


def test_a_version_that_was_not_zero(device):
    """What was changed before it was saved is at a version of its own; only later changes matter."""

    def program(context, *, again):
        h = rows(0) * 2
        with torch.no_grad():
            h.add_(1)
            h.add_(1)
        with context:
            y = h.sin()
        if again:
            with torch.no_grad():
                h.add_(1)
        y.sum().backward()

    program(saving(policy=KeepAll()), again=False)
    program(saving(), again=False)
    message = error_of(lambda context: program(context, again=True), saving(policy=KeepAll()))
    assert facts(message)[1:] == ("3", "2")


# --- a value that moves ----------------------------------------------------------------------------------------------------


def changed(context, *, change=True, clone=False, length=1):
    """Save values and change them; return the gradient. With `clone` the copies are saved, so the old values are known."""
    x = rows(0)
    with context:
        h = x * 2
        held = []
        for _ in range(length):
            held.append(h)
            h = (h.clone() if clone else h).sin()
        if change:
            with torch.no_grad():
                for each in held:
                    each.add_(1)
    h.sum().backward()
    return x.grad


@pytest.mark.parametrize("length", [1, 5])
def test_a_moved_value_that_is_changed_in_every_step(device, length):
    """Rank 1: the host has the old value, in the first step and in later ones, in which the place is known."""
    want = changed(contextlib.nullcontext(), clone=True, length=length)
    context = saving()
    for _ in range(4):
        assert torch.equal(changed(context, length=length), want)
    assert context.stats().moved >= 4 * length
    assert context.stats().kept_nbytes == 0


@pytest.mark.parametrize("first_change", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_a_place_that_was_never_changed_before(device, length, first_change):
    """Rank 1: it is changed while its copy may be under way. The old value or autograd's error, never a wrong number.

    Each step teaches one place at least, from the step after it on, so in the end the old values come back.
    """
    want = changed(contextlib.nullcontext(), clone=True, length=length)
    error = facts(error_of(lambda context: changed(context, length=length), contextlib.nullcontext()))
    context = saving()
    for step in range(first_change + length + 1):
        change = step >= first_change
        have, raised = result_of(lambda change=change: changed(context, change=change, length=length))
        if raised:
            assert first_change <= step < first_change + length
            assert facts(raised) == error
        else:
            assert torch.equal(have, want)


@pytest.mark.parametrize("budget", [0, 300])
def test_changes_under_a_small_bound_in_flight(device, budget):
    """With no room in flight every copy has ended when the operator goes on."""
    device.runtime.in_flight_nbytes = budget
    want = changed(contextlib.nullcontext(), clone=True, length=4)
    context = saving()
    for step in range(5):
        have, raised = result_of(lambda step=step: changed(context, change=step > 1, length=4))
        # Plain PyTorch would raise in each of these steps; each teaches the place that was asked for first.
        assert (budget and step >= 2 and CHANGED in raised) if raised else torch.equal(have, want)


def test_a_storage_that_is_saved_changed_and_saved_again(device):
    """Each save has its own version of the memory; the second is not taken for the first."""

    def program(context, *, clone):
        x = rows(0)
        with context:
            h = x * 2
            first = (h.clone() if clone else h).sin()
            with torch.no_grad():
                h.mul_(3)
            second = (h.clone() if clone else h).cos()
            with torch.no_grad():
                h[0].fill_(7)
            third = (h.clone() if clone else h)[:2].exp()
        (first.sum() + second.sum() + third.sum()).backward()
        return x.grad

    want = program(contextlib.nullcontext(), clone=True)
    context = saving()
    for _ in range(4):
        assert torch.equal(program(context, clone=False), want)
    assert context.stats().moved == 4 * 3


def test_one_storage_kept_in_one_program_and_moved_in_another(device):
    """Rank 1: the kept save raises, the moved one has its old value; nobody takes one for the other."""
    h = rows(0) * 2
    keeps, moves = saving(policy=KeepAll()), saving()
    for _ in range(STEPS):
        with keeps:
            kept = h.sin().sum()
        with moves:
            moved = h.cos().sum()
        want = -h.detach().sin()
        with torch.no_grad():
            h.add_(1)
        (have,) = torch.autograd.grad(moved, h)
        assert torch.equal(have, want)
        with pytest.raises(RuntimeError, match=CHANGED):
            torch.autograd.grad(kept, h)


def test_a_part_that_moves_beside_a_part_that_stays(device):
    """One storage, one policy that lets floats move and not masks: each by its own rule."""
    policy = FirstOf(Only(OffloadAll(min_nbytes=0), dtypes=("float32",)), KeepAll())
    x = rows(0)
    h = x * 2
    mask = h > 0
    context = saving(policy=policy)
    with context:
        y = h.sin().masked_fill(mask, 0)
    with torch.no_grad():
        h.zero_()
    (want,) = torch.autograd.grad((x * 2).sin().masked_fill(mask, 0).sum(), x)
    (have,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(have, want)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


class TwoReaders(torch.autograd.Function):
    """Save a tensor; in backward change what came back, in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        result = gradient * x
        x.mul_(0)
        return result


@pytest.mark.parametrize("order", ["spoiler first", "spoiler last"])
def test_a_backward_that_changes_what_came_back(device, order):
    """Each consumer has a tensor of its own: what one does to it does not reach another that saved the same storage."""
    x = rows(0)
    context = saving()
    for _ in range(4):
        with context:
            h = x * 2
            spoiler, other = TwoReaders.apply(h), h.sin()
        want = {"spoiler": h.detach().clone(), "other": h.detach().cos()}
        outputs = {"spoiler": spoiler.sum(), "other": other.sum()}
        h = spoiler = other = None
        for name in ("spoiler", "other") if order == "spoiler first" else ("other", "spoiler"):
            (have,) = torch.autograd.grad(outputs[name], x, retain_graph=True)
            assert torch.equal(have, want[name] * 2), name


def test_a_change_between_two_backwards(device):
    """The source is still held by the program when the first of two readers comes; the second has the old value or an error."""
    x = rows(0)
    context = saving()
    for step in range(4):
        with context:
            h = x * 2
            first, second = h.sin(), h.cos()
        want = -2 * h.detach().sin()
        torch.autograd.grad(first.sum(), x, retain_graph=True)
        if step % 2:
            device.runtime.synchronize()
        with torch.no_grad():
            h.add_(1)
        have, raised = result_of(lambda y=second: torch.autograd.grad(y.sum(), x)[0])
        assert CHANGED in raised if raised else torch.equal(have, want)


def test_a_second_backward_after_a_change(device):
    """The graph is retained, the source changed after the first backward: the second is as the first."""
    x = rows(0)
    context = saving()
    for _ in range(4):
        with context:
            h = x * 2
            y = h.sin()
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        with torch.no_grad():
            h.zero_()
        second, raised = result_of(lambda y=y: torch.autograd.grad(y.sum(), x)[0])
        assert CHANGED in raised if raised else torch.equal(first, second)


# --- rank 18: outputs, inputs and buffers ----------------------------------------------------------------------------------


def test_an_output_that_is_saved_and_then_changed(device):
    """Rank 18: the user scales what exp returned and saved; the gradient is that of what it returned."""
    x = rows(0)
    (want,) = torch.autograd.grad((x * 2).exp().sum(), x)
    context = saving()
    for _ in range(4):
        with context:
            y = (x * 2).exp()
        y.detach().mul_(0.5)
        (have,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(have, want)


def test_an_input_that_the_caller_overwrites(device):
    """Rank 18: the next batch is copied into the same memory before backward (a static input buffer)."""

    def step(model, context):
        static = torch.empty(4, 16)
        losses = []
        for seed in range(3):
            static.copy_(rows(seed).detach())
            with context:
                batch = static.clone() if isinstance(context, contextlib.nullcontext) else static
                losses.append(model(batch).exp().sum())
        sum(losses).backward()

    assert same_as_plain(nn.Linear(16, 16), step).moved


class Running(nn.Module):
    """Normalise by running statistics, which training changes, and by a running maximum of our own."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("most", torch.ones(16))

    def forward(self, x):
        x = self.norm(self.linear(x).sin()) / self.most.clone()
        with torch.no_grad():
            self.most.copy_(torch.maximum(self.most, x.abs().amax(0)))
        return self.linear(x).exp()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_running_statistics(device, training):
    """Rank 18: buffers that forward changes, saved before or not, in training and in evaluation with gradients."""

    def step(model, context):
        model.train(training)
        x = rows(0)
        with context:
            loss = model(x).sum() + model(x * 2).sum()
        loss.backward()
        return x.grad

    torch.manual_seed(0)
    assert same_as_plain(Running(), step).moved


class Cached(nn.Module):
    """Attend to a cache of keys, written in place as tokens come."""

    def __init__(self, *, registered):
        super().__init__()
        self.key, self.query = nn.Linear(16, 16), nn.Linear(16, 16)
        if registered:
            self.register_buffer("cache", torch.zeros(8, 16))
        else:
            self.cache = torch.zeros(8, 16)

    def forward(self, x, *, clone):
        result = 0
        for position in range(x.shape[0]):
            self.cache[position] = self.key(x[position]).detach()
            keys = self.cache[: position + 1]
            result = result + (self.query(x[position]) @ (keys.clone() if clone else keys).t()).exp().sum()
        return result


def test_a_cache_that_is_written_after_it_was_read(device):
    """Rank 18: a cache that moves is saved as it was read; one that is a buffer stays, and backward raises as plain does."""
    torch.manual_seed(0)
    model = Cached(registered=False)
    x = rows(0)
    (want,) = torch.autograd.grad(model(x, clone=True), x)
    context = saving(model)
    for _ in range(4):
        with context:
            loss = model(x, clone=False)
        (have,) = torch.autograd.grad(loss, x)
        assert torch.equal(have, want)

    def program(context):
        model = Cached(registered=True)
        with saving(model) if context is None else context:
            loss = model(rows(0), clone=False)
        loss.backward()

    assert facts(error_of(program, None)) == facts(error_of(program, contextlib.nullcontext()))
