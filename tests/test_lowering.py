"""Lowering: what the downstream compiler makes of a rewritten pair, and every way of calling torch.compile."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from requirements import needs_cpp_compiler
from subjects import BY_NAME, Block, Decoder, Mlp
from torch import fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from training import (
    Compiler,
    assert_close,
    assert_same_bits,
    assert_trains_as_eager,
    fresh,
    fresh_inputs,
    outcome,
    train_step,
)

import graphoffload
from graphoffload.backend import OffloadPartitioner, lower
from graphoffload.options import read_options
from graphoffload.planning.plan import Plan
from graphoffload.planning.policy import KeepAll, OffloadAll, OffloadBytes
from graphoffload.runtime.ops import OFFLOAD, READY, RELEASE, RELOAD
from graphoffload.testing import check_log, virtual_device

EVERYTHING = OffloadAll(min_nbytes=0)
OURS = {OFFLOAD: "offload", RELEASE: "release", RELOAD: "reload", READY: "ready"}


@pytest.fixture
def device():
    torch._dynamo.reset()
    with virtual_device() as device:
        yield device
        check_log(device)
    torch._dynamo.reset()


def rows(seed=0, count=4):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


# --- Inductor's output code ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Describe one of our operators where it stands: which, of which storage, and the line."""

    operator: str
    storage: str
    line: int = -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and (self.operator, self.storage) == (other.operator, other.storage)

    __hash__ = None  # type: ignore[assignment]


def calls_in_graph(graph: fx.Graph) -> list[Call]:
    """List our operators in a graph, in order; slots are told by the names of their nodes."""
    found = []
    for node in graph.nodes:
        if node.target is OFFLOAD:
            found.append(Call("offload", node.name))
        elif node.target is RELEASE:
            found.append(Call("release", node.args[0].name))
        elif node.target is RELOAD:
            found.append(Call("reload", node.args[0].name))
        elif node.target is READY:
            found.append(Call("ready", node.args[1].name))
    return found


@dataclass
class Code:
    """Read Inductor's output code of one half: its lines, and which buffer is which slot."""

    lines: list[str]

    def __init__(self, text: str) -> None:
        body = text[text.index("def call(self, args):") :]
        self.lines = [line.strip() for line in body[: body.index("return (")].splitlines()]

    def calls(self, slots: dict[str, str]) -> list[Call]:
        """List our operators in order. `slots` maps the storage that an offload names to the name of its slot's node."""
        names: dict[str, str] = {}
        found = []
        for number, line in enumerate(self.lines):
            alias = re.fullmatch(r"(\w+) = (\w+)(?:;.*)?", line)
            if alias and alias[2] in names:
                names[alias[1]] = names[alias[2]]
            if match := re.search(r"(\w+) = torch\.ops\.graphoffload\.offload\.default\(.*, '(\w+)'\)", line):
                names[match[1]] = slots[match[2]]
                found.append(Call("offload", slots[match[2]], number))
            elif match := re.search(r"graphoffload\.release\.default\((?:reinterpret_tensor\()?(\w+)", line):
                found.append(Call("release", names[match[1]], number))
            elif match := re.search(r"graphoffload\.reload\.default\((?:reinterpret_tensor\()?(\w+)", line):
                found.append(Call("reload", match[1], number))
            elif match := re.search(
                r"graphoffload\.ready\.default\((?:reinterpret_tensor\()?(\w+)\b.*?, (?:reinterpret_tensor\()?(\w+_host\w*)",
                line,
            ):
                found.append(Call("ready", match[2], number))
        return found

    def reads_before_ready(self) -> list[str]:
        """List the lines that use what a reload returned before its ready, other than to name, check or drop it."""
        loading: set[str] = set()
        wrong = []
        for line in self.lines:
            alias = re.fullmatch(r"(\w+) = (\w+)(?:;.*)?", line)
            if match := re.match(r"(\w+) = torch\.ops\.graphoffload\.reload", line):
                loading.add(match[1])
            elif match := re.search(r"graphoffload\.ready\.default\((?:reinterpret_tensor\()?(\w+)", line):
                loading.discard(match[1])
            elif alias and alias[2] in loading:
                loading.discard(alias[2])
                loading.add(alias[1])
            elif not line.startswith(("#", "assert_", "del ")):
                wrong += [line for name in loading if re.search(rf"\b{name}\b", line)]
        return wrong


@dataclass(frozen=True)
class Listing:
    """Hold a rewritten pair and what Inductor made of each half."""

    forward: fx.Graph
    backward: fx.Graph
    plan: Plan
    forward_code: Code
    backward_code: Code


