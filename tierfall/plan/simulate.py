"""A simulated run: the coordinator of a real run, on a virtual clock, with tiers that only count bytes and seconds.

It knows no tier, no backend and no configuration. Saves arrive at a fixed interval, each stored tier writes at a fixed
rate, nothing fails, and listing, committing and deleting take no time.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from tierfall.core.capture.events import CaptureBegun, CaptureSealed
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import HostRegion, Snapshot
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Lineage, Manifest, NamedFile
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.scheduler.flush.lane import LaneLimits
from tierfall.core.scheduler.ledger.ledger import ALONE, Ledger
from tierfall.core.scheduler.ledger.policies import Policies
from tierfall.core.scheduler.ledger.tasks import (
    AdmissionRequest,
    CommitCopy,
    CopyRun,
    DeleteCopy,
    Event,
    FinishCopy,
    OpenShard,
    Outcome,
    ReadMarks,
    Task,
    Uploaded,
)
from tierfall.core.types import events, keys
from tierfall.core.types.values import CheckpointId, SaveOutcome, TierKind, WhenFull
from tierfall.core.types.view import Eviction, TierRules, View
from tierfall.policies import defaults

DEFAULT_IMAGES = 2.2
"""Host memory in images where no capacity is configured: what ``arena_folder`` chooses."""
CHUNKS = 4
"""Chunks per image. A copy may change its source between two chunks, so that memory is released before its end."""
WORK_OF_STEP = 100
"""Work of one ``Coordinator.step`` besides that for each checkpoint."""
SAMPLES_MAX = 2000
RUN, ATTEMPT, ATTEMPT_ID, NODE = "forecast", 1, "0" * 32, "node"
NO_TENSORS = Spliced(b"[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is saved: bytes of one rank's image, seconds between saves, training steps between saves, ranks, nodes."""

    image_bytes: int
    save_every_s: float
    steps_per_save: int = 1
    ranks: int = 1
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedChain:
    """The tiers. ``rates`` are bytes per second that one node writes to a tier (missing: unknown, and taken as
    instant); ``shared`` names the tiers that all nodes see; ``room`` is what a tier's file system has for the run, in
    bytes (missing: unknown); ``host_bytes`` is one rank's memory (None: 2.2 images)."""

    rules: tuple[TierRules, ...]
    rates: Mapping[str, float] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    room: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int | None = None
    max_wait_s: float = 60.0


@dataclass(slots=True)
class TierCounters:
    """What happened on one tier so far. ``full_s``: when a copy first found no room. ``refuses``: at some time nothing
    could be deleted to make room. ``lag_s``: seconds from save to commit of the last copy. ``late_s``: when the tier
    first exceeded its ``flush.within``."""

    kept: int = 0
    kept_max: int = 0
    full_s: float | None = None
    refuses: bool = False
    lag_s: float | None = None
    late_s: float | None = None


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The counters at one time. ``behind_s``: per tier, the age of the oldest save that is newer than all it has."""

    at_s: float
    saves: int
    skipped: int
    superseded: int
    waited_s: float
    kept: Mapping[str, int]
    behind_s: Mapping[str, float]


class SimulatedMemory:
    """The host tier: ``HostMemory`` without bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = self.free_bytes = capacity_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self.free_bytes

    def allocate(self, *, image_bytes: int, records_bytes: int) -> HostRegion | None:
        if image_bytes > self.free_bytes:
            return None
        self.free_bytes -= image_bytes
        return cast(HostRegion, SimulatedRegion(self, image_bytes))

    def would_fit(
        self, *, image_bytes: int, records_bytes: int, without: Collection[HostRegion]
    ) -> bool:
        regions = cast(Collection[SimulatedRegion], without)
        return image_bytes <= self.free_bytes + sum(region.bytes for region in regions)


@dataclass(slots=True, eq=False)
class SimulatedRegion:
    """Of ``HostRegion``, what the coordinator uses of an image that no process adopts."""

    memory: SimulatedMemory
    bytes: int
    sealed: bool = False

    def unseal(self) -> None:
        self.sealed = False

    def release(self) -> None:
        self.memory.free_bytes += self.bytes
        self.bytes = 0


class WatchedPolicies:
    """The policies of a run; ``on_eviction`` receives each tier and plan when room is needed."""

    def __init__(self, on_eviction: Callable[[str, Eviction], None]) -> None:
        self._on_eviction = on_eviction

    def __getattr__(self, name: str) -> Any:
        return getattr(defaults, name)

    def plan_eviction(
        self, view: View, tier_name: str, *, need_bytes: int, free_bytes: int
    ) -> Eviction:
        plan = defaults.plan_eviction(view, tier_name, need_bytes=need_bytes, free_bytes=free_bytes)
        self._on_eviction(tier_name, plan)
        return plan


