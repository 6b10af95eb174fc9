"""The identity of tiers: each tier of a run but peer memory has an id, which the other tiers and this machine remember.

A tier that has another id, or is empty where the run was before, counts as one that could not be looked at: a file
system may not be mounted there. Of a tier of this node alone, only what this machine remembers counts: a node that was
replaced has an empty disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tierfall.config import Config, FileTierConfig, ObjectTierConfig
from tierfall.core.format import documents
from tierfall.core.format.catalog import Listing
from tierfall.core.format.records import Attempt, KnownTier, TierRecord
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    LostWriteError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.setup.places import MEMORY_NAME, device_of, find_emptied, read_memory, same_place
from tierfall.setup.tiers import call_tiers, holds_any, shared_setting
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
T = TypeVar("T")


class TierIdentities:
    """The ids of a run's tiers, by the records on the tiers and on this machine. ``records`` has that of each tier."""

    def __init__(
        self,
        config: Config,
        stores: Mapping[str, StoredTier],
        folder: Path,
        listings: Iterable[Listing] = (),
        calls: BoundedCalls | None = None,
    ) -> None:
        """Read the records of ``stores``, except those with an error in ``listings``: these may never answer.
        ``folder`` is that of the run's host memory. With ``calls``, each call to a tier ends within its bound."""
        self._config = config
        self._calls = calls
        self._opened = stores
        self.places = {name: store.place for name, store in stores.items()}
        self._silent = {listing.tier for listing in listings if listing.error is not None}
        self._memory = folder / MEMORY_NAME
        self.records: dict[str, TierRecord] = {}
        self._damaged: set[str] = set()
        self._unread: dict[str, TierfallError] = {}
        for name in self._stores:
            try:
                if (record := self._ask(name, lambda store: store.marker.read())) is not None:
                    self.records[name] = record
            except IntegrityError as error:
                logger.warning("tier %s: which tier it is cannot be read: %s", name, error)
                self._damaged.add(name)
            except TierfallError as error:  # the listing has the same error, and that is logged
                logger.debug("tier %s: which tier it is was not read: %s", name, error)
                self._unread[name] = error
        self.remembered = read_memory(folder)
        self._written: TierRecord | None = None
        self._devices: dict[str, int | None] = {}
        """The device of the folder of each tier of this node alone, when its record was written."""

    @property
    def _stores(self) -> dict[str, StoredTier]:
        names = {tier.name for tier in self._config.storage} - self._silent
        return {name: x for name, x in self._opened.items() if name in names}

    def _ask(self, tier: str, call: Callable[[StoredTier], T]) -> T:
        store = self._opened[tier]
        if self._calls is None:
            return call(store)
        return call_tiers([store], call, self._config, self._calls)[tier].get()

    def _entries(self, *, but: str = "") -> list[tuple[TierRecord, str, KnownTier]]:
        """Return what the records, without that of the tier ``but``, say of other tiers: the record, a tier's name, and
        what is known of it. This machine's come first."""
        found = [record for tier, record in self.records.items() if tier != but]
        records = found if self.remembered is None else [self.remembered, *found]
        return [
            (record, name, known) for record in records for name, known in record.others.items()
        ]

    def _remembers(self, name: str, *, surely: bool = False) -> KnownTier | None:
        """Return the newest ``KnownTier`` of a tier, by its name or else its place; of one of this node alone, this
        machine's. ``surely``: what another tier remembers counts only if all nodes saw the tier."""
        entries = [
            (record.wall_time_s, named, known)
            for record, named, known in self._entries(but=name)
            if known.id
            and (record is self.remembered or known.shared or (known.shared is None and not surely))
        ]
        found = [entry for entry in entries if entry[1] == name]
        if not found and (place := self.places.get(name)) is not None:
            found = [entry for entry in entries if same_place(entry[2].place, place)]
        return max(found, key=lambda entry: entry[0])[2] if found else None

    def is_remembered(self, name: str) -> bool:
        """Return whether another tier, or this machine, remembers a tier; this machine also one without an id, whose
        files were deleted."""
        here = {} if self.remembered is None else self.remembered.others
        return name in here or self._remembers(name) is not None

    # What is not the tier that was there ---------------------------------------------------------------

    def missing(self, listings: Sequence[Listing]) -> dict[str, UnreachableError]:
        """Return the tiers that count as not looked at, with why: those with another id than is remembered, those that
        all nodes saw and that are empty now, those that were ``emptied``, and those that look empty and did not say
        which tier they are."""
        found = self.emptied(listings)
        silent = [x.tier for x in listings if x.tier in self._unread and not holds_any(x)]
        for name in filter(self.is_remembered, silent):
            found[name] = UnreachableError(str(self._unread[name]))
        for listing in self._unlike(listings):
            name = listing.tier
            known = self._remembers(name, surely=True)
            if name in self.records or (known and known.shared and not holds_any(listing)):
                found[name] = UnreachableError(self._why(name))
        for name in found:
            self.records.pop(name, None)  # that of another tier
        return found

    def emptied(self, listings: Sequence[Listing]) -> dict[str, UnreachableError]:
        """Return the tiers of this node alone that have no checkpoint of the run and no id, and that this machine
        remembers with one, with why."""
        return {
            listing.tier: UnreachableError(self._why(listing.tier))
            for listing in self._unlike(listings)
            if listing.tier not in self.records and not listing.copies
            if (known := self._remembers(listing.tier, surely=True)) and not known.shared
        }

    def are_as_remembered(self, listings: Iterable[Listing]) -> bool:
        """Return whether the tiers of ``listings`` that answered, and are written to, are those that this machine
        remembers: each has the id, or was remembered without one and is empty.

        If so, its host memory is this run's, even if no tier has the record of the attempt.
        """
        remembered = {} if self.remembered is None else self.remembered.others
        written = {tier.name for tier in self._config.storage if not tier.read_only}

        def is_as_remembered(listing: Listing) -> bool:
            known, id = remembered.get(listing.tier), self.id_of(listing.tier)
            if known is None:
                return False
            return known.id == id if known.id else not (id or holds_any(listing))

        return all(is_as_remembered(x) for x in listings if x.tier in written and x.error is None)

    def _unlike(self, listings: Iterable[Listing]) -> Iterator[Listing]:
        """Yield the listings of tiers that do not have the id remembered of them, or have that of another tier of the
        configuration."""
        configured = {tier.name for tier in self._config.storage}
        for listing in listings:
            if listing.tier not in self._stores or listing.error is not None:
                continue
            if listing.tier in self._unread:  # it may be the right one
                continue
            known, id = self._remembers(listing.tier, surely=True), self.id_of(listing.tier)
            others = {name for _, name, each in self._entries() if each.id == id} & configured
            if (known and known.id != id) or (others and listing.tier not in others):
                yield listing

    def _why(self, name: str) -> str:
        place, run = self.places[name], self._config.run
        known = self._remembers(name, surely=True)
        is_moved = known is not None and not same_place(known.place, place)
        before = f" in {known.place}" if known and is_moved else " there"
        found = f"another id in {run}/{keys.TIER_NAME}" if name in self.records else "no checkpoint"
        return (
            f"{name}: {place} has {found}, and run {run!r} was{before} before. Is a file system not mounted there, or "
            "the path wrong? Mount it, or correct the path, and open again. If what is there now is meant: 'tierfall "
            f"forget {name}'"
        )

    def id_of(self, name: str) -> str | None:
        """Return a tier's id; None where it has none, or its record could not be read."""
        record = self.records.get(name)
        return None if record is None else record.id

    def is_shared(self, name: str) -> bool:
        """Return whether all nodes saw a tier's files at an earlier start, by any record."""
        record, known = self.records.get(name), self._remembers(name)
        return bool(record and record.shared) or bool(known and known.shared)

    def refuse_aliases(self) -> None:
        """Raise ConfigError where two tiers that are written have one id: they are one folder, by two mounts or two
        addresses, or one is a copy of the other. One copy would count as two."""
        seen: dict[str, str] = {}
        for name, record in self.records.items():
            if self._stores[name].read_only or (other := seen.setdefault(record.id, name)) == name:
                continue
            one, two = self._stores[other].place, self._stores[name].place
            raise ConfigError(
                f"open: tiers {other} ({one}) and {name} ({two}) have one id, and one copy would count as two: they "
                "are one folder, or one is a copy of the other. Give each a folder of its own, or leave one of them "
                f"out; of a copy, delete {self._config.run}/{keys.TIER_NAME}"
            )

    # Remembering -----------------------------------------------------------------------------------

    def write_records(
        self, attempt: Attempt, config: Config, *, owned: frozenset[str], leads: bool
    ) -> None:
        """Assign an id to each tier without one, and write what all tiers, and this machine, remember of the others.

        ``config`` has ``shared`` as the ranks have found it. This process writes the records of the tiers ``owned``,
        and that of this machine where it ``leads`` its ranks. For a further attempt of this process, that is noted on
        this machine. Raises ConfigError where two tiers are one.
        """
        if self._written is not None:
            self._write_memory(replace(self._written, attempt_id=attempt.id))
            return
        self._config = config
        # a tier that another rank cannot reach is excluded, though this rank has read its record
        self.records = {name: x for name, x in self.records.items() if name in self._stores}
        tiers = [tier for tier in config.storage if tier.name in self._stores]
        for tier in tiers:
            if tier.name not in self.records and not tier.read_only:
                self._assign_id(tier, attempt)
        self.refuse_aliases()
        known = {tier.name: self._known(tier) for tier in config.storage}
        there = {name: tier for name, tier in known.items() if tier is not None}
        for tier in tiers:
            if tier.name not in self.records:
                continue
            self._stores[tier.name].marker.expect(self.records[tier.name].id)
            if tier.name in owned:
                self._remember(tier, attempt, there)
        if leads:
            for tier in tiers:
                there.setdefault(tier.name, self._seen(tier, ""))
                if not shared_setting(tier):
                    with suppress(UnreachableError):
                        self._devices[tier.name] = self._device(tier)
            self._write_memory(
                TierRecord(
                    run=attempt.run,
                    id="",
                    shared=None,
                    wall_time_s=attempt.wall_time_s,
                    others=there,
                    attempt_id=attempt.id,
                    file=str(config.file or ""),
                    kept=str(config.peers.path) if config.peers is not None else "",
                )
            )

    def _assign_id(self, tier: FileTierConfig | ObjectTierConfig, attempt: Attempt) -> None:
        """Write a new id, the same on all ranks of a start that see the same files."""
        whose = "all" if shared_setting(tier) else attempt.node
        id = documents.sha256(f"{attempt.id} {tier.name} {whose}".encode())
        record = TierRecord(
            run=attempt.run,
            id=id.removeprefix("sha256:")[:32],
            shared=shared_setting(tier),
            wall_time_s=attempt.wall_time_s,
        )
        with _logging_refusal(tier.name):
            self.records[tier.name] = self._write(
                tier.name, record, again=tier.name in self._damaged
            )

    def _write(self, tier: str, record: TierRecord, *, again: bool) -> TierRecord:
        return self._ask(tier, lambda store: store.marker.write(record, again=again))

    def _known(self, tier: FileTierConfig | ObjectTierConfig) -> KnownTier | None:
        """Return what to remember of a tier; where it has no id, what was remembered before."""
        if (record := self.records.get(tier.name)) is not None:
            return self._seen(tier, record.id)
        return self._remembers(tier.name, surely=True) or self._remembers(tier.name)

    def _seen(self, tier: FileTierConfig | ObjectTierConfig, id: str) -> KnownTier:
        return KnownTier(id=id, place=self.places[tier.name], shared=shared_setting(tier))

    def _remember(
        self,
        tier: FileTierConfig | ObjectTierConfig,
        attempt: Attempt,
        there: Mapping[str, KnownTier],
    ) -> None:
        old = self.records[tier.name]
        others = {name: known for name, known in there.items() if name != tier.name}
        shared = old.shared if shared_setting(tier) is None else shared_setting(tier)
        if (old.others, old.shared) == (others, shared):
            return
        new = replace(old, others=others, shared=shared, wall_time_s=attempt.wall_time_s)
        with _logging_refusal(tier.name):
            self.records[tier.name] = self._write(tier.name, new, again=True)

    def _device(self, tier: FileTierConfig | ObjectTierConfig) -> int | None:
        return self._ask(tier.name, lambda _: device_of(tier.folder))

    def _write_memory(self, record: TierRecord) -> None:
        unfinished = self._memory.with_suffix(".new")
        try:
            unfinished.write_bytes(record.encode())
            unfinished.replace(self._memory)
            self._written = record
        except OSError as error:
            logger.warning("this machine does not remember the run's tiers: %s", error)

    def rewrite_memory(self) -> None:
        """Write this machine's record again, where it was removed since this process wrote it."""
        if self._written is not None and not self._memory.exists():
            self._write_memory(self._written)

    def forget_lost(self, names: Iterable[str], *, timeout_s: float) -> None:
        """Of the failing tiers ``names``, forget on this machine the ids of those that are of this node alone and whose
        files were deleted while this process wrote there. If they are empty at the next start, what is in memory is
        this run's."""
        if self._written is None or not self._memory.exists():
            return
        known = self._written.others
        places = {
            name: (known[name].place, self._devices[name])
            for name in names
            if name in known and not known[name].shared and self._devices.get(name) is not None
        }
        gone = find_emptied(places, self._config.run, timeout_s=timeout_s)
        if gone:
            others = {n: replace(tier, id="") if n in gone else tier for n, tier in known.items()}
            self._write_memory(replace(self._written, others=others))

    def forget(
        self, name: str, *, wall_time_s: float
    ) -> tuple[tuple[str, ...], dict[str, TierfallError]]:
        """Delete a tier from all records, also by other names of its place or its id; return where, and the error of
        each tier where that failed."""
        forgot: list[str] = []
        failed = {tier: error for tier, error in self._unread.items() if tier != name}
        place, id = self.places.get(name), self.id_of(name)
        names = {name} | {
            other
            for _, other, known in self._entries()
            if known.id == id or (place is not None and same_place(known.place, place))
        }
        for tier, record in self.records.items():
            if not names & record.others.keys():
                continue
            others = {n: known for n, known in record.others.items() if n not in names}
            try:
                new = replace(record, others=others, wall_time_s=wall_time_s)
                self._write(tier, new, again=True)
            except TierfallError as error:
                failed[tier] = error
            else:
                forgot.append(tier)
        if self.remembered is not None and names & self.remembered.others.keys():
            left = {n: known for n, known in self.remembered.others.items() if n not in names}
            self._write_memory(replace(self.remembered, others=left, wall_time_s=wall_time_s))
            forgot.append("this machine")
        return tuple(forgot), failed


@contextmanager
def _logging_refusal(tier: str) -> Iterator[None]:
    """Log that a tier does not accept its record at present: the next start tries again."""
    try:
        yield
    except (StorageFullError, UnreachableError, AccessDeniedError, LostWriteError) as error:
        logger.warning("open: tier %s did not accept its record: %s", tier, error)
