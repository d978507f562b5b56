"""Scenarios of the eager path around compiled regions (rank 15): nothing of ours is traced, and what cannot help is said."""

from __future__ import annotations

import contextlib

import pytest
import torch
from eager_training import (
    EVERYTHING,
    OWNED,
    Moves,
    assert_saves_plainly,
    gradients,
    offloading,
    rows,
    saving,
)
from requirements import needs_cpp_compiler
from subjects import Mlp
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint
from training import Compiler, assert_same_bits, fresh

import graphoffload
from graphoffload.runtime.keep import active

# Dynamo looks at `.grad` of what it is given, leaf or not; torch warns of that, and of nothing that a user did.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)]


@pytest.fixture
def device():
    torch._dynamo.reset()
    counters.clear()
    with offloading() as device:
        yield device
    torch._dynamo.reset()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp()


class Watching(graphoffload.saved_tensors):
    """A context that records the types it is shown."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shown = []

    def pack(self, tensor, *, tag=None):
        self.shown.append(type(tensor))
        return super().pack(tensor, tag=tag)


def step(run, model, context, *, seed=0, inside=False):
    model.zero_grad()
    x = rows(seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        loss = run(x).sum()
        if not inside:
            stack.close()
        loss.backward()
    return {**gradients(model), "gradient of x": x.grad}


def graphs():
    """Count the graphs that Dynamo has made."""
    return counters["stats"]["unique_graphs"]


def breaks():
    return sum(counters["graph_break"].values())


# --- a compiled model, or compiled layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model(model, device, backend, inside):
    """Rank 15: one graph, no break, no new compilation in later steps, gradients of the compiled model without us."""
    plain = fresh(model)
    bare = torch.compile(plain, backend=backend, fullgraph=True)
    wants = [step(bare, plain, contextlib.nullcontext(), seed=seed) for seed in range(4)]
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(model, backend=backend, fullgraph=True)
    context = Watching(EVERYTHING, model=model)
    for seed in range(4):
        assert_same_bits(step(run, model, context, seed=seed, inside=inside), wants[seed])
        assert (graphs(), breaks()) == (1, 0)
    assert FakeTensor not in context.shown
    assert not any("fake" in why for why in context.stats().kept_nbytes_by_reason)
    assert context.stats().moved
    assert_saves_plainly()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_entered_and_left(model, device, backend):
    """With and without the context, with another one, and with backward on either side: the same compiled code."""
    run = torch.compile(model, backend=backend, fullgraph=True)
    want = step(run, model, contextlib.nullcontext())
    made = graphs()
    for context in (saving(model), contextlib.nullcontext(), saving(model, graphoffload.policies.KeepAll())):
        for inside in (False, True):
            assert_same_bits(step(run, model, context, inside=inside), want)
    assert graphs() == made == 1
    assert breaks() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers(model, device, backend):
    """Each layer compiled, eager code between: parameters never move, whatever way compiled code saves them."""
    moves = Moves.of(device)
    plain = fresh(model)
    for twin in (model, plain):
        for index, layer in enumerate(twin.layers):
            twin.layers[index] = torch.compile(nn.Sequential(layer, nn.Tanh()), backend=backend, fullgraph=True)
    context = saving(model)
    for seed in range(4):
        want = step(plain, plain, contextlib.nullcontext(), seed=seed)
        assert_same_bits(step(model, model, context, seed=seed), want)
    assert breaks() == 0
    assert context.stats().kept_nbytes_by_reason[OWNED] > 0
    assert moves.of_memory(*model.parameters()) == 0
    assert context.stats().moved_nbytes > context.stats().compiled_nbytes  # what is saved between layers


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)])
def test_bytes_of_compiled_regions_are_reported(model, device, backend):
    """All that a region saves comes back at once, so no peak falls inside it: it is counted, and a note says what does help."""
    context = saving(model)
    assert context.stats().compiled_nbytes == 0
    assert context.stats().notes == ()
    step(torch.compile(model, backend=backend), model, context)
    stats = context.stats()
    # At least two values a layer; Inductor computes the third again.
    assert 3 * 2 * 4 * 16 * 4 <= stats.compiled_nbytes == stats.moved_nbytes
    (note,) = stats.notes
    assert 'backend="graphoffload"' in note
    assert note in str(stats)


def test_eager_code_is_no_compiled_region(model, device):
    """Nor is code that Dynamo captured and runs as it is."""
    context = saving(model)
    step(model, model, context)
    step(torch.compile(model, backend="eager"), model, context)
    assert context.stats().compiled_nbytes == 0
    assert context.stats().notes == ()


def test_compiled_regions_alone_are_worth_no_warning_of_nothing(model, device):
    """What is said about a policy that moves nothing holds for compiled regions too."""
    run = torch.compile(model, backend="aot_eager")
    with pytest.warns(graphoffload.GraphOffloadWarning, match="nothing was moved"):
        step(run, model, saving(model, graphoffload.policies.OffloadAll()))


def test_evaluation_of_a_compiled_model(model, device):
    """Nothing is saved, nothing is said."""
    run = torch.compile(model, backend="aot_eager")
    context = saving(model)
    with context, torch.no_grad():
        run(rows(0))
    assert context.stats().packed == 0
    want = step(run, model, contextlib.nullcontext())
    assert_same_bits(step(run, model, context), want)


def test_sizes_that_vary_in_a_compiled_model(model, device):
    """Rank 25: sizes are numbers and are saved beside the tensors; no compilation more than without us."""
    run = torch.compile(model, backend="aot_eager", dynamic=True)
    counts = []
    for context in (contextlib.nullcontext(), saving(model)):
        torch._dynamo.reset()
        counters.clear()
        results = []
        for count in (3, 5, 7, 4, 1, 6):
            model.zero_grad()
            x = rows(0, count=count)
            with context:
                loss = run(x).sum()
            loss.backward()
            results.append({**gradients(model), "gradient of x": x.grad})
        counts.append((graphs(), results))
    (bare_graphs, wants), (our_graphs, haves) = counts
    assert our_graphs == bare_graphs
    for have, want in zip(haves, wants, strict=True):
        assert_same_bits(have, want)


@torch._functorch.config.patch(donated_buffer=False)
def test_a_compiled_backward_that_is_walked_twice(model, device):
    """A retained graph, as torch allows it where no buffers are donated, beside one whose backward never comes."""
    run = torch.compile(model, backend="aot_eager")
    context = saving(model)
    once = step(run, model, contextlib.nullcontext())
    for _ in range(3):
        model.zero_grad()
        with context:
            dropped = run(rows(1)).sum()
            loss = run(rows(0)).sum()
        del dropped
        loss.backward(retain_graph=True)
        assert_same_bits(gradients(model), {name: one for name, one in once.items() if name != "gradient of x"})
        loss.backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, 2 * once[f"gradient of {name}"])
        del loss


# --- both paths at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)])
def test_a_region_compiled_with_graphoffload(device, compiler):
    """Its slots are on the host already and stay there; the eager context moves what is saved around it."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.inside, self.after = Mlp(depth=2), Mlp(depth=2), Mlp(depth=2)

        def forward(self, x):
            return self.after(self.inside(self.before(x).cos()).cos())

    torch.manual_seed(0)
    model = Both()
    plain = fresh(model)
    if compiler == "inductor":
        plain.inside = torch.compile(plain.inside, backend="inductor")
    names = [name for name, _ in model.named_parameters()]
    compile_ = Compiler(EVERYTHING, compiler=compiler)
    model.inside = compile_(model.inside)
    context = saving(model)
    offloads = []
    for seed in range(4):
        want = [step(plain, plain, contextlib.nullcontext(), seed=seed)["gradient of x"]]
        want += [parameter.grad for parameter in plain.parameters()]
        have = [step(model, model, context, seed=seed)["gradient of x"]]
        have += [parameter.grad for parameter in model.parameters()]
        for name, mine, other in zip(["x", *names], have, want, strict=True):
            if compiler == "inductor":
                torch.testing.assert_close(mine, other, msg=name)
            else:
                assert torch.equal(mine, other), name
        offloads.append(device.stats().offloads)
    assert compile_.moved
    stats = context.stats()
    assert offloads[-1] == stats.moved + 4 * compile_.moved
    assert any("slot" in why for why in stats.kept_nbytes_by_reason)
    assert stats.compiled_nbytes < stats.moved_nbytes


