"""Know whose saved-tensor hooks act on this thread, and take ours away for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from graphoffload._torch import pop_saved_tensors_hooks, push_saved_tensors_hooks, top_saved_tensors_hooks
from graphoffload.runtime.eager import saved_tensors


def active() -> saved_tensors | None:
    """Return this thread's innermost context if autograd shows saved tensors to it."""
    top = top_saved_tensors_hooks()
    context = None if top is None else getattr(top[0], "__self__", None)
    return context if isinstance(context, saved_tensors) else None


@contextlib.contextmanager
def keep() -> Iterator[None]:
    """Opt a part of the program out of `saved_tensors`: inside the block its hooks are gone, as if it had not been entered.

    The head, say, whose values come back at once; or `torch.func`, which raises under hooks. Hooks of others stay, and where
    they are innermost (inside `torch.utils.checkpoint`, say) nothing changes. Outside of `saved_tensors` it does nothing.
    """
    if torch.compiler.is_compiling():
        yield  # no hooks of ours act on what is traced
        return
    popped = []
    while active() is not None:
        hooks = top_saved_tensors_hooks()
        popped.append(hooks)
        pop_saved_tensors_hooks()
    try:
        yield
    finally:
        for hooks in reversed(popped):
            if hooks is not None:
                push_saved_tensors_hooks(*hooks)
