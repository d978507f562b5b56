"""Scenarios of the eager path about what is said: reasons, counts, warnings, and policies that are refused or need more."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from eager_training import EVERYTHING, OWNED, VIRTUAL, Moves, offloading, rows, same_as_plain, saving
from subjects import Mlp
from torch import nn

import graphoffload
from graphoffload.errors import GraphOffloadWarning, MachineError, PolicyError, UsageError
from graphoffload.planning.plan import Action
from graphoffload.planning.policy import (
    ByName,
    FirstOf,
    FollowTags,
    KeepAll,
    Never,
    OffloadAll,
    OffloadBytes,
    OffloadHidden,
    Only,
)
from graphoffload.testing import virtual_device

ROWS = 4 * 16 * 4
"""Bytes of one batch, and of each value that an Mlp saves for it."""


@pytest.fixture
def device():
    with offloading() as device:
        yield device


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp()


def train(model, context, x=None):
    with context:
        y = model(rows(0) if x is None else x)
    y.sum().backward()


def reasons(context):
    return context.stats().kept_nbytes_by_reason


# --- reasons and counts ----------------------------------------------------------------------------------------------------


def test_every_byte_is_counted_once_with_a_reason(model, device):
    """What is moved and what is kept is all that was saved, by storage, once a step, whatever the policy."""
    everything = 3 * 3 * ROWS  # of each layer: its input, the input of sin, the output of exp
    weights = sum(layer.weight.nbytes for layer in model.layers)
    for policy, moved in (
        (EVERYTHING, everything),
        (KeepAll(), 0),
        (OffloadAll(min_nbytes=ROWS + 1), 0),
        (OffloadBytes(3 * ROWS, min_nbytes=0), 3 * ROWS),
        (FirstOf(OffloadBytes(ROWS, min_nbytes=0), KeepAll()), ROWS),
        (Never(EVERYTHING), 0),
        (Only(EVERYTHING, dtypes="float16"), 0),
    ):
        context = saving(model, policy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GraphOffloadWarning)
            for step in range(1, 4):
                train(model, context)
                stats = context.stats()
                assert stats.moved_nbytes == step * moved, policy
                assert stats.kept_nbytes == step * (everything - moved + weights), policy
                assert stats.kept_nbytes_by_reason[OWNED] == step * weights
                assert stats.packed == step * 12


def test_reasons_are_named(device):
    """Rank 27: each kind of reason, in words, with its bytes."""
    layer = nn.Linear(16, 16)
    context = saving(layer, FirstOf(Never(Only(EVERYTHING, dtypes="int64")), OffloadAll(min_nbytes=100)))
    x = torch.randn(4, 16, requires_grad=True)
    where = torch.arange(20) % 4
    with context:
        y = layer(x)[where].sum() + (x[:0] * x[:0].clone()).sum() + (torch.ones(4, requires_grad=True) * x[0, :4]).sum()
        sparse = torch.eye(3).to_sparse().requires_grad_()
        y = y + torch.sparse.mm(sparse, torch.ones(3, 2, requires_grad=True)).sum()
        other = torch.ones(4, device="meta", requires_grad=True).sin()
    y.backward()
    found = reasons(context)
    assert found[OWNED] == 16 * 16 * 4
    assert found["FirstOf forbids moving it"] == 20 * 8
    assert found["it has no bytes"] == 0
    assert sum(nbytes for why, nbytes in found.items() if "smaller than 100 B" in why) >= 16
    assert any("layout is sparse_coo, not strided" in why for why in found)
    assert any("on meta" in why for why in found)
    del other


def test_values_below_the_least_size(model, device):
    """The boundary: exactly the least size moves, one byte less does not."""
    context = saving(model, OffloadAll(min_nbytes=ROWS))
    train(model, context)
    assert context.stats().moved == 9
    context = saving(model, OffloadAll(min_nbytes=ROWS + 1))
    with pytest.warns(GraphOffloadWarning, match="nothing was moved"):
        train(model, context)
    assert sum(nbytes for why, nbytes in reasons(context).items() if "smaller than" in why) == 9 * ROWS


def test_an_amount_is_for_each_forward(model, device):
    """The running totals of a policy begin anew with each forward, also with several in flight."""
    context = saving(model, OffloadBytes(2 * ROWS, min_nbytes=0))
    for count in range(1, 4):
        losses = []
        for seed in range(3):
            with context:
                losses.append(model(rows(seed)).sum())
        assert context.stats().moved_nbytes == 3 * count * 2 * ROWS
        for loss in losses:
            loss.backward()


def test_recompute_is_no_eager_action(model, device):
    """Said once, in words and as a note; everything else goes on."""
    context = saving(model, FirstOf(ByName(modules="layers.1", action=Action.RECOMPUTE), EVERYTHING))
    with pytest.warns(GraphOffloadWarning, match="no effect in eager code"):
        train(model, context)
    train(model, context)
    assert len(context.stats().notes) == 1
    assert "checkpoint" in context.stats().notes[0]
    assert context.stats().moved


def test_stats_read_like_a_table(model, device):
    """`str` names bytes, reasons and peaks; the numbers are those of the fields."""
    context = saving(model)
    assert context.stats().packed == 0
    train(model, context)
    stats = context.stats()
    text = str(stats)
    for part in (f"{stats.packed} tensors", OWNED, "prefetch", "in flight", "no clock"):
        assert part in text
    assert stats.exposed_seconds is None
    assert stats.host_nbytes == 0
    assert stats.host_peak_nbytes == 9 * ROWS
    with pytest.raises(AttributeError):
        stats.packed = 0


def test_stats_can_be_read_at_any_time(model, device):
    """Between packs, in backward, and from within a hook of the user."""
    context = saving(model)
    with context:
        loss = model(rows(0)).sum()
        assert context.stats().host_nbytes == 9 * ROWS
        loss.register_hook(lambda gradient: seen.append(context.stats().reloads))
    seen = []
    loss.backward()
    assert seen == [0]
    assert context.stats().prefetch_hits + context.stats().prefetch_misses >= 9


# --- the warning when nothing moved ----------------------------------------------------------------------------------------


def test_a_request_that_moves_nothing_is_loud(model, device):
    """Trap 15: a warning that names the policy and the main reasons, once."""
    context = saving(model, OffloadAll())
    with pytest.warns(
        GraphOffloadWarning, match=r"OffloadAll asked .*nothing was moved.*parameter or buffer"
    ) as caught:
        train(model, context)
    assert len(caught) == 1
    assert "smaller than 1.05 MB" in str(caught[0].message) or "smaller than 1.00 MiB" in str(caught[0].message)
    train(model, context)
    train(model, saving(model, OffloadAll()))  # another object for the same model: it was said


def test_it_is_loud_without_a_device():
    """Trap 15: tensors of the host are no use to move, and whoever asks on such a machine is told so."""
    model = nn.Linear(16, 16)
    context = saving(model)
    with pytest.warns(GraphOffloadWarning, match="already in host memory"):
        train(model, context)
    assert reasons(context)["it is already in host memory"] == ROWS


def test_it_is_quiet_when_nothing_was_asked(model, device):
    """No warning where nothing was saved, where the policy asks for nothing, after an error, or once something moved."""
    with saving(model, OffloadAll()):
        pass
    with saving(model, OffloadAll()), torch.no_grad():
        model(rows(0))
    with torch.inference_mode(), saving(model, OffloadAll()):
        model.eval()(rows(0).detach())
    model.train()
    for policy in (KeepAll(), FollowTags(), OffloadBytes(0), ByName(modules="*", action=Action.KEEP)):
        train(model, saving(model, policy))
    with pytest.raises(ZeroDivisionError), saving(model, OffloadAll()):
        model(rows(0)).sum() / (1 // 0)
    context = saving(model, OffloadAll(min_nbytes=ROWS))
    train(model, context)
    train(model, context, rows(0, count=1))  # nothing moves this time
    assert context.stats().moved == 9


# --- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (OffloadHidden(), ["OffloadHidden", "timeline"]),
        (OffloadBytes(0.5), ["OffloadBytes", "total_nbytes"]),
        (ByName(ops="aten.mm"), ["ByName", "op"]),
        (ByName(names="hidden"), ["ByName", "label"]),
        (ByName(names="a", modules="b"), ["ByName", "label"]),
        (FirstOf(FollowTags(), ByName(ops="aten.mm")), ["FirstOf", "op"]),
        (FirstOf(KeepAll(), OffloadHidden()), ["FirstOf", "timeline"]),
        (Never(ByName(ops="aten.mm")), ["Never", "op"]),
    ],
    ids=lambda one: repr(one) if not isinstance(one, list) else "",
)
def test_facts_that_eager_code_cannot_know(model, policy, words):
    """Refused at construction, by the policy's name and the fact's, with what to do instead."""
    with pytest.raises(PolicyError) as caught:
        graphoffload.saved_tensors(policy, model=model)
    for word in [*words, "graphoffload", "OffloadBytes"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("policy", [ByName(modules="layers.*"), FirstOf(ByName(modules="layers.*"), KeepAll())])
def test_modules_without_a_model(policy):
    """Refused, and says what to change."""
    with pytest.raises(PolicyError, match=r"model=model"):
        graphoffload.saved_tensors(policy)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"policy": OffloadAll}, PolicyError, "write OffloadAll"),
        ({"policy": None}, PolicyError, "not a policy"),
        ({"policy": "OffloadAll"}, PolicyError, "not a policy"),
        ({"policy": EVERYTHING, "model": "mlp"}, UsageError, r"give a torch\.nn\.Module"),
        ({"policy": EVERYTHING, "model": nn.Linear}, UsageError, r"give a torch\.nn\.Module"),
        ({"policy": EVERYTHING, "machine": "abacus"}, MachineError, "abacus"),
        ({"policy": EVERYTHING, "machine": 7}, UsageError, "Machine"),
    ],
)
def test_arguments_that_make_no_sense(arguments, error, words):
    with pytest.raises(error, match=words):
        graphoffload.saved_tensors(**arguments)


@dataclass(frozen=True)
class Curious:
    """A policy of the user's own, with a fact that nobody has."""

    needs = frozenset({"weather"})

    def decide(self, value, ledger):
        return None


