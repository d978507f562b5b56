"""Scenarios about kinds of tensors in eager code: each is moved rightly or kept with a reason, and never comes back wrong."""

from __future__ import annotations

import contextlib

import pytest
import torch
from eager_steps import EVERYTHING, Recorded, reasons, same_as_plain, seen_in_backward
from tensor_kinds import (
    KEPT,
    PLAIN,
    Tagged,
    bits,
    distributed,
    jagged,
    jagged_with_holes,
    looks,
    mesh_of_one,
    numbers,
    scaled,
    sparse_rows,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import graphoffload
from graphoffload.testing import virtual_device

NOT_KNOWN = "that graphoffload does not know"
OWNED = "it is the memory of a parameter or buffer"


@pytest.fixture(scope="module")
def mesh():
    with mesh_of_one() as mesh:
        yield mesh


def is_old_value_or_refused(total: torch.Tensor, leaf: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether backward used what was saved, or raised as autograd does, and did not use what was written over it."""
    try:
        (gradient,) = torch.autograd.grad(total, leaf)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return True
    return torch.equal(gradient, expected)


class TestLayouts:
    @pytest.mark.parametrize("name", [name for name in PLAIN if name != "parameter"])
    def test_what_comes_back_looks_as_it_was_saved(self, name):
        plain, steps, stats = seen_in_backward(PLAIN[name], looks)
        assert steps == [plain] * 3
        tensor = PLAIN[name]()
        nbytes = tensor.untyped_storage().nbytes() if tensor.numel() else 0
        assert stats.moved_nbytes == 3 * (nbytes + 32)
        assert stats.reloads >= (2 if nbytes else 1)
        assert reasons(stats) == (set() if nbytes else {"it has no bytes"})

    @pytest.mark.parametrize("name", ["contiguous", "sliced", "channels last", "conjugate", "float8 e4m3", "scalar"])
    @pytest.mark.parametrize("history", ["leaf", "view", "result"])
    def test_what_asks_for_a_gradient_comes_back_alike(self, name, history):
        def make():
            leaf = PLAIN[name]().requires_grad_()
            return {"leaf": lambda: leaf, "view": lambda: leaf.view_as(leaf), "result": leaf.clone}[history]()

        plain, steps, stats = seen_in_backward(make, looks)
        assert plain["requires_grad"]
        assert steps == [plain] * 3
        assert stats.moved_nbytes >= 3 * make().untyped_storage().nbytes()

    def test_a_small_part_of_a_large_storage_moves_alone_and_stays_aligned(self):
        def look(tensor):
            seen = looks(tensor)
            # A part begins elsewhere in its storage, but not elsewhere as far as a kernel's choice of alignment goes.
            return seen | {"offset": seen["offset"] * tensor.element_size() % 512}

        plain, steps, stats = seen_in_backward(lambda: numbers(100, 100)[41:45, 7:], look)
        assert steps == [plain] * 3
        assert stats.moved_nbytes < 3 * 3000

    def test_views_of_one_storage_come_back_as_views_of_one_storage_of_their_own_shapes(self):
        seen = []

        def forward(x, tensor):
            views = (tensor, tensor.t(), tensor[1:3], tensor.flatten()[5], tensor[:0])
            return Recorded.apply(x.sin(), lambda saved: seen.append(looks(saved)), *views).sum()

        stats = same_as_plain(lambda: (numbers(8).requires_grad_(), numbers(4, 6)), forward)
        assert seen[5:] == seen[:5] * 3
        assert stats.moved == 3 * 2
        assert stats.moved_nbytes == 3 * (96 + 32)


class TestTypes:
    def test_complex_numbers_with_lazy_bits(self):
        def make():
            return numbers(6, 6, dtype=torch.complex64).requires_grad_(), numbers(6, 6, dtype=torch.complex64, seed=1)

        def forward(x, y):
            mixed = (x.conj() @ y.mT) * x.mH.imag + (y.conj().imag * x).conj()
            return (mixed.abs() + mixed.imag.exp() * mixed.conj().real).sum()

        stats = same_as_plain(make, forward)
        assert stats.moved > 0
        assert stats.kept_nbytes == 0

    def test_masks_and_indices(self):
        def make():
            return numbers(12, 8).requires_grad_(), torch.arange(6) * 2

        def forward(table, rows):
            x = functional.embedding(rows, table)
            x = functional.dropout(torch.where(x > 0, x, x * x), 0.3)
            x = x.masked_fill(x > 1, 0.5).relu() + x.cummax(0).values + x[:, rows % 8].sum(1, keepdim=True)
            return functional.cross_entropy(x, rows % 8) + x.max(1).values.sum()

        stats = same_as_plain(make, forward)
        assert stats.moved > 0
        assert stats.kept_nbytes == 0

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
    def test_activations_saved_as_float8(self, dtype):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x.to(dtype), x.abs().amax())
                return x * x

            @staticmethod
            def backward(ctx, gradient):
                small, most = ctx.saved_tensors
                assert small.dtype is dtype
                return 2 * gradient * small.to(torch.float32) * (most / most)

        stats = same_as_plain(lambda: (numbers(8, 8).requires_grad_(),), lambda x: Square.apply(x.cos()).sum())
        assert stats.moved_nbytes == 3 * (256 + 64 + 4)


class TestDistributed:
    @pytest.mark.parametrize("known", [True, False], ids=["with the model", "without the model"])
    def test_a_tensor_parallel_network(self, mesh, known):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh())
        parallelize_module(network, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
        leaves = list(network.parameters())
        assert all(isinstance(leaf, DTensor) for leaf in leaves)

        def make():
            network.zero_grad()
            return [numbers(4, 8).requires_grad_(), *leaves]

        stats = same_as_plain(make, lambda x, *_: network(x).square().sum(), model=network if known else None)
        assert OWNED in reasons(stats)
        rows = 4
        # The input, both sides of GELU, and what tanh gives: no weight.
        assert stats.moved_nbytes == 3 * 4 * rows * (8 + 16 + 16 + 8)

    @pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
    def test_elementwise_operators(self, mesh, placement):
        def make():
            return [DTensor.from_local(numbers(6, 4).t(), mesh, [placement]).requires_grad_()]

        def forward(x):
            y = x.sin() * x.exp()
            return (y.t() @ y).relu().to_local().sum()

        stats = same_as_plain(make, forward)
        assert stats.moved > 0
        assert stats.kept_nbytes == 0

    def test_what_comes_back_is_the_same_in_all_that_can_be_seen(self, mesh):
        def look(tensor):
            return (
                type(tensor),
                tensor._spec,
                tensor.size(),
                tensor.stride(),
                tensor.requires_grad,
                looks(tensor._local_tensor),
            )

        def make():
            return distributed(mesh, PLAIN["padded at an offset"]())

        plain, steps, stats = seen_in_backward(make, look)
        assert steps == [plain] * 3
        assert stats.moved_nbytes == 3 * (make()._local_tensor.untyped_storage().nbytes() + 32)

    def test_nothing_is_communicated(self, mesh):
        with virtual_device():
            context = graphoffload.saved_tensors(EVERYTHING, model=nn.Identity())
            x = distributed(mesh).requires_grad_()
            with CommDebugMode() as communication:
                with context:
                    total = x.sin().exp().to_local().sum()
                total.backward()
            assert communication.get_total_counts() == 0
            assert context.stats().moved == 2

    def test_operators_on_local_and_distributed_tensors_share_what_moves(self, mesh):
        def forward(x):
            y = DTensor.from_local(x * 1, mesh, [Shard(0)])
            return (y.sin() + y.cos()).to_local().sum()

        stats = same_as_plain(lambda: (numbers(4, 6).requires_grad_(),), forward)
        assert stats.moved == 3

    def test_a_change_in_place_between_two_saves_makes_two_values(self, mesh):
        def forward(x):
            y = DTensor.from_local(x * 1, mesh, [Shard(0)])
            first = y.sin()
            with torch.no_grad():
                y.add_(1)
            return (first + y.cos()).to_local().sum()

        leaf = numbers(4, 6).requires_grad_()
        expected = leaf.detach().cos() - (leaf.detach() + 1).sin()
        with virtual_device():
            context = graphoffload.saved_tensors(EVERYTHING, model=nn.Identity())
            for _ in range(3):
                with context:
                    total = forward(leaf)
                assert is_old_value_or_refused(total, leaf, expected)

    def test_a_change_through_the_local_tensor_is_seen_too(self, mesh):
        leaf = numbers(4, 6).requires_grad_()
        with virtual_device():
            context = graphoffload.saved_tensors(EVERYTHING, model=nn.Identity())
            for _ in range(3):
                with context:
                    local = leaf * 1
                    total = DTensor.from_local(local, mesh, [Shard(0)]).sin().to_local().sum()
                    with torch.no_grad():
                        local.add_(1)
                assert is_old_value_or_refused(total, leaf, leaf.detach().cos())


class TestJagged:
    def test_linear_and_gelu(self):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        leaves = list(network.parameters())

        def make():
            network.zero_grad()
            return [jagged(requires_grad=True), *leaves]

        stats = same_as_plain(make, lambda x, *_: network(x).values().square().sum(), model=network)
        assert reasons(stats) == {OWNED}
        rows = 8  # of 3 + 1 + 4
        assert stats.moved_nbytes == 3 * 4 * rows * (8 + 16 + 16 + 8)

    @pytest.mark.parametrize(
        "make", [jagged, lambda: jagged().transpose(1, 2), jagged_with_holes], ids=["rows", "transposed", "with holes"]
    )
    def test_what_comes_back_is_the_same_in_all_that_can_be_seen(self, make):
        tensor = make()

        def look(saved):
            # Equal sizes are what lets two ragged tensors into one operator.
            return type(saved), saved.size() == tensor.size(), saved.stride() == tensor.stride(), looks(saved._values)

        plain, steps, stats = seen_in_backward(lambda: tensor, look)
        assert plain[1]
        assert plain[2]
        assert steps == [plain] * 3
        assert stats.moved_nbytes == 3 * (tensor._values.untyped_storage().nbytes() + 32)


class TestKept:
    @pytest.mark.parametrize("name", [name for name in KEPT if name != "nested"])
    def test_a_kind_that_stays_comes_back_as_it_is_and_says_why(self, name):
        make, reason = KEPT[name]

        def look(saved):
            return type(saved), saved.layout, saved.dtype, saved.size(), b"" if saved.is_meta else _shown(saved)

        plain, steps, stats = seen_in_backward(make, look)
        assert steps == [plain] * 3
        assert reason in reasons(stats)
        assert stats.moved_nbytes == 3 * 32

    def test_a_subclass_in_python_keeps_its_attributes(self):
        def make():
            tensor = numbers(4, 6).as_subclass(Tagged)
            tensor.label = "left"
            return tensor

        plain, steps, _ = seen_in_backward(
            make, lambda saved: (type(saved), saved.label, bits(saved.as_subclass(torch.Tensor)))
        )
        assert steps == [plain] * 3

    @pytest.mark.parametrize("make_sparse", [KEPT["sparse"][0], sparse_rows], ids=["coordinates", "rows"])
    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
    def test_sparse_operands(self, make_sparse):
        def forward(sparse, dense):
            return torch.sparse.mm(sparse, dense.sin()).square().sum()

        stats = same_as_plain(lambda: (make_sparse(), numbers(8, 8, seed=3).requires_grad_()), forward)
        assert stats.moved > 0
        assert any(reason.startswith("its layout is sparse") for reason in reasons(stats))

    def test_sparse_gradients(self):
        stats = same_as_plain(
            lambda: (torch.relu(numbers(8, 8)).to_sparse().requires_grad_(), numbers(8, 8, seed=3).requires_grad_()),
            lambda sparse, dense: torch.sparse.mm(sparse, dense.exp()).square().sum(),
        )
        assert stats.moved > 0

    def test_a_wrapper_of_quantised_numbers(self):
        stats = same_as_plain(
            lambda: (numbers(4, 8).requires_grad_(), scaled()),
            lambda x, weight: functional.gelu(x.sin() @ weight).sum(),
        )
        assert f"it is a tensor subclass (Scaled) {NOT_KNOWN}" in reasons(stats)
        assert stats.moved > 0

    def test_several_kinds_in_one_program_each_have_a_reason(self):
        kinds = {name: kind for name, kind in KEPT.items() if name != "nested"}
        saved = [make() for make, _ in kinds.values()]
        stats = same_as_plain(
            lambda: (numbers(8).requires_grad_(),), lambda x: Recorded.apply(x.sin(), lambda tensor: None, *saved).sum()
        )
        assert reasons(stats) == {reason for _, reason in kinds.values()}

    def test_the_older_layout_of_nested_tensors(self):
        # A custom autograd.Function cannot take these.
        def forward(weight):
            parts = functional.linear(KEPT["nested"][0](), weight.sin()).unbind()
            return sum(part.square().sum() for part in parts)

        stats = same_as_plain(lambda: (numbers(5, 3).requires_grad_(),), forward)
        assert stats.moved > 0
        assert "it is a nested tensor" in reasons(stats)

    @pytest.mark.parametrize("name", ["sparse", "subclass"])
    def test_a_change_in_place_of_what_stays_raises_as_in_the_plain_run(self, name):
        x, tensor = numbers(8).requires_grad_(), KEPT[name][0]()

        def step(context):
            with context:
                total = Recorded.apply(x.sin(), lambda saved: None, tensor).sum()
            with torch.no_grad():
                tensor.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()

        step(contextlib.nullcontext())
        with virtual_device():
            step(graphoffload.saved_tensors(EVERYTHING, model=nn.Identity()))


class TestTransforms:
    def test_vmap_under_the_hooks(self):
        def forward(x, y):
            return torch.func.vmap(lambda row, other: (row.sin() * other).exp())(x, y).sum()

        stats = same_as_plain(lambda: (numbers(4, 6).requires_grad_(), numbers(4, 6, seed=1)), forward)
        assert stats.moved > 0

    def test_a_program_on_fake_tensors(self):
        with virtual_device(), FakeTensorMode():
            context = graphoffload.saved_tensors(EVERYTHING, model=nn.Identity())
            x = torch.empty(4, 6, requires_grad=True)
            with pytest.warns(graphoffload.errors.GraphOffloadWarning, match="it is a fake tensor"), context:
                total = x.sin().exp().sum()
            total.backward()
            assert x.grad is not None
            assert x.grad.size() == (4, 6)
            assert reasons(context.stats()) == {"it is a fake tensor, which has no memory"}


def _shown(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor of a kind that stays."""
    if tensor.is_quantized:
        return bits(tensor.int_repr())
    if type(tensor) is not torch.Tensor:
        return bits(tensor.plain() if hasattr(tensor, "plain") else tensor.as_subclass(torch.Tensor))
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return bits(tensor + 0)
