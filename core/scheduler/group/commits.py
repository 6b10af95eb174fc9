"""Commits: this rank's part in the decisions that rank 0 makes for the saves and copies of all ranks.

A rank does nothing with a copy before rank 0 has announced it, and rank 0 announces it as soon as it can decide; no
rank waits for an answer. What a save goes through is in ``seals``, and a copy on one tier in ``tier_commits``; this
module receives the messages of both. It belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tierfall.core.format.records import NamedFile
from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessagesGathered,
    MessageTree,
    RankMessage,
    RankReported,
)
from tierfall.core.ranks.messages import CheckpointTopic
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.capture_events import CaptureEvents
from tierfall.core.scheduler.flush.drain_schedule import DrainSchedule
from tierfall.core.scheduler.flush.flusher import Flusher
from tierfall.core.scheduler.group.messages import (
    CommitFacts,
    CommittedCopy,
    DeletedCopy,
    DrainDeadline,
    GivenUpCopy,
    GroupMessages,
    LateRanks,
    MessageKind,
    Ordinal,
    Reason,
    SaveFailure,
    StuckCopy,
    WholeCheckpoint,
    kind_of,
)
from tierfall.core.scheduler.group.seals import GroupSeals
from tierfall.core.scheduler.group.tier_commits import TierCommits
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Group, Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import CommitCopy, DeleteCopy, Outcome
from tierfall.core.types.errors import FencedError
from tierfall.core.types.values import CheckpointId, SaveOutcome

logger = logging.getLogger("tierfall")

_RUN_KINDS = (MessageKind.DRAIN, MessageKind.ORDINAL, MessageKind.FENCED)
"""What is about the run, and no checkpoint: the topic has no other part."""


class Commits(Group):
    """See the module. ``shared`` holds, per stored tier, whether all ranks see the same files there."""

    def __init__(
        self,
        *,
        message_tree: MessageTree,
        ledger: Ledger,
        shared: Mapping[str, bool],
        flusher: Flusher,
        deleter: Deleter,
        saves: CaptureEvents,
        draining: DrainSchedule,
        hooks: Hooks,
        max_wait_s: float,
    ) -> None:
        self._ledger = ledger
        self._messages = GroupMessages(message_tree)
        self._topology = message_tree.topology
        self.decides = self._topology.is_root
        self._shared = shared
        self._flusher = flusher
        self._deleter = deleter
        self._draining = draining
        self._tiers = TierCommits(
            message_tree,
            ledger=ledger,
            shared=shared,
            flusher=flusher,
            deleter=deleter,
            hooks=hooks,
        )
        self._seals = GroupSeals(
            message_tree,
            ledger=ledger,
            tier_commits=self._tiers,
            saves=saves,
            max_wait_s=max_wait_s,
        )
        self.replicas = self._seals.replicas
        self.owns = self._tiers.owns
        self.is_committing = self._tiers.is_committing
        self.has_given_up = self._tiers.has_given_up
        self.try_now = self._tiers.try_now

    # What the scheduler asks, and reports ----------------------------------------------------------

    def ranks_on(self, tier: str) -> int:
        return self._topology.world_size if self._shared[tier] else len(self._topology.local_ranks)

    def is_committing_on(self, tier: str) -> bool:
        return self._tiers.is_committing_on(tier)

    def admitted(self, tier: str) -> Sequence[CheckpointId] | None:
        return None if self.decides else tuple(self._tiers.admitted[tier])

    def give_up_by_rule(self, tier: str, id: CheckpointId, reason: str) -> None:
        if self.decides:
            self._tiers.give_up(tier, id, reason, by_rule=True, set_aside=False)
        else:  # other ranks that have uploaded wait for this one
            self._messages.report(MessageKind.GIVE_UP, id, tier, Reason(text=reason))

    def give_up(self, tier: str, id: CheckpointId, reason: str) -> None:
        """Have all ranks give a copy up; for rank 0."""
        self._tiers.give_up(tier, id, reason, by_rule=False, set_aside=False)

    def on_copy_begun(self, tier: str, entry: LedgerEntry) -> None:
        if self.decides:
            self._messages.announce_to_others(MessageKind.ADMITTED, entry.id, tier)

    def is_stuck(self, tier: str) -> bool:
        return self._tiers.is_stuck(tier)

    def why_save_failed(self, id: CheckpointId) -> tuple[BaseException, SaveOutcome] | None:
        return self._seals.why_given_up(id)

    def why_copies_given_up(self, id: CheckpointId) -> Mapping[str, BaseException]:
        return self._tiers.errors_of(id)

    def on_save_begun(self, id: CheckpointId) -> None:
        self.replicas.save_begun(id)

    def sealed(self, entry: LedgerEntry) -> None:
        self._seals.contribute(entry)

    def on_uploaded(self, tier: str, entry: LedgerEntry, files: Collection[NamedFile]) -> None:
        self._tiers.contribute(tier, entry, files)

    def end_saves(self, reached: CheckpointId) -> None:
        """Have all ranks give up the steps after ``reached`` of that attempt: no rank begins a save any more, and not
        all have begun these."""
        self._seals.end_saves(reached)

    def give_up_copy(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        self._tiers.report_failed(MessageKind.COPY_FAILED, tier, entry.id, error)

    def set_aside(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        self._tiers.report_failed(MessageKind.SET_ASIDE, tier, entry.id, error)

    def tier_failing(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        self._messages.report(MessageKind.STUCK, entry.id, tier, Reason(text=str(error)))

    def save_failed(self, id: CheckpointId, error: BaseException, outcome: SaveOutcome) -> None:
        failure = SaveFailure(text=str(error), outcome=outcome)
        self._messages.report(MessageKind.SAVE_FAILED, id, body=failure)

    def on_saved_in_vain(self, entry: LedgerEntry) -> None:
        self._messages.report_of_run(MessageKind.ORDINAL, Ordinal(ordinal=entry.ordinal))

    def on_fenced(self, error: FencedError) -> None:
        self._messages.report_of_run(MessageKind.FENCED, Reason(text=str(error)))

    def share_deadline(self, left_s: float) -> None:
        """Have all ranks drain for a deadline that this rank knows: rank 0 announces it."""
        body = DrainDeadline(left_s=left_s)
        if self.decides:
            self._messages.announce_of_run(MessageKind.DRAIN, body)
        else:
            self._messages.report_of_run(MessageKind.DRAIN, body)

    def on_deleted(self, task: DeleteCopy) -> None:
        body = DeletedCopy(reason=task.reason, next_latest=task.next_latest)
        self._messages.announce_to_others(MessageKind.DELETE_COPY, task.id, task.tier, body)

    # Messages --------------------------------------------------------------------------------------

    def on_message(self, news: RankMessage) -> None:
        match news:
            case RankReported() if kind_of(news) in _RUN_KINDS:
                self._on_run_report(news)
            case DecisionAnnounced() if kind_of(news) in _RUN_KINDS:
                self._on_run_decision(news)
            case MessagesGathered():
                self._on_gathered(CheckpointTopic.parse(news.topic), news)
            case RankReported():
                self._on_report(CheckpointTopic.parse(news.topic), news)
            case DecisionAnnounced():
                self._on_decision(CheckpointTopic.parse(news.topic), news.body)

    def _on_run_report(self, news: RankReported) -> None:
        match kind_of(news):
            case MessageKind.DRAIN:
                now_s = self._ledger.now_s
                left_s = DrainDeadline.from_json(news.body, rank=news.rank).left_s
                self._draining.begin(f"rank {news.rank}", now_s + left_s, now_s)
                self.share_deadline(left_s)
            case MessageKind.ORDINAL:
                self._messages.announce_of_run(
                    MessageKind.ORDINAL, Ordinal.from_json(news.body, rank=news.rank)
                )
            case MessageKind.FENCED:
                reason = Reason.from_json(news.body, rank=news.rank)
                self._messages.announce_of_run(
                    MessageKind.FENCED,
                    Reason(text=self._topology.name_rank(news.rank, reason.text)),
                )

    def _on_run_decision(self, news: DecisionAnnounced) -> None:
        match kind_of(news):
            case MessageKind.DRAIN:
                left_s = DrainDeadline.from_json(news.body, rank=0).left_s
                if not self.decides:  # rank 0 plans for it
                    self._draining.set_deadline("rank 0", self._ledger.now_s + left_s)
            case MessageKind.ORDINAL:
                ordinal = Ordinal.from_json(news.body, rank=0).ordinal
                self._ledger.least_ordinal = max(self._ledger.least_ordinal, ordinal)
            case MessageKind.FENCED:
                self._flusher.fence(FencedError(Reason.from_json(news.body, rank=0).text))

    def _on_gathered(self, topic: CheckpointTopic, news: MessagesGathered) -> None:
        id, tier = topic.id, topic.tier
        if topic.kind == MessageKind.UPLOADED:
            self._tiers.on_all_uploaded(tier, id, news.bodies, of_node_only=news.passed)
        elif topic.kind in (MessageKind.SEALED, MessageKind.COMPARED) and not news.passed:
            self._seals.on_gathered(id, news.bodies)
        elif topic.kind == MessageKind.NODE_COMMITTED and not news.passed:
            self._tiers.on_all_committed(tier, id, news.bodies)

    def _on_report(self, topic: CheckpointTopic, news: RankReported) -> None:
        """Rank 0 decides, once, by what one rank cannot do."""
        id, tier, rank = topic.id, topic.tier, news.rank
        if topic.kind in (MessageKind.LATE, MessageKind.SAVE_FAILED) and self.replicas.end_naming(
            id
        ):
            return
        if self.has_given_up(tier, id):
            return
        match topic.kind:
            case MessageKind.LATE:
                late = LateRanks.from_json(news.body, rank=rank)
                self._seals.on_late(id, late, rank)
            case MessageKind.SAVE_FAILED:
                failure = SaveFailure.from_json(news.body, rank=rank)
                text = self._topology.name_rank(rank, failure.text)
                self._seals.give_up(id, replace(failure, text=text))
            case MessageKind.STUCK:
                reason = Reason.from_json(news.body, rank=rank).text
                self._messages.announce(
                    MessageKind.STUCK, id, tier, StuckCopy(rank=rank, reason=reason)
                )
            case MessageKind.GIVE_UP:
                reason = Reason.from_json(news.body, rank=rank).text
                self._tiers.give_up(tier, id, reason, by_rule=True, set_aside=False)
            case MessageKind.COPY_FAILED | MessageKind.SET_ASIDE:
                reason = self._topology.name_rank(rank, Reason.from_json(news.body, rank=rank).text)
                set_aside = topic.kind == MessageKind.SET_ASIDE
                self._tiers.give_up(tier, id, reason, by_rule=False, set_aside=set_aside)

    def _on_decision(self, topic: CheckpointTopic, body: object) -> None:
        id, tier = topic.id, topic.tier
        entry = self._ledger.entries.get(id)
        match topic.kind:
            case MessageKind.ADMITTED:
                self._tiers.admitted[tier][id] = None
            case MessageKind.SAVE_GIVEN_UP:
                self._seals.on_given_up(id, SaveFailure.from_json(body, rank=0))
            case MessageKind.STUCK:
                self._tiers.on_stuck(tier, id, StuckCopy.from_json(body, rank=0))
            case MessageKind.GIVEN_UP:
                self._tiers.on_given_up(tier, id, GivenUpCopy.from_json(body, rank=0))
            case _ if entry is None:
                logger.debug("%s of %s: this rank does not have it", topic.kind, id)
            case _:
                self._on_decision_of(entry, topic, body)

    def _on_decision_of(self, entry: LedgerEntry, topic: CheckpointTopic, body: object) -> None:
        match topic.kind:
            case MessageKind.ALIKE:
                self._seals.on_alike(entry)
            case MessageKind.WHOLE:
                self._seals.on_whole(entry, WholeCheckpoint.from_json(body, rank=0))
            case MessageKind.COMMIT:
                facts = CommitFacts.from_json(body, rank=0)
                self._tiers.on_commit(topic.tier, entry, facts)
            case MessageKind.COMMITTED:
                committed = CommittedCopy.from_json(body, rank=0)
                self._tiers.on_committed(topic.tier, entry, committed)
            case MessageKind.DELETE_COPY:
                self._on_deleted(entry, topic.tier, DeletedCopy.from_json(body, rank=0))

    def _on_deleted(self, entry: LedgerEntry, tier: str, message: DeletedCopy) -> None:
        """Rank 0 deletes a copy: delete what this node has of it, if only its leader can."""
        if self._topology.is_root:
            return  # its own deletion is under way
        if entry.pinned and not self._shared[tier]:  # since then: this node's part stays
            self._ledger.partial.add((tier, entry.id))
        if self._shared[tier] or entry.pinned or not self._topology.is_leader:
            entry.note_gone(tier)
            self._ledger.forget_if_gone(entry)
            return
        self._deleter.delete(
            DeleteCopy(
                tier=tier,
                id=entry.id,
                reason=message.reason,
                known=self._ledger.decided,
                next_latest=message.next_latest,
            )
        )

    # Tasks and time --------------------------------------------------------------------------------

    def on_outcome(self, outcome: Outcome) -> None:
        assert isinstance(outcome.task, CommitCopy)
        self._tiers.on_outcome(outcome.task, outcome)

    def tick(self, now_s: float) -> None:
        """Try again what is due, and report waits that are over."""
        self._tiers.tick(now_s)
        self._seals.tick(now_s)

    def next_s(self, now_s: float) -> float | None:
        due = [*self._tiers.due_s(), *self._seals.due_s(now_s)]
        return min((when for when in due if when > now_s), default=None)
