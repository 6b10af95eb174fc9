"""``prune`` and ``show`` print for each copy why it is kept or deleted, for every rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import tierfall
from tests.steps import blank, state_of
from tierfall.core.types import keys

MakeCli = Callable[..., Cli]
RULES = {"last": 1, "every": 4, "best": {"metric": "loss", "count": 2}, "tags": True}
SAYS = {
    1: ("drop", "no rule keeps it (last 1; every 4 steps; best 2 by loss (min); tagged)"),
    2: ("keep", "best loss 2 of 2"),
    3: ("keep", "tagged release"),
    4: ("keep", "every 4 steps: at 4; best loss 1 of 2"),
    5: ("drop", "no rule keeps it (last 1; every 4 steps; best 2 by loss (min); tagged)"),
    6: ("keep", "the newest that survives the loss of a process"),
}


@pytest.fixture
def cli(make_cli: MakeCli) -> Cli:
    made = make_cli(disk={})
    with tierfall.open(made.config) as ckpt:
        ckpt.restore(blank())
        for step, loss in enumerate((0.9, 0.2, 0.5, 0.2, 0.8, 0.7), start=1):
            tags = ["release"] if step == 3 else []
            ckpt.save(step, state_of(step), metrics={"loss": loss}, tags=tags, block=True)
    made.configure(make_cli(disk={"retain": RULES}).config)
    return made


def steps_on(folder: Path) -> list[int]:
    found = (keys.parse_step_folder(path.name) for path in (folder / "run").iterdir())
    return sorted(id.step for id in found if id is not None)


def test_prune_says_by_which_rule_each_copy_stays_and_does_it(cli: Cli, tmp_path: Path) -> None:
    planned = cli.json("prune", "--dry-run")["decisions"]
    assert {d["step"]: (d["verdict"], d["reason"]) for d in planned} == SAYS
    text = " ".join(cli("prune", "--dry-run").out.split())
    for _, reason in SAYS.values():
        assert reason in text
    assert steps_on(tmp_path / "disk") == [1, 2, 3, 4, 5, 6]
    done = cli.json("prune")["decisions"]
    assert [(d["step"], d["verdict"], d["reason"]) for d in done] == [
        (d["step"], d["verdict"], d["reason"]) for d in planned
    ]
    assert steps_on(tmp_path / "disk") == [2, 3, 4, 6]


def test_prune_and_check_say_that_no_checkpoint_has_a_metric(
    cli: Cli, make_cli: MakeCli, tmp_path: Path
) -> None:
    commands = (["prune", "--dry-run"], ["check", "--size", "64KiB", "--save-every", "1h"])
    for words in commands:
        assert cli.json(*words)["notes"] == []
    cli.configure(make_cli(disk={"retain": {"best": {"metric": "los"}}}).config)
    output = (
        'retain.best of disk keeps nothing: no checkpoint has the metric "los"; they have loss; did '
        'you mean "loss"?'
    )
    for words in commands:
        assert cli.json(*words)["notes"] == [output]
        assert output in " ".join(cli(*words).out.split())
    cli.configure(make_cli(disk={"retain": {"best": {"metric": "los"}}}, far={}).config)
    (tmp_path / "far").write_text("this is no folder")
    answer = cli.json("prune", "--dry-run", code=-1)
    assert answer["problems"]
    assert answer["notes"] == [], "far may hold one that has it"


@pytest.mark.parametrize("step", SAYS)
def test_show_says_of_a_step_why_its_copy_stays_or_goes(cli: Cli, step: int) -> None:
    verdict, reason = SAYS[step]
    copy = cli.json("show", str(step))["copies"]["disk"]
    assert copy["decision"] == {"verdict": verdict, "reason": reason}
    assert f"{verdict}: {reason}" in " ".join(cli("show", str(step)).out.split())


def test_what_is_too_old_is_reported_by_the_clock_of_the_command_line(
    cli: Cli, make_cli: MakeCli
) -> None:
    def verdicts(retain: dict[str, Any]) -> dict[int, str]:
        cli.configure(make_cli(disk={"retain": retain}).config)
        return {d["step"]: d["reason"] for d in cli.json("prune", "--dry-run")["decisions"]}

    assert verdicts({"for": "1h"})[1] == "younger than 1h"
    assert verdicts({"for": "1ms"})[1] == "no rule keeps it (for 1ms)"
    assert verdicts({"every": "365d"})[1] == "every 365d: the first of its period"
