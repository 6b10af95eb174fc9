"""The identity of tiers: each tier of a run has an id, which the other tiers and this machine remember.

An empty folder is new, or was emptied, or is a mount point whose file system is missing. A shared tier whose id another
tier or this machine remembers counts as not mounted: it could not be read. A tier of one node may be empty at any
start, unless this machine remembers that its folder was on another device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tierfall.config import Config, FileTierConfig, ObjectTierConfig
from tierfall.core.format import documents
from tierfall.core.format.catalog import Listing
from tierfall.core.format.records import Attempt, KnownTier, TierRecord
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    IntegrityError,
    LostWriteError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.setup.places import (
    MEMORY_NAME,
    device_of,
    find_emptied,
    is_same_folder,
    read_memory,
    same_place,
    warn_of_copy,
)
from tierfall.setup.tiers import AskTier, ask_without_bound, holds_any, shared_setting
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")


class TierIdentities:
    """The ids of a run's tiers, by the records on the tiers and on this machine. ``records`` has that of each tier."""

    def __init__(
        self,
        config: Config,
        stores: Mapping[str, StoredTier],
        folder: Path,
        listings: Iterable[Listing] = (),
        ask: AskTier = ask_without_bound,
    ) -> None:
        """Read the records of ``stores``, except those with an error in ``listings``: these may never answer.
        ``folder`` is that of the run's host memory. ``ask`` makes every call to a tier."""
        self._config = config
        self._ask = ask
        self._opened = stores
        self.places = {name: store.place for name, store in stores.items()}
        self._silent = {listing.tier for listing in listings if listing.error is not None}
        self._memory = folder / MEMORY_NAME
        self.records: dict[str, TierRecord] = {}
        self._anew: set[str] = set()
        self._unread: dict[str, TierfallError] = {}
        for name, store in self._stores.items():
            try:
                if (record := ask(name, store.marker.read)) is not None:
                    self.records[name] = record
            except IntegrityError as error:
                logger.warning("tier %s: which tier it is cannot be read: %s", name, error)
                self._anew.add(name)
            except TierfallError as error:  # the listing has the same error, and that is logged
                logger.debug("tier %s: which tier it is was not read: %s", name, error)
                self._unread[name] = error
        self.remembered = read_memory(folder)
        self._written: TierRecord | None = None

    @property
    def _stores(self) -> dict[str, StoredTier]:
        return {name: x for name, x in self._opened.items() if name not in self._silent}

    def _remembers(self, name: str) -> KnownTier | None:
        """Return the newest memory of a tier by its name, or else of its place by a name that is configured no more."""
        known = self._newest_of(name)
        if known is None and name in self.places:
            known = self._newest_at(self.places[name])
        return known

    def _newest_of(self, name: str) -> KnownTier | None:
        naming = [r for r in self._witnesses(but=name) if name in r.others and r.others[name].id]
        newest = max(naming, key=lambda record: record.wall_time_s, default=None)
        if newest is None:
            return None
        known = newest.others[name]
        # only this machine remembers the device
        here = self.remembered.others.get(name) if self.remembered is not None else None
        if here is not None and same_place(here.place, known.place):
            return replace(known, device=here.device)
        return known

    def _newest_at(self, place: str) -> KnownTier | None:
        """Return the newest memory of a place, by names that the configuration no longer has."""
        names = [name for name, known in self._renamed().items() if same_place(known.place, place)]
        return next((known for name in names if (known := self._newest_of(name))), None)

    def _renamed(self) -> dict[str, KnownTier]:
        """Return what is remembered of names that the configuration does not have."""
        now = {tier.name for tier in self._config.stored}
        found = {name: known for w in self._witnesses() for name, known in w.others.items()}
        return {name: known for name, known in found.items() if name not in now}

    def _witnesses(self, *, but: str = "") -> list[TierRecord]:
        """Return all records that remember other tiers, this machine's too, without that of the tier ``but``."""
        found = [record for tier, record in self.records.items() if tier != but]
        return found if self.remembered is None else [*found, self.remembered]

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
        for tier in self._config.stored:
            try:
                why = self._why_missing(tier, found[tier.name])
            except UnreachableError as error:
                why = error
            if why is not None:
                missing[tier.name] = why
                self.records.pop(tier.name, None)  # that of another tier
        return missing

    def _why_missing(
        self, tier: FileTierConfig | ObjectTierConfig, listing: Listing
    ) -> UnreachableError | None:
        if tier.name not in self._stores or listing.error is not None:
            return None
        known, place = self._remembers(tier.name), self._stores[tier.name].place
        if tier.name in self.records:
            return self._why_another(tier, place)
        if holds_any(listing) or known is None:
            return None
        if not same_place(known.place, place):
            return self._why_moved(tier.name, place, known) if known.shared else None
        if not known.shared and known.device in (None, self._device(tier)):
            logger.warning("open: tier %s is empty, and was not before: is it mounted?", tier.name)
            return None
        return UnreachableError(
            f"{tier.name}: no file of run {self._config.run!r} is in {place}, where its files were before. To begin "
            f"anew there: 'tierfall forget {tier.name}'. Otherwise: is a file system not mounted there? Mount it, and "
            "open again"
        )

    def _why_moved(self, name: str, place: str, known: KnownTier) -> UnreachableError:
        return UnreachableError(
            f"{name}: no file of run {self._config.run!r} is in {place}; this tier was in {known.place}. To begin "
            f"anew there: 'tierfall forget {name}', or another run name. Otherwise: is a file system not mounted, or "
            "the path or address wrong? Mount it, or correct that, and open again"
        )

    def are_as_remembered(self, listings: tuple[Listing, ...]) -> bool:
        """Return whether the tiers are those that this machine remembers, apart from new empty ones.

        If so, its host memory is this run's, even where no tier has the record of the attempt.
        """
        found = {listing.tier: listing for listing in listings}
        remembered = {} if self.remembered is None else self.remembered.others
        for tier in self._config.stored:
            known, record = remembered.get(tier.name), self.records.get(tier.name)
            if tier.name not in self._stores:
                return False
            if known is None or not same_place(known.place, self._stores[tier.name].place):
                if record is not None or holds_any(found[tier.name]):
                    return False
                remembered = {n: k for n, k in remembered.items() if n != tier.name}
            elif known.id != (record.id if record is not None else ""):
                return False
        return any(tier.name in remembered for tier in self._config.stored)

    def _why_another(
        self, tier: FileTierConfig | ObjectTierConfig, place: str
    ) -> UnreachableError | None:
        """Return why a tier with another id has not replaced the remembered one on purpose: that one was shared, or on
        another device of this machine. None where it may have."""
        name, known = tier.name, self._remembers(tier.name)
        if known is None or known.id in ("", self.records[name].id):
            if known is not None and known.id:
                warn_of_copy(self._config.run, name, known, place)
            return None
        same_device = known.device in (None, self._device(tier))
        if not same_place(known.place, place) or (not known.shared and same_device):
            return None
        return UnreachableError(
            f"{name}: {place} is not the tier that was there before: it has another id in {self._config.run}/"
            f"{keys.TIER_NAME}. Is another file system mounted there, or none, or was its path changed? Mount the "
            f"right one, and open again. If it was replaced on purpose, run 'tierfall forget {name}'"
        )

    def id_of(self, name: str) -> str | None:
        """Return a tier's id; None where it has none, or its record could not be read."""
        record = self.records.get(name)
        return None if record is None else record.id

    def is_shared(self, name: str) -> bool:
        """Return whether all nodes saw a tier's files at an earlier start, by any record."""
        record, known = self.records.get(name), self._remembers(name)
        return bool(record and record.shared) or bool(known and known.shared)

    # Aliases and swapped tiers -----------------------------------------------------------------------

    def refuse_swapped(self) -> None:
        """Raise ConfigError where two configured tiers have changed places: the rules of one would apply to the
        checkpoints of the other."""
        was = {name: self._was_called(record) for name, record in self.records.items()}
        swapped = {
            name: of
            for name, of in was.items()
            if of not in (None, name) and of in self._stores and name in self._stores
            if was.get(of, "nothing") not in (None, of)  # else it is a copy of that tier's folder
        }
        if not swapped:
            return
        where = ", ".join(
            f"{name} is now in {self._stores[name].place}, which is tier {was}"
            for name, was in sorted(swapped.items())
        )
        both = " and ".join(f"'tierfall forget {n}'" for n in sorted({*swapped, *swapped.values()}))
        raise ConfigError(
            f"open: tiers have changed places: {where}, by the ids in {self._config.run}/{keys.TIER_NAME}. Rules of "
            f"one would delete checkpoints of the other: correct names, paths or addresses. If it is meant, run {both}"
        )

    def _was_called(self, record: TierRecord) -> str | None:
        """Return the name by which a tier of this id was remembered last."""
        found = [
            (witness.wall_time_s, name)
            for witness in self._witnesses()
            for name, known in witness.others.items()
            if known.id == record.id
        ]
        return max(found)[1] if found else None

    def refuse_aliases(self) -> dict[str, str]:
        """Raise ConfigError where two tiers are one folder, by two mounts or two addresses. Return the tiers where that
        is not known, since neither accepts a file, with why: if they were written to, one copy might count as two."""
        seen: dict[str, str] = {}
        doubtful: dict[str, str] = {}
        for name, record in list(self.records.items()):
            other = seen.setdefault(record.id, name)
            if other == name:
                continue
            one, two = self._stores[other], self._stores[name]
            try:
                is_one = self._are_one(one, two)
            except BackendError as error:
                doubtful[name] = (
                    f"it has the same id as {other}, and may be the same folder: {error}"
                )
                continue
            if is_one:
                raise ConfigError(
                    f"open: tiers {other} ({one.place}) and {name} ({two.place}) are one folder, and one copy would "
                    "count as two: give each a folder of its own, or leave one of them out"
                )
            if two.read_only:
                continue  # it keeps that id, since it is not written to
            del self.records[name]  # a copy of that folder gets an id of its own
            self._anew.add(name)
        return doubtful

    def _are_one(self, one: StoredTier, two: StoredTier) -> bool:
        """Return whether a file written through one tier is seen through the other. Raises BackendError where neither
        accepts a file, as on a full disk, and the paths do not settle it."""
        if is_same_folder(one.place, two.place):
            return True
        failure: BackendError | None = None
        for writer, reader in ((one, two), (two, one)):
            if writer.read_only:
                continue
            try:
                return self._ask(writer.name, partial(writer.marker.is_visible_to, reader.backend))
            except BackendError as error:
                failure = error
        if failure is None:
            raise AccessDeniedError("both are read-only")
        raise failure

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
        tiers = [tier for tier in config.stored if tier.name in self._stores]
        for tier in tiers:
            if tier.name not in self.records and not tier.read_only:
                self._assign_id(tier, attempt)
        self.refuse_aliases()
        known = {tier.name: self._known(tier) for tier in config.stored}
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
            self.records[tier.name] = self._write(tier.name, record, again=tier.name in self._anew)

    def _write(self, tier: str, record: TierRecord, *, again: bool) -> TierRecord:
        return self._ask(tier, partial(self._stores[tier].marker.write, record, again=again))

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
        return self._ask(tier.name, partial(device_of, tier.folder))

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
        """Delete a tier from all records, also by earlier names of its place; return where, and the error of each tier
        where that failed."""
        forgot: list[str] = []
        failed = {tier: error for tier, error in self._unread.items() if tier != name}
        names = {name}
        if (place := self.places.get(name)) is not None:
            names |= {n for n, known in self._renamed().items() if same_place(known.place, place)}
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
