"""Our selective contexts and our checkpoint, operator by operator: what torch's do, and what only ours do."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint as torch_checkpoint
from requirements import needs_cpp_compiler
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from training import assert_same_bits, fresh_inputs, outcome

import graphoffload
from graphoffload import create_selective_checkpoint_contexts
from graphoffload.errors import PolicyError, UsageError
from graphoffload.planning.policy import FollowTags, KeepAll, OffloadAll
from graphoffload.testing import virtual_device

aten = torch.ops.aten
EVERYTHING = OffloadAll(min_nbytes=0)
OFFLOAD, SAVE, AGAIN = (
    CheckpointPolicy.MUST_CPU_OFFLOAD,
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.PREFER_RECOMPUTE,
)
BOTH = pytest.mark.parametrize("tag", [SAVE, OFFLOAD], ids=["save", "offload"])


def by_op(tags: dict[Any, CheckpointPolicy], **how: Any) -> functools.partial:
    def decide(ctx, op, *args, **kwargs):
        return tags.get(op, AGAIN)

    return functools.partial(create_selective_checkpoint_contexts, decide, **how)


def run(region, *inputs, context_fn, **how):
    """Run the region selectively on the virtual device; return outputs and gradients, and how often each operator ran."""
    inputs = fresh_inputs(inputs)
    torch.manual_seed(0)
    with virtual_device():
        outputs = checkpoint(region, *inputs, use_reentrant=False, context_fn=context_fn, **how)
        total(outputs).backward()
    return outcome(outputs, inputs=inputs)


def plain(region, *inputs):
    inputs = fresh_inputs(inputs)
    torch.manual_seed(0)
    outputs = region(*inputs)
    total(outputs).backward()
    return outcome(outputs, inputs=inputs)


def total(outputs):
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return torch.stack([each.sum() * (i + 1) for i, each in enumerate(outputs) if isinstance(each, torch.Tensor)]).sum()


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Count what reaches the device below our modes."""

    def __init__(self):
        super().__init__()
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def a() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 8, requires_grad=True)


def two_products(a):
    return ((a @ a).sin() @ a).cos()


# --- what torch's contexts do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", list(CheckpointPolicy), ids=lambda tag: tag.name)
def test_products_run_again_only_where_they_are_not_remembered(a, tag):
    counting = Counting()
    with counting:
        have = run(two_products, a, context_fn=by_op({aten.mm.default: tag}))
    assert_same_bits(have, plain(two_products, a))
    # Two in forward, and four for the gradients of the two; as many again as are recomputed.
    again = 2 if tag.name.endswith("RECOMPUTE") else 0
    assert counting.ran.count(aten.mm.default) == 2 + 4 + again


@pytest.mark.parametrize(
    "ops", [[aten.mm.default], (aten.mm.default,), {aten.mm.default}], ids=["list", "tuple", "set"]
)
def test_operators_may_be_listed(a, ops):
    counting = Counting()
    with counting:
        have = run(two_products, a, context_fn=functools.partial(create_selective_checkpoint_contexts, ops))
    assert_same_bits(have, plain(two_products, a))
    assert counting.ran.count(aten.mm.default) == 6


@pytest.mark.parametrize("answer", [True, False])
def test_a_policy_function_may_answer_with_booleans(a, answer):
    counting = Counting()
    with counting:
        run(
            two_products, a, context_fn=functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: answer)
        )
    assert counting.ran.count(aten.mm.default) == (6 if answer else 8)


def test_the_policy_function_is_asked_once_for_each_operator_in_forward(a):
    """With the operator, its arguments, and what torch's own contexts tell it."""
    asked = []

    def decide(ctx, op, *args, **kwargs):
        asked.append((ctx, op, args))
        return SAVE if len(asked) == 1 else AGAIN

    have = run(two_products, a, context_fn=functools.partial(create_selective_checkpoint_contexts, decide))
    assert_same_bits(have, plain(two_products, a))
    assert [op for _, op, _ in asked] == [aten.mm.default, aten.sin.default, aten.mm.default, aten.cos.default]
    assert all(isinstance(ctx, torch_checkpoint.SelectiveCheckpointContext) for ctx, _, _ in asked)
    assert not any(ctx.is_recompute for ctx, _, _ in asked)
    assert all(len(args) == (2 if op is aten.mm.default else 1) for _, op, args in asked)
    if "op_output" in inspect.signature(torch_checkpoint.SelectiveCheckpointContext).parameters:
        assert all(ctx.op_output.shape == (8, 8) for ctx, _, _ in asked)


