"""Scenarios about whose memory a saved value is, in which layout, and who else may touch it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from requirements import needs_cpp_compiler
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Compiler, assert_same_bits, assert_trains_as_eager, fresh, fresh_inputs, train_step

import graphoffload
from graphoffload.planning.policy import OffloadAll
from graphoffload.testing import virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)


def kept(plan, words):
    """Return the storages that are kept for a reason with these words."""
    return {decision.storage for decision in plan.decisions if words in decision.reason}


def counted_once(plan):
    """Raise unless every byte that is saved is counted once, by storage."""
    storages = {value.storage: value.storage_nbytes for value in plan.facts.values}
    assert plan.kept_nbytes + plan.offloaded_nbytes == sum(storages.values())
    assert plan.offloaded_nbytes == sum(transfer.nbytes for transfer in plan.transfers)


# --- rank 2: parameters -------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen base, saved as a view because its input needs a gradient, and an adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = (self.base(x) + self.up(self.down(x))).sin()
        return x


class TiedHead(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, ids):
        return F.linear(self.mix(self.embed(ids)).sin(), self.embed.weight)


class Transposed(nn.Module):
    """A weight that is only ever used transposed and sliced."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return ((x @ self.weight.t()).sin() @ self.weight[:, :4]).sin()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Lora, lambda: [torch.randn(3, 8, requires_grad=True)]),
        (TiedHead, lambda: [torch.randint(12, (2, 5))]),
        (Transposed, lambda: [torch.randn(3, 8, requires_grad=True)]),
    ],
    ids=["frozen base", "tied head", "transposed"],
)
@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
def test_no_byte_of_a_parameter_moves(model, inputs, partitioner):
    """Rank 2: a parameter saved as a view of itself is told by its storage, and never moved."""
    torch.manual_seed(0)
    ran = assert_trains_as_eager(model(), inputs(), options={"partitioner": partitioner})
    parameters = kept(ran.plan, "parameter or buffer")
    assert parameters
    assert ran.moved
    assert not ran.moved & parameters
    counted_once(ran.plan)


def test_a_parameter_that_is_pointed_elsewhere():
    """Rank 2: as sharded training does it, `.data` is re-pointed after compilation; gradients are those of the new data."""
    torch.manual_seed(0)
    model, x = Transposed(), torch.randn(3, 8, requires_grad=True)
    other = torch.randn(8, 8)
    with virtual_device():
        run = Compiler(EVERYTHING)(model)
        train_step(run, [x], module=model)
        model.zero_grad()
        x.grad = None
        model.weight.data = other.clone()
        have = train_step(run, [x], module=model)
    plain = Transposed()
    plain.weight.data = other.clone()
    assert_same_bits(have, train_step(plain, [fresh_inputs(x)], module=plain))


# --- rank 3: views ------------------------------------------------------------------------------------------------------


def last_holder(x, w):
    """The base is gone when backward begins; a view alone holds its storage."""
    return (x @ w).sin()[:, 1:].exp().sin()


def base_and_view(x, w):
    base = (x @ w).sin()
    return base.exp() * base.t().contiguous().t().sin() + base[:, :1].exp()


def two_views(x, w):
    first, second = (x @ w).sin().chunk(2, dim=1)
    return (first.exp() * second.sin()).sin()


def view_of_an_input(x, w):
    return (x.t().sin() @ x[:, :2].exp()).sin() @ w[:2, :2].t()


def view_of_an_output(x, w):
    y = (x @ w).exp()
    return y, (y[:, :2].sin() * 2).exp()


