"""Errors of graphoffload: whose fault it is, is in the type.

`UsageError` and its kinds: what was asked cannot be done as asked; the message says what to change.
`UnsupportedGraphError`: the program is outside what the library handles; nothing was changed.
`InternalError` and its kinds: graphoffload is at fault; please report it with the message.
"""


class GraphOffloadError(Exception):
    """Stand above every error that graphoffload raises on purpose."""


class UsageError(GraphOffloadError, ValueError):
    """Say that an argument or option cannot be honoured, and what to change."""


class PolicyError(UsageError):
    """Say that a policy is malformed, or asks for something that cannot be honoured."""


class MachineError(UsageError):
    """Say that a machine's numbers are impossible, or that a device cannot be measured."""


class StalePlanError(UsageError):
    """Say that a plan does not belong to the graphs it is used with."""


class UnsupportedGraphError(GraphOffloadError, RuntimeError):
    """Say that a graph is outside what graphoffload handles; the graph was not changed."""


class InternalError(GraphOffloadError, AssertionError):
    """Stand above errors that are graphoffload's own fault."""


class OrderingError(InternalError):
    """Say that a plan or a rewritten pair has a race; it is never returned to the caller."""


class SlotError(InternalError):
    """Say that a slot was used in a state that does not allow it."""


class GraphOffloadWarning(UserWarning):
    """Warn that a request moved nothing, or that an option has no effect."""