class Simulation:
    """One rank's coordinator, and the training loop that saves. A tier's capacity is divided by the ranks that write
    to it, so that this rank stands for all."""

    def __init__(self, chain: SimulatedChain, load: Workload, *, work_max: int) -> None:
        self._chain, self._load, self._work_left = chain, load, work_max
        self._host = next(r for r in chain.rules if r.kind is TierKind.HOST)
        self._stored = [r for r in chain.rules if r.kind is not TierKind.HOST]
        self._copy_s = {r.name: copy_s_of(r, chain, load) or 0.0 for r in self._stored}
        self._geometry = Geometry(
            image_bytes=load.image_bytes,
            data_start=0,
            chunk_bytes=max(1, math.ceil(load.image_bytes / CHUNKS)),
        )
        self.counters = {r.name: TierCounters() for r in chain.rules}
        self.now_s = self.waited_s = 0.0
        self.saves = self.skipped = self.superseded = self._step = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._wake_s: float | None = None
        self._has_news = False
        self._coordinator = self._make_coordinator()

    def _make_coordinator(self) -> Coordinator:
        rules = tuple(self._rules_of_rank(r) for r in self._chain.rules)
        limits = LaneLimits(parallel=1, budget_bytes=self._load.image_bytes)
        capacity_bytes = self._chain.host_bytes or math.ceil(
            DEFAULT_IMAGES * self._load.image_bytes
        )
        return Coordinator(
            ledger=Ledger(rules, self._host.name),
            lanes={r.name: limits for r in self._stored},
            host=SimulatedMemory(capacity_bytes),
            policies=cast(Policies, WatchedPolicies(self._on_eviction_planned)),
            submit=self._run,
            max_wait_s=self._chain.max_wait_s,
            when_full=self._host.when_full or WhenFull.WAIT,
            notify=self._on_event,
        )

    def _rules_of_rank(self, rules: TierRules) -> TierRules:
        limit = limit_of(rules, self._chain)
        if limit is None or rules.kind is TierKind.HOST:
            return rules
        if limit != rules.capacity_bytes:  # a full disk has no watermarks
            rules = replace(rules, evict_high=None, evict_low=None)
        return replace(rules, capacity_bytes=limit // ranks_on(rules, self._chain, self._load))

    def run_until(self, horizon_s: float) -> tuple[CounterSample, CounterSample]:
        """Run to the horizon, or to the save at which the work is spent. Returns the counters at half of that time and
        at its end, each with the largest ``kept`` and ``behind_s`` of its half, as these rise and fall."""
        samples = [self.sample()]
        self._after(self._load.save_every_s, self._save)
        with _silent(logging.getLogger("tierfall")):
            while True:
                answered = self.saves + self.skipped
                self._advance(min(self._next_s(), horizon_s))
                if self.now_s >= horizon_s:
                    samples.append(self.sample())
                    break
                if self.saves + self.skipped > answered:
                    samples.append(self.sample())
                    if self._work_left <= 0:
                        break
                    if len(samples) > SAMPLES_MAX:
                        del samples[-2:0:-2]  # keeps the last
        end = samples[-1]
        early = [s for s in samples if s.at_s <= end.at_s / 2]
        return _with_most(early), _with_most(samples[len(early) :] or early)

    def sample(self) -> CounterSample:
        backlog = self._coordinator.backlog
        return CounterSample(
            self.now_s,
            self.saves,
            self.skipped,
            self.superseded,
            self.waited_s,
            kept={name: tier.kept for name, tier in self.counters.items()},
            behind_s={r.name: backlog.behind_s(r.name, self.now_s) for r in self._stored},
        )

    # Time ----------------------------------------------------------------------------------------------

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now_s + seconds, next(self._timer_numbers), call))

    def _next_s(self) -> float:
        times = [at_s for at_s, _, _ in self._timers[:1]]
        return min(times if self._wake_s is None else [*times, self._wake_s], default=math.inf)

    def _advance(self, now_s: float) -> None:
        """Let time pass to ``now_s``, and the coordinator react to all that is due."""
        self.now_s = max(self.now_s, now_s)
        while self._timers and self._timers[0][0] <= self.now_s:
            heapq.heappop(self._timers)[2]()
        self._has_news = True
        while self._has_news or not self._coordinator.inbox.is_empty:
            self._has_news = False
            self._wake_s = self._coordinator.step(self.now_s)
            self._work_left -= WORK_OF_STEP + len(self._coordinator.ledger.entries)
        for name, count in self._coordinator.backlog.late.items():
            if count and self.counters[name].late_s is None:
                self.counters[name].late_s = self.now_s

    def _post(self, event: Event) -> None:
        self._coordinator.post(event)
        self._has_news = True

    # Saves ---------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._step += self._load.steps_per_save
        id = CheckpointId(self._step, ATTEMPT)
        self._post(
            AdmissionRequest(
                id=id,
                image_bytes=self._load.image_bytes,
                records_bytes=0,
                deadline_s=self.now_s + self._chain.max_wait_s,
                on_answer=partial(self._on_admitted, id, self.now_s),
            )
        )

    def _on_admitted(
        self,
        id: CheckpointId,
        asked_s: float,
        region: HostRegion | None,
        error: BaseException | None,
    ) -> None:
        """Capture at once, or skip the save. The interval to the next one begins here."""
        self.waited_s += self.now_s - asked_s
        self._after(self._load.save_every_s, self._save)
        if region is None:
            self.skipped += 1
            return
        self.saves += 1
        snapshot = self._capture(id, region)
        self._post(CaptureBegun(snapshot=snapshot, tiers=snapshot.handle.tiers))
        self._post(CaptureSealed(id=id))

    def _capture(self, id: CheckpointId, region: HostRegion) -> Snapshot:
        line = Lineage(
            run=RUN, checkpoint=id, attempt_id=ATTEMPT_ID, ordinal=self.saves, started_from=None
        )
        owed = defaults.tiers_owed(self._chain.rules, self.saves)
        image = NamedFile(name=keys.shard_name(ALONE), bytes=self._load.image_bytes, digest=None)
        return Snapshot(
            lineage=line,
            shard=ALONE,
            geometry=self._geometry,
            structure="",
            pieces=NO_TENSORS,
            region=region,
            handle=SaveHandle(id, owed, in_memory=self._host.name, clock=lambda: self.now_s),
            copier=cast(Any, None),  # only the capture thread uses it
            wall_time_s=self.now_s,
            node=NODE,
            manifest=Manifest(
                lineage=line,
                shard=ALONE,
                image_bytes=self._geometry.image_bytes,
                data_start=self._geometry.data_start,
                chunk_bytes=self._geometry.chunk_bytes,
                digests=(),
                structure="",
                pieces=NO_TENSORS,
            ),
            commit=Commit(
                lineage=line, world_size=1, files=(image,), nodes=(NODE,), wall_time_s=self.now_s
            ),
        )

    # Tasks ---------------------------------------------------------------------------------------------

    def _run(self, task: Task) -> None:
        """Copying takes the tier's time; every other task succeeds at once."""
        if isinstance(task, CopyRun):
            seconds = self._copy_s[task.tier] * (task.end - task.start) / self._load.image_bytes
            outcome = Outcome(task=task, seconds=seconds, bytes=task.end - task.start)
            self._after(seconds, partial(self._post, outcome))
        else:
            self._post(Outcome(task=task, value=_value_of(task)))

    # Counters ------------------------------------------------------------------------------------------

    def _on_eviction_planned(self, tier: str, plan: Eviction) -> None:
        """A stored tier plans an eviction only where a copy finds no room; memory does so for each save."""
        counters = self.counters[tier]
        if counters.full_s is None and (tier != self._host.name or plan.missing_bytes):
            counters.full_s = self.now_s

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.Captured():
                self._count(self._host.name, +1)
            case events.SaveEnded(outcome=SaveOutcome.SUPERSEDED):
                self.superseded += 1
            case events.Committed():
                self._count(event.tier, +1)
                self.counters[event.tier].lag_s = event.seconds
            case events.Evicted() | events.Dropped(unfinished=False):
                self._count(event.tier, -1)
            case events.TierFailing():
                self.counters[event.tier].refuses = True

    def _count(self, tier: str, change: int) -> None:
        counters = self.counters[tier]
        counters.kept += change
        counters.kept_max = max(counters.kept_max, counters.kept)


