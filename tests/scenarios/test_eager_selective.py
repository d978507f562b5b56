"""Scenarios of the eager path about selective checkpointing: rank 16, and tags that ask for the host."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from eager_training import offloading
from region_training import ACTIVATION, BASE, ROWS, WIDTH, Net, assert_trains_as_plain, plainly, reentrantly
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from training import Compiler, assert_same_bits, fresh, fresh_inputs, train_step

import graphoffload
from graphoffload._torch import saved_tensors_hooks_are_active
from graphoffload.errors import PolicyError
from graphoffload.planning.policy import FollowTags, KeepAll

RESPECTS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


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


IN_REGIONS = 3 * 2 * ACTIVATION
"""The matrix products inside its regions."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
def test_what_our_contexts_remember_is_a_saved_value_like_any_other(x, policy, backward_inside):
    """Everything that is not recomputed is under the policy of the surrounding context."""
    stats = assert_trains_as_plain(Net(ours(policy)), x, steps=1, backward_inside=backward_inside)
    recomputed = policy.name.endswith("RECOMPUTE")
    # The last product of a region is the region's result: added to x, nothing else saves it.
    assert stats.moved_nbytes == BASE + (0 if recomputed else IN_REGIONS)
    assert_trains_as_plain(Net(ours(policy)), x, backward_inside=backward_inside)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("around", [FollowTags(), KeepAll()], ids=lambda policy: type(policy).__name__)
