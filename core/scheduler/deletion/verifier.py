"""Background verification: a copy of an earlier start is compared with its digests before a deletion relies on it.

Copies are read a chunk at a time at a bounded rate, and only where retention or room depends on the result; the newest
unverified copy comes first. With several ranks, rank 0 chooses it, each rank reads its share of the images, and the
copy is verified once all ranks have found theirs good. Belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tierfall.core.copies.images import Image
from tierfall.core.format.records import Manifest
from tierfall.core.ranks.message_tree import (
    Bodies,
    DecisionAnnounced,
    MessagesGathered,
    MessageTree,
    RankMessage,
)
from tierfall.core.ranks.messages import CheckpointTopic, Message, Topic
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import CheckChunk, OpenCheck, Outcome
from tierfall.core.types.errors import is_damage
from tierfall.core.types.values import CheckpointId, CopyState

RETRY_S = 30.0
ROOM_WAITS_S = 30.0
"""Seconds that an eviction waits for a copy on another tier to be read: that tier may be unresponsive."""
_VERIFY, _HURRY, _FOUND = "verify", "verify: hurry", "verify: found"
_VERIFIED, _READ = "verified", "restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartVerification(Message):
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
    """What rank 0 has requested all ranks to read on a tier, and since when an eviction waits for it."""

    id: CheckpointId
    number: int
    urgent_since_s: float | None


@dataclass(slots=True)
class _RunningCheck:
    """A copy that is being read. ``images`` are this rank's share of it, empty until their records are read; ``image``
    and ``chunk`` are the position, ``reading`` that a task is in progress."""

    id: CheckpointId
    number: int
    urgent: bool
    not_before_s: float = 0.0
    reading: bool = True
    images: tuple[tuple[Image, Manifest], ...] = ()
    image: int = 0
    chunk: int = 0


class BackgroundVerifier:
    """See the module. ``bytes_per_s`` bounds this rank's reads per tier (None: no bound); it does not apply while an
    eviction waits for the result."""

    KINDS = frozenset((_VERIFY, _HURRY, _FOUND, _VERIFIED, _READ))

    def __init__(
        self,
        *,
        ledger: Ledger,
        deleter: Deleter,
        message_tree: MessageTree,
        hooks: Hooks,
        bytes_per_s: float | None,
    ) -> None:
        self._ledger = ledger
        self._deleter = deleter
        self._message_tree = message_tree
        self._hooks = hooks
        self._bytes_per_s = bytes_per_s
        self._decides = message_tree.topology.is_root
        self._requested: dict[str, _VerifyRequest] = {}
        self._checks: dict[str, _RunningCheck] = {}
        self._retry_s: dict[tuple[str, CheckpointId], float] = {}
        self._count = 0
        self._restores = 0
        self._conditions = Conditions()

    # Choosing copies -------------------------------------------------------------------------------

    def verify(self, tier: str, *, hurry: bool = False) -> bool:
        """Request verification of what a deletion on ``tier`` may rely on: the newest unverified copy, there or on
        another tier that survives as much. Return False where there is none. ``hurry``: an eviction waits. For rank
        0."""
        return any(self._verify_on(name, hurry) for name in self._relied_on(tier))

    def _relied_on(self, tier: str) -> list[str]:
        survives = {rules.name: rules.survives for rules in self._ledger.rules}
        safe = [name for name in survives if survives[name].covers(survives[tier])]
        return sorted(safe, key=lambda name: name != tier)

    def verify_elsewhere(self, tier: str, ids: Sequence[CheckpointId]) -> bool:
        """Request verification, in a hurry, of the copies on other tiers of what is to be evicted. Return False once
        each has a verified one, or none that can be read soon. For rank 0."""
        return not self._is_paused() and any([self._verify_one_elsewhere(tier, id) for id in ids])

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
        others = [name for name in others if (name, id) not in self._retry_s]
        return any([self._verify_on(n, True, id) and self._eviction_waits(n) for n in others])

    def _eviction_waits(self, tier: str) -> bool:
        until_s = self._eviction_waits_until_s(tier)
        return until_s is not None and self._ledger.now_s < until_s

    def _eviction_waits_until_s(self, tier: str) -> float | None:
        request = self._requested.get(tier)
        if request is None or request.urgent_since_s is None:
            return None
        return request.urgent_since_s + ROOM_WAITS_S

    def _verify_on(self, tier: str, hurry: bool, id: CheckpointId | None = None) -> bool:
        request = self._requested.get(tier)
        if request is None:
            chosen = id or self._next(tier)
            if chosen is None:
                return False
            self._count += 1
            since_s = self._ledger.now_s if hurry else None
            self._requested[tier] = _VerifyRequest(chosen, self._count, since_s)
            body = _StartVerification(hurry=hurry)
            self._announce(_topic(_VERIFY, self._count, chosen, tier), body)
        elif hurry and request.urgent_since_s is None:
            request.urgent_since_s = self._ledger.now_s
            self._announce(_topic(_HURRY, request.number, request.id, tier), None)
        return True

    def _announce(self, topic: Topic, body: Message | None) -> None:
        self._message_tree.announce(topic, None if body is None else body.to_json())

    def _next(self, tier: str) -> CheckpointId | None:
        found = (e.id for e in self._ledger.unverified(tier))
        return next((id for id in found if (tier, id) not in self._retry_s), None)

    def _begin(self, number: int, id: CheckpointId, tier: str, hurry: bool) -> None:
        self._checks[tier] = check = _RunningCheck(id, number, hurry)
        if self._ledger.has_no_part(tier, id):
            self._on_check_read(tier, check, None)
            return
        topology = self._message_tree.topology
        split = self._hooks.is_split(tier)
        ranks = topology.local_ranks if split else tuple(range(topology.world_size))
        turn = ranks.index(topology.rank)
        self._hooks.dispatch(OpenCheck(tier=tier, id=id, turn=turn, of=len(ranks)))

    def on_restored(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """A restore of this rank has read its whole share of a checkpoint on these tiers, and found it good."""
        self._restores += 1  # all ranks restore together, so that their counts agree
        body = _ReadTiers(tiers=frozenset(tiers))
        self._message_tree.contribute(_topic(_READ, self._restores, id, ""), body.to_json())

    # Reading ---------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Dispatch the reads that are due."""
        if self._is_paused():
            return
        for key in [key for key, when in self._retry_s.items() if now_s >= when]:
            del self._retry_s[key]
            self._deleter.plan_all_tiers()
        for tier, check in list(self._checks.items()):
            if not check.reading and (check.urgent or now_s >= check.not_before_s):
                self._read_on(tier, check)

    def next_s(self, now_s: float) -> float | None:
        """Return when the next read is due."""
        if self._is_paused():
            return None
        times = [c.not_before_s for c in self._checks.values() if not c.reading]
        times += [
            s for tier in self._requested if (s := self._eviction_waits_until_s(tier)) is not None
        ]
        return min(
            (when for when in [*times, *self._retry_s.values()] if when > now_s), default=None
        )

    def _is_paused(self) -> bool:
        """A restore or a drain needs the bandwidth."""
        return self._deleter.paused or self._hooks.has_deadline()

    def _read_on(self, tier: str, check: _RunningCheck) -> None:
        while check.image < len(check.images):
            image, manifest = check.images[check.image]
            if check.chunk < manifest.chunk_count:
                check.reading = True
                self._hooks.dispatch(
                    CheckChunk(
                        tier=tier, id=check.id, image=image, manifest=manifest, index=check.chunk
                    )
                )
                return
            check.image, check.chunk = check.image + 1, 0
        self._on_check_read(tier, check, None)

    def on_outcome(self, outcome: Outcome) -> None:
        """Apply the outcome of reading a copy's records, or a chunk."""
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
                check.not_before_s = self._ledger.now_s + (end - start) / self._bytes_per_s

    def _on_check_read(self, tier: str, check: _RunningCheck, error: BaseException | None) -> None:
        """Report what this rank has found: no error, damage, or that it could not read."""
        del self._checks[tier]
        damage = is_damage(error)
        body = _Verified(text=None if error is None else str(error), damaged=damage)
        self._message_tree.contribute(_topic(_FOUND, check.number, check.id, tier), body.to_json())

    # Results ---------------------------------------------------------------------------------------

    def on_message(self, news: RankMessage) -> None:
        """Handle a request of rank 0, the results of all ranks, or what all have restored."""
        topic = CheckpointTopic.parse(news.topic)
        what, number, id, tier = topic.kind, topic.number, topic.id, topic.tier
        match news:
            case DecisionAnnounced() if what == _VERIFY:
                self._begin(number, id, tier, _StartVerification.from_json(news.body, rank=0).hurry)
            case DecisionAnnounced() if what == _HURRY:
                if tier in self._checks and self._checks[tier].number == number:
                    self._checks[tier].urgent = True  # else this rank has read its share
            case MessagesGathered(passed=False) if what == _FOUND:
                self._announce_result(id, tier, news.bodies)
            case MessagesGathered(passed=False) if what == _READ:
                self._all_restored(id, news.bodies)
            case DecisionAnnounced():
                self._on_result(id, tier, _Verified.from_json(news.body, rank=0))

    def _announce_result(self, id: CheckpointId, tier: str, bodies: Bodies) -> None:
        """Announce the worst result of any rank; for rank 0."""
        found = {r: _Verified.from_json(body, rank=r) for r, body in bodies.items()}
        failed = [
            _Verified(
                text=self._message_tree.topology.name_rank(rank, one.text), damaged=one.damaged
            )
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
        if tier in self._requested and self._requested[tier].id == id:
            del self._requested[tier]
        entry = self._ledger.entries.get(id)
        if entry is None or entry.state(tier) is not CopyState.COMMITTED:
            return  # it was deleted meanwhile
        if text is None:
            self._is_good(id, tier)
            self._conditions.end((tier, id), "%s: %s is verified", tier, id)
        elif result.damaged:
            if self._decides:
                self._hooks.found_damage(tier, id, text)
        else:
            again = "%s: %s could not be verified, it is retried: %s"
            self._conditions.report((tier, id), logging.WARNING, again, tier, id, text)
            self._retry_s[tier, id] = self._ledger.now_s + RETRY_S

    def _is_good(self, id: CheckpointId, tier: str) -> None:
        entry = self._ledger.entries.get(id)
        if entry is not None and entry.state(tier) is CopyState.COMMITTED:
            entry.verified.add(tier)


def _topic(what: str, number: int, id: CheckpointId, tier: str) -> Topic:
    return CheckpointTopic(kind=what, id=id, tier=tier, number=number).key
