"""Seals: the images that all ranks hold of a save become one checkpoint in memory, or the save is given up by all.

    every rank                 rank 0
    image complete (sealed) -> all are, and replicated state is equal: alike (nothing is compared: whole, at once)
    sealed in memory        -> all are: the checkpoint is whole

An image that is to be compared is sealed only once the comparison is done: no later start could repeat it. A rank that
waits longer than ``max_wait`` for the others reports it, and rank 0 gives the save up. It belongs to the coordinator's
thread and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierfall.core.ranks.message_tree import Bodies, MessageTree
from tierfall.core.scheduler.flush.capture_events import CaptureEvents
from tierfall.core.scheduler.group.dedup import ReplicaAssigner
from tierfall.core.scheduler.group.messages import (
    GroupMessages,
    ImageShare,
    LateRanks,
    MessageKind,
    Ordinal,
    SaveFailure,
    ShardSealed,
    WholeCheckpoint,
    read_all,
)
from tierfall.core.scheduler.group.tier_commits import TierCommits, remember
from tierfall.core.scheduler.ledger.emitter import image_bytes_of
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.errors import CapacityError, CaptureError, TierfallError
from tierfall.core.types.text import format_ranks
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome

END_S = 1.0
"""Seconds for which a save that not all ranks have begun is kept, once no rank begins a save any more: rank 0 gets what
there is meanwhile, to name the ranks."""


@dataclass(slots=True)
class _RankWait:
    """This rank waits for the others' contributions of one kind. ``flushed``: rank 0 was sent what there is."""

    kind: MessageKind = MessageKind.SEALED
    since_s: float | None = None
    flushed: bool = False


