"""What forward saves is matched with what backward receives, by order."""

from __future__ import annotations

import pytest
import torch

from graphoffload.errors import UnsupportedGraphError
from graphoffload.graphs.facts import gather_facts
from graphoffload.graphs.saved import match_saved
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


def _dynamic(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.exp().view(-1, 4) @ w).tanh().sum() * x.shape[0]


def test_saved_values_are_matched_by_order_not_by_name() -> None:
    pair = capture(_dynamic, torch.randn(6, 8, requires_grad=True), torch.randn(4, 3, requires_grad=True), dynamic=True)
    matched = match_saved(pair.forward, pair.backward, num_fwd_outputs=pair.num_fwd_outputs)
    assert [mine.name for mine, _ in matched] == [theirs.name for _, theirs in matched]
    before = [theirs for _, theirs in matched]
    for index, node in enumerate(before):
        node.name = f"renamed_{index}"
    again = match_saved(pair.forward, pair.backward, num_fwd_outputs=pair.num_fwd_outputs)
    assert [theirs for _, theirs in again] == before


def test_symbols_after_tensors_in_backward_are_matched_too() -> None:
    pair = capture(_dynamic, torch.randn(6, 8, requires_grad=True), torch.randn(4, 3, requires_grad=True), dynamic=True)
    expected = match_saved(pair.forward, pair.backward, num_fwd_outputs=pair.num_fwd_outputs)
    placeholders = [node for node in pair.backward.graph.nodes if node.op == "placeholder"]
    symbol = next(node for node in placeholders if isinstance(node.meta["val"], torch.SymInt))
    expected[-1][1].append(symbol)
    assert match_saved(pair.forward, pair.backward, num_fwd_outputs=pair.num_fwd_outputs) == expected


def test_a_pair_that_does_not_fit_together_is_refused() -> None:
    pair = capture(lambda x: x.exp().sum(), torch.randn(4, 8, requires_grad=True))
    with pytest.raises(UnsupportedGraphError, match="num_fwd_outputs right"):
        gather_facts(pair.forward, pair.backward, num_fwd_outputs=0, on_device=on_cpu, fused=False)
    with pytest.raises(UnsupportedGraphError, match="forward returns"):
        gather_facts(pair.forward, pair.backward, num_fwd_outputs=9, on_device=on_cpu, fused=False)
    saved = next(node for node in pair.forward.graph.nodes if node.name == "exp" or node.name.startswith("detach"))
    for node in pair.forward.graph.nodes:
        if node is saved or node.op == "call_function":
            node.meta.pop("val", None)
    with pytest.raises(UnsupportedGraphError, match="fake tensor"):
        facts_of(pair)
