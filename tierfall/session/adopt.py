"""Adoption of what an earlier start sealed in the slots of this process: the check that it is this run's, and its entry
in the ledger.

An image of this rank becomes its copy again. Images of other ranks are handled in ``leftovers``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from tierfall.core.format.catalog import Listing
from tierfall.core.format.records import Commit, geometry, parse_manifest
from tierfall.core.scheduler.group.pins import note_on_peers
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.errors import ConfigError, IntegrityError, KeyNotFoundError, TierfallError
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.session.leftovers import AdoptedSlot, Leftovers
from tierfall.setup.attempts import ids_by_commits
from tierfall.tiers.host import HostTier, SealedImage
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")


def check_memory(
    hosts: Iterable[HostTier],
    stores: Mapping[str, StoredTier],
    listings: Iterable[Listing],
    *,
    run: str,
    may_be_unknown: bool,
) -> None:
    """Raise ConfigError for host memory of another run of the same name.

    ``listings`` are those of all tiers. Where all tiers answered, memory is refused too if no tier knows its attempt,
    or the attempt's record is damaged, unless it ``may_be_unknown``.
    """
    answered = [x for x in listings if x.tier in stores and x.error is None]
    is_known = len(answered) == len(stores) > 0 and not may_be_unknown
    for host in hosts:
        found: dict[tuple[int, str], list[CheckpointId]] = {}
        for id, image in host.images().items():
            found.setdefault((id.attempt, image.commit.lineage.attempt_id), []).append(id)
        for (number, attempt_id), ids in found.items():
            why = _why_foreign(number, attempt_id, stores, answered, is_known=is_known)
            if why is not None:
                steps = format_some([str(id) for id in ids])
                raise ConfigError(
                    f"open: {host.path} holds {steps} of another life of run {run!r}: {why}. To continue "
                    "from them, copy them to the tiers by 'tierfall drain', and start again. To begin anew, free that "
                    "memory by 'tierfall drain --discard', or choose another run name"
                )


def is_ours(stores: Mapping[str, StoredTier], listings: Iterable[Listing], commit: Commit) -> bool:
    """Return whether a tier that answered has the record of the attempt that a checkpoint was saved by."""
    answered = [x for x in listings if x.tier in stores and x.error is None]
    line = commit.lineage
    why = _why_foreign(line.checkpoint.attempt, line.attempt_id, stores, answered, is_known=True)
    return why is None


def _why_foreign(
    number: int,
    attempt_id: str,
    stores: Mapping[str, StoredTier],
    answered: Sequence[Listing],
    *,
    is_known: bool,
) -> str | None:
    """Return why memory of an attempt is not this run's; None where it is.

    Where a tier's record of the attempt is missing or damaged, the attempt's commit records name its id. A tier that
    was unreachable may know another attempt of that number.
    """
    damage: list[TierfallError] = []
    ids: dict[str, frozenset[str]] = {}
    for listing in answered:
        found = ids_by_commits(listing, number)
        if number in listing.attempts:
            try:
                found = frozenset({stores[listing.tier].fence.read(number).id})
            except KeyNotFoundError:
                logger.debug("%s: attempt %d was removed just now", listing.tier, number)
            except IntegrityError as error:
                damage.append(error)
        if found:
            ids[listing.tier] = found
    known = any(attempt_id in found for found in ids.values())
    if ids and not known:
        return f"tier {next(iter(ids))} knows that attempt by another id"
    for each in damage:
        whose = (
            "this run's, by other records"
            if known
            else "adopted only if it is known to be this run's"
        )
        logger.warning("open: %s; memory of attempt %d is %s", each, number, whose)
    if known or not is_known:
        return None
    if damage:
        return f"the record of attempt {number} is damaged, and no other names its id ({damage[0]})"
    return (
        f"no tier has a record of attempt {number}: they were emptied, are not mounted, or are new"
    )


def adopt_images(
    ledger: Ledger,
    images: Sequence[tuple[CheckpointId, SealedImage]],
    slots: list[AdoptedSlot],
    records: Iterable[Commit],
) -> Leftovers:
    """Enter the images in this process's slots into the ledger, and return those that are not this rank's.

    ``slots`` were adopted from ranks that no longer exist. ``records`` are the commit records of checkpoints whose
    images are all in memory, though not each at the rank that saved it.
    """
    host = ledger.host
    leftovers = Leftovers(ledger, slots)
    leftovers.enter(records, images)
    for id, image in images:
        entry = ledger.entries.get(id)
        if entry is not None and entry.shards is not None:
            continue
        if image.region.shard != ledger.shard or entry is None or host not in entry.states:
            leftovers.add_partial(id, image)  # a tier or a machine may come back that has the rest
        elif entry.region is not None:
            image.region.release()
        else:
            entry.region = image.region
            entry.adopted = True
            entry.manifest = parse_manifest(
                image.region.manifest(), what=f"{host}: manifest of {id}"
            )
            entry.geometry = geometry(entry.manifest)
            logger.info("open: %s in memory is adopted", id)
            _note_on_peers(ledger, entry)
    for entry in list(ledger.entries.values()):
        if host in entry.states and entry.region is None and entry.shards is None:
            entry.set_state(host, CopyState.ABSENT)
            ledger.forget_if_gone(entry)
    return leftovers


def _note_on_peers(ledger: Ledger, entry: LedgerEntry) -> None:
    """Note beside an image that was brought back from another node that peer memory has committed its checkpoint."""
    few = ledger.on_few_nodes
    if any(
        few.get((tier, entry.id), entry.state(tier) is CopyState.COMMITTED)
        for tier in ledger.peer_tiers
    ):
        note_on_peers(entry)


def note_overtaken(ledger: Ledger, late: Mapping[CheckpointId, frozenset[str]] | None) -> None:
    """Replace the tiers that checkpoints are still owed to, though newer ones are there, by what the records of all
    nodes say: a rank that goes by its own node's records would upload an image that no other rank follows up.

    None: no other rank was asked.
    """
    for entry in ledger.ordered() if late is not None else ():
        entry.overtaken = set((late or {}).get(entry.id, ()))
