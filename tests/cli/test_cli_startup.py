"""What needs no checkpoint needs no torch: the version, every help, and completion answer at once.

Modules are counted, not seconds, which depend on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import typer.main
from cli_kit import ROOT

from tierfall.cli import app

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
HEAVY = {"torch", "numpy", "fsspec", "botocore", "xxhash", "zstandard"}
PROGRAM = """
import json, os, sys
from tierfall.cli import main
for line, environment in json.loads(sys.argv.pop()):
    sys.argv[1:] = line.split()
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    os.environ.clear()
    os.environ.update(before)
    print("<end>")
print(*sys.modules, file=sys.stderr)
"""


def run_all(*commands: tuple[str, dict[str, str]]) -> tuple[list[str], set[str]]:
    """What some commands print, one after the other in one process, and the modules that they import together."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
        env={**os.environ, "TIERFALL_CONFIG": "", "COLUMNS": "80"},
    )
    return done.stdout.split("<end>\n")[:-1], set(done.stderr.split())


def completion(shell: str, line: str, **environment: str) -> tuple[str, dict[str, str]]:
    """The command by which a shell asks what it may offer after ``line``."""
    asked: dict[str, str] = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return "", {"_TIERFALL_COMPLETE": f"complete_{shell}", **asked, **environment}


def test_version_and_help_import_little() -> None:
    lines = ["--version", "--help", "-h", *(f"{name} -h" for name in COMMANDS)]
    printed, modules = run_all(*((line, {}) for line in lines))
    assert modules & (HEAVY | {"pydantic", "rich", "yaml"}) == set()
    assert len(modules) < 250
    for name, text in zip(COMMANDS, printed[3:], strict=True):
        assert f"Usage: tierfall {name}" in text
        assert f"\n  {name} " in printed[1], "the overview lists it"
    assert max(len(line) for text in printed for line in text.splitlines()) <= 80


def test_a_plan_imports_no_torch() -> None:
    (printed,), modules = run_all(("plan llama3-405b --gpus 16384 --overhead 1%", {}))
    assert "405,853,388,800 parameters" in printed
    assert modules & (HEAVY | {"yaml", "matplotlib"}) == set()


def test_a_shell_completes_commands_options_and_choices() -> None:
    asked = [
        (shell, line, expected)
        for shell in ("bash", "zsh", "fish")
        for line, expected in (
            ("tierfall wa", "watch"),
            ("tierfall pin --co", "--config"),
            ("tierfall export 1 --format sa", "safetensors"),
            ("tierfall --config x.yaml --inst", "--install-completion"),
        )
    ]
    printed, modules = run_all(*(completion(shell, line) for shell, line, _ in asked))
    for (shell, line, expected), offered in zip(asked, printed, strict=True):
        assert expected in offered, (shell, line)
        assert "prune" not in offered, (shell, line)
    assert modules & HEAVY == set()


def test_a_file_that_cannot_be_read_completes_nothing_and_prints_nothing(tmp_path: Path) -> None:
    texts = ["", "- x", "tiers: 3", "tiers: [3]", "run: [", "\udcff"]
    paths = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    configs = [*map(str, paths), str(tmp_path / "none.yaml"), ""]
    line = "tierfall verify --tier "
    printed, _ = run_all(*(completion("bash", line, TIERFALL_CONFIG=each) for each in configs))
    assert [text.strip() for text in printed] == [""] * len(configs)
