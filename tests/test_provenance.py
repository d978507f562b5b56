"""Where a value comes from, for people and policies."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphoffload.graphs.provenance import clean_path
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


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with torch.fx.traceback.annotate({"name": "activation"}):
                x = layer(x).sigmoid()
        return x.sum()


def test_a_value_knows_its_module_its_line_and_the_name_the_user_gave() -> None:
    facts = facts_of(capture(_Block(), torch.randn(4, 8)))
    named = [value for value in facts.values if value.op == "aten.sigmoid.default"]
    assert len({value.storage for value in named}) == 2
    assert all(value.source.startswith("test_provenance.py:") for value in named)
    assert {value.label for value in named} == {"activation"}
    products = [step for step in facts.forward if step.op == "aten.addmm.default"]
    assert len(products) == 2


def test_module_paths_read_as_the_owner_writes_them() -> None:
    assert clean_path("L['self'].model.layers.0.mlp") == "model.layers.0.mlp"
    assert clean_path("L['self']._modules['layers']._modules['0'].mlp") == "layers.0.mlp"
    assert clean_path("L['self'].layers[3].mlp") == "layers.3.mlp"
    assert clean_path("getattr(getattr(L['self'].layers, '0'), 'mlp')") == "layers.0.mlp"
    assert clean_path("L['m']") == ""
    assert clean_path("L['self']._orig_mod.head") == "head"


def test_a_module_path_is_that_of_the_innermost_module() -> None:
    facts = facts_of(capture(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)))
    product = next(value for value in facts.values if value.op == "aten.addmm.default")
    assert product.module_path == "0"


def test_region_and_tag_of_selective_checkpointing_are_facts() -> None:
    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op is aten.mm.default
        return CheckpointPolicy.MUST_CPU_OFFLOAD if save else CheckpointPolicy.PREFER_RECOMPUTE

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().exp()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, choose)
        return checkpoint(region, x, w, use_reentrant=False, context_fn=contexts).sum()

    pair = capture(f, torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), partition="min_cut")
    facts = facts_of(pair)
    product = next(value for value in facts.values if value.op == "aten.mm.default")
    assert product.tag == "MUST_CPU_OFFLOAD"
    assert product.region is not None
    assert facts.recomputed_nbytes > 0
