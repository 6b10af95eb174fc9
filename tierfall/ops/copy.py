"""``tierfall copy``: copy one checkpoint to a tier that does not hold it.

The copy is made as a flush makes one: packed as the tier packs, committed last, behind the fence, with the marks that
the checkpoint has on other tiers. No rule decides about it; a note is given where retention will delete it again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierfall.config import Config
from tierfall.core.copies.verify import CopyVerifier
from tierfall.core.format.catalog import FoundCopy, KnownCheckpoint, Listing, merge
from tierfall.core.format.commit_files import same_checkpoint
from tierfall.core.format.records import Attempt, Commit
from tierfall.core.types.errors import (
    BackendError,
    CapacityError,
    IntegrityError,
    NotSupportedError,
    StepError,
    TierfallError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import Verdict
from tierfall.ops.commands import Progress, Watch, trained_elsewhere, view_of
from tierfall.ops.findings import NEWER
from tierfall.ops.reader import RunReader
from tierfall.ops.write_copy import (
    discard_unfinished,
    marks_of,
    open_source,
    open_writable,
    owned_reader,
    write_files,
    writing_attempt,
)
from tierfall.policies.retention import plan_retention
from tierfall.setup.tiers import lane_limits
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """The outcome of a copy. ``already``: the tier held a good one. ``sources`` are the bytes read, by tier."""

    id: CheckpointId
    tier: str
    already: bool = False
    bytes: int
    sources: Mapping[str, int]
    marks: tuple[str, ...]
    notes: tuple[str, ...]


def copy(
    config: Config, id: CheckpointId, tier: str, watch: Watch = lambda done, total: None
) -> CopyResult:
    """Copy a checkpoint to a stored tier; ``watch`` is called with the bytes of images done and in total.

    Raises LockError where a trainer of this machine is alive, FencedError where a newer attempt starts meanwhile,
    StepError where the checkpoint is marked for deletion, or the tier holds another one of that id, IntegrityError
    where no copy is good, or that on the tier is damaged, CapacityError and BackendError where the tier cannot store
    it. After an error nothing of the copy is left.
    """
    with owned_reader(config, "tierfall copy") as reader:
        listings = reader.list()
        checkpoint = next((c for c in merge(listings) if c.id == id), None)
        if checkpoint is None:
            raise StepError(f"copy: {id} was deleted just now")
        if checkpoint.tombstoned:
            raise StepError(f"copy: {id} is marked for deletion; nothing was copied")
        there = next(x for x in listings if x.tier == tier)
        if there.error is not None:
            raise there.error
        _check_alone(reader, listings, checkpoint, tier)
        counter = Progress(watch, checkpoint.commit.image_bytes if checkpoint.commit else 0)
        with open_writable(config, tier) as store:
            if tier in checkpoint.copies:
                return _already(reader, store, checkpoint, counter)
            return _copy(reader, listings, store, checkpoint, counter)


def _check_alone(
    reader: RunReader, listings: tuple[Listing, ...], checkpoint: KnownCheckpoint, tier: str
) -> None:
    """Raise StepError where the trainer of another node, if it is alive, may be writing the same copy now."""
    elsewhere = trained_elsewhere(listings, reader.stores)
    view = view_of(reader.config, merge(listings))
    owed = next(c.owed for c in view.checkpoints if c.id == checkpoint.id)
    if elsewhere is not None and tier in owed:
        raise StepError(
            f"copy: {tier} is owed {checkpoint.id}, and the trainer on {elsewhere.node}, where attempt "
            f"{elsewhere.number} was started, may be flushing it: run this on {elsewhere.node}; nothing was copied"
        )


def _already(
    reader: RunReader, store: StoredTier, checkpoint: KnownCheckpoint, counter: Progress
) -> CopyResult:
    """Verify the copy that the tier holds, and add the marks that it lacks."""
    id, tier = checkpoint.id, store.name
    found = checkpoint.copies[tier]
    with CopyVerifier(counter.add) as verifier:
        checked = verifier.check_stored(store, id)
    if checked.error is not None:
        raise checked.error
    if any(damage.newer for damage in checked.damage):
        raise NotSupportedError(f"copy: {tier} holds {id} already: {NEWER}")
    repair = f"tierfall verify {id} --tier {tier} --repair"
    if checked.damage or checked.commit is None:
        raise IntegrityError(f"copy: {tier} holds {id} already, damaged; to repair it: {repair}")
    if found.damage is not None or not _is_same(checkpoint.commit, checked.commit):
        raise StepError(
            f"copy: {tier} holds another checkpoint of the id {id} already, which is not changed: find out what wrote "
            "it, and move its folder away"
        )
    store.sync_commit(id)
    missing = [mark for mark in marks_of(reader, checkpoint) if mark.name not in found.marks]
    for mark in missing:
        store.add_mark(mark)
    return CopyResult(
        id=id,
        tier=tier,
        bytes=checked.bytes,
        already=True,
        sources={},
        marks=tuple(mark.name for mark in missing),
        notes=(),
    )


def _is_same(one: Commit | None, other: Commit) -> bool:
    return one is not None and same_checkpoint(one, other)


def _copy(
    reader: RunReader,
    listings: tuple[Listing, ...],
    store: StoredTier,
    checkpoint: KnownCheckpoint,
    counter: Progress,
) -> CopyResult:
    held = [listing.tier for listing in listings if listing.tier in checkpoint.copies]
    source = open_source(checkpoint, held, reader.opener())
    attempt = writing_attempt(reader, listings, source.commit.lineage, tier=store.name)
    there = next(listing for listing in listings if listing.tier == store.name)
    _check_room(reader.config, there, source.commit)
    marks = marks_of(reader, checkpoint)
    store.check_fence(attempt)
    try:
        discard_unfinished(store, reader.run, checkpoint.id)
        commit = write_files(store, lane_limits(store, reader.config), source, counter.add)
        store.delete_other_codecs(commit, attempt=attempt)  # of an unfinished copy
        store.commit(commit, attempt=attempt, marks=marks)
    except BaseException:
        _retract(store, checkpoint.id, attempt)
        raise
    after = tuple(
        _with_copy(listing, commit, frozenset(mark.name for mark in marks))
        if listing.tier == store.name
        else listing
        for listing in listings
    )
    return CopyResult(
        id=checkpoint.id,
        tier=store.name,
        bytes=commit.stored_bytes,
        sources=dict(source.tally.bytes),
        marks=tuple(mark.name for mark in marks),
        notes=(
            *(f"skipped: {f.what}: {f.reason}" for f in source.tally.fallbacks),
            *_name_latest(store, checkpoint, after),
            *_retention(reader.config, store.name, checkpoint.id, listings, after),
        ),
    )


def _check_room(config: Config, there: Listing, commit: Commit) -> None:
    """Raise CapacityError where the copy exceeds the tier's capacity: nothing is evicted for it."""
    capacity = next(t.capacity_bytes for t in config.stored if t.name == there.tier)
    if capacity is None:
        return
    used = there.used_bytes
    if used + commit.stored_bytes > capacity:
        raise CapacityError(
            f"copy to {there.tier}: it needs {format_size(commit.stored_bytes)}, of the capacity of "
            f"{format_size(capacity)} there is room for {format_size(max(0, capacity - used))}: raise the capacity, or "
            "make room by tierfall prune or tierfall rm"
        )


