"""Pins and unpins in memory, and what memory knows of pins on stored tiers.

A person may remove a pin from the stored tiers beside a running trainer, whose memory keeps it. So memory records to
which tiers its pin was written. A pin that none of them bears any more was removed; one that was written to none is
written to them by the next start. Memory also records which checkpoints peer memory has committed. Belongs to the
coordinator's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from tierfall.core.format.records import Mark
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import Command, CommandKind
from tierfall.core.types import keys
from tierfall.core.types.errors import TierfallError

logger = logging.getLogger("tierfall")


class Pins:
    """See the module."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def note(self, entry: LedgerEntry, command: Command) -> None:
        """Pin or unpin the images in memory, unless they bear the mark: marks are appended, and their room is bounded.

        Raises TierfallError where there is no room.
        """
        host, pinning = self._ledger.host, command.kind is CommandKind.PIN
        pinned = keys.PIN_MARK in entry.marks.get(host, ())
        if pinning == pinned or not (entry.sealed_regions or entry.shards == ()):
            return
        name = keys.PIN_MARK if pinning else keys.UNPIN_MARK
        entry.add_memory_mark(Mark(name=name, checkpoint=entry.id, wall_time_s=command.wall_time_s))
        entry.set_mark(host, keys.PIN_MARK, there=pinning)
        entry.pin_written_to = frozenset()

    def note_written(self, entry: LedgerEntry, tiers: Iterable[str]) -> None:
        """Record in memory that these stored tiers bear the pin, too."""
        new = [
            tier
            for tier in sorted(tiers)
            if keys.PIN_MARK in entry.marks.get(tier, ()) and tier not in entry.pin_written_to
        ]
        if not new or keys.PIN_MARK not in entry.marks.get(self._ledger.host, ()):
            return
        mark = Mark(name=keys.PIN_MARK, checkpoint=entry.id, wall_time_s=0.0, written_to=tuple(new))
        try:
            entry.add_memory_mark(mark)
        except TierfallError as error:
            logger.warning("an unpin of %s beside this process may not hold: %s", entry.id, error)
        else:
            entry.pin_written_to |= frozenset(new)

    def note_found(self) -> None:
        """Record it of all pins that were found at open: a kill may have come before it was recorded."""
        for entry in self._pinned():
            self.note_written(entry, self._recorded_on(entry))

    def removed(self) -> list[LedgerEntry]:
        """Return the checkpoints whose pin in memory was removed from the stored tiers."""
        return [entry for entry in self._pinned() if self._was_removed(entry)]

    def missing(self) -> list[LedgerEntry]:
        """Return the checkpoints whose pin in memory is not beside each copy on a stored tier: once the image leaves
        memory, no pin protects that copy."""
        return [
            entry
            for entry in self._pinned()
            if not self._was_removed(entry)
            and any(keys.PIN_MARK not in entry.marks.get(t, ()) for t in self._recorded_on(entry))
        ]

    def _pinned(self) -> Iterator[LedgerEntry]:
        host = self._ledger.host
        for entry in sorted(self._ledger.open(), key=lambda entry: entry.age_order):
            if keys.PIN_MARK in entry.marks.get(host, ()) and not entry.tombstoned:
                yield entry

    def _was_removed(self, entry: LedgerEntry) -> bool:
        elsewhere = {tier for tier, marks in entry.marks.items() if keys.PIN_MARK in marks} - {
            self._ledger.host
        }
        return not elsewhere and not entry.pin_written_to.isdisjoint(self._recorded_on(entry))

    def _recorded_on(self, entry: LedgerEntry) -> list[str]:
        names = (rules.name for rules in self._ledger.rules if rules.name != self._ledger.host)
        return [name for name in names if entry.has_record_on(name)]


def note_on_peers(entry: LedgerEntry) -> None:
    """Note beside each image in memory, once, that peer memory has committed its checkpoint: a start after a loss sees
    which checkpoints were reported."""
    mark = Mark(name=keys.ON_PEERS_MARK, checkpoint=entry.id, wall_time_s=0.0).encode()
    for region in entry.sealed_regions:
        try:
            if mark not in region.marks():
                region.add_mark(mark)
        except TierfallError as error:
            logger.warning("%s in memory does not say that peer memory has it: %s", entry.id, error)
