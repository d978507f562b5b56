"""The command line: how policies are spelled, exit codes, and one line for what the user got wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphoffload import policies
from graphoffload.cli import Progress, main, parse_policy
from graphoffload.errors import UsageError


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("all", policies.OffloadAll(min_nbytes=0)),
        ("all:64KiB", policies.OffloadAll(min_nbytes=65536)),
        ("keep", policies.KeepAll()),
        ("hidden", policies.OffloadHidden(min_nbytes=0)),
        ("20MiB", policies.OffloadBytes("20MiB", min_nbytes=0)),
        ("4096", policies.OffloadBytes(4096, min_nbytes=0)),
        ("50%", policies.OffloadBytes(0.5, min_nbytes=0)),
        (policies.policy_to_json(policies.OffloadBytes("2GB")), policies.OffloadBytes("2GB")),
    ],
)
def test_policies_as_the_command_line_spells_them(text: str, policy: policies.Policy):
    assert parse_policy(text) == policy


@pytest.mark.parametrize("text", ["", "everything", "all:lots", "12 bananas", "12x%", "0%", "150%", "{", "-1"])
def test_what_is_no_policy_is_a_usage_error(text: str):
    with pytest.raises(UsageError):
        parse_policy(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--policy", "everything"], "'everything' is not a policy"),
        (["demo", "--policy", "12 bananas"], "bananas"),
        (["demo", "--hidden", "12"], "--hidden 12 is not a multiple of 8"),
        (["demo", "--device", "abacus"], "--device abacus"),
        (["demo", "--plan", "/nowhere/at/all/plan.json"], "there is no folder '/nowhere/at/all'"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("graphoffload: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert "Traceback" not in captured.err + captured.out


@pytest.mark.parametrize(
    "arguments", [["demo", "--steps", "0"], ["demo", "--steps", "x"], ["nonsense"], ["demo", "--nonsense"]]
)
def test_what_argparse_refuses_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: graphoffload" in capsys.readouterr().err


def test_help_says_how_policies_are_spelled(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for word in ("--steps", "--layers", "--policy", "all:64KiB", "50%", "hidden"):
        assert word in text


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_python_m_graphoffload_is_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "graphoffload", "demo", "--policy", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().rpartition("\n")[2].startswith("graphoffload: 'nonsense' is not a policy")
    assert "Traceback" not in done.stderr


def test_progress_shows_the_first_the_last_and_some_steps_between(capsys: pytest.CaptureFixture[str]):
    progress = Progress(steps=10)
    for run in ("a", "b"):
        for step in range(1, 11):
            progress(f"{run} {step}")
    shown = capsys.readouterr().out.split("\n")[:-1]
    assert shown == [f"{run} {step}" for run in ("a", "b") for step in (1, 2, 4, 6, 8, 10)]
