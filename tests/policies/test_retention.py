"""Properties of retention and eviction, for random views and rules."""

from __future__ import annotations

import time
from dataclasses import replace

from hypothesis import given, settings

from tests.policies.test_policies import A_RULE, RULES, VIEWS
from tests.policies.views import without
from tests.simulation.world import file_rules
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, Verdict, View
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.retention import next_due_s, plan_retention

EXAMPLES = settings(max_examples=150, deadline=None)


def dropped(view: View, tier: str) -> set[CheckpointId]:
    return {d.checkpoint for d in plan_retention(view, tier) if d.verdict is Verdict.DROP}


def with_tier(view: View, tier: TierRules) -> View:
    return replace(view, tiers=tuple(tier if t.name == tier.name else t for t in view.tiers))


def with_rules(view: View, tier: str, rules: tuple[Rule, ...]) -> View:
    return with_tier(view, replace(view.tier(tier), retain=rules))


@EXAMPLES
@given(VIEWS, RULES, A_RULE)
def test_one_more_rule_never_drops_more(view: View, rules: tuple[Rule, ...], more: Rule) -> None:
    """But of abandoned ones: they go once another one stays, which one more rule may have kept."""
    abandoned = {checkpoint.id for checkpoint in view.checkpoints if checkpoint.abandoned}
    for tier in view.tiers[1:]:
        fewer = dropped(with_rules(view, tier.name, rules), tier.name) | abandoned
        assert dropped(with_rules(view, tier.name, (*rules, more)), tier.name) <= fewer
        assert dropped(with_rules(view, tier.name, (more, *rules)), tier.name) <= fewer


@EXAMPLES
@given(VIEWS)
def test_what_was_planned_is_all_that_goes(view: View) -> None:
    """A dry run says what happens: once that is carried out, as much as a plan at a time, nothing more goes."""
    for tier in view.tiers[1:]:
        drops = dropped(view, tier.name)
        for done in range(len(drops) + 1):
            part = {(tier.name, id) for id in sorted(drops)[:done]}
            assert dropped(without(view, part), tier.name) == drops - {id for _, id in part}


def test_an_abandoned_one_does_not_rely_on_what_goes_with_it() -> None:
    copy = CopyView(state=CopyState.COMMITTED, bytes=1)
    held = tuple(
        CheckpointView(
            id=CheckpointId(step, attempt),
            ordinal=step,
            started_from=None,
            abandoned=(step, attempt) == (4, 1),
            copies={"nvme": copy},
        )
        for step, attempt in ((1, 3), (2, 1), (4, 1))
    )
    tiers = (file_rules("nvme", retain_last=1),)
    assert dropped(View(tiers=tiers, checkpoints=held), "nvme") == {CheckpointId(1, 3)}


def test_thousands_of_checkpoints_with_nan_are_planned_in_no_time() -> None:
    """Half of 10,000 have some, and the rest are older."""
    copy = CopyView(state=CopyState.COMMITTED, bytes=1)
    held = tuple(
        CheckpointView(
            id=CheckpointId(step, 1),
            ordinal=step,
            started_from=None,
            copies={"nvme": copy},
            not_finite=frozenset({"w"} if step > 5000 else ()),
        )
        for step in range(1, 10_001)
    )
    view = View(tiers=(file_rules("nvme", retain_last=2),), checkpoints=held)
    began = time.thread_time()
    assert len(dropped(view, "nvme")) == 10_000 - 3  # the last two, and the newest without NaN
    plan = plan_eviction(view, "nvme", need_bytes=9000, free_bytes=0)
    assert len(plan.deletions) == 9000
    assert time.thread_time() - began < 2


@EXAMPLES
@given(VIEWS)
def test_nothing_goes_by_time_before_it_is_reported_to_be_due(view: View) -> None:
    for tier in view.tiers[1:]:
        now = dropped(view, tier.name)
        due = next_due_s(view, tier.name)
        later = [10.25, 10.5, 12.0, 50.0, 1000.0]
        for wall_time_s in (at_s for at_s in later if due is None or at_s < due):
            assert dropped(replace(view, wall_time_s=wall_time_s), tier.name) == now


@EXAMPLES
@given(VIEWS)
def test_a_copy_in_peer_memory_is_no_reason_to_delete_a_stored_one(view: View) -> None:
    peers = replace(view.tiers[1], kind=TierKind.PEER, survives=LossClass.NODE)
    beside = with_tier(view, peers)
    alone = without(beside, {(peers.name, c.id) for c in view.on(peers.name)})
    for tier in view.tiers[2:]:
        assert dropped(beside, tier.name) == dropped(alone, tier.name)
