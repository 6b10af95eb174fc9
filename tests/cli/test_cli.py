"""Promises of every command: exit codes, which stream is written, one JSON document, and no secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cli_kit import ROOT


def test_what_the_installation_of_completion_writes_is_printed(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("# mine\n")
    done = subprocess.run(
        ["bash", "-c", '"$0" -m tierfall --install-completion; exit $?', sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    now = (tmp_path / ".bashrc").read_text().split("\n")
    (line,) = {*now} - {"# mine", ""}
    assert f"added to {tmp_path}/.bashrc: {line}\n" in done.stdout
    (script,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".bashrc")
    assert str(script) in done.stdout
    assert str(script) in line