def test_a_fact_that_nobody_knows(model):
    with pytest.raises(PolicyError, match="weather"):
        graphoffload.saved_tensors(Curious(), model=model)


def test_a_machine_by_its_name(model, device):
    """A name is as good as the object."""
    for machine in ("virtual", VIRTUAL):
        assert same_as_plain(model, train, machine=machine).moved


# --- by module -------------------------------------------------------------------------------------------------------------


def moved_by_module(device, model, pattern, forward, **options):
    """Return the bytes moved in each of three steps under a policy for one pattern."""
    moves = Moves.of(device)
    context = saving(model, FirstOf(ByName(modules=pattern), KeepAll()), **options)
    counts = []
    for _ in range(3):
        before = sum(moves.nbytes)
        with context:
            loss = forward(model, rows(0)).sum()
        loss.backward()
        counts.append(sum(moves.nbytes) - before)
    assert len(set(counts)) == 1
    return counts[0]


class Nested(nn.Module):
    """A block with an own operator, layers inside it, one of them under two names, and one that calls itself."""

    class Again(nn.Module):
        def forward(self, x, depth=2):
            x = x.sin()
            return self(x, depth - 1) if depth else x

    class Inner(nn.Module):
        def __init__(self, act):
            super().__init__()
            self.act = act

        def forward(self, x):
            return self.act(x).exp()

    def __init__(self):
        super().__init__()
        self.shared = nn.Tanh()
        self.block = Nested.Inner(self.shared)
        self.again = Nested.Again()

    def forward(self, x):
        x = self.block(x).cos()
        x = self.shared(x)
        return self.again(x).cos()


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("block", 1),  # exp's output
        ("shared", 2),  # called in the block and outside it: by the first of its names both times
        ("again", 2),  # twice inside itself; the first sin saves what the shared layer made and keeps
        ("block.*", 0),  # the shared layer goes by its first name
        ("*", 5),
    ],
)
@pytest.mark.filterwarnings("ignore:graphoffload. ByName asked:graphoffload.GraphOffloadWarning")
@pytest.mark.filterwarnings("ignore:graphoffload. FirstOf asked:graphoffload.GraphOffloadWarning")
def test_modules_shared_and_entered_again(device, pattern, values):
    """Rank 23: what is saved while a module runs is its own, until it returns; then its caller's again."""
    assert moved_by_module(device, Nested(), pattern, lambda model, x: model(x)) == values * ROWS


