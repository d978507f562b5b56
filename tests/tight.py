"""Plans made by hand from real facts: offload whatever may move, release it and bring it back at the last moment.

Nothing here needs a policy, a machine or the planner, so the tests of the rewrite do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable

from pairs import Pair

from graphoffload.graphs.facts import gather_facts
from graphoffload.planning.plan import Plan, Transfer
from graphoffload.planning.values import Facts, Storage


def facts_of(pair: Pair) -> Facts:
    return gather_facts(
        pair.forward,
        pair.backward,
        num_fwd_outputs=pair.num_fwd_outputs,
        static_inputs=pair.static_input_indices,
        on_device=lambda _: True,
        fused=False,
    )


def tight_plan(
    pair: Pair,
    *,
    choose: Callable[[Storage], bool] = lambda _: True,
    wait: bool = True,
    early: int = 0,
    facts: Facts | None = None,
) -> Plan:
    """Return a plan that moves every movable storage which `choose` accepts, each reload `early` steps before its use."""
    facts = facts or facts_of(pair)
    moving = [storage for storage in facts.storages if not storage.immovable and choose(storage)]
    return plan_of_transfers(facts, tuple(_transfer(facts, storage, wait, early) for storage in moving))


def _transfer(facts: Facts, storage: Storage, wait: bool, early: int) -> Transfer:
    begin = len(facts.forward)
    use = storage.first_backward_use
    return Transfer(
        storage=storage.name,
        carrier=storage.carrier,
        nbytes=storage.nbytes or 0,
        offload_after=storage.carrier,
        release_after=facts.forward[max(storage.last_forward_use, storage.carried_at)].name,
        wait=wait,
        reload_before=facts.steps[max(use - early, begin)].name,
        ready_before=facts.steps[use].name,
        offload_start=0.0,
        offload_end=0.0,
        released=0.0,
        reload_start=0.0,
        reload_end=0.0,
        needed=0.0,
    )


def plan_of_transfers(facts: Facts, transfers: tuple[Transfer, ...] = ()) -> Plan:
    moved = sum(transfer.nbytes for transfer in transfers)
    return Plan(
        facts=facts,
        policy="",
        machine="",
        decisions=(),
        transfers=transfers,
        kept_nbytes=0,
        offloaded_nbytes=moved,
        recomputed_nbytes=0,
        host_peak_nbytes=moved,
        predicted_peak_nbytes=0,
        predicted_peak_nbytes_without=0,
        predicted_seconds=0.0,
        predicted_seconds_without=0.0,
        exposed_seconds=0.0,
    )
