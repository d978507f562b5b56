"""Laws of kinds: what is plain, what can be moved by a plain part, and that the way back gives the same tensor."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from tensor_kinds import (
    KEPT,
    PLAIN,
    Tagged,
    bits,
    distributed,
    jagged,
    jagged_with_holes,
    looks,
    mesh_of_one,
    numbers,
    scaled,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode

from graphoffload.runtime.kinds import Body, body_of, is_plain


@pytest.fixture(scope="module")
def mesh():
    with mesh_of_one() as mesh:
        yield mesh


def moved(main: torch.Tensor) -> torch.Tensor:
    """Return a copy of a plain tensor's bytes, laid out and marked alike."""
    memory = main.untyped_storage().clone()
    copy = torch.empty(0, dtype=main.dtype).set_(memory, main.storage_offset(), main.size(), main.stride())
    copy = copy.conj() if main.is_conj() else copy
    return torch._neg_view(copy) if main.is_neg() else copy


def body(tensor: torch.Tensor) -> Body:
    found = body_of(tensor)
    assert isinstance(found, Body), found
    return found


def back(tensor: torch.Tensor) -> torch.Tensor:
    """Return what comes back of a tensor that is moved by a plain part."""
    found = body(tensor)
    assert is_plain(found.main)
    copy = moved(found.main)
    return copy if found.rebuild is None else found.rebuild(copy)


