"""The main job, small: train a Llama on the standard library's own source, with offloading and without, side by side.

Three runs from the same seeds: the policy asked for; the same backend with `KeepAll` (the same graphs, nothing moved;
on the virtual device its ledger gives the peak to compare with); and torch's own compiler without graphoffload. Losses
of every step and all trained parameters must be equal to the bit. On the CPU the virtual device takes the place of an
accelerator.
"""

from __future__ import annotations

import contextlib
import gc
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import graphoffload
from graphoffload.errors import UsageError
from graphoffload.planning.plan import Plan
from graphoffload.planning.policy import KeepAll, Policy
from graphoffload.testing import virtual_device

VOCABULARY = 256
"""One token a byte."""


@dataclass(frozen=True)
class Settings:
    """Hold what a demo run is made of; sizes are tokens, layers and features."""

    policy: Policy
    steps: int = 30
    layers: int = 4
    hidden: int = 128
    batch: int = 8
    length: int = 128
    device: str = "cpu"
    compiler: str = "aot_eager"
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """Hold what one training run gave: a loss a step, its trained parameters, its plans, its peak and its times."""

    name: str
    losses: tuple[float, ...]
    parameters: dict[str, torch.Tensor]
    plans: tuple[Plan, ...]
    peak_nbytes: int | None
    first_step_seconds: float
    step_seconds: float


def standard_library_text(limit: int) -> bytes:
    """Read the standard library's own source files, in order of name, up to `limit` bytes.

    Raises `UsageError` when this Python has come without its sources.
    """
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= limit:
            return bytes(text[:limit])
    if not text:
        raise UsageError("this Python's standard library has no source files to train on")
    return bytes(text)


def batches(text: bytes, settings: Settings) -> list[torch.Tensor]:
    """Cut one batch a step out of the text, at random places; the same settings give the same batches."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.randint(len(tokens) - settings.length, (settings.steps, settings.batch), generator=generator)
    window = torch.arange(settings.length)
    return list(tokens[starts[..., None] + window].to(settings.device))


def build_model(settings: Settings) -> torch.nn.Module:
    """Build the Llama with random weights, every second layer an activation checkpoint.

    Raises `UsageError` when transformers is missing.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise UsageError("the demo needs transformers: pip install 'graphoffload[demo]'") from error
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=settings.length,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model: torch.nn.Module = LlamaForCausalLM(config).to(settings.device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    for layer in model.model.layers[::2]:  # type: ignore[union-attr, index]
        layer.gradient_checkpointing = False
    return model


def run_demo(settings: Settings, say: Callable[[str], None]) -> tuple[Run, Run, Run]:
    """Train three times from the same seeds: with the policy, with everything kept, and without graphoffload."""
    data = batches(standard_library_text(limit=2_000_000), settings)
    with _deterministic(settings.device), _threads(1 if settings.device == "cpu" else torch.get_num_threads()):
        offloaded = _train("graphoffload", settings, data, policy=settings.policy, say=say)
        kept = _train("all kept", settings, data, policy=KeepAll(), say=say)
        plain = _train(f"plain {settings.compiler}", settings, data, policy=None, say=say)
    return offloaded, kept, plain


def same_results(runs: Sequence[Run]) -> bool:
    """Tell whether all runs gave the same losses and the same trained parameters, to the bit."""
    first, *others = runs
    return all(
        run.losses == first.losses
        and run.parameters.keys() == first.parameters.keys()
        and all(torch.equal(run.parameters[name], tensor) for name, tensor in first.parameters.items())
        for run in others
    )


def _train(
    name: str, settings: Settings, data: Sequence[torch.Tensor], *, policy: Policy | None, say: Callable[[str], None]
) -> Run:
    """Train once; `policy=None` is torch's own compiler. A compiled graph of an earlier run is never reused."""
    torch.compiler.reset()
    plans: list[Plan] = []
    model = build_model(settings)
    with _measured(settings, watch=policy is not None) as peak:
        compiled = _compile(model, settings, policy=policy, on_plan=plans.append)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses: list[float] = []
        seconds: list[float] = []
        for tokens in data:
            begin = time.perf_counter()
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
            say(f"{name}: step {len(losses)}/{len(data)}, loss {losses[-1]:.4f}, {seconds[-1]:.2f} s")
        peak_nbytes = peak()
    parameters = {key: tensor.detach().cpu() for key, tensor in model.named_parameters()}
    rest = sorted(seconds[1:]) or seconds
    return Run(name, tuple(losses), parameters, tuple(plans), peak_nbytes, seconds[0], rest[len(rest) // 2])


def _compile(
    model: torch.nn.Module, settings: Settings, *, policy: Policy | None, on_plan: Callable[[Plan], None]
) -> Callable[..., Any]:
    if policy is None:
        return torch.compile(model, backend=settings.compiler)
    options: dict[str, Any] = {"policy": policy, "compiler": settings.compiler, "on_plan": on_plan}
    if "graphoffload" in torch.compiler.list_backends():
        return torch.compile(model, backend="graphoffload", options=options)
    # Run from a checkout that is not installed: no entry point, so torch does not know the name of this function.
    return torch.compile(model, backend=graphoffload.backend(policy, compiler=settings.compiler, on_plan=on_plan))


@contextlib.contextmanager
def _measured(settings: Settings, *, watch: bool) -> Iterator[Callable[[], int | None]]:
    """Yield a function that gives the peak of device memory: of the ledger on the CPU, of the allocator elsewhere."""
    if settings.device != "cpu":
        gc.collect()  # what an earlier run left in reference cycles must not count for this one
        torch.accelerator.reset_peak_memory_stats()
        yield torch.accelerator.max_memory_allocated
    elif watch:
        with virtual_device(recording=False) as device:
            yield lambda: device.peak_nbytes
    else:
        yield lambda: None


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads: the demo's matrices are too small to share, and waiting threads keep cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """Switch deterministic algorithms on for an accelerator: embedding's backward differs from run to run without."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or device != "cpu", warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
