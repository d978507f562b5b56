"""The behaviours that the offloading tests of torchtune and TRL look at, as scenarios of ours.

Outputs of nodes that are views of what came back, tied heads, adapters, tensors of other devices among those that move,
parameters, strides down to broadcast ones, the least size, and a part that is left out. Caches are in test_eager_caches.py.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from eager_training import (
    EVERYTHING,
    OWNED,
    Moves,
    assert_next_step_is_right,
    assert_saves_plainly,
    gradients,
    offloading,
    rows,
    same_as_plain,
    saving,
)
from subjects import BY_NAME, SUBJECTS, Mlp
from torch import nn
from training import assert_same_bits, fresh

import graphoffload
from graphoffload.errors import GraphOffloadWarning
from graphoffload.planning.policy import OffloadAll


@pytest.fixture
def device():
    with offloading() as device:
        yield device


def train(model, context, x=None, *, inside=False):
    x = rows(0) if x is None else x
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        loss = model(x).sum()
        if not inside:
            stack.close()
        loss.backward()
    return loss, x.grad if x.requires_grad else None


# --- the same as without ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_models_of_the_usual_kinds(device, subject, inside):
    """Losses and gradients, step by step, with dropout, convolutions, attention, and checkpointed layers."""

    def step(model, context):
        inputs = subject.inputs()
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            outputs = model(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            loss = torch.stack([output.double().sum() for output in outputs]).sum()
            if not inside:
                stack.close()
            loss.backward()
        return loss, [x.grad for x in inputs if x.requires_grad]

    assert same_as_plain(subject.module(), step).moved


def test_a_model_of_transformers_with_adapters(device):
    """A frozen language model with a low-rank adapter on every projection; dropout draws the same numbers."""
    transformers = pytest.importorskip("transformers")

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training)))

    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    model.train()
    ids = torch.randint(64, (2, 10))
    moves = Moves.of(device)
    plain, context = fresh(model), saving(model)
    for number in range(3):
        losses = []
        for twin, around in ((model, context), (plain, contextlib.nullcontext())):
            twin.zero_grad()
            torch.manual_seed(number)
            with around:
                loss = twin(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert_same_bits(gradients(model), gradients(plain))
    assert context.stats().moved
    assert moves.of_memory(*model.parameters(), *model.buffers()) == 0


# --- views that leave a node -----------------------------------------------------------------------------------------------


class GivesAView(torch.autograd.Function):
    """Its gradient is a view of what it saved, whatever comes in."""

    @staticmethod
    def forward(ctx, x):
        turned = x.t()
        ctx.save_for_backward(turned)
        return x.new_ones(2, 3)

    @staticmethod
    def backward(ctx, gradient):
        (turned,) = ctx.saved_tensors
        return turned.t()


class PassesOn(torch.autograd.Function):
    """Asks for a value of its own, and passes the gradient on as it is."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 5)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors
        return gradient


class Inspects(torch.autograd.Function):
    """Note the gradient, after a value of other contents came back."""

    seen: list[torch.Tensor] = []  # noqa: RUF012 - emptied by the test

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.full_like(x, 7))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        (other,) = ctx.saved_tensors
        Inspects.seen.append(gradient.clone())
        return gradient + 0 * other


@pytest.mark.parametrize("between", [0, 1, 4])
def test_a_view_of_what_came_back_outlives_its_node(device, between):
    """The memory is in use as long as a view of it travels down the graph, however many values come back meanwhile."""
    context = saving()
    Inspects.seen.clear()
    for _ in range(4):
        x = rows(0)
        with context:
            h = Inspects.apply(x)
            for _ in range(between):
                h = PassesOn.apply(h)
            loss = GivesAView.apply(h).sum()
        del h
        loss.backward()
        assert torch.equal(x.grad, x)
        assert torch.equal(Inspects.seen.pop(), x)
    assert context.stats().reloads


def test_a_gradient_that_is_kept_over_steps(device):
    """A leaf's gradient that is a view of reloaded memory, accumulated into in the next step, is the user's own."""
    x, context, want = rows(0), saving(), torch.zeros(4, 16)
    for step in range(4):
        with context:
            loss = GivesAView.apply(x * 1).sum()
        loss.backward()
        want += x.detach()
        assert torch.equal(x.grad, want), step


