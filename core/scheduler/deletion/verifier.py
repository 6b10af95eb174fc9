"""Verifying: what earlier starts left on a tier is held against its digests before another copy goes because of it.

It is done in the background, a chunk at a time and at a bounded rate, and only where retention or room waits for it:
the newest copy that nobody has verified comes first. With several ranks rank 0 says which, each reads what is its
part, and a copy is verified once all have found theirs good. It belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierfall.core.copies.images import Image
from tierfall.core.format.records import Manifest
from tierfall.core.ranks.message_tree import Bodies, MessageTree
from tierfall.core.ranks.messages import CheckpointTopic, Message, Topic
from tierfall.core.ranks.ranks import DecisionAnnounced, MessagesGathered, RankMessage
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import CheckChunk, OpenCheck, Outcome, Task
from tierfall.core.types.errors import IntegrityError, KeyNotFoundError, NotSupportedError
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")

RETRY_S = 30.0
ROOM_WAITS_S = 30.0
"""For so long room waits for a copy on another tier to be read: that tier may not answer."""
_VERIFY, _HURRY, _FOUND = "verify", "verify: hurry", "verify: found"
_VERIFIED, _READ = "verified", "restored"
_TOPICS = frozenset({_VERIFY, _HURRY, _FOUND, _VERIFIED, _READ})


@dataclass(frozen=True, slots=True, kw_only=True)
class _VerifyOrder(Message):
    """All ranks are to verify a copy. ``hurry``: room waits for it."""

    hurry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified(Message):
    """What is wrong with a copy, or kept it from being verified; None for a good one."""

    text: str | None = None
    damaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadTiers(Message):
    """The tiers of which a restore of one rank has read all of its part, and found it good."""

    tiers: frozenset[str]


_GOOD = _Verified()


@dataclass(slots=True)
class _VerifyRequest:
    """What rank 0 has asked all ranks to read on a tier, and since when room waits for it."""

    id: CheckpointId
    number: int
    hurry_since_s: float | None


@dataclass(slots=True)
class _RunningCheck:
    """One copy that is being read; ``images`` are this rank's part of it, none before their records are read."""

    id: CheckpointId
    number: int
    hurry: bool
    not_before_s: float = 0.0
    reading: bool = True
    images: tuple[tuple[Image, Manifest], ...] = ()
    image: int = 0
    chunk: int = 0


