"""Properties of retention and eviction, for random views and rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.test_policies import A_RULE, RULES, VIEWS, of
from tests.policies.views import without
from tests.rules import last
from tests.simulation.world import file_rules
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, TierView, Verdict, View
from tierfall.policies.eviction import cheapest_first, plan_eviction
from tierfall.policies.flush import still_owed
from tierfall.policies.protection import reason_to_keep
from tierfall.policies.retention import kept_by_rules, next_due_s, plan_retention

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
    for tier in view.tiers[1:]:
        fewer = dropped(with_rules(view, tier.name, rules), tier.name)
        assert dropped(with_rules(view, tier.name, (*rules, more)), tier.name) <= fewer
        assert dropped(with_rules(view, tier.name, (more, *rules)), tier.name) <= fewer


@EXAMPLES
@given(VIEWS)
def test_what_was_planned_is_all_that_goes(view: View) -> None:
    """A dry run says what happens: once that is carried out, as much as a survey at a time, nothing more goes."""
    for tier in view.tiers[1:]:
        drops = dropped(view, tier.name)
        for done in range(len(drops) + 1):
            part = {(tier.name, id) for id in sorted(drops)[:done]}
            assert dropped(without(view, part), tier.name) == drops - {id for _, id in part}


@EXAMPLES
@given(VIEWS)
def test_what_a_rule_wants_stays_and_the_reason_says_so(view: View) -> None:
    for tier in view.tiers[1:]:
        wanted = kept_by_rules(view, tier, view.on(tier.name))
        for decision in plan_retention(view, tier.name):
            checkpoint, _ = of(view, (tier.name, decision.checkpoint))
            if decision.checkpoint in wanted:
                assert checkpoint.live
                assert decision.verdict is Verdict.KEEP
                guard = reason_to_keep(view, checkpoint, tier, frozenset())
                assert decision.reason in (guard, wanted[decision.checkpoint])


@EXAMPLES
@given(VIEWS, st.integers(1, 6))
def test_last_keeps_as_many_whatever_else_lies_there(view: View, count: int) -> None:
    """Neither what was left behind, nor deleted, nor is only arriving takes up a place."""
    for tier in view.tiers[1:]:
        asked = with_rules(view, tier.name, (last(count),))
        live = sorted(c.id for c in view.on(tier.name) if c.live)
        assert not dropped(asked, tier.name) & set(live[-count:])


def quiet(view: View) -> View:
    """The same, with nothing that is owed, pinned or read: more of it may go."""
    return replace(
        view,
        checkpoints=tuple(
            replace(
                c,
                owed=frozenset(),
                pinned=False,
                copies={tier: replace(copy, leased=False) for tier, copy in c.copies.items()},
            )
            for c in view.checkpoints
        ),
    )


@EXAMPLES
@given(VIEWS, RULES, st.integers(1, 900), st.integers(0, 300))
def test_what_a_rule_wants_is_given_up_after_what_none_wants(
    view: View, rules: tuple[Rule, ...], need: int, free: int
) -> None:
    view = quiet(view)
    for place in view.tiers[1:]:
        view = with_rules(view, place.name, rules)
        tier = view.tier(place.name)
        plan = plan_eviction(view, tier.name, need_bytes=need, free_bytes=free)
        gone = frozenset(d.checkpoint for d in plan.deletions)
        wanted = kept_by_rules(view, tier, view.on(tier.name))
        order = [d.checkpoint in wanted for d in plan.deletions]
        assert order == sorted(order)
        if any(order):
            for checkpoint in view.on(tier.name):
                unwanted = checkpoint.id not in gone and checkpoint.id not in wanted
                assert not unwanted or reason_to_keep(view, checkpoint, tier, gone)


@EXAMPLES
@given(VIEWS, st.integers(1, 300), st.sampled_from([0.5, 0.8, 1.0]), st.sampled_from([0.3, 0.5]))
def test_above_the_high_watermark_copies_go_until_the_low_one_and_no_further(
    view: View, need: int, high: float, low: float
) -> None:
    for old in view.tiers[1:]:
        capacity = 1000
        tier = replace(old, capacity_bytes=capacity, evict_high=high, evict_low=low)
        asked = with_tier(view, tier)
        used = asked.used_bytes(tier.name)
        plan = plan_eviction(asked, tier.name, need_bytes=need, free_bytes=capacity - used)
        left = used - sum(d.bytes for d in plan.deletions)
        if used + need <= min(high * capacity, capacity):
            assert not plan.deletions
        elif plan.deletions:
            goal = low * capacity if used + need > high * capacity else capacity
            assert left + plan.deletions[-1].bytes + need > goal
        assert plan.missing_bytes == max(0, left + need - capacity)


FOLDERS = tuple(file_rules(name, shared=True) for name in ("nvme", "near", "pfs", "far"))
ELSEWHERE = st.lists(st.sets(st.sampled_from(["near", "pfs", "far"])), min_size=2, max_size=6)
READ = st.dictionaries(st.sampled_from(["nvme", "near", "pfs", "far"]), st.sampled_from([1.0, 2.0]))


def given_up_first(elsewhere: list[set[str]], rates: dict[str, float]) -> list[int]:
    """In which order nvme gives up checkpoints that it holds, and other tiers too."""
    copy = CopyView(state=CopyState.COMMITTED, bytes=1)
    held = tuple(
        CheckpointView(
            id=CheckpointId(step, 1),
            ordinal=step,
            started_from=None,
            copies=dict.fromkeys(["nvme", *others], copy),
        )
        for step, others in enumerate(elsewhere)
    )
    view = View(tiers=FOLDERS, checkpoints=held, read_bytes_per_s=rates)
    asked = TierView(checkpoints=held, tier=FOLDERS[0], view=view)
    return [id.step for id, _ in cheapest_first(asked, None, 0.0)]


@EXAMPLES
@given(ELSEWHERE, READ)
def test_what_a_tier_gives_back_faster_as_measured_goes_first(
    elsewhere: list[set[str]], rates: dict[str, float]
) -> None:
    ordered = given_up_first(elsewhere, rates)
    assert sorted(ordered) == list(range(len(elsewhere)))
    chain = [tier.name for tier in FOLDERS]
    sources = [min(elsewhere[step], key=chain.index, default=None) for step in ordered]
    measured = [rates[source] for source in sources if source in rates]
    assert measured == sorted(measured, reverse=True)
    alone = [source is None for source in sources]
    assert alone == sorted(alone)


@EXAMPLES
@given(ELSEWHERE, st.sampled_from([1.0, 2.0]))
def test_without_a_measured_difference_the_chain_decides(
    elsewhere: list[set[str]], rate: float
) -> None:
    unknown = given_up_first(elsewhere, {})
    assert given_up_first(elsewhere, {tier.name: rate for tier in FOLDERS}) == unknown
    assert all(given_up_first(elsewhere, {tier.name: rate}) == unknown for tier in FOLDERS)


@EXAMPLES
@given(VIEWS)
def test_nothing_goes_by_time_before_it_is_reported_to_be_due(view: View) -> None:
    for tier in view.tiers[1:]:
        now = dropped(view, tier.name)
        due = next_due_s(view, tier.name)
        later = [10.25, 10.5, 12.0, 50.0, 1000.0]
        for wall_time_s in (time for time in later if due is None or time < due):
            assert dropped(replace(view, wall_time_s=wall_time_s), tier.name) == now


@EXAMPLES
@given(VIEWS)
def test_what_would_stay_is_sent(view: View) -> None:
    """A tier is owed what it takes, but for what no rule of it wants beside all that there is."""
    for checkpoint in view.checkpoints:
        if not checkpoint.live or view.many_ranks:
            continue
        owed = still_owed(view, checkpoint)
        for tier in view.tiers[1:]:
            passed = any(c.live and c.id > checkpoint.id for c in view.on(tier.name))
            due = checkpoint.ordinal % tier.flush_every == 0 and not passed
            if not due or checkpoint.readable_on(tier.name) or tier.name in owed:
                continue
            held = [
                c for c in view.checkpoints if c == checkpoint or any(map(c.readable_on, c.copies))
            ]
            assert tier.retain
            assert checkpoint.id not in kept_by_rules(view, tier, held)


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count, from now on, how often a policy looks at a checkpoint."""
    looks = [0]
    state = CheckpointView.state

    def looked(self: CheckpointView, tier: str) -> CopyState:
        looks[0] += 1
        return state(self, tier)

    alive = property(lambda self: looks.__setitem__(0, looks[0] + 1) or True)
    monkeypatch.setattr(CheckpointView, "state", looked)
    monkeypatch.setattr(CheckpointView, "live", alive)
    return looks


def saved(step: int, tier: str, *, owed: str | None = None) -> CheckpointView:
    """A checkpoint that a tier has, and that another is owed."""
    return CheckpointView(
        id=CheckpointId(step, 1),
        ordinal=step,
        started_from=None,
        copies={tier: CopyView(state=CopyState.COMMITTED, bytes=1)},
        owed=frozenset() if owed is None else frozenset((owed,)),
    )


def test_what_is_asked_of_many_checkpoints_takes_no_more_than_so_many_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 500
    tier = file_rules("store", shared=True, retain_last=2)
    checkpoints = tuple(saved(step, "store") for step in range(1, count + 1))
    looks = count_looks(monkeypatch)
    decisions = plan_retention(View(tiers=(tier,), checkpoints=checkpoints), "store")
    assert [d.checkpoint.step for d in decisions if d.verdict is Verdict.KEEP] == [499, 500]
    assert looks[0] < 40 * count, "the coordinator decides on each of them after every commit"