@BOTH
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_invocation_of_many_may_be_remembered(a, tag, which):
    """Invocations of an operator are told apart by how many came before."""

    def region(a):
        return ((a @ a) @ (a + 1)).sin() @ a

    seen = []

    def decide(ctx, op, *args, **kwargs):
        seen.append(op)
        return tag if op is aten.mm.default and seen.count(op) == which + 1 else AGAIN

    have = run(region, a, context_fn=functools.partial(create_selective_checkpoint_contexts, decide))
    assert_same_bits(have, plain(region, a))


@BOTH
def test_a_second_backward_is_refused(a, tag):
    """What was remembered is handed out once, so that its memory goes as early as plain autograd's."""
    with virtual_device():
        y = checkpoint(two_products, a, use_reentrant=False, context_fn=by_op({aten.mm.default: tag})).sum()
        y.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward an extra time"):
            y.backward()


def test_a_second_backward_is_right_where_nothing_is_remembered(a):
    y = checkpoint(two_products, a, use_reentrant=False, context_fn=by_op({})).sum()
    y.backward(retain_graph=True)
    once = a.grad.clone()
    y.backward()
    assert torch.equal(a.grad, 2 * once)


def changed_after(a):
    y = a @ a
    z = y.sin()
    with torch.no_grad():
        y.add_(1)
    return z @ a


@BOTH
@pytest.mark.parametrize(
    "around", [None, EVERYTHING, KeepAll(), FollowTags()], ids=lambda around: type(around).__name__
)
def test_a_remembered_result_that_is_changed_in_place_is_refused(a, tag, around):
    """Wherever it is: on the device, or moved."""
    with virtual_device():
        context_fn = by_op({aten.mm.default: tag})
        if around is None:
            y = checkpoint(changed_after, a, use_reentrant=False, context_fn=context_fn)
        else:
            with graphoffload.saved_tensors(around):
                y = checkpoint(changed_after, a, use_reentrant=False, context_fn=context_fn)
        with pytest.raises(RuntimeError, match="changed in place"):
            y.sum().backward()


@BOTH
@pytest.mark.parametrize("around", [None, EVERYTHING, KeepAll()], ids=lambda around: type(around).__name__)
def test_changes_in_place_may_be_allowed(a, tag, around):
    """`relu_` twice is `relu_` once, so the region is right whether it starts from the old value or the new one."""

    def region(a):
        return (a @ a).relu_() @ a

    inputs = fresh_inputs((a,))
    context_fn = by_op({aten.mm.default: tag}, allow_cache_entry_mutation=True)
    with virtual_device():
        if around is None:
            y = checkpoint(region, *inputs, use_reentrant=False, context_fn=context_fn)
        else:
            with graphoffload.saved_tensors(around):
                y = checkpoint(region, *inputs, use_reentrant=False, context_fn=context_fn)
        total(y).backward()
    assert_same_bits(outcome(y, inputs=inputs), plain(region, a))


def test_a_region_that_runs_other_operators_in_backward_is_refused(a):
    runs = []

    def region(a):
        runs.append(None)
        for _ in runs:
            a.detach().neg()
        return a.sin() @ a

    y = checkpoint(region, a, use_reentrant=False, context_fn=by_op({aten.sin.default: SAVE}))
    with pytest.raises(RuntimeError, match=r"ran aten\.neg\.default more often than in forward, where it ran once"):
        y.sum().backward()


def test_without_gradients_nothing_is_remembered(a):
    asked = []

    def decide(ctx, op, *args, **kwargs):
        asked.append(op)
        return SAVE

    with torch.no_grad():
        checkpoint(
            two_products,
            a,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, decide),
        )
    assert asked == []


@BOTH
def test_a_graph_that_is_dropped_takes_everything_with_it(a, tag):
    """No reference cycle leads through what is remembered: nothing waits for the garbage collector."""
    outputs = []

    def decide(ctx, op, *args, **kwargs):
        if op is aten.mm.default:
            outputs.append(weakref.ref(getattr(ctx, "op_output", args[0])))
            return tag
        return AGAIN

    gc.collect()
    gc.disable()
    try:
        with virtual_device() as device:
            y = checkpoint(
                two_products,
                a + 1,
                use_reentrant=False,
                context_fn=functools.partial(create_selective_checkpoint_contexts, decide),
            )
            assert device.stats().slots == (2 if tag is OFFLOAD else 0)
            del y
            assert device.stats().slots == 0
            assert [ref() for ref in outputs] == [None, None]
    finally:
        gc.enable()


