"""What a run reports: statistics, and the status file of its process, written on a thread of its own: neither training
nor the coordinator waits.

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
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from tierfall.config import Config
from tierfall.core.flush.coordinator import Coordinator
from tierfall.core.flush.facts import LedgerEntry
from tierfall.core.flush.lane import FlushLane
from tierfall.core.restore.restore import RestoreResult
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.run_lock import own_start_ticks
from tierfall.core.types import events
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.text import to_json
from tierfall.core.types.values import CopyState, LossClass, SaveOutcome
from tierfall.core.types.view import LossBound, TierRules, newest_surviving
from tierfall.telemetry import metrics
from tierfall.telemetry.event_log import wall_time
from tierfall.telemetry.reports import Compression, RestoreReport, ShardSource, Statistics
from tierfall.telemetry.status import (
    CheckpointStatus,
    CopyStatus,
    Status,
    TierStatus,
    TransferStatus,
    describe_flushes,
    durable_bound_s,
    remove_status,
    write_status,
)

if TYPE_CHECKING:
    from tierfall.run.saver import SaveCounts
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
        self._free_bytes: dict[str, float] = {}
        self._space_due_s = 0.0
        self.training: Mapping[str, float | None] = {}
        """Metrics of the cadence, by name, which the training thread sets at each save."""
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
        bounds = self._session.loss_bounds()
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
            tiers=tuple(self._tier(rules) for rules in ledger.rules),
            checkpoints=tuple(
                self._checkpoint(entry, abandoned=entry.id in left) for entry in reversed(newest)
            ),
            checkpoints_known=len(ledger.entries),
            transfers=tuple(
                self._transfer(lane)
                for lane in coordinator.lanes.values()
                if lane.active is not None
            ),
            loss_bound=dict(bounds),
            peer_survival=self._session.peer_survival(),
            events=self._events(),
            lost_events=self._journal.lost,
            metrics=self.metrics(bounds),
        )

    def metrics(self, bounds: Mapping[LossClass, LossBound] | None = None) -> dict[str, float]:
        """Return all metrics by key; ``bounds`` are what each loss would cost, if known already."""
        flat = self._journal.tally.read()
        flat |= {metrics.to_key("late", t): n for t, n in self._coordinator.backlog.late.items()}
        flat[metrics.to_key("lost_events")] = self._journal.lost
        flat[metrics.to_key("unread_events")] = self._journal.unread
        losses = (bounds or self._session.loss_bounds()).items()
        by_loss: dict[str, Mapping[str, float | None]] = {
            "surviving_step": {x: b.survives.step if b.survives else None for x, b in losses},
            "loss_bound_steps": {x: b.steps_lost for x, b in losses},
            "loss_bound_seconds": {x: b.seconds_lost for x, b in losses},
            "restore_seconds": {x: b.restore_s for x, b in losses},
        }
        return flat | metrics.flatten(self._gauges(), self._tier_gauges() | by_loss)

    def _gauges(self) -> dict[str, float | None]:
        timer, backlog = self._session.step_timer, self._coordinator.backlog
        now_s = time.monotonic()
        config = self._tiers.config
        every_s = backlog.estimated_every_s or _configured_every_s(config, timer.step_s)
        ages = [self._since_commit(tier.name, now_s) for tier in config.written]
        return {
            "step": timer.last,
            "image_bytes": backlog.image_bytes or None,
            "last_blocked_seconds": self._journal.tally.last_blocked_s,
            "step_seconds": timer.step_s,
            "interval_seconds": every_s,
            "durable_age_seconds": min(ages, default=None),
            "durable_bound_seconds": durable_bound_s(
                every_s, [tier.flush.every for tier in config.written]
            ),
            **self.training,
        }

    def _since_commit(self, tier: str, now_s: float) -> float:
        committed_s = self._journal.tally.committed_s(tier)
        return now_s - (self._began_s if committed_s is None else committed_s)

    def _tier_gauges(self) -> dict[str, Mapping[str, float | None]]:
        coordinator, ledger, now_s = self._coordinator, self._coordinator.ledger, time.monotonic()
        left, flow = ledger.abandoned(), _flow(coordinator)
        owed = Counter(tier for entry in ledger.open() for tier in entry.owed)
        degraded = Counter(
            tier
            for entry in ledger.entries.values()
            if (entry.damage or entry.set_aside) and entry.id not in left and not entry.deleted
            for tier in {*entry.damage, *entry.set_aside}
        )
        tiers = [self._tier(rules) for rules in ledger.rules]
        stored = [rules for rules in ledger.rules if rules.name != ledger.host]
        written = [rules.name for rules in stored]
        return {
            "commit_age_seconds": {name: self._since_commit(name, now_s) for name in written},
            "behind": flow["behind"],
            "behind_seconds": flow["behind_s"],
            "behind_bound_seconds": {rules.name: rules.within_s for rules in stored},
            "owed_copies": {name: owed[name] for name in written},
            "degraded_copies": {tier.name: degraded[tier.name] for tier in tiers},
            "tier_failing": {tier.name: float(tier.failing is not None) for tier in tiers},
            "tier_used_bytes": {tier.name: tier.used_bytes for tier in tiers},
            "tier_capacity_bytes": {tier.name: tier.capacity_bytes for tier in tiers},
            "tier_free_bytes": dict(self._free_bytes),
            "checkpoints": {tier.name: tier.checkpoints for tier in tiers},
            "write_bytes_per_second": {t: flow["write_bytes_per_s"][t] for t in written},
            "read_bytes_per_second": flow["read_bytes_per_s"],
            "flush_share": flow["flush_shares"],
        }

    def _events(self) -> tuple[dict[str, object], ...]:
        return tuple(
            {"wall_time_s": round(wall_time(event.at_s), 3), **events.event_to_json(event)}
            for event in [*self._journal.recent.copy()][-EVENTS_MAX:]
        )

    def _tier(self, rules: TierRules) -> TierStatus:
        ledger, name, capacity = self._coordinator.ledger, rules.name, rules.capacity_bytes
        if name == ledger.host:
            capacity = self._session.host.capacity_bytes or capacity
        failing = ledger.failing.get(name) or self._tiers.errors.get(name)
        lane = self._coordinator.lanes.get(name)
        is_delayed = lane is not None and lane.failing_since_s is not None
        return TierStatus(
            name=name,
            kind=rules.kind,
            used_bytes=ledger.used_bytes(name),
            capacity_bytes=capacity,
            checkpoints=ledger.whole_copies_on(name),
            bytes_per_s=self._bytes_per_s(name) or 0.0,
            failing=None if failing is None else str(failing),
            last_error=str(lane.last_error) if lane is not None and is_delayed else None,
        )

    def _checkpoint(self, entry: LedgerEntry, *, abandoned: bool) -> CheckpointStatus:
        ledger, copies = self._coordinator.ledger, {}
        names = [rules.name for rules in ledger.rules]
        for name in names:
            state = entry.state(name)
            if state is not CopyState.ABSENT:
                copies[name] = CopyStatus(
                    state=state,
                    bytes=(name == ledger.host and entry.image_bytes) or entry.bytes.get(name, 0),
                    fraction=self._fraction(entry, name) if state is CopyState.ARRIVING else None,
                )
        return CheckpointStatus(
            step=entry.id.step,
            attempt=entry.id.attempt,
            copies=copies,
            owed=tuple(name for name in names if name in entry.owed),
            set_aside={tier: str(error) for tier, error in entry.set_aside.items()},
            pinned=entry.pinned,
            abandoned=abandoned,
            tags=tuple(sorted(entry.tags)),
            metrics=to_json(entry.commit.metrics) if entry.commit else {},
        )

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


# Statistics, for the user's thread ---------------------------------------------------------------------


def statistics(session: Session, counts: SaveCounts) -> Statistics:
    """Return counters and times since open, without those of the cadence."""
    stats = [handle.stats for handle in counts.handles]
    coordinator = session.coordinator
    durable: dict[str, list[float]] = {}
    for one in stats:
        for tier, seconds in one.durable_s.items():
            durable.setdefault(tier, []).append(seconds)

    def read() -> tuple[dict[LossClass, LossBound], dict[str, Any]]:
        flow = _flow(coordinator)
        written = flow.pop("write_bytes_per_s").items()
        return session.loss_bounds(), {
            **flow,
            "edge_bytes": {
                f"{source}->{lane.tier}": count
                for lane in coordinator.lanes.values()
                for source, count in lane.edge_bytes.items()
            },
            "peer_survival": session.peer_survival(),
            "write_bytes_per_s": {tier: rate for tier, rate in written if rate is not None},
            "late": {tier: coordinator.backlog.late.get(tier, 0) for tier in flow["behind_s"]},
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


def _flow(coordinator: Coordinator) -> dict[str, Mapping[str, float | None]]:
    """Return, by tier, how fast it is written and read, and how far it is behind."""
    rates, backlog, ledger = coordinator.rates, coordinator.backlog, coordinator.ledger
    tiers, now_s = [rules.name for rules in ledger.rules], time.monotonic()
    return {
        "write_bytes_per_s": {tier: rates.write_bytes_per_s(tier) for tier in tiers},
        "read_bytes_per_s": dict(rates.read_rates()),
        "behind": dict(backlog.behind),
        "behind_s": {tier: backlog.behind_s(tier, now_s) for tier in tiers if tier != ledger.host},
        "flush_shares": dict(coordinator.throttle.shares),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
