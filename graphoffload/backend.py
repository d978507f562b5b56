"""The composition: the stages in order, the pass on a pair, and the `torch.compile` backend.

split → (split again where the policy asks for recomputation) → gather_facts → make_plan → rewrite →
assert_ordered(events_of_pair) → lower. See `offload_pair` and `OffloadPartitioner.__call__`.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from graphoffload import lowering
from graphoffload._torch import (
    CustomPartitionerFn,
    aot_autograd,
    compile_fx,
    functorch_config,
)
from graphoffload._version import __version__
from graphoffload.errors import GraphOffloadWarning
from graphoffload.graphs.facts import gather_facts
from graphoffload.graphs.order import events_of_pair
from graphoffload.graphs.rewrite import refuse_rewritten, rewrite
from graphoffload.graphs.split import force_recompute, split
from graphoffload.graphs.timing import measured_steps
from graphoffload.options import Options, Partitioner, read_compile_options, read_options
from graphoffload.ordering.check import assert_ordered
from graphoffload.planning.machine import Machine
from graphoffload.planning.plan import Action, Plan
from graphoffload.planning.planner import make_plan
from graphoffload.planning.policy import Policy, check_policy, policy_key
from graphoffload.planning.values import Facts
from graphoffload.registry import Compiled, remember
from graphoffload.runtime import ops
from graphoffload.runtime.device import machine_of
from graphoffload.runtime.interpret import boxed
from graphoffload.runtime.transfer import Runtime

AS_PLANNED = {"reorder_for_peak_memory": False, "reorder_for_locality": False, "allow_buffer_reuse": False}
"""What Inductor must leave alone. The two orders would move reloads, and the compute between them, away from where the plan
put them. Reuse holds a buffer from its last use to the next one of its size, a layer later, as long as Inductor's own
estimate of the peak allows it; that estimate knows nothing of the plan, and what it holds is memory that the plan freed."""

Pair = tuple[fx.GraphModule, fx.GraphModule]


def offload_pair(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    policy: Policy,
    machine: Machine | None = None,
    static_inputs: Sequence[int] = (),
    fused: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule, Plan]:
    """Apply a policy to a partitioned (forward, backward) pair; a pure function, the given modules are not changed.

    The pair is what AOTAutograd's partitioners return: forward's outputs are `num_fwd_outputs` user outputs and then the
    saved values, backward's placeholders are saved SymInts, saved values and tangents. `static_inputs` are the indices of
    forward's placeholders that are parameters or buffers. `fused` says that the downstream compiler fuses (for estimates).

    Law: outputs and gradients of the returned pair are bitwise those of the given one.
    Raises `PolicyError`, `UnsupportedGraphError`; never returns a pair with a race (`OrderingError`).
    """
    policy = check_policy(policy)
    refuse_rewritten(forward, backward)
    facts = gather_facts(
        forward,
        backward,
        num_fwd_outputs=num_fwd_outputs,
        static_inputs=static_inputs,
        on_device=ops.on_device,
        fused=fused,
    )
    # The split is done, so what a policy wants recomputed is kept, and the plan says why.
    plan = make_plan(facts, policy, machine or machine_of(facts.device), not_recomputable={})
    return (*_apply(forward, backward, plan, num_fwd_outputs=num_fwd_outputs), plan)


def _apply(forward: fx.GraphModule, backward: fx.GraphModule, plan: Plan, *, num_fwd_outputs: int) -> Pair:
    _say_what_had_no_effect(plan)
    if not plan.transfers:
        return forward, backward
    pair = rewrite(forward, backward, plan, num_fwd_outputs=num_fwd_outputs)
    assert_ordered(events_of_pair(*pair, num_fwd_outputs=num_fwd_outputs), program=f"{pair[0].code}\n{pair[1].code}")
    return pair


def _say_what_had_no_effect(plan: Plan) -> None:
    """Warn when a policy asked for offloading and not one byte will move, and of what in a policy matches nothing."""
    for note in plan.notes:
        warnings.warn(f"graphoffload: {note}", GraphOffloadWarning, stacklevel=2)
    if plan.transfers or not plan.offload_requested or not plan.facts.storages:
        return
    reasons = sorted({decision.reason for decision in plan.decisions})
    warnings.warn(
        f"graphoffload was asked to offload and moves nothing: {len(plan.facts.storages)} storages are saved for backward, "
        f"all kept, because: {'; '.join(reasons)}",
        GraphOffloadWarning,
        stacklevel=2,
    )


class OffloadPartitioner(CustomPartitionerFn):
    """Partition a joint graph and honour the policy: the one seam that Inductor and plain AOTAutograd share."""

    def __init__(
        self,
        options: Options,
        *,
        on_device: Callable[[torch.device], bool] = ops.on_device,
        on_pair: Callable[[fx.GraphModule, fx.GraphModule, Plan], None] | None = None,
    ) -> None:
        self.options = options
        self.on_device = on_device
        self.on_pair = on_pair

    def __call__(  # type: ignore[override]  # AOTAutograd always passes num_fwd_outputs
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Pair:
        """Return the rewritten (forward, backward) of a joint graph; the arguments are those of torch's partitioners."""
        options = self.options
        static = tuple(static_lifetime_input_indices or ())

        def divide(joint: fx.GraphModule) -> Pair:
            return split(
                joint,
                joint_inputs,
                base=options.partitioner,
                num_fwd_outputs=num_fwd_outputs,
                static_lifetime_input_indices=static,
                **kwargs,
            )

        read = functools.partial(self._facts, num_fwd_outputs=num_fwd_outputs, static=static)
        pair = divide(gm)
        facts = read(*pair)
        machine = options.machine or machine_of(facts.device)
        plan = make_plan(facts, options.policy, machine)
        wanted = [decision.value for decision in plan.decisions if decision.action is Action.RECOMPUTE]
        if wanted:
            tagged, refused = force_recompute(gm, wanted)
            pair = divide(tagged)
            plan = make_plan(read(*pair), options.policy, machine, not_recomputable=refused)
        pair = _apply(*pair, plan, num_fwd_outputs=num_fwd_outputs)
        if self.on_pair is not None:
            self.on_pair(*pair, plan)
        if options.on_plan is not None:
            options.on_plan(plan)
        return pair

    def _facts(
        self, forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int, static: Sequence[int]
    ) -> Facts:
        facts = gather_facts(
            forward,
            backward,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=static,
            on_device=self.on_device,
            fused=self.options.compiler == "inductor",
        )
        if self.options.timing == "measured":
            device = torch.device(facts.device or "cpu")
            facts = replace(
                facts,
                forward=measured_steps(forward, facts.forward, device=device, fused=facts.fused),
                backward=measured_steps(backward, facts.backward, device=device, fused=facts.fused),
            )
        return facts

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # Inductor pickles its whole configuration for the cache key, and we stand in it; the key is all of us that counts.
        return str, (self.uuid(),)

    def uuid(self) -> str:
        """Key Inductor's cache by policy, machine and version, so that policy A's code is never run for policy B."""
        options = self.options
        base = options.partitioner
        name = base if isinstance(base, str) else f"{base.__module__}.{base.__qualname__}"
        machine = "" if options.machine is None else options.machine.to_json()
        return (
            f"graphoffload {__version__} {_own_source()} {policy_key(options.policy)} {machine} {name} {options.timing}"
        )


