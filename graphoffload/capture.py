"""Let Dynamo capture a program that it may have captured before, without using up the captures that its code is allowed.

Dynamo counts captures per code object and gives up after a few (`recompile_limit`): a user who explains a model under ten
policies would find that it then trains uncompiled. So what `transform` and `explain` capture is a function of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

from graphoffload._torch import Unsupported, dynamo_config
from graphoffload.errors import UnsupportedGraphError

_MANY = 2**20
_numbers = itertools.count()


def with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `fn`, with a code object and a name that nothing else has.

    The name matters too: under it Dynamo remembers which sizes have changed, and would make them symbolic the next time.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    name = f"call_{next(_numbers)}"
    return types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__)


@contextlib.contextmanager
def any_number_of_captures() -> Iterator[None]:
    """Lift Dynamo's limits inside the block, for the code behind a graph break, which cannot be made our own."""
    with dynamo_config.patch(recompile_limit=_MANY, accumulated_recompile_limit=_MANY):
        yield


@contextlib.contextmanager
def one_graph() -> Iterator[None]:
    """Turn Dynamo's refusal to capture one whole graph into `UnsupportedGraphError`, with its own words."""
    try:
        yield
    except Unsupported as error:
        raise UnsupportedGraphError(f"the function is not one graph, so it cannot be transformed: {error}") from error
