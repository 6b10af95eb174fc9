"""A user's own policies: how they are registered, found and validated, and that an error in one does no harm."""

from __future__ import annotations

import json
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
from tierfall.config import Config, load_config, plugins
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import PolicyKind
from tierfall.core.types.view import TierView, Verdict, View
from tierfall.policies import Measured, register, registry
from tierfall.policies.cadence import IntervalBound, choose_interval
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import plan_flush
from tierfall.policies.retention import next_due_s, plan_retention
from tierfall.run.cadence import rules_of
from tierfall.setup.tiers import tier_rules

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


def test_rules_that_are_no_type_are_named_where_a_file_asks_for_the_policy() -> None:
    register("retain", "mine", rules=object())(keep_nothing)
    with pytest.raises(
        ConfigError, match=r"^tiers\[1\].retain.mine: retain policy mine: it is regis"
    ):
        config_of(retain={"mine": 3})


@pytest.mark.parametrize("kind", PolicyKind)
def test_a_policy_of_each_kind_is_found_by_its_name(kind: PolicyKind) -> None:
    def decide(*arguments: Any) -> None: ...

    assert register(kind, "mine", rules=Model)(decide) is decide
    found = plugins.find(kind, "mine")
    assert found is not None
    assert (found.kind, found.name, found.decide, found.rules) == (kind, "mine", decide, Model)
    assert "mine" in plugins.names_of(kind)
    assert [k for k in PolicyKind if plugins.find(k, "mine") is not None] == [kind]


def test_a_module_that_is_loaded_anew_registers_anew() -> None:
    source = "from tierfall.policies import register\n@register('retain', 'mine')\ndef keep(t, r, n): return {}\n"
    for _ in range(2):
        exec(source, {"__name__": "some_module"})
    with pytest.raises(ConfigError, match=r"already, some_module\.keep"):
        exec(source, {"__name__": "another_module"})


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


def test_a_cadence_of_ones_own_waits_for_the_slowest_tier() -> None:
    register("interval", "mine", rules=Model)(lambda m, rules, now_s: (rules.weight, "so it is"))
    tier = _tier(["disk", "file"])
    rules = rules_of(interval_of(mine={"weight": 3}).interval, (tier,))
    quick = Measured(step_s=0.1, cost_s=0.1, saved=True, durable_s={"disk": 0.1})
    choice = choose_interval(rules, quick)
    assert (choice.interval_steps, choice.reason) == (3, "mine: so it is")
    slow = choose_interval(rules, replace(quick, durable_s={"disk": 2.0}))
    assert (slow.interval_steps, slow.bound) == (20, IntervalBound.DURABLE)


def test_a_cadence_of_ones_own_beside_another_measure_is_refused() -> None:
    register("interval", "mine")(lambda measured, rules, now_s: (1, ""))
    with pytest.raises(ConfigError, match="interval: every and mine cannot stand together"):
        interval_of(every=10, mine=True)
    with pytest.raises(ConfigError, match=r"interval\.mien: unknown key; did you mean \"mine\""):
        interval_of(mien=True)


# Reading ---------------------------------------------------------------------------------------------


def keep_nothing(tier: TierView, rules: Any, now_s: float) -> dict[Any, str]:
    return {}


