"""docs/planning.md: each figure on it is what a command that it shows prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tierfall.plan.models import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_every_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(PAGE.parents[1])}
    for block in BLOCKS:
        for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            shown = block.partition(f"$ {line}\n")[2].partition("$ ")[0]
            printed = subprocess.run(
                ["bash", "-c", line],
                env=environ,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            assert (printed.stdout, printed.stderr) == (shown, ""), line
    assert sum(block.count("$ tierfall plan ") for block in BLOCKS) == 7


def test_the_sentences_of_the_decision_have_no_other_figure() -> None:
    decision = TEXT.partition("## A decision")[2].partition("## What is computed")[0]
    words = re.sub(r"```.*?```", "", decision, flags=re.DOTALL).replace(" %", "%")
    figures = set(re.findall(r"\d+\.\d+%|\d+\.\d+ \w+|\d+ (?:min \d+ s|GB/s|TB/s|MiB)", words))
    printed = "\n".join(BLOCKS)
    assert len(figures) >= 9
    assert {figure for figure in figures if figure not in printed} == set()


def test_the_page_names_every_architecture() -> None:
    assert [name for name in FAMILIES if f"`{name}`" not in TEXT] == []
