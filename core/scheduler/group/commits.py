"""Checkpoints of several ranks: how the copies of all come to be one checkpoint on a tier, or none.

    every rank            rank 0                     leaders of nodes (rank 0 alone, where all see the tier)
    complete          ->  all have, and what several hold is alike: seal it (where nothing is compared, it is already)
    sealed in memory  ->  all have: it is whole
                          next on this tier      ->
    landed on a tier  ->  all have: commit it    ->  commit record
                          all have: it is there  <-  committed
    cannot            ->  it is given up there, by all (what may pass, a store that does not answer, is waited for)
    lost              ->  it is given up everywhere, by all

A rank does nothing with a copy that rank 0 has not said, and rank 0 says it as soon as it can know; nobody waits for
an answer. It belongs to the coordinator's thread and does no I/O: messages go by the council, commits by workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tierfall.core.format.records import Commit, NamedFile
from tierfall.core.ranks.message_tree import Bodies, MessageTree
from tierfall.core.ranks.messages import Topic
from tierfall.core.ranks.ranks import DecisionAnnounced, MessagesGathered, RankMessage, RankReported
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.flusher import Flusher
from tierfall.core.scheduler.group.commit_state import PendingCommits
from tierfall.core.scheduler.group.dedup import Refusal, ReplicaAssigner
from tierfall.core.scheduler.ledger.ledger import Ledger, LedgerEntry
from tierfall.core.scheduler.ledger.one_rank import OneRank
from tierfall.core.scheduler.ledger.tasks import CommitCopy, DeleteCopy, Outcome, Task
from tierfall.core.types import keys
from tierfall.core.types.errors import CapacityError, CaptureError, FencedError, FlushError
from tierfall.core.types.text import ranks_named
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome, Shard

logger = logging.getLogger("tierfall")

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED = 64
"""So many checkpoints that were given up are remembered for ranks that come to save them later."""


@dataclass(slots=True)
class _RankWait:
    """This rank's image is complete (``sealed``), or compared and sealed (``kept``), and others' are not yet;
    ``hurried``: nobody below holds back who is."""

    what: str = "sealed"
    since_s: float | None = None
    hurried: bool = False


_DRAIN: Topic = ("drain",)
"""A rank has a deadline, as its machine is about to go; in seconds from now."""
_LEVEL: Topic = ("level",)
"""How many checkpoints the line counts at least: ranks that left a save out come level by it."""


class Commits(OneRank):
    """See the module. ``shared`` says of each stored tier whether all ranks see the same files there."""

    land_only = True

    def __init__(
        self,
        *,
        council: MessageTree,
        ledger: Ledger,
        shared: Mapping[str, bool],
        flusher: Flusher,
        dropper: Deleter,
        give_up_save: Callable[[LedgerEntry, BaseException, SaveOutcome], None],
        dispatch: Callable[[Task], None],
        max_wait_s: float,
    ) -> None:
        super().__init__(ledger)
        self._council = council
        self._topology = council.topology
        self.decides = self._topology.is_root
        self._shared = shared
        self._flusher = flusher
        self._dropper = dropper
        self._give_up_save = give_up_save
        self._committing = PendingCommits(
            dispatch=dispatch, is_stuck=self._commit_is_stuck, max_wait_s=max_wait_s
        )
        self._max_wait_s = max_wait_s
        self.divider = ReplicaAssigner(council, max_wait_s=max_wait_s, refuse=self._refuse)
        self._admitted: dict[str, dict[CheckpointId, None]] = {tier: {} for tier in shared}
        self._here: dict[tuple[str, CheckpointId], Bodies] = {}
        self._brought: dict[tuple[str, CheckpointId], list[Any]] = {}
        self._stuck: dict[str, CheckpointId] = {}
        self._whole_ones: dict[CheckpointId, None] = {}
        self._complete: set[tuple[str, CheckpointId]] = set()
        self._ended: dict[tuple[str, CheckpointId], None] = {}
        self._given_up_on: dict[tuple[str, CheckpointId], FlushError] = {}
        self._waits: dict[CheckpointId, _RankWait] = {}
        self._lost: dict[CheckpointId, tuple[BaseException, SaveOutcome]] = {}
        self.wants_drain: Callable[[int, float], None] = lambda rank, left_s: None
        self.drains: Callable[[float], None] = lambda left_s: None

    # What this rank asks ---------------------------------------------------------------------------

    def ranks_on(self, tier: str) -> int:
        return self._topology.world_size if self._shared[tier] else len(self._topology.local_ranks)

    def admitted(self, tier: str) -> Sequence[CheckpointId] | None:
        return None if self.decides else tuple(self._admitted[tier])

    def gives_up(self, tier: str, id: CheckpointId, reason: str) -> bool:
        if self.decides:
            self.give_up(tier, id, reason, by_rule=True)
        else:  # a rank that has landed its part waits for this one
            self._council.tell(_topic("gives_up", id, tier), reason)
        return True

    def was_lost(self, id: CheckpointId) -> tuple[BaseException, SaveOutcome] | None:
        return self._lost.get(id)

    def was_given_up(self, id: CheckpointId) -> dict[str, BaseException]:
        return {tier: error for (tier, of), error in self._given_up_on.items() if of == id}

    def is_stuck(self, tier: str) -> bool:
        return tier in self._stuck

    def owns(self, tier: str) -> bool:
        """Say whether records and marks on a tier are this rank's to write."""
        return self.decides if self._shared[tier] else self._topology.is_leader

    def is_ending(self, id: CheckpointId) -> bool:
        """Say, at rank 0, whether a copy of a checkpoint is just being committed somewhere."""
        return any(of == id for _, of in self._complete)

    def give_up(
        self,
        tier: str,
        id: CheckpointId,
        reason: str,
        *,
        by_rule: bool = False,
        set_aside: bool = False,
    ) -> None:
        """Let all ranks give a copy up; for rank 0. ``by_rule``: because a policy says so, which is no failure;
        ``set_aside``: it alone fails on a tier that takes others, and is for the next start to try."""
        if self.has_ended(tier, id):
            return
        _remember_few(self._ended, (tier, id), None)
        complete = (tier, id) in self._complete
        self._complete.discard((tier, id))
        body = [reason, complete, by_rule, set_aside]
        self._council.announce(_topic("given_up", id, tier), body)

    # What this rank says ---------------------------------------------------------------------------

    def has_begun(self, tier: str, entry: LedgerEntry) -> None:
        if self.decides:
            self._council.announce(_topic("begin", entry.id, tier), None)

    def has_begun_save(self, id: CheckpointId) -> None:
        self.divider.has_begun(id)

    def sealed(self, entry: LedgerEntry) -> None:
        entry.awaits_others = True
        self._waits[entry.id] = _RankWait()
        if entry.share is not None:
            self.divider.sealed(entry.id, entry.share)
        share = entry.share and entry.share.to_json()
        self._council.contribute(_topic("sealed", entry.id), [entry.ordinal, share])

    def landed(self, tier: str, entry: LedgerEntry, files: Collection[NamedFile]) -> None:
        """One image of those that this rank brings lies on a tier; with the last, it says so."""
        if tier not in entry.owed:  # it was given up while its end was under way
            entry.set_state(tier, CopyState.ABSENT)
            # what a repair has written stays with the rest of the copy
            if tier not in entry.damage:
                self._dropper.collect(tier, entry.id, "it was given up", shard=_own_shard(entry))
            self._ledger.forget_if_gone(entry)
            return
        entry.landed.add(tier)
        body = self._brought.setdefault((tier, entry.id), [])
        body += [[file.name, file.bytes, file.digest, file.raw_bytes] for file in files]
        whole = self._ledger.entries[entry.id]
        if whole.next_part(tier) is not None:
            return
        whole.landed.add(tier)
        self._ledger.unfinished.pop((tier, entry.id), None)  # it was written over
        table = entry.table if self._shared[tier] and whole.parts is None else ""
        self._council.contribute(_topic("landed", entry.id, tier), [body, table])

    def cannot(
        self, entry: LedgerEntry, tier: str, error: BaseException, *, for_good: bool
    ) -> bool:
        what = "cannot" if for_good else "stuck"
        self._council.tell(_topic(what, entry.id, tier), str(error))
        return for_good

    def sets_aside(self, entry: LedgerEntry, tier: str, error: BaseException) -> bool:
        self._council.tell(_topic("set_aside", entry.id, tier), str(error))
        return True

    def lost(self, id: CheckpointId, error: BaseException, outcome: SaveOutcome) -> None:
        self._council.tell(_topic("lost", id), [str(error), str(outcome)])

    def saved_in_vain(self, entry: LedgerEntry) -> None:
        self._council.tell(_LEVEL, entry.ordinal)

    def is_fenced(self, error: FencedError) -> None:
        self._council.tell(("fenced",), str(error))

    def ask_for_drain(self, left_s: float) -> None:
        """Ask rank 0 to let all ranks work towards a deadline that this one has."""
        self._council.tell(_DRAIN, left_s)

    def announce_drain(self, left_s: float) -> None:
        """Let all ranks know that rank 0 works towards a deadline; for rank 0."""
        self._council.announce(_DRAIN, left_s)

    def has_dropped(self, task: DeleteCopy) -> None:
        latest = task.next_latest
        body = [task.reason, task.tombstoned, [latest.step, latest.attempt] if latest else None]
        self._council.announce(_topic("drop", task.id, task.tier), body)

    # What is heard ---------------------------------------------------------------------------------

    def hear(self, news: RankMessage) -> None:
        if isinstance(news, RankReported) and news.topic == _DRAIN:
            self.wants_drain(news.rank, float(news.body))
        elif isinstance(news, DecisionAnnounced) and news.topic == _DRAIN:
            self.drains(float(news.body))
        elif not self.divider.hear(news):
            self._dispatch_message(news)

    def _dispatch_message(self, news: RankMessage) -> None:
        match news:
            case MessagesGathered(topic=("sealed" | "kept", *_), passed=False):
                self._on_all_sealed(_read(news.topic)[0], news.bodies)
            case MessagesGathered(topic=("landed", *_)):
                self._on_all_uploaded(*_read(news.topic), news.bodies, here_only=news.passed)
            case MessagesGathered(topic=("committed", *_), passed=False):
                sizes = {str(rank): size for rank, size in news.bodies.items()}
                self._on_all_committed(*_read(news.topic), sizes)
            case RankReported(topic=("level",)):
                self._council.announce(_LEVEL, news.body)
            case DecisionAnnounced(topic=("level",)):
                self._ledger.least_ordinal = max(self._ledger.least_ordinal, news.body)
            case DecisionAnnounced(topic=("fenced",)):
                self._flusher.fence(FencedError(str(news.body)))
            case DecisionAnnounced():
                self._on_decision(str(news.topic[0]), *_read(news.topic), news.body)
            case RankReported(topic=("fenced",)):
                self._council.announce(("fenced",), f"rank {news.rank}: {news.body}")
            case RankReported():
                self._on_report(str(news.topic[0]), *_read(news.topic), news.body, news.rank)

    def _on_report(self, what: str, id: CheckpointId, tier: str, body: Any, rank: int) -> None:
        """Rank 0 hears what one rank cannot do: that decides for all, once."""
        if what in ("late", "lost") and self.divider.end_naming(id):
            return
        if self.has_ended(tier, id):
            return
        if what == "stuck":
            self._council.announce(_topic("stuck", id, tier), [rank, str(body)])
            return
        if what == "late" and id in self._whole_ones:
            return  # the last of them came just now
        if what == "gives_up":
            self.give_up(tier, id, str(body), by_rule=True)
            return
        if what in ("cannot", "set_aside"):
            self.give_up(tier, id, f"rank {rank}: {body}", set_aside=what == "set_aside")
            return
        _remember_few(self._ended, (tier, id), None)
        if what == "late":
            missing = [r for w in ("sealed", "kept") for r in self._council.missing(_topic(w, id))]
            late = ranks_named(missing) if missing else "another rank"
            text = (
                f"{late} did not save step {id.step} within max_wait ({self._max_wait_s:g} s) of rank {rank}: every "
                "rank saves the same steps"
            )
            self._council.announce(_LEVEL, body)
            self._council.announce(_topic("gone", id), [text, str(SaveOutcome.FAILED)])
        else:
            self._council.announce(_topic("gone", id), [f"rank {rank}: {body[0]}", body[1]])

    def has_ended(self, tier: str, id: CheckpointId) -> bool:
        """Rank 0 has given it up: everywhere, or on this tier."""
        return (tier, id) in self._ended or ("", id) in self._ended

    def _on_decision(self, what: str, id: CheckpointId, tier: str, body: Any) -> None:
        entry = self._ledger.entries.get(id)
        match what:
            case "begin":
                self._admitted[tier][id] = None
            case "gone":
                reason = self.divider.named(body[0], *body[2:])
                self._on_lost(id, entry, SaveOutcome(body[1]), reason)
            case "stuck":
                self._is_stuck(tier, id, *body)
            case "given_up":
                reason, complete, by_rule, set_aside = body
                self._given_up(
                    id,
                    entry,
                    tier,
                    reason,
                    complete=complete,
                    by_rule=by_rule,
                    set_aside=set_aside,
                )
            case _ if entry is None:
                logger.debug("%s of %s: this rank does not have it", what, id)
            case _:
                self._on_decision_of(entry, what, tier, body)

    def _on_decision_of(self, entry: LedgerEntry, what: str, tier: str, body: Any) -> None:
        match what:
            case "alike":
                self._seal(entry)
            case "whole":
                self._whole(entry)
            case "commit":
                self._commit_here(entry, tier, body)
            case "there":
                self._on_committed(entry, tier, body)
            case "drop":
                self._drop(entry, tier, body)

    # Whole in memory -------------------------------------------------------------------------------

    def _on_all_sealed(self, id: CheckpointId, bodies: Bodies) -> None:
        if self.has_ended("", id):
            return
        ordinals = {rank: ordinal for rank, (ordinal, _) in bodies.items()}
        others = [rank for rank, ordinal in ordinals.items() if ordinal != ordinals[0]]
        if not others:
            shares = {rank: share for rank, (_, share) in bodies.items()}
            if not self.divider.are_alike(id, shares):
                _remember_few(self._ended, ("", id), None)
            elif any(share is not None and share[2] is not None for share in shares.values()):
                self._council.announce(_topic("alike", id), None)
            else:
                _remember_few(self._whole_ones, id, None)
                self._council.announce(_topic("whole", id), None)
            return
        # their parts would not fit together at a restore
        _remember_few(self._ended, ("", id), None)
        text = (
            f"{ranks_named(others)} saved it as checkpoint {ordinals[others[0]]} of the line, and rank 0 as checkpoint "
            f"{ordinals[0]}: every rank saves the same steps. From the next one on all count alike again"
        )
        self._council.announce(_LEVEL, max(ordinals.values()))
        self._council.announce(_topic("gone", id), [text, str(SaveOutcome.FAILED)])

    def _refuse(self, id: CheckpointId, why: Refusal) -> None:
        """The images of all ranks are no checkpoint; for rank 0."""
        _remember_few(self._ended, ("", id), None)
        self._council.announce(_topic("gone", id), [why[0], str(SaveOutcome.FAILED), why[1]])

    def _seal(self, entry: LedgerEntry) -> None:
        """Seal an image that was not to outlive this process before it was compared with those of others: no later
        start could do that any more. It is whole once all have: else a kill might leave a newer one to some ranks, and
        an older one to others."""
        if entry.lost:
            return
        self.divider.ended(entry.id)
        if entry.share is not None and entry.share.digests is not None:
            assert entry.region is not None
            assert entry.manifest is not None
            assert entry.commit is not None
            entry.region.seal(manifest=entry.manifest.encode(), commit=entry.commit.encode())
            entry.share.digests = None
            if entry.handle is not None:
                entry.handle.tell_captured()
        self._waits[entry.id] = _RankWait("kept")
        self._council.contribute(_topic("kept", entry.id), [entry.ordinal, None])

    def _whole(self, entry: LedgerEntry) -> None:
        self._waits.pop(entry.id, None)
        entry.awaits_others = False
        if entry.state(self._ledger.host) is CopyState.ARRIVING:
            entry.set_state(self._ledger.host, CopyState.SEALED)

    def _on_lost(
        self, id: CheckpointId, entry: LedgerEntry | None, outcome: SaveOutcome, reason: str
    ) -> None:
        kind = CapacityError if outcome is not SaveOutcome.FAILED else CaptureError
        error = kind(f"save of step {id.step} is given up by all ranks: {reason}")
        self._waits.pop(id, None)
        self.divider.gone(id)
        self._council.forget(_topic("sealed", id))
        self._council.forget(_topic("kept", id))
        _remember_few(self._lost, id, (error, outcome))
        for tier in self._shared:
            self._admitted[tier].pop(id, None)
            self._on_resumed(tier, id)
            if entry is not None:
                self._clear(entry, tier, reason, complete=False)
        if entry is not None:
            self._give_up_save(entry, error, outcome)

    # On a tier -------------------------------------------------------------------------------------

    def _is_stuck(self, tier: str, id: CheckpointId, rank: int, reason: str) -> None:
        if rank == self._topology.rank and tier in self._ledger.failing:
            return  # it knows when it recovers
        if (entry := self._ledger.entries.get(id)) is not None:
            entry.overtaken.add(tier)
        # also where this rank is failing too: it may recover before the other
        self._stuck[tier] = id
        error = FlushError(f"flush of {id} to {tier}: rank {rank}: {reason}")
        self._flusher.is_failing(tier, error)

    def _on_resumed(self, tier: str, id: CheckpointId) -> None:
        """What another rank was stuck at is no more to be brought."""
        if self._stuck.get(tier) == id:
            del self._stuck[tier]
            self._flusher.recovered(tier)

    def _on_all_uploaded(
        self, id: CheckpointId, tier: str, bodies: Bodies, *, here_only: bool
    ) -> None:
        if not self._shared[tier]:
            local = self._topology.local_ranks
            self._here[tier, id] = {rank: bodies[rank] for rank in local}
        if here_only:
            return
        entry = self._ledger.entries.get(id)
        if entry is None or entry.commit is None or self.has_ended(tier, id):
            return
        self._complete.add((tier, id))
        if self._shared[tier]:
            tables = tuple(bodies[rank][1] for rank in sorted(bodies))
            files = _files(entry, bodies)
            self._commit(entry, tier, replace(entry.commit, files=files), tables)
            return
        facts = [entry.commit.wall_time_s, dict(entry.commit.metrics), list(entry.commit.tags)]
        self._council.announce(_topic("commit", id, tier), facts)

    def _commit_here(self, entry: LedgerEntry, tier: str, facts: Any) -> None:
        """Leave the commit record of a node's own images, now that all nodes have theirs."""
        bodies = self._here.pop((tier, entry.id), None)
        if bodies is None or entry.commit is None:
            return  # not the leader of a node
        wall_time_s, metrics, tags = facts
        if not any(files for files, _ in bodies.values()):  # no image lies on this node
            topic = _topic("committed", entry.id, tier)
            self._council.contribute(topic, 0, leaders_only=True)
            return
        self._commit(
            entry,
            tier,
            replace(
                entry.commit,
                files=_files(entry, bodies),
                wall_time_s=wall_time_s,
                metrics=metrics,
                tags=tuple(tags),
            ),
        )

    def _commit(
        self, entry: LedgerEntry, tier: str, commit: Commit, tables: tuple[str, ...] = ()
    ) -> None:
        task = CommitCopy(
            tier=tier,
            id=entry.id,
            commit=replace(commit, owed=self._flusher.older_owed(tier, entry)),
            marks=self._flusher.marks_of(entry),
            name_latest=self._flusher.is_newest(tier, entry),
            tables=tables,
            repairs=tier in entry.damage,
        )
        self._committing.begin(task)

    def _commit_is_stuck(self, task: CommitCopy, error: BaseException) -> None:
        self._council.tell(_topic("stuck", task.id, task.tier), str(error))

    def took(self, outcome: Outcome, now_s: float) -> None:
        """Take what became of a commit."""
        task = outcome.task
        assert isinstance(task, CommitCopy)
        wanted = self._committing.is_wanted(task) and not self.has_ended(task.tier, task.id)
        if wanted and getattr(outcome.error, "retryable", False):
            assert outcome.error is not None
            self._committing.again(task, outcome.error, now_s)
            return
        self._committing.ended(task.tier, task.id)
        if not wanted and not task.repairs:
            self._retract(task.tier, task.id, "it was given up meanwhile, by all")
        elif not wanted:
            logger.warning("%s: the repair of %s was given up meanwhile", task.tier, task.id)
        elif outcome.error is None:
            size = outcome.value.stored_bytes
            if self._shared[task.tier]:
                self._council.announce(_topic("there", task.id, task.tier), {"0": size})
            else:
                topic = _topic("committed", task.id, task.tier)
                self._council.contribute(topic, size, leaders_only=True)
        else:
            self._council.tell(_topic("cannot", task.id, task.tier), str(outcome.error))

    def tick(self, now_s: float) -> None:
        """Try again what is due, and say what waits too long."""
        self.divider.tick(now_s)
        self._committing.tick(now_s)
        for id, wait in list(self._waits.items()):
            if wait.since_s is None:
                wait.since_s = now_s
            elif now_s >= wait.since_s + self._max_wait_s:
                del self._waits[id]
                ordinal = self._ledger.entries[id].ordinal if id in self._ledger.entries else 0
                self._council.tell(_topic("late", id), ordinal)
            elif now_s >= wait.since_s + self._max_wait_s / 2 and not wait.hurried:
                wait.hurried = True  # so that rank 0 can name who is late
                self._council.hand_on_what_there_is(_topic(wait.what, id))

    def next_s(self, now_s: float) -> float | None:
        waits = self._committing.due_s()
        for wait in self._waits.values():
            if wait.since_s is not None:
                waits += [wait.since_s + self._max_wait_s / 2, wait.since_s + self._max_wait_s]
        if (due := self.divider.next_s(now_s)) is not None:
            waits.append(due)
        return min((when for when in waits if when > now_s), default=None)

    def _on_all_committed(self, id: CheckpointId, tier: str, sizes: Mapping[str, int]) -> None:
        if not self.has_ended(tier, id):
            self._council.announce(_topic("there", id, tier), sizes)

    def _on_committed(self, entry: LedgerEntry, tier: str, sizes: Mapping[str, int]) -> None:
        leader = 0 if self._shared[tier] else self._topology.local_ranks[0]
        self._complete.discard((tier, entry.id))
        self._stuck.pop(tier, None)
        self._clean(entry, tier)
        self._flusher.committed(tier, entry.id, sizes[str(leader)])
        self._ledger.partial.discard((tier, entry.id))
        self._collect_partial(tier, entry)

    def _collect_partial(self, tier: str, newer: LedgerEntry) -> None:
        """Let go of older ones of which only a part is left: nobody needs the rest to come back any more."""
        older = {
            (where, id)
            for where, id in self._ledger.partial
            if where == tier and (id.attempt, id.step) < newer.order
        }
        for where, id in older if self.owns(tier) else ():
            if where not in (e.owed if (e := self._ledger.entries.get(id)) else ()):
                self._ledger.partial.discard((where, id))
                reason = "only a part of it is there, and a newer one is whole"
                self._dropper.leave(DeleteCopy(tier=where, id=id, reason=reason))

    def _given_up(
        self,
        id: CheckpointId,
        entry: LedgerEntry | None,
        tier: str,
        reason: str,
        *,
        complete: bool,
        by_rule: bool,
        set_aside: bool,
    ) -> None:
        error = FlushError(f"flush of {id} to {tier}: {reason}")
        _remember_few(self._given_up_on, (tier, id), error)
        self._admitted[tier].pop(id, None)
        self._on_resumed(tier, id)
        if entry is None:
            return  # it is told once it comes to save this
        self._clear(entry, tier, str(error), complete=complete)
        if by_rule:
            self._flusher.turns.give_up_here(entry, tier, reason)
            self._flusher.stop_copy(entry, tier, error)
        elif set_aside and tier in entry.owed:
            self._flusher.set_aside(entry, tier, error)
        elif tier in entry.owed:
            if tier not in entry.damage:  # in this start: what a next one can bring is still owed
                entry.overtaken.add(tier)
            self._flusher.give_up_copy(entry, tier, error)
        self._ledger.forget_if_gone(entry)

    def _clear(self, entry: LedgerEntry, tier: str, reason: str, *, complete: bool) -> None:
        """Take back what this rank has brought to a tier of a checkpoint that will not be one there.

        ``complete``: all ranks' images have landed, so that a commit record may be there. It goes first:
        whoever writes it takes back everything then.
        """
        brought = self._brought.get((tier, entry.id))
        self._clean(entry, tier)
        under_way = self._committing.ended(tier, entry.id)
        self._council.forget(_topic("landed", entry.id, tier))
        if brought is None:
            return
        entry.set_state(tier, CopyState.ABSENT)
        if tier in entry.damage:
            return  # the copy was there before, and what is good of it stays
        if not complete:
            if brought:
                self._dropper.collect(tier, entry.id, reason, shard=_own_shard(entry))
        elif self.owns(tier) and not under_way:
            self._retract(tier, entry.id, reason)  # else once it is known what became of it
        self._ledger.forget_if_gone(entry)

    def _retract(self, tier: str, id: CheckpointId, reason: str) -> None:
        self._dropper.leave(DeleteCopy(tier=tier, id=id, reason=reason, void=True))

    def _clean(self, entry: LedgerEntry, tier: str) -> None:
        for one in (entry, *(entry.parts or ())):
            one.landed.discard(tier)
        self._brought.pop((tier, entry.id), None)
        self._admitted[tier].pop(entry.id, None)
        self._here.pop((tier, entry.id), None)

    # Leaving ---------------------------------------------------------------------------------------

    def _drop(self, entry: LedgerEntry, tier: str, body: Any) -> None:
        if self._topology.is_root:
            return  # it said so, and is at it
        reason, tombstoned, latest = body
        if self._shared[tier] or not self._topology.is_leader:
            entry.note_gone(tier)
            self._ledger.forget_if_gone(entry)
            return
        self._dropper.leave(
            DeleteCopy(
                tier=tier,
                id=entry.id,
                reason=reason,
                tombstoned=tombstoned,
                next_latest=CheckpointId(*latest) if latest else None,
            )
        )


def _remember_few(memory: dict[K, V], key: K, value: V) -> None:
    """Keep what is late for few; the oldest is forgotten."""
    memory[key] = value
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]


def _topic(what: str, id: CheckpointId, tier: str = "") -> Topic:
    return (what, id.step, id.attempt, tier)


def _read(topic: Topic) -> tuple[CheckpointId, str]:
    _, step, attempt, tier = topic
    return CheckpointId(int(step), int(attempt)), str(tier)


def _own_shard(entry: LedgerEntry) -> Shard | None:
    """Whose files go where a copy is taken back: all, where this rank may have brought several ranks' images."""
    return entry.shard if entry.parts is None else None


def _files(entry: LedgerEntry, bodies: Bodies) -> tuple[NamedFile, ...]:
    """Name what all have brought, by the ranks that saved it, as any start would."""
    files = tuple(
        NamedFile(name=name, bytes=size, digest=digest, raw_bytes=raw)
        for rank in sorted(bodies)
        for name, size, digest, raw in bodies[rank][0]
    )
    return files if entry.parts is None else tuple(sorted(files, key=_saved_by))


def _saved_by(file: NamedFile) -> int:
    shard = keys.parse_shard(file.name)
    return -1 if shard is None else shard.rank