@pytest.fixture(scope="module")
def listing():
    """Train one step of a decoder under Inductor, and read its output code."""
    pairs: list[tuple[fx.GraphModule, fx.GraphModule, Plan]] = []
    options = read_options(policy=EVERYTHING, compiler="inductor", machine="virtual")

    def backend(gm, inputs):
        return lower(gm, inputs, options, OffloadPartitioner(options, on_pair=lambda *pair: pairs.append(pair)))

    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Decoder(depth=1, dropout=0.3)
    run = torch.compile(module, backend=backend, fullgraph=True)
    with virtual_device(), fresh_cache():
        _, code = run_and_get_code(lambda: train_step(run, BY_NAME["decoder"].inputs(), module=module))
    ((forward, backward, plan),) = pairs
    return Listing(forward.graph, backward.graph, plan, *map(Code, code))


@needs_cpp_compiler
def test_inductor_keeps_every_operator_in_order(listing):
    """Offload, release, reload and ready stand in Inductor's output code as often and in the order as in the pair."""
    slots = {node.args[1]: node.name for node in listing.forward.nodes if node.target is OFFLOAD}
    assert set(slots) == {transfer.storage for transfer in listing.plan.transfers}
    assert listing.forward_code.calls(slots) == calls_in_graph(listing.forward)
    assert listing.backward_code.calls(slots) == calls_in_graph(listing.backward)
    assert len(calls_in_graph(listing.backward)) == 2 * len(listing.plan.transfers) > 4


@needs_cpp_compiler
def test_inductor_reads_nothing_before_it_is_ready(listing):
    """A read that Inductor moves in front of the wait would read what the copy has not yet written."""
    assert listing.backward_code.reads_before_ready() == []


@needs_cpp_compiler
def test_inductor_computes_between_reload_and_ready(listing):
    """Reloads stay early: somewhere a kernel or a product runs between a reload and its ready."""
    started = {}
    overlapped = 0
    for call in listing.backward_code.calls({}):
        if call.operator == "reload":
            started[call.storage] = call.line
        else:
            between = listing.backward_code.lines[started[call.storage] : call.line]
            overlapped += any(line.startswith(("cpp_", "extern_kernels")) for line in between)
    assert overlapped > 0


# --- caches ----------------------------------------------------------------------------------------------------------


@needs_cpp_compiler
def test_a_warm_cache_never_runs_another_policys_code(device):
    """The same model under policy A, then B, then A again: right plans, right results, and the third from the cache."""
    subject = BY_NAME["mlp"]

    def train(policy):
        torch._dynamo.reset()
        counters.clear()
        module, inputs = subject.module(), subject.inputs()
        before = device.stats().offloads
        compile_ = Compiler(policy, compiler="inductor")
        result = train_step(compile_(module), inputs, module=module)
        return result, compile_.plans, device.stats().offloads - before, counters["inductor"]["fxgraph_cache_hit"]

    with fresh_cache():
        runs = [train(policy) for policy in (EVERYTHING, KeepAll(), EVERYTHING, OffloadBytes(0.5, min_nbytes=0))]
    results, plans, offloads, hits = zip(*runs, strict=True)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    assert [len(each) for each in plans] == [1, 1, 1, 1]
    assert offloads == tuple(len(plan.transfers) for (plan,) in plans)
    assert offloads[0] == offloads[2] > offloads[3] > offloads[1] == 0
    assert plans[2] == plans[0]
    assert hits[0] == hits[1] == hits[3] == 0
    assert hits[2] > 0


# --- ways of compiling -----------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers of one class, to be compiled one by one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Broken(Stack):
    """Break the graph in a loop (Dynamo then compiles each layer by itself), or between two lines (two graphs)."""

    def __init__(self, *, looped):
        super().__init__()
        self.looped = looped

    def forward(self, x):
        if self.looped:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x
        x = self.layers[1](self.layers[0](x))
        torch._dynamo.graph_break()
        return self.layers[2](x)


def sequences():
    return torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()


# Dynamo itself looks at the `.grad` of a graph's input, and hides the warning from all but those who make it an error.
grad_of_inner = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@grad_of_inner
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)])
def test_layer_by_layer(device, compiler):
    """One compilation serves all layers of a class, and values of several layers are on the host at one time."""
    torch.manual_seed(0)
    model = Stack()
    plain, x, y = fresh(model), sequences(), sequences()
    for layer in model.layers:
        layer.compile(backend="graphoffload", options={"policy": EVERYTHING, "compiler": compiler})
    for _ in range(2):
        have, want = train_step(model, [x], module=model), train_step(plain, [y], module=plain)
        if compiler == "aot_eager":
            assert_same_bits(have, want)
        else:
            assert_close(have, want)
    plans = graphoffload.plans(model)
    assert plans
    assert device.stats().offloads == sum(len(plans[0].transfers) for _ in model.layers) * 2
    assert device.stats().slots == 0


