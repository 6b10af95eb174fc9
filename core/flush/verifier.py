"""Background verification: after a restore, the newest copy of an earlier start on each tier is compared with its
digests.

No rule deletes anything in reliance on a copy that is not known to be good. A copy is good if this start wrote it, read
all of it in a restore, or read it here: the newest live one on each tier, and if that is damaged, the next. The first
commit on the tier ends this. A copy that cannot be read is tried again later, and the next one meanwhile. Copies are
read a chunk at a time at a bounded rate, and as fast as possible while room on the tier waits for it. Nothing is read
if no tier deletes anything, by its rules or for room. With several ranks, rank 0 chooses the copy, each rank reads its
share of the images, and the copy is good once all ranks have found theirs good. Belongs to the coordinator's thread and
does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tierfall.core.copies.images import Image
from tierfall.core.flush.component import Component
from tierfall.core.flush.messages import FoundDamage
from tierfall.core.flush.tasks import CheckChunk, OpenCheck, Outcome
from tierfall.core.format.records import Manifest
from tierfall.core.ranks.messages import Message
from tierfall.core.types.errors import is_damage
from tierfall.core.types.values import CheckpointId, CopyState

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

RETRY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _VerifyCopy(Message):
    """Announced: all ranks read a copy; again with the same ``number``: as fast as possible."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified(Message):
    """Gathered, then announced: ``text`` says why a copy is not good, or was not verified; None for a good one. Not
    ``read``: the tier has a good copy by now, and the rest is left."""

    text: str | None = None
    damaged: bool = False
    read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadTiers(Message):
    """Gathered: the tiers of which a restore of one rank has read all of its part, and found it good."""

    tiers: frozenset[str]


_GOOD = _Verified()


@dataclass(slots=True)
class _Request:
    """What rank 0 has all ranks read on a tier."""

    id: CheckpointId
    number: int
    urgent: bool = False


@dataclass(slots=True)
class _RunningCheck:
    """A copy that is being read. ``left`` are the chunks of this rank's share of it that are not read yet: image,
    manifest and number; ``reading``: a task is in progress; ``urgent``: room waits for it."""

    id: CheckpointId
    number: int
    urgent: bool = False
    not_before_s: float = 0.0
    reading: bool = True
    left: Iterator[tuple[Image, Manifest, int]] = field(default_factory=lambda: iter(()))