class TestPlain:
    @pytest.mark.parametrize("name", PLAIN)
    def test_strided_memory_is_plain_and_has_a_storage(self, name):
        tensor = PLAIN[name]()
        assert is_plain(tensor)
        tensor.untyped_storage().nbytes()

    @pytest.mark.parametrize("name", PLAIN)
    def test_the_makers_tell_what_a_copy_of_bytes_keeps(self, name):
        # Of the test's own instruments: a copy looks the same, and another value would not.
        tensor = PLAIN[name]().detach()
        assert looks(moved(tensor)) == looks(tensor)

    def test_what_autograd_knows_of_a_tensor_does_not_matter(self):
        leaf = numbers(3).requires_grad_()
        with torch.inference_mode():
            outside = numbers(3)
        assert is_plain(leaf)
        assert is_plain(leaf * 2)
        assert is_plain((leaf * 2).view(3))
        assert is_plain(outside)

    @pytest.mark.parametrize("name", KEPT)
    def test_other_kinds_are_not_plain_and_say_why_they_stay(self, name):
        make, reason = KEPT[name]
        tensor = make()
        assert not is_plain(tensor)
        assert body_of(tensor) == reason

    def test_a_fake_tensor_stays(self):
        with FakeTensorMode():
            tensor = torch.empty(3)
        assert not is_plain(tensor)
        assert body_of(tensor) == "it is a fake tensor, which has no memory"

    @pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
    def test_a_tensor_inside_a_transform_of_torch_func_stays(self, transform):
        seen = []

        def look(value):
            seen.append((is_plain(value), body_of(value)))
            return (value * value).sum()

        value = numbers(3, 3)
        if transform == "jvp":
            torch.func.jvp(look, (value,), (value,))
        else:
            getattr(torch.func, transform)(look)(value)
        ((plain, reason),) = seen
        assert not plain
        assert isinstance(reason, str)
        assert reason.startswith("it is wrapped by")

    def test_a_mode_of_the_program_is_not_asked(self):
        class Refusing(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                raise AssertionError(f"{func} was called")

        plain, wrapper = numbers(3), scaled()
        with Refusing():
            assert is_plain(plain)
            assert not is_plain(wrapper)

    def test_of_a_subclass_only_the_type_is_read(self):
        class Touchy(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                raise AssertionError(f"{func} was called")

        tensor = torch.Tensor._make_subclass(Touchy, numbers(3))
        assert not is_plain(tensor)
        assert body_of(tensor) == "it is a tensor subclass (Touchy) that graphoffload does not know"

    def test_a_parameter_of_a_subclass_stays(self):
        assert isinstance(body_of(torch.nn.Parameter(numbers(3).as_subclass(Tagged))), str)


class TestDistributed:
    @pytest.mark.parametrize(
        "name", ["contiguous", "transposed", "padded at an offset", "complex", "conjugate", "bool"]
    )
    def test_it_moves_by_its_local_tensor(self, mesh, name):
        tensor = distributed(mesh, PLAIN[name]())
        assert not is_plain(tensor)
        assert body(tensor).main.untyped_storage().data_ptr() == tensor._local_tensor.untyped_storage().data_ptr()
        with CommDebugMode() as communication:
            again = back(tensor)
        assert communication.get_total_counts() == 0
        assert type(again) is DTensor
        assert again._spec == tensor._spec
        assert again._spec.shard_order == tensor._spec.shard_order
        assert (again.size(), again.stride(), again.dtype) == (tensor.size(), tensor.stride(), tensor.dtype)
        assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert looks(again._local_tensor) == looks(tensor._local_tensor)

    def test_a_conjugate_taken_of_it_moves(self, mesh):
        tensor = distributed(mesh, PLAIN["complex"]()).conj()
        again = back(tensor)
        assert again.is_conj()
        assert looks(again._local_tensor) == looks(tensor._local_tensor)

    def test_what_comes_back_asks_for_no_gradient(self, mesh):
        leaf = distributed(mesh).requires_grad_()
        parameter = torch.nn.Parameter(distributed(mesh))
        for tensor in (leaf, leaf * 2, parameter):
            found = body(tensor)
            assert not found.main.requires_grad
            assert not back(tensor).requires_grad
            assert tensor.requires_grad

    def test_nothing_that_is_held_keeps_its_memory(self, mesh):
        tensor = distributed(mesh)
        found = body(tensor)
        memory = weakref.ref(tensor._local_tensor)
        rebuild = found.rebuild
        del tensor, found
        gc.collect()
        assert memory() is None
        assert rebuild is not None
        assert rebuild(numbers(4, 6)).size() == (4, 6)

    def test_a_collective_under_way_is_waited_for(self, mesh):
        under_way = collectives.all_reduce(numbers(4, 6), "sum", mesh)
        assert isinstance(under_way, collectives.AsyncCollectiveTensor)
        assert bits(back(under_way)) == bits(numbers(4, 6))
        tensor = DTensor(under_way, DTensor.from_local(numbers(4, 6), mesh, [Replicate()])._spec, requires_grad=False)
        again = back(tensor)
        assert type(again) is DTensor
        assert is_plain(again._local_tensor)
        assert bits(again._local_tensor) == bits(numbers(4, 6))

    def test_an_unknown_local_tensor_stays_with_its_reason(self, mesh):
        tensor = DTensor(scaled(), distributed(mesh, numbers(8, 8))._spec, requires_grad=False)
        assert (
            body_of(tensor) == "of its local tensor: it is a tensor subclass (Scaled) that graphoffload does not know"
        )


class TestJagged:
    @pytest.mark.parametrize(
        "make",
        [jagged, lambda: jagged().transpose(1, 2), lambda: jagged().narrow(2, 2, 4), jagged_with_holes],
        ids=["rows", "transposed", "sliced", "with holes"],
    )
    def test_it_moves_by_its_values_and_keeps_its_ragged_size(self, make):
        tensor = make()
        assert not is_plain(tensor)
        again = back(tensor)
        assert type(again) is type(tensor)
        assert again.layout is torch.jagged
        # Sizes of two ragged tensors are equal only where torch knows them to be the same.
        assert (again.size(), again.stride()) == (tensor.size(), tensor.stride())
        assert again.offsets() is tensor.offsets()
        assert again.lengths() is tensor.lengths()
        assert again._ragged_idx == tensor._ragged_idx
        assert looks(again._values) == looks(tensor._values)

    def test_known_sequence_lengths_stay_known(self):
        tensor = jagged()
        assert (tensor._get_max_seqlen(), tensor._get_min_seqlen()) == (4, 1)
        again = back(tensor)
        assert again._max_seqlen_tensor is tensor._max_seqlen_tensor is not None
        assert again._min_seqlen_tensor is tensor._min_seqlen_tensor is not None

    def test_what_comes_back_goes_into_one_operator_with_the_original(self):
        tensor = jagged()
        total = back(tensor) + tensor
        assert bits(total.values()) == bits(tensor.values() * 2)

    def test_what_comes_back_asks_for_no_gradient(self):
        tensor = jagged(requires_grad=True)
        for one in (tensor, tensor * 2):
            assert not body(one).main.requires_grad
            assert not back(one).requires_grad

    def test_nothing_that_is_held_keeps_its_memory(self):
        tensor = jagged()
        found = body(tensor)
        memory = weakref.ref(tensor._values)
        rebuild = found.rebuild
        del tensor, found
        gc.collect()
        assert memory() is None
        assert rebuild is not None

    def test_unknown_values_stay_with_their_reason(self):
        values = torch.nested.nested_tensor_from_jagged(numbers(8, 8), torch.tensor([0, 3, 8]))
        odd = type(values)(scaled(), values.offsets())
        assert body_of(odd) == "of its values: it is a tensor subclass (Scaled) that graphoffload does not know"
