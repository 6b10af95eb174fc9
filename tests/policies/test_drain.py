"""Properties of drain plans, for random views."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.types.values import CheckpointId, CopyState, TierKind, survives
from tierfall.core.types.view import (
    ArrivalOutlook,
    CheckpointView,
    CopyView,
    DrainDecision,
    TierRules,
    View,
)
from tierfall.policies.drain import describe_drain, plan_drain

TIERS = ("nvme", "store")
KINDS = {"host": TierKind.HOST, "nvme": TierKind.FILE, "store": TierKind.OBJECT}
RULES = tuple(
    TierRules(name=name, kind=kind, survives=survives(kind, shared=False))
    for name, kind in KINDS.items()
)
RATES = st.none() | st.floats(0.5, 1e4)


@st.composite
def checkpoints(draw: Any, step: int) -> CheckpointView:
    size = draw(st.integers(1, 1000))
    copies = {"host": CopyView(state=CopyState.SEALED, bytes=size)}
    owed = set()
    for tier in TIERS:
        state = draw(st.sampled_from([CopyState.ABSENT, CopyState.ARRIVING, CopyState.COMMITTED]))
        if state is not CopyState.ABSENT:
            came = draw(st.integers(0, size)) if state is CopyState.ARRIVING else 0
            copies[tier] = CopyView(state=state, bytes=size, arrived_bytes=came)
        if state is not CopyState.COMMITTED and draw(st.booleans()):
            owed.add(tier)
    return CheckpointView(
        id=CheckpointId(step, 1),
        ordinal=step,
        started_from=None,
        abandoned=draw(st.booleans()) and draw(st.booleans()),
        deleted=draw(st.booleans()) and draw(st.booleans()),
        copies=copies,
        owed=frozenset(owed),
    )


@st.composite
def pictures(draw: Any) -> View:
    return View(
        tiers=RULES,
        checkpoints=tuple(
            draw(checkpoints(step)) for step in range(1, 1 + draw(st.integers(0, 6)))
        ),
        failing=frozenset(draw(st.sets(st.sampled_from(TIERS), max_size=1))),
    )


def seconds(decision: DrainDecision, rates: dict[str, float | None]) -> float:
    rate = rates[decision.tier]
    assert rate is not None
    return decision.left_bytes / rate


@settings(max_examples=400, deadline=None)
@given(
    pictures(),
    st.fixed_dictionaries({tier: RATES for tier in TIERS}),
    st.floats(-1, 1000),
)
def test_plans(view: View, rates: dict[str, float | None], left_s: float) -> None:
    plan = plan_drain(view, bytes_per_s=rates, left_s=left_s)
    by_id = {c.id: c for c in view.checkpoints}

    # each copy that a live checkpoint owes is decided on once; what is durable is never spoken of
    owed = {(c.id, t) for c in view.checkpoints for t in c.owed if c.live}
    assert sorted((d.checkpoint, d.tier) for d in plan) == sorted(owed)
    assert all(by_id[d.checkpoint].state(d.tier) is not CopyState.COMMITTED for d in plan)
    assert len(describe_drain(plan)) == len({id for id, _ in owed})

    for group in [[d for d in plan if d.tier == t] for t in TIERS]:
        spent_s = 0.0
        for decision in group:
            rest_s = left_s - spent_s
            begun = by_id[decision.checkpoint].state(decision.tier) is CopyState.ARRIVING
            if decision.outlook is ArrivalOutlook.ARRIVES:
                spent_s += seconds(decision, rates)
                assert decision.proceeds
            elif decision.outlook is ArrivalOutlook.UNKNOWN:
                assert decision.proceeds
                assert decision.tier in view.failing or rates[decision.tier] is None
                assert rest_s > 0
            else:  # what can arrive is never held back
                assert rest_s <= 0 or seconds(decision, rates) > rest_s
                arrives = any(
                    d.tier == decision.tier
                    and d.outlook is ArrivalOutlook.ARRIVES
                    and by_id[d.checkpoint].state(d.tier) is not CopyState.ARRIVING
                    for d in plan
                )
                assert decision.displaced == (begun and arrives)
                assert decision.proceeds == (begun and not arrives)
        assert spent_s <= max(left_s, 0.0) * (1 + 1e-9), "more is promised than the time carries"

    # what was begun stands before what was not, and of these the newer before the older
    states = [by_id[d.checkpoint].state(d.tier) is not CopyState.ARRIVING for d in plan]
    assert states == sorted(states)
    fresh = [d.checkpoint for d, late in zip(plan, states, strict=True) if late]
    assert fresh == sorted(fresh, reverse=True)
