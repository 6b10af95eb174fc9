"""A user's own policies: how they are registered, found and validated, and that an error in one does no harm."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import tierfall
from tests.policies.views import Picture, _checkpoint, _tier
from tierfall.config import Config, load_config
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import PolicyKind
from tierfall.core.types.view import TierView, Verdict, View
from tierfall.policies import Measured, register, registry
from tierfall.policies.cadence import IntervalBound, choose_interval
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.retention import plan_retention
from tierfall.run.cadence import rules_of

HOST = {"name": "host", "kind": "host"}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    known = dict(registry._policies)
    yield
    registry._policies.clear()
    registry._policies.update(known)


class Model(BaseModel):
    weight: int = 1
    names: tuple[str, ...] = ()


def config_of(**members: Any) -> Config:
    tier = {"name": "disk", "kind": "file", "path": "./c", "capacity": "1GiB", **members}
    return load_config({"run": "x", "tiers": [HOST, tier]})


def three(config: Config) -> View:
    """Three committed steps on a tier that is configured so."""
    picture = Picture()
    tier = replace(
        _tier(["disk", "file"]),
        retain=config.stored[0].retain.rules(),
        evict=config.stored[0].evict.rule(),
    )
    picture.tiers = [_tier(["host", "host"]), tier]
    picture.checkpoints = [_checkpoint([f"{s}@1", "disk=committed"]) for s in (1, 2, 3)]
    return picture.view()


def verdicts(view: View) -> dict[int, tuple[Verdict, str]]:
    return {d.checkpoint.step: (d.verdict, d.reason) for d in plan_retention(view, "disk")}


# Registering -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (
            "retian",
            "x",
            "register: 'retian' is not a kind of policy; expected one of interval, retain, evict, flush; did you",
        ),
        ("retain", "a b", "register: retain policy: 'a b' is not a usable name"),
        ("retain", "last", "there is a retain policy named 'last' already, tierfall.policies."),
    ],
)
def test_what_cannot_be_registered_is_refused(kind: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):

        @register(kind, name)
        def keep(tier: TierView, rules: None, now_s: float) -> dict[Any, str]:
            return {}


def takes_two(tier: TierView, now_s: float) -> dict[Any, str]:
    return {}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            "retain",
            {},
            r"takes_two: its parameters are \(tier, now_s\); expected \(tier, rules, now_s\)",
        ),
        (
            "interval",
            {},
            r"its parameters are \(tier, now_s\); expected \(measured, rules, now_s\)",
        ),
        (
            "retain",
            {"due": takes_two},
            r"takes_two: its parameters are \(tier, now_s\); expected \(tier, rules",
        ),
        ("evict", {"words": takes_two}, r"its parameters are \(tier, now_s\); expected \(rules\)"),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused_where_it_is_registered(
    kind: str, given: dict[str, Any], message: str
) -> None:
    decide = keep_nothing if given else takes_two
    with pytest.raises(ConfigError, match=f"^register: {kind} policy 'mine': .*{message}"):
        register(kind, "mine", **given)(decide)
    assert registry.find(PolicyKind(kind), "mine") is None


# A cadence -------------------------------------------------------------------------------------------


def interval_of(**interval: Any) -> Config:
    return load_config({"run": "x", "tiers": "./c", "interval": interval})


@pytest.mark.parametrize(
    ("answer", "output"),
    [
        (lambda: (0, "never"), "a whole number of steps, 1 or more, not 0"),
        (lambda: (2.5, "often"), "not 2.5"),
        (lambda: None, "TypeError"),
        (lambda: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_a_cadence_that_fails_is_reported_once_and_the_default_stands_for_it(
    answer: Any, output: str, caplog: pytest.LogCaptureFixture
) -> None:
    register("interval", "mine")(lambda measured, rules, now_s: answer())
    rules = rules_of(interval_of(mine=True).interval, ())
    measured = Measured(step_s=0.1, cost_s=0.035, saved=True)
    for _ in range(2):
        choice = choose_interval(rules, measured)
        assert (choice.interval_steps, choice.bound) == (10, IntervalBound.OVERHEAD)
    assert len(caplog.records) == 1
    assert output in caplog.text


# Reading ---------------------------------------------------------------------------------------------


def keep_nothing(tier: TierView, rules: Any, now_s: float) -> dict[Any, str]:
    return {}


@pytest.mark.parametrize("value", [True, {}, "true"])
def test_a_policy_without_settings_takes_none(value: Any) -> None:
    register("retain", "mine")(keep_nothing)
    config = config_of(retain={"mine": value})
    assert [r.rules for r in config.stored[0].retain.rules()] == [None]
    assert load_config(config.model_dump()) == config
    with pytest.raises(ConfigError, match=r"tiers\[1\].retain.mine: a mapping does not fit"):
        config_of(retain={"mine": {"weight": 1}})


def test_no_message_of_a_policys_own_shows_what_a_variable_holds() -> None:
    register("retain", "mine", rules=Model)(keep_nothing)
    tier = {"name": "d", "kind": "file", "path": "./c", "retain": {"mine": {"weight": "${env:S}"}}}
    with pytest.raises(ConfigError, match=r"the value of \$\{env:S\} does not fit") as caught:
        load_config({"run": "x", "tiers": [HOST, tier]}, environ={"S": "hunter2"})
    assert "hunter2" not in str(caught.value)


# Plug-ins --------------------------------------------------------------------------------------------


def install(folder: Path, points: str, **modules: str) -> None:
    """Leave a package there as an installer would."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    info = folder / "bring_along-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bring-along\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tierfall.policies]\n{points}\n")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", r"the plug-in brought of bring-along could not be loaded: ZeroDivisionError"),
        ("import no_such_module_anywhere", "bring-along could not be loaded: ModuleNotFoundError"),
        ("pass", r"was loaded and registers no such policy; expected @tierfall.policies.regis"),
    ],
)
def test_a_broken_plug_in_is_named(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "retain.mine = brought", brought=source)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        config_of(retain={"last": 1})
        assert "brought" not in sys.modules
        with pytest.raises(ConfigError, match=rf"^tiers\[1\].retain.mine: .*{message}"):
            config_of(retain={"mine": True})
        with pytest.raises(ConfigError, match=r'retain.mina: unknown key; did you mean "mine"\?'):
            config_of(retain={"mina": True})
    finally:
        sys.modules.pop("brought", None)


