"""`graphoffload.explain`: the plan that would run, told without running anything and without memory."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from training import Compiler

import graphoffload
from graphoffload.errors import UsageError
from graphoffload.planning.plan import Action, Plan
from graphoffload.planning.policy import KeepAll, OffloadAll
from graphoffload.testing import virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)


class Tied(nn.Module):
    def __init__(self, *, vocabulary=32, width=16, device=None):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, device=device)
        self.up = nn.Linear(width, 4 * width, device=device)
        self.down = nn.Linear(4 * width, width, device=device)
        self.norm = nn.BatchNorm1d(width, device=device)

    def forward(self, ids, *, scale=1.0):
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(x))) * scale
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return F.linear(x, self.embed.weight)


@pytest.fixture
def ids():
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def rows(plan):
    return [(decision.value, decision.storage, decision.action) for decision in plan.decisions]


def sizes(plan):
    return [(storage.name, storage.nbytes, storage.members) for storage in plan.facts.storages]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_explained_is_what_runs(ids, compiler):
    """The plan told beforehand is the plan made when the model is really compiled."""
    model = Tied()
    told = graphoffload.explain(model, ids, policy=EVERYTHING, machine="virtual", compiler=compiler).plan
    with virtual_device():
        compile_ = Compiler(EVERYTHING, compiler=compiler, options={"machine": "virtual"})
        compile_(model)(ids).sum().backward()
    (run,) = compile_.plans
    assert rows(told) == rows(run)
    assert sizes(told) == sizes(run)
    assert told.transfers == run.transfers
    assert [value.module_path for value in told.facts.values] == [value.module_path for value in run.facts.values]
    assert told.predicted_peak_nbytes == run.predicted_peak_nbytes


def test_nothing_is_touched(ids):
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    graphoffload.explain(model, ids, policy=EVERYTHING)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_without_memory():
    """200 GB of parameters on "meta": no machine of a test has them, so nothing can have been allocated."""
    model = Tied(vocabulary=10_000_000, width=4096, device="meta")
    assert sum(parameter.nbytes for parameter in model.parameters()) > 150e9
    plan = graphoffload.explain(model, torch.zeros(1, 64, dtype=torch.int64, device="meta"), policy=EVERYTHING).plan
    assert plan.transfers
    assert plan.predicted_peak_nbytes > 150e9


def test_tied_parameters_stay_tied(ids):
    """Scenario rank 2: no byte of a parameter is offloaded, also where it is saved as a view of a tied one."""
    plan = graphoffload.explain(Tied(), ids, policy=EVERYTHING).plan
    parameters = {buffer.name for buffer in plan.facts.buffers if buffer.kind == "parameter"}
    held = {storage.name for storage in plan.facts.storages if storage.held}
    moved = {transfer.storage for transfer in plan.transfers}
    assert moved
    assert not moved & (parameters | held)
    model = Tied()
    everything = sum(parameter.nbytes for parameter in {id(p): p for p in model.parameters()}.values())
    kept_whole = sum(
        storage.nbytes for storage in plan.facts.storages if storage.held and storage.name.startswith("primals")
    )
    assert kept_whole <= everything + ids.nbytes + sum(buffer.nbytes for buffer in model.buffers())


def test_keyword_arguments(ids):
    plan = graphoffload.explain(Tied(), ids, policy=EVERYTHING, scale=0.5).plan
    assert plan.transfers


def test_printed(ids):
    told = graphoffload.explain(Tied(), ids, policy=EVERYTHING)
    text = str(told)
    for word in (
        "value",
        "module",
        "operator",
        "source",
        "bytes",
        "action",
        "reason",
        "predicted peak",
        "offload",
        "keep",
    ):
        assert word in text
    for storage in told.plan.facts.storages:
        for member in storage.members:
            assert member in text
    assert "up" in text
    assert "test_explain.py" in text


def test_json(ids):
    told = graphoffload.explain(Tied(), ids, policy=EVERYTHING)
    (one,) = json.loads(told.to_json())
    assert Plan.from_json(json.dumps(one)) == told.plan


# Dynamo itself looks at the `.grad` of a graph's input, and hides the warning from all but those who make it an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_graph_breaks_make_several_plans(ids):
    class Broken(Tied):
        def forward(self, ids):
            x = self.embed(ids).sin()
            torch._dynamo.graph_break()
            return self.down(self.up(x).sin()).sin()

    told = graphoffload.explain(Broken(), ids, policy=EVERYTHING)
    assert len(told.plans) == 2
    assert "graph 1 of 2" in str(told)
    with pytest.raises(UsageError, match=r"read \.plans"):
        _ = told.plan


def test_functions_explain_too():
    told = graphoffload.explain(
        lambda x: (x @ x.t()).sin().sum(), torch.randn(7, 3, requires_grad=True), policy=EVERYTHING
    )
    assert told.plan.transfers


def test_nothing_saved_is_said():
    with pytest.raises(UsageError, match="nothing to explain"):
        graphoffload.explain(torch.sin, torch.randn(3))


def test_a_model_that_needs_real_data():
    def function(x):
        return x.sin() * 2 if x.sum().item() > 0 else x.cos()

    with pytest.raises(UsageError, match="real data"):
        graphoffload.explain(function, torch.randn(3, requires_grad=True), policy=EVERYTHING)


def test_the_model_trains_afterwards(ids):
    model = Tied()
    graphoffload.explain(model, ids, policy=EVERYTHING)
    torch.compile(model, backend="aot_eager")(ids).sum().backward()
    assert model.up.weight.grad is not None
    assert type(model.up.weight.grad) is torch.Tensor


def test_explaining_often_leaves_training_compiled(ids):
    """Dynamo counts captures per code and gives up after eight; looking at ten policies must not use them up."""
    torch._dynamo.reset()
    model = Tied()
    for min_nbytes in range(10):
        assert graphoffload.explain(model, ids, policy=OffloadAll(min_nbytes=min_nbytes), compiler="aot_eager").plans
    seen = []
    torch.compile(model, backend=graphoffload.backend(KeepAll(), compiler="aot_eager", on_plan=seen.append))(ids)
    assert len(seen) == 1


def test_another_size_is_explained_as_it_is():
    """Dynamo makes a size symbolic when it has changed; what was explained before must not count for that."""
    model = nn.Linear(6, 6)
    for rows in (3, 5):
        plan = graphoffload.explain(lambda x: model(x).sin().sum(), torch.randn(rows, 6), policy=EVERYTHING).plan
        assert all(isinstance(size, int) for value in plan.facts.values for size in value.shape)


def test_with_and_without(ids):
    """The explanation says what the policy is for: the peak with it and without it."""
    plan = graphoffload.explain(Tied(), ids, policy=EVERYTHING, compiler="aot_eager").plan
    kept = graphoffload.explain(Tied(), ids, policy=KeepAll(), compiler="aot_eager").plan
    assert plan.predicted_peak_nbytes_without == kept.predicted_peak_nbytes
    assert plan.predicted_peak_nbytes <= kept.predicted_peak_nbytes
    assert {decision.action for decision in kept.decisions} == {Action.KEEP}
