"""Messages between the coordinators of all ranks. Each type is gathered, reported or announced about one matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tierfall.core.format.records import NamedFile, Progress
from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessagesGathered,
    MessageTree,
    RankMessage,
    RankReported,
)
from tierfall.core.ranks.messages import Message, Topic
from tierfall.core.types.values import CheckpointId, SaveOutcome

K = TypeVar("K")
V = TypeVar("V")
Receiver = Callable[..., object]
REMEMBERED = 64
"""How many checkpoints that were given up are remembered, for ranks that save them later."""


def remember(memory: dict[K, V], key: K, value: V) -> None:
    """Add an item; at most ``REMEMBERED`` are kept, the newest."""
    memory[key] = value
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]


@dataclass(frozen=True, slots=True)
class _Receivers:
    """What receives the messages of a type: ``gathered`` from all ranks, ``passed`` on by this leader of a node,
    ``reported`` by one rank to rank 0, ``announced`` by rank 0."""

    read: type[Message]
    gathered: Receiver | None
    passed: Receiver | None
    reported: Receiver | None
    announced: Receiver | None


class Messages:
    """Sends the messages of the coordinators through the message tree, and calls what receives them.

    The topic of a message is its type, and the checkpoint, tier and number that it is about, if it is not about the
    run. ``own_errors`` are the errors that this rank has reported, by copy.
    """

    def __init__(self, tree: MessageTree) -> None:
        self._tree = tree
        self.topology = tree.topology
        self._receivers: dict[str, _Receivers] = {}
        self.own_errors: dict[tuple[str, CheckpointId], BaseException] = {}

    # Receiving -------------------------------------------------------------------------------------

    def receive(
        self,
        kind: type[Message],
        *,
        gathered: Receiver | None = None,
        passed: Receiver | None = None,
        reported: Receiver | None = None,
        announced: Receiver | None = None,
    ) -> None:
        """Have these functions called with the messages of a type: with the tier, if it is about a copy; with the
        checkpoint, if it is about one; with the message, or those of all ranks by rank; and with the rank that has
        reported it."""
        self._receivers[kind.__name__] = _Receivers(kind, gathered, passed, reported, announced)

    def on_message(self, news: RankMessage) -> None:
        """Receive a message. Raises RanksError if it is malformed."""
        name, *rest = news.topic
        to = self._receivers[str(name)]
        about: tuple[object, ...] = ()
        if rest:
            step, attempt, tier, _ = rest
            id = CheckpointId(int(step), int(attempt))
            about = (tier, id) if tier else (id,)
        match news:
            case MessagesGathered():
                if receiver := to.passed if news.passed else to.gathered:
                    bodies = news.bodies.items()
                    receiver(*about, {rank: _read(to.read, body, rank) for rank, body in bodies})
            case RankReported():
                assert to.reported is not None
                to.reported(*about, _read(to.read, news.body, news.rank), news.rank)
            case DecisionAnnounced():
                assert to.announced is not None
                to.announced(*about, _read(to.read, news.body, 0))

    # Sending ---------------------------------------------------------------------------------------

    def contribute(
        self,
        body: Message | type[Message],
        id: CheckpointId,
        tier: str = "",
        *,
        number: int = 0,
        leaders_only: bool = False,
    ) -> None:
        """Contribute a message; its type alone: this rank has none."""
        topic = _topic(body, id, tier, number)
        self._tree.contribute(topic, _to_json(body), leaders_only=leaders_only)

    def report(self, body: Message, id: CheckpointId | None = None, tier: str = "") -> None:
        """Report to rank 0 what is about a checkpoint, or about the run."""
        self._tree.report(_topic(body, id, tier), _to_json(body))

    def announce(self, body: Message, id: CheckpointId | None = None, tier: str = "") -> None:
        """Announce a decision about a checkpoint, or about the run; for rank 0."""
        self._tree.announce(_topic(body, id, tier), _to_json(body))

    def announce_to_others(self, body: Message, id: CheckpointId, tier: str) -> None:
        """Announce what rank 0 itself has done already."""
        if self.topology.world_size > 1:
            self.announce(body, id, tier)

    def report_copy_failed(
        self, tier: str, id: CheckpointId, error: BaseException, *, set_aside: bool = False
    ) -> None:
        """Report that this rank can never write a copy: all ranks give it up. ``set_aside`` is as in
        ``GivenUpCopy``."""
        remember(self.own_errors, (tier, id), error)
        self.report(GivenUpCopy(reason=str(error), set_aside=set_aside), id, tier)

    def report_save_failed(
        self, id: CheckpointId, error: BaseException, outcome: SaveOutcome
    ) -> None:
        """Report that a save failed on this rank."""
        self.report(SaveFailure(text=str(error), outcome=outcome), id)

    def forget(self, kind: type[Message], id: CheckpointId, tier: str = "") -> None:
        self._tree.forget(_topic(kind, id, tier))

    def flush_partial(self, kind: type[Message], id: CheckpointId) -> None:
        self._tree.flush_partial(_topic(kind, id))

    def missing(self, kind: type[Message], id: CheckpointId) -> tuple[int, ...]:
        return self._tree.missing(_topic(kind, id))


def _topic(
    about: Message | type[Message], id: CheckpointId | None, tier: str = "", number: int = 0
) -> Topic:
    name = about.__name__ if isinstance(about, type) else type(about).__name__
    return (name,) if id is None else (name, id.step, id.attempt, tier, number)


def _to_json(body: Message | type[Message]) -> object:
    return None if isinstance(body, type) else body.to_json()


def _read(kind: type[Message], body: object, rank: int) -> Message | None:
    return None if body is None else kind.from_json(body, rank=rank)


# Saves -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShare(Message):
    """How an image was made: the ``structure`` of its state, the id of the ``assignment`` by which it leaves tensors
    out, and the digest of each group of replicated tensors; see ``core/capture/snapshot.py:ReplicaShare``."""

    structure: str
    assignment: str | None
    digests: Mapping[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageComplete(Message):
    """Gathered: a rank's image is complete. If it has to be compared, it is not sealed yet. ``not_finite`` is that of
    its commit record."""

    ordinal: int
    image_bytes: int
    not_finite: tuple[str, ...] = ()
    share: ImageShare | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesAlike(Message):
    """Announced: the replicas in the images of all ranks are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSealed(Message):
    """Gathered: a rank's image is sealed after the comparison. ``not_finite`` is as in ``ImageComplete``."""

    image_bytes: int
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCheckpoint(Message):
    """Announced: all images are sealed in memory. ``image_bytes`` and ``not_finite`` are those of all ranks
    together."""

    image_bytes: int
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRanks(Message):
    """Reported: a rank has waited ``max_wait`` for others that save the checkpoint of this ``ordinal``, or the training
    has ``ended`` meanwhile."""

    ordinal: int
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailure(Message):
    """Reported, then announced: why a save is no checkpoint. ``tensor`` is the key of the tensor whose name replaces
    ``{}`` in the text."""

    text: str
    outcome: SaveOutcome = SaveOutcome.FAILED
    tensor: int | None = None


