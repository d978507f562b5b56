"""The demo: its data, its equality check, and a whole small run with offloading and without."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from graphoffload import Plan, policies
from graphoffload.cli import main
from graphoffload.demo import Run, Settings, batches, build_model, run_demo, same_results, standard_library_text

pytest.importorskip("transformers", reason="the demo trains a model of transformers (the extra 'demo')")

SMALL = Settings(policy=policies.OffloadAll(min_nbytes=0), steps=3, layers=2, hidden=32, batch=2, length=32)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Collect the progress of the one run that these tests share."""
    return []


@pytest.fixture(scope="module")
def runs(lines: list[str]) -> tuple[Run, Run, Run]:
    """Run the demo once, small."""
    return run_demo(SMALL, lines.append)


def test_the_text_is_the_standard_library_in_order_of_name():
    text = standard_library_text(limit=50_000)
    assert len(text) == 50_000
    first = sorted(Path(json.__file__).parents[1].glob("*.py"))[0].read_bytes()
    assert text.startswith(first[:1000])


def test_batches_are_windows_of_the_text_and_the_same_for_the_same_seed():
    text = standard_library_text(limit=10_000)
    made = batches(text, SMALL)
    assert len(made) == SMALL.steps
    assert all(batch.shape == (SMALL.batch, SMALL.length) for batch in made)
    assert all(bytes(row.tolist()) in text for batch in made for row in batch)
    assert all(torch.equal(one, other) for one, other in zip(made, batches(text, SMALL), strict=True))
    assert not torch.equal(made[0], batches(text, dataclasses.replace(SMALL, seed=1))[0])


def test_every_second_layer_is_a_checkpoint():
    model = build_model(dataclasses.replace(SMALL, layers=3))
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [False, True, False]


def test_same_results_sees_a_loss_and_a_parameter_that_differ():
    run = Run("a", (1.0, 2.0), {"w": torch.ones(2)}, (), None, 0.0, 0.0)
    assert same_results([run, dataclasses.replace(run, name="b", parameters={"w": torch.ones(2)})])
    assert not same_results([run, dataclasses.replace(run, losses=(1.0, 2.0000000001))])
    assert not same_results(
        [run, run, dataclasses.replace(run, parameters={"w": torch.ones(2).nextafter(torch.zeros(2))})]
    )
    assert not same_results([run, dataclasses.replace(run, parameters={})])


def test_offloading_changes_no_loss_and_lowers_the_peak(runs: tuple[Run, Run, Run], lines: list[str]):
    offloaded, kept, plain = runs
    assert same_results([offloaded, kept, plain])
    assert len(lines) == 3 * SMALL.steps
    assert offloaded.losses[0] != offloaded.losses[-1]
    (plan,) = offloaded.plans
    assert plan.offloaded_nbytes > 0
    assert plan.recomputed_nbytes > 0
    assert kept.plans[0].offloaded_nbytes == 0
    assert kept.plans[0].kept_nbytes == plan.kept_nbytes + plan.offloaded_nbytes
    assert offloaded.peak_nbytes is not None
    assert kept.peak_nbytes is not None
    assert offloaded.peak_nbytes < kept.peak_nbytes
    assert plain.plans == ()


def test_the_command_prints_the_comparison_and_writes_the_plan(
    runs: tuple[Run, Run, Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    asked: list[Settings] = []
    monkeypatch.setattr("graphoffload.demo.run_demo", lambda settings, say: asked.append(settings) or runs)
    file = tmp_path / "plans.json"
    assert (
        main(["demo", "--steps", "3", "--layers", "2", "--device", "cpu", "--plan", str(file), "--policy", "50%"]) == 0
    )
    assert asked == [
        Settings(policy=policies.OffloadBytes(0.5, min_nbytes=0), steps=3, layers=2, device="cpu", compiler="aot_eager")
    ]
    text = capsys.readouterr().out
    for words in (
        "saved for backward",
        "offloaded",
        "recomputed",
        "transfers a step",
        "peak of device memory",
        "Identical",
    ):
        assert words in text
    assert all(repr(loss) in text for loss in runs[0].losses)
    (plan,) = json.loads(file.read_text())
    assert Plan.from_json(json.dumps(plan)) == runs[0].plans[0]


def test_a_difference_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run = Run("a", (1.0,), {}, (), None, 0.0, 0.0)
    other = dataclasses.replace(run, losses=(2.0,))
    monkeypatch.setattr("graphoffload.demo.run_demo", lambda settings, say: (run, other, run))
    assert main(["demo", "--steps", "1", "--device", "cpu"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