# --- what operators return ------------------------------------------------------------------------------------------------


def attention(a):
    q = a.view(1, 2, 4, 8)
    return F.scaled_dot_product_attention(q, q + 1, q * 2).view(8, 8) @ a


def several(a):
    values, indices = (a @ a).max(dim=1)
    left, right = torch.split(a.sin(), 4)
    normal, mean, rstd = torch.native_layer_norm(a, (8,), None, None, 1e-5)
    return values * indices, left @ right.t(), normal.tanh() * rstd * mean


def scalars(a):
    return (a @ a).tanh() * torch.tensor(2.0).item() * a.mean().detach().round().item()


def views(a):
    b = (a @ a).t()
    c = b.t().view(4, 16).transpose(0, 1)[2:5]
    return c.sin().sum() + b.exp().sum() + a.expand(2, 8, 8).cos().sum() + a.detach().t().matmul(a).sum()


def complex_views(a):
    b = torch.view_as_complex(a.view(8, 4, 2)).conj()
    return (b * b).imag.tanh() @ a[:4]


REGIONS = [attention, several, scalars, views, complex_views, two_products]


@pytest.mark.parametrize("tag", list(CheckpointPolicy), ids=lambda tag: tag.name)
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_tuples_numbers_nothing_and_views(a, region, tag):
    """Every operator of the region with one tag, but for those that cannot be moved where they must."""

    def decide(ctx, op, *args, **kwargs):
        small = tag is OFFLOAD and op in (aten.item.default, aten._local_scalar_dense.default, aten.lift_fresh.default)
        return AGAIN if small else tag

    context_fn = functools.partial(create_selective_checkpoint_contexts, decide)
    assert_same_bits(run(region, a, context_fn=context_fn), plain(region, a))
    with virtual_device():
        inputs = fresh_inputs((a,))
        with graphoffload.saved_tensors(EVERYTHING):
            y = checkpoint(region, *inputs, use_reentrant=False, context_fn=context_fn)
        total(y).backward()
    assert_same_bits(outcome(y, inputs=inputs), plain(region, a))


