"""Messages between the coordinators of all ranks, and the kinds of topic that they are sent under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from tierfall.core.format.records import NamedFile
from tierfall.core.ranks.message_tree import Bodies, MessageTree, RankMessage
from tierfall.core.ranks.messages import CheckpointTopic, Message, Topic
from tierfall.core.types.values import CheckpointId, SaveOutcome

K = TypeVar("K")
V = TypeVar("V")
M = TypeVar("M", bound=Message)
REMEMBERED = 64
"""How many checkpoints that were given up are remembered, for ranks that save them later."""


def remember(memory: dict[K, V], key: K, value: V) -> None:
    """Add an item; at most ``REMEMBERED`` are kept, the newest."""
    memory[key] = value
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]


class MessageKind(StrEnum):
    """What a message is about. *Gathered* from all ranks, *reported* by one to rank 0, *announced* by rank 0."""

    # A save: see ``commits``.
    SEALED = "sealed"  # gathered
    COMPARED = "compared"  # gathered
    ALIKE = "alike"  # announced
    WHOLE = "whole"  # announced
    LATE = "late"  # reported
    SAVE_FAILED = "save_failed"  # reported
    SAVE_GIVEN_UP = "save_given_up"  # announced

    # A copy on one tier: see ``commits``.
    ADMITTED = "admitted"  # announced
    UPLOADED = "uploaded"  # gathered
    COMMIT = "commit"  # announced
    NODE_COMMITTED = "node_committed"  # gathered from leaders of nodes
    COMMITTED = "committed"  # announced
    COPY_FAILED = "copy_failed"  # reported
    SET_ASIDE = "set_aside"  # reported
    FULL = "full"  # reported
    STUCK = "stuck"  # reported, then announced
    GIVE_UP = "give_up"  # reported
    GIVEN_UP = "given_up"  # announced
    DELETE_COPY = "delete_copy"  # announced

    # The run.
    DRAIN = "drain"  # reported, or announced
    ORDINAL = "ordinal"  # reported, then announced
    FENCED = "fenced"  # reported, then announced

    # Replicated state: see ``replicas``.
    TABLE = "table"  # gathered
    ASK_TABLES = "ask_tables"  # reported, then announced
    ASSIGNED = "assigned"  # announced
    UNASSIGNED = "unassigned"  # reported, then announced
    UNLIKE = "unlike"  # announced
    DIGESTS = "digests"  # gathered

    # Background verification: see ``verifier``.
    VERIFY = "verify"  # announced
    FOUND = "verify: found"  # gathered
    VERIFIED = "verified"  # announced
    READ = "restored"  # gathered

    # Damage: see ``decisions``.
    DAMAGE_FOUND = "damage_found"  # reported, then announced

    # Checkpoints that another process writes: see ``external_commits``.
    EXTERNAL_COMMIT = "external_commit"  # announced
    NO_MORE_EXTERNAL_COMMITS = "no_more_external_commits"  # announced

    # What is decided: see ``decisions``.
    DECIDED_FOUND = "decided_found"  # reported
    DECIDED = "decided"  # announced


def kind_of(message: RankMessage) -> str:
    return str(message.topic[0])


def read_all(message: type[M], bodies: Bodies) -> dict[int, M]:
    """Read what all ranks have contributed, by rank."""
    return {rank: message.from_json(body, rank=rank) for rank, body in bodies.items()}


class Messages:
    """Sends the messages of this module through the message tree. ``own_errors`` are the errors that this rank has
    reported, by copy."""

    def __init__(self, tree: MessageTree) -> None:
        self._tree = tree
        self.topology = tree.topology
        self.own_errors: dict[tuple[str, CheckpointId], BaseException] = {}

    def contribute(
        self,
        kind: MessageKind,
        id: CheckpointId,
        tier: str = "",
        body: Message | None = None,
        *,
        number: int = 0,
        leaders_only: bool = False,
    ) -> None:
        topic = _topic(kind, id, tier, number)
        self._tree.contribute(topic, _to_json(body), leaders_only=leaders_only)

    def report(
        self, kind: MessageKind, id: CheckpointId, tier: str = "", body: Message | None = None
    ) -> None:
        self._tree.report(_topic(kind, id, tier), _to_json(body))

    def report_copy_failed(self, tier: str, id: CheckpointId, error: BaseException) -> None:
        """Report that this rank can never write a copy: all ranks give it up."""
        self._report_failed(MessageKind.COPY_FAILED, tier, id, error)

    def report_set_aside(self, tier: str, id: CheckpointId, error: BaseException) -> None:
        """Report that a tier accepts other copies of this rank, but not this one: no rank tries it any more in this
        start."""
        self._report_failed(MessageKind.SET_ASIDE, tier, id, error)

    def _report_failed(
        self, kind: MessageKind, tier: str, id: CheckpointId, error: BaseException
    ) -> None:
        remember(self.own_errors, (tier, id), error)
        self.report(kind, id, tier, Reason(text=str(error)))

    def report_save_failed(
        self, id: CheckpointId, error: BaseException, outcome: SaveOutcome
    ) -> None:
        """Report that a save failed on this rank."""
        failure = SaveFailure(text=str(error), outcome=outcome)
        self.report(MessageKind.SAVE_FAILED, id, body=failure)

    def report_damage(
        self, tier: str, id: CheckpointId, why: str, *, repairable: bool = True
    ) -> None:
        """Report that a copy on a stored tier differs from its digests or lacks files. Not ``repairable``: its commit
        record is gone, too."""
        body = FoundDamage(text=why, repairable=repairable)
        self.report(MessageKind.DAMAGE_FOUND, id, tier, body)

    def announce(
        self,
        kind: MessageKind,
        id: CheckpointId,
        tier: str = "",
        body: Message | None = None,
        *,
        number: int = 0,
    ) -> None:
        self._tree.announce(_topic(kind, id, tier, number), _to_json(body))

    def announce_to_others(
        self, kind: MessageKind, id: CheckpointId, tier: str, body: Message | None = None
    ) -> None:
        """Announce what rank 0 itself has done already."""
        if self.topology.world_size > 1:
            self.announce(kind, id, tier, body)

    def report_of_run(self, kind: MessageKind, body: Message) -> None:
        """Report what is about the run, and no checkpoint."""
        self._tree.report((kind.value,), body.to_json())

    def announce_of_run(self, kind: MessageKind, body: Message | None = None) -> None:
        self._tree.announce((kind.value,), _to_json(body))

    def forget(self, kind: MessageKind, id: CheckpointId, tier: str = "") -> None:
        self._tree.forget(_topic(kind, id, tier))

    def flush_partial(self, kind: MessageKind, id: CheckpointId) -> None:
        self._tree.flush_partial(_topic(kind, id))

    def missing(self, kind: MessageKind, id: CheckpointId) -> tuple[int, ...]:
        return self._tree.missing(_topic(kind, id))


def _topic(kind: MessageKind, id: CheckpointId, tier: str = "", number: int = 0) -> Topic:
    return CheckpointTopic(kind=kind.value, id=id, tier=tier, number=number).key


def _to_json(body: Message | None) -> object:
    return None if body is None else body.to_json()


# Bodies ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason(Message):
    """Why a rank cannot do something, or must not."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShare(Message):
    """How an image was made: the ``structure`` of its state, the id of the ``assignment`` by which it leaves tensors
    out, and the digest of each group of replicated tensors; see ``core/capture/snapshot.py:ReplicaShare``."""

    structure: str
    assignment: str | None
    digests: Mapping[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSealed(Message):
    ordinal: int
    image_bytes: int
    share: ImageShare | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCheckpoint(Message):
    """``image_bytes`` of all ranks together."""

    image_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRanks(Message):
    """A rank has waited ``max_wait`` for others that save the checkpoint of this ``ordinal``, or the training has
    ``ended`` meanwhile."""

    ordinal: int
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailure(Message):
    """Why a save is no checkpoint. ``tensor`` is the key of the tensor whose name replaces ``{}`` in the text."""

    text: str
    outcome: SaveOutcome = SaveOutcome.FAILED
    tensor: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedFiles(Message):
    """The files of a rank's image on a tier. ``found``: they were there, and this start has not written them."""

    files: tuple[NamedFile, ...]
    found: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts(Message):
    """What rank 0's commit record has beside the files."""

    wall_time_s: float
    metrics: Mapping[str, float]
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedBytes(Message):
    """The stored bytes that one commit record names."""

    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCopy(Message):
    """The stored bytes of a committed copy, by the rank that wrote the commit record. ``found``: this start has not
    written all of it."""

    bytes_by_rank: Mapping[int, int]
    found: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckCopy(Message):
    """A tier does not accept a copy from ``rank`` at present."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpCopy(Message):
    """``complete``: all ranks have uploaded, so that a commit record may exist; ``by_rule``: a policy decided it, which
    is no failure; ``set_aside``: this copy alone fails on a tier that accepts others, and is left to the next start."""

    reason: str
    complete: bool
    by_rule: bool
    set_aside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedCopy(Message):
    reason: str
    next_latest: CheckpointId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainDeadline(Message):
    """A rank's machine is shut down in ``left_s`` seconds."""

    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordinal(Message):
    """The lineage counts at least so many checkpoints. A rank that did not save one of them catches up by it."""

    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDamage(Message):
    """``repairable``: the copy still has its commit record."""

    text: str
    repairable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalCommit(Message):
    """A commit record, as text, that rank 0 has found on a tier."""

    tier: str
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedEntries(Message):
    """The names of entries of what is decided."""

    names: tuple[str, ...]
