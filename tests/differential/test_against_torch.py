"""Differential tests: the same training step with everything offloaded and by torch alone, equal to the bit."""

from __future__ import annotations

import pytest
import torch
from requirements import needs_cpp_compiler
from subjects import BY_NAME, SUBJECTS, Subject
from training import Compiler, Outcome, assert_same_bits, is_finite, train_step

from graphoffload.planning.policy import KeepAll, OffloadAll, Policy
from graphoffload.testing import check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
STEPS = 2


def by_torch(subject: Subject, backend: str | None, partition: object = None) -> list[Outcome]:
    torch._dynamo.reset()
    module, inputs = subject.module(), subject.inputs()
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    return [train_step(run, inputs, module=module, seed=step) for step in range(STEPS)]


def by_us(subject: Subject, policy: Policy, compiler: str, **options: object) -> list[Outcome]:
    compile_ = Compiler(policy, compiler=compiler, options=options)
    with virtual_device() as device:
        module, inputs = subject.module(), subject.inputs()
        run = compile_(module)
        results = [train_step(run, inputs, module=module, seed=step) for step in range(STEPS)]
        check_log(device)
        assert bool(compile_.moved) == (policy == EVERYTHING)
        assert device.stats().offloads == STEPS * compile_.moved
    return results


def assert_all_same(have: list[Outcome], want: list[Outcome]) -> None:
    """Compare step by step: some faults are wrong only in the first step, others only in a later one."""
    for one, other in zip(have, want, strict=True):
        assert is_finite(other)
        assert_same_bits(one, other)


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
@pytest.mark.parametrize("subject", [one for one in SUBJECTS if not one.random], ids=str)
def test_against_eager(subject, partitioner):
    want = by_torch(subject, None)
    assert_all_same(by_us(subject, EVERYTHING, "aot_eager", partitioner=partitioner), want)


@pytest.mark.parametrize("name", ["views", "convolutional", "decoder with dropout", "decoder with dropout in regions"])
def test_against_plain_aot(name):
    """torch's own aot_eager splits by min-cut too, so random operators draw the same numbers."""
    subject = BY_NAME[name]
    want = by_torch(subject, "aot_eager")
    assert_all_same(by_us(subject, EVERYTHING, "aot_eager"), want)
    assert_all_same(by_us(subject, KeepAll(), "aot_eager"), want)


@needs_cpp_compiler
@pytest.mark.parametrize("name", ["views", "convolutional", "decoder with dropout", "decoder with dropout in regions"])
def test_against_plain_inductor(name):
    subject = BY_NAME[name]
    want = by_torch(subject, "inductor")
    assert_all_same(by_us(subject, EVERYTHING, "inductor"), want)
