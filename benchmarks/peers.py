"""Load the offloading contexts of TRL and torchtune from their module files, alone, without installing either.

TRL_OFFLOAD and TORCHTUNE_OFFLOAD name the files: trl/models/activation_offloading.py and
torchtune/training/_activation_offloading.py, out of their wheels. What these import and this machine lacks is replaced by
a stand-in while they load; nothing of what they do depends on it for plain tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

Contexts = Callable[[], AbstractContextManager[Any]]
"""Give the context for one forward."""


def trl(model: nn.Module, **arguments: Any) -> Contexts:
    """Return TRL's context, with the model's parameters made known to it; it is one object, as in TRL's trainers.

    `arguments` are those of its `OffloadActivations`: use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size.
    """
    if importlib.util.find_spec("accelerate") is not None:
        accelerate = importlib.import_module("accelerate")
        accelerate.PartialState()  # its logger, which TRL uses, refuses to work before
    context = _load("TRL_OFFLOAD", "trl_offload", _TRL_NEEDS).OffloadActivations(**arguments)
    context.update_model_params(model)
    return lambda: context


def torchtune(model: nn.Module, **arguments: Any) -> Contexts:
    """Return torchtune's context; it has no way to be told of a model's parameters."""
    del model
    context = _load("TORCHTUNE_OFFLOAD", "torchtune_offload", _TORCHTUNE_NEEDS).OffloadActivations(**arguments)
    return lambda: context


def save_on_cpu(model: nn.Module) -> Contexts:
    """Return torch's own way: everything to pinned memory, one copy at a time."""
    del model
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)


def _load(variable: str, name: str, needs: dict[str, dict[str, Any]]) -> types.ModuleType:
    if torch.accelerator.current_accelerator(check_available=True) is None:
        raise SystemExit("the peers' contexts need an accelerator, and this machine has none")
    path = os.environ.get(variable)
    if not path or not Path(path).is_file():
        found = f"it is {path!r}, which is not a file" if path else "it is not set"
        raise SystemExit(f"the environment variable {variable} must name the peer's module file: {found}.\n{__doc__}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{variable}={path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with _stand_ins(needs):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _stand_ins(needs: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Put modules of the given names and contents into `sys.modules` where the real ones cannot be imported."""
    made = []
    for name, contents in needs.items():
        try:
            importlib.import_module(name)
        except ImportError:
            module = types.ModuleType(name)
            vars(module).update(contents)
            sys.modules[name] = module
            made.append(name)
    try:
        yield
    finally:
        # Others ask whether these packages are installed by looking for them; a stand-in must not be found.
        for name in made:
            del sys.modules[name]


def _at_least(_comparison: str, version: str) -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, version.split(".")[:2]))


_PSUTIL = {"virtual_memory": lambda: types.SimpleNamespace(percent=0.0)}
_LOGGER = {"get_logger": lambda *_, **__: logging.getLogger("peer")}
_TRL_NEEDS: dict[str, dict[str, Any]] = {
    "psutil": _PSUTIL,
    "accelerate": {},
    "accelerate.logging": _LOGGER,
    "accelerate.utils": {},
    "accelerate.utils.versions": {"is_torch_version": _at_least},
    "transformers": {"is_torch_npu_available": lambda: False},
}
_TORCHTUNE_NEEDS: dict[str, dict[str, Any]] = {
    "psutil": _PSUTIL,
    "torchao": {"__version__": "0"},
    "torchao.dtypes": {},
    "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
    "torchtune": {},
    "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
    "torchtune.utils": _LOGGER,
}
