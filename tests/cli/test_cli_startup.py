"""What needs no checkpoint needs no torch: the version, every help, and completion answer at once.

Modules are counted, not seconds, which depend on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer.main
from cli_kit import ROOT

from tierfall.cli import app

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
HEAVY = {"torch", "numpy", "fsspec", "botocore", "xxhash", "zstandard"}
PROGRAM = """
import sys
from tierfall.cli import main
for line in sys.argv[1:] or [""]:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
print(*sys.modules, file=sys.stderr)
"""


def modules_of(*lines: str, **environment: str) -> tuple[str, set[str]]:
    """What some commands print, one after the other, and the modules that they import."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
        env={**os.environ, "TIERFALL_CONFIG": "", "COLUMNS": "80", **environment},
    )
    return done.stdout, set(done.stderr.split())


def completions(shell: str, line: str, **environment: str) -> tuple[str, set[str]]:
    """What a shell is offered after ``line``."""
    asked: Mapping[str, str] = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return modules_of(**{"_TIERFALL_COMPLETE": f"complete_{shell}", **asked, **environment})


def test_version_and_help_import_little() -> None:
    printed, modules = modules_of("--version", "--help", "-h", *(f"{name} -h" for name in COMMANDS))
    assert modules & (HEAVY | {"pydantic", "rich", "yaml"}) == set()
    assert len(modules) < 250
    for name in COMMANDS:
        assert f"Usage: tierfall {name}" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_options_and_choices(shell: str) -> None:
    for line, expected in (
        ("tierfall wa", ["watch"]),
        ("tierfall pin --co", ["--config"]),
        ("tierfall export 1 --format sa", ["safetensors"]),
        ("tierfall --config x.yaml --inst", ["--install-completion"]),
    ):
        offered, modules = completions(shell, line)
        assert [word for word in expected if word not in offered] == []
        assert "prune" not in offered
        assert modules & HEAVY == set()


@pytest.mark.parametrize("text", [None, "", "- x", "tiers: 3", "tiers: [3]", "run: [", "\udcff"])
def test_a_file_that_cannot_be_read_completes_nothing_and_prints_nothing(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "tiers.yaml"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for config in (str(path), ""):
        offered, _ = completions("bash", "tierfall verify --tier ", TIERFALL_CONFIG=config)
        assert offered.strip() == ""
