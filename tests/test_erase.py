"""Erase is the left inverse of the rewrite (law 9)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import Pair, capture
from test_rewrite import MLP, PROGRAMS, Views
from tight import facts_of, plan_of_transfers, tight_plan
from torch import fx

from graphoffload.errors import UsageError
from graphoffload.graphs.erase import erase
from graphoffload.graphs.rewrite import DISPLACED, OPERATORS, rewrite


def rewritten(pair: Pair, **options: object) -> tuple[fx.GraphModule, fx.GraphModule]:
    return rewrite(pair.forward, pair.backward, tight_plan(pair, **options), num_fwd_outputs=pair.num_fwd_outputs)


def assert_same(pair: Pair, erased: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    for old, new in zip((pair.forward, pair.backward), erased, strict=True):
        assert new.code == old.code
        new.graph.lint()
        assert [n.name for n in new.graph.nodes] == [n.name for n in old.graph.nodes]
        for before, after in zip(old.graph.nodes, new.graph.nodes, strict=True):
            assert (after.op, after.target, after.type) == (before.op, before.target, before.type)
            assert after.meta.keys() == before.meta.keys()
            assert after.meta.get("val") is before.meta.get("val")
            assert DISPLACED not in after.meta
        for key in ("desc", "output_stack_traces"):
            assert new.graph.output_node().meta.get(key) == old.graph.output_node().meta.get(key)


@pytest.mark.parametrize(("base", "dynamic"), [("default", False), ("min_cut", True)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_erasing_what_was_rewritten_gives_the_pair_back(name: str, base: str, dynamic: bool) -> None:
    make, inputs = PROGRAMS[name]
    pair = capture(make(), *inputs(), partition=base, dynamic=dynamic)
    assert_same(pair, erase(*rewritten(pair)))


def test_every_choice_of_storages_and_every_lead_can_be_erased() -> None:
    pair = capture(Views(), torch.randn(6, 8), dynamic=True)
    names = [storage.name for storage in facts_of(pair).storages if not storage.immovable]

    @given(st.sets(st.sampled_from(names)), st.integers(0, 12), st.booleans())
    def law(chosen: set[str], early: int, wait: bool) -> None:
        new = rewritten(pair, choose=lambda storage: storage.name in chosen, early=early, wait=wait)
        assert sum(n.target in OPERATORS for module in new for n in module.graph.nodes) == 4 * len(chosen)
        assert_same(pair, erase(*new))

    law()


def test_a_pair_without_transfers_comes_back_as_it_is() -> None:
    pair = capture(MLP(), torch.randn(4, 8))
    assert_same(pair, erase(pair.forward, pair.backward))
    nothing = plan_of_transfers(facts_of(pair))
    assert_same(pair, erase(*rewrite(pair.forward, pair.backward, nothing, num_fwd_outputs=pair.num_fwd_outputs)))


def test_what_is_erased_is_not_touched() -> None:
    forward, backward = rewritten(capture(Views(), torch.randn(6, 8)))
    before = forward.code, backward.code
    erase(forward, backward)
    assert (forward.code, backward.code) == before


def test_erase_says_when_the_record_is_lost() -> None:
    forward, backward = rewritten(capture(MLP(), torch.randn(4, 8)))
    for node in forward.graph.nodes:
        node.meta.pop(DISPLACED, None)
    with pytest.raises(UsageError, match="has lost the record"):
        erase(forward, backward)


def test_what_was_erased_can_be_rewritten_again() -> None:
    pair = capture(Views(), torch.randn(6, 8))
    once = rewritten(pair)
    again = rewrite(*erase(*once), tight_plan(pair), num_fwd_outputs=pair.num_fwd_outputs)
    assert [module.code for module in again] == [module.code for module in once]