# --- heads -----------------------------------------------------------------------------------------------------------------


class Headed(nn.Module):
    """An embedding that is also the head, through a module of its own or by a function, at once or in chunks."""

    def __init__(self, how):
        super().__init__()
        self.embed, self.body = nn.Embedding(12, 16), Mlp(depth=1)
        self.how = how
        if how == "module":
            self.head = nn.Linear(16, 12, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.body(self.embed(ids)).flatten(0, 1)
        labels = ids.roll(-1, 1).flatten()
        if self.how == "chunks":
            parts = zip(h.chunk(3), labels.chunk(3), strict=True)
            losses = [F.cross_entropy(F.linear(part, self.embed.weight), some) for part, some in parts]
            return torch.stack(losses).sum()
        logits = self.head(h) if self.how == "module" else F.linear(h, self.embed.weight)
        return F.cross_entropy(logits, labels)


@pytest.mark.parametrize("left_out", [False, True], ids=["offloaded", "kept"])
@pytest.mark.parametrize("how", ["module", "function", "chunks"])
def test_tied_heads(device, how, left_out):
    """The one weight never moves, its gradient has both parts, and the head can be left out."""
    torch.manual_seed(0)
    model, ids = Headed(how), torch.randint(12, (2, 6))
    if left_out:
        head = F.cross_entropy

        def kept(*args, **kwargs):
            with graphoffload.keep():
                return head(*args, **kwargs)

        F.cross_entropy = kept
    try:
        moves = Moves.of(device)
        plain, context = fresh(model), saving(model)
        for _ in range(3):
            model.zero_grad()
            plain.zero_grad()
            (have, _), (want, _) = train(model, context, ids), train(plain, contextlib.nullcontext(), ids)
            assert torch.equal(have, want)
            assert_same_bits(gradients(model), gradients(plain))
    finally:
        if left_out:
            F.cross_entropy = head
    assert context.stats().moved
    assert context.stats().kept_nbytes_by_reason[OWNED] >= model.embed.weight.nbytes
    assert moves.of_memory(model.embed.weight) == 0


# --- tensors of other devices ----------------------------------------------------------------------------------------------


def test_tensors_of_another_device_among_those_that_move(device):
    """Each is kept or moved by where it is; one program may have both."""
    x, elsewhere = rows(0), torch.randn(4, 16, device="meta", requires_grad=True)
    context = saving()
    for _ in range(3):
        x.grad = elsewhere.grad = None
        with context:
            here = (x * 2).sin()
            there = (elsewhere * 2).sin()
            here = here.exp()
            there = there.exp()
        here.sum().backward()
        there.sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])
        assert elsewhere.grad.device.type == "meta"
        assert elsewhere.grad.shape == (4, 16)
    stats = context.stats()
    assert stats.moved == 2 * 3
    (why,) = stats.kept_nbytes_by_reason
    assert "meta" in why


def test_without_a_device():
    """On a machine that has none, a program runs as it is, and is told so once."""
    torch.manual_seed(0)
    model = Mlp()
    with pytest.warns(GraphOffloadWarning, match="already in host memory"):
        stats = same_as_plain(model, train)
    assert (stats.moved, stats.host_peak_nbytes) == (0, 0)
    assert_saves_plainly()


# --- strides, sizes, and what counts ---------------------------------------------------------------------------------------


STRIDES = {
    "contiguous": lambda t: t * 1,
    "transposed": lambda t: (t * 1).transpose(0, 2),
    "permuted": lambda t: (t * 1).permute(1, 2, 0),
    "channels last": lambda t: (t * 1)[None].contiguous(memory_format=torch.channels_last),
    "every other": lambda t: (t * 1)[:, ::2, ::3],
    "padded": lambda t: F.pad(t, (0, 3, 0, 1))[:, :-1, :-3],
    "broadcast over rows": lambda t: (t * 1)[:, :1].expand(-1, 5, -1),
    "broadcast over all": lambda t: (t * 1).sum().expand(3, 4),
    "broadcast inside": lambda t: (t * 1)[:, :, None].expand(-1, -1, 2, -1),
    "overlapping": lambda t: (t * 1).flatten().unfold(0, 4, 2),
    "diagonal": lambda t: (t * 1)[0].diagonal(),
    "one number": lambda t: (t * 1)[0, 0, 0],
    "one row": lambda t: (t * 1)[1, 2],
    "no element": lambda t: (t * 1)[:, :0],
    "dimensions of one": lambda t: (t * 1)[:1, :, :1],
}


