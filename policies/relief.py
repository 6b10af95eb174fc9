"""Relief: which copies to slower tiers are given up where a stored tier is full of what only it has of them.

Pure: (view, the tier that is full, missing bytes) -> decisions about the tiers that are behind, each with its reason.
What memory holds for tiers that are behind is superseding's.
"""

from __future__ import annotations

from dataclasses import replace

from tierfall.core.values import CheckpointId, CopyState, WhenFull
from tierfall.core.view import CheckpointView, Decision, TierRules, Verdict, View
from tierfall.policies.guard import (
    beginning_of_the_line,
    newest_on_its_way,
    only_source_for,
    reason_to_keep,
)
from tierfall.policies.staleness import owed_in_time

_GIVES_UP = (WhenFull.SKIP, WhenFull.SUPERSEDE)
NOBODY: frozenset[CheckpointId] = frozenset()


def plan_relief(view: View, tier_name: str, *, missing_bytes: int) -> tuple[Decision, ...]:
    """Give up what one checkpoint on a full tier is owed to tiers that are behind, so that it may be dropped there; the
    decisions name those tiers. Nothing, where all that may be given up would not make ``missing_bytes`` free."""
    tier = view.tier(tier_name)
    may_go = [c for c in view.on(tier_name) if _may_go(view, c, tier)]
    if sum(c.copies[tier_name].bytes for c in may_go) < missing_bytes:
        return ()
    skipped = [c for c in may_go if _rules(view, c, tier) == {WhenFull.SKIP}]
    superseded = [c for c in may_go if c not in skipped]
    for checkpoint in (*superseded, *reversed(skipped)):
        which = "newest" if checkpoint in skipped else "oldest"
        return tuple(
            Decision(
                checkpoint=checkpoint.id,
                tier=behind,
                verdict=Verdict.DROP,
                reason=f"{tier_name} is full of what {behind} is owed, and of that it is the {which} that nothing "
                "hangs on",
                bytes=checkpoint.copies[tier_name].bytes,
            )
            for behind in only_source_for(view, checkpoint, tier)
        )
    return ()


def _rules(view: View, checkpoint: CheckpointView, tier: TierRules) -> set[WhenFull]:
    waiting = only_source_for(view, checkpoint, tier)
    return {view.tier(name).when_full or WhenFull.WAIT for name in waiting}


def _may_go(view: View, checkpoint: CheckpointView, tier: TierRules) -> bool:
    waiting = only_source_for(view, checkpoint, tier)
    if not waiting or not _rules(view, checkpoint, tier) <= set(_GIVES_UP):
        return False
    leaving = any(checkpoint.state(t.name) is CopyState.LEAVING for t in view.tiers)
    held = (
        view.restoring
        or not checkpoint.live
        or checkpoint.settling
        or leaving
        or beginning_of_the_line(view, checkpoint)
        or owed_in_time(view, checkpoint)
        or newest_on_its_way(view, checkpoint)
    )
    if held:
        return False
    alone = replace(checkpoint, owed=checkpoint.owed - set(waiting))
    as_if = replace(
        view, checkpoints=tuple(alone if c.id == alone.id else c for c in view.checkpoints)
    )
    return reason_to_keep(as_if, alone, tier, NOBODY) is None
