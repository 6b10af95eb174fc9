"""docs/command-line.md and the pages of its groups: they name every command and option, and their examples are what
the commands print.

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
from tierfall.cli.usage import GROUPS

DOCS = Path(__file__).resolve().parents[1] / "docs"
OVERVIEW = DOCS / "command-line.md"
PAGES = [OVERVIEW, *(DOCS / f"commands-{group.lower()}.md" for group in GROUPS)]
TEXT = "\n".join(page.read_text() for page in PAGES)
NODE = "node-17"
IMAGE = "rank-00000-of-00001.safetensors"
_BLOCK = re.compile(r"(?:<!-- before: (\w+) -->\n)?```console\n(.*?)```", re.DOTALL)
_TIME = re.compile(r"\b\d+(\.\d+)? (d \d+ h|h \d+ min|min \d+ s|ms|s|min|h)\b")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_UNIT = re.compile(r"\bN ([KMGT]iB|[kMGT]?B/s)")
# What depends on the medium that a test has.
_CACHED = "no direct I/O, so reads may come from the page cache"


def commands() -> dict[str, Any]:
    found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {name: command for name, command in found.items() if not command.hidden}


def section(name: str) -> str:
    """The part of a page whose heading names that command."""
    for part in re.split(r"^##? ", TEXT, flags=re.MULTILINE):
        if name in re.findall(r"\w+", part.partition("\n")[0]):
            return part
    raise AssertionError(f"no page has a heading for {name}")


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


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_has_a_page_with_its_commands(group: str) -> None:
    text = (DOCS / f"commands-{group.lower()}.md").read_text()
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert [name for heading in headings for name in heading.split(", ")] == GROUPS[group]
    row = next(
        line for line in OVERVIEW.read_text().splitlines() if line.startswith(f"| [{group}]")
    )
    assert [name for name in GROUPS[group] if f"`{name}`" not in row] == []


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

    def train(self) -> None:
        model = torch.nn.Linear(512, 512)
        with tierfall.open(self.config) as ckpt:
            for step in range(100, 501, 100):
                tags = ["best"] if step == 400 else []
                metrics = {"loss": 320 / step}
                ckpt.save(step, {"model": model}, metrics=metrics, tags=tags, block=True)

    def damage(self) -> None:
        image = (self._step / IMAGE).read_bytes()
        (self._step / IMAGE).write_bytes(image[:-1] + bytes([image[-1] ^ 1]))

    def retain(self) -> None:
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
    monkeypatch.setattr("tierfall.cli.init.measure_free", lambda *_: {"/dev/shm": 1 << 40})
    monkeypatch.setattr("tierfall.ops.measure._free_bytes", lambda folder: 67 << 30)
    played = 0
    stage = Stage(tmp_path, memory)
    for line, shown, printed in play(stage):
        assert shown.strip(), f"{line}: the page shows nothing"
        assert words_of(printed) == words_of(shown), line
        played += 1
    assert played == TEXT.count("\n$ tierfall ") > 8


def test_a_changed_word_in_an_example_would_be_found() -> None:
    assert words_of("run x: 3 of 4 copies, 1.5 MiB in 2 min 03 s") == words_of(
        "run x:  17 of 4 copies, 12 MiB in 40 ms"
    )
    assert words_of("run x: 3 good") != words_of("run x: 3 bad")
