"""Properties of the policies about flushes and about copies that are given up, for random views."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.policies.test_policies import VIEWS
from tests.policies.test_retention import count_looks, saved
from tests.policies.views import COPY_BYTES
from tests.rules import NEWEST_FIRST
from tests.simulation.world import file_rules
from tierfall.core.types.values import LOSS_CLASSES, CopyState, LossClass, TierKind, WhenFull
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, Verdict, View
from tierfall.policies.backpressure import plan_relief
from tierfall.policies.flush import plan_flush, still_owed
from tierfall.policies.forecast import forecast
from tierfall.policies.retention import plan_retention
from tierfall.policies.throttle import LEAST, plan_yield

EXAMPLES = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
seconds = st.floats(0.1, 10.0)


def stored(view: View) -> list[TierRules]:
    return [tier for tier in view.tiers if tier.kind is not TierKind.HOST]


@EXAMPLES
@given(VIEWS)
def test_each_copy_that_waits_is_planned_once_in_the_tiers_order(view: View) -> None:
    for tier in stored(view):
        plan = plan_flush(view, tier.name)
        ids = [decision.checkpoint for decision in plan]
        newest_first = tier.flush_order is NEWEST_FIRST
        goes = [d.checkpoint for d in plan if d.verdict is Verdict.KEEP]
        assert goes == sorted(goes, reverse=newest_first)
        assert goes == ids[len(ids) - len(goes) :], "what is given up comes first"
        waiting = {
            c.id
            for c in view.checkpoints
            if c.live and tier.name in c.owed and c.state(tier.name) is CopyState.ABSENT
        }
        assert sorted(ids) == sorted(waiting)
        assert newest_first or all(decision.verdict is Verdict.KEEP for decision in plan)


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


@pytest.mark.parametrize("retained", [None, 2 * 500])
def test_the_turns_of_many_that_wait_take_no_more_than_so_many_looks(
    monkeypatch: pytest.MonkeyPatch, retained: int | None
) -> None:
    """A tier that has the newest is owed many older ones."""
    count = 500
    store = file_rules("store", flush_order=NEWEST_FIRST, retain_last=retained)
    waiting = [saved(step, "nvme", owed="store") for step in range(1, count + 1)]
    checkpoints = (*waiting, saved(count + 1, "store"))
    looks = count_looks(monkeypatch)
    plan = plan_flush(View(tiers=(file_rules("nvme"), store), checkpoints=checkpoints), "store")
    assert [d.checkpoint.step for d in plan] == [*range(count, 0, -1)]
    assert plan[-1].reason == f"after {count - 1} newer ones"
    assert looks[0] < 60 * count, "it is worked out whenever a copy may begin"


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
@given(VIEWS)
def test_the_newest_of_a_line_is_owed_after_a_start_whatever_the_order(view: View) -> None:
    live = [c for c in view.checkpoints if c.live]
    if live:
        newest = live[-1]
        owed = still_owed(view, newest)
        for tier in stored(view):
            due = newest.ordinal % tier.flush_every == 0 and not newest.readable_on(tier.name)
            assert (tier.name in owed) == due


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


@EXAMPLES
@given(st.lists(seconds, max_size=20), st.lists(seconds, max_size=20), st.floats(0.1, 1), seconds)
def test_a_share_is_never_less_than_it_must_be_nor_more_than_all(
    idle: list[float], busy: list[float], share: float, least: float
) -> None:
    messages = plan_yield(idle_s=idle, busy_s=busy, share=share, least=least)
    assert messages.reason
    assert 0 < messages.share <= 1.0
    assert messages.share >= min(1.0, max(LEAST, least)) or messages.share == share
    assert messages.share == share or min(len(idle), len(busy)) >= 8


@EXAMPLES
@given(st.integers(1, 40), seconds, st.integers(1, 10**6), st.floats(1, 1e7), st.integers(0, 9))
def test_a_tier_that_keeps_up_is_never_warned_of(
    saves: int, every_s: float, size: int, rate: float, waiting: int
) -> None:
    tier = TierRules(name="t", kind=TierKind.FILE, survives=LossClass.NODE)
    messages = forecast(
        tier,
        saves=saves,
        every_s=every_s,
        bytes=size,
        bytes_per_s=rate,
        stretches=8,
        waiting=waiting,
    )
    assert messages.behind is not None
    assert (messages.behind > 0) == (size / every_s > rate)
    assert messages.warning is None or (messages.behind > 0 and waiting > 1 and saves > 5)
