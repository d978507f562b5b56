"""Say to Inductor what it cannot see in the operators: that a copy stream reads memory after the last use it knows of.

Inductor gives the memory of a buffer to a later buffer once it has seen the last use. A copy out is still reading then, and
the slot's reference protects against freeing, not against being written in place. So what `offload` reads is never reused.

Inductor also computes pointwise operators late, inside their consumers, so that some source may be read after its release
in the graph; it frees the memory after that read. `last=False` says so to the release.
"""

from __future__ import annotations

from typing import Any

from graphoffload._torch import ExternKernel, current_inductor_graph, fallback_handler, register_lowering
from graphoffload.runtime.ops import OFFLOAD, RELEASE


def install() -> None:
    """Register the lowerings of `offload` and `release` with Inductor; doing so again changes nothing."""
    offload, release = fallback_handler(OFFLOAD), fallback_handler(RELEASE)

    def lower_offload(src: Any, storage: str) -> Any:
        # Realised here, so that the buffer that the copy reads is the one that is named below.
        realised = ExternKernel.realize_input(src)
        current_inductor_graph().never_reuse_buffers.add(realised.get_name())
        return offload(realised, storage)

    def lower_release(host: Any, src: Any, wait: bool, last: bool = True) -> Any:
        return release(host, src, wait, False)

    register_lowering(OFFLOAD, type_promotion_kind=None)(lower_offload)
    register_lowering(RELEASE, type_promotion_kind=None)(lower_release)