# --- our contexts inside compiled functions --------------------------------------------------------------------------------


def test_the_context_inside_a_compiled_function(model, device):
    """Probe Q2: hooks in a trace are not for Dynamo. A whole graph is refused, in words; otherwise there is a break there."""
    context = saving(model)

    def run(x):
        x = x.sin()
        with context:
            x = model(x)
        return x.exp()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(run, backend="aot_eager", fullgraph=True)(rows(0))
    assert_saves_plainly()
    torch._dynamo.reset()
    counters.clear()
    plain = fresh(model)

    def plainly(x):
        return plain(x.sin()).exp()

    broken = torch.compile(run, backend="aot_eager")
    for seed in range(3):
        want = step(plainly, plain, contextlib.nullcontext(), seed=seed)
        assert_same_bits(step(broken, model, contextlib.nullcontext(), seed=seed), want)
    assert breaks() > 0
    assert context.stats().moved
    assert_saves_plainly()


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in a context"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_keep_inside_a_compiled_function(model, device, backend, around):
    """It does no harm: the same graph as without it."""

    def run(x):
        x = model.layers[0](x).sin()
        with graphoffload.keep():
            x = model.layers[1](x).sin()
        return model.layers[2](x).exp()

    def bare(x):
        x = model.layers[0](x).sin()
        x = model.layers[1](x).sin()
        return model.layers[2](x).exp()

    want = step(torch.compile(bare, backend=backend), model, contextlib.nullcontext())
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    context = saving(model) if around else contextlib.nullcontext()
    for _ in range(3):
        assert_same_bits(step(compiled, model, context), want)
    assert (graphs(), breaks()) == (1, 0)
    assert_saves_plainly()