@torch.library.custom_op("graphoffload_tests::odd", mutates_args=())
def odd(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    return a * 2, a.new_empty(0), 3


@odd.register_fake
def _(a):
    return torch.empty_like(a), a.new_empty(0), 3


def _double(ctx, grad, *_):
    return grad * 2


odd.register_autograd(_double)


def test_a_tag_is_about_the_memory_that_an_operator_makes(a):
    """An empty tensor and a number beside it do not make MUST_CPU_OFFLOAD impossible."""

    def region(a):
        big, _empty, number = odd(a @ a)
        return big.tanh() * number @ a

    have = run(region, a, context_fn=by_op({torch.ops.graphoffload_tests.odd.default: OFFLOAD}))
    assert_same_bits(have, plain(region, a))


@pytest.mark.parametrize(
    "tag", [SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_CPU_OFFLOAD], ids=lambda t: t.name
)
def test_what_writes_to_its_arguments_is_run_again(a, tag):
    """`h` in the region is what was written to, so leaving `mul_` out would leave `h` as it was."""

    def region(a):
        h = a.sin()
        h.mul_(a)
        return (h @ a).cos() + h

    tags = {aten.mul_.Tensor: tag, aten.mm.default: tag}
    assert_same_bits(run(region, a, context_fn=by_op(tags)), plain(region, a))
    with pytest.raises(PolicyError, match="wrote to"):
        run(region, a, context_fn=by_op({aten.mul_.Tensor: OFFLOAD}))


def fill_in(buffer, source):
    buffer.copy_(source)


def test_an_effect_without_a_result_is_run_again(a):
    """A custom operator that only fills a buffer: there is nothing to remember, and the buffer must be filled."""
    with torch.library._scoped_library("graphoffload_tests_effects", "DEF") as library:
        library.define("fill(Tensor(x!) buffer, Tensor source) -> ()")
        library.impl("fill", fill_in, "CompositeExplicitAutograd")
        fill = torch.ops.graphoffload_tests_effects.fill

        def region(a):
            buffer = torch.empty(8, 8)
            with torch.no_grad():
                fill(buffer, a.sin())
            return (a * buffer).cos()

        have = run(region, a, context_fn=by_op({fill.default: SAVE}))
        assert_same_bits(have, plain(region, a))
        with pytest.raises(PolicyError, match="no memory"):
            run(region, a, context_fn=by_op({fill.default: OFFLOAD}))


# --- random numbers -------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("preserve_rng_state", [True, False])
@pytest.mark.parametrize("remembered", [aten.rand_like.default, aten.native_dropout.default, aten.bernoulli.default])
def test_random_operators_after_a_remembered_one_draw_what_they_drew(a, tag, preserve_rng_state, remembered):
    """Rank 6: leaving out a draw would shift those behind it; without the state of forward all must be remembered."""

    def region(a):
        first = a.sin() * torch.rand_like(a)
        second, _ = torch.native_dropout(first.cos(), 0.5, True)
        third = second.tanh() * torch.bernoulli(torch.full_like(a, 0.5))
        return third.cos() * torch.rand_like(a)

    draws = (aten.rand_like.default, aten.native_dropout.default, aten.bernoulli.default)
    tags = {remembered: tag} if preserve_rng_state else dict.fromkeys(draws, tag)
    have = run(region, a, context_fn=by_op(tags), preserve_rng_state=preserve_rng_state)
    assert_same_bits(have, plain(region, a))


def test_an_operator_that_may_draw_and_did_not_is_left_out(a):
    """Attention without dropout draws nothing, so remembering it saves the whole of it."""
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    for tags, times in (({}, 2), ({flash: SAVE}, 1), ({flash: OFFLOAD}, 1)):
        counting = Counting()
        with counting:
            have = run(attention, a, context_fn=by_op(tags))
        assert_same_bits(have, plain(attention, a))
        assert counting.ran.count(flash) == times


def test_a_generator_of_the_users_own(a):
    def region_with(generator):
        def region(a):
            with torch.no_grad():
                noise = torch.rand(8, 8, generator=generator)
            return (a * noise).sin()

        return region

    want = plain(region_with(torch.Generator().manual_seed(1)), a)
    have = run(region_with(torch.Generator().manual_seed(1)), a, context_fn=by_op({aten.rand.generator: SAVE}))
    assert_same_bits(have, want)


# --- compiled code --------------------------------------------------------------------------------------------------------


@BOTH
def test_compiled_code_inside_a_region(a, tag):
    """The compiler works under our modes as under torch's."""
    torch._dynamo.reset()
    inner = torch.compile(lambda b: (b @ b).sin(), backend="aot_eager", fullgraph=True)

    def region(a):
        return (inner(a) @ a).cos()

    want = plain(region, a)
    torch._dynamo.reset()
    assert_same_bits(run(region, a, context_fn=by_op({aten.mm.default: tag})), want)


def test_a_trace_gets_torchs_own_contexts(a):
    """They are what puts the tags on the graph."""
    kinds = []

    def context_fn():
        kinds.append(create_selective_checkpoint_contexts([aten.mm.default]))
        return kinds[-1]

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a: checkpoint(two_products, a, use_reentrant=False, context_fn=context_fn),
        backend="aot_eager",
        fullgraph=True,
    )
    compiled(a).sum().backward()
    assert kinds
    assert {type(mode).__module__ for pair in kinds for mode in pair} == {"torch.utils.checkpoint"}


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)])
def test_our_checkpoint_in_a_compiled_program(a, compiler):
    """No graph break, keyword tensors and options included."""

    def body(a, *, gate, pair):
        return (a @ gate).sin() * pair[0]

    def program(a):
        return graphoffload.checkpoint(
            body, a, gate=a + 1, pair=[a * 2, None], context_fn=context_fn, preserve_rng_state=False
        ).cos()

    context_fn = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])
    torch._dynamo.reset()
    inputs = fresh_inputs((a,))
    y = torch.compile(program, backend=compiler, fullgraph=True)(*inputs)
    total(y).backward()
    want_inputs = fresh_inputs((a,))
    want = program(*want_inputs)
    total(want).backward()
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(inputs[0].grad, want_inputs[0].grad)


# --- our checkpoint -------------------------------------------------------------------------------------------------------


