"""What an earlier start sealed in the slots of this process: whether it is this run's, and its way into the ledger.

What this rank saved is its copy again; what is no image of a rank of now is ``inheriting``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from tierfall.core.catalog import Listing
from tierfall.core.errors import ConfigError
from tierfall.core.records import Commit, read_manifest
from tierfall.core.scheduler.ledger import Ledger
from tierfall.core.snapshot import geometry
from tierfall.core.values import CheckpointId, CopyState
from tierfall.inheriting import AdoptedSlot, Inheritance
from tierfall.tiers.host import HeldImage, HostTier
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")


def check_life(
    hosts: Iterable[HostTier],
    stores: Mapping[str, StoredTier],
    listings: Iterable[Listing],
    *,
    run: str,
    may_be_unknown: bool,
) -> None:
    """Refuse, by a ConfigError, host memory of another life of this run's name.

    ``listings`` are those of all tiers; memory of an attempt that none of them knows is refused where all answered,
    unless it ``may_be_unknown``.
    """
    answered = [x for x in listings if x.tier in stores and x.error is None]
    for host in hosts:
        for id, image in host.images().items():
            if (why := _why_foreign(image, stores, answered, may_be_unknown)) is not None:
                raise ConfigError(
                    f"open: {host.path} holds step {id} of another life of run {run!r}: {why}. If it is not "
                    "needed, remove that file; if it is, bring it to the tiers by 'tierfall drain'; or choose "
                    "another run name"
                )


def _why_foreign(
    image: HeldImage,
    stores: Mapping[str, StoredTier],
    answered: Sequence[Listing],
    may_be_unknown: bool,
) -> str | None:
    line = image.commit.line
    known = [x.tier for x in answered if line.checkpoint.attempt in x.attempts]
    ids = {tier: stores[tier].read_attempt(line.checkpoint.attempt).id for tier in known}
    if ids and line.attempt_id not in ids.values():
        return f"tier {known[0]} knows that attempt by another id"
    if len(answered) == len(stores) > 0 and not known and not may_be_unknown:
        return "no tier knows that attempt: they were emptied, or added"
    return None


def take_over(
    ledger: Ledger,
    images: Sequence[tuple[CheckpointId, HeldImage]],
    slots: list[AdoptedSlot],
    records: Iterable[Commit],
) -> Inheritance:
    """Put the images that lie in this process's slots into the ledger, and return what is not this rank's.

    ``slots`` are those of ranks that are gone; ``records`` those of what other ranks saved and all have together.
    """
    host = ledger.host
    inheritance = Inheritance(ledger, slots)
    inheritance.take(records, images)
    for id, image in images:
        entry = ledger.entries.get(id)
        if entry is not None and entry.parts is not None:
            continue
        if image.region.shard != ledger.shard:
            inheritance.keep(id, image)
        elif entry is None or host not in entry.states or entry.region is not None:
            logger.warning("open: %s in memory is let go: other ranks have none of it", id)
            image.region.release()
        else:
            entry.region = image.region
            entry.adopted = True
            entry.manifest = read_manifest(
                image.region.manifest(), what=f"{host}: manifest of {id}"
            )
            entry.geometry = geometry(entry.manifest)
            logger.info("open: %s in memory is adopted", id)
    for entry in list(ledger.entries.values()):
        if host in entry.states and entry.region is None and entry.parts is None:
            entry.set_state(host, CopyState.ABSENT)
            ledger.forget_if_gone(entry)
    return inheritance
