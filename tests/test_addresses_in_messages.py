"""An address that the environment gives, and the user and password of any address, are in no error and no log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tierfall
from tierfall.cli import app
from tierfall.core.types.errors import TierfallError

WORD = "sesame"
YAML = """
run: run
max_wait: 0.2s
tiers:
  - {{name: host, kind: host, folder: "{memory}"}}
  - {{name: store, kind: object, url: "${{env:ADDRESS}}", options: {options}}}
"""


@pytest.mark.parametrize(
    ("address", "options"),
    [
        (f"s3://{WORD}/prefix", '{endpoint_url: "${env:SERVER}", key: k, secret: s}'),
        (f"http://{WORD}.invalid:1/x", "{}"),
        (WORD, "{}"),
    ],
)
def test_what_the_environment_gives_is_shown_as_in_the_file(
    address: str,
    options: str,
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tierfall")
    monkeypatch.setenv("ADDRESS", address)
    monkeypatch.setenv("SERVER", f"http://{WORD}.invalid:1")
    path = tmp_path / "tiers.yaml"
    path.write_text(YAML.format(memory=memory, options=options))
    texts = []
    try:
        with tierfall.open(path) as ckpt:
            texts.append(repr(ckpt.statistics()))
    except TierfallError as error:
        texts.append(str(error))
    for words in (["ls"], ["pin", "1"]):
        answer = CliRunner().invoke(app, [*words, "--config", str(path)])
        assert answer.exit_code != 0
        texts.append(answer.stderr)
    texts += caplog.messages
    assert any("${env:ADDRESS}" in line for line in texts), texts
    assert not [line for line in texts if WORD in line]


ADDRESS = f"s3://user:{WORD}/with@bucket/prefix"
CALLS: dict[str, Callable[[Path], object]] = {
    "open": lambda here: tierfall.open(ADDRESS),
    "load": lambda here: tierfall.load(ADDRESS),
    "a pointer": lambda here: tierfall.read_pointer(ADDRESS),
    "tiers": lambda here: tierfall.open({"run": "r", "tiers": ADDRESS}),
    "a tier": lambda here: tierfall.open({"run": "r", "tiers": [ADDRESS]}),
    "a kind": lambda here: tierfall.open({"run": "r", "tiers": [{"name": "x", "kind": ADDRESS}]}),
    "a run": lambda here: tierfall.open({"run": ADDRESS, "tiers": str(here)}),
    "a plugin": lambda here: tierfall.open({"run": "r", "plugins": [ADDRESS], "tiers": str(here)}),
    "a key": lambda here: tierfall.open({"run": "r", ADDRESS: 1, "tiers": str(here)}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_no_error_has_the_password_of_an_address(
    call: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(TierfallError) as raised:
        call(tmp_path)
    assert WORD not in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "--config", ADDRESS],
        ["init", "--disk", ADDRESS],
        ["init", "--far", ADDRESS],
        ["init", ADDRESS],
    ],
)
def test_no_command_shows_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 2
    assert WORD not in answer.output