# Copies on one tier ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedCopy(Message):
    """Announced: rank 0 has begun a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedFiles(Message):
    """Gathered: the files of a rank's image on a tier. ``found``: they were there, and this start has not written
    them."""

    files: tuple[NamedFile, ...]
    found: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts(Message):
    """Announced: all ranks have uploaded. What rank 0's commit record has beside the files."""

    wall_time_s: float
    metrics: Mapping[str, float]
    tags: tuple[str, ...]
    not_finite: tuple[str, ...] = ()
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedBytes(Message):
    """Gathered from those that write commit records: the stored bytes that one names."""

    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCopy(Message):
    """Announced: the stored bytes of a committed copy, by the rank that wrote the commit record. ``found``: this start
    has not written all of it."""

    bytes_by_rank: Mapping[int, int]
    found: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTier(Message):
    """Reported: a rank has found no space for a copy; ``is_kept``: there is space, which is to stay free. ``deletions``
    is that of its lane."""

    reason: str
    is_kept: bool
    deletions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckCopy(Message):
    """Reported, then announced: a tier does not accept a copy from ``rank`` at present."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpCopy(Message):
    """Reported, then announced: no rank makes a copy. ``by_rule``: a policy decided it, which is no failure;
    ``set_aside``: this copy alone fails on a tier that accepts others, and is left to the next start; ``complete``: all
    ranks have uploaded, so that a commit record may exist."""

    reason: str
    by_rule: bool = False
    set_aside: bool = False
    complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedCopy(Message):
    """Announced: rank 0 has deleted a copy. ``next_latest`` is as in ``DeleteCopy``."""

    reason: str
    next_latest: CheckpointId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDamage(Message):
    """Reported, then announced: a copy on a stored tier differs from its digests or lacks files. ``repairable``: it
    still has its commit record."""

    text: str
    repairable: bool = True


# The run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainDeadline(Message):
    """Reported, or announced: a rank's machine is shut down in ``left_s`` seconds."""

    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordinal(Message):
    """Reported, then announced: the lineage counts at least so many checkpoints. A rank that did not save one of them
    catches up by it."""

    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewerAttempt(Message):
    """Reported, then announced: a rank has found that this start is fenced."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalCommit(Message):
    """Announced: a commit record, as text, that rank 0 has found on a tier."""

    tier: str
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalCommitsEnd(Message):
    """Announced: rank 0 looks for no more commit records of other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedEntries(Message):
    """Reported, or announced: the names of entries of what is decided."""

    names: tuple[str, ...]