@pytest.mark.parametrize(
    ("value", "rules"),
    [
        ({"weight": 3}, Model(weight=3)),
        ({"weight": "${env:N}"}, Model(weight=7)),
        ({}, Model()),
        (True, Model()),
        ({"names": ["a"]}, Model(names=("a",))),
    ],
)
def test_what_stands_behind_a_name_is_read_by_its_model(
    value: Any, rules: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("N", "7")
    register("retain", "mine", rules=Model)(keep_nothing)
    config = config_of(retain={"last": 2, "mine": value})
    assert [(r.policy.name, r.rules) for r in config.stored[0].retain.rules()] == [
        ("last", 2),
        ("mine", rules),
    ]
    assert load_config(config.model_dump()) == config
    assert config_of(retain={"mine": None}).stored[0].retain.rules() == ()


@pytest.mark.parametrize(
    "members",
    [
        {"retain": {"last": 2, "every": 1000, "for": "30d", "tags": True}},
        {"retain": {"every": "1d", "tags": ["a"], "best": {"metric": "loss", "mode": "max"}}},
        {"evict": {"high": "92.5%", "low": "3.5%", "order": "oldest"}},
        {"evict": {"order": {"oldest": None}}},
    ],
)
def test_what_was_read_can_be_written_and_read_again(members: dict[str, Any]) -> None:
    config = config_of(**members)
    assert load_config(config.model_dump()) == config
    assert load_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize("value", [True, {}, "true"])
def test_a_policy_without_settings_takes_none(value: Any) -> None:
    register("retain", "mine")(keep_nothing)
    config = config_of(retain={"mine": value})
    assert [r.rules for r in config.stored[0].retain.rules()] == [None]
    assert load_config(config.model_dump()) == config
    with pytest.raises(ConfigError, match=r"tiers\[1\].retain.mine: a mapping does not fit"):
        config_of(retain={"mine": {"weight": 1}})


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"retain": {"lst": 3}}, r'^tiers\[1\].retain.lst: unknown key; did you mean "last"\?$'),
        ({"retain": {"zebra": 3}}, r"retain.zebra: unknown key; expected one of last, every, best"),
        ({"retain": {1: 3}}, r"retain\[1\]: unknown key"),
        ({"retain": {"mine": {"weight": "x"}}}, r"retain.mine.weight: \"x\" does not fit: Input"),
        ({"retain": {"mine": 3}}, r"retain.mine: 3 does not fit: Input should be a valid dict"),
        ({"evict": {"order": "oldst"}}, r'evict.order.oldst: unknown order; did you mean "oldest"'),
        ({"evict": {"order": ["oldest"]}}, "evict.order: a list does not fit; expected the name"),
        ({"evict": {"order": {"a": 1, "b": 2}}}, "evict.order: a mapping does not fit; expected"),
        ({"evict": {"low": "50%"}}, r"evict: low has no effect without high; expected \{high: 90%"),
        ({"evict": {"high": "50%", "low": "60%"}}, "evict: high must be above 0%, and low no high"),
        ({"evict": {"high": "0%"}}, "evict: high must be above 0%"),
        ({"evict": {"high": 0.9}}, "evict.high: 0.9 is not a share; expected a share"),
        (
            {"evict": {"high": "90%"}, "capacity": None},
            r"^tiers\[1\]: evict.high is a share of the tier's capacity, which is not set",
        ),
        ({"retain": {"every": "1"}}, None),
        ({"retain": {"every": 0}}, "every: 0 does not fit; expected a whole number of steps such"),
        ({"retain": {"every": "0s"}}, 'every: "0s" does not fit; expected a whole number of steps'),
        ({"retain": {"every": 1.5}}, "every: 1.5 does not fit"),
        ({"retain": {"every": "1.5"}}, 'every: "1.5" does not fit'),
        ({"retain": {"every": "1day"}}, r'every: unknown unit "day" \(did you mean "d"\?\)'),
        ({"retain": {"every": True}}, "every: true does not fit"),
        ({"retain": {"tags": False}}, "tags: false does not fit; expected true for any tag, or a"),
        ({"retain": {"tags": "release"}}, 'tags: "release" does not fit'),
        ({"retain": {"tags": []}}, "tags: an empty list does not fit"),
        ({"retain": {"tags": ["a b"]}}, "tags: tag: 'a b' is not a usable name"),
        ({"retain": {"best": {"mode": "min"}}}, "retain.best.metric: missing; expected a value"),
        ({"retain": {"best": {"metric": "a", "mode": "low"}}}, 'best.mode: "low" does not fit'),
        ({"retain": {"best": {"metric": "a", "count": 0}}}, "best.count: 0 does not fit"),
        ({"retain": {"for": "soon"}}, "retain.for: 'soon' is not a number with a unit"),
    ],
)
def test_what_is_wrong_in_retain_and_evict_is_reported_with_its_place(
    members: dict[str, Any], message: str | None
) -> None:
    register("retain", "mine", rules=Model)(keep_nothing)
    if message is None:
        config_of(**members)
        return
    with pytest.raises(ConfigError, match=message):
        config_of(**members)


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