def test_arguments_reach_the_function_as_they_were_given(a):
    seen = []

    def body(first, *rest, scale, nested, **others):
        seen.append((rest, scale, nested, others))
        return first * scale + nested["in"][0] * rest[1]["b"]

    y = graphoffload.checkpoint(
        body, a, None, {"b": a + 1, "c": "text"}, scale=2, nested={"in": (a.sin(), 5)}, more=None, tensor=a.detach()
    )
    y.sum().backward()
    assert len(seen) == 2
    for rest, scale, nested, others in seen:
        assert rest[0] is None
        assert rest[1]["c"] == "text"
        assert (scale, nested["in"][1], others["more"]) == (2, 5, None)
        assert torch.equal(others["tensor"], a)
    once, a.grad = a.grad, None
    body(a, None, {"b": a + 1}, scale=2, nested={"in": (a.sin(), 5)}).sum().backward()
    assert torch.equal(a.grad, once)


def test_a_function_without_tensors():
    weight = torch.ones(3, requires_grad=True)
    graphoffload.checkpoint(lambda scale: (weight * scale).sin().sum(), scale=2).backward()
    assert torch.equal(weight.grad, 2 * (2 * torch.ones(3)).cos())


def test_options_are_torchs(a):
    """They are taken out of the keywords and mean what they mean there."""
    with pytest.raises(ValueError, match="determinism_check"):
        graphoffload.checkpoint(torch.sin, a, determinism_check="strict")
    with pytest.raises(ValueError, match="debug=True is incompatible"):
        graphoffload.checkpoint(torch.sin, a, debug=True, context_fn=by_op({}))
    runs = []

    def body(a):
        y = a.sin()
        runs.append("a value is missing")
        y = y.cos()
        runs.append("all values are there")
        return y.sum()

    for early_stop in (True, False):
        runs.clear()
        graphoffload.checkpoint(body, a, early_stop=early_stop).backward()
        assert len(runs) == (3 if early_stop else 4)


def test_the_reentrant_kind_is_refused(a):
    with pytest.raises(UsageError, match=r"no gradient.*torch\.utils\.checkpoint"):
        graphoffload.checkpoint(torch.sin, a, use_reentrant=True)
    graphoffload.checkpoint(torch.sin, a, use_reentrant=False).sum().backward()


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters, reason="this torch has the option"
)
def test_an_option_of_a_later_torch_is_refused(a):
    with pytest.raises(UsageError, match=r"2\.14"):
        graphoffload.checkpoint(torch.sin, a, respect_saved_tensors_hooks=True)


# --- what was asked wrongly -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (3, "takes a policy function or a list of operators, not int"),
        ([aten.mm], r"give one of its overloads, such as aten\.mm\.default"),
        (["mm"], "'mm' is no operator"),
    ],
)
def test_neither_a_function_nor_operators(asked, message):
    with pytest.raises(UsageError, match=message):
        create_selective_checkpoint_contexts(asked)


def test_an_answer_that_is_no_policy(a):
    context_fn = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: "offload")
    with pytest.raises(UsageError, match=r"answered 'offload' for aten\.mm\.default"):
        checkpoint(two_products, a, use_reentrant=False, context_fn=context_fn)


def test_must_offload_of_a_parameter_is_loud(a):
    """The memory of a parameter cannot be moved; the error names the operator."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    context = graphoffload.saved_tensors(FollowTags(), model=torch.nn.ParameterList([weight]))
    with virtual_device(), context, pytest.raises(PolicyError, match="parameter") as caught:
        checkpoint(lambda a: a @ weight.t(), a, use_reentrant=False, context_fn=by_op({aten.t.default: OFFLOAD}))
    assert any("aten.t.default" in note for note in caught.value.__notes__)


def test_must_offload_of_memory_that_an_earlier_value_keeps_is_loud(a):
    """The region's input stays, so moving a view of it would free nothing; tagged PREFER it stays without a word."""

    def region(a):
        return a.view(4, 16).sin().sum()

    with virtual_device():
        for tag in (CheckpointPolicy.PREFER_CPU_OFFLOAD, OFFLOAD):
            context_fn = by_op({aten.view.default: tag})
            with graphoffload.saved_tensors(FollowTags()) as context:
                if tag is OFFLOAD:
                    with pytest.raises(PolicyError, match="was saved before and stays"):
                        checkpoint(region, a.sin(), use_reentrant=False, context_fn=context_fn)
                else:
                    checkpoint(region, a.sin(), use_reentrant=False, context_fn=context_fn).backward()
            assert context.stats().moved == 0
