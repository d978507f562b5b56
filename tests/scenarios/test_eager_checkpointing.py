"""Scenarios of the eager path about activation checkpointing: ranks 9, 16 and 19, and memory that outlives its node."""

from __future__ import annotations

import functools
import gc
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from training import Compiler, assert_same_bits, fresh, fresh_inputs, is_finite, outcome, train_step, weighted_sum

import graphoffload
from graphoffload.errors import PolicyError, UsageError
from graphoffload.planning.policy import FollowTags, KeepAll, OffloadAll, Policy
from graphoffload.runtime.stats import SavedTensorsStats
from graphoffload.testing import VirtualRun, check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
RESPECTS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
ROWS, WIDTH = 16, 32
ACTIVATION = ROWS * WIDTH * 4

plainly = functools.partial(checkpoint, use_reentrant=False)
reentrantly = functools.partial(checkpoint, use_reentrant=True)


# --- running a program with and without -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Hold what a comparison left behind for more assertions."""

    stats: SavedTensorsStats
    device: VirtualRun


def assert_trains_as_plain(
    module: nn.Module,
    *inputs: Any,
    policy: Policy = EVERYTHING,
    backward_inside: bool = False,
    steps: int = 3,
    loss: Callable[[Any], Any] = weighted_sum,
) -> Trained:
    """Train a module and a copy of it, plainly and under `saved_tensors`, and raise on any different bit in any step.

    The first step learns in which order values come back, the later ones follow it. At the end nothing may be in a slot.
    """
    plain, ours = fresh(module), fresh(module)
    plain_inputs, our_inputs = fresh_inputs(inputs), fresh_inputs(inputs)
    with virtual_device() as device:
        context = graphoffload.saved_tensors(policy, model=ours)
        for step in range(steps):
            want = train_step(plain, plain_inputs, module=plain, seed=step, loss=loss)
            assert is_finite(want)
            torch.manual_seed(step)
            if backward_inside:
                with context:
                    outputs = ours(*our_inputs)
                    loss(outputs).backward()
            else:
                with context:
                    outputs = ours(*our_inputs)
                loss(outputs).backward()
            assert_same_bits(outcome(outputs, inputs=(our_inputs, {}), module=ours), want)
            del outputs
        check_log(device)
        assert_slots_empty(device)
        return Trained(context.stats(), device)


def assert_slots_empty(device: VirtualRun) -> None:
    gc.collect()
    assert device.stats().slots == 0
    assert device.stats().host_nbytes == 0


class Net(nn.Module):
    """Three regions one after the other, each run by `run`, with something before, between and after."""

    def __init__(self, run: Callable[..., Any], body: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in "123")
        self.run, self.body = run, body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sin()
        for layer in self.layers:
            region = layer if self.body is None else functools.partial(self.body, layer)
            x = x + self.run(region, x)
        return self.last(x).cos()


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


def directly(region, *args):
    return region(*args)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("run", [directly, plainly, reentrantly], ids=["plain", "region", "reentrant"])
def test_a_gradient_may_be_a_view_of_reloaded_memory(x, run, backward_inside):
    """The gradient of `HalfSquare` is what it saved; the nodes behind it read it when its own node is long over."""
    trained = assert_trains_as_plain(
        GivesItsMemoryAway(run), x, backward_inside=backward_inside, loss=lambda output: output
    )
    assert trained.stats.reloads


def test_the_gradient_of_a_leaf_may_be_reloaded_memory(x):
    """The leaf's own `.grad` is a view of what came back, and stays right while later steps move other things."""
    with virtual_device() as device:
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
        check_log(device)


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

    trained = assert_trains_as_plain(Twice(run, body), x, backward_inside=backward_inside)
    assert trained.stats.moved >= 2 * 3  # the first layer's output, and the shared input of the regions, in each step


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
    with virtual_device() as device:
        for _ in range(3):
            with graphoffload.saved_tensors(EVERYTHING, model=model):
                loss = model(x)
            loss.backward()
        del loss
        gc.collect()
        assert len(kept) == 3
        for have, want in zip(kept, saved, strict=True):
            assert torch.equal(have, want)
        check_log(device)
        kept.clear()
        assert_slots_empty(device)


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
    trained = assert_trains_as_plain(Net(run), x, backward_inside=backward_inside)
    # At least what goes into the three regions, of each step; the parameters are never among what moves.
    assert trained.stats.moved_nbytes >= 3 * 3 * ACTIVATION
    assert trained.stats.reloads