@functools.cache
def _own_source() -> str:
    """Digest the package's source: code that an edited checkout made must not be taken for this one's."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def lower(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, partitioner: OffloadPartitioner
) -> Callable[..., Any]:
    """Hand a captured graph to the downstream compiler, with our partitioner in its seam."""
    # AOTAutograd's own cache would skip the partitioner on a hit, and with it the plan; see docs/design/0003.
    with functorch_config.patch(enable_autograd_cache=False):
        if options.compiler == "inductor":
            lowering.install()
            patches = dict(options.inductor)
            patches.update(custom_partitioner_fn=partitioner, **AS_PLANNED)
            return cast("Callable[..., Any]", compile_fx(gm, inputs, config_patches=patches))
        compiler = aot_autograd(
            fw_compiler=lambda graph, _: boxed(graph),
            bw_compiler=lambda graph, _: boxed(graph),
            partition_fn=partitioner,
            keep_inference_input_mutations=True,
        )
        return compiler(gm, inputs)


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    plans: list[Plan] = []
    partitioner = OffloadPartitioner(options, on_pair=lambda _forward, _backward, plan: plans.append(plan))
    compiled = lower(gm, inputs, options, partitioner)
    return remember(Compiled(compiled, tuple(plans), _runtimes(plans)))


def _runtimes(plans: Sequence[Plan]) -> tuple[Runtime, ...]:
    """Own the runtimes that the graphs use: a compiled callable keeps them (and their pinned memory) alive."""
    runtimes: dict[str, Runtime] = {}
    for plan in plans:
        if not plan.transfers:
            continue
        runtime = runtimes.setdefault(plan.facts.device, ops.runtime_for(plan.facts.device))
        machine = Machine.from_json(plan.machine)
        # What the plan was made for is what the runtime holds to; what nobody gave stays as it is.
        if machine.in_flight_nbytes is not None or machine.host_budget_nbytes is not None:
            runtime.set_limits(in_flight_nbytes=machine.in_flight_nbytes, host_budget_nbytes=machine.host_budget_nbytes)
    return tuple(runtimes.values())


def graphoffload(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph for `torch.compile(model, backend="graphoffload", options={...})`.

    The names that `options` takes are the arguments of `graphoffload.backend`. `mode` is torch.compile's; CUDA graphs are
    refused. Raises `UsageError` for what cannot be honoured.
    """
    return _compile(gm, example_inputs, read_compile_options(options, mode))


def backend(
    policy: Policy | None = None,
    *,
    machine: Machine | str | None = None,
    compiler: str = "inductor",
    inductor: Mapping[str, Any] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    partitioner: str | Partitioner = "min_cut",
    timing: str = "roofline",
) -> Callable[..., Any]:
    """Make a backend for `torch.compile(model, backend=graphoffload.backend(policy))`.

    policy: decides for every saved value; default: offload what the link hides (`policies.OffloadHidden`).
    machine: a `Machine` or the name of one; default: the named machine of the device, or a generic one.
    compiler: "inductor" (default) or "aot_eager". inductor: Inductor's own options, as a dict.
    on_plan: called with each `Plan` as it is made. partitioner: "min_cut" (default), "default", or a partition function.
    timing: "roofline" (default) estimates each node's seconds; "measured" runs each distinct node on the device first.

    Raises `UsageError` at once for options that cannot be honoured.
    """
    checked = read_options(
        policy=policy,
        machine=machine,
        compiler=compiler,
        inductor=inductor,
        on_plan=on_plan,
        partitioner=partitioner,
        timing=timing,
    )

    def graphoffload_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _compile(gm, example_inputs, checked)

    return graphoffload_backend
