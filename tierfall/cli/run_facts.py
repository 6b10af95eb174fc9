"""What the reading commands show of a run: listings, retention decisions and loss bounds, from one listing of all
tiers; and the two that show no more than that, ``latest`` and ``runs``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from rich.table import Table

from tierfall.cli.common import (
    CommandOutput,
    cell,
    counted,
    load_settings,
    load_settings_if_any,
    name_other_runs,
    owner_members,
    rough_duration,
    table,
)
from tierfall.config import Config
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge, to_view
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.types.errors import (
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.text import members
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import (
    CheckpointId,
    CopyState,
    LossClass,
    TierKind,
)
from tierfall.core.types.view import Decision, LossBound, PeerSurvival, Verdict, View
from tierfall.ops.commands import restorable, unread, view_of
from tierfall.ops.memory import HeldMemory, held_by_runs
from tierfall.ops.reader import RunReader, find_runs
from tierfall.policies.defaults import plan_retention
from tierfall.policies.forecast import loss_bounds, peer_survival
from tierfall.setup.attempts import newest_attempt
from tierfall.setup.tiers import tier_rules
from tierfall.telemetry.reports import describe_peer_survival

logger = logging.getLogger("tierfall")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One listing of all tiers of a run; those that are ``not_created`` yet are empty. ``safety`` is ``view`` with the
    read-only tiers, whose copies survive losses too. ``peer_survival`` is of the time at which the newest checkpoint in
    peer memory was committed."""

    listings: tuple[Listing, ...]
    not_created: tuple[str, ...]
    known: tuple[KnownCheckpoint, ...]
    view: View
    safety: View
    peer_survival: PeerSurvival | None
    owner: LockOwner | None
    wall_time_s: float

    @classmethod
    def gather(cls, reader: RunReader) -> Self:
        listings, new = reader.list_with_new()
        known = merge(listings)
        rules = tier_rules(reader.config, read_too=True)
        safety = to_view(rules, known, wall_time_s=time.time())
        return cls(
            listings=listings,
            not_created=tuple(new),
            known=known,
            view=view_of(reader.config, known),
            safety=safety,
            peer_survival=_peer_survival(reader, listings, safety),
            owner=reader.owner(),
            wall_time_s=time.time(),
        )

    @cached_property
    def by_id(self) -> dict[CheckpointId, KnownCheckpoint]:
        return {c.id: c for c in self.known}

    @cached_property
    def _owed(self) -> dict[CheckpointId, frozenset[str]]:
        return {c.id: c.owed - self.unread.keys() for c in self.view.checkpoints}

    @cached_property
    def unread(self) -> dict[str, TierfallError]:
        return unread(self.listings)

    def rows(self) -> list[CheckpointId]:
        """Return every checkpoint, and every unfinished one."""
        unfinished = {id for listing in self.listings for id in listing.unfinished}
        return sorted({*self.by_id, *unfinished})

    def cell(self, id: CheckpointId, tier: str) -> str:
        """Return the state of a tier's copy in one word; ``-``: none; ``?``: the tier could not be read."""
        listing = next(x for x in self.listings if x.tier == tier)
        if listing.error is not None:
            return "?"
        known = self.by_id.get(id)
        if known is not None and tier in known.copies:
            return known.copies[tier].label
        if id in listing.unfinished:
            return str(CopyState.ARRIVING) if self.owner else "unfinished"
        return "owed" if tier in self._owed.get(id, ()) else "-"

    def age_s(self, checkpoint: KnownCheckpoint) -> float | None:
        saved_s = checkpoint.wall_time_s
        return None if saved_s is None else max(0.0, self.wall_time_s - saved_s)

    def owed(self, id: CheckpointId) -> tuple[str, ...]:
        """Return the tiers that were read and are still owed a copy."""
        return tuple(tier.name for tier in self.view.tiers if tier.name in self._owed.get(id, ()))

    def decision(self, tier: str, id: CheckpointId) -> Decision:
        """Return what retention decides about a copy, with the reason."""
        if all(rules.name != tier for rules in self.view.tiers):
            reason = "the tier is read-only: nothing is deleted there"
            return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)
        if self.view.tier(tier).kind is TierKind.HOST:
            return self._in_memory(tier, id)
        for decision in plan_retention(self.view, tier):
            if decision.checkpoint == id:
                return decision
        if (known := self.by_id.get(id)) is not None and known.copies[tier].unread is not None:
            reason = "it could not be read, and what could not be read is kept"
            return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)
        reason = (
            "it is damaged, and nothing relies on it: a trainer repairs it from a good copy, or deletes it where the "
            "rules do; so do 'tierfall verify --repair' and 'tierfall rm'"
        )
        return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)

    def _in_memory(self, tier: str, id: CheckpointId) -> Decision:
        newest = max((c.id for c in self.view.on(tier) if c.live), default=None)
        if newest == id:
            reason = "the newest in memory is always kept"
        else:
            reason = "until a save needs its room; the oldest is evicted first"
        return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)


