"""The coordinator's components: built in the order in which their constructors need one another.

Where a component calls one that is built after it, it does so by ``Hooks``, which this class implements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

from tierfall.core.capture.snapshot import HostMemory
from tierfall.core.format.decided import DecidedList
from tierfall.core.ranks.message_tree import MessageTree, RankMessage
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.deletion.verifier import BackgroundVerifier
from tierfall.core.scheduler.flush.admission import Admissions, Superseder
from tierfall.core.scheduler.flush.backlog import Backlog
from tierfall.core.scheduler.flush.capture_events import CaptureEvents
from tierfall.core.scheduler.flush.drain_schedule import DrainSchedule
from tierfall.core.scheduler.flush.flusher import Flusher
from tierfall.core.scheduler.flush.lane import FlushLane, LaneLimits
from tierfall.core.scheduler.flush.queue import FlushQueue
from tierfall.core.scheduler.flush.room import TierRoom
from tierfall.core.scheduler.flush.throttle import Throttle
from tierfall.core.scheduler.group.commits import Commits
from tierfall.core.scheduler.group.damage import DamageReports
from tierfall.core.scheduler.group.decisions import Decisions
from tierfall.core.scheduler.group.external_commits import ExternalCommits
from tierfall.core.scheduler.inbox import Inbox
from tierfall.core.scheduler.ledger.attempt_starts import StartRecords
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import CheckChunk, OpenCheck, ReadDecided, Task
from tierfall.core.types.errors import FencedError
from tierfall.core.types.events import Notify, ignore
from tierfall.core.types.values import CheckpointId, WhenFull
from tierfall.policies.flush import still_owed

LOOKS = (ReadDecided, OpenCheck, CheckChunk)
"""Tasks that change no tier. A wait until all tasks have ended leaves these out."""


class LeftoverMemory(Protocol):
    """Memory that ranks of an earlier start left."""

    def on_committed(self, tier: str, newer: LedgerEntry) -> None: ...

    def evict_oldest(self) -> bool: ...


class Components(Hooks):
    """See the module. Belongs to the coordinator's thread, but for ``inbox``."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Mapping[str, LaneLimits],
        host: HostMemory,
        submit: Callable[[Task], None],
        max_wait_s: float,
        when_full: WhenFull = WhenFull.WAIT,
        unread: Collection[str] = (),
        decided: Mapping[str, DecidedList] | None = None,
        message_tree: MessageTree | None = None,
        shared: Mapping[str, bool] | None = None,
        set_pace: Callable[[str, float | None], None] = lambda tier, bytes_per_s: None,
        verify_bytes_per_s: float | None = None,
        notify: Notify = ignore,
        leftovers: LeftoverMemory | None = None,
    ) -> None:
        """``lanes`` are the stored tiers that this process writes to. ``unread`` names the tiers that could not be
        listed when the run was opened, ``decided`` has what the list of each tier had then. ``message_tree`` sends the
        messages of the ranks (None: this is the only one). ``shared`` has, for each tier, whether all ranks see the
        same files (None: they do). ``set_pace`` limits a tier's write rate (None: no limit); ``verify_bytes_per_s``
        limits background verification per tier (None: no limit)."""
        self.inbox = Inbox()
        message_tree = message_tree or self._message_tree_of_one()
        self.steps = 0
        self._idle_events: dict[InterruptibleEvent, bool] = {}
        """By event, whether it is set although other work than copies is in progress."""
        self._tasks_out = 0
        self._submit = submit
        self._leftovers = leftovers
        self.ledger = ledger
        self.rates = ledger.rates
        self.emitter = EventEmitter(notify)
        self.lanes = {
            tier: FlushLane(
                tier,
                limits=limits,
                order=[rules.name for rules in ledger.rules],
                host=ledger.host,
                hooks=self,
            )
            for tier, limits in lanes.items()
        }
        self.deleter = Deleter(
            ledger=ledger,
            tiers=self.lanes,
            hooks=self,
            emitter=self.emitter,
        )
        self.verifier = BackgroundVerifier(
            ledger=ledger,
            tiers=self.lanes,
            deleter=self.deleter,
            message_tree=message_tree,
            hooks=self,
            bytes_per_s=verify_bytes_per_s,
        )
        self._build_flush(host, max_wait_s, when_full, set_pace)
        shared = dict.fromkeys(lanes, True) if shared is None else shared
        self._build_group(message_tree, shared, max_wait_s, unread, decided or {})

    def _message_tree_of_one(self) -> MessageTree:
        ranks = Ranks.alone()
        ranks.set_listener(self.inbox.post)
        return ranks.message_tree

    def _build_flush(
        self,
        host: HostMemory,
        max_wait_s: float,
        when_full: WhenFull,
        set_pace: Callable[[str, float | None], None],
    ) -> None:
        """Build what copies checkpoints from memory to stored tiers."""
        self.backlog = Backlog(ledger=self.ledger, hooks=self)
        self.throttle = Throttle(
            ledger=self.ledger,
            backlog=self.backlog,
            hooks=self,
            set_pace=set_pace,
        )
        self.drain_schedule = DrainSchedule(
            ledger=self.ledger,
            lanes=self.lanes,
            throttle=self.throttle,
            hooks=self,
        )
        self.flush_queue = FlushQueue(
            ledger=self.ledger,
            drain_schedule=self.drain_schedule,
            hooks=self,
            emitter=self.emitter,
        )
        self._flusher = Flusher(
            ledger=self.ledger,
            lanes=self.lanes,
            deleter=self.deleter,
            queue=self.flush_queue,
            room=TierRoom(
                ledger=self.ledger,
                lanes=self.lanes,
                deleter=self.deleter,
                queue=self.flush_queue,
                hooks=self,
            ),
            backlog=self.backlog,
            hooks=self,
            emitter=self.emitter,
            max_wait_s=max_wait_s,
        )
        self.errors = self._flusher.errors
        self.counters = self.emitter.counters
        self.durable = self._flusher.durable
        self._admissions = Admissions(
            ledger=self.ledger,
            host=host,
            flusher=self._flusher,
            superseder=Superseder(
                ledger=self.ledger,
                lanes=self.lanes,
                deleter=self.deleter,
                hooks=self,
                emitter=self.emitter,
            ),
            backlog=self.backlog,
            hooks=self,
            emitter=self.emitter,
            when_full=when_full,
            max_wait_s=max_wait_s,
        )
        self._capture_events = CaptureEvents(
            ledger=self.ledger,
            lanes=self.lanes,
            flusher=self._flusher,
            backlog=self.backlog,
            hooks=self,
            emitter=self.emitter,
        )

    def _build_group(
        self,
        message_tree: MessageTree,
        shared: Mapping[str, bool],
        max_wait_s: float,
        unread: Collection[str],
        decided: Mapping[str, DecidedList],
    ) -> None:
        """Build what ranks decide together."""
        self.commits = self.group = Commits(
            message_tree=message_tree,
            ledger=self.ledger,
            shared=shared,
            flusher=self._flusher,
            deleter=self.deleter,
            saves=self._capture_events,
            draining=self.drain_schedule,
            hooks=self,
            max_wait_s=max_wait_s,
        )
        self._shared = shared
        self._nodes = len(message_tree.topology.nodes)
        self._decisions = Decisions(
            message_tree=message_tree,
            commits=self.commits,
            ledger=self.ledger,
            lanes=self.lanes.values(),
            deleter=self.deleter,
            admissions=self._admissions,
            backlog=self.backlog,
            hooks=self,
            lists=decided,
            unread=unread,
        )
        self.start_records = StartRecords(ledger=self.ledger, tiers=self.lanes, hooks=self)
        self.external_commits = ExternalCommits(
            ledger=self.ledger, message_tree=message_tree, hooks=self
        )
        self.damage_reports = DamageReports(
            ledger=self.ledger,
            tiers=self.lanes,
            deleter=self.deleter,
            hooks=self,
            message_tree=message_tree,
            commits=self.commits,
        )
        listening = (
            self._decisions,
            self.verifier,
            self.damage_reports,
            self.external_commits,
            self.commits.replicas,
        )
        self._listeners: dict[str, Callable[[RankMessage], None]] = {
            kind: component.on_message for component in listening for kind in component.KINDS
        }
        """What receives messages of a kind; ``commits`` receives the others."""

    @property
    def fenced(self) -> FencedError | None:
        """The error that reports a newer attempt: this process writes nothing more."""
        return self._flusher.fenced

    # Hooks -----------------------------------------------------------------------------------------

    def dispatch(self, task: Task) -> None:
        if not isinstance(task, LOOKS):
            self._tasks_out += 1
        self.rates.on_begun(task, self.ledger.now_s)
        self._submit(task)

    def on_committed(self, tier: str, entry: LedgerEntry) -> None:
        self.verifier.on_committed(tier)
        self._decisions.on_committed(tier)
        if self.group.decides and self.fenced is None:
            self.start_records.committed(tier, entry.commit)
        if self._leftovers is not None and not self.deleter.paused:
            self._leftovers.on_committed(tier, entry)

    def on_external_commit(self, tier: str, entry: LedgerEntry) -> None:
        if self.fenced is None:
            self._note_owed(entry)
        self.deleter.plan_tier(tier)
        self.on_committed(tier, entry)

    def _note_owed(self, only: LedgerEntry | None = None) -> None:
        """Determine which tiers are owed a copy of the checkpoints that were found, or of one of them."""
        view = self.ledger.view()
        # No rank flushes what is scattered; a rank that holds its shard in memory would count it as owed.
        flushed = tuple(c for c in view.checkpoints if c.id not in self.ledger.scattered)
        view = replace(view, checkpoints=flushed)
        for checkpoint in flushed:
            entry = self.ledger.entries[checkpoint.id]
            if only not in (None, entry):
                continue
            commit = entry.commit
            if commit and self._sends_image(entry, commit.world_size):
                owed = still_owed(view, checkpoint)
                entry.owed.update(
                    name for name in owed if name in self.lanes and name not in entry.damage
                )
                self.backlog.on_owed(entry.id, tuple(entry.owed))

    def _sends_image(self, entry: LedgerEntry, world_size: int) -> bool:
        """Return whether this rank sends an image of a checkpoint that ``world_size`` ranks saved."""
        own = self.ledger.shard
        return entry.shard == own and world_size == own.world_size

    def found_damage(
        self, tier: str, id: CheckpointId, why: str, *, repairable: bool = True
    ) -> None:
        if tier == self.ledger.host:
            self._capture_events.on_damage_found(id, why)
        else:
            self.damage_reports.report(tier, id, why, repairable=repairable)

    def evict_leftovers(self) -> bool:
        return self._leftovers is not None and self._leftovers.evict_oldest()

    def memory_is_short(self) -> bool:
        return self._admissions.memory_is_short()

    def has_deadline(self) -> bool:
        return self.drain_schedule.has_deadline

    def try_again(self) -> None:
        for lane in self.lanes.values():
            lane.not_before_s = min(lane.not_before_s, self.ledger.now_s)
        for component in (self.commits, self.deleter):
            component.try_now()

    def is_urgent(self) -> bool:
        return self._admissions.memory_is_short() or self.has_deadline()

    def is_verifying(self, tier: str) -> bool:
        return self.verifier.is_verifying(tier)

    def decided(self, tier: str, found: DecidedList) -> None:
        self._decisions.on_found(tier, found)

    def is_noted(self, id: CheckpointId, tier: str) -> bool:
        return self._decisions.is_noted(id, tier)

    def is_split(self, tier: str) -> bool:
        return not self._shared[tier] and self._nodes > 1
