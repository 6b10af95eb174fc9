"""What a run reports: its figures, and the status file of its process, written on a thread of its own: neither
training nor the coordinator waits.

The status is made on the coordinator's thread, which owns the ledger, and is small: it has the newest checkpoints only.
It is written at most once a second when something happened, and every AT_LEAST_EVERY_S seconds otherwise.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from tierfall.config import Config
from tierfall.core.flush.facts import LedgerEntry
from tierfall.core.flush.lane import FlushLane
from tierfall.core.restore.restore import RestoreResult
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.run_lock import own_start_ticks
from tierfall.core.types import events
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import CopyState
from tierfall.core.types.view import PeerSurvival, View
from tierfall.policies.forecast import loss_bounds, peer_survival
from tierfall.telemetry.figures import Statistics
from tierfall.telemetry.journal import wall_time
from tierfall.telemetry.reports import CheckpointInfo, CopyInfo, RestoreReport, ShardSource
from tierfall.telemetry.status import (
    Status,
    TransferStatus,
    describe_flushes,
    durable_bound_s,
    remove_status,
    write_status,
)

if TYPE_CHECKING:
    from tierfall.run.session import Session

logger = logging.getLogger("tierfall")

EVERY_S = 1.0
AT_LEAST_EVERY_S = 5.0
CHECKPOINTS_MAX = 24
EVENTS_MAX = 10
JOIN_S = 1.0
SPACE_EVERY_S = 30.0
SPACE_S = 1.0
"""Seconds between two reads of file systems' free space (SPACE_EVERY_S), and for each read."""