class BackgroundVerifier:
    """See the module. ``waits`` says that nothing is to be read at present; ``changed`` is told of each tier of which
    more is known now, ``is_damaged`` of each copy that is not what was written. ``bytes_per_s`` bounds what is read of
    a tier by this rank (None: nothing does), unless room waits for it."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        council: MessageTree | None,
        is_split: Callable[[str], bool],
        dispatch: Callable[[Task], None],
        bytes_per_s: float | None,
        waits: Callable[[], bool],
        changed: Callable[[str], None],
        is_damaged: Callable[[str, CheckpointId, str], None],
    ) -> None:
        self._ledger = ledger
        self._council = council
        self._is_split = is_split
        self._dispatch = dispatch
        self._bytes_per_s = bytes_per_s
        self._waits = waits
        self._changed = changed
        self._is_damaged = is_damaged
        self._decides = council is None or council.topology.is_root
        self._asked: dict[str, _VerifyRequest] = {}
        self._checks: dict[str, _RunningCheck] = {}
        self._later: dict[tuple[str, CheckpointId], float] = {}
        self._count = 0
        self._restores = 0

    # What is to be verified ------------------------------------------------------------------------

    def verify(self, tier: str, *, hurry: bool = False) -> bool:
        """Have read what a drop on a tier may rely on: the newest copy there that nobody has verified, or on another
        tier that survives as much. False where there is none to read. ``hurry``: room waits for it. For rank 0."""
        return any(self._verify_on(name, hurry) for name in self._relied_on(tier))

    def _relied_on(self, tier: str) -> list[str]:
        survives = {rules.name: rules.survives for rules in self._ledger.rules}
        safe = [name for name in survives if survives[name].covers(survives[tier])]
        return sorted(safe, key=lambda name: name != tier)

    def verify_elsewhere(self, tier: str, ids: Sequence[CheckpointId]) -> bool:
        """Have the other copies of what is to leave a tier read, where it goes because of them, in a hurry. False once
        each has one that is verified, or none that can be read soon. For rank 0."""
        return not self._waits() and any([self._verify_one_elsewhere(tier, id) for id in ids])

    def _verify_one_elsewhere(self, tier: str, id: CheckpointId) -> bool:
        entry = self._ledger.entries.peek(id)
        if entry.tombstoned or id in self._ledger.abandoned():
            return False
        others = [
            name
            for name in self._relied_on(tier)
            if name != tier and entry.state(name) is CopyState.COMMITTED
        ]
        if entry.verified.intersection(others):
            return False
        others = [name for name in others if (name, id) not in self._later]
        return any([self._verify_on(n, True, id) and self._room_waits(n) for n in others])

    def _room_waits(self, tier: str) -> bool:
        until_s = self._room_waits_until_s(tier)
        return until_s is not None and self._ledger.now_s < until_s

    def _room_waits_until_s(self, tier: str) -> float | None:
        asked = self._asked.get(tier)
        if asked is None or asked.hurry_since_s is None:
            return None
        return asked.hurry_since_s + ROOM_WAITS_S

    def _verify_on(self, tier: str, hurry: bool, id: CheckpointId | None = None) -> bool:
        asked = self._asked.get(tier)
        if asked is None:
            chosen = id or self._next(tier)
            if chosen is None:
                return False
            self._count += 1
            since_s = self._ledger.now_s if hurry else None
            self._asked[tier] = _VerifyRequest(chosen, self._count, since_s)
            body = _VerifyOrder(hurry=hurry)
            self._announce(_topic(_VERIFY, self._count, chosen, tier), body)
        elif hurry and asked.hurry_since_s is None:
            asked.hurry_since_s = self._ledger.now_s
            self._announce(_topic(_HURRY, asked.number, asked.id, tier), None)
        return True

    def _announce(self, topic: Topic, body: Message | None) -> None:
        said = None if body is None else body.to_json()
        if self._council is None:
            self.hear(DecisionAnnounced(topic=topic, body=said))
        else:
            self._council.announce(topic, said)

    def _next(self, tier: str) -> CheckpointId | None:
        found = (e.id for e in self._ledger.unverified(tier))
        return next((id for id in found if (tier, id) not in self._later), None)

    def _begin(self, number: int, id: CheckpointId, tier: str, hurry: bool) -> None:
        self._checks[tier] = _RunningCheck(id, number, hurry)
        turn, of = 0, 1
        if self._council is not None:
            topology = self._council.topology
            ranks = topology.local_ranks if self._is_split(tier) else range(topology.world_size)
            turn, of = list(ranks).index(topology.rank), len(ranks)
        self._dispatch(OpenCheck(tier=tier, id=id, turn=turn, of=of))

    def restored(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """A restore of this rank has read all of its part of a checkpoint on these tiers, and found it good."""
        self._restores += 1  # all ranks restore together
        if self._council is None:
            for tier in tiers:
                self._is_good(id, tier)
        else:
            body = _ReadTiers(tiers=frozenset(tiers))
            self._council.contribute(_topic(_READ, self._restores, id, ""), body.to_json())

    # Reading it ------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Read on where it is time."""
        if self._waits():
            return
        for key in [key for key, when in self._later.items() if now_s >= when]:
            del self._later[key]
            self._changed(key[0])
        for tier, check in list(self._checks.items()):
            if not check.reading and (check.hurry or now_s >= check.not_before_s):
                self._read_on(tier, check)

    def next_s(self, now_s: float) -> float | None:
        """Say when to read on."""
        if self._waits():
            return None
        times = [c.not_before_s for c in self._checks.values() if not c.reading]
        times += [s for tier in self._asked if (s := self._room_waits_until_s(tier)) is not None]
        return min((when for when in [*times, *self._later.values()] if when > now_s), default=None)

    def _read_on(self, tier: str, check: _RunningCheck) -> None:
        while check.image < len(check.images):
            image, manifest = check.images[check.image]
            if check.chunk < manifest.chunk_count:
                check.reading = True
                self._dispatch(
                    CheckChunk(
                        tier=tier, id=check.id, image=image, manifest=manifest, index=check.chunk
                    )
                )
                return
            check.image, check.chunk = check.image + 1, 0
        self._on_check_read(tier, check, None)

    def took(self, outcome: Outcome, now_s: float) -> None:
        """Take what came of reading records, or a chunk."""
        task = outcome.task
        assert isinstance(task, OpenCheck | CheckChunk)
        check = self._checks.get(task.tier)
        if check is None or check.id != task.id:
            return
        check.reading = False
        if outcome.error is not None:
            self._on_check_read(task.tier, check, outcome.error)
        elif isinstance(task, OpenCheck):
            check.images = outcome.value
        else:
            check.chunk += 1
            start, end = task.manifest.chunk_range(task.index)
            if self._bytes_per_s is not None:
                check.not_before_s = now_s + (end - start) / self._bytes_per_s

    def _on_check_read(self, tier: str, check: _RunningCheck, error: BaseException | None) -> None:
        """Say what this rank has found: nothing wrong, damage, or that it could not look."""
        del self._checks[tier]
        damage = isinstance(error, IntegrityError | KeyNotFoundError | NotSupportedError)
        body = _Verified(text=None if error is None else str(error), damaged=damage)
        if self._council is None:
            self._on_result(check.id, tier, body)
        else:
            topic = _topic(_FOUND, check.number, check.id, tier)
            self._council.contribute(topic, body.to_json())

    # What was found --------------------------------------------------------------------------------

    @staticmethod
    def is_about(news: RankMessage) -> bool:
        """Say whether this is what hears of it."""
        return news.topic[0] in _TOPICS

    def hear(self, news: RankMessage) -> None:
        """Hear what rank 0 wants verified, what all have found, or what all have read."""
        topic = CheckpointTopic.parse(news.topic)
        what, number, id, tier = topic.kind, topic.number, topic.id, topic.tier
        match news:
            case DecisionAnnounced() if what == _VERIFY:
                self._begin(number, id, tier, _VerifyOrder.from_json(news.body, rank=0).hurry)
            case DecisionAnnounced() if what == _HURRY:
                if tier in self._checks and self._checks[tier].number == number:
                    self._checks[tier].hurry = True  # else this rank has read its part
            case MessagesGathered(passed=False) if what == _FOUND:
                self._announce_result(id, tier, news.bodies)
            case MessagesGathered(passed=False) if what == _READ:
                self._all_restored(id, news.bodies)
            case DecisionAnnounced():
                self._on_result(id, tier, _Verified.from_json(news.body, rank=0))

    def _announce_result(self, id: CheckpointId, tier: str, bodies: Bodies) -> None:
        """Tell all ranks the worst of what any has found; for rank 0."""
        found = {r: _Verified.from_json(body, rank=r) for r, body in bodies.items()}
        failed = [
            _Verified(text=f"rank {rank}: {one.text}", damaged=one.damaged)
            for rank, one in found.items()
            if one.text
        ]
        worst = max(failed, key=lambda one: one.damaged, default=_GOOD)
        self._announce(_topic(_VERIFIED, 0, id, tier), worst)

    def _all_restored(self, id: CheckpointId, bodies: Bodies) -> None:
        read = [_ReadTiers.from_json(body, rank=rank).tiers for rank, body in bodies.items()]
        for tier in sorted(frozenset.intersection(*read)):
            self._announce(_topic(_VERIFIED, 0, id, tier), _GOOD)

    def _on_result(self, id: CheckpointId, tier: str, result: _Verified) -> None:
        text = result.text
        if tier in self._asked and self._asked[tier].id == id:
            del self._asked[tier]
        entry = self._ledger.entries.get(id)
        if entry is None or entry.state(tier) is not CopyState.COMMITTED:
            return  # it went meanwhile
        if text is None:
            self._is_good(id, tier)
        elif result.damaged:
            if self._decides:
                self._is_damaged(tier, id, text)
        else:
            logger.warning("%s: %s could not be verified, it is tried again: %s", tier, id, text)
            self._later[tier, id] = self._ledger.now_s + RETRY_S
            return
        self._changed(tier)

    def _is_good(self, id: CheckpointId, tier: str) -> None:
        entry = self._ledger.entries.get(id)
        if entry is not None and entry.state(tier) is CopyState.COMMITTED:
            entry.verified.add(tier)


def _topic(what: str, number: int, id: CheckpointId, tier: str) -> Topic:
    return CheckpointTopic(kind=what, id=id, tier=tier, number=number).key
