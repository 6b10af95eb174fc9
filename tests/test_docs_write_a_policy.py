"""docs/write-a-policy.md: the policies that it shows run as printed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import tierfall
from tests.policies.views import Picture
from tierfall.cli import app
from tierfall.config import load_config
from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import PolicyKind
from tierfall.core.types.values import CheckpointId, CopyState, TierKind, survives
from tierfall.core.types.view import CheckpointView, CopyView, TierRules
from tierfall.policies import Measured, registry
from tierfall.policies.cadence import IntervalBound, choose_interval
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import plan_flush
from tierfall.run.cadence import rules_of
from tierfall.setup.tiers import tier_rules

PAGE = Path(__file__).resolve().parents[1] / "docs" / "write-a-policy.md"
TEXT = PAGE.read_text()
EXAMPLES = PAGE.parents[1] / "examples" / "plugins"
NAMES = ("milestones", "worst_loss", "tagged_first", "by_day")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the page's module in it; what is registered meanwhile is forgotten after."""
    known = dict(registry._policies)
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
    (tmp_path / "tiers.yaml").write_text(blocks("yaml")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)
    registry._policies.clear()
    registry._policies.update(known)


def without_plugins(folder: Path) -> None:
    """Let the file name no module."""
    path = folder / "tiers.yaml"
    path.write_text(re.sub(r"plugins: .*\n", "", path.read_text()))


def left(folder: Path) -> list[int]:
    found = (keys.parse_step_folder(path.name) for path in (folder / "gpt-small").iterdir())
    return sorted(id.step for id in found if id is not None)


def test_the_page_shows_the_examples_whole() -> None:
    assert [len(blocks(language)) for language in ("python", "yaml", "toml")] == [5, 4, 1]
    shown = [block for block in blocks("python") if "@register" in block]
    assert shown == [(EXAMPLES / f"{name}.py").read_text() for name in NAMES]
    assert max(len(block.splitlines()) for block in shown) <= 15


def test_the_rule_keeps_what_the_page_says(desk: Path) -> None:
    exec(compile(blocks("python")[1], str(PAGE), "exec"), {})
    messages = re.search(r"Steps ([0-9, and]+) are left", TEXT)
    assert messages is not None
    assert left(desk / "checkpoints") == [int(n) for n in re.findall(r"[0-9]+", messages[1])]
    result = CliRunner().invoke(app, ["show", "9", "--config", "tiers.yaml"])
    assert result.exit_code == 0, result.output
    message = re.search(r"print `(the first[^`]*)`", TEXT)
    assert message is not None
    assert message[1] in result.stdout


def test_settings_that_do_not_fit_are_refused_with_their_place(desk: Path) -> None:
    importlib.import_module("milestones")
    document = yaml.safe_load((desk / "tiers.yaml").read_text())
    for value in ("one", 1, True):
        document["tiers"][1]["retain"]["milestones"] = value
        with pytest.raises(ConfigError, match=r"^tiers\[1\].retain.milestones: .* does not fit"):
            load_config(document)


def test_without_the_import_the_rule_is_not_known_and_it_is_reported_where_to_look(
    desk: Path,
) -> None:
    without_plugins(desk)
    with pytest.raises(ConfigError, match=r"retain.milestones: unknown key.*write-a-policy.md"):
        load_config("tiers.yaml")


def test_the_order_gives_up_the_worst_loss_first(desk: Path) -> None:
    importlib.import_module("worst_loss")
    tier = {"name": "disk", "kind": "file", "path": "./c", "capacity": "1GiB"}
    section = yaml.safe_load(blocks("yaml")[1])
    config = load_config(
        {"run": "x", "tiers": [{"name": "h", "kind": "host"}, {**tier, **section}]}
    )
    picture = Picture()
    picture.tiers = [
        TierRules(
            name="disk",
            kind=TierKind.FILE,
            survives=survives(TierKind.FILE, shared=False),
            evict=config.stored[0].evict.rule(),
        )
    ]
    copies = {"disk": CopyView(state=CopyState.COMMITTED, bytes=100)}
    for step, metrics in enumerate(({"loss": 0.5}, {"loss": 0.9}, {}, {"loss": 0.1}), start=1):
        id = CheckpointId(step, 1)
        picture.checkpoints.append(
            CheckpointView(id=id, ordinal=step, started_from=None, copies=copies, metrics=metrics)
        )
    plan = plan_eviction(picture.view(), "disk", need_bytes=200, free_bytes=0)
    assert [(d.checkpoint.step, d.reason) for d in plan.deletions] == [
        (3, "room is needed and its loss is inf"),
        (2, "room is needed and its loss is 0.9"),
    ]


def test_the_order_brings_what_was_tagged_first(desk: Path) -> None:
    importlib.import_module("tagged_first")
    disk = {"name": "disk", "kind": "file", "path": "./c", **yaml.safe_load(blocks("yaml")[2])}
    config = load_config({"run": "x", "tiers": [{"name": "h", "kind": "host"}, disk]})
    picture = Picture(tiers=list(tier_rules(config)))
    copies = {"h": CopyView(state=CopyState.SEALED, bytes=100)}
    for step, tags in enumerate((("release",), (), ("release",), ()), start=1):
        picture.checkpoints.append(
            CheckpointView(
                id=CheckpointId(step, 1),
                ordinal=step,
                started_from=None,
                copies=copies,
                owed=frozenset({"disk"}),
                tags=frozenset(tags),
            )
        )
    plan = plan_flush(picture.view(), "disk")
    assert [(d.checkpoint.step, d.reason) for d in plan] == [
        (3, "it is tagged"),
        (1, "it is tagged"),
        (4, "it is not tagged"),
        (2, "it is not tagged"),
    ]


@pytest.mark.parametrize(("hour", "steps", "when"), [(12, 25, "4%.*day"), (2, 50, "2%.*night")])
def test_the_cadence_saves_half_as_often_at_night(
    desk: Path, hour: int, steps: int, when: str
) -> None:
    importlib.import_module("by_day")
    section = yaml.safe_load(blocks("yaml")[3])
    config = load_config({"run": "x", "tiers": "./c", **section})
    rules = rules_of(config.interval, ())
    measured = Measured(step_s=0.1, cost_s=0.1, saved=True)
    choice = choose_interval(rules, measured, now_s=1e6 * 86400 + hour * 3600)
    assert (choice.interval_steps, choice.bound) == (steps, IntervalBound.OWN)
    assert re.search(f"by_day: {when}", choice.reason)


def test_as_an_entry_point_it_is_loaded_when_a_file_asks_for_it(desk: Path) -> None:
    without_plugins(desk)
    points = desk / "milestones-1.0.dist-info"
    points.mkdir()
    (points / "METADATA").write_text("Metadata-Version: 2.1\nName: milestones\nVersion: 1.0\n")
    found = re.search(r'"(retain\.milestones)" = "(\w+)"', blocks("toml")[0])
    assert found is not None
    assert '[project.entry-points."tierfall.policies"]' in blocks("toml")[0]
    (points / "entry_points.txt").write_text(f"[tierfall.policies]\n{found[1]} = {found[2]}\n")
    assert "milestones" not in sys.modules
    load_config({"run": "x", "tiers": "./c"})
    assert "milestones" not in sys.modules
    config = load_config("tiers.yaml")
    assert "milestones" in sys.modules
    assert [rule.policy.name for rule in config.stored[0].retain.rules()] == ["last", "milestones"]
    assert registry.find(PolicyKind.RETAIN, "milestones") is not None
    assert tierfall.Config.model_validate(config.model_dump()) == config