class StatusWriter:
    """See the module. ``start`` once the coordinator runs; ``close`` before it ends."""

    def __init__(self, session: Session) -> None:
        """Holds of training in a ``session`` are logged while they last."""
        self._session = session
        self._tiers, self._journal = session.tiers, session.journal
        self._coordinator = session.coordinator
        self._began_s = time.monotonic()
        self._space = BoundedCalls()
        self._free_bytes: dict[str, int] = {}
        self._space_due_s = 0.0
        self.training: dict[str, Any] = {}
        """Figures of the cadence, which the training thread sets at each save by ``maybe_save``."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_ticks = own_start_ticks()
        self._last: Status | None = None
        self._conditions = Conditions()

    def start(self) -> None:
        # daemon: an exit without close must not hang
        thread = threading.Thread(
            target=self._run, name=f"tierfall-{self._tiers.run}-status", daemon=True
        )
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Stop writing, and remove the status: a process that has closed its run has none."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join(JOIN_S)
        self._thread = None
        remove_status(self._session.host.folder, self._session.host.slot)

    def _run(self) -> None:
        seen, written_s = -1, 0.0
        while not self._closing.is_set():
            now_s, steps = time.monotonic(), self._coordinator.steps
            is_due = steps != seen or now_s >= written_s + AT_LEAST_EVERY_S
            if is_due and self._session.filled.is_set:  # else nothing is known, and a save may wait
                if not self._write():
                    return
                # making the status was a step of the coordinator itself
                seen, written_s = self._coordinator.steps, now_s
            self._session.holds.log_present()
            self._closing.wait(EVERY_S)

    def present(self) -> tuple[Status, ...]:
        """Return the last status, if there is one; for any thread."""
        return () if self._last is None else (self._last,)

    def describe_flushes(self) -> str:
        """Return what is being copied to which tier, and what is owed, as of the last status; for any thread."""
        status = self._last
        return "nothing is known yet" if status is None else describe_flushes(status)

    def _write(self) -> bool:
        """Write the status; False where the coordinator has stopped."""
        self._measure_space()
        try:
            status = self._session.call(self._make)
        except TierfallError as error:
            if self._last is None or self._closing.is_set():
                return False
            update = {"failure": str(error), "events": self._events(), "wall_time_s": time.time()}
            self._put(self._last.model_copy(update=update))
            return False
        self._put(status)
        return True

    def _measure_space(self) -> None:
        """Read the free bytes of the file systems that are written to, if that is due; one that does not answer has
        none known."""
        if time.monotonic() < self._space_due_s:
            return
        folders = {t.name: t.folder for t in self._tiers.config.written if t.folder is not None}
        calls = {name: partial(shutil.disk_usage, folder) for name, folder in folders.items()}
        bounds = dict.fromkeys(calls, SPACE_S)
        found = self._space.call_all(calls, bounds, doing="measure the free space")
        self._free_bytes = {
            name: answer.get().free for name, answer in found.items() if answer.error is None
        }
        self._space_due_s = time.monotonic() + SPACE_EVERY_S

    def _put(self, status: Status) -> None:
        self._last = status
        if self._closing.is_set():
            return
        try:
            write_status(self._session.memory.folder, status)
        except FileNotFoundError as error:  # a save logs it, and creates the folder anew
            logger.debug("the status is not written at present: %s", error)
        except OSError as error:
            text = "the status for 'tierfall watch' is not written at present: %s"
            self._conditions.report("status", logging.WARNING, text, error)
        else:
            self._conditions.end("status", "the status for 'tierfall watch' is written again")

    # On the coordinator's thread ---------------------------------------------------------------------

    def _make(self) -> Status:
        tiers, coordinator, ledger = self._tiers, self._coordinator, self._coordinator.ledger
        newest = list(islice(ledger.entries.newest_first(), CHECKPOINTS_MAX))
        left = ledger.abandoned()
        return Status(
            run=tiers.run,
            wall_time_s=time.time(),
            pid=os.getpid(),
            start_ticks=self._start_ticks,
            node=tiers.node,
            slot=tiers.ranks.local_index,
            rank=tiers.ranks.topology.rank,
            world_size=tiers.ranks.topology.world_size,
            attempt=self._session.attempt.number,
            tiers={rules.name: rules.kind for rules in ledger.rules},
            checkpoints=tuple(
                self.checkpoint_info(entry, abandoned=entry.id in left)
                for entry in reversed(newest)
            ),
            checkpoints_known=len(ledger.entries),
            transfers=tuple(
                self._transfer(lane)
                for lane in coordinator.lanes.values()
                if lane.active is not None
            ),
            statistics=self.statistics(),
            events=self._events(),
        )

    def statistics(self) -> Statistics:
        """Return all figures; those of the cadence are as of the last save by ``maybe_save``."""
        session, journal, coordinator = self._session, self._journal, self._coordinator
        ledger, rates, backlog = coordinator.ledger, coordinator.rates, coordinator.backlog
        now_s, timer, config = time.monotonic(), session.step_timer, self._tiers.config
        tiers, view = self._tier_names(), ledger.view()
        stored = [rules for rules in ledger.rules if rules.name != ledger.host]
        written = [rules.name for rules in stored]
        ages = {tier.name: self._since_commit(tier.name, now_s) for tier in config.written}
        every_s = backlog.estimated_every_s or _configured_every_s(config, timer.step_s)
        capacities = {rules.name: rules.capacity_bytes for rules in ledger.rules}
        capacities[ledger.host] = session.host.capacity_bytes or capacities[ledger.host]
        return Statistics(
            **journal.tally.read(),
            **self.training,
            lost_events=journal.lost,
            unread_events=journal.unread,
            late={tier: backlog.late.get(tier, 0) for tier in written},
            edge_bytes={
                f"{source}->{lane.tier}": count
                for lane in coordinator.lanes.values()
                for source, count in lane.edge_bytes.items()
            },
            step=timer.last,
            image_bytes=backlog.image_bytes or None,
            last_blocked_seconds=journal.tally.last_blocked_s,
            step_seconds=timer.step_s,
            interval_seconds=every_s,
            durable_age_seconds=min(ages.values(), default=None),
            durable_bound_seconds=durable_bound_s(every_s, [t.flush.every for t in config.written]),
            commit_age_seconds=ages,
            behind=dict(backlog.behind),
            behind_seconds={tier: backlog.behind_s(tier, now_s) for tier in written},
            behind_bound_seconds={rules.name: rules.within_s for rules in stored},
            owed_copies=_per_tier(written, (entry.owed for entry in ledger.open())),
            degraded_copies=_per_tier(tiers, self._degraded()),
            failing={
                tier: _reason(ledger.failing.get(tier) or self._tiers.errors.get(tier))
                for tier in tiers
            },
            last_error={
                tier: _reason(None if lane.failing_since_s is None else lane.last_error)
                for tier, lane in coordinator.lanes.items()
            },
            checkpoints={tier: ledger.whole_copies_on(tier) for tier in tiers},
            used_bytes={tier: ledger.used_bytes(tier) for tier in tiers},
            capacity_bytes=capacities,
            free_bytes=self._free_bytes,
            arriving_bytes_per_second={tier: self._bytes_per_s(tier) or None for tier in tiers},
            write_bytes_per_second={tier: rates.write_bytes_per_s(tier) for tier in written},
            read_bytes_per_second=dict(rates.read_rates()),
            flush_share=dict(coordinator.throttle.shares),
            direct_io={name: x.backend.traits.direct_io for name, x in session.stores.items()},
            compression={
                name: store.compression
                for name, store in session.stores.items()
                if store.compression is not None
            },
            loss_bound=loss_bounds(view, step=timer.last, step_s=timer.step_s),
            peer_survival=self._peer_survival(view),
        )

    def _peer_survival(self, view: View) -> PeerSurvival | None:
        attempt, names = self._session.attempt, self._coordinator.ledger.peer_tiers
        if attempt.node_losses is None:
            return None
        copied = {id for id, tier in self._coordinator.durable if tier in names}
        return peer_survival(view, attempt.number, attempt.node_losses, copied=copied)

    def _since_commit(self, tier: str, now_s: float) -> float:
        committed_s = self._journal.tally.committed_s(tier)
        return now_s - (self._began_s if committed_s is None else committed_s)

    def _degraded(self) -> Iterator[Iterable[str]]:
        """Give, for each checkpoint, the tiers whose copy is not good."""
        ledger = self._coordinator.ledger
        left = ledger.abandoned()
        for entry in ledger.entries.values():
            if entry.id not in left and not entry.deleted:
                yield {*entry.damage, *entry.set_aside}

    def _events(self) -> tuple[dict[str, object], ...]:
        return tuple(
            {"wall_time_s": round(wall_time(event.at_s), 3), **events.event_to_json(event)}
            for event in [*self._journal.recent.copy()][-EVENTS_MAX:]
        )

    def checkpoint_info(self, entry: LedgerEntry, *, abandoned: bool) -> CheckpointInfo:
        """Return what the ledger knows of a checkpoint."""
        commit, tiers = entry.commit, self._tier_names()
        of_image = commit.image_bytes if commit else max(entry.bytes.values(), default=0)
        held = [tier for tier in tiers if tier in entry.states or tier in entry.damage]
        return CheckpointInfo(
            step=entry.id.step,
            attempt=entry.id.attempt,
            ordinal=entry.ordinal,
            started_from=entry.started_from,
            bytes=entry.image_bytes or of_image,
            wall_time_s=commit.wall_time_s if commit else None,
            pinned=entry.pinned,
            abandoned=abandoned,
            deleted=entry.deleted,
            tags=tuple(sorted(entry.tags)),
            metrics=commit.metrics if commit else {},
            not_finite=entry.not_finite,
            copies={tier: self._copy_info(entry, tier) for tier in held},
            owed=tuple(tier for tier in tiers if tier in entry.owed),
            set_aside={tier: str(error) for tier, error in entry.set_aside.items()},
        )

    def _copy_info(self, entry: LedgerEntry, tier: str) -> CopyInfo:
        not_good = "damaged" if tier in entry.repairable else "unreadable"
        state, is_host = entry.states.get(tier, not_good), tier == self._coordinator.ledger.host
        return CopyInfo(
            state=str(state),
            bytes=(is_host and entry.image_bytes) or entry.bytes.get(tier, 0),
            damage=entry.damage.get(tier),
            fraction=self._fraction(entry, tier) if state == CopyState.ARRIVING else None,
        )

    def _tier_names(self) -> list[str]:
        return [rules.name for rules in self._coordinator.ledger.rules]

    def _fraction(self, entry: LedgerEntry, tier: str) -> float:
        """Return the share of an arriving copy that is there."""
        if tier == self._coordinator.ledger.host:
            chunks = entry.geometry.chunk_count if entry.geometry else 0
            return entry.final_chunks / chunks if chunks else 0.0
        lane = self._coordinator.lanes.get(tier)
        if lane is None or not lane.is_copying(entry.id):
            return 1.0  # this rank's image is uploaded, other ranks' images are not
        done, total = _done(lane)
        return done / total if total else 0.0

    def _bytes_per_s(self, tier: str) -> float | None:
        """Return the rate to a tier; None during the first copy while less of it is written than is in flight: the rate
        counts whole chunks, and would be too low."""
        rates, lane = self._coordinator.rates, self._coordinator.lanes.get(tier)
        if lane is not None and lane.active is not None and not rates.stretches(tier):
            transfer = lane.active
            if transfer.done_bytes * len(transfer.runs) < _done(lane)[1] * transfer.in_flight:
                return None
        return rates.arriving_bytes_per_s(tier, time.monotonic())

    def _transfer(self, lane: FlushLane) -> TransferStatus:
        assert lane.active is not None
        entry = lane.active.entry
        done, total = _done(lane)
        rate = self._bytes_per_s(lane.tier)
        return TransferStatus(
            step=entry.id.step,
            attempt=entry.id.attempt,
            tier=lane.tier,
            phase=str(lane.active.phase),
            done_bytes=done,
            bytes=total,
            bytes_per_s=rate,
            left_s=(total - done) / rate if rate else None,
        )


def _per_tier(tiers: Iterable[str], found: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return how often each tier was found."""
    counted = Counter(tier for each in found for tier in each)
    return {tier: counted[tier] for tier in tiers}


