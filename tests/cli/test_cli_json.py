"""``--json``: docs/json.md has every field of every command with its type, and a second look prints the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from cli_kit import Cli, run

import tierfall
from tests import json_page
from tests.contract.kit import IMAGE, flip
from tests.contract.trainer import Trainer
from tests.steps import state_of, wait_until
from tierfall.cli import app
from tierfall.telemetry.figures import FIGURES

METRICS = {"loss": 0.5, "bad": float("nan")}
LOOKS = ("ls", "latest", "runs", "show 3", "prune --dry-run", "verify")
RARELY = {
    "changes",
    "failed",
    "left_to",
    "notes",
    "left",
    "fallbacks",
    "decided",
    "already",
    "forgotten_by",
    "capacity_bytes",
}
"""Fields of which these commands print no value here."""
OWN = {"demo", "schema"}
"""``demo`` is looked at by its own test; ``schema`` prints a JSON schema."""


@pytest.fixture
def cli(make_cli: Callable[..., Cli], tmp_path: Path) -> Cli:
    """Steps 1 to 3 with a tag and metrics on two tiers, and 3 in memory; something of everything is damaged."""
    made = make_cli(
        disk={"retain": {"last": 2}}, far={"retain": {"tags": True}}, host={"on_close": "keep"}
    )
    with tierfall.open(made.config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), metrics=METRICS, tags=["try"], block=True)
    return made


class Page:
    """The page, and which of its fields a document had."""

    def __init__(self) -> None:
        self.seen: json_page.Seen = set()

    def check(self, document: dict[str, Any], command: str) -> dict[str, Any]:
        assert json_page.faults(document, command, self.seen) == []
        return document

    def unseen(self, *sections: str) -> set[tuple[str, str]]:
        fields = {(name, field) for name in sections for field in json_page.sections()[name]}
        return {(name, field) for name, field in fields - self.seen if field not in FIGURES}


def test_the_page_has_a_section_for_each_command() -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert names - OWN <= set(json_page.sections())


def test_the_page_has_what_the_commands_that_look_print(cli: Cli, tmp_path: Path) -> None:
    page = Page()
    for words in ("ls", "latest", "runs", "show 3", "show 1 3", "watch --once", "prune --dry-run"):
        page.check(cli.json(*words.split()), words.split()[0])
    page.check(cli.json("diff", "1", "3", "--values", code=1), "diff")
    size = ("--size", "64KiB", "--image", "9GiB", "--save-every", "1m")
    page.check(cli.json("check", *size), "check")
    first, second, _ = sorted((tmp_path / "far/run").glob("step-*"))
    flip(first / IMAGE, -1)
    (second / "extra").touch()
    unfinished = tmp_path / "disk/run/step-00000009-a0001"
    unfinished.mkdir()
    (unfinished / IMAGE).write_bytes(b"x")
    page.check(cli.json("verify", code=1), "verify")
    page.check(cli.json("ls", code=1), "ls")
    page.check(cli.json("verify", "--repair", code=-1), "verify")
    page.check(cli.json("prune"), "prune")
    rare = {
        ("ls", "owner"),
        ("ls", "peer_survival"),
        ("check", "peer_address"),
        ("check", "notes"),
        ("prune", "notes"),
        ("verify", "unread"),
        ("repair", "file"),
        ("copy-of-a-checkpoint", "fraction"),
    }
    looked = (
        "ls",
        "latest",
        "runs",
        "diff",
        "difference",
        "check",
        "verify",
        "prune",
        "manifest",
        "tensor",
        "id",
    )
    assert page.unseen(*looked, "copy-of-a-checkpoint", "repair") <= rare


def test_the_page_has_what_the_commands_that_change_print(cli: Cli, tmp_path: Path) -> None:
    page = Page()
    for words in ("pin 3", "pin 2 3", "unpin 2", "tag a 3", "untag a 3", "rm 2"):
        page.check(cli.json(*words.split()), words.split()[0])
    to = tmp_path / "export"
    page.check(cli.json("export", "3", "--to", str(to), "--format", "torch"), "export")
    made = cli.json("import", str(next(to.iterdir())), "--as-step", "1", "--run", "other")
    page.check(made, "import")
    (tmp_path / "away").mkdir()
    away = {"name": "away", "kind": "file", "path": str(tmp_path / "away"), "flush": {"every": 9}}
    cli.configure({**cli.config, "tiers": [*cli.config["tiers"], away]})
    page.check(cli.json("prefetch", "--to", "away"), "prefetch")
    page.check(cli.json("prefetch"), "prefetch")
    page.check(cli.json("copy", "1", "--to", "away"), "copy")
    page.check(cli.json("forget", "away"), "forget")
    page.check(cli.json("drain"), "drain")
    (tmp_path / "disk/run/mine").touch()
    page.check(cli.json("drain", "--discard", code=-1), "drain---discard")
    page.check(cli("rm", "--all", "--run", "run", "--json", input="run\n").document, "rm---all")
    page.check(
        run(["init", str(tmp_path / "new.yaml"), "--parameters", "1M", "--json"]).document, "init"
    )
    words = ("7B", "--gpus", "16", "--failures", "9", "--mtbf", "1d")
    page.check(run(["plan", *words, "--json"]).document, "plan")
    changed = {"pin", "tag", "rm", "rm---all", "forget", "copy", "prefetch", "export", "import"}
    assert {name for _, name in page.unseen(*changed, "init", "plan")} <= RARELY


def test_the_page_has_what_is_printed_beside_a_trainer_and_after_its_death(
    make_cli: Callable[..., Cli], train: Callable[[Cli], Trainer]
) -> None:
    cli, page = make_cli(disk={"bandwidth": "100kB/s"}), Page()
    trainer = train(cli)
    trainer.program.tell("save 1")

    def copying() -> bool:
        document = page.check(cli.json("watch", "--once"), "watch")
        return bool(document["transfers"] and document["loss_bound"])

    wait_until(copying, "a copy is in progress")
    page.check(cli.json("ls"), "ls")
    page.check(cli.json("runs"), "runs")
    trainer.kill()
    page.check(cli.json("watch", "--once"), "watch")
    page.check(cli.json("drain", "--all"), "drain---all")
    page.check(cli.json("drain"), "drain")
    rare = {("watch", "peer_survival"), ("watch", "progress"), ("slot", "failure")}
    rare |= {("loss", "restore_s"), ("loss", "seconds_lost")}
    assert page.unseen("watch", "transfer", "slot", "owner", "loss") <= rare
    assert ("copy-of-a-checkpoint", "fraction") in page.seen


@pytest.mark.parametrize("words", LOOKS)
def test_a_second_look_prints_the_same_with_one_item_a_line(cli: Cli, words: str) -> None:
    first, second = (cli(*words.split(), "--json").out for _ in range(2))
    assert first == second
    assert first == json.dumps(json.loads(first), indent=2) + "\n"
