"""Compare the plan and the printed graphs of small programs with what the golden files say.

A golden file (`*.test`) holds cases. A case has a head of `key: value` lines (policy, base, dynamic, inputs) and sections:
the program, a function of torch tensors, and what comes of it. `pytest --update-golden` writes the sections anew; read the
difference before you keep it. Printed graphs depend on torch's decompositions, so a file is for the torch it names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from pairs import capture
from tight import facts_of
from torch.utils.checkpoint import checkpoint

import graphoffload.policies
from graphoffload.graphs.erase import erase
from graphoffload.graphs.order import events_of_pair
from graphoffload.graphs.rewrite import rewrite
from graphoffload.ordering.check import check
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Plan
from graphoffload.planning.planner import make_plan

HERE = Path(__file__).parent
TORCH = "2.13"  # the torch that the files were written with

# A link so slow beside the arithmetic that no copy is free, and a copy of a few hundred bytes takes many steps.
MACHINE = Machine(
    name="golden",
    d2h_bytes_per_second=1e7,
    h2d_bytes_per_second=1e7,
    memory_bytes_per_second=1e8,
    flops_per_second=(("float32", 1e9),),
)


@dataclass
class Case:
    """Hold one case as it is written."""

    name: str
    head: dict[str, str]
    sections: dict[str, str]

    def text(self) -> str:
        head = "".join(f"{key}: {value}\n" for key, value in self.head.items())
        return f"[case {self.name}]\n{head}" + "".join(f"[{name}]\n{body}" for name, body in self.sections.items())


def cases_of(path: Path) -> list[Case]:
    cases: list[Case] = []
    section = ""
    for line in path.read_text().splitlines():
        if found := re.fullmatch(r"\[case (.+)\]", line):
            cases.append(Case(found[1], {}, {}))
            section = ""
        elif found := re.fullmatch(r"\[(\w+)\]", line):
            section = found[1]
            cases[-1].sections[section] = ""
        elif section:
            cases[-1].sections[section] += f"{line}\n"
        elif line.strip():
            key, _, value = line.partition(":")
            cases[-1].head[key] = value.strip()
    return cases


def all_cases() -> list[object]:
    return [
        pytest.param(path, case.name, id=f"{path.stem}-{case.name}")
        for path in sorted(HERE.glob("*.test"))
        for case in cases_of(path)
    ]


def outcome(case: Case) -> dict[str, str]:
    """Plan and rewrite a case's program; return the sections that its file should have."""
    names: dict[str, object] = {"torch": torch, "F": F, "checkpoint": checkpoint}
    exec(case.sections["program"], names)  # noqa: S102  # the program is ours, beside this file
    torch.manual_seed(0)
    inputs = eval(case.head["inputs"], {"torch": torch})  # noqa: S307
    policy = eval(case.head["policy"], vars(graphoffload.policies))  # noqa: S307
    pair = capture(
        names["program"], *inputs, partition=case.head["base"], dynamic=case.head.get("dynamic", "no") == "yes"
    )
    plan = make_plan(facts_of(pair), policy, MACHINE)
    forward, backward = rewrite(pair.forward, pair.backward, plan, num_fwd_outputs=pair.num_fwd_outputs)
    assert check(events_of_pair(forward, backward, num_fwd_outputs=pair.num_fwd_outputs)) == ()
    assert [half.code for half in erase(forward, backward)] == [pair.forward.code, pair.backward.code]
    return {
        "program": case.sections["program"],
        "plan": plan_text(plan),
        "forward": code_text(forward),
        "backward": code_text(backward),
    }


def plan_text(plan: Plan) -> str:
    lines = [f"{one.value}: {one.action.value} ({one.reason})" for one in plan.decisions]
    for move in plan.transfers:
        release = "wait and release" if move.wait else "hand over"
        lines.append(
            f"{move.storage}: offload {move.carrier} after {move.offload_after}, {release} after {move.release_after}, "
            f"reload before {move.reload_before}, ready before {move.ready_before}"
        )
    return "".join(f"{line}\n" for line in lines) + "\n"


def code_text(module: torch.fx.GraphModule) -> str:
    return "".join(f"{line.rstrip()}\n" for line in module.code.strip().splitlines()) + "\n"


@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"the golden files are those of torch {TORCH}")
@pytest.mark.parametrize(("path", "name"), all_cases())
def test_golden(path: Path, name: str, request: pytest.FixtureRequest) -> None:
    """Fail on any difference, or, with --update-golden, write it into the file."""
    cases = cases_of(path)
    (case,) = [case for case in cases if case.name == name]
    have = outcome(case)
    if request.config.getoption("--update-golden"):
        case.sections = have
        path.write_text("".join(one.text() for one in cases))
        return
    for section, text in have.items():
        assert case.sections.get(section, "").strip() == text.strip(), f"{path.name}, case {name}: [{section}] differs"


def test_every_case_is_complete() -> None:
    """A case without its expected sections would pass by comparing nothing."""
    for path in sorted(HERE.glob("*.test")):
        for case in cases_of(path):
            assert {"policy", "base", "inputs"} <= case.head.keys(), case.name
            assert list(case.sections) == ["program", "plan", "forward", "backward"], case.name


def test_what_is_read_is_written_back_as_it_was() -> None:
    for path in sorted(HERE.glob("*.test")):
        assert "".join(case.text() for case in cases_of(path)) == path.read_text()