def _value_of(task: Task) -> Any:
    """What a worker would return for a task that succeeded."""
    match task:
        case OpenShard():
            return (
                SimpleNamespace(),
                None,
            )  # a writer that nothing writes with, and no manifest that was read
        case FinishCopy():
            return Uploaded(files=task.commit.files)
        case CommitCopy():
            return task.commit
        case ReadMarks():
            return dict.fromkeys(task.ids, frozenset())
        case DeleteCopy(unfinished=False):
            return frozenset()
    return None


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    """Drop what this thread logs: it reports on checkpoints that do not exist."""
    thread = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another_thread)


def _with_most(samples: Sequence[CounterSample]) -> CounterSample:
    end = samples[-1]
    return replace(
        end,
        kept={tier: max(s.kept[tier] for s in samples) for tier in end.kept},
        behind_s={tier: max(s.behind_s[tier] for s in samples) for tier in end.behind_s},
    )


def ranks_on(rules: TierRules, chain: SimulatedChain, load: Workload) -> int:
    """How many ranks' images a tier's capacity counts."""
    if rules.kind is TierKind.HOST:
        return 1
    return load.ranks if rules.name in chain.shared else load.ranks_per_node


def limit_of(rules: TierRules, chain: SimulatedChain) -> int | None:
    """Return how many bytes a tier can hold: its capacity, or the room on its file system if that is less."""
    limits = (rules.capacity_bytes, chain.room.get(rules.name))
    return min((limit for limit in limits if limit is not None), default=None)


def copy_s_of(rules: TierRules, chain: SimulatedChain, load: Workload) -> float | None:
    """How long the images of one node take to a tier, in seconds; None if its rate is unknown."""
    rate = chain.rates.get(rules.name)
    return None if not rate else load.image_bytes * load.ranks_per_node / rate