def _peer_survival(
    reader: RunReader, listings: Sequence[Listing], safety: View
) -> PeerSurvival | None:
    """Return what peer memory survives, by the record of the newest attempt; None where no tier has that record, or
    this node has nothing in peer memory that it saved."""
    if reader.config.peers is None:
        return None
    try:
        found = newest_attempt(listings, reader.stores)
    except TierfallError as error:
        logger.debug("the record of the newest attempt could not be read: %s", error)
        return None
    if found is None or found[0].node_losses is None:
        return None
    return peer_survival(safety, found[0].number, found[0].node_losses)


# What a failure would cost -------------------------------------------------------------------------


def known_bounds(view: View) -> dict[LossClass, LossBound]:
    """Return what each loss would cost, counted from the newest step on any tier: the current step is not known."""
    return loss_bounds(view, step=max((c.id.step for c in view.restorable), default=None))


def format_survivor(bound: LossBound) -> str:
    """Format what survives, on which tier, and how long reading it takes."""
    if bound.survives is None:
        return "nothing"
    where = f"{bound.survives} on {bound.tier}"
    if bound.restore_s is not None:
        where += f", read back in {format_duration(bound.restore_s)}"
    return where


def format_loss(bound: LossBound) -> str:
    """Format the same, with the steps and the time that would be lost, where the trainer has reported them."""
    if bound.survives is None or bound.steps_lost is None:
        return format_survivor(bound)
    ago = "" if bound.seconds_lost is None else f" ({format_duration(bound.seconds_lost)})"
    steps = counted(bound.steps_lost, "step", "steps")
    return f"{format_survivor(bound)}, {steps}{ago} lost"


def format_bounds(
    bounds: Mapping[LossClass, LossBound],
    unread: Collection[str] = (),
    *,
    describe: Callable[[LossBound], str] = format_survivor,
) -> str:
    """Format all loss bounds as one line; ``unread`` names the tiers that could not be read."""
    parts = [f"of the {lost}, {describe(bound)}" for lost, bound in bounds.items()]
    doubt = f" (not read: {', '.join(unread)})" if unread else ""
    return f"survives the loss {'; '.join(parts)}{doubt}"


def format_peer_survival(found: PeerSurvival | None, *, live: bool) -> tuple[str, ...]:
    """Format the line about peer memory, if there is one. Without a ``live`` trainer, a node may have been lost."""
    if found is None:
        return ()
    return (describe_peer_survival(found) + ("" if live else " (if no node is lost yet)"),)


# Commands --------------------------------------------------------------------------------------------


