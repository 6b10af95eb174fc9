"""What ``ls`` and ``show`` know of a run: listings, decisions and manifests, gathered once and asked by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Self

from tierfall.cli.common import readable_number
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge, to_view
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.types.errors import (
    TierfallError,
)
from tierfall.core.types.loss_bound import LossBound
from tierfall.core.types.units import format_duration
from tierfall.core.types.values import (
    LOSS_CLASSES,
    CheckpointId,
    CopyState,
    LossClass,
    TierKind,
)
from tierfall.core.types.view import Decision, Verdict, View
from tierfall.ops.commands import unread, view_of
from tierfall.ops.reader import RunReader
from tierfall.policies.defaults import plan_retention
from tierfall.policies.forecast import loss_bounds
from tierfall.setup.tiers import tier_rules
from tierfall.telemetry.status import LossStatus, Status


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One look at all tiers of a run."""

    listings: tuple[Listing, ...]
    known: tuple[KnownCheckpoint, ...]
    view: View
    safety: View
    """As ``view``, with the tiers that are only read: what is there is not lost."""
    owner: LockOwner | None
    wall_time_s: float

    @classmethod
    def gather(cls, reader: RunReader) -> Self:
        listings = reader.list()
        known = merge(listings)
        return cls(
            listings=listings,
            known=known,
            view=view_of(reader.config, known),
            safety=to_view(
                tier_rules(reader.config, read_too=True), known, wall_time_s=time.time()
            ),
            owner=reader.owner(),
            wall_time_s=time.time(),
        )

    @property
    def by_id(self) -> dict[CheckpointId, KnownCheckpoint]:
        return {c.id: c for c in self.known}

    @property
    def unread(self) -> dict[str, TierfallError]:
        return unread(self.listings)

    def rows(self) -> list[CheckpointId]:
        """Every checkpoint, and what is not one yet."""
        unfinished = {id for listing in self.listings for id in listing.unfinished}
        return sorted({*self.by_id, *unfinished})

    def rows_with_damage(self) -> list[CheckpointId]:
        """As ``rows``, with the steps in whose folders' places something else lies."""
        no_folders = {e.checkpoint for listing in self.listings for e in listing.no_folders()}
        return sorted({*self.rows(), *no_folders})

    def cell(self, id: CheckpointId, tier: str) -> str:
        """Say in a word what a tier holds of a checkpoint."""
        listing = next(x for x in self.listings if x.tier == tier)
        if listing.error is not None:
            return "?"
        copy = listing.copy(id)
        if copy is not None:
            return copy.label
        if listing.no_folders(id.step, id.attempt):
            return "damaged"
        if id in listing.unfinished:
            return str(CopyState.ARRIVING) if self.owner else "unfinished"
        return "-"

    def age_s(self, checkpoint: KnownCheckpoint) -> float | None:
        saved_s = checkpoint.wall_time_s
        return None if saved_s is None else max(0.0, self.wall_time_s - saved_s)

    def owed(self, id: CheckpointId) -> tuple[str, ...]:
        """Name the tiers that were read and still wait for it."""
        seen = next(c for c in self.view.checkpoints if c.id == id)
        owed = seen.owed - self.unread.keys()
        return tuple(tier.name for tier in self.view.tiers if tier.name in owed)

    def decision(self, tier: str, id: CheckpointId) -> Decision:
        """Say what becomes of a copy by rule, and why."""
        if all(rules.name != tier for rules in self.view.tiers):
            reason = "the tier is read-only: nothing there is dropped"
            return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)
        if self.view.tier(tier).kind is TierKind.HOST:
            return self._in_memory(tier, id)
        for decision in plan_retention(self.view, tier):
            if decision.checkpoint == id:
                return decision
        reason = (
            "it is damaged and counts for nothing: a trainer writes it anew where another copy is good, or lets it go "
            "where the rules would; so does 'tierfall verify --repair', or 'tierfall rm'"
        )
        return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)

    def _in_memory(self, tier: str, id: CheckpointId) -> Decision:
        newest = max((c.id for c in self.view.on(tier) if c.live), default=None)
        if newest == id:
            reason = "the newest in memory always stays"
        else:
            reason = "until a save needs its room; the oldest go first"
        return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)


# What a failure would cost -------------------------------------------------------------------------


def known_bounds(view: View) -> dict[LossClass, LossBound]:
    """Say what would be lost, counted from the newest step that is anywhere: where training is, is not known."""
    steps = [c.id.step for c in view.checkpoints if c.live and any(map(c.readable_on, c.copies))]
    return loss_bounds(view, step=max(steps, default=None))


def reported_bounds(status: Status) -> dict[LossClass, LossBound]:
    """Read what a trainer says, which knows where training is and how fast its tiers are read."""
    return {lost: _read_bound(status.loss_bound.get(lost)) for lost in LOSS_CLASSES}


def _read_bound(found: LossStatus | None) -> LossBound:
    if found is None:
        return LossBound(survives=None)
    return LossBound(
        survives=CheckpointId(found.step, found.attempt),
        tier=found.tier,
        steps_lost=found.steps_lost,
        seconds_lost=readable_number(found.seconds_lost),
        restore_s=readable_number(found.restore_s),
    )


def read_back(bound: LossBound) -> str:
    """Say what survives, where, and how long it takes to read back."""
    if bound.survives is None:
        return "nothing"
    where = f"{bound.survives} on {bound.tier}"
    if bound.restore_s is not None:
        where += f", read back in {format_duration(bound.restore_s)}"
    return where


def lost_and_read_back(bound: LossBound) -> str:
    """Say as well how far training is past it, as its trainer knows."""
    if bound.survives is None or bound.steps_lost is None:
        return read_back(bound)
    ago = "" if bound.seconds_lost is None else f" ({format_duration(bound.seconds_lost)})"
    steps = f"{bound.steps_lost} step{'' if bound.steps_lost == 1 else 's'}"
    return f"{read_back(bound)}, {steps}{ago} lost"


def format_bounds(
    bounds: Mapping[LossClass, LossBound],
    unread: Collection[str] = (),
    *,
    what: Callable[[LossBound], str] = read_back,
) -> str:
    """Say it in one line."""
    said = [f"of the {lost}, {what(bound)}" for lost, bound in bounds.items()]
    doubt = f" (not asked: {', '.join(unread)})" if unread else ""
    return f"survives the loss {'; '.join(said)}{doubt}"
