"""Reports made of a session's records: pure functions, apart from the counters of saves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import Snapshot
from tierfall.core.flush.facts import Ledger, LedgerEntry
from tierfall.core.restore.restore import RestoreResult
from tierfall.core.types.values import LossClass, SaveOutcome
from tierfall.core.types.view import LossBound, newest_surviving
from tierfall.session.session import Session
from tierfall.telemetry.reports import (
    CheckpointInfo,
    Compression,
    RestoreReport,
    ShardSource,
    Statistics,
)
from tierfall.telemetry.step_timer import StepTimer

SAVES_REMEMBERED = 1000


@dataclass(slots=True)
class SaveCounts:
    """Counts the saves of this process: ``bytes`` of their images, ``lazy_bytes`` of them captured lazily."""

    begun: int = 0
    lazy: int = 0
    bytes: int = 0
    lazy_bytes: int = 0
    skipped: int = 0
    handles: list[SaveHandle] = field(default_factory=list)
    steps: StepTimer = field(default_factory=StepTimer)

    @property
    def tried(self) -> int:
        """Saves that have begun, and saves that found no room."""
        return self.begun + self.skipped

    def count(self, snapshot: Snapshot, *, lazy: bool) -> None:
        self.begun += 1
        self.bytes += snapshot.geometry.image_bytes
        self.lazy += int(lazy)
        self.lazy_bytes += snapshot.lazy_bytes
        self.handles.append(snapshot.handle)
        del self.handles[:-SAVES_REMEMBERED]


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


def checkpoint_infos(ledger: Ledger, wall_time_s: float) -> list[CheckpointInfo]:
    """Return every checkpoint that exists or is being captured, without the remains of failed captures."""
    left = ledger.abandoned()
    return [
        _info(entry, entry.id in left, wall_time_s)
        for entry in sorted(ledger.entries.values(), key=lambda e: e.id)
        if entry.commit is not None or entry.snapshot is not None or entry.damage
    ]


def _info(entry: LedgerEntry, abandoned: bool, wall_time_s: float) -> CheckpointInfo:
    commit = entry.commit
    return CheckpointInfo(
        step=entry.id.step,
        attempt=entry.id.attempt,
        ordinal=entry.ordinal,
        tiers=dict(entry.states),
        bytes=entry.image_bytes
        or (commit.image_bytes if commit else max(entry.bytes.values(), default=0)),
        age_s=max(0.0, wall_time_s - commit.wall_time_s) if commit else 0.0,
        pinned=entry.pinned,
        abandoned=abandoned,
        tags=tuple(sorted(entry.tags)),
        metrics=dict(commit.metrics) if commit else {},
        owed=tuple(sorted(entry.owed)),
        damage=dict(entry.damage),
        set_aside={tier: str(error) for tier, error in entry.set_aside.items()},
    )


def statistics(session: Session, counts: SaveCounts) -> Statistics:
    stats = [handle.stats for handle in counts.handles]
    coordinator = session.coordinator
    durable: dict[str, list[float]] = {}
    for one in stats:
        for tier, seconds in one.durable_s.items():
            durable.setdefault(tier, []).append(seconds)

    def read() -> tuple[dict[LossClass, LossBound], dict[str, Any]]:
        rates, backlog, ledger = coordinator.rates, coordinator.backlog, coordinator.ledger
        tiers = [rules.name for rules in ledger.rules]
        stored = [tier for tier in tiers if tier != ledger.host]
        written = {tier: rates.write_bytes_per_s(tier) for tier in tiers}
        now_s = time.monotonic()
        return session.loss_bounds(), {
            "edge_bytes": {
                f"{source}->{lane.tier}": count
                for lane in coordinator.lanes.values()
                for source, count in lane.edge_bytes.items()
            },
            "peer_survival": session.peer_survival(),
            "write_bytes_per_s": {tier: rate for tier, rate in written.items() if rate is not None},
            "read_bytes_per_s": rates.read_rates(),
            "behind": dict(backlog.behind),
            "behind_s": {tier: backlog.behind_s(tier, now_s) for tier in stored},
            "flush_shares": dict(coordinator.throttle.shares),
            "late": {tier: backlog.late.get(tier, 0) for tier in stored},
        }

    bounds, flow = session.call(read)
    counters = coordinator.counters
    return Statistics(
        saves=counts.begun,
        lazy_saves=counts.lazy,
        bytes=counts.bytes,
        lazy_bytes=counts.lazy_bytes,
        skipped_saves=counts.skipped,
        superseded_saves=counters.superseded_saves,
        failed_saves=sum(h.outcome is SaveOutcome.FAILED for h in counts.handles),
        blocked_s=_mean([one.blocked_s for one in stats]),
        captured_s=_mean([one.captured_s for one in stats if one.captured_s is not None]),
        durable_s={tier: _mean(values) for tier, values in durable.items()},
        commits=dict(counters.commits),
        flush_failures=counters.flush_failures,
        given_up_copies=counters.given_up_copies + sum(coordinator.flush_queue.given_up.values()),
        set_aside_copies=counters.set_aside_copies,
        dropped_copies=counters.deleted_copies,
        direct_io={name: store.backend.traits.direct_io for name, store in session.stores.items()},
        host_capacity_bytes=session.host.capacity_bytes,
        newest=newest_surviving(bounds),
        loss_bound=bounds,
        lost_events=session.journal.lost,
        compression={
            name: Compression(
                raw_bytes=packed.raw_bytes, stored_bytes=packed.packed_bytes, seconds=packed.seconds
            )
            for name, store in session.stores.items()
            if (packed := store.pack_counts) is not None
        },
        **flow,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
