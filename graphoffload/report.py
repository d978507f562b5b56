"""Facts and plans for people. Reads data, decides nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass

from graphoffload.errors import UsageError
from graphoffload.planning.plan import Plan
from graphoffload.planning.table import plan_table as plan_table
from graphoffload.planning.table import plan_text as plan_text
from graphoffload.planning.table import plan_totals as plan_totals


@dataclass(frozen=True)
class Explanation:
    """Hold the plans of a model, one a graph; print it for the tables."""

    plans: tuple[Plan, ...]

    @property
    def plan(self) -> Plan:
        """Return the plan of a model that is one graph; raise `UsageError` where graph breaks made several."""
        if len(self.plans) != 1:
            raise UsageError(f"the model is {len(self.plans)} graphs (graph breaks); read .plans instead of .plan")
        return self.plans[0]

    def to_json(self) -> str:
        """Write the plans as a JSON list; each element is what `Plan.from_json` reads."""
        return json.dumps([json.loads(plan.to_json()) for plan in self.plans])

    def __str__(self) -> str:
        if len(self.plans) == 1:
            return plan_text(self.plans[0])
        return "\n\n".join(
            f"graph {index + 1} of {len(self.plans)}\n{plan_text(plan)}" for index, plan in enumerate(self.plans)
        )