# Care ------------------------------------------------------------------------------------------------


def fails(tier: TierView, rules: Any, now_s: float) -> Any:
    raise KeyError("loss")


def answers_with_none(tier: TierView, rules: Any, now_s: float) -> Any:
    return None


def speaks_of_others(tier: TierView, rules: Any, now_s: float) -> Any:
    return {"1@1": "a name is no id"}


def names_one_twice(tier: TierView, rules: Any, now_s: float) -> Any:
    return [(tier.checkpoints[-1].id, "again")] * 2


@pytest.mark.parametrize(
    ("rule", "output"),
    [
        (fails, r"the retain policy mine failed: KeyError('loss'): everything is kept"),
        (answers_with_none, "the retain policy mine failed: TypeError("),
        (speaks_of_others, "the retain policy mine failed: ValueError("),
    ],
)
def test_a_rule_that_fails_keeps_everything_and_says_so_once(
    rule: Any, output: str, caplog: pytest.LogCaptureFixture
) -> None:
    register("retain", "mine")(rule)
    view = three(config_of(retain={"last": 1, "mine": True}))
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            messages = verdicts(view)
    assert {verdict for verdict, _ in messages.values()} == {Verdict.KEEP}
    assert output in messages[1][1]
    assert len([r for r in caplog.records if "mine failed" in r.message]) == 1


@pytest.mark.parametrize("order", [fails, answers_with_none, speaks_of_others, names_one_twice])
def test_an_order_that_fails_leaves_the_oldest_first(
    order: Any, caplog: pytest.LogCaptureFixture
) -> None:
    register("evict", "mine")(order)
    view = three(config_of(evict={"order": "mine"}))
    with caplog.at_level(logging.ERROR):
        plan = plan_eviction(view, "disk", need_bytes=200, free_bytes=0)
    assert [(d.checkpoint.step, d.reason) for d in plan.deletions] == [
        (step, "room is needed and it is the oldest that may be deleted") for step in (1, 2)
    ]
    assert "the evict policy mine failed" in caplog.text


def test_a_flush_in_an_order_of_ones_own_goes_by_it_and_on_where_it_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through the file, and all of a run: what it says is done; what it raises is said once, and ends nothing."""
    asked: list[list[int]] = []

    @register("flush", "mine", rules=Model)
    def order(tier: TierView, rules: Model, now_s: float) -> list[Any]:
        asked.append([c.id.step for c in tier.checkpoints])
        if len(asked) > rules.weight:
            raise ValueError("enough")
        return [(c.id, "it is new") for c in reversed(tier.checkpoints)]

    disk = {"name": "disk", "kind": "file", "path": str(tmp_path / "c")}
    host = {**HOST, "folder": str(tmp_path / "memory"), "capacity": "1MiB"}
    order_of_disk = {"order": {"mine": {"weight": 1}}}
    config = {"run": "x", "tiers": [host, {**disk, "flush": order_of_disk}]}
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"w": torch.zeros(8)}, block=True)
        assert [c.step for c in ckpt.checkpoints() if "disk" in c.copies] == [1, 2, 3]
    assert asked[0] == [1]
    assert len(asked) > 2
    assert caplog.text.count("the flush policy mine failed: ValueError('enough')") == 1


def test_an_order_neither_takes_what_must_stay_nor_leaves_out_what_it_is_silent_of() -> None:
    @register("evict", "mine")
    def newest_only(tier: TierView, rules: None, now_s: float) -> list[Any]:
        return [(c.id, "it is new") for c in reversed(tier.checkpoints[1:])]

    view = three(config_of(evict={"order": "mine"}))
    plan = plan_eviction(view, "disk", need_bytes=300, free_bytes=0)
    assert [d.checkpoint.step for d in plan.deletions] == [2, 1]
    assert plan.missing_bytes == 100