def expanded(x, w):
    row = (x @ w)[:1].sin()
    return (row.expand(4, -1).exp() * row.expand(4, -1)).sin()


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
@pytest.mark.parametrize(
    "function",
    [last_holder, base_and_view, two_views, view_of_an_input, view_of_an_output, expanded],
    ids=lambda f: f.__name__,
)
@pytest.mark.filterwarnings("ignore::graphoffload.errors.GraphOffloadWarning")
def test_views(function, partitioner):
    """Rank 3: right values whatever views are saved, bytes counted once a storage, and its members all of one mind."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return function(x, self.w)

    torch.manual_seed(0)
    plan = assert_trains_as_eager(
        Module(), [torch.randn(4, 4, requires_grad=True)], options={"partitioner": partitioner}
    ).plan
    counted_once(plan)
    actions = {}
    for decision in plan.decisions:
        actions.setdefault(decision.storage, set()).add(decision.action)
    assert all(len(each) == 1 for each in actions.values())


@pytest.mark.filterwarnings("ignore:graphoffload was asked to offload and moves nothing")
def test_a_view_of_an_output_stays():
    """Rank 3: what the caller can reach is not moved, though what is saved is only a view of it."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with virtual_device():
        plan = graphoffload.transform(view_of_an_output, x, w, policy=EVERYTHING, partitioner="default").plan
    reachable = kept(plan, "shares memory with an output")
    assert reachable
    assert not reachable & {transfer.storage for transfer in plan.transfers}


# --- rank 4: layouts ----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda t: t * 1,
    "transposed": lambda t: (t * 1).transpose(1, 2),
    "channels last": lambda t: (t * 1).unsqueeze(1).expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last),
    "sliced": lambda t: (t * 1)[:, 1:, ::2],
    "padded": lambda t: F.pad(t, (0, 3))[..., :-3],
    "expanded": lambda t: (t * 1)[:, :1].expand(-1, 5, -1),
    "no dimension": lambda t: (t * 1).mean(),
    "one element": lambda t: (t * 1)[:1, :1, :1],
    "flipped rank": lambda t: (t * 1).permute(2, 0, 1),
}


class InLayouts(nn.Module):
    """Save one value in each of some layouts."""

    def __init__(self, *names):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.layouts = [LAYOUTS[name] for name in names]

    def forward(self, x):
        total = 0
        for layout in self.layouts:
            y = layout(x * self.scale)
            total = total + (y.sin() * y).sum()
        return total


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_come_back_as_they_were(name):
    """Rank 4: sizes, strides and offsets survive; aot_eager would take other strides without a word, so values are compared."""
    torch.manual_seed(0)
    ran = assert_trains_as_eager(
        InLayouts(name), [torch.randn(2, 4, 6, requires_grad=True)], options={"partitioner": "default"}
    )
    assert ran.moved
    padded = [storage for storage in ran.plan.facts.storages if storage.name in ran.moved]
    assert all(storage.nbytes <= 2 * 4 * 9 * 4 * 3 for storage in padded)


@needs_cpp_compiler
def test_layouts_under_inductor():
    """Rank 4: Inductor asserts the strides of what backward is given; one that is lost is an error there."""
    torch.manual_seed(0)
    model, x = InLayouts(*LAYOUTS), torch.randn(2, 4, 6, requires_grad=True)
    results = []
    for policy in (graphoffload.policies.KeepAll(), EVERYTHING):
        twin, y = fresh(model), fresh_inputs(x)
        compile_ = Compiler(policy, compiler="inductor", options={"partitioner": "default"})
        with virtual_device():
            results.append(train_step(compile_(twin), [y], module=twin))
    assert compile_.moved
    assert_same_bits(results[1], results[0])


# --- rank 18: outputs and mutations --------------------------------------------------------------------------------------


class SavedOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.linear(x).sin()).exp()


def test_an_output_that_is_saved_and_then_changed():
    """Rank 18: backward needs exp's output, and the user changes it: an error, as without us, and no silent wrong gradient."""
    torch.manual_seed(0)
    model, x = SavedOutput(), torch.randn(3, 4)
    with virtual_device():
        compile_ = Compiler(EVERYTHING)
        y = compile_(model)(x)
        assert compile_.moved
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_an_output_that_is_saved_and_then_freed():
    """Rank 18: the user's reference goes, and backward still has its own."""
    torch.manual_seed(0)
    model = SavedOutput()
    plain, x = fresh(model), torch.randn(3, 4)
    plain(x).sum().backward()
    with virtual_device():
        loss = Compiler(EVERYTHING)(model)(x).sum()
        loss.backward()
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)


