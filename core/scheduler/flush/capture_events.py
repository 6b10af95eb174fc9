"""Events of captures: a snapshot from the beginning of its capture until its image is sealed or given up.

Belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tierfall.core.capture.snapshot import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    SaveGivenUp,
)
from tierfall.core.scheduler.flush.backlog import Backlog
from tierfall.core.scheduler.flush.flusher import Flusher
from tierfall.core.scheduler.flush.lane import FlushLane
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome

logger = logging.getLogger("tierfall")


class CaptureEvents:
    """See the module."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Mapping[str, FlushLane],
        flusher: Flusher,
        backlog: Backlog,
        hooks: Hooks,
        emitter: EventEmitter,
    ) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._flusher = flusher
        self._backlog = backlog
        self._hooks = hooks
        self._emitter = emitter

    def on_begun(self, event: CaptureBegun) -> None:
        snapshot = event.snapshot
        entry = LedgerEntry(
            id=snapshot.id,
            ordinal=snapshot.lineage.ordinal,
            started_from=snapshot.lineage.started_from,
            shard=snapshot.shard,
            attempt_id=snapshot.lineage.attempt_id,
            geometry=snapshot.geometry,
            region=snapshot.region,
            snapshot=snapshot,
            handle=snapshot.handle,
            share=snapshot.share,
        )
        self._hooks.group.on_save_begun(entry.id)
        entry.owed.update(name for name in event.tiers if name in self._lanes)
        entry.set_state(self._ledger.host, CopyState.ARRIVING, snapshot.geometry.image_bytes)
        self._ledger.enter(entry)
        self._emitter.save_begun(entry)
        self._backlog.on_owed(entry.id, event.tiers)
        if (fenced := self._flusher.fenced) is not None:
            entry.give_up(tuple(entry.owed), fenced)
        self._flusher.save_begun(entry)
        for tier, error in self._hooks.group.why_copies_given_up(entry.id).items():
            entry.give_up([tier], error)
        if (lost := self._hooks.group.why_save_failed(entry.id)) is not None:
            self.give_up(entry, *lost)
            self._hooks.group.on_saved_in_vain(entry)

    def on_advanced(self, event: CaptureAdvanced) -> None:
        if entry := self._ledger.entries.get(event.id):
            entry.final_chunks = event.final_chunks

    def on_sealed(self, event: CaptureSealed) -> None:
        entry = self._ledger.entries[event.id]
        assert entry.snapshot is not None
        entry.manifest = entry.snapshot.manifest
        entry.commit = entry.snapshot.commit
        entry.decide(self._ledger.decided)  # with its own tags
        entry.snapshot = None
        assert entry.geometry is not None
        entry.final_chunks = entry.geometry.chunk_count
        if entry.failed:
            self._unseal(entry)
        else:
            self._emitter.captured(entry)
            self._hooks.group.sealed(entry)

    def on_damage_found(self, id: CheckpointId, why: str) -> None:
        """A reader of this rank has found that an image in memory differs from its digests. It is evicted if a tier has
        the checkpoint; otherwise it is kept, as some of its tensors may be good, and its damage is noted."""
        entry, host = self._ledger.entries.get(id), self._ledger.host
        if entry is None or entry.state(host) is not CopyState.SEALED or host in entry.damage:
            return
        logger.error("%s: %s is damaged in memory: %s", host, id, why)
        has_another = any(state is CopyState.COMMITTED for state in entry.states.values())
        if has_another:
            self._unseal(entry)
        else:
            entry.note_damage_kept(host, why)

    def _unseal(self, entry: LedgerEntry) -> None:
        """Evict an image from memory, for later starts as well."""
        if entry.region is not None and entry.region.sealed:
            entry.region.unseal()
        entry.awaiting_ranks = False
        entry.set_state(self._ledger.host, CopyState.LEAVING)

    def give_up(self, entry: LedgerEntry, error: BaseException, outcome: SaveOutcome) -> None:
        """Give up a save because another rank's image of it failed."""
        if entry.failed or entry.state(self._ledger.host) is CopyState.LEAVING:
            return
        entry.failed = True
        self._backlog.forget(entry.id)
        self._emitter.save_ended(entry.id, outcome, error)
        self._flusher.errors.append(error)
        logger.error("%s", error)
        if entry.handle is not None:
            entry.handle.on_given_up(outcome, error)
        entry.owed.clear()
        self._stop_lanes(entry, error)
        if entry.snapshot is None:
            self._unseal(entry)

    def on_not_begun(self, event: SaveGivenUp) -> None:
        """A save ended before its capture began."""
        self._hooks.group.on_save_begun(event.id)
        self._hooks.group.save_failed(event.id, event.error, event.outcome)

    def on_failed(self, event: CaptureFailed) -> None:
        id, error = event.id, event.error
        self._backlog.forget(id)
        entry = self._ledger.entries.get(id)
        if (
            entry is None
        ):  # the save failed before its capture was announced, or was reported before
            event.region.release()
            self._hooks.group.save_failed(id, error, SaveOutcome.FAILED)
            return
        if entry.snapshot is None:
            return
        if not entry.failed:
            self._emitter.save_ended(id, SaveOutcome.FAILED, error)
        self._flusher.errors.append(error)
        logger.error("save: step %d is given up: %s", id.step, error)
        if entry.handle is not None:
            entry.handle.on_given_up(SaveOutcome.FAILED, error)
        entry.owed.clear()
        entry.snapshot = None
        entry.set_state(self._ledger.host, CopyState.LEAVING)
        self._stop_lanes(entry, error)
        if not entry.failed:
            self._hooks.group.save_failed(id, error, SaveOutcome.FAILED)

    def _stop_lanes(self, entry: LedgerEntry, error: BaseException) -> None:
        for lane in self._lanes.values():
            if lane.active is not None and lane.active.entry is entry:
                lane.give_up(error)