def latest(config: str | None, run: str | None, as_json: bool) -> None:
    """Print the newest step of which some tier has a good copy."""
    settings = load_settings(config, run)
    answer = CommandOutput(as_json)
    with RunReader(settings) as reader:
        facts = RunFacts.gather(reader)
    answer.note_unread(facts.unread)
    newest = next(iter(restorable(facts.known)), None)
    answer.note_newer(facts.listings, newest)
    if newest is None:
        answer.refuse(
            f"latest: run {settings.run} has no step that can be restored{name_other_runs(settings)}"
        )
    answer.document = {
        "run": settings.run,
        **members(facts.by_id[newest], "id"),
        "tiers": [t for t, copy in facts.by_id[newest].copies.items() if copy.damage is None],
    }
    answer.show(str(newest))
    answer.finish()


def runs(config: str | None, as_json: bool) -> None:
    """List all runs on the tiers, and what runs hold in the memory of this node; without a file, that alone."""
    answer = CommandOutput(as_json)
    # A folder of several runs needs a name; all are listed.
    settings = load_settings_if_any(config, "any")
    held: list[HeldMemory] = []
    try:
        held = held_by_runs(settings)
    except UnreachableError as error:
        answer.problem(error)
    answer.document = {"memory": [held_members(one) for one in held]}
    if settings is not None:
        answer.document = {"runs": _show_runs(answer, settings), **answer.document}
    elif not held:
        answer.show("nothing of this user is in this node's memory")
    if held:
        answer.show(*_memory_of_node(held, below=settings is not None))
    answer.finish()


def _show_runs(answer: CommandOutput, settings: Config) -> list[dict[str, Any]]:
    names, unread = find_runs(settings)
    answer.note_unread(unread)
    found = [_describe_run(answer, settings, name) for name in names]
    right = ("STEPS", "LATEST", "AGE", "SIZE")
    made = table("RUN", *right, "TIERS", "", right=right)
    for one in found:
        made.add_row(
            one["run"],
            str(one["checkpoints"]),
            "-" if one["step"] is None else f"{one['step']}@{one['attempt']}",
            cell(one["age_s"], rough_duration),
            format_size(one["bytes"]),
            ", ".join(one["tiers"]) or "-",
            "a trainer owns it" if one["owner"] else "",
        )
    if found:
        answer.show(made)
    answer.show(counted(len(found), "run", "runs") if found else "no run")
    return found


def _memory_of_node(held: Sequence[HeldMemory], *, below: bool) -> Iterable[Table | str]:
    if below:
        yield ""
    right = ("STEPS", "SIZE", "FOR OTHERS")
    made = table("IN MEMORY HERE", *right, "OWNER", "FILE", right=right)
    for one in held:
        made.add_row(
            one.run,
            "?" if one.problems and not one.checkpoints else str(len(one.checkpoints)),
            format_size(one.bytes),
            format_size(one.kept_bytes) if one.kept_bytes else "-",
            "no trainer" if one.owner is None else one.owner.process,
            one.file or "-",
        )
    yield made
    if any(one.owner is None for one in held):
        yield "'tierfall drain --all' flushes what no trainer owns, --discard frees it"


def held_members(held: HeldMemory) -> dict[str, Any]:
    """Return what a run holds in this node's memory, for a document."""
    return {
        **members(held, "run", "folder", "file", "bytes", "kept_bytes", "problems"),
        "steps": [str(id) for id in held.checkpoints],
        "owner": owner_members(held.owner),
    }


def _describe_run(answer: CommandOutput, settings: Config, run: str) -> dict[str, Any]:
    with RunReader(settings.model_copy(update={"run": run})) as reader:
        facts = RunFacts.gather(reader)
    answer.note_unread(facts.unread)
    newest = next(iter(restorable(facts.known)), None)
    held = [listing for listing in facts.listings if listing.copies]
    return {
        "run": run,
        "checkpoints": len(facts.known),
        **members(facts.by_id.get(newest) if newest else None, "id"),
        "age_s": facts.age_s(facts.by_id[newest]) if newest else None,
        "bytes": sum(copy.bytes for listing in held for copy in listing.copies),
        "tiers": [listing.tier for listing in held],
        "owner": owner_members(facts.owner),
    }
