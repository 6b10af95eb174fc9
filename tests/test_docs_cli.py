"""docs/command-line.md: it names every command and option, and its examples are what the commands print.

The examples are played in order on a run that is trained for it. Numbers may differ, words may not.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import yaml
from typer.testing import CliRunner

import tierfall
from tierfall.cli import app
from tierfall.cli.init import FreeSpace

PAGE = Path(__file__).resolve().parents[1] / "docs" / "command-line.md"
TEXT = PAGE.read_text()
NODE = "node-17"
IMAGE = "rank-00000-of-00001.safetensors"
_BLOCK = re.compile(r"(?:<!-- before: (\w+) -->\n)?```console\n(.*?)```", re.DOTALL)
_TIME = re.compile(r"\b\d+(\.\d+)? (d \d+ h|h \d+ min|min \d+ s|ms|s|min|h)\b")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_UNIT = re.compile(r"\bN ([KMGT]iB|[kMGT]?B/s)")
ROOMY = FreeSpace(
    memory_folder="/dev/shm", shared_memory_bytes=1 << 40, memory_bytes=1 << 40, disks={}
)
# What depends on the medium that a test has.
_CACHED = "no direct I/O, so reads may come from the page cache"


def commands() -> dict[str, Any]:
    found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {name: command for name, command in found.items() if not command.hidden}


def section(name: str) -> str:
    """The part of the page whose heading begins with that command."""
    for part in re.split(r"^## ", TEXT, flags=re.MULTILINE):
        if name in re.findall(r"\w+", part.partition("\n")[0]):
            return part
    raise AssertionError(f"{PAGE.name} has no heading for {name}")


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_each_of_its_options_is_described(name: str) -> None:
    described = section(name) + section("What")
    assert f"tierfall {name}" in section(name)
    for parameter in commands()[name].params:
        for word in [] if getattr(parameter, "hidden", False) else parameter.opts:
            if word.startswith("-"):
                assert (
                    f"`{word}" in described or f" {word} " in described or f"[{word}" in described
                ), word


def test_no_heading_is_about_a_command_that_is_not_there() -> None:
    headings = re.findall(r"^## (.*)$", TEXT, flags=re.MULTILINE)
    named = {word for heading in headings[1:] for word in re.findall(r"\b[a-z]+\b", heading)}
    assert named == set(commands())


# The examples ----------------------------------------------------------------------------------------


class Stage:
    """The run that the examples are about, below a test's own folder."""

    def __init__(self, root: Path, memory: Path) -> None:
        self.places = {
            "/dev/shm/checkpoints": str(memory),
            "/local/checkpoints": str(root / "local"),
            "/lustre/checkpoints": str(root / "lustre"),
        }
        self.out = root / "export"
        self.path = root / "tiers.yaml"
        block = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
        assert block is not None
        text = block[1]
        for shown, real in self.places.items():
            assert shown in text
            text = text.replace(shown, real)
        self.places["/data/export"] = str(self.out)
        self.places["/data/dcp"] = str(root / "dcp")
        self.places["/data/tiers.yaml"] = str(root / "data" / "tiers.yaml")
        (root / "data").mkdir()
        self.config = yaml.safe_load(text)
        self._step = root / "local" / "gpt-small" / "step-00000400-a0001"
        self._image = b""

    def train(self) -> None:
        model = torch.nn.Linear(512, 512)
        with tierfall.open(self.config) as ckpt:
            for step in range(100, 501, 100):
                tags = ["best"] if step == 400 else []
                metrics = {"loss": 320 / step}
                ckpt.save(step, {"model": model}, metrics=metrics, tags=tags, block=True)

    def damage(self) -> None:
        self._image = (self._step / IMAGE).read_bytes()
        (self._step / IMAGE).write_bytes(self._image[:-1] + bytes([self._image[-1] ^ 1]))

    def retain(self) -> None:
        (self._step / IMAGE).write_bytes(self._image)
        self.config["tiers"][1]["retain"] = {"last": 2}

    def death(self) -> None:
        """Leave an image in memory that the shared tier has not got."""
        host, nvme, _ = self.config["tiers"]
        with tierfall.open({**self.config, "tiers": [{**host, "on_close": "keep"}, nvme]}) as ckpt:
            state = {"model": torch.nn.Linear(512, 512)}
            ckpt.restore(state)
            ckpt.save(600, state, block=True)

    def run(self, line: str) -> str:
        """Play a command, and return what a person sees, with the page's own places and names."""
        self.path.write_text(yaml.safe_dump(self.config))
        for shown, real in self.places.items():
            line = line.replace(shown, real)
        words = line.removeprefix("tierfall ").split()
        result = CliRunner().invoke(app, words, env={"TIERFALL_CONFIG": str(self.path)})
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return self.as_on_the_page(result.stdout + result.stderr)

    def as_on_the_page(self, text: str) -> str:
        for shown, real in self.places.items():
            text = text.replace(real, shown)
        return text


def blocks() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What to do before an example, and its commands with what they print."""
    for before, block in _BLOCK.findall(TEXT):
        lines = [part.partition("\n") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
        yield before, [(line, printed) for line, _, printed in lines]


def words_of(text: str) -> list[list[str]]:
    """Lines as words: numbers with their units, times and the width of columns are not compared."""
    text = _NUMBER.sub("N", _TIME.sub("TIME", text.replace(_CACHED, "direct I/O")))
    text = _UNIT.sub(lambda found: "RATE" if found[1].endswith("/s") else "SIZE", text)
    return [line.split() for line in text.splitlines()]


def play(stage: Stage) -> Iterator[tuple[str, str, str]]:
    for before, examples in blocks():
        if before:
            getattr(stage, before)()
        for line, printed in examples:
            yield line, printed, stage.run(line)


def test_every_example_prints_what_the_page_shows(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: NODE)
    monkeypatch.setattr("tierfall.cli.init.measure_free", lambda *_: ROOMY)
    monkeypatch.setattr("tierfall.ops.measure._free_bytes", lambda folder: 67 << 30)
    played = 0
    stage = Stage(tmp_path, memory)
    for line, shown, printed in play(stage):
        assert shown.strip(), f"{line}: the page shows nothing"
        assert words_of(printed) == words_of(shown), line
        played += 1
    shown = stage.as_on_the_page((tmp_path / "data" / "tiers.yaml").read_text())
    assert re.findall(r"```yaml\n(# Where.*?)```", TEXT, re.DOTALL) == [shown]
    assert played == TEXT.count("\n$ tierfall ") > 8


def test_a_changed_word_in_an_example_would_be_found() -> None:
    assert words_of("run x: 3 of 4 copies, 1.5 MiB in 2 min 03 s") == words_of(
        "run x:  17 of 4 copies, 12 MiB in 40 ms"
    )
    assert words_of("run x: 3 good") != words_of("run x: 3 bad")