class BackgroundVerifier(Component):
    """The reads after a restore. ``bytes_per_s`` bounds this rank's reads per tier (None: no bound)."""

    def __init__(self, coordinator: Coordinator, *, bytes_per_s: float | None) -> None:
        super().__init__(coordinator)
        self._bytes_per_s = bytes_per_s
        self._requested: dict[str, _Request] = {}
        self._checks: dict[str, _RunningCheck] = {}
        self._retry_s: dict[tuple[str, CheckpointId], float] = {}
        self._good: dict[str, CheckpointId] = {}
        """A copy on each tier that is known to be good."""
        self._room_waits = False
        """Room on some tier has waited for this: a tier without rules may be full."""
        self._begun: dict[str, int] = {}
        """The number of the last request about each tier that this rank has begun."""
        self._count = 0
        self._restores = 0
        receive = self._messages.receive
        receive(_VerifyCopy, announced=self._begin)
        receive(_Verified, gathered=self._on_all_read, announced=self._on_result)
        receive(_ReadTiers, gathered=self._on_all_restored)

    # Choosing copies -------------------------------------------------------------------------------

    def hasten(self, tier: str) -> bool:
        """Read the copy on a tier that is being verified as fast as possible, since room there waits for it: once it is
        known to be good, more may be deleted. Return, on rank 0, whether there is one, or is to be; False during a
        restore or a drain."""
        self._room_waits = True
        request = self._requested.get(tier)
        if request is not None and not request.urgent:
            request.urgent = True
            self._messages.announce(_VerifyCopy(number=request.number), request.id, tier)
        if self._is_paused():
            return False
        return request is not None or self._newest_unread(tier) is not None

    def _request_all(self) -> None:
        """Request the newest copy of each tier that has no good one yet."""
        if not (self._group.decides and self._ledger.has_begun) or self._keeps_all():
            return
        for tier in self._lanes:
            if tier in self._requested or (id := self._newest_unread(tier)) is None:
                continue
            self._count += 1
            self._requested[tier] = _Request(id, self._count)
            self._messages.announce(_VerifyCopy(number=self._count), id, tier)

    def _newest_unread(self, tier: str) -> CheckpointId | None:
        """Return the copy on a tier to read next: the newest live one that can be read. None if the tier has a good
        one."""
        id = self._good.get(tier)
        good = None if id is None else self._ledger.entries.get(id)
        abandoned = self._ledger.abandoned()
        if good is not None and tier in good.verified and not (good.deleted or id in abandoned):
            return None
        newest: CheckpointId | None = None
        for entry in self._ledger.live_copies(tier):
            if tier in entry.verified:
                self._good[tier] = entry.id
                return None
            if newest is None and (tier, entry.id) not in self._retry_s:
                newest = entry.id
        return newest

    def _keeps_all(self) -> bool:
        """Return whether no tier deletes anything, by its rules or for room."""
        rules = (self._ledger.rules_of(tier) for tier in self._lanes)
        bounded = any(each.retain or each.capacity_bytes is not None for each in rules)
        return self._ledger.all_live and not (bounded or self._room_waits)

    def _begin(self, tier: str, id: CheckpointId, message: _VerifyCopy) -> None:
        number = message.number
        if self._begun.get(tier) == number:  # room waits for it by now
            if tier in self._checks:
                self._checks[tier].urgent = True
            return
        self._begun[tier] = number
        self._checks[tier] = check = _RunningCheck(id, number)
        if self._ledger.has_no_part(tier, id):
            self._on_check_read(tier, check, None)
            return
        ranks = self._group.ranks_on(tier)
        turn = ranks.index(self._group.topology.rank)
        self._dispatch(OpenCheck(tier=tier, id=id, turn=turn, of=len(ranks)))

    def on_restored(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """A restore of this rank has read its whole share of a checkpoint on these tiers, and found it good."""
        self._restores += 1  # all ranks restore together, so that their counts agree
        body = _ReadTiers(tiers=frozenset(tiers))
        self._messages.contribute(body, id, number=self._restores)

    # Reading ---------------------------------------------------------------------------------------

    def tick(self, now_s: float, *, has_news: bool) -> None:
        """Dispatch the reads that are due; ``has_news``: what is to be read may have changed."""
        if self._is_paused():
            return
        for key in [key for key, when in self._retry_s.items() if now_s >= when]:
            del self._retry_s[key]
        if has_news:
            self._request_all()
        for tier, check in list(self._checks.items()):
            if not check.reading and (check.urgent or now_s >= check.not_before_s):
                self._read_on(tier, check)
            elif not check.reading:
                self._wake_at(check.not_before_s)
        for when in self._retry_s.values():
            self._wake_at(when)

    def _is_paused(self) -> bool:
        """A restore or a drain needs the bandwidth."""
        return self._ledger.restoring or bool(self._ledger.deadlines)

    def on_committed(self, tier: str) -> None:
        """This start has committed a copy on a tier, which is good: what is being read there is left."""
        if tier in self._checks:
            self._on_check_read(tier, self._checks[tier], None, read=False)

    def _read_on(self, tier: str, check: _RunningCheck) -> None:
        following = next(check.left, None)
        if following is None:
            self._on_check_read(tier, check, None)
            return
        check.reading = True
        image, manifest, index = following
        task = CheckChunk(tier=tier, id=check.id, image=image, manifest=manifest, index=index)
        self._dispatch(task)

    def on_outcome(self, outcome: Outcome) -> None:
        """Apply the outcome of reading a copy's records, or a chunk."""
        task = outcome.task
        assert isinstance(task, OpenCheck | CheckChunk)
        check = self._checks.get(task.tier)
        if check is None or check.id != task.id:
            return  # it was left
        check.reading = False
        if outcome.error is not None:
            self._on_check_read(task.tier, check, outcome.error)
        elif isinstance(task, OpenCheck):
            found: tuple[tuple[Image, Manifest], ...] = outcome.value
            check.left = ((i, m, index) for i, m in found for index in range(m.chunk_count))
        elif self._bytes_per_s is not None:
            start, end = task.manifest.chunk_range(task.index)
            check.not_before_s = self._ledger.now_s + (end - start) / self._bytes_per_s

    def _on_check_read(
        self, tier: str, check: _RunningCheck, error: BaseException | None, *, read: bool = True
    ) -> None:
        """Report what this rank has found: no error, damage, or that it could not read."""
        del self._checks[tier]
        damage = is_damage(error)
        body = _Verified(text=None if error is None else str(error), damaged=damage, read=read)
        self._messages.contribute(body, check.id, tier, number=check.number)

    # Results ---------------------------------------------------------------------------------------

    def _on_all_read(self, tier: str, id: CheckpointId, found: Mapping[int, _Verified]) -> None:
        """Announce the worst result of any rank; for rank 0."""
        failed = [
            _Verified(text=self._group.topology.name_rank(rank, one.text), damaged=one.damaged)
            for rank, one in found.items()
            if one.text
        ]
        all_read = all(one.read for one in found.values())
        worst = max(failed, key=lambda one: one.damaged, default=replace(_GOOD, read=all_read))
        self._messages.announce(worst, id, tier)

    def _on_all_restored(self, id: CheckpointId, read: Mapping[int, _ReadTiers]) -> None:
        for tier in sorted(frozenset.intersection(*(one.tiers for one in read.values()))):
            self._messages.announce(_GOOD, id, tier)

    def _on_result(self, tier: str, id: CheckpointId, result: _Verified) -> None:
        text = result.text
        request = self._requested.get(tier)
        if request is not None and request.id == id:
            del self._requested[tier]
        entry = self._ledger.entries.get(id)
        if entry is None or entry.state(tier) is not CopyState.COMMITTED:
            return  # it was deleted meanwhile
        if text is None and not result.read:
            return
        if text is None:
            entry.verified |= {tier}
            self._planner.deleter.schedule_all()
            self._conditions.end((tier, id), "%s: %s is verified", tier, id)
        elif result.damaged:
            if self._group.decides:
                self._messages.report(FoundDamage(text=text), id, tier)
        else:
            again = "%s: %s could not be verified, it is retried: %s"
            self._conditions.report((tier, id), logging.WARNING, again, tier, id, text)
            self._retry_s[tier, id] = self._ledger.now_s + RETRY_S
