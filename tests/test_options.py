"""Every option of the backend is checked at once, and every refusal says what to give instead."""

from __future__ import annotations

import pytest
import torch

import graphoffload
from graphoffload.backend import graphoffload as offload_backend
from graphoffload.errors import GraphOffloadError, MachineError, PolicyError, UsageError
from graphoffload.options import Options, read_compile_options, read_options
from graphoffload.planning.machine import Machine
from graphoffload.planning.policy import KeepAll, OffloadAll, OffloadHidden


def test_defaults():
    options = read_options()
    assert options == Options(policy=OffloadHidden())
    assert (options.compiler, options.partitioner, options.timing, options.inductor) == (
        "inductor",
        "min_cut",
        "roofline",
        (),
    )
    assert read_compile_options(None, None) == options
    assert read_compile_options({}, "default") == options


def test_options_are_read_as_given():
    def on_plan(plan):
        return None

    def partition(*args, **kwargs):
        return None

    options = read_compile_options(
        {
            "policy": KeepAll(),
            "machine": "h200",
            "compiler": "inductor",
            "inductor": {"max_autotune": False},
            "on_plan": on_plan,
            "partitioner": partition,
            "timing": "measured",
        },
        None,
    )
    assert options.policy == KeepAll()
    assert options.machine == Machine.named("h200")
    assert options.inductor == (("max_autotune", False),)
    assert options.on_plan is on_plan
    assert options.partitioner is partition
    assert options.timing == "measured"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"polcy": KeepAll()}, UsageError, "did you mean 'policy'"),
        ({"max_autotune": True}, UsageError, r"options=\{'inductor': \{'max_autotune'"),
        ({"nothing": 1}, UsageError, "known: compiler, inductor, machine, on_plan, partitioner, policy, timing"),
        ({"compiler": "eager"}, UsageError, "give one of 'inductor', 'aot_eager'"),
        ({"compiler": None}, UsageError, "give one of 'inductor', 'aot_eager'"),
        ({"timing": "guess"}, UsageError, "give one of 'roofline', 'measured'"),
        ({"partitioner": "mincut"}, UsageError, "give 'min_cut', 'default' or a partition function"),
        ({"partitioner": None}, UsageError, "give 'min_cut', 'default' or a partition function"),
        ({"on_plan": 3}, UsageError, "a function that takes one Plan"),
        ({"machine": 3}, UsageError, r"give a graphoffload\.Machine or a machine's name"),
        ({"machine": "h2000"}, MachineError, "h2000"),
        ({"policy": OffloadAll}, PolicyError, r"write OffloadAll\(\.\.\.\)"),
        ({"policy": "all"}, PolicyError, r"has no decide\(value, ledger\)"),
        ({"policy": 0.5}, PolicyError, r"has no decide\(value, ledger\)"),
        ({"inductor": 3}, UsageError, "give a dict of Inductor's options"),
        ({"inductor": {"max_autotun": True}}, UsageError, "did you mean 'max_autotune'"),
        ({"inductor": {"custom_partitioner_fn": None}}, UsageError, "graphoffload is itself the partitioner"),
        ({"inductor": {"reorder_for_peak_memory": True}}, UsageError, "knows nothing of copy streams"),
        (
            {"inductor": {"max_autotune": True}, "compiler": "aot_eager"},
            UsageError,
            "have no effect with compiler='aot_eager'",
        ),
        ({"inductor": {"triton.cudagraphs": True}}, UsageError, "CUDA graphs"),
    ],
)
def test_refusals(given, error, said):
    with pytest.raises(error, match=said):
        read_compile_options(given, None)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs_are_refused(mode):
    """Scenario rank 30: CUDA graphs are refused, and the message names what to use."""
    with pytest.raises(UsageError, match="max-autotune-no-cudagraphs"):
        read_compile_options({}, mode)


def test_mode_without_cuda_graphs_is_accepted():
    options = dict(read_compile_options({}, "max-autotune-no-cudagraphs").inductor)
    assert options["max_autotune"] is True


def test_cuda_graphs_asked_for_by_configuration_are_refused():
    with torch._inductor.config.patch({"triton.cudagraphs": True}), pytest.raises(UsageError, match="CUDA graphs"):
        read_options()


def test_cuda_graphs_by_configuration_do_not_concern_aot_eager():
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert read_options(compiler="aot_eager").compiler == "aot_eager"


def test_unknown_mode():
    with pytest.raises(UsageError, match=r"not a mode of torch\.compile"):
        read_compile_options({}, "fastest")


def test_mode_has_no_effect_with_aot_eager():
    with pytest.raises(UsageError, match="no effect"):
        read_compile_options({"compiler": "aot_eager"}, "max-autotune-no-cudagraphs")


def test_inductor_options_override_the_mode():
    options = read_compile_options({"inductor": {"max_autotune": False}}, "max-autotune-no-cudagraphs")
    assert dict(options.inductor)["max_autotune"] is False


def test_backend_checks_at_once():
    with pytest.raises(PolicyError):
        graphoffload.backend(OffloadAll)
    with pytest.raises(UsageError):
        graphoffload.backend(KeepAll(), compiler="nvcc")
    with pytest.raises(TypeError):
        graphoffload.backend(KeepAll(), unknown=1)


def test_a_wrong_option_is_a_clear_error_at_compile_time():
    """The user's fault comes out of torch.compile with its own message, and nothing is left behind."""
    model = torch.nn.Linear(3, 3)
    with pytest.raises(Exception, match="did you mean 'policy'") as raised:
        torch.compile(model, backend=offload_backend, options={"polcy": KeepAll()})(torch.randn(2, 3))
    chain = [raised.value]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    assert any(isinstance(error, GraphOffloadError) for error in chain)
