"""One run's tiers, opened for writing by one process: host memory, stored tiers, and their listings.

A start excludes tiers that some rank cannot reach, and makes those read-only that cannot be written to. This module
does not use the ledger.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tierfall.config import Config, FileTierConfig
from tierfall.core.copies.checkpoint_reader import OpenImage, image_opener
from tierfall.core.format.catalog import (
    FoundCopy,
    Listing,
    NotReadError,
    decided_in,
    merge,
)
from tierfall.core.format.records import Attempt
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.bounded_calls import BoundedCalls, CallResult
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    FencedError,
    KeyExistsError,
    LostWriteError,
    RanksError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId
from tierfall.setup.host_memory import NodeMemory, check_memory, is_ours, regions_in
from tierfall.setup.peers import PeerMemory
from tierfall.setup.places import seen_by_one
from tierfall.setup.tier_identity import TierIdentities
from tierfall.setup.tiers import (
    ANSWER_S,
    bounded_reads,
    call_tiers,
    check_written,
    close_stores,
    has_files,
    is_owner,
    list_all,
    list_together,
    listed_by_root,
    make_durable,
    mark_not_durable,
    open_stores,
    patience_s,
    start_patience_s,
)
from tierfall.tiers.kept_images import discard_kept
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
T = TypeVar("T")

OPENING = "open"
"""The name of the calls of all ranks in which the others learn what keeps a rank from starting."""


class OpenedTiers:
    """See the module.

    ``config`` changes during a start: a tier that cannot be written to becomes read-only, and ``shared`` is set for the
    folders that the ranks have probed. ``errors`` has, by name, why a tier is excluded; ``found_read_only`` has why a
    tier is read-only that is not configured so. ``emptied`` has why a tier of this node counts as not looked at until
    the other nodes have reported what they have of it. ``agrees``: the start and its restores must be consistent with
    other ranks, or with the images that other ranks of an earlier start left in memory.
    """

    def __init__(
        self,
        config: Config,
        *,
        ranks: Ranks | None = None,
        offline: bool = False,
        fresh: bool = False,
        peers: PeerMemory | None = None,
        command: str = "",
    ) -> None:
        """Open and list all tiers. An error leaves nothing open.

        ``offline``: for a command, which trains nothing. It has the memory of all ranks on this node, also that of an
        attempt which no tier has a record of; it creates no folder, and each call to a tier has a bound. ``fresh``:
        bring no image back, and accept that tiers of this node were emptied. A command that holds the run is waited
        for, for ``max_wait`` at most. ``command`` is the name of the command that opens them.
        """
        config = seen_by_one(config) if offline else config
        if not offline:
            check_written(config)
        self.config = config
        self.run = config.run
        self.ranks = ranks or Ranks.alone()
        self.node = socket.gethostname()
        self.found_read_only: dict[str, str] = {}
        self.emptied: dict[str, UnreachableError] = {}
        self._closed = False
        self._peers, self._doing = peers, command.removeprefix("tierfall ") or "open"
        self._calls = BoundedCalls()
        self.stores: dict[str, StoredTier] = {}
        self.memory = NodeMemory(
            config,
            ranks=self.ranks,
            adopts=offline or self.ranks.topology.is_leader,
            images=2 if peers is None else 3,  # one of them is a copy that peer memory counts on
            command=command,
        )
        try:
            self.stores, self.errors = open_stores(
                config, find_read_only=True, offline=offline, peers=peers
            )
            self.make_read_only(
                {name: s.read_only for name, s in self.stores.items() if s.read_only}
            )
            for name, problem in self.errors.items():
                _log_excluded(name, problem)
            self.agrees = self.ranks.many or any(
                shard != self.ranks.shard for _, shard in regions_in(self.memory.hosts)
            )
            self.listings = self.list_now(OPENING, newest=not offline)
            self.identities = TierIdentities(
                self.config, self.stores, self.memory.folder, self.listings, self._calls
            )
            self._check_identities(fresh=fresh)
            looked_at = [x for x in self.listings if x.tier not in self.emptied]
            check_memory(
                self.memory.hosts,
                self.stores,
                looked_at,
                {**self.errors, **self.emptied, **{x.tier: x.error for x in looked_at if x.error}},
                run=self.run,
                may_be_unknown=offline
                or (not fresh and self.identities.are_as_remembered(looked_at)),
            )
            if peers is not None and not fresh:
                known, wait_s = partial(is_ours, self.stores, self.listings), patience_s(config) / 2
                peers.recover_image(self.memory.host, self.listings, known, wait_s)
                self.listings = (self.memory.list(), *self.listings[1:])
        except BaseException:
            self.close(keep=True)
            raise
        for listing in self.listings:
            self._log_unreadable(listing)

    def _check_identities(self, *, fresh: bool) -> None:
        """Refuse two tiers with one id; exclude tiers that are empty or have another id. A ``fresh`` start accepts what
        is emptied on this node; with several nodes, ``agree_on_start`` decides about it."""
        self.identities.refuse_aliases()
        emptied = self.identities.emptied(self.listings)
        if not fresh and len(self.ranks.topology.nodes) > 1:
            self.emptied = emptied
        for name, error in self.identities.missing(self.listings).items():
            if name not in (emptied if fresh else self.emptied):
                self.exclude(name, error)

    def exclude(self, name: str, error: TierfallError) -> None:
        """Close a tier, and continue without it."""
        _log_excluded(name, error)
        close_stores({name: self.stores.pop(name)}, ANSWER_S)
        self.errors[name] = error
        self.listings = tuple(
            Listing(tier=name, error=error) if x.tier == name else x for x in self.listings
        )

    def _log_unreadable(self, listing: Listing) -> None:
        if listing.error is not None and listing.tier not in self.errors:
            logger.warning("open: tier %s could not be read: %s", listing.tier, listing.error)
        for damage in listing.damaged:
            if damage not in self.memory.problems:  # which are logged
                what = "damaged" if damage.is_damage else "that could not be read"
                logger.warning("open: tier %s holds something %s: %s", listing.tier, what, damage)
        for copy in listing.copies:
            if copy.damage is not None and not isinstance(copy.damage, NotReadError):
                what = "could not be read, and is kept" if copy.unread else "is damaged"
                why = str(copy.damage).removeprefix(f"{listing.tier}: ")
                logger.warning("open: %s on tier %s %s: %s", copy.id, listing.tier, what, why)
        if listing.lags:
            logger.warning(
                "open: the listing of tier %s, or 'latest' there, contradicts what is read by key: it lags behind, or "
                "what they name cannot be read. No rule deletes anything in this start",
                listing.tier,
            )

    def finds_nothing(self) -> bool:
        """Return whether every tier was listed and is the one that was there, and none has a checkpoint of this run."""
        if self.emptied or any(not each.is_damage for x in self.listings for each in x.problems):
            return False
        named = decided_in(self.listings).checkpoints
        if any(copy.id not in named for listing in self.listings for copy in listing.copies):
            return False  # nothing is decided about it: thousands need not be merged
        return all(checkpoint.deleted for checkpoint in merge(self.listings))

    # What a start changes ----------------------------------------------------------------------------

    def make_durable(self) -> None:
        """Make the copies on the tiers that this rank owns durable, before anything relies on them."""
        found = {x.tier: x for x in self.listings if x.tier in self._owned() & self.stores.keys()}
        stores = [self.stores[name] for name, x in found.items() if x.copies]
        for name, answer in self._call(stores, lambda s: make_durable(s, found[s.name])).items():
            match answer.error:
                case UnreachableError() as error:
                    found[name] = mark_not_durable(name, found[name], error)
                case _:
                    found[name] = answer.get()
        self.listings = tuple(found.get(x.tier, x) for x in self.listings)

    def _owned(self) -> set[str]:
        return {tier.name for tier in self.config.stored if is_owner(tier, self.ranks)}

    def exclude_all(self, tiers: Mapping[str, str]) -> None:
        """Exclude tiers that other ranks of this start cannot reach; ``tiers`` has rank and reason of each."""
        for name, why in tiers.items():
            if name not in self.errors:
                other = UnreachableError(f"{name}: other ranks cannot reach it: {why}")
                self.exclude(name, self.emptied.pop(name, other))

    def make_read_only(self, tiers: Mapping[str, str]) -> None:
        """Make tiers read-only that cannot be written to; ``tiers`` gives the reason of each.

        Raises ConfigError where no tier is left that can be written to.
        """
        new = [t.name for t in self.config.written if t.name in tiers]
        self.config = self.config.with_keys(new, read_only=True)
        check_written(self.config, "".join(f"; {tiers[name]}" for name in new), self._doing)
        for name in new:
            self.found_read_only[name] = tiers[name]
            logger.warning(
                "open: tier %s is read-only, for as long as this process runs: it is restored from, nothing is flushed "
                "to it or dropped there (%s). If that is meant, say read_only: true",
                name,
                tiers[name],
            )

    def set_shared(self, shared: Mapping[str, bool]) -> None:
        """Set ``shared`` of the folders that the ranks have probed."""
        folders = [tier.name for tier in self.config.stored if isinstance(tier, FileTierConfig)]
        for name in shared.keys() & folders:
            self.config = self.config.with_keys([name], shared=shared[name])

    # Attempts ----------------------------------------------------------------------------------------

    def claim_from(self, number: int) -> Attempt:
        """Claim the attempt of that number, or of the next free one: no two starts have the same number."""
        identity = secrets.token_hex(16)
        while True:
            attempt = Attempt(
                run=self.run,
                number=number,
                id=identity,
                node=self.node,
                pid=os.getpid(),
                wall_time_s=time.time(),
                node_losses=self._peers.placement.node_losses if self._peers else None,
            )
            if self.claim(attempt):
                return attempt
            number += 1

    def claim(self, attempt: Attempt) -> bool:
        """Write as ``attempt`` from now on; return False if a tier has a record of another attempt of its number.

        The record is written to the slowest tier first, which most other processes see.
        """
        answered = {x.tier for x in self.listings if x.error is None}
        written = [
            self.stores[t.name]
            for t in self.config.storage
            if t.name in self.stores and not t.read_only
        ]
        reachable = [store for store in reversed(written) if store.name in answered]
        if not self._write_record(attempt, reachable):
            return False
        self.identities.write_records(
            attempt,
            self.config,
            owned=frozenset(t.name for t in self.config.written if is_owner(t, self.ranks)),
            leads=self.ranks.topology.is_leader,
        )
        return True

    def _write_record(self, attempt: Attempt, stores: Iterable[StoredTier]) -> bool:
        """Write the attempt's record to each tier; return False if another process has its number.

        A tier that is full, does not answer or loses what is written receives the record before its first commit.
        """
        for store in stores:
            try:
                self._call([store], lambda store: store.fence.create(attempt))[store.name].get()
            except KeyExistsError:
                return False
            except (StorageFullError, UnreachableError, LostWriteError) as error:
                logger.warning(
                    "open: tier %s did not accept the attempt's record, which comes before its first copy there: %s",
                    store.name,
                    error,
                )
            except AccessDeniedError as error:
                if not has_files(next(x for x in self.listings if x.tier == store.name)):
                    raise
                self.make_read_only({store.name: str(error)})
        return True

    def check_fence(self, attempt: Attempt) -> None:
        """Raise FencedError if a tier has a record of a newer attempt than ``attempt`` of this process."""
        written = [tier.name for tier in self.config.storage if not tier.read_only]
        asked = [store for name, store in self.stores.items() if name in written]
        for name, answer in self._call(asked, lambda store: store.fence.check(attempt)).items():
            try:
                answer.get()
            except (StorageFullError, UnreachableError) as error:
                logger.warning("tier %s was not asked for newer attempts: %s", name, error)

    def discard_unfinished(self, attempt: Attempt) -> bool:
        """Delete, as ``attempt``, unfinished files of earlier starts on the tiers that this rank owns, before any rank
        writes. Return whether each of these tiers can be written to now.

        A deletion that does not finish in time may continue. It does not delete files of this process's writers, but it
        may delete those of other ranks: with several ranks the tier is excluded, and no rank may write to it.
        """
        own = [t.name for t in self.config.written if is_owner(t, self.ranks)]
        stores = [self.stores[name] for name in own if name in self.stores]
        answers = self._call(stores, lambda store: store.discard_unfinished(attempt=attempt))
        for name, answer in answers.items():
            match answer.error:
                case UnreachableError() as error if self.ranks.many:
                    self.exclude(name, error)
                case BackendError() | FencedError() as error:
                    logger.warning("open: tier %s: leftovers stay: %s", name, error)
                case _:
                    answer.get()
        return answers.keys() <= self.stores.keys()

    def _call(
        self,
        stores: Iterable[StoredTier],
        call: Callable[[StoredTier], T],
    ) -> dict[str, CallResult[T]]:
        """Call these tiers concurrently. A tier that does not answer within its bound has an UnreachableError."""
        return call_tiers(stores, call, self.config, self._calls)

    # Reading -----------------------------------------------------------------------------------------

    def list_now(self, call: str = "restore", *, newest: bool = False) -> tuple[Listing, ...]:
        """List every tier; of memory, the slots of this process. ``newest`` is as in ``StoredTier.list``. Rank 0 lists
        the tiers that all nodes see, and tells the others, in a ``call`` of all ranks."""
        list_here = partial(
            list_all,
            self.config,
            self.memory.list(),
            self.stores,
            self.errors,
            self._calls,
            newest=newest,
        )
        # In a restore, rank 0 has listed already when it waits for the others, and these wait for its listing.
        has_listed = self.ranks.topology.is_root and call != OPENING
        timeout_s = None if has_listed else start_patience_s(self.config)
        return list_together(self.config, self.ranks, list_here, call, timeout_s=timeout_s)

    def _listed_by_root(self) -> list[str]:
        """Return the stored tiers that rank 0 lists for this rank; none on rank 0."""
        return [] if self.ranks.topology.is_root else listed_by_root(self.config, self.ranks)

    @property
    def is_partial(self) -> bool:
        """Whether the start has left commit records of old checkpoints to be read later, by ``read_rest``."""
        return any(listing.is_partial for listing in self.listings)

    def read_rest(self) -> None:
        """Read the commit records that the start has left for later; for another thread than that of the start. Those
        on a tier that does not answer now count as such that could not be read (see ``with_rest``): they stay until the
        next start. What rank 0 reads for all ranks has an error until they agree."""
        own, of_root = self._owned(), self._listed_by_root()
        answers = call_tiers(
            [self.stores[x.tier] for x in self.listings if x.is_partial and x.tier not in of_root],
            lambda s: make_durable(s, s.list()) if s.name in own else s.list(),
            self.config,
            BoundedCalls(),
            doing="list",
        )

        def read(listing: Listing) -> Listing:
            if listing.tier in of_root and listing.is_partial:
                return replace(listing, error=RanksError(f"{listing.tier}: rank 0 lists it"))
            if listing.tier not in answers:
                return listing
            try:
                found = answers[listing.tier].get()
            except TierfallError as error:
                found = Listing(tier=listing.tier, error=error)
            if found.error is None:
                later = {x.id for x in listing.copies if isinstance(x.damage, NotReadError)}
                new = tuple(copy for copy in found.copies if copy.id in later)
                lags = found.lags and not listing.lags
                self._log_unreadable(replace(found, copies=new, damaged=(), lags=lags))
            return with_rest(listing, found, is_own=listing.tier in own)

        self.listings = tuple(read(listing) for listing in self.listings)

    def look(
        self, id: CheckpointId, names: Iterable[str], timeout_s: float = math.inf
    ) -> dict[str, CallResult[FoundCopy | None]]:
        """List one checkpoint on these stored tiers, within ``timeout_s`` seconds; None if it has no commit record
        there."""
        return call_tiers(
            (self.stores[name] for name in names),
            lambda store: store.find_copy(id),
            self.config,
            self._calls,
            doing="look",
            timeout_s=timeout_s,
        )

    def opener(self) -> OpenImage:
        """Return a function that opens images, those in the memory of this process included; on stored tiers, reads are
        bounded."""
        stores = {name: bounded_reads(store, self.config) for name, store in self.stores.items()}
        return image_opener(stores, self.memory.name, regions_in(self.memory.hosts))

    # Memory ------------------------------------------------------------------------------------------

    def hold_memory(self) -> bool:
        """Lock this run's place in memory again if the files there were removed; return whether it is held."""
        is_held = self.memory.hold_place()
        self.identities.rewrite_memory()
        return is_held

    def discard_memory(self) -> None:
        """Delete what this process holds in the memory of this node, and what it keeps for other nodes, which nobody
        needs any more: the process ends now."""
        for host in self.memory.hosts:
            host.discard()
        if self.config.peers is not None and self.ranks.topology.is_leader:
            discard_kept(self.config.peers.path / self.run)

    def close(self, *, keep: bool, timeout_s: float = ANSWER_S) -> None:
        """Close all tiers within ``timeout_s`` seconds, and release the run's lock; may be called twice. ``keep``: host
        memory is not deleted."""
        if self._closed:
            return
        self._closed = True
        try:
            close_stores(self.stores, timeout_s)
        finally:
            self.memory.close(keep=keep)


def with_rest(listing: Listing, found: Listing, *, is_own: bool) -> Listing:
    """Return a ``listing`` of which commit records were left for later with those that are ``found`` now. If the tier
    could not be listed, and this rank owns it, they count as such that could not be read; else its owner tells."""
    if found.error is None or not is_own:
        return replace(found, lags=found.lags or listing.lags)
    why = f"{listing.tier}: the commit records of old checkpoints could not be read: {found.error}"
    logger.warning("open: %s. They are kept, and the next start reads them", why)
    copies = (
        replace(x, damage=UnreachableError(why)) if isinstance(x.damage, NotReadError) else x
        for x in listing.copies
    )
    return replace(listing, copies=tuple(copies))


def _log_excluded(name: str, error: TierfallError) -> None:
    logger.warning(
        "open: goes on without tier %s, for as long as this process runs: %s", name, error
    )
