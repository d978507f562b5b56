"""Every private torch name that graphoffload uses, imported once, each with its reason and the versions that have it.

Nothing else in the package imports from a private torch module (a lint rule keeps it so).
"""

from typing import Any

import torch
from torch._C import _dispatch_keys as dispatch_keys  # what a tensor is, unseen by modes, see kinds; 2.11-2.14
from torch._dynamo import config as dynamo_config  # recompile_limit, see capture; 2.11-2.14
from torch._dynamo.backends.common import aot_autograd as aot_autograd  # the plain-AOT lowering; 2.11-2.14
from torch._dynamo.exc import Unsupported as Unsupported  # what cannot be one graph, see capture; 2.11-2.14
from torch._dynamo.symbolic_convert import InstructionTranslator  # who is being traced, see traced_owner; 2.11-2.14
from torch._functorch import config as functorch_config  # activation_memory_budget, donated_buffer; 2.11-2.14
from torch._functorch._aot_autograd.descriptors import (  # which inputs a graph changes, see split; 2.11-2.14
    InputMutationAOTOutput as InputMutationAOTOutput,
)
from torch._functorch._aot_autograd.descriptors import (  # what an output of forward is, see rewrite; 2.11-2.14
    SavedForBackwardsAOTOutput as SavedForBackwardsAOTOutput,
)
from torch._functorch._aot_autograd.descriptors import (
    SavedForBackwardsNoVcCheckAOTOutput as SavedForBackwardsNoVcCheckAOTOutput,
)
from torch._functorch.partitioners import default_partition as default_partition  # a base partitioner; 2.11-2.14
from torch._functorch.partitioners import (  # a base partitioner; 2.11-2.14
    min_cut_rematerialization_partition as min_cut_rematerialization_partition,
)
from torch._guards import detect_fake_mode as detect_fake_mode  # finds the FakeTensorMode of a graph; 2.11-2.14
from torch._inductor import config as inductor_config  # is triton.cudagraphs on; 2.11-2.14
from torch._inductor import list_mode_options as list_mode_options  # what a mode= means; 2.11-2.14
from torch._inductor import list_options as list_inductor_options  # the names that Inductor knows; 2.11-2.14
from torch._inductor.compile_fx import compile_fx as compile_fx  # the Inductor lowering; 2.11-2.14
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn  # Inductor's seam; 2.11-2.14
from torch._inductor.ir import (
    ExternKernel as ExternKernel,
)  # the buffer that an operator reads, see lowering; 2.11-2.14
from torch._inductor.lowering import fallback_handler as fallback_handler  # call the operator itself; 2.11-2.14
from torch._inductor.lowering import register_lowering as register_lowering  # see lowering; 2.11-2.14
from torch._inductor.scheduler import SchedulerNode as SchedulerNode  # mended in lowering; 2.11-2.14
from torch._inductor.virtualized import V as V  # the graph being lowered, see lowering; 2.11-2.14
from torch._ops import HigherOrderOperator as HigherOrderOperator  # a node's target, see graphs/storage; 2.11-2.14
from torch._ops import OpOverload as OpOverload  # a node's target, see graphs/storage; 2.11-2.14
from torch._ops import OpOverloadPacket as OpOverloadPacket  # a node's target in graphs not from AOT; 2.11-2.14
from torch._subclasses.fake_tensor import (  # what has no answer without real data, see explain; 2.11-2.14
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # the type of node.meta["val"]; 2.11-2.14
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # explain() without memory; 2.11-2.14
from torch.cuda import _sleep as sleep_on_device  # delays in tests of copy streams; 2.11-2.14
from torch.fx.proxy import GraphAppendingTracer as GraphAppendingTracer  # arithmetic as nodes, see symbols; 2.11-2.14
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef  # the ledger; 2.11-2.14
from torch.nested._internal.nested_tensor import NestedTensor as JaggedTensor  # a kind that moves, see kinds; 2.11-2.14
from torch.utils import _pytree as pytree  # the leaves of inputs and outputs; 2.11-2.14
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # see remembered; 2.11-2.14
from torch.utils._python_dispatch import (  # our copies are not the program's, see parcels; 2.11-2.14
    _disable_current_modes as disable_dispatch_modes,
)
from torch.utils._python_dispatch import (  # tensor kinds that are not bytes, see immovable; 2.11-2.14
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._sympy.interp import sympy_interp as sympy_interp  # arithmetic as nodes, see symbols; 2.11-2.14
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis  # the same; 2.11-2.14
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy  # public; the *_CPU_OFFLOAD members; 2.11-2.14

DTensor: Any = None
AsyncCollectiveTensor: Any = None
if torch.distributed.is_available():
    from torch.distributed._functional_collectives import (  # a local tensor under way, see kinds; 2.11-2.14
        AsyncCollectiveTensor as AsyncCollectiveTensor,
    )

    # Public, and here for the condition; kinds reads its `_local_tensor` and `_spec`; 2.11-2.14.
    from torch.distributed.tensor import DTensor as DTensor

MEMORY_BUDGET_ANNOTATION_KEY = "_region_activation_memory_budget"
"""The key in node.meta["custom"] for torch.autograd.graph.region_activation_memory_budget; 2.13 on (torch.fx.traceback)."""

__all__ = [
    "MEMORY_BUDGET_ANNOTATION_KEY",
    "AsyncCollectiveTensor",
    "CheckpointPolicy",
    "CustomPartitionerFn",
    "DTensor",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "ExternKernel",
    "FakeTensor",
    "FakeTensorMode",
    "GraphAppendingTracer",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "JaggedTensor",
    "OpOverload",
    "OpOverloadPacket",
    "PythonReferenceAnalysis",
    "SavedForBackwardsAOTOutput",
    "SavedForBackwardsNoVcCheckAOTOutput",
    "SchedulerNode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "Unsupported",
    "aot_autograd",
    "compile_fx",
    "current_inductor_graph",
    "default_partition",
    "detect_fake_mode",
    "disable_dispatch_modes",
    "dispatch_bits",
    "dispatch_keys",
    "dispatch_modes_are_active",
    "dynamo_config",
    "fallback_handler",
    "functorch_config",
    "inductor_config",
    "is_traceable_wrapper_subclass",
    "list_inductor_options",
    "list_mode_options",
    "min_cut_rematerialization_partition",
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "pytree",
    "register_lowering",
    "saved_tensors_hooks_are_active",
    "sharing_version_counters",
    "sleep_on_device",
    "storage_use_count",
    "sympy_interp",
    "top_saved_tensors_hooks",
    "traced_owner",
    "tracing_modes_are_active",
]


def traced_owner() -> tuple[Any | None, Any] | None:
    """Return (module or None, code object) of the frame that Dynamo traces in this thread; None when it traces nothing."""
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # no trace is under way, so there is no current translator
        return None
    root = output.root_tx
    code = root.f_code
    # A module of torch's own is called through a wrapper of Dynamo's, which names it `fn`.
    first = root.f_locals.get(code.co_varnames[0] if code.co_argcount else "fn")
    return (first if isinstance(first, torch.nn.Module) else None), code


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the (pack, unpack) hooks that this thread's saved tensors are shown to: nothing public tells; 2.11-2.14."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def saved_tensors_hooks_are_active() -> bool:
    """Say whether this thread shows saved tensors to hooks."""
    return top_saved_tensors_hooks() is not None


def push_saved_tensors_hooks(pack: Any, unpack: Any) -> None:
    """Put hooks back that were popped; 2.11-2.14."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensors_hooks() -> None:
    """Take the top hooks away, see `keep`: the public context manager can only leave what it entered; 2.11-2.14."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def storage_use_count(address: int) -> int:
    """Count the strong references to a storage (`_cdata`), see the virtual device; 2.11-2.14."""
    return int(torch._C._storage_Use_Count(address))


def dispatch_bits(*names: str) -> int:
    """Return the bits that the named dispatch keys set in `dispatch_keys(tensor).raw_repr()`, see kinds; 2.11-2.14."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)).raw_repr()
    return bits


def dispatch_modes_are_active() -> bool:
    """Say whether a TorchDispatchMode would see what we do; 2.11-2.14."""
    return bool(torch._C._len_torch_dispatch_stack())


def tracing_modes_are_active() -> bool:
    """Say whether operators run on fake, functional or proxy tensors here, as the compiler makes them; 2.11-2.14."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.FUNCTIONAL, keys.PROXY))


def sharing_version_counters() -> Any:
    """Let `detach` inside a TorchDispatchMode share its version counter, as it does elsewhere, see remembered; 2.11-2.14."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def current_inductor_graph() -> Any:
    """Return the graph that Inductor is lowering in this thread."""
    return V.graph
