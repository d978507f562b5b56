"""Every Python block in the README and the docs runs, page by page, in order, on the virtual device."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from graphoffload.testing import virtual_device

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def blocks(page: Path) -> list[tuple[int, str]]:
    """Return (line number, source) of each Python block of a page."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start()) + 2, match.group(1)) for match in BLOCK.finditer(text)]


def needs_inductor(source: str) -> bool:
    """Tell whether a page compiles with the default compiler."""
    return "compiled(" in source and '"compiler": "aot_eager"' not in source


PAGES_WITH_BLOCKS = [page for page in PAGES if blocks(page)]


def test_there_are_blocks_in_readme_and_docs():
    names = {page.name for page in PAGES_WITH_BLOCKS}
    pages = {"README.md", "index.md", "tutorial.md", "policies.md", "reading-a-plan.md", "memory-model.md"}
    assert pages | {"eager.md", "moving.md"} <= names


@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch):
    source = "".join(text for _, text in blocks(page))
    if needs_inductor(source) and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("the page compiles with Inductor, which needs a C++ compiler on the CPU, and there is none")
    torch.compiler.reset()
    # A module of its own: torch.compile looks the globals of a traced function up by the module's name.
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    opens_device = "virtual_device()" in source
    with contextlib.nullcontext() if opens_device else virtual_device():
        for line, text in blocks(page):
            # Padded with empty lines, so that a traceback shows the line of the page.
            exec(compile("\n" * (line - 1) + text, str(page), "exec"), vars(module))  # our own pages
    torch.compiler.reset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    missing = [link for link in LINK.findall(prose) if not (page.parent / link).exists()]
    assert missing == []


def test_the_two_commands_of_the_quick_start_are_there():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^bash (scripts/\S+)", readme, flags=re.MULTILINE)
    assert commands == ["scripts/demo.sh", "scripts/test.sh"]
    assert all((ROOT / command).is_file() for command in commands)