def _reason(error: BaseException | None) -> str:
    return "" if error is None else str(error) or repr(error)


def _configured_every_s(config: Config, step_s: float | None) -> float | None:
    """Return the configured seconds between two saves; None if they are measured, or by steps of unknown time."""
    every = config.interval.every_steps
    if every is None or step_s is None:
        return config.interval.every_s
    return every * step_s


def _done(lane: FlushLane) -> tuple[int, int]:
    """Return how many bytes of the present copy are written, and how many it has."""
    transfer = lane.active
    assert transfer is not None
    geometry = transfer.entry.geometry
    if geometry is None:
        return 0, transfer.entry.commit.image_bytes if transfer.entry.commit else 0
    return transfer.done_bytes, geometry.image_bytes


def restore_report(restored: RestoreResult, seconds: float) -> RestoreReport:
    id = restored.checkpoint.id
    commit = restored.checkpoint.commit
    shard = next(
        (f.name for f in commit.files if f.digest is None) if commit else iter(()), "rank 0"
    )
    tally = restored.tally
    read = [ShardSource(shard=shard, tier=tier, bytes=n) for tier, n in tally.bytes.items()]
    read += [
        ShardSource(shard=shard, tier=tier, bytes=n, rank=rank)
        for (tier, rank), n in sorted(tally.received.items())
    ]
    return RestoreReport(
        step=id.step,
        attempt=id.attempt,
        sources=tuple(sorted(read, key=lambda source: -source.bytes)),
        bytes=sum(source.bytes for source in read),
        seconds=seconds,
        fallbacks=restored.fallbacks,
    )
