"""What moves bytes for longer than a second shows how far it is: in the log, on a terminal, on stderr, in ``watch``.

A second is 10 ms here, and ten seconds are 20 ms.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierfall
from tests.steps import blank, state_of, step_in, wait_until
from tierfall.backends.posix.backend import PosixBackend
from tierfall.cli import app
from tierfall.telemetry import progress

LINE = re.compile(r": [\d.]+ \w+ of [\d.]+ \w+, [\d.]+ [kMG]?B/s, about [\d.hmins ]+ left$")
MakeConfig = Callable[..., dict[str, Any]]


class Reads:
    """Each read of an image takes a while; once ten were made, the next ones wait while the gate is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.count = 0
        real = PosixBackend.read_into

        def slow(backend: PosixBackend, key: str, *how: Any) -> Any:
            if key.endswith(".safetensors"):
                self.count += 1
                time.sleep(0.05)
                if self.count > 10:
                    assert self.gate.wait(30)
            return real(backend, key, *how)

        monkeypatch.setattr(PosixBackend, "read_cached", lambda *how: False)
        monkeypatch.setattr(PosixBackend, "read_into", slow)
        monkeypatch.setattr(progress, "EVERY_S", 0.01)
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
        monkeypatch.setattr("tierfall.cli.common.LINE_EVERY_S", 0.02)


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> dict[str, Any]:
    """Step 1 of 40 chunks on ``disk``; ``other`` has not got it, nor has memory."""
    config = {**make_config(disk={}), "chunk": "4KiB"}
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    other = {"name": "other", "kind": "file", "path": str(tmp_path / "other")}
    (tmp_path / "other").mkdir()
    seldom = {**other, "flush": {"every": 1000}}
    config = {**config, "tiers": [*config["tiers"], seldom]}
    (tmp_path / "tiers.yaml").write_text(json.dumps(config))
    return config


@pytest.fixture
def reads(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def command(tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[str]]:
    """Run a command; return its document, and the lines on stderr."""
    done = CliRunner().invoke(app, [*words, "--json", "-c", str(tmp_path / "tiers.yaml")])
    return json.loads(done.stdout), done.stderr.splitlines()


@pytest.mark.parametrize("by", ["restore", "load", "Checkpointer.load"])
def test_a_program_logs_it_and_watch_shows_it(
    by: str,
    config: dict[str, Any],
    reads: Reads,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tierfall")
    found: list[Any] = []

    def read() -> None:
        if by == "load":
            found.append(tierfall.load(config))
            return
        with tierfall.open(config) as ckpt:
            found.append(blank())
            if by == "restore":
                ckpt.restore(found[0])
            else:
                found[0] = ckpt.load()[1]  # type: ignore[index]

    reads.gate.clear()
    thread = threading.Thread(target=read)
    thread.start()
    doing = "load" if "load" in by else by
    in_watch: list[str] = []

    def watch_shows_it() -> bool:
        in_watch.extend(command(tmp_path, "watch", "--once")[0]["progress"])
        return bool(in_watch)

    wait_until(watch_shows_it, "watch shows it")
    reads.gate.set()
    thread.join()
    assert step_in(found[0]) == 1
    assert re.match(rf"{doing}: .*\(process {os.getpid()}\)$", in_watch[0])
    assert any(text.startswith(f"{doing}: ") for text in caplog.messages if LINE.search(text))
    assert command(tmp_path, "watch", "--once")[0]["progress"] == []


def test_the_line_of_a_process_that_was_killed_is_not_shown_and_goes(
    config: dict[str, Any], reads: Reads, tmp_path: Path
) -> None:
    folder = next(path.parent for path in Path(config["tiers"][0]["folder"]).rglob("*.lock"))
    dead = folder / "progress-1-0.txt"
    dead.write_text("verify: 1 MiB of 4 MiB (process 1)")
    os.utime(dead, (time.time() - 60, time.time() - 60))
    assert command(tmp_path, "watch", "--once")[0]["progress"] == []
    tierfall.load(config)
    assert not dead.exists()


@pytest.mark.parametrize(
    "words", [["verify"], ["copy", "1", "--to", "other"], ["prefetch", "--to", "other"]]
)
def test_a_command_says_it_on_stderr_and_stdout_stays_one_document(
    words: list[str], reads: Reads, tmp_path: Path
) -> None:
    document, lines = command(tmp_path, *words)
    assert document["ok"], document
    assert [line for line in lines if LINE.search(line)], lines
    assert all(line.startswith(f"tierfall: {words[0]}") for line in lines)


def test_a_terminal_has_one_line_that_goes_at_the_end(
    reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    tierfall.load(config)
    drawn = terminal.getvalue()
    assert "\n" not in drawn
    assert len(drawn.split("\r\x1b[K")) > 3
    assert drawn.endswith("\r\x1b[K\r")


def test_what_is_quick_shows_nothing(
    config: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 60.0)  # however busy this machine is
    caplog.set_level(logging.INFO, "tierfall")
    tierfall.load(config)
    assert command(tmp_path, "verify")[1] == []
    assert not [text for text in caplog.messages if "load" in text]
