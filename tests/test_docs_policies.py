"""docs/policies.md: its configurations are valid, its list of rules is complete, and its reasons are those that
commands print."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tierfall.config import RetainSection, load_config
from tierfall.core.types.policy import PolicyKind
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, TierView, View
from tierfall.policies import registry

PAGE = Path(__file__).resolve().parents[1] / "docs" / "policies.md"
TEXT = PAGE.read_text()


def blocks() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def rows() -> list[tuple[list[str], str]]:
    """Each rule of retention as the page writes it, and the reason that it shows."""
    section = TEXT.partition("## Retention")[2].partition("## Eviction")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]*)`", row[0]), row[2].strip(" `")) for row in table]


def test_the_pages_files_are_good_ones() -> None:
    flush, whole, part, drain = blocks()
    config = load_config(yaml.safe_load(whole))
    assert len(config.stored[1].retain.rules()) == len(RetainSection.model_fields)
    host = {"name": "h", "kind": "host"}
    store = load_config({"run": "x", "tiers": [host, *yaml.safe_load(flush)]}).stored[0]
    assert (store.flush.order, store.flush.within_s) == ({"newest_first": True}, 600.0)
    assert store.bandwidth_share == 0.5
    messages = load_config({"run": "x", "tiers": "./c", **yaml.safe_load(drain)}).drain
    assert messages is not None
    assert (messages.on_signal, messages.deadline_s) == (("SIGTERM",), 25.0)
    disk = {"name": "disk", "kind": "file", "path": "./c", **yaml.safe_load(part)}
    evict = load_config({"run": "x", "tiers": [host, disk]}).stored[0].evict
    assert (evict.high, evict.low) == (0.9, 0.8)


def test_every_rule_and_order_that_is_built_in_is_on_the_page() -> None:
    shown = {rule.partition(":")[0] for rules, _ in rows() for rule in rules}
    known = {field.alias or name for name, field in RetainSection.model_fields.items()}
    built_in = {
        kind: {
            name
            for name in registry.names_of(kind)
            if registry.find(kind, name).decide.__module__.startswith("tierfall.")  # type: ignore[union-attr]
        }
        for kind in (PolicyKind.RETAIN, PolicyKind.EVICT, PolicyKind.FLUSH)
    }
    assert shown == known == built_in[PolicyKind.RETAIN]
    assert all(f"`{name}`" in TEXT for name in built_in[PolicyKind.EVICT])
    assert all(f"`order: {name}`" in TEXT for name in built_in[PolicyKind.FLUSH])


def test_each_reason_is_one_that_the_rule_gives() -> None:
    now = 1e9
    copies = {"disk": CopyView(state=CopyState.COMMITTED, bytes=1)}
    held = tuple(
        CheckpointView(
            id=CheckpointId(step, 1),
            ordinal=step,
            started_from=None,
            copies=copies,
            metrics={"loss": float(step)},
            tags=frozenset({"release"}),
            wall_time_s=now,
        )
        for step in (1000, 2000, 3000)
    )
    tier = TierRules(name="disk", kind=TierKind.FILE, survives=LossClass.PROCESS)
    asked = TierView(checkpoints=held, tier=tier, view=View(tiers=(tier,), checkpoints=held))
    for rules, reason in rows():
        for text in rules:
            (rule,) = RetainSection.model_validate(yaml.safe_load(f"{{{text}}}")).rules()
            facts = rule.policy.decide(asked, rule.rules, now).values()
            assert reason.rpartition("; ")[0] in facts, text
            assert (reason.rpartition("; ")[2] == str(rule)) is (text == rules[0]), text
