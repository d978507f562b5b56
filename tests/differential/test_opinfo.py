"""Every differentiable operator that torch describes, forward and backward with everything offloaded, equal to the bit.

torch's own tests run on `op_db`: a description of each operator with sample inputs. Here each operator runs on its samples
plainly and twice under the eager path on the virtual device: the first step learns, the second follows what was learnt. The
ordinary profile takes the samples with the most bytes (torch lists empty and scalar ones first, which have little to move);
the long one takes all samples, and a second dtype, complex where there is one, with lazy conjugates too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import graphoffload
from graphoffload.errors import GraphOffloadWarning
from graphoffload.planning.machine import Machine
from graphoffload.planning.policy import OffloadAll
from graphoffload.runtime.stats import SavedTensorsStats
from graphoffload.testing import check_log, virtual_device

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
SAMPLES = None if LONG else 2
STEPS = 2
EVERYTHING = OffloadAll(min_nbytes=0)
VIRTUAL = Machine.named("virtual")

DTYPES = (torch.float64, torch.float32, torch.complex64)
"""The first that an operator's backward takes is what it runs with; in the long profile it also runs with the last."""

EXCLUDED = {
    "linalg_lstsq": "two plain runs differ in the last bits: LAPACK's driver is not deterministic",
    "linalg_lstsq_grad_oriented": "the same",
    "nn_functional_rrelu": "autograd saves its noise before the operator has filled it, so no hook that copies can be right",
    "torch_ops_aten__flash_attention_forward": "CUDA only",
    "torch_ops_aten__efficient_attention_forward": "CUDA only",
    "nn_functional_batch_norm_without_cudnn": "CUDA only; batch_norm itself is here",
    "nn_functional_one_hot": "has no gradient: its one output is integer",
}

NOT_IN_PLACE = {
    "acosh": "autograd has no derivative of the in-place form",
    "asinh": "the same",
    "atanh": "the same",
    "as_strided_partial_views": "looks beyond its input, at the rest of a storage that a copy does not have",
}

NOT_OF_COPIES = {"as_strided_partial_views": NOT_IN_PLACE["as_strided_partial_views"]}

KEPT = {
    "sparse_sampled_addmm": "its layout is sparse",
    "sparse_mm_reduce": "its layout is sparse",
    "to_sparse": "its layout is sparse",
}
"""The operators of which the eager path keeps something, and for which reasons; of all others every byte must move."""


OPERATORS = [op for op in op_db if op.supports_autograd and op.formatted_name not in EXCLUDED]
IN_PLACE = [op for op in OPERATORS if op.inplace_variant is not None and op.formatted_name not in NOT_IN_PLACE]

# torch's samples use what torch itself deprecates, and kinds that it calls beta.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


# --- one operator ------------------------------------------------------------------------------------------------------


Call = Callable[[OpInfo, SampleInput], Any]


def samples_of(op: OpInfo, dtype: torch.dtype, call: Call) -> list[SampleInput]:
    """Make the samples, always the same ones: those with the most bytes first where not all are taken."""
    seed(0)
    # Not `op.sample_inputs`, which looks through the whole stack for the test that called it, and seeds anew each time.
    samples = list(op.sample_inputs_func(op, "cpu", dtype, True))
    if LONG and dtype.is_complex and op.test_conjugated_samples:
        samples += [conjugated(sample) for sample in op.sample_inputs_func(op, "cpu", dtype, True)]
    if call is in_place:
        samples = [sample for sample in samples if fits_in_place(op, sample)]
    if SAMPLES is not None:
        samples = sorted(samples, key=nbytes_of, reverse=True)[:SAMPLES]
    return samples


def seed(number: int) -> None:
    # Not `torch.manual_seed`, which on a machine without accelerators keeps a note, with a stack, for each of their kinds.
    torch.default_generator.manual_seed(number)


def conjugated(sample: SampleInput) -> SampleInput:
    """Make the input a lazy conjugate, whose bytes are not its values."""
    if isinstance(sample.input, torch.Tensor) and sample.input.layout is torch.strided:
        sample.input = sample.input.detach().conj().requires_grad_(sample.input.requires_grad)
    return sample


def nbytes_of(sample: SampleInput) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors_in((sample.input, sample.args, sample.kwargs)))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def as_it_is(op: OpInfo, sample: SampleInput) -> Any:
    return op(sample.input, *sample.args, **sample.kwargs)


def of_copies(op: OpInfo, sample: SampleInput) -> Any:
    """Run on copies that nobody but autograd has afterwards, so that what leaves the device is really gone there."""

    def copied(leaf: Any) -> Any:
        plain = isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout is torch.strided
        return leaf.clone() if plain else leaf

    return op(*pytree.tree_map(copied, (sample.input, *sample.args)), **pytree.tree_map(copied, sample.kwargs))