def test_what_a_region_makes_is_not_moved(x):
    """Trap 14: only a region's input moves. What it computes again in backward is left to the region."""
    trained = assert_trains_as_plain(Net(plainly), x, steps=1)
    # The model's input, that of sin, of the three regions, of the last layer, and of cos.
    assert trained.stats.moved == 7
    assert trained.stats.moved_nbytes == 7 * ACTIVATION


def test_the_reentrant_kind_packs_what_it_runs_again(x):
    """With backward inside the block its recomputation is a forward like any other, and its values are moved too."""
    outside = assert_trains_as_plain(Net(reentrantly), x, steps=1).stats
    inside = assert_trains_as_plain(Net(reentrantly), x, steps=1, backward_inside=True).stats
    assert inside.moved > outside.moved


@pytest.mark.parametrize("preserve_rng_state", [True, False])
@pytest.mark.parametrize("run", [plainly, reentrantly, graphoffload.checkpoint], ids=["torch", "reentrant", "ours"])
def test_dropout_inside_regions(x, run, preserve_rng_state):
    """Rank 6: the mask of backward is that of forward; moving values draws no random number of the program's."""

    def body(layer, a):
        return F.dropout(layer(a), 0.5) * F.dropout(a, 0.25)

    run = functools.partial(run, preserve_rng_state=preserve_rng_state)
    assert assert_trains_as_plain(Net(run, body), x).stats.moved


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
    with virtual_device() as device:
        with graphoffload.saved_tensors(EVERYTHING, model=model) as context:
            result = model(x)
        result.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, once)
        first = context.stats().reloads
        result.sum().backward()
        assert torch.equal(x.grad, twice)
        assert context.stats().reloads > first
        check_log(device)
        del result
        assert_slots_empty(device)


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
    with virtual_device() as device:
        with graphoffload.saved_tensors(EVERYTHING, model=model):
            part, grad = run(model, x)
        assert torch.equal(part, want[0])
        assert torch.equal(grad, want[1])
        check_log(device)
        assert_slots_empty(device)


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
    with virtual_device() as device:
        with pytest.raises(KeyError, match="in the middle"):  # noqa: PT012
            with graphoffload.saved_tensors(EVERYTHING, model=model):
                result = model(x)
                result.sum().backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        del result
        assert_slots_empty(device)
        check_log(device)
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
    trained = assert_trains_as_plain(ByKeyword(plainly), x, steps=1)
    # The layer's input, and the region's one positional tensor.
    assert trained.stats.packed - len([*ByKeyword(plainly).first.parameters()]) <= 2
    assert trained.stats.moved_nbytes == 2 * ACTIVATION


def test_our_checkpoint_shows_tensors_given_by_keyword(x):
    trained = assert_trains_as_plain(ByKeyword(graphoffload.checkpoint), x, steps=1)
    assert trained.stats.moved_nbytes == (2 + 3) * ACTIVATION
    assert_trains_as_plain(ByKeyword(graphoffload.checkpoint), x, steps=3, backward_inside=True)


def test_our_checkpoint_lets_go_of_them(x):
    """Nothing but the context holds them between forward and backward."""
    model = ByKeyword(graphoffload.checkpoint)
    storages = []

    def body(a, *, gate, pair, power):
        storages.extend(torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in (gate, *pair["both"]))
        return ByKeyword.body(model, a, gate=gate, pair=pair, power=power)

    model.body = body
    with virtual_device() as device:
        with graphoffload.saved_tensors(EVERYTHING, model=model):
            result = model(x)
        while device.runtime.drop_oldest():
            pass
        assert [storage.expired() for storage in storages] == [True] * 3
        result.sum().backward()
        check_log(device)


