"""Promises of every command: exit codes, which stream is written, one JSON document, and no secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_kit import ROOT, Cli, run, run_process
from typer.testing import CliRunner

import tierfall
from tierfall.cli import app, ls_show, verify
from tierfall.core.types.errors import BackendError, ConfigError, NotSupportedError

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
READING = (["ls"], ["show", "1"], ["verify"], ["prune", "--dry-run"])


def test_no_configuration_is_a_usage_error() -> None:
    answer = run(["ls"])
    assert (answer.code, answer.out) == (2, "")
    assert "--config" in answer.err
    assert "TIERFALL_CONFIG" in answer.err


def test_a_wrong_configuration_says_where_and_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "hunter2!")
    path = tmp_path / "tiers.yaml"
    path.write_text("run: x\ntiers: ./here\nmax_wait: ${env:SOME_SECRET}\n")
    answer = run(["ls", "--config", str(path)])
    assert answer.code == 2
    assert f"{path}:3: max_wait" in answer.err
    assert "hunter2" not in answer.out + answer.err


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    answer = run(["verify", "-c", str(tmp_path / "none.yaml")])
    assert answer.code == 2
    assert "none.yaml" in answer.err


def test_another_run_may_be_named(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli()
    saved(cli, [1])
    cli.configure({**cli.config, "run": "other"})
    assert cli.json("ls")["checkpoints"] == []
    found = cli.json("ls", "--run", "run")
    assert found["run"] == "run"
    assert [c["step"] for c in found["checkpoints"]] == [1]


@pytest.mark.parametrize("step", ["x", "-1", "1@", "@7", "1@2@3", "1.5", "", "٣"])
def test_a_step_that_is_none_is_a_usage_error(make_cli: MakeCli, step: str) -> None:
    answer = make_cli()("show", "--", step, code=2)
    assert "400@7" in answer.err


def test_a_step_that_is_not_there_names_those_that_are(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    for words in (
        *(["show", "7"], ["verify", "7"], ["pin", "7"], ["unpin", "7"], ["rm", "7"]),
        *(["export", "7", "--to", "out"], ["copy", "7", "--to", "disk"]),
    ):
        answer = cli(*words, code=1)
        assert "step 7 is not there" in answer.err
        assert "1@1, 2@1" in answer.err
        assert answer.err.count("\n") == 1


def test_help_lists_the_commands_that_work_and_no_others() -> None:
    text = run(["--help"]).out
    table = text.partition("Commands:")[2].partition("Exit codes:")[0]
    listed = [line.split()[0] for line in table.splitlines() if line.strip()]
    commands = [
        *("init", "ls", "latest", "runs", "show", "check", "verify", "export", "import"),
        *("copy", "prune", "pin", "unpin", "rm"),
        *("forget", "drain", "watch", "schema", "demo"),
    ]
    assert listed == commands


def test_version() -> None:
    assert run(["--version"]).out == f"tierfall {tierfall.__version__}\n"


def test_the_schema_is_that_of_the_model() -> None:
    for words in (["schema"], ["schema", "--json"]):
        assert json.loads(run(words).out) == tierfall.Config.model_json_schema()


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


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *((["show", "400"], 1), (["pin", "400"], 1), (["verify", "400"], 1), (["rm", "1"], 1)),
        *((["show", "x"], 2), (["drain", "--deadline", "soon"], 2), (["verify", "--tier", "x"], 2)),
        *(
            (["show"], 2),
            (["export", "1", "2", "--to", "out"], 2),
            (["ls", "--what"], 2),
            (["check", "--size", "much"], 2),
            (["copy", "1", "--to", "host"], 2),
            (["export", "1", "--to", "out", "--format", "zip"], 2),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refusal_is_a_document_too(
    make_cli: MakeCli, saved: Saved, words: list[str], code: int
) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    cli("pin", "1")
    answer = cli(*words, "--json", code=code)
    (problem,) = answer.document["problems"]
    assert answer.document == {"ok": False, "problems": [problem]}
    assert answer.err == f"tierfall: {problem}\n"
    assert cli(*words, code=code).out == "", "a document for those alone who asked for one"


@pytest.mark.parametrize("text", [None, "run: [", "run: x\ntiers: ./here\nwhat: 1\n"])
def test_a_refusal_of_the_configuration_is_a_document_too(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "tiers.yaml"
    if text is not None:
        path.write_text(text)
    for words in (["ls", "--json", "-c", str(path)], ["ls", "--json"]):
        answer = run(words)
        (problem,) = answer.document["problems"]
        assert (answer.code, answer.document["ok"]) == (2, False)
        assert answer.err == f"tierfall: {problem}\n"


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["show"], "show: missing argument 'STEP'"),
        (["rm", "1", "--what"], "rm: no such option: --what"),
        (["forget", "1", "2"], "forget: got unexpected extra argument"),
        (["lss"], "no such command 'lss'"),
        (["--what"], "no such option: --what"),
        (["ls", "--run"], "option '--run' requires an argument"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(words: list[str], output: str) -> None:
    answer = run(words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"tierfall: {output}")
    assert answer.err.endswith(" --help\n")
    assert answer.err.count("\n") == 1
    document = run([*words[:1], "--json", *words[1:]]).document
    assert document["problems"] == [answer.err.removeprefix("tierfall: ").rstrip()]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--config", "x.yaml", "ls", "--last", "2"], "ls --last 2 --config x.yaml"),
        (["-c", "x.yaml", "--json", "show", "4"], "show 4 -c x.yaml --json"),
        (["--run=a b", "rm", "4"], "rm 4 '--run=a b'"),
        (["--config", "x.yaml"], "COMMAND --config x.yaml"),
    ],
)
def test_an_option_before_the_command_is_refused_with_the_line_that_was_meant(
    words: list[str], meant: str
) -> None:
    answer = run(words)
    name = words[0].partition("=")[0]
    message = f"tierfall: {name} belongs after the command: tierfall {meant}\n"
    assert (answer.code, answer.err) == (2, message)


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


def test_without_a_word_it_shows_its_help() -> None:
    answer = run([])
    assert "Usage: " in answer.out + answer.err
    assert "Commands:" in answer.out + answer.err


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_json_is_all_that_is_on_stdout_and_says_whether_it_went_well(
    make_cli: MakeCli, saved: Saved, words: list[str]
) -> None:
    cli = make_cli()
    saved(cli, [1])
    document = cli.json(*words)
    assert (document["ok"], document["problems"], document["run"]) == (True, [], "run")


def test_a_process_answers_as_the_function_does(make_cli: MakeCli, saved: Saved) -> None:
    """The configuration may come from the environment."""
    cli = make_cli()
    saved(cli, [1])
    answer = run_process("verify", TIERFALL_CONFIG=str(cli.path))
    assert (answer.code, answer.out, answer.err) == (0, cli("verify").out, "")
    failed = run_process("show", "9", "--config", str(cli.path))
    assert (failed.code, failed.out, failed.err.count("\n")) == (1, "", 1)


def test_what_is_piped_has_no_colours_no_bars_and_no_trailing_spaces(
    make_cli: MakeCli, saved: Saved
) -> None:
    cli = make_cli(disk={}, slow={"flush": {"every": 2}})
    saved(cli, [1, 2])
    for words in READING:
        text = cli(*words).out
        assert "\x1b" not in text
        assert "\r" not in text
        assert "━" not in text
        assert [line for line in text.splitlines() if line != line.rstrip()] == []


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