def test_tags_and_the_policy_around(x, policy, around):
    """MUST is stronger than any policy, PREFER is for those without an opinion, and *_SAVE asks for no move."""
    stats = assert_trains_as_plain(Net(ours(policy)), x, steps=1, policy=around)
    moves = policy.name == "MUST_CPU_OFFLOAD" or (policy.name == "PREFER_CPU_OFFLOAD" and around == FollowTags())
    assert stats.moved_nbytes == (IN_REGIONS if moves else 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_tags_without_a_context_around(x, policy):
    """*_CPU_OFFLOAD moves all the same, *_SAVE stays where it is, and all come out as plain."""
    model = Net(plainly)
    selective = fresh(model)
    selective.run = ours(policy)
    with offloading() as device:
        for step in range(3):
            before = device.stats().offloaded_nbytes
            want = train_step(model, fresh_inputs((x,)), module=model, seed=step)
            assert_same_bits(train_step(selective, fresh_inputs((x,)), module=selective, seed=step), want)
            moved = device.stats().offloaded_nbytes - before
            assert moved == (IN_REGIONS if policy.name.endswith("CPU_OFFLOAD") else 0)


@pytest.mark.parametrize("around", [None, FollowTags()], ids=["alone", "surrounded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_moved_is_gone_from_the_device(x, policy, around):
    """Between forward and backward only *_SAVE holds device memory."""
    storages = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                storages.append(StorageWeakRef(out.untyped_storage()))
            return out

    def program(x):
        return ours(policy)(lambda a: ((a @ a.t()).sin() @ a).cos() * 2, x)

    with offloading() as device:
        with Watching(), graphoffload.saved_tensors(around) if around is not None else contextlib.nullcontext():
            result = program(x)
        while device.runtime.drop_oldest():
            pass
        assert [storage.expired() for storage in storages] == [not policy.name.endswith("SAVE")] * 2
        result.sum().backward()
        del result


@pytest.mark.parametrize("compiled", [graphoffload.checkpoint, plainly], ids=["ours", "torch"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tags_under_the_compiler(x, policy, compiled):
    """The same context function inside torch.compile: the tags reach the backend, which moves what it is told to."""
    model = Net(functools.partial(compiled, context_fn=ours(policy).keywords["context_fn"]))
    twin = fresh(model)
    with offloading():
        compiler = Compiler(FollowTags())
        run = compiler(model)
        for step in range(2):
            want = train_step(twin, fresh_inputs((x,)), module=twin, seed=step)
            assert_same_bits(train_step(run, fresh_inputs((x,)), module=model, seed=step), want)
    names = {transfer.storage for plan in compiler.plans for transfer in plan.transfers}
    assert bool(names) is policy.name.endswith("CPU_OFFLOAD")
    assert all("addmm" in name or "mm" in name for name in names)


@pytest.mark.skipif(RESPECTS, reason="this torch can show them, see the next tests")
@pytest.mark.parametrize("policy", POLICIES)
def test_torchs_contexts_show_what_they_remember_to_nobody(x, policy):
    """Before torch 2.14: what is saved stays on the device unseen, and what is to be offloaded is recomputed."""
    stats = assert_trains_as_plain(Net(torchs(policy)), x, steps=1)
    assert stats.moved_nbytes == BASE


@pytest.mark.skipif(not RESPECTS, reason="torch.utils.checkpoint has no respect_saved_tensors_hooks before 2.14")
@pytest.mark.parametrize("respect", [None, False, True], ids=["unsaid", "refused", "asked"])
def test_torchs_three_stages(x, respect):
    """Unsaid: unseen with a warning; refused: unseen; asked for (later torch's default): under the policy like the rest."""
    model = Net(torchs(CheckpointPolicy.MUST_SAVE, respect_saved_tensors_hooks=respect))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = assert_trains_as_plain(model, x, steps=1)
    assert any(issubclass(each.category, FutureWarning) for each in caught) is (respect is None)
    assert stats.moved_nbytes == BASE + (IN_REGIONS if respect else 0)


@pytest.mark.skipif(not RESPECTS, reason="torch.utils.checkpoint has no respect_saved_tensors_hooks before 2.14")
@pytest.mark.parametrize("respect", [None, False, True], ids=["unsaid", "refused", "asked"])
def test_our_contexts_are_seen_in_every_stage(x, respect):
    """Whatever torch's parameter says, and without a warning: it is about torch's contexts."""
    run = functools.partial(ours(CheckpointPolicy.MUST_SAVE), respect_saved_tensors_hooks=respect)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = assert_trains_as_plain(Net(run), x, steps=1)
    assert stats.moved_nbytes == BASE + IN_REGIONS


@pytest.mark.skipif(not RESPECTS, reason="torch.utils.checkpoint has no respect_saved_tensors_hooks before 2.14")
def test_our_checkpoint_asks_torchs_contexts_to_show_theirs(x):
    context_fn = tagged(CheckpointPolicy.MUST_SAVE, torch_checkpoint.create_selective_checkpoint_contexts)
    stats = assert_trains_as_plain(Net(functools.partial(graphoffload.checkpoint, context_fn=context_fn)), x, steps=1)
    assert stats.moved_nbytes == BASE + IN_REGIONS


def selectively_inside(run: Callable[..., Any]) -> Callable[..., Any]:
    selective = ours(CheckpointPolicy.MUST_SAVE)
    return lambda region, x: run(lambda a: selective(region, a.sin()), x)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize(
    "outer", [plainly, reentrantly, ours(CheckpointPolicy.PREFER_SAVE)], ids=["plain", "reentrant", "selective"]
)
def test_a_selective_region_inside_another(x, outer, backward_inside):
    stats = assert_trains_as_plain(Net(selectively_inside(outer)), x, backward_inside=backward_inside)
    assert stats.reloads


def test_a_nested_region_is_under_the_policy_too(x):
    """Checkpoint's own hooks are on top when it begins; and what is run again for an outer region moves nothing twice."""
    stats = assert_trains_as_plain(Net(selectively_inside(plainly)), x, steps=1, backward_inside=True)
    assert stats.moved_nbytes == BASE + IN_REGIONS


def test_a_tag_that_cannot_be_honoured_is_loud(x):
    """Without a device that is offloaded, MUST_CPU_OFFLOAD raises; it is not silently something else."""
    with pytest.raises(PolicyError, match="MUST_CPU_OFFLOAD") as caught:
        Net(ours(CheckpointPolicy.MUST_CPU_OFFLOAD))(x)
    assert "addmm" in "".join(caught.value.__notes__)
    # Before torch 2.13 a checkpoint whose forward raised takes its hooks away only when the error is forgotten.
    del caught
    gc.collect()
    assert not saved_tensors_hooks_are_active()
    # PREFER is a wish.
    Net(ours(CheckpointPolicy.PREFER_CPU_OFFLOAD))(x).sum().backward()
