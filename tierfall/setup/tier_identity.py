"""The identity of tiers: each tier of a run but peer memory has an id, which the other tiers and this machine remember.

A tier that is empty where the run was before, or has another id, counts as one that could not be looked at: a file
system may not be mounted there. A tier of one node may be empty, or another one, at any start, unless this machine
remembers that its folder was on another device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    @property
    def _stores(self) -> dict[str, StoredTier]:
        names = {tier.name for tier in self._config.storage} - self._silent
        return {name: x for name, x in self._opened.items() if name in names}

    def _ask(self, tier: str, call: Callable[[StoredTier], T]) -> T:
        store = self._opened[tier]
        if self._calls is None:
            return call(store)
        return call_tiers([store], call, self._config, self._calls)[tier].get()

    def _entries(self, *, but: str = "") -> list[tuple[float, str, KnownTier]]:
        """Return what the records, without that of the tier ``but``, say of other tiers: the time of the record, a
        tier's name, and what is known of it. This machine's come first."""
        found = [record for tier, record in self.records.items() if tier != but]
        records = found if self.remembered is None else [self.remembered, *found]
        return [(r.wall_time_s, name, known) for r in records for name, known in r.others.items()]

    def _remembers(self, name: str) -> KnownTier | None:
        """Return the newest memory of a tier by its name, or else of its place."""
        entries = [entry for entry in self._entries(but=name) if entry[2].id]
        found = [entry for entry in entries if entry[1] == name]
        if not found and (place := self.places.get(name)) is not None:
            found = [entry for entry in entries if same_place(entry[2].place, place)]
        if not found:
            return None
        _, named, known = max(found, key=lambda entry: entry[0])
        # only this machine remembers the device
        here = self.remembered.others.get(named) if self.remembered is not None else None
        if here is not None and same_place(here.place, known.place):
            return replace(known, device=here.device)
        return known

    def is_remembered(self, name: str) -> bool:
        """Return whether another tier, or this machine, remembers a tier; this machine also one without an id, whose
        files were deleted."""
        here = {} if self.remembered is None else self.remembered.others
        return name in here or self._remembers(name) is not None

    # What is missing -------------------------------------------------------------------------------

    def missing(self, listings: tuple[Listing, ...]) -> dict[str, UnreachableError]:
        """Return the tiers that are empty but should not be, and those that another tier has replaced, with why."""
        found = {listing.tier: listing for listing in listings}
        missing: dict[str, UnreachableError] = {}
        for tier in self._config.storage:
            if tier.name not in self._stores or found[tier.name].error is not None:
                continue
            try:
                why = self._why_missing(tier, found[tier.name])
            except UnreachableError as error:
                why = error
            if why is not None:
                missing[tier.name] = why
        for name in missing:
            self.records.pop(name, None)  # that of another tier
        return missing

    def _why_missing(
        self, tier: FileTierConfig | ObjectTierConfig, listing: Listing
    ) -> UnreachableError | None:
        name, place, run = tier.name, self._stores[tier.name].place, self._config.run
        record, known = self.records.get(name), self._remembers(name)
        if record is not None and (other := self._known_as(record.id)) not in (None, name):
            what = f"has the id of tier {other} in {run}/{keys.TIER_NAME}"
        elif known is None or (holds_any(listing) if record is None else record.id == known.id):
            return None
        else:
            is_moved = not same_place(known.place, place)
            if not known.shared and (is_moved or known.device in (None, self._device(tier))):
                if record is None and not is_moved:
                    text = "open: tier %s is empty, and was not before: is it mounted?"
                    logger.warning(text, name)
                return None
            found = (
                f"no file of run {run!r}"
                if record is None
                else f"another id in {run}/{keys.TIER_NAME}"
            )
            what = f"has {found}, and the tier was {f'in {known.place}' if is_moved else 'there'} before"
        return UnreachableError(
            f"{name}: {place} {what}. Is a file system not mounted there, or the path wrong? Mount it, or correct the "
            f"path, and open again. If what is there now is meant: 'tierfall forget {name}'"
        )

    def _known_as(self, id: str) -> str | None:
        """Return the configured name that the tier of an id was remembered by last."""
        names = {tier.name for tier in self._config.storage}
        found = [(at_s, name) for at_s, name, known in self._entries() if known.id == id]
        name = max(found)[1] if found else None
        return name if name in names else None

    def are_as_remembered(self, listings: tuple[Listing, ...]) -> bool:
        """Return whether the tiers are those that this machine remembers, apart from new empty ones.

        If so, its host memory is this run's, even where no tier has the record of the attempt.
        """
        found = {listing.tier: listing for listing in listings}
        remembered = {} if self.remembered is None else self.remembered.others
        names = [tier.name for tier in self._config.storage]

        def is_as_remembered(name: str) -> bool:
            id = self.id_of(name) or ""
            if name in remembered:
                return remembered[name].id == id
            return not (id or holds_any(found[name]))

        return any(name in remembered for name in names) and all(
            name in self._stores and is_as_remembered(name) for name in names
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
        and that of this machine where it ``leads`` its ranks. Raises ConfigError where two tiers are one.
        """
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
                with suppress(UnreachableError):  # nothing is remembered of it then
                    there.setdefault(tier.name, self._seen(tier, ""))
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

    def note_attempt(self, attempt: Attempt) -> None:
        """Note a further attempt of this process on this machine."""
        if self._written is not None:
            self._write_memory(replace(self._written, attempt_id=attempt.id))

    def _assign_id(self, tier: FileTierConfig | ObjectTierConfig, attempt: Attempt) -> None:
        """Write a new id, the same on all ranks of a start that see the same files."""
        whose = "all" if shared_setting(tier) else attempt.node if tier.folder else "all"
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
        """Return what to remember of a tier; where it does not answer, what was remembered before."""
        with suppress(UnreachableError):
            if (record := self.records.get(tier.name)) is not None:
                return self._seen(tier, record.id)
        return self._remembers(tier.name)

    def _seen(self, tier: FileTierConfig | ObjectTierConfig, id: str) -> KnownTier:
        place, device = self._stores[tier.name].place, self._device(tier)
        return KnownTier(id=id, place=place, shared=shared_setting(tier), device=device)

    def _device(self, tier: FileTierConfig | ObjectTierConfig) -> int | None:
        return self._ask(tier.name, lambda _: device_of(tier.folder))

    def _remember(
        self,
        tier: FileTierConfig | ObjectTierConfig,
        attempt: Attempt,
        there: Mapping[str, KnownTier],
    ) -> None:
        old = self.records[tier.name]
        others = {n: replace(t, device=None) for n, t in there.items() if n != tier.name}
        shared = old.shared if shared_setting(tier) is None else shared_setting(tier)
        if (old.others, old.shared) == (others, shared):
            return
        new = replace(old, others=others, shared=shared, wall_time_s=attempt.wall_time_s)
        with _logging_refusal(tier.name):
            self.records[tier.name] = self._write(tier.name, new, again=True)

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

    def forget_emptied(self, names: Iterable[str], *, timeout_s: float) -> None:
        """Of the tiers ``names``, which fail, note on this machine those whose files were deleted while this process
        wrote there: the next start knows by that, that what is in memory is this run's."""
        if self._written is None:
            return
        known = self._written.others
        gone = find_emptied(known, names, self._config.run, timeout_s=timeout_s)
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