class Looks(torch.autograd.Function):
    """Save a tensor, and note how it looks when it comes back."""

    seen: list[object] = []  # noqa: RUF012 - emptied by the test

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        Looks.seen.append((tuple(x.shape), x.stride(), x.dtype, x.device, x.is_contiguous(), x.tolist()))
        return gradient * x


@pytest.mark.filterwarnings("ignore:graphoffload. OffloadAll asked .*it has no bytes")
@pytest.mark.parametrize("name", STRIDES)
def test_strides_are_what_they_were(device, name):
    """Sizes and strides of every layout, a broadcast one as broadcast: its bytes are what is behind it, not what it shows."""
    Looks.seen.clear()

    def step(model, context):
        x = torch.randn(3, 4, 6, requires_grad=True)
        with context:
            shown = STRIDES[name](x)
            y = Looks.apply(shown)
        y.sum().backward()
        return x.grad

    stats = same_as_plain(nn.Module(), step)
    looks = Looks.seen
    assert len(looks) == 6
    assert looks[0::2] == looks[1::2]  # plain, ours; step by step
    if name != "no element":
        assert stats.moved == 3
        assert stats.moved_nbytes <= 3 * 3 * 5 * 9 * 4  # no more than the padded one has


def test_the_least_size(device):
    """Small values stay, large ones move, in one model: by the bytes of the storage."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 500), nn.Tanh(), nn.Linear(500, 5))
    context = saving(model, OffloadAll(min_nbytes=1000))
    plain = fresh(model)
    for _ in range(3):
        x, y = rows(0, count=2, width=5), rows(0, count=2, width=5)
        model.zero_grad()
        plain.zero_grad()
        have, want = train(model, context, x), train(plain, contextlib.nullcontext(), y)
        assert all(torch.equal(mine, other) for mine, other in zip(have, want, strict=True))
        assert_same_bits(gradients(model), gradients(plain))
    stats = context.stats()
    assert stats.moved == 3  # the wide tanh's output, which the last layer saves too
    assert stats.moved_nbytes == 3 * 2 * 500 * 4
    assert (
        sum(nbytes for why, nbytes in stats.kept_nbytes_by_reason.items() if "smaller than" in why) == 3 * 2 * 2 * 5 * 4
    )


def test_two_views_of_one_output_are_one_storage(device):
    """Shared storages are told: fewer moves than tensors that were shown, each byte once."""
    torch.manual_seed(0)

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            out = self.linear(x)
            return out.view(-1).square().sum() + out.transpose(0, 1).exp().sum() + out[1:].sin().sum()

    def step(model, context):
        x = rows(0)
        with context:
            loss = model(x)
        loss.backward()
        return x.grad

    stats = same_as_plain(Viewed(), step)
    assert stats.moved == 3 * 3  # the input, the output, and what exp returned
    assert stats.packed > 3 * 3 + 3


def test_a_part_that_is_left_out_gives_the_same(device):
    """Offloaded, then left out inside the same block, then offloaded: three times the same gradients."""
    subject = BY_NAME["decoder"]
    model = subject.module()
    context = saving(model)
    found = []
    with context:
        for left_out in (False, True, False):
            model.zero_grad()
            packed = context.stats().packed
            with graphoffload.keep() if left_out else contextlib.nullcontext():
                model(*subject.inputs()).backward()
            assert (context.stats().packed == packed) == left_out
            found.append(gradients(model))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_a_step_after_one_that_ended_badly(device):
    """What is left of a forward without backward does not trip the next step, nor does it need clearing by hand."""
    torch.manual_seed(0)
    model = Mlp()
    context = graphoffload.saved_tensors(EVERYTHING, model=model)
    for _ in range(2):
        with context:
            model(rows(1)).sum()
        assert_next_step_is_right(context, model, device)
