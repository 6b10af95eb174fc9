"""Promises of every command: exit codes, which stream is written, one JSON document, and no secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_kit import ROOT, Cli
from typer.testing import CliRunner

import tierfall
from tierfall.cli import app, ls_show, verify
from tierfall.core.types.errors import BackendError, ConfigError, NotSupportedError

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
READING = (["ls"], ["show", "1"], ["verify"], ["prune", "--dry-run"])


def test_an_error_of_ours_is_one_line_and_a_bug_is_a_traceback(
    make_cli: MakeCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli()

    def refuse(error: Exception) -> Any:
        def raise_it(*args: object, **words: object) -> None:
            raise error

        return raise_it

    monkeypatch.setattr(ls_show, "RunReader", refuse(tierfall.errors.BackendError("no such luck")))
    answer = cli("ls", code=1)
    assert (answer.out, answer.err) == ("", "tierfall: no such luck\n")
    monkeypatch.setattr(ls_show, "RunReader", refuse(RuntimeError("a bug")))
    result = CliRunner().invoke(app, ["ls", "--config", str(cli.path)])
    assert isinstance(result.exception, RuntimeError)


def test_an_error_of_the_configuration_is_wrong_usage_wherever_it_is_found(
    make_cli: MakeCli, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli()
    saved(cli, [1])
    answer = cli("export", "1", "--to", str(cli.folder / "out"), "--only", "nope", code=2)
    assert "expected one of w, extra" in answer.err
    for error, code in ((ConfigError, 2), (NotSupportedError, 1), (BackendError, 1)):

        def fail(*words: object, error: Any = error, **more: object) -> None:
            raise error("no such luck")

        monkeypatch.setattr(ls_show, "RunReader", fail)
        assert cli("ls", code=code).err == "tierfall: no such luck\n"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, typer.Abort])
def test_ctrl_c_is_reported_and_has_an_exit_code_of_its_own(
    make_cli: MakeCli, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    cli = make_cli()

    def interrupt(*words: object, **more: object) -> None:
        raise stop

    monkeypatch.setattr(ls_show, "RunReader", interrupt)
    answer = cli("ls", code=130)
    assert (answer.out, answer.err) == ("", "tierfall: interrupted\n")
    answer = cli("ls", "--json", code=130)
    assert answer.document == {"ok": False, "problems": ["interrupted"]}
    assert answer.err == "tierfall: interrupted\n"


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


def test_progress_is_shown_to_whoever_watches(
    make_cli: MakeCli, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli()
    saved(cli, [1])
    asked: list[tuple[int, bool]] = []

    class Seen(verify.ProgressBar):
        def __init__(self, label: str, total: int, *, shown: bool) -> None:
            asked.append((total, shown))
            super().__init__(label, total, shown=False)

        def add(self, count: int) -> None:
            asked.append((-count, True))

    monkeypatch.setattr(verify, "ProgressBar", Seen)
    cli("verify")
    (total, shown), *read = asked
    assert not shown
    assert total + sum(count for count, _ in read) == 0
    assert total > 80_000


def test_a_person_at_a_terminal_is_watching_unless_json_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tierfall.cli.common import watched

    for at_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda at_terminal=at_terminal: at_terminal)
        assert watched(False) is at_terminal
        assert watched(True) is False
