"""Know in which module the program is, for policies that choose by module."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class ModulePaths:
    """Follow forwards of a model's modules through hooks that are there only inside `following`.

    Each thread has its own path. A module that is called again inside itself is entered again; a shared module goes by the
    first of its names.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def current(self) -> str:
        """Return the path of the innermost module that is running in this thread; empty outside any."""
        stack = self._stack()
        return stack[-1] if stack else ""

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follow the modules of `model` inside the block. An exception in a forward leaves no path behind."""
        handles = []
        depth = len(self._stack())
        try:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            del self._stack()[depth:]

    def _stack(self) -> list[str]:
        stack: list[str] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_module: nn.Module, _args: Any) -> None:
            self._stack().append(name)

        return enter

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        stack = self._stack()
        if stack:
            stack.pop()
