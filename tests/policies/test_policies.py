"""What no plan may do: random views, and plans executed as the coordinator does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.views import COPY_BYTES, survivors, without
from tests.rules import (
    NEWEST_FIRST,
    best,
    every_period,
    every_steps,
    last,
    order,
    retained,
    tagged,
    young,
)
from tierfall.core.types.lineage import AttemptStart, abandoned_by
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import (
    LOSS_CLASSES,
    CheckpointId,
    CopyState,
    LossClass,
    TierKind,
    WhenFull,
    survives,
)
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, Verdict, View
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.retention import plan_retention

RANK = [LossClass.NONE, LossClass.PROCESS, LossClass.NODE, LossClass.SITE]
WHOLE = (CopyState.SEALED, CopyState.COMMITTED)
EXAMPLES = settings(max_examples=100, deadline=None)

Drop = tuple[str, CheckpointId]


# A strategy that is made while a view is drawn is validated anew each time, which takes longer than the draw itself.
A_RULE: st.SearchStrategy[Rule] = st.one_of(
    st.builds(last, st.integers(1, 3)),
    st.builds(every_steps, st.integers(1, 4)),
    st.builds(every_period, st.sampled_from([1.0, 5.0])),
    st.builds(
        best,
        st.sampled_from(["loss", "accuracy"]),
        mode=st.sampled_from(["min", "max"]),
        count=st.integers(1, 2),
    ),
    st.builds(young, st.sampled_from([1.0, 5.0, 100.0])),
    st.builds(tagged, st.sampled_from(["a", "b"])),
    st.builds(tagged),
)
RULES = st.lists(A_RULE, min_size=1, max_size=3).map(tuple)
METRICS = st.dictionaries(
    st.sampled_from(["loss", "accuracy"]), st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf])
)
KINDS = st.lists(
    st.sampled_from([(TierKind.FILE, False), (TierKind.FILE, True), (TierKind.OBJECT, True)]),
    min_size=1,
    max_size=3,
)
FLUSH_EVERY = st.sampled_from([1, 1, 2, 3])
RETAIN = st.one_of(st.builds(retained, st.sampled_from([None, 1, 2])), RULES)
EVICT = st.sampled_from([None, None, order("oldest")])
FLUSH_ORDER = st.sampled_from([None, NEWEST_FIRST])
IDS = st.sets(st.tuples(st.integers(1, 6), st.integers(1, 3)), max_size=7)
START = st.sampled_from([None, *range(1, 7)])
ONE_OF_EIGHT = st.integers(0, 7)
ONE_OF_FIVE = st.integers(0, 4)
TAGS = st.frozensets(st.sampled_from(["a", "b"]))
WALL_TIME = st.sampled_from([None, *map(float, range(10))])
ATTEMPT = st.sampled_from([None, 1, 2, 3])
BOOLEANS = st.booleans()
STATE = {
    whole: st.sampled_from([None, None, whole, whole, whole, CopyState.ARRIVING, CopyState.LEAVING])
    for whole in WHOLE
}


@cache
def some_of(names: tuple[str, ...]) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(names))


@st.composite
def _tiers(draw: st.DrawFn) -> tuple[TierRules, ...]:
    stored = [
        TierRules(
            name=f"t{number}",
            kind=kind,
            survives=survives(kind, shared=shared),
            flush_every=draw(FLUSH_EVERY),
            retain=draw(RETAIN),
            evict=draw(EVICT),
            flush_order=draw(FLUSH_ORDER),
        )
        for number, (kind, shared) in enumerate(draw(KINDS))
    ]
    supersedes = WhenFull.SUPERSEDE
    host = TierRules(
        name="host", kind=TierKind.HOST, survives=LossClass.PROCESS, when_full=supersedes
    )
    return (host, *stored)


TIERS = _tiers()


def left_behind(checkpoints: Iterable[CheckpointView]) -> frozenset[CheckpointId]:
    known = list(checkpoints)
    begun = [
        AttemptStart(attempt=c.id.attempt, attempt_id="", started_from=c.started_from, began_s=0.0)
        for c in known
    ]
    is_abandoned = abandoned_by(begun)
    return frozenset(c.id for c in known if is_abandoned(c.id, ""))


@st.composite
def _views(draw: st.DrawFn) -> View:
    rules = draw(TIERS)
    names = some_of(tuple(r.name for r in rules[1:]))
    ids = draw(IDS)
    starts = {n: draw(START) for n in (1, 2, 3)}
    checkpoints = []
    for step, attempt in sorted(ids):
        start = starts[attempt]
        copies = drawn_copies(draw, rules)
        bad = draw(names) & copies.keys() if draw(ONE_OF_FIVE) == 0 else ()
        checkpoints.append(
            CheckpointView(
                id=CheckpointId(step, attempt),
                ordinal=step,
                started_from=None if start is None else CheckpointId(start, attempt - 1),
                pinned=draw(BOOLEANS) and draw(BOOLEANS),
                deleted=draw(ONE_OF_EIGHT) == 0,
                copies={tier: copy for tier, copy in copies.items() if tier not in bad},
                damaged={t: replace(copies[t], state=CopyState.COMMITTED) for t in bad},
                owed=draw(names),
                metrics=draw(METRICS),
                tags=draw(TAGS),
                wall_time_s=draw(WALL_TIME),
            )
        )
    whole = [c for c in checkpoints if any(copy.state in WHOLE for copy in c.copies.values())]
    left = left_behind(whole)
    restored_from = draw(st.integers(0, len(checkpoints)))
    return View(
        tiers=rules,
        checkpoints=tuple(replace(c, abandoned=c.id in left) for c in checkpoints),
        failing=draw(names),
        restored_from=checkpoints[restored_from - 1].id if restored_from else None,
        attempt=draw(ATTEMPT),
        wall_time_s=10.0,
        many_ranks=draw(BOOLEANS),
    )


VIEWS = _views()


def drawn_copies(draw: st.DrawFn, rules: tuple[TierRules, ...]) -> dict[str, CopyView]:
    found = {}
    for tier in rules:
        whole = CopyState.SEALED if tier.kind is TierKind.HOST else CopyState.COMMITTED
        state = draw(STATE[whole])
        if state is not None:
            leased = draw(ONE_OF_FIVE) == 0
            found[tier.name] = CopyView(state=state, bytes=COPY_BYTES, leased=leased)
    return found


def carried_out(view: View, draw: Callable[[int], int]) -> set[Drop]:
    """Plan and carry out, tier by tier in a drawn order, retention and then an eviction that wants everything."""
    dropped: set[Drop] = set()
    names = [rules.name for rules in view.tiers]
    for name in sorted(names, key=lambda name: draw(len(names) * 7 + len(name))):
        if name != "host":
            dropped |= {
                (name, d.checkpoint)
                for d in plan_retention(without(view, dropped), name)
                if d.verdict is Verdict.DROP
            }
        plan = plan_eviction(without(view, dropped), name, need_bytes=10_000, free_bytes=0)
        dropped |= {(name, d.checkpoint) for d in plan.deletions}
    return dropped


def of(view: View, drop: Drop) -> tuple[CheckpointView, CopyView]:
    checkpoint = next(c for c in view.checkpoints if c.id == drop[1])
    return checkpoint, {**checkpoint.damaged, **checkpoint.copies}[drop[0]]


@EXAMPLES
@given(VIEWS, st.randoms(use_true_random=False))
def test_no_plan_takes_what_somebody_reads_or_what_is_not_whole(view: View, random: object) -> None:
    for drop in carried_out(view, random.randrange):  # type: ignore[attr-defined]
        _, copy = of(view, drop)
        assert not copy.leased
        assert copy.state in WHOLE


@EXAMPLES
@given(VIEWS, st.randoms(use_true_random=False))
def test_a_pinned_checkpoint_is_never_lost(view: View, random: object) -> None:
    dropped = carried_out(view, random.randrange)  # type: ignore[attr-defined]
    for drop in dropped:
        assert drop[0] == "host" or not of(view, drop)[0].pinned
    after = {c.id: c for c in without(view, dropped).checkpoints}
    for checkpoint in view.checkpoints:
        if checkpoint.pinned and any(c.state in WHOLE for c in checkpoint.copies.values()):
            assert any(c.state in WHOLE for c in after[checkpoint.id].copies.values())


@EXAMPLES
@given(VIEWS, st.randoms(use_true_random=False))
def test_the_newest_that_survives_each_loss_is_never_lost(view: View, random: object) -> None:
    after = without(view, carried_out(view, random.randrange))  # type: ignore[attr-defined]
    for lost in LOSS_CLASSES:
        before = survivors(view, lost)
        if before:
            assert max(before) in survivors(after, lost)


@EXAMPLES
@given(VIEWS)
def test_a_damaged_copy_is_not_counted_for_another_checkpoint(view: View) -> None:
    for tier in view.tiers[1:]:
        for decision in plan_retention(view, tier.name):
            others_good = tuple(
                c if c.id == decision.checkpoint else replace(c, damaged={})
                for c in view.checkpoints
            )
            assert decision in plan_retention(replace(view, checkpoints=others_good), tier.name)


@EXAMPLES
@given(VIEWS)
def test_retention_takes_an_abandoned_one_only_where_the_new_line_is_as_safe(view: View) -> None:
    for tier in view.tiers[1:]:
        for decision in plan_retention(view, tier.name):
            checkpoint, _ = of(view, (tier.name, decision.checkpoint))
            if decision.verdict is Verdict.KEEP or not checkpoint.abandoned:
                continue
            lost = LOSS_CLASSES[RANK.index(tier.survives) - 1]
            newer = {id for id in survivors(view, lost) if id.attempt > checkpoint.id.attempt}
            assert newer or checkpoint.deleted


@EXAMPLES
@given(VIEWS, st.randoms(use_true_random=False))
def test_the_only_source_of_what_a_tier_waits_for_stays(view: View, random: object) -> None:
    after = without(view, carried_out(view, random.randrange))  # type: ignore[attr-defined]
    for before, then in zip(view.checkpoints, after.checkpoints, strict=True):
        waiting = before.owed - view.failing
        had = any(c.state in WHOLE for c in before.copies.values())
        if waiting and had and not before.deleted:
            assert any(c.state in WHOLE for c in then.copies.values())


@EXAMPLES
@given(VIEWS)
def test_the_newest_in_memory_leaves_only_when_it_is_alone_and_durable_or_owed_to_none(
    view: View,
) -> None:
    plan = plan_eviction(view, "host", need_bytes=10_000, free_bytes=0)
    held = [c for c in view.checkpoints if c.state("host") is CopyState.SEALED]
    live = [c for c in held if c.live]
    if live and live[-1].id in {d.checkpoint for d in plan.deletions}:
        assert len(held) == 1
        is_durable = CopyState.COMMITTED in [copy.state for copy in live[-1].copies.values()]
        assert is_durable or not live[-1].owed


@EXAMPLES
@given(VIEWS, st.randoms(use_true_random=False))
def test_plans_do_not_depend_on_the_order_in_which_checkpoints_are_given(
    view: View, random: object
) -> None:
    shuffled = list(view.checkpoints)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    other = replace(view, checkpoints=tuple(shuffled))
    for tier in view.tiers:
        assert plan_retention(view, tier.name) == plan_retention(other, tier.name)
        assert plan_eviction(view, tier.name, need_bytes=500, free_bytes=0) == plan_eviction(
            other, tier.name, need_bytes=500, free_bytes=0
        )