def _retract(store: StoredTier, id: CheckpointId, attempt: Attempt) -> None:
    """Remove the files of a copy that could not be committed, unless a newer attempt may be writing there."""
    try:
        if not store.is_committed(id):
            store.discard(id, attempt=attempt)
    except TierfallError as error:
        logger.warning(
            "%s: files of the unfinished copy of %s are left for now: %s", store.name, id, error
        )


def _with_copy(listing: Listing, commit: Commit, marks: frozenset[str]) -> Listing:
    found = FoundCopy(
        id=commit.lineage.checkpoint,
        state=CopyState.COMMITTED,
        bytes=commit.stored_bytes,
        commit=commit,
        marks=marks,
    )
    return replace(listing, copies=(*listing.copies, found))


def _name_latest(
    store: StoredTier, checkpoint: KnownCheckpoint, listings: tuple[Listing, ...]
) -> tuple[str, ...]:
    """Write ``latest`` where the tier holds nothing newer of the live lineage; return a note where that failed."""
    newer = [c for c in merge(listings) if store.name in c.copies and c.id > checkpoint.id]
    if checkpoint.abandoned or any(not c.abandoned for c in newer):
        return ()
    try:
        store.write_latest(checkpoint.id)
    except BackendError as error:  # the checkpoint is committed all the same
        return (f"{store.name}: could not write 'latest': {error}",)
    return ()


def _retention(
    config: Config,
    tier: str,
    id: CheckpointId,
    before: tuple[Listing, ...],
    after: tuple[Listing, ...],
) -> tuple[str, ...]:
    """Return a note for each copy, this one or others, that the rules of the tier will now delete."""
    drops = _drops(config, tier, after)
    notes = []
    if id in drops:
        notes.append(
            f"the rules of {tier} delete it again after the next commit there, or by prune: {drops[id]}; to keep it: "
            f"tierfall pin {id}"
        )
    displaced = [
        other for other in drops if other != id and other not in _drops(config, tier, before)
    ]
    for other in displaced:
        notes.append(
            f"beside {id}, the rules of {tier} delete {other} after the next commit there, or by prune: "
            f"{drops[other]}; to keep it: tierfall pin {other}"
        )
    return tuple(notes)


def _drops(config: Config, tier: str, listings: tuple[Listing, ...]) -> dict[CheckpointId, str]:
    """Return what retention deletes on a tier, each with its reason."""
    decisions = plan_retention(view_of(config, merge(listings)), tier)
    return {d.checkpoint: d.reason for d in decisions if d.verdict is Verdict.DROP}
