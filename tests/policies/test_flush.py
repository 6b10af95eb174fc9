"""Properties of the policies about flushes and about copies that are given up, for random views."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.policies.test_policies import VIEWS
from tests.policies.views import COPY_BYTES
from tierfall.core.types.values import LOSS_CLASSES, CopyState, LossClass, TierKind, WhenFull
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, Verdict, View
from tierfall.policies.backpressure import plan_relief
from tierfall.policies.flush import plan_flush
from tierfall.policies.retention import plan_retention

EXAMPLES = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def stored(view: View) -> list[TierRules]:
    return [tier for tier in view.tiers if tier.kind is not TierKind.HOST]


@EXAMPLES
@given(VIEWS)
def test_what_is_given_up_for_newer_ones_is_what_retention_drops_when_it_comes(view: View) -> None:
    for tier in stored(view):
        newest = max((c.id for c in view.on(tier.name) if c.live), default=None)
        for decision in plan_flush(view, tier.name):
            waits = next(c for c in view.checkpoints if c.id == decision.checkpoint)
            if tier.in_order or newest is None or newest < waits.id:
                assert decision.verdict is Verdict.KEEP
                continue
            messages = {
                d.checkpoint: d for d in plan_retention(arrived(view, waits, tier), tier.name)
            }
            assert decision.verdict is messages[waits.id].verdict
            assert not (waits.pinned and decision.verdict is Verdict.DROP)


def arrived(view: View, checkpoint: CheckpointView, tier: TierRules) -> View:
    copies = {
        **checkpoint.copies,
        tier.name: CopyView(state=CopyState.COMMITTED, bytes=COPY_BYTES),
    }
    there = replace(checkpoint, copies=copies, owed=checkpoint.owed - {tier.name})
    return replace(
        view, checkpoints=tuple(there if c.id == there.id else c for c in view.checkpoints)
    )


@EXAMPLES
@given(
    VIEWS, st.lists(st.sampled_from([*WhenFull, None]), min_size=4, max_size=4), st.integers(1, 2)
)
def test_relief_gives_up_nothing_that_was_promised(
    view: View, words: list[WhenFull | None], copies: int
) -> None:
    rules = zip(view.tiers, words, strict=False)
    view = replace(view, tiers=tuple(replace(tier, when_full=word) for tier, word in rules))
    for tier in stored(view):
        plan = plan_relief(view, tier.name, missing_bytes=copies * COPY_BYTES)
        assert len({decision.checkpoint for decision in plan}) <= 1
        for decision in plan:
            behind = view.tier(decision.tier)
            given_up = next(c for c in view.checkpoints if c.id == decision.checkpoint)
            assert behind.when_full in (WhenFull.SKIP, WhenFull.SUPERSEDE)
            assert decision.tier in given_up.owed
            assert not given_up.pinned
            assert not given_up.copies[tier.name].leased
            assert given_up.readable_on(tier.name)
            for lost in LOSS_CLASSES:
                if comes(view, given_up, lost):
                    newer = [c for c in view.checkpoints if c.live and c.id > given_up.id]
                    assert any(comes(view, c, lost) for c in newer), (
                        f"nothing else survives a {lost}"
                    )


def comes(view: View, checkpoint: CheckpointView, lost: LossClass) -> bool:
    """Whether it survives such a loss, or is on its way to where it does: a rule of the tests' own."""
    order = [LossClass.NONE, LossClass.PROCESS, LossClass.NODE, LossClass.SITE]
    whole = any(checkpoint.readable_on(tier.name) for tier in view.tiers)
    return whole and any(
        order.index(tier.survives) >= order.index(lost)
        and (checkpoint.state(tier.name) is CopyState.COMMITTED or tier.name in checkpoint.owed)
        for tier in view.tiers
    )