@grad_of_inner
@pytest.mark.parametrize("looped", [False, True], ids=["two graphs", "layers"])
def test_graph_breaks(device, looped):
    torch.manual_seed(0)
    ran = assert_trains_as_eager(Broken(looped=looped), [sequences()], fullgraph=False)
    assert all(plan.transfers for plan in ran.plans)
    assert len(ran.plans) == (1 if looped else 2)
    offloads = sum(len(plan.transfers) for plan in ran.plans) * (len(Stack().layers) if looped else 1)
    assert ran.device.stats().offloads == 2 * offloads


def test_fullgraph(device):
    torch.manual_seed(0)
    assert assert_trains_as_eager(Stack(), [sequences()], fullgraph=True).moved


@needs_cpp_compiler
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_modes(device, mode):
    torch.manual_seed(0)
    model = Mlp(depth=2)
    plain, x, y = fresh(model), rows(), rows()
    run = torch.compile(model, backend="graphoffload", mode=mode, options=None)
    # torch.compile takes a mode or options, so the policy is the default one; it may move nothing of so small a model.
    assert_close(train_step(run, [x], module=model), train_step(plain, [y], module=plain))


@needs_cpp_compiler
def test_options_of_inductor(device):
    """They reach Inductor, and only for this compilation."""
    subject = BY_NAME["mlp"]
    module = subject.module()
    run = torch.compile(
        module, backend="graphoffload", options={"policy": EVERYTHING, "inductor": {"max_fusion_size": 1}}
    )
    with fresh_cache():
        _, code = run_and_get_code(lambda: train_step(run, subject.inputs(), module=module))
    assert code
    assert torch._inductor.config.max_fusion_size != 1


def test_keyword_arguments(device):
    def function(x, *, scale, other=None):
        y = (x @ x.t()).sin() * scale
        return {"y": y.exp(), "z": y if other is None else (y @ other).sin()}

    x, other = rows(), torch.randn(4, 3, requires_grad=True)
    compile_ = Compiler(EVERYTHING)
    run = compile_(function)
    for kwargs in ({"scale": 2.0}, {"scale": 2.0, "other": other}):
        a, b = fresh_inputs((x, kwargs)), fresh_inputs((x, kwargs))
        assert_same_bits(train_step(run, [a[0]], a[1]), train_step(function, [b[0]], b[1]))
    assert compile_.moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    torch.manual_seed(0)
    model = Decoder()
    plain = fresh(model)
    (ids,) = BY_NAME["decoder"].inputs()
    compile_ = Compiler(EVERYTHING)
    run = compile_(model)
    results = []
    for each, module in ((run, model), (plain, plain)):
        with torch.autocast("cpu", dtype=dtype):
            loss = each(ids)
        loss.backward()
        results.append(outcome(loss, module=module))
    assert_same_bits(*results)
    dtypes = {storage.dtype for plan in compile_.plans for storage in plan.facts.storages}
    assert str(dtype).removeprefix("torch.") in dtypes


# --- dynamic shapes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=needs_cpp_compiler)])
def test_sizes_do_not_recompile(device, compiler):
    """dynamic=True: one compilation for all sizes; each right."""
    torch.manual_seed(0)
    model = Mlp(depth=2)
    plain = fresh(model)
    count = CompileCounterWithBackend(graphoffload.backend(EVERYTHING, compiler=compiler))
    run = torch.compile(model, backend=count, dynamic=True)
    for size in (3, 5, 8, 13):
        for each in (model, plain):
            each.zero_grad()
        have, want = (
            train_step(run, [rows(count=size)], module=model),
            train_step(plain, [rows(count=size)], module=plain),
        )
        (assert_same_bits if compiler == "aot_eager" else assert_close)(have, want)
    assert count.frame_count == 1
    assert device.stats().offloads > 0


def test_a_second_size_is_taken_as_dynamic(device):
    """Without being asked, Dynamo makes a size symbolic when it changes: two compilations, not one a size."""
    torch.manual_seed(0)
    model = Mlp(depth=2)
    count = CompileCounterWithBackend(graphoffload.backend(EVERYTHING, compiler="aot_eager"))
    run = torch.compile(model, backend=count)
    for size in (3, 5, 8, 13):
        run(rows(count=size)).sum().backward()
    assert count.frame_count == 2