def test_modules_that_run_in_another_order_or_fail(model, device):
    """A module that raises leaves no path behind: what follows is not its."""

    def forward(model, x):
        with pytest.raises(TypeError):
            model.layers[1]("no tensor")
        x = x.sin()  # outside any module
        return model.layers[0](model.layers[2](x).sin())

    with pytest.warns(GraphOffloadWarning, match="nothing was moved"):
        assert moved_by_module(device, model, "layers.1", forward) == 0
    assert moved_by_module(device, model, "layers.0", forward) == ROWS


def test_a_module_given_alone_is_known_by_its_names(model, device):
    """The names are those below the model that was given, and its own values are nobody's."""
    assert moved_by_module(device, model, "layers", lambda model, x: model(x)) == 3 * ROWS
    with pytest.warns(GraphOffloadWarning, match="nothing was moved"):
        moved_by_module(device, model.layers[0], "layers", lambda layer, x: layer(x))


def test_hooks_on_modules_go_with_the_block(model, device):
    """They are there inside the block only, however it is left, and as often as it is nested."""

    def hooks():
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    context = saving(model, FirstOf(ByName(modules="layers.1"), KeepAll()))
    with context:
        assert hooks() > 0
        with context:
            model(rows(0))
    assert hooks() == 0
    with pytest.raises(ZeroDivisionError), context:
        raise ZeroDivisionError
    assert hooks() == 0
    with context:
        loss = model(rows(0)).sum()
    assert hooks() == 0
    loss.backward()


def test_nothing_is_learnt_from_other_devices():
    """A virtual device that is gone leaves nothing behind that would be used on the next one."""
    torch.manual_seed(0)
    model = Mlp()
    context = saving(model)
    for _ in range(3):
        with virtual_device() as device:
            train(model, context)
            assert device.stats().offloads == 9
    assert context.stats().moved == 27