def test_our_checkpoint_is_never_reentrant(x):
    with pytest.raises(UsageError, match="reentrant"):
        graphoffload.checkpoint(torch.sin, x, use_reentrant=True)


# --- rank 16: selective checkpointing -------------------------------------------------------------------------------------

PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
POLICIES = [pytest.param(policy, id=policy.name) for policy in CheckpointPolicy]


def tagged(policy: CheckpointPolicy, make: Callable[..., Any]) -> Callable[[], Any]:
    """Make a context function that tags matrix products and lets the rest be computed again."""

    def decide(ctx, op, *args, **kwargs):
        return policy if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(make, decide)


def ours(policy: CheckpointPolicy) -> Callable[..., Any]:
    context_fn = tagged(policy, graphoffload.create_selective_checkpoint_contexts)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=context_fn)


def torchs(policy: CheckpointPolicy, **how: Any) -> Callable[..., Any]:
    context_fn = tagged(policy, torch_checkpoint.create_selective_checkpoint_contexts)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=context_fn, **how)


BASE = 7 * ACTIVATION
"""What moves of `Net` in one step without a selective context, see above."""
IN_REGIONS = 3 * 2 * ACTIVATION
"""The matrix products inside its regions."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
def test_what_our_contexts_remember_is_a_saved_value_like_any_other(x, policy, backward_inside):
    """Everything that is not recomputed is under the policy of the surrounding context."""
    stats = assert_trains_as_plain(Net(ours(policy)), x, steps=1, backward_inside=backward_inside).stats
    recomputed = policy.name.endswith("RECOMPUTE")
    # The last product of a region is the region's result: added to x, nothing else saves it.
    assert stats.moved_nbytes == BASE + (0 if recomputed else IN_REGIONS)
    assert_trains_as_plain(Net(ours(policy)), x, backward_inside=backward_inside)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("around", [FollowTags(), KeepAll()], ids=lambda policy: type(policy).__name__)
def test_tags_and_the_policy_around(x, policy, around):
    """MUST is stronger than any policy, PREFER is for those without an opinion, and *_SAVE asks for no move."""
    stats = assert_trains_as_plain(Net(ours(policy)), x, steps=1, policy=around).stats
    moves = policy.name == "MUST_CPU_OFFLOAD" or (policy.name == "PREFER_CPU_OFFLOAD" and around == FollowTags())
    assert stats.moved_nbytes == (IN_REGIONS if moves else 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_tags_without_a_context_around(x, policy):
    """*_CPU_OFFLOAD moves all the same, *_SAVE stays where it is, and all come out as plain."""
    model = Net(plainly)
    want = train_step(model, fresh_inputs((x,)), module=fresh(model))
    selective = fresh(model)
    selective.run = ours(policy)
    with virtual_device() as device:
        for _ in range(3):
            before = device.stats().offloaded_nbytes
            selective.zero_grad(set_to_none=True)
            have = train_step(selective, fresh_inputs((x,)), module=fresh(model))
            assert_same_bits(have, want)
            moved = device.stats().offloaded_nbytes - before
            assert moved == (IN_REGIONS if policy.name.endswith("CPU_OFFLOAD") else 0)
        check_log(device)
        assert_slots_empty(device)


@pytest.mark.parametrize("compiled", [directly, graphoffload.checkpoint, plainly], ids=["none", "ours", "torch"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tags_under_the_compiler(x, policy, compiled):
    """The same context function inside torch.compile: the tags reach the backend, which moves what it is told to."""
    how = {} if compiled is directly else {"context_fn": ours(policy).keywords["context_fn"]}
    model = Net(functools.partial(compiled, **how))
    twin = fresh(model)
    with virtual_device() as device:
        compiler = Compiler(FollowTags())
        run = compiler(model)
        for step in range(2):
            want = train_step(twin, fresh_inputs((x,)), module=twin, seed=step)
            assert_same_bits(train_step(run, fresh_inputs((x,)), module=model, seed=step), want)
        check_log(device)
    names = {transfer.storage for plan in compiler.plans for transfer in plan.transfers}
    moves = policy.name.endswith("CPU_OFFLOAD") and compiled is not directly
    assert bool(names) is moves, names
    assert all("addmm" in name or "mm" in name for name in names)


@pytest.mark.skipif(RESPECTS, reason="this torch can show them, see the next tests")
@pytest.mark.parametrize("policy", POLICIES)
def test_torchs_contexts_show_what_they_remember_to_nobody(x, policy):
    """Before torch 2.14: what is saved stays on the device unseen, and what is to be offloaded is recomputed."""
    stats = assert_trains_as_plain(Net(torchs(policy)), x, steps=1).stats
    assert stats.moved_nbytes == BASE


@pytest.mark.skipif(not RESPECTS, reason="torch.utils.checkpoint has no respect_saved_tensors_hooks before 2.14")
@pytest.mark.parametrize("respect", [None, False, True], ids=["unsaid", "refused", "asked"])
def test_torchs_three_stages(x, respect):
    """Unsaid: unseen with a warning; refused: unseen; asked for (later torch's default): under the policy like the rest."""
    model = Net(torchs(CheckpointPolicy.MUST_SAVE, respect_saved_tensors_hooks=respect))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = assert_trains_as_plain(model, x, steps=1).stats
    assert any(issubclass(each.category, FutureWarning) for each in caught) is (respect is None)
    assert stats.moved_nbytes == BASE + (IN_REGIONS if respect else 0)


@pytest.mark.skipif(not RESPECTS, reason="torch.utils.checkpoint has no respect_saved_tensors_hooks before 2.14")
@pytest.mark.parametrize("respect", [None, False, True], ids=["unsaid", "refused", "asked"])
def test_our_contexts_are_seen_in_every_stage(x, respect):
    """Whatever torch's parameter says, and without a warning: it is about torch's contexts."""
    run = functools.partial(ours(CheckpointPolicy.MUST_SAVE), respect_saved_tensors_hooks=respect)
    stats = assert_trains_as_plain(Net(run), x, steps=1).stats
    assert stats.moved_nbytes == BASE + IN_REGIONS


@pytest.mark.skipif(not RESPECTS, reason="torch.utils.checkpoint has no respect_saved_tensors_hooks before 2.14")
def test_our_checkpoint_asks_torchs_contexts_to_show_theirs(x):
    context_fn = tagged(CheckpointPolicy.MUST_SAVE, torch_checkpoint.create_selective_checkpoint_contexts)
    stats = assert_trains_as_plain(Net(functools.partial(graphoffload.checkpoint, context_fn=context_fn)), x, steps=1).stats
    assert stats.moved_nbytes == BASE + IN_REGIONS


def selectively_inside(run: Callable[..., Any]) -> Callable[..., Any]:
    selective = ours(CheckpointPolicy.MUST_SAVE)
    return lambda region, x: run(lambda a: selective(region, a.sin()), x)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("outer", [plainly, reentrantly, ours(CheckpointPolicy.PREFER_SAVE)], ids=["plain", "reentrant", "selective"])
def test_a_selective_region_inside_another(x, outer, backward_inside):
    stats = assert_trains_as_plain(Net(selectively_inside(outer)), x, backward_inside=backward_inside).stats
    assert stats.reloads


def test_a_nested_region_is_under_the_policy_too(x):
    """Checkpoint's own hooks are on top when it begins; and what is run again for an outer region moves nothing twice."""
    stats = assert_trains_as_plain(Net(selectively_inside(plainly)), x, steps=1, backward_inside=True).stats
    assert stats.moved_nbytes == BASE + IN_REGIONS


def test_a_tag_that_cannot_be_honoured_is_loud(x):
    """Without a device that is offloaded, MUST_CPU_OFFLOAD raises; it is not silently something else."""
    with pytest.raises(PolicyError, match="MUST_CPU_OFFLOAD") as caught:
        Net(ours(CheckpointPolicy.MUST_CPU_OFFLOAD))(x)
    assert "addmm" in "".join(caught.value.__notes__)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    # PREFER is a wish.
    Net(ours(CheckpointPolicy.PREFER_CPU_OFFLOAD))(x).sum().backward()