class Mutating(nn.Module):
    """Change an input, a cache and running statistics, all of which forward has read before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.randn(6, 4))
        self.register_buffer("average", torch.ones(4))

    def forward(self, x, state):
        x = x * state.clone().sin() * self.cache[:3].clone() * self.average.clone()
        x = self.norm(self.linear(x).sin()).exp()
        state.copy_(x.detach())
        self.cache[3:].copy_(x.detach() * 2)
        self.cache[:3].add_(1)
        self.average.mul_(0.9).add_(x.detach().mean(0))
        return x.sin()


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)])
def test_inputs_and_buffers_that_forward_changes(partitioner, compiler):
    """Rank 18: backward sees what forward read, not what it wrote (torch alone gets this wrong: pytorch #197039)."""
    torch.manual_seed(0)
    model, inputs = Mutating(), [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)]
    if compiler == "aot_eager":
        assert assert_trains_as_eager(model, inputs, options={"partitioner": partitioner}).moved
        return
    plain, plain_inputs = fresh(model), fresh_inputs(inputs)
    want = train_step(plain, plain_inputs, module=plain)
    with virtual_device():
        have = train_step(
            Compiler(EVERYTHING, compiler=compiler, options={"partitioner": partitioner})(model), inputs, module=model
        )
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        if tensor is not None:
            torch.testing.assert_close(have[name], tensor, msg=name)


class ChangedAfterRegion(nn.Module):
    """A checkpointed region reads a buffer that is changed after it; eager computes the region again from the change."""

    def __init__(self, *, checkpointed):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.randn(3, 4))
        self.checkpointed = checkpointed

    def body(self, x):
        return (self.linear(x) * self.cache.clone()).sin()

    def forward(self, x):
        x = x.sin()
        y = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        self.cache.mul_(3)
        return y.exp()


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
def test_a_buffer_that_changes_after_a_region_has_read_it(partitioner):
    """Ranks 5 and 18: the region is computed again from what it read, so gradients are those of the model without regions."""
    torch.manual_seed(0)
    model, plain = ChangedAfterRegion(checkpointed=True), ChangedAfterRegion(checkpointed=False)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 4, requires_grad=True)
    want = train_step(plain, [fresh_inputs(x)], module=plain)
    with virtual_device():
        have = train_step(Compiler(EVERYTHING, options={"partitioner": partitioner})(model), [x], module=model)
    assert_same_bits(have, want)


# --- rank 24: kinds of tensors -------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Save bool masks, int indices, complex numbers (conjugated too), half and double precision."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Embedding(5, 8)

    def forward(self, x, ids):
        x = self.linear(x).sin()
        mask = (x > 0) & (x < 0.7)
        y = x.masked_fill(mask, 0.3) * x
        values, places = y.sort(-1)
        y = values.gather(-1, places.flip(-1)) + self.table(ids * 2 // 2 % 5)
        z = torch.complex(y, x.cos())
        z = (z * z.conj()).sin() + z.conj().exp()
        return z.real.double().sin() * z.imag.to(torch.bfloat16).exp().double()


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
def test_kinds_of_tensors(partitioner):
    """Rank 24: int and bool tensors, complex ones with and without a lazy conjugate, and several precisions, to the bit."""
    torch.manual_seed(0)
    ran = assert_trains_as_eager(
        Kinds(), [torch.randn(4, 8, requires_grad=True), torch.randint(5, (4,))], options={"partitioner": partitioner}
    )
    dtypes = {storage.dtype for storage in ran.plan.facts.storages if storage.name in ran.moved}
    assert partitioner == "min_cut" or "bool" in dtypes
    assert any("int" in dtype for dtype in dtypes)
    assert any("float" in dtype for dtype in dtypes)


def test_empty_tensors():
    """Rank 24: several tensors without a byte, whose addresses are all zero, do not get in each other's way."""
    torch.manual_seed(0)
    model = SavedOutput()
    for rows in (0, 3, 0):
        with virtual_device():
            run = Compiler(OffloadAll(min_nbytes=0), dynamic=False)
            x = torch.randn(rows, 4, requires_grad=True)
            if rows == 0:
                with pytest.warns(graphoffload.GraphOffloadWarning, match="moves nothing"):
                    run(model)(x).sum().backward()
                assert x.grad.shape == (0, 4)
            else:
                assert_trains_as_eager(model, [x])
