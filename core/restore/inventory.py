"""Inventory: what each rank finds on the tiers, as a message to the other ranks, and those of all ranks merged.

Pure. A rank has validated the commit records that it sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tierfall.core.format.catalog import FoundCopy, Listing, NotReadError, of_one_lineage
from tierfall.core.format.commit_files import unite_records
from tierfall.core.format.decided import DecidedList
from tierfall.core.ranks.messages import CheckpointKey, Message, error_of_rank
from tierfall.core.types.errors import IntegrityError, RanksError, TierfallError
from tierfall.core.types.lineage import AttemptStart, merge_starts
from tierfall.core.types.values import CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMessage(Message):
    """What a rank has found on one tier; see ``Listing``. ``decided`` are the names of the entries of its list. A copy
    without record and damage is one whose record is read later."""

    error: TierfallError | None
    damaged: tuple[TierfallError, ...]
    starts: tuple[AttemptStart, ...]
    copies: tuple[FoundCopy, ...]
    decided: tuple[str, ...]
    lags: bool
    attempts: tuple[int, ...] = ()
    unfinished: Mapping[CheckpointKey, int] = field(default_factory=dict)

    def listing_of(self, rank: int, tier: str) -> Listing:
        def with_damage(copy: FoundCopy) -> FoundCopy:
            damage = copy.damage and error_of_rank(copy.damage, rank)
            if copy.commit is None and damage is None:
                what = f"{tier}: rank {rank} has not read the record of {copy.id} yet"
                damage = NotReadError(what)
            return replace(copy, damage=damage)

        return Listing(
            tier=tier,
            copies=tuple(map(with_damage, self.copies)),
            starts=self.starts,
            decided=DecidedList.parse(self.decided),
            damaged=tuple(error_of_rank(damage, rank) for damage in self.damaged),
            lags=self.lags,
            attempts=self.attempts,
            unfinished=dict(self.unfinished),
            error=self.error and error_of_rank(self.error, rank),
        )


Inventory = Mapping[str, TierMessage]
"""What one rank has found, by tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedListings(Message):
    """What rank 0 has found on the tiers that it lists for all ranks."""

    tiers: Inventory


def describe(listings: Iterable[Listing], *, mine: Collection[str]) -> dict[str, TierMessage]:
    """Return the inventory of the tiers named in ``mine``."""

    def sent(copy: FoundCopy) -> FoundCopy:
        return replace(copy, damage=None) if isinstance(copy.damage, NotReadError) else copy

    return {
        listing.tier: TierMessage(
            error=listing.error,
            damaged=listing.damaged,
            starts=listing.starts,
            copies=tuple(map(sent, listing.copies)),
            decided=listing.decided.names,
            lags=listing.lags,
            attempts=listing.attempts,
            unfinished=listing.unfinished,
        )
        for listing in listings
        if listing.tier in mine
    }


def merge_ranks(inventories: Mapping[int, Inventory], order: Sequence[str]) -> tuple[Listing, ...]:
    """Merge the inventories of ranks into one listing per tier, in ``order``.

    Records of one checkpoint, each of its own node, become one that names the shards of all. A tier that some rank
    could not read, or that no rank has read, has an error, beside what other ranks found there.
    """
    merged = []
    for tier in order:
        found = {
            f"{tier} of rank {rank}": one[tier].listing_of(rank, tier)
            for rank, one in sorted(inventories.items())
            if tier in one
        }
        nobody = Listing(tier=tier, error=RanksError(f"no rank has looked at tier {tier}"))
        merged.append(unite_listings(tier, found) if found else nobody)
    return tuple(merged)


def unite_copies(found: Mapping[str, FoundCopy]) -> tuple[FoundCopy, list[TierfallError]]:
    """Merge the copies of one checkpoint that are in several places, by the names of the places; also return the damage
    that does not concern the merged copy. It could not be read if one of them could not."""
    first, *others = found.values()
    if first.commit is None and not others:
        return first, []
    copies = of_one_lineage(dict(found))
    damages = [copy.damage for copy in copies.values() if copy.damage and copy.damage.is_damage]
    unread = next((copy.unread for copy in copies.values() if copy.unread is not None), None)
    good = {where: copy for where, copy in copies.items() if copy.commit is not None}
    first = next(iter((good or copies).values()))
    first = replace(first, on_peers=any(copy.on_peers for copy in copies.values()))
    if not good:
        return replace(first, damage=unread or first.damage), damages[1:]
    sizes = {frozenset(copy.commit.files): copy.bytes for copy in good.values() if copy.commit}
    lacks = next((copy.damage for copy in good.values() if copy.damage is not None), None)
    damages = [damage for damage in damages if damage is not lacks]
    one = replace(first, bytes=sum(sizes.values()), damage=unread or lacks)
    try:
        commit = unite_records({where: copy.commit for where, copy in good.items() if copy.commit})
    except IntegrityError as error:
        return replace(one, commit=None, damage=error), damages
    return replace(one, commit=commit), damages


def unite_listings(tier: str, found: Mapping[str, Listing]) -> Listing:
    """Merge the listings of several places of one tier, by their names."""
    copies: dict[CheckpointId, dict[str, FoundCopy]] = {}
    for where, listing in found.items():
        for copy in listing.copies:
            copies.setdefault(copy.id, {})[where] = copy
    united = [unite_copies(by_place) for _, by_place in sorted(copies.items())]
    listings = found.values()
    damaged = [error for listing in listings for error in listing.damaged]
    return Listing(
        tier=tier,
        copies=tuple(copy for copy, _ in united),
        starts=tuple(merge_starts(chain.from_iterable(x.starts for x in listings)).values()),
        decided=DecidedList(entry for listing in listings for entry in listing.decided.entries),
        damaged=(*damaged, *(error for _, lost in united for error in lost)),
        lags=any(listing.lags for listing in listings),
        error=next((x.error for x in listings if x.error is not None), None),
    )


def unlisted(listings: Iterable[Listing], reported_by: Mapping[str, int]) -> dict[str, int]:
    """Return the stored tiers that this rank could not list, each with the rank that reports it."""
    return {x.tier: reported_by[x.tier] for x in listings if x.error and x.tier in reported_by}
