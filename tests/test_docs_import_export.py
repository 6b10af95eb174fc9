"""docs/import-export.md: its pieces are one program, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierfall.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "import-export.md"
TEXT = PAGE.read_text()
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SIZE = re.compile(r"\d+(\.\d+)? [KM]iB")


def test_every_piece_runs_and_prints_what_the_page_shows(
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    (tmp_path / "tiers.yaml").write_text(
        block[1].replace("kind: host}", f'kind: host, folder: "{memory}"}}')
    )
    monkeypatch.chdir(tmp_path)
    program: dict[str, Any] = {"__name__": "page"}
    played = 0
    for match in _BLOCK.finditer(TEXT):
        kind, code = match.groups()
        if kind == "python":
            before = TEXT.count("\n", 0, match.start(2))
            exec(compile("\n" * before + code, PAGE, "exec"), program)
            shown = re.findall(r"^ *# (.*)$", code, flags=re.MULTILINE)
            assert capsys.readouterr().out.splitlines() == shown, f"{PAGE.name}:{before + 1}"
        else:
            line, _, shown_text = code.removeprefix("$ tierfall ").partition("\n")
            result = CliRunner().invoke(app, line.split())
            printed = result.stdout + result.stderr
            assert _SIZE.sub("SIZE", printed) == _SIZE.sub("SIZE", shown_text)
        played += 1
    assert played > 6
