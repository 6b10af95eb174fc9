"""The ledger: the one record of every copy of every checkpoint. Only the coordinator's thread writes it.

It contains facts and answers queries; the coordinator and the policies decide what follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from tierfall.core.format.catalog import KnownCheckpoint, Listing, overtaken, starts_in
from tierfall.core.format.decided import DecidedList
from tierfall.core.scheduler.ledger.entry import LedgerEntry, entry_of
from tierfall.core.scheduler.ledger.overview import Overview
from tierfall.core.scheduler.ledger.throughput import TierThroughput
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import CheckpointId, CopyState, Shard, TierKind
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View

ALONE = Shard(0, 1)


class Ledger(Overview):
    """See the module. ``view`` is what policies see of it."""

    def __init__(
        self,
        rules: tuple[TierRules, ...],
        host: str,
        *,
        shard: Shard = ALONE,
        scattered: frozenset[CheckpointId] = frozenset(),
        on_few_nodes: Mapping[str, Mapping[CheckpointId, bool]] = MappingProxyType({}),
        decided: DecidedList | None = None,
    ) -> None:
        """``shard`` is this rank's. ``unfinished`` are files of uncommitted copies, with their bytes; ``partial`` is as
        in ``note_partial``. ``scattered`` checkpoints are complete, but not on one tier that all ranks reach: they can
        be restored, and are not flushed, as some rank may have no image of them. ``on_few_nodes`` is as in ``View``, by
        tier. ``decided`` is what is decided by the lists of all tiers together, the same on all ranks. ``has_begun``:
        this start has restored, or begins anew, or has committed a checkpoint; before, rules delete nothing. ``lags``:
        a listing of this start left out what is there, and they never do. ``reading`` counts the readers of a
        checkpoint: meanwhile only a command deletes its copies on stored tiers; what could not be read counts to the
        end. ``failing`` tells why tiers accept no copies at present.
        ``now_s`` is the time of the present step. ``evaluated_at`` is the training step of the last evaluation: earlier
        checkpoints may lack its metrics."""
        super().__init__()
        self.shard = shard
        self.rules = rules
        self.host = host
        self.peer_tiers = frozenset(rule.name for rule in rules if rule.kind is TierKind.PEER)
        self.unfinished: dict[tuple[str, CheckpointId], int] = {}
        self.partial: set[tuple[str, CheckpointId]] = set()
        self.scattered = scattered
        self.on_few_nodes = {
            (tier, id): may_be_reported
            for tier, few in on_few_nodes.items()
            for id, may_be_reported in few.items()
        }
        self.decided = decided or DecidedList()
        self.has_begun = False
        self.evaluated_at: float = 0
        self.lags = False
        self.reading: Counter[CheckpointId] = Counter()
        self.failing: dict[str, BaseException] = {}
        self.restored_from: CheckpointId | None = None
        self.attempt: int | None = None
        self.least_ordinal = 0
        self.now_s = 0.0
        self.wall_offset_s = 0.0
        self.rates = TierThroughput()

    @property
    def many_ranks(self) -> bool:
        """Whether the run has several ranks."""
        return self.shard.world_size > 1

    def rules_of(self, tier: str) -> TierRules:
        return next(rules for rules in self.rules if rules.name == tier)

    def set_clock(self, *, now_s: float, wall_time_s: float) -> None:
        """Set the time of the clock of ``step``, and the wall time. Later wall times are derived from that clock, so
        that setting the wall clock changes no checkpoint's age."""
        self.now_s, self.wall_offset_s = now_s, wall_time_s - now_s

    def load(self, known: Iterable[KnownCheckpoint], listings: Iterable[Listing]) -> None:
        """Add the checkpoints that were found on tiers."""
        known = tuple(known)
        late = overtaken(known)
        for checkpoint in known:
            entry = entry_of(checkpoint.id, checkpoint.commit, self.shard)
            entry.image_bytes = checkpoint.bytes
            for tier, copy in checkpoint.copies.items():
                if copy.damage is not None:
                    entry.bytes[tier] = copy.bytes
                    why = (
                        f"it could not be read: {copy.unread}" if copy.unread else str(copy.damage)
                    )
                    entry.note_damage(tier, why, repairable=copy.repairable)
                else:
                    entry.set_state(tier, copy.state, copy.bytes)
            entry.overtaken.update(late.get(checkpoint.id, ()))
            self.enter(entry)
        listings = tuple(listings)
        self.lineage.set_starts({start.key: start for start in starts_in(listings)})
        for listing in listings:
            for id, bytes in listing.unfinished.items():
                self.unfinished[listing.tier, id] = bytes

    def enter(self, entry: LedgerEntry) -> None:
        """Add a checkpoint, with what is decided about it."""
        entry.decide(self.decided)
        self.entries[entry.id] = entry

    def learn(self, new: DecidedList) -> list[LedgerEntry]:
        """Add what is decided; return the entries that it is about."""
        self.decided |= new
        found = [e for id in sorted(new.checkpoints) if (e := self.entries.get(id)) is not None]
        for entry in found:
            entry.decide(self.decided)
        return found

    def note_partial(self, listings: Iterable[Listing]) -> None:
        """Note checkpoints that have a commit record on this node's part of a tier, but are incomplete: a start died
        during their commit or deletion, or a machine is missing."""
        self.partial = {
            (listing.tier, copy.id)
            for listing in listings
            for copy in listing.copies
            if copy.state is CopyState.COMMITTED and (copy.damage is None or copy.repairable)
            if not self._has(listing.tier, copy.id)
        }

    def _has(self, tier: str, id: CheckpointId) -> bool:
        entry = self.entries.get(id)
        return entry is not None and (tier in entry.states or tier in entry.damage)

    def continue_from(self, checkpoint: CheckpointId | None, *, attempt: int) -> None:
        """Note what was restored, and the attempt that continues from it."""
        self.restored_from, self.attempt = checkpoint, attempt
        self.least_ordinal = 0
        self.has_begun = True
        entry = None if checkpoint is None else self.entries.get(checkpoint)
        if entry is not None and entry.attempt_id is not None:
            # of attempts that share its number, this one counts from now on
            self.lineage.choose_attempt(entry.id.attempt, entry.attempt_id)

    def ordered(self) -> list[LedgerEntry]:
        """Return the entries by the time of their saves."""
        return sorted(self.entries.values(), key=lambda entry: entry.age_order)

    def forget_if_gone(self, entry: LedgerEntry) -> None:
        if not (entry.states or entry.owed or entry.damage or entry.snapshot):
            self.entries.pop(entry.id)

    def view(
        self,
        *,
        settling: Collection[CheckpointId] = (),
        restoring: bool = False,
    ) -> View:
        """Return the view for policies. ``settling`` and ``restoring`` are as in ``View``."""
        return View(
            tiers=self.rules,
            checkpoints=self._checkpoints(settling),
            failing=frozenset(self.failing),
            restored_from=self.restored_from,
            attempt=self.attempt,
            restoring=restoring,
            wall_time_s=self.now_s + self.wall_offset_s,
            many_ranks=self.many_ranks,
            read_bytes_per_s=self.rates.read_rates(),
            partial=frozenset(self.partial),
            on_few_nodes=dict(self.on_few_nodes),
        )

    def set_retain(self, retain: Mapping[str, tuple[Rule, ...]]) -> None:
        """Replace what decides which checkpoints tiers keep, by the tiers' names."""
        self.rules = tuple(replace(r, retain=retain.get(r.name, r.retain)) for r in self.rules)

    def _checkpoints(self, settling: Collection[CheckpointId]) -> tuple[CheckpointView, ...]:
        views = self.views()
        reading = {id for id, count in self.reading.items() if count > 0}
        special = reading.union(settling)
        if not special:
            return views
        return tuple(
            self._special(view, settling, reading) if view.id in special else view for view in views
        )

    def _special(
        self,
        view: CheckpointView,
        settling: Collection[CheckpointId],
        reading: Collection[CheckpointId],
    ) -> CheckpointView:
        is_read = view.id in reading
        copies, damaged = (
            {
                t: replace(c, leased=c.leased or (is_read and t != self.host))
                for t, c in known.items()
            }
            for known in (view.copies, view.damaged)
        )
        return replace(view, copies=copies, damaged=damaged, changing=view.id in settling)

    def _view(self, entry: LedgerEntry, *, abandoned: bool) -> CheckpointView:
        commit = entry.commit
        copies = {
            tier: CopyView(
                state=entry.states.get(tier, CopyState.COMMITTED),
                bytes=entry.bytes.get(tier, 0),
                leased=entry.leases.get(tier, 0) > 0,
                verified=tier in entry.verified,
            )
            for tier in entry.states.keys() | entry.repairable
        }
        return CheckpointView(
            id=entry.id,
            ordinal=entry.ordinal,
            started_from=entry.started_from,
            abandoned=abandoned,
            pinned=entry.pinned,
            deleted=entry.deleted,
            copies={tier: copies[tier] for tier in entry.states},
            damaged={t: copies[t] for t in entry.repairable - entry.states.keys()},
            owed=frozenset(entry.owed),
            overtaken=frozenset(entry.overtaken),
            at_end=entry.commit is not None and entry.commit.lineage.at_end,
            metrics=commit.metrics if commit else {},
            tags=entry.tags,
            wall_time_s=commit.wall_time_s if commit else None,
        )

    @property
    def all_live(self) -> bool:
        """Whether no checkpoint is abandoned, or was deleted by a person."""
        return not self.abandoned() and not self.deleted()

    def live_copies(self, tier: str) -> Iterator[LedgerEntry]:
        """Yield the committed copies on a tier, newest first, without abandoned and deleted ones."""
        abandoned = self.abandoned()
        for entry in map(self.entries.peek, self.entries.ids(newest_first=True)):
            if (
                entry.state(tier) is CopyState.COMMITTED
                and entry.id not in abandoned
                and not entry.deleted
            ):
                yield entry

    def newest_on(self, tier: str, *, without: Collection[CheckpointId]) -> CheckpointId | None:
        """Return the newest live checkpoint that is committed on a tier and is not in ``without``."""
        abandoned, entries = self.abandoned(), self.entries
        return next(
            (
                id
                for id in entries.ids(newest_first=True)
                if id not in abandoned
                and id not in without
                and entries.peek(id).state(tier) is CopyState.COMMITTED
                and not entries.peek(id).deleted
            ),
            None,
        )

    def has_no_part(self, tier: str, id: CheckpointId) -> bool:
        """Return whether a copy that is committed on a tier is there on other nodes alone."""
        entry = self.entries.get(id)
        is_there = entry is not None and entry.state(tier) is CopyState.COMMITTED
        return is_there and entry is not None and entry.bytes.get(tier) == 0

    def used_bytes(self, tier: str) -> int:
        """Return the bytes of this run on a tier, unfinished copies included."""
        return super().used_bytes(tier) + sum(
            size for (name, _), size in self.unfinished.items() if name == tier
        )