def in_place(op: OpInfo, sample: SampleInput) -> Any:
    """Change a copy of the input, since a leaf may not be changed; nobody but autograd has the copy afterwards."""
    return op.inplace_variant(sample.input.clone(), *sample.args, **sample.kwargs)


def fits_in_place(op: OpInfo, sample: SampleInput) -> bool:
    """Say whether the result has the shape and dtype of the input: in place it cannot be another."""
    seed(1)
    with torch.no_grad():
        result = as_it_is(op, sample)
    return (result.shape, result.dtype) == (sample.input.shape, sample.input.dtype)


def train(op: OpInfo, sample: SampleInput, call: Call) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return copies of the outputs, and the gradients of all inputs for random gradients of the outputs."""
    seed(1)
    result = call(op, sample)
    if sample.output_process_fn_grad is not None:
        # Makes the part of the result that has a well-defined gradient, such as the absolute values of eigenvectors.
        result = sample.output_process_fn_grad(result)
    outputs = tensors_in(result)
    copies = [output.detach().clone() for output in outputs]
    trained = [output for output in outputs if output.requires_grad]
    leaves = [leaf for leaf in tensors_in((sample.input, sample.args, sample.kwargs)) if leaf.requires_grad]
    seeds = [random_like(output) for output in trained]
    del result, outputs
    if not trained:
        return copies, []
    return copies, list(torch.autograd.grad(trained, leaves, seeds, allow_unused=True))


def random_like(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, dtype=output.dtype) if output.layout is torch.strided else torch.ones_like(output)


def assert_same(have: list[torch.Tensor | None], want: list[torch.Tensor | None], what: str) -> None:
    assert len(have) == len(want)
    for index, (one, other) in enumerate(zip(have, want, strict=True)):
        assert (one is None) == (other is None), f"{what} {index} is there in one run only"
        if one is not None and other is not None:
            assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout), f"{what} {index}"
            if one.layout is torch.strided:
                assert one.stride() == other.stride(), f"{what} {index}"
            assert all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True)), f"{what} {index}"


def bits(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the contents as bytes: NaNs and signed zeros count too."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return bits(tensor.indices()) + bits(tensor.values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return bits(tensor.crow_indices()) + bits(tensor.col_indices()) + bits(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return bits(tensor.ccol_indices()) + bits(tensor.row_indices()) + bits(tensor.values())
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    return [flat.view(torch.uint8)]


# --- the sweep ---------------------------------------------------------------------------------------------------------


def dtypes_of(op: OpInfo) -> list[torch.dtype]:
    supported = op.supported_backward_dtypes("cpu")
    found = [dtype for dtype in DTYPES if dtype in supported]
    return list(dict.fromkeys((found[0], found[-1]))) if LONG else found[:1]


def named(op: OpInfo) -> str:
    return str(op.formatted_name)


@pytest.mark.parametrize("op", OPERATORS, ids=named)
def test_operator(op):
    for dtype in dtypes_of(op):
        sweep(op, dtype, as_it_is)
        if named(op) not in NOT_OF_COPIES:
            sweep(op, dtype, of_copies)


@pytest.mark.parametrize("op", IN_PLACE, ids=named)
def test_operator_in_place(op):
    for dtype in dtypes_of(op):
        sweep(op, dtype, in_place)


def sweep(op: OpInfo, dtype: torch.dtype, call: Call) -> None:
    """Compare each sample's plain run with two steps of ours, and see that everything moved and nothing is left."""
    with virtual_device() as device, warnings.catch_warnings():
        # Many operators save nothing, or only tensors without elements.
        warnings.simplefilter("ignore", GraphOffloadWarning)
        saving = graphoffload.saved_tensors(EVERYTHING, machine=VIRTUAL)
        for sample in samples_of(op, dtype, call):
            outputs, gradients = train(op, sample, call)
            for step in range(STEPS):
                with saving:
                    ours = train(op, sample, call)
                assert_same(ours[0], outputs, f"step {step}: output")
                assert_same(ours[1], gradients, f"step {step}: gradient")
        check_log(device)
        assert_all_moved(op, saving.stats())
        assert device.stats().slots == 0


def assert_all_moved(op: OpInfo, stats: SavedTensorsStats) -> None:
    reasons = {reason for reason, nbytes in stats.kept_nbytes_by_reason.items() if reason != "it has no bytes"}
    if named(op) in KEPT:
        assert all(KEPT[named(op)] in reason for reason in reasons), stats
    else:
        assert not reasons, stats
        assert stats.moved or stats.packed == 0 or stats.kept_nbytes_by_reason, stats