class GroupSeals:
    """See the module."""

    def __init__(
        self,
        message_tree: MessageTree,
        *,
        ledger: Ledger,
        tier_commits: TierCommits,
        saves: CaptureEvents,
        max_wait_s: float,
    ) -> None:
        self._messages = GroupMessages(message_tree)
        self._ledger = ledger
        self._tier_commits = tier_commits
        self._saves = saves
        self._max_wait_s = max_wait_s
        self.replicas = ReplicaAssigner(message_tree, max_wait_s=max_wait_s, refuse=self.give_up)
        self._whole: dict[CheckpointId, None] = {}
        self._waits: dict[CheckpointId, _RankWait] = {}
        self._given_up: dict[CheckpointId, tuple[TierfallError, SaveOutcome]] = {}
        self._reached: CheckpointId | None = None
        """Set once no rank saves any more: the last checkpoint that all ranks have begun to save, or restored."""

    def why_given_up(self, id: CheckpointId) -> tuple[BaseException, SaveOutcome] | None:
        return self._given_up.get(id)

    def contribute(self, entry: LedgerEntry) -> None:
        """This rank's image is complete."""
        entry.awaiting_ranks = True
        self._waits[entry.id] = _RankWait()
        share = None
        if (made := entry.share) is not None:
            self.replicas.sealed(entry.id, made)
            digests = None if made.digests is None else made.digests.by_group()
            share = ImageShare(
                structure=made.structure, assignment=made.assignment, digests=digests
            )
        body = ShardSealed(ordinal=entry.ordinal, image_bytes=image_bytes_of(entry), share=share)
        self._messages.contribute(MessageKind.SEALED, entry.id, body=body)

    # Rank 0 ----------------------------------------------------------------------------------------

    def on_gathered(self, id: CheckpointId, bodies: Bodies) -> None:
        """All ranks' images are complete, or sealed after the comparison."""
        if self._tier_commits.has_given_up("", id):
            return
        images = read_all(ShardSealed, bodies)
        ordinals = {rank: image.ordinal for rank, image in images.items()}
        others = [rank for rank, ordinal in ordinals.items() if ordinal != ordinals[0]]
        if others:  # their images would not be restored together
            self._announce_ordinal(max(ordinals.values()))
            text = (
                f"{format_ranks(others)} saved it as checkpoint {ordinals[others[0]]} of the lineage, and rank 0 as "
                f"checkpoint {ordinals[0]}: every rank saves the same steps. From the next one on the ordinals agree"
            )
            self.give_up(id, SaveFailure(text=text))
            return
        shares = {rank: image.share for rank, image in images.items() if image.share is not None}
        if not self.replicas.images_agree(id, shares):
            self._tier_commits.remember_given_up("", id)
        elif any(share.digests is not None for share in shares.values()):
            self._messages.announce(MessageKind.ALIKE, id)
        else:
            remember(self._whole, id, None)
            total = sum(image.image_bytes for image in images.values())
            self._messages.announce(MessageKind.WHOLE, id, body=WholeCheckpoint(image_bytes=total))

    def on_late(self, id: CheckpointId, late: LateRanks, rank: int) -> None:
        """A rank has waited too long for the others, or waits in vain."""
        if id in self._whole or self._tier_commits.is_committing(id):
            return  # the last of them contributed just now, or has uploaded its image
        kinds = (MessageKind.SEALED, MessageKind.COMPARED)
        missing = [other for kind in kinds for other in self._messages.missing(kind, id)]
        who = format_ranks(missing) if missing else "another rank"
        when = "before the training ended"
        if not late.ended:
            when = f"within max_wait ({self._max_wait_s:g} s) of rank {rank}"
        text = f"{who} did not save step {id.step} {when}: every rank saves the same steps"
        self._announce_ordinal(late.ordinal)
        self.give_up(id, SaveFailure(text=text))

    def _announce_ordinal(self, ordinal: int) -> None:
        """Raise the number of checkpoints that all ranks count at least."""
        self._messages.announce_of_run(MessageKind.ORDINAL, Ordinal(ordinal=ordinal))

    def give_up(self, id: CheckpointId, failure: SaveFailure) -> None:
        """Have all ranks give a save up."""
        self._tier_commits.remember_given_up("", id)
        self._messages.announce(MessageKind.SAVE_GIVEN_UP, id, body=failure)

    # Every rank ------------------------------------------------------------------------------------

    def on_alike(self, entry: LedgerEntry) -> None:
        """Seal an image that was compared, if it is not sealed yet. The checkpoint is whole once all ranks have sealed:
        a kill before could leave a newer image to some ranks and an older one to others."""
        if entry.failed:
            return
        self.replicas.compared(entry.id)
        if entry.share is not None and entry.share.digests is not None:
            assert entry.region is not None
            assert entry.manifest is not None
            assert entry.commit is not None
            entry.region.seal(manifest=entry.manifest.encode(), commit=entry.commit.encode())
            entry.share.digests = None
            if entry.handle is not None:
                entry.handle.on_captured()
        self._waits[entry.id] = _RankWait(MessageKind.COMPARED)
        body = ShardSealed(ordinal=entry.ordinal, image_bytes=image_bytes_of(entry))
        self._messages.contribute(MessageKind.COMPARED, entry.id, body=body)

    def on_whole(self, entry: LedgerEntry, whole: WholeCheckpoint) -> None:
        self._waits.pop(entry.id, None)
        entry.image_bytes = whole.image_bytes
        entry.awaiting_ranks = False
        if entry.state(self._ledger.host) is CopyState.ARRIVING:
            entry.set_state(self._ledger.host, CopyState.SEALED)

    def on_given_up(self, id: CheckpointId, failure: SaveFailure) -> None:
        entry = self._ledger.entries.get(id)
        reason = self.replicas.named(failure)
        kind = CapacityError if failure.outcome is not SaveOutcome.FAILED else CaptureError
        error = kind(f"save of step {id.step} is given up by all ranks: {reason}")
        self._waits.pop(id, None)
        self.replicas.save_given_up(id)
        self._messages.forget(MessageKind.SEALED, id)
        self._messages.forget(MessageKind.COMPARED, id)
        remember(self._given_up, id, (error, failure.outcome))
        self._tier_commits.give_up_everywhere(id, entry, reason)
        if entry is not None:
            self._saves.give_up(entry, error, failure.outcome)

    # Time ------------------------------------------------------------------------------------------

    def end_saves(self, reached: CheckpointId) -> None:
        """Wait no longer than ``END_S`` for ranks that will not come; see ``Commits.end_saves``."""
        self._reached = reached
        for id, wait in self._waits.items():
            if self._is_past_end(id):
                self._waits[id] = _RankWait(wait.kind)

    def tick(self, now_s: float) -> None:
        """Report a wait that is over; after half of it, have rank 0 sent what there is, so that it can name the ranks
        that are late."""
        self.replicas.tick(now_s)
        for id, wait in list(self._waits.items()):
            bound_s = self._bound_s(id)
            if wait.since_s is None:
                wait.since_s = now_s
            elif now_s >= wait.since_s + bound_s:
                del self._waits[id]
                ordinal = self._ledger.entries[id].ordinal if id in self._ledger.entries else 0
                body = LateRanks(ordinal=ordinal, ended=self._is_past_end(id))
                self._messages.report(MessageKind.LATE, id, body=body)
            elif now_s >= wait.since_s + bound_s / 2 and not wait.flushed:
                wait.flushed = True
                self._messages.flush_partial(wait.kind, id)

    def _is_past_end(self, id: CheckpointId) -> bool:
        reached = self._reached
        return reached is not None and id.attempt == reached.attempt and id.step > reached.step

    def _bound_s(self, id: CheckpointId) -> float:
        return END_S if self._is_past_end(id) else self._max_wait_s

    def due_s(self, now_s: float) -> list[float]:
        """Return when ``tick`` has something to do."""
        bounds = [(wait.since_s, self._bound_s(id)) for id, wait in self._waits.items()]
        due = [s + part * bound_s for s, bound_s in bounds if s is not None for part in (0.5, 1.0)]
        assigner_due = self.replicas.next_s(now_s)
        return due if assigner_due is None else [*due, assigner_due]