def test_keep_around_a_compiled_region(model, device):
    """The region is left out: nothing of it is shown, and there is no note about it."""
    compiled = torch.compile(model.layers[1], backend="aot_eager")
    context = saving(model)

    def run(x):
        x = model.layers[0](x).sin()
        with graphoffload.keep():
            x = compiled(x)
        assert active() in (None, context)
        return model.layers[2](x.sin()).exp()

    want = step(run, model, contextlib.nullcontext())
    for _ in range(3):
        assert_same_bits(step(run, model, context), want)
    assert context.stats().compiled_nbytes == 0
    assert context.stats().notes == ()


# --- regions that are run again --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_layer_in_a_checkpoint(model, device, backend, use_reentrant, inside):
    """Probe Q3: the region's input moves, and compiled code runs again in backward."""
    compiled = [torch.compile(layer, backend=backend, fullgraph=True) for layer in model.layers]

    def run(x):
        x = x * 1
        for layer in compiled:
            x = x + checkpoint(layer, x, use_reentrant=use_reentrant).sin()
        return x.exp()

    want = step(run, model, contextlib.nullcontext())
    context = Watching(EVERYTHING, model=model)
    for _ in range(3):
        assert_same_bits(step(run, model, context, inside=inside), want)
    assert breaks() == 0
    assert FakeTensor not in context.shown
    assert context.stats().moved >= 3 * 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)])
def test_a_checkpoint_in_a_compiled_model(model, device, backend):
    """Probe Q3b: the compiler makes the region; the context sees what the graph saves."""

    def run(x):
        for layer in model.layers:
            x = x + checkpoint(layer, x.sin(), use_reentrant=False).cos()
        return x.exp()

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    want = step(compiled, model, contextlib.nullcontext())
    context = saving(model)
    for _ in range(3):
        assert_same_bits(step(compiled, model, context), want)
    assert (graphs(), breaks()) == (1, 0)
    assert context.stats().compiled_nbytes > 0
