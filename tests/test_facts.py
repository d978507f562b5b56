"""Facts of real pairs: what may move and why not, bytes once a storage, times through views, provenance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphoffload.planning.values import Facts, Storage
from tests.pairs import capture, facts_of

aten = torch.ops.aten


def on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def only(facts: Facts, name: str) -> Storage:
    """Return the one storage whose name begins with `name`."""
    found = [storage for storage in facts.storages if storage.name.startswith(name)]
    assert len(found) == 1, [storage.name for storage in facts.storages]
    return found[0]


def assert_consistent(facts: Facts) -> None:
    """Check what every set of facts promises: each value in one storage, members listed, times in order."""
    members = [name for storage in facts.storages for name in storage.members]
    assert sorted(members) == sorted(value.name for value in facts.values)
    assert len(set(members)) == len(members)
    begin = len(facts.forward)
    last = len(facts.steps) - 1
    for storage in facts.storages:
        assert all(facts.value_by_name[name].storage == storage.name for name in storage.members)
        assert -1 <= storage.birth <= storage.carried_at <= storage.last_forward_use < begin
        assert begin <= storage.first_backward_use <= storage.last_backward_use <= last
        assert not storage.held or storage.immovable
    assert [storage.birth for storage in facts.storages] == sorted(storage.birth for storage in facts.storages)
    for buffer in facts.buffers:
        assert -1 <= buffer.born <= buffer.dies <= last
        assert buffer.nbytes > 0


# --- Parameters and buffers, by storage -------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_a_weight_saved_as_its_transpose_is_the_memory_of_a_parameter(partition: Any) -> None:
    facts = facts_of(
        capture(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8), partition=partition)
    )
    assert_consistent(facts)
    weights = [storage for storage in facts.storages if storage.held and storage.nbytes == 256]
    assert weights
    assert all("parameter or buffer" in storage.immovable[0] for storage in weights)
    assert any(not storage.immovable for storage in facts.storages)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.embedding(tokens).tanh()), tokens)


def test_tied_weights_are_one_storage_that_may_not_move() -> None:
    facts = facts_of(capture(_Tied(), torch.randint(0, 16, (4,))))
    assert_consistent(facts)
    tied = [storage for storage in facts.storages if storage.nbytes == 16 * 8 * 4 and storage.birth == -1]
    assert len(tied) == 1
    assert tied[0].held
    assert "parameter or buffer" in tied[0].immovable[0]
    assert not any(buffer.name == tied[0].name for buffer in facts.buffers)


def test_batch_norm_buffers_written_after_forward_may_not_move() -> None:
    facts = facts_of(capture(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), torch.randn(4, 8)))
    assert_consistent(facts)
    reasons = [reason for storage in facts.storages for reason in storage.immovable]
    assert any("written back into an input" in reason for reason in reasons)
    written = next(storage for storage in facts.storages if "it is written back" in " ".join(storage.immovable))
    assert not written.held


def test_a_mutated_input_that_is_saved_may_not_move() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return (x @ w).sum()

    facts = facts_of(capture(f, torch.randn(4, 8), torch.randn(8, 3, requires_grad=True)))
    assert_consistent(facts)
    assert all(storage.immovable for storage in facts.storages)


def test_a_buffer_that_forward_writes_itself_is_written_in_place_and_its_source_may_move() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    pair = capture(model, torch.randn(4, 8), mutations_in_graph=True)
    copies = [node for node in pair.forward.graph.nodes if node.target is aten.copy_.default]
    assert copies
    facts = facts_of(pair)
    assert_consistent(facts)
    sources = {node.args[1].name for node in copies}
    moved = [storage for storage in facts.storages if storage.name in sources]
    assert moved
    forward = [step.name for step in facts.forward]
    assert all(storage.immovable == () for storage in moved)
    assert all(forward[storage.last_forward_use].startswith("copy_") for storage in moved)


# --- Views ------------------------------------------------------------------------------------------------------------


def test_base_and_view_both_saved_are_one_storage_counted_once() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        return (h.t() @ w).sum() + h.sin().sum()

    facts = facts_of(capture(f, torch.randn(4, 8, requires_grad=True), torch.randn(4, 3, requires_grad=True)))
    assert_consistent(facts)
    storage = only(facts, "exp")
    assert len(storage.members) >= 2
    assert storage.nbytes == 4 * 8 * 4
    assert storage.carrier == storage.name == "exp"
    assert storage.immovable == ()
    assert all(facts.value_by_name[name].storage_nbytes == storage.nbytes for name in storage.members)


def test_a_view_that_is_the_last_holder_stands_for_the_whole_storage() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        half = x.exp()[:2]
        return (half @ w).sum()

    facts = facts_of(capture(f, torch.randn(4, 8), torch.randn(8, 3, requires_grad=True)))
    assert_consistent(facts)
    storage = only(facts, "exp")
    (member,) = storage.members
    assert member != "exp"
    assert facts.value_by_name[member].nbytes == 2 * 8 * 4
    assert storage.nbytes == 4 * 8 * 4
    assert storage.carrier == "exp"


def test_a_view_laid_out_over_all_its_memory_carries_it_when_it_is_there_at_once() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.exp().view(-1, 4) @ w).sum()

    facts = facts_of(capture(f, torch.randn(4, 8), torch.randn(4, 3, requires_grad=True)))
    storage = only(facts, "exp")
    assert storage.members == (storage.carrier,)
    assert storage.carrier != "exp"
    assert storage.carried_at > storage.birth


def test_equal_views_with_nothing_computed_before_the_first_are_carried_by_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        return ((h.view(-1, 4) @ w.t()) * (h.view(-1, 4) @ v.t())).sum()

    weights = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    storage = only(facts_of(capture(f, torch.randn(4, 8), *weights)), "exp")
    assert len(storage.members) == 2
    assert storage.carrier == storage.members[0]


def test_a_late_view_leaves_the_root_as_carrier() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        other = (x @ x.t()).sum()
        return (h.view(-1, 4) @ w).sum() + other

    pair = capture(f, torch.randn(4, 8), torch.randn(4, 3, requires_grad=True))
    assert only(facts_of(pair), "exp").carrier == "exp"


def test_views_of_an_input_belong_to_the_caller() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.t() @ w).sum()

    facts = facts_of(capture(f, torch.randn(4, 8), torch.randn(4, 3, requires_grad=True)))
    assert_consistent(facts)
    (storage,) = facts.storages
    assert storage.held
    assert storage.birth == -1
    assert storage.immovable == ("it is the memory of a graph input, which the caller may still hold",)


@pytest.mark.parametrize("through_view", [False, True])
def test_a_saved_value_that_shares_memory_with_an_output_may_not_move(through_view: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        return h.view(-1)[1:] if through_view else h

    facts = facts_of(capture(f, torch.randn(4, 8, requires_grad=True)))
    assert_consistent(facts)
    storage = only(facts, "exp")
    assert storage.held
    assert any("shares memory with an output" in reason for reason in storage.immovable)


def test_an_expanded_value_counts_and_moves_the_memory_behind_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.exp().expand(3, 4, 8), w).sum()

    facts = facts_of(capture(f, torch.randn(4, 8), torch.randn(3, 8, 2, requires_grad=True)))
    assert_consistent(facts)
    storage = only(facts, "exp")
    assert storage.nbytes == 4 * 8 * 4
    assert storage.carrier == "exp"
    value = facts.value_by_name[storage.members[0]]
    assert value.nbytes == 4 * 8 * 4


def test_padded_strides_are_kept_in_facts() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.exp()[:, 1:7] @ w).sum()

    facts = facts_of(capture(f, torch.randn(4, 8), torch.randn(6, 3, requires_grad=True)))
    storage = only(facts, "exp")
    value = facts.value_by_name[storage.members[0]]
    assert (value.shape, value.stride, value.storage_offset) == ((4, 6), (8, 1), 1)
    assert storage.carrier == "exp"
    assert storage.immovable == ()


# --- Operators with several outputs -----------------------------------------------------------------------------------


def test_outputs_of_one_operator_are_storages_born_with_it() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x.exp(), (8,), w).sin().sum()

    facts = facts_of(capture(f, torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)))
    assert_consistent(facts)
    parts = [storage for storage in facts.storages if storage.name.startswith("getitem")]
    assert len(parts) == 3
    assert len({storage.birth for storage in parts}) == 1
    assert [storage.carried_at - storage.birth for storage in parts] == [1, 2, 3]
    assert {facts.value_by_name[storage.name].op for storage in parts} == {"aten.native_layer_norm.default"}
    # The list keeps every element until the last has been taken out.
    assert min(storage.last_forward_use for storage in parts) >= parts[0].birth + 3


@pytest.mark.parametrize("how", ["split", "unbind"])
def test_parts_of_one_product_are_one_storage(how: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        a, b = h.split(4, -1) if how == "split" else h.view(4, 2, 4).unbind(1)
        return (a.sin() * b).sum()

    facts = facts_of(capture(f, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)))
    assert_consistent(facts)
    storage = only(facts, "mm")
    assert len(storage.members) == 2
    assert storage.nbytes == 4 * 8 * 4
    assert storage.carrier == "mm"
    assert storage.immovable == ()


def test_attention_saves_movable_outputs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).view(2, 4, 3, 2, 8).unbind(2)
        return (
            functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).exp().sum()
        )

    facts = facts_of(capture(f, torch.randn(2, 4, 48, requires_grad=True)))
    assert_consistent(facts)
    assert not only(facts, "mul").immovable
    assert len(only(facts, "mul").members) == 3


# --- Sizes known only by name, or not at all --------------------------------------------------------------------------


def _dynamic(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.exp().view(-1, 4) @ w).tanh().sum() * x.shape[0]


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_symbolic_sizes_are_expressions_with_hints_and_symbols_are_no_values(partition: Any) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    pair = capture(_dynamic, x, torch.randn(4, 3, requires_grad=True), partition=partition, dynamic=True)
    facts = facts_of(pair)
    assert_consistent(facts)
    movable = [storage for storage in facts.storages if not storage.immovable]
    assert movable
    assert all(storage.nbytes and storage.nbytes_expr for storage in movable)
    names = {value.name for value in facts.values}
    symbols = [node.name for node in pair.forward.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    assert symbols
    assert not names & set(symbols)


def test_gathering_facts_adds_no_guard() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    pair = capture(_dynamic, x, torch.randn(4, 3, requires_grad=True), dynamic=True)
    environment = next(
        node.meta["val"].fake_mode.shape_env
        for node in pair.forward.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    )
    before = (len(environment.guards), environment.replacements.copy())
    environment.freeze()  # a guard from here on is reported by torch, as a warning, which fails a test
    facts_of(pair)
    facts_of(pair, fused=True)
    assert (len(environment.guards), environment.replacements) == before


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_unknown_before_running_is_none_and_may_not_move() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        picked = x[(x[:, 0] > 0).nonzero().squeeze(1)].exp()
        return (picked @ w).sum()

    facts = facts_of(capture(f, torch.randn(8, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)))
    unknown = [storage for storage in facts.storages if storage.nbytes is None]
    assert unknown
    assert all("its size is unknown before the program runs" in storage.immovable for storage in unknown)
    assert all("u" in (storage.nbytes_expr or "") for storage in unknown)


# --- Times --------------------------------------------------------------------------------------


def test_times_follow_views_on_both_sides() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        view = h.t()
        noise = x.sin().cos()
        return (view.sigmoid() @ w).sum() + noise.sum()

    pair = capture(f, torch.randn(4, 8, requires_grad=True), torch.randn(4, 3, requires_grad=True))
    facts = facts_of(pair)
    storage = only(facts, "exp")
    forward = {step.name: index for index, step in enumerate(facts.forward)}
    assert storage.last_forward_use == forward["sigmoid"]
    assert facts.steps[storage.first_backward_use].name in {node.name for node in pair.backward.graph.nodes}
    received = next(
        node for node in pair.backward.graph.nodes if node.op == "placeholder" and node.name in storage.members
    )
    names = [step.name for step in facts.backward]
    assert storage.first_backward_use - len(facts.forward) <= min(names.index(user.name) for user in received.users)


def test_the_same_pair_gives_the_same_facts_and_changes_nothing() -> None:
    pair = capture(nn.Linear(8, 8), torch.randn(4, 8))
    before = (str(pair.forward.graph), str(pair.backward.graph))
    assert facts_of(pair) == facts_of(pair)
    assert (str(pair.forward.graph), str(pair.backward.graph)) == before
