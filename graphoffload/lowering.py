"""Say to Inductor what it cannot see in the operators: that a copy stream reads memory after the last use it knows of.

Inductor gives the memory of a buffer to a later buffer once it has seen the last use. So the buffer that `release` names has
to be the very one that `offload` reads, which Inductor does not promise: it makes a copy wherever an operand's layout is not
the one that the graph says. And a release that does not wait is not the last use: the copy goes on. What such a release
names is never given to a later buffer (it is freed when the graph returns).

Inductor also computes pointwise operators late, inside their consumers, so that some source may be read after its release
in the graph; it frees the memory after that read. `last=False` says so to the release.
"""

from __future__ import annotations

import functools
from typing import Any

from graphoffload._torch import (
    ExternKernel,
    SchedulerNode,
    current_inductor_graph,
    fallback_handler,
    register_lowering,
)
from graphoffload.runtime.ops import OFFLOAD, RELEASE


def install() -> None:
    """Register the lowerings of `offload` and `release` with Inductor; doing so again changes nothing."""
    offload: Any = fallback_handler(OFFLOAD)  # type: ignore[no-untyped-call]
    release: Any = fallback_handler(RELEASE)  # type: ignore[no-untyped-call]

    def lower_offload(src: Any, storage: str) -> Any:
        graph = current_inductor_graph()
        # Realised before its strides are asked for: an operand that has no memory yet would be computed once more for us.
        src.realize()
        strides = graph.current_node.args[0].meta["val"].stride()
        source = ExternKernel.realize_input(ExternKernel.require_exact_strides(src, strides))
        host = offload(source, storage)
        _sources(graph)[host.get_name()] = source
        return host

    def lower_release(host: Any, _src: Any, wait: bool, _last: bool = True) -> Any:
        graph = current_inductor_graph()
        source = _sources(graph)[host.get_name()]
        if not wait:
            graph.never_reuse_buffers.add(source.get_name())
        return release(host, source, wait, False)

    register_lowering(OFFLOAD, type_promotion_kind=None)(lower_offload)
    register_lowering(RELEASE, type_promotion_kind=None)(lower_release)
    _keep_reads_behind_mutations()


def _sources(graph: Any) -> dict[str, Any]:
    """Return what each offload of the graph being lowered reads, by the name of the host buffer; kept with the graph."""
    sources: dict[str, Any] = graph.__dict__.setdefault("graphoffload_sources", {})
    return sources


def _keep_reads_behind_mutations() -> None:
    """Mend Inductor's C++ backend (2.11 to 2.13): when it changes a node's loops it forgets which mutation the node reads.

    A node that reads what `ready` has made whole would then depend on the reload alone, and run before the ready.
    """
    plain = SchedulerNode.recompute_size_and_body
    if getattr(plain, "graphoffload_mended", False):
        return

    @functools.wraps(plain)
    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    recompute_size_and_body.graphoffload_mended = True  # type: ignore[attr-defined]
    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign]