@pytest.mark.parametrize(
    ("order", "output"),
    [
        (fails, "the flush policy mine failed: KeyError('loss')"),
        (answers_with_none, "the flush policy mine failed: TypeError("),
        (speaks_of_others, "the flush policy mine failed: ValueError("),
        (names_one_twice, "the flush policy mine failed: ValueError('it returned 3@1 twice')"),
    ],
)
def test_an_order_of_flush_that_fails_lets_the_oldest_go_first_and_says_so_once(
    order: Any, output: str, caplog: pytest.LogCaptureFixture
) -> None:
    register("flush", "mine")(order)
    (_, tier) = tier_rules(config_of(flush={"order": "mine"}))
    picture = Picture(tiers=[_tier(["host", "host"]), tier])
    picture.checkpoints = [_checkpoint([f"{s}@1", "host=sealed", "owed=disk"]) for s in (1, 2, 3)]
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            plan = plan_flush(picture.view(), "disk")
    assert [(d.checkpoint.step, d.verdict) for d in plan] == [
        (step, Verdict.KEEP) for step in (1, 2, 3)
    ]
    assert [r.message for r in caplog.records if output in r.message] == [
        r.message for r in caplog.records
    ]
    assert len(caplog.records) == 1


def test_a_flush_in_an_order_of_ones_own_goes_by_it_and_on_where_it_fails(tmp_path: Path) -> None:
    """Through the file, and all of a run: what it says is done, and what it raises ends nothing."""
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
        assert [c.step for c in ckpt.checkpoints() if "disk" in c.tiers] == [1, 2, 3]
    assert asked[0] == [1]
    assert len(asked) > 2


@pytest.mark.parametrize(
    ("flush", "message"),
    [
        ({"order": "my_ordr"}, r'flush.order.my_ordr: unknown order; did you mean "my_order"\?'),
        ({"order": {"my_order": {"weight": "x"}}}, r'flush.order.my_order.weight: "x" does not'),
        (
            {"order": ["in_order"]},
            "flush.order: a list does not fit; expected the name of an order",
        ),
        ({"order": {"newest_first": 3}}, "newest_first: 3 does not fit: it has no settings"),
    ],
)
def test_an_order_of_flush_that_is_asked_for_wrongly_is_refused(
    flush: dict[str, Any], message: str
) -> None:
    register("flush", "my_order", rules=Model)(answers_with_none)
    with pytest.raises(ConfigError, match=message):
        config_of(flush=flush)


def test_in_order_by_its_name_is_what_it_is_without() -> None:
    for flush in ({}, {"order": "in_order"}, {"order": {"in_order": True}}):
        assert tier_rules(config_of(flush=flush))[1].in_order
    assert not tier_rules(config_of(flush={"order": "newest_first"}))[1].in_order


def test_an_order_neither_takes_what_must_stay_nor_leaves_out_what_it_is_silent_of() -> None:
    @register("evict", "mine")
    def newest_only(tier: TierView, rules: None, now_s: float) -> list[Any]:
        return [(c.id, "it is new") for c in reversed(tier.checkpoints[1:])]

    view = three(config_of(evict={"order": "mine"}))
    plan = plan_eviction(view, "disk", need_bytes=300, free_bytes=0)
    assert [d.checkpoint.step for d in plan.deletions] == [2, 1]
    assert plan.missing_bytes == 100


def test_a_rule_says_when_its_answer_changes_by_time_and_a_broken_one_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    register("retain", "mine", due=lambda tier, rules, now_s: now_s + 60)(keep_nothing)
    register("retain", "hasty", due=lambda tier, rules, now_s: now_s)(keep_nothing)
    hasty = replace(three(config_of(retain={"hasty": True})), wall_time_s=1000.0)
    assert next_due_s(hasty, "disk") == 1001.0
    register("retain", "broken", due=fails)(keep_nothing)
    view = replace(three(config_of(retain={"mine": True})), wall_time_s=1000.0)
    assert next_due_s(view, "disk") == 1060.0
    view = three(config_of(retain={"broken": True}))
    with caplog.at_level(logging.ERROR):
        assert next_due_s(view, "disk") is None
    assert "the retain policy broken failed: KeyError('loss')" in caplog.text
