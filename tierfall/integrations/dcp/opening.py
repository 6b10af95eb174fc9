"""The checkpoint that ``dcp.load`` reads: chosen by all ranks together, with its shards merged."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import PASSABLE
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.image.merge import MergedHeader, merge_headers
from tierfall.core.restore.agreement import make_barrier
from tierfall.core.restore.candidates import RestoreRequest, unread_text
from tierfall.core.restore.exchange.gloo import LostError
from tierfall.core.restore.reshard import ResizeRules, merge_images
from tierfall.core.tensor_index.as_header import merge_with_index
from tierfall.core.tensor_index.index import Index
from tierfall.core.tensor_index.store import read_named_index
from tierfall.core.types import keys
from tierfall.core.types.errors import NotSupportedError, RestoreError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.integrations.dcp.fqns import DcpEntries
from tierfall.run.open_run import OpenRun
from tierfall.session.session import Session

logger = logging.getLogger("tierfall")


class DamagedError(RestoreError):
    """The checkpoint that was named is damaged in every copy, so an older one may be loaded. All ranks raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCheckpoint:
    """A checkpoint whose headers have been read."""

    checkpoint: KnownCheckpoint
    parts: CheckpointReader
    entries: DcpEntries
    world_size: int


def open_checkpoint(
    run: OpenRun, request: RestoreRequest, *, values_of: int | None
) -> OpenedCheckpoint:
    """Open the newest checkpoint with good headers, the same on all ranks. ``values_of`` is the rank whose values are
    loaded if another number of ranks saved.

    Raises RestoreError where there is none, none can be read, or the newest is temporarily unreachable.
    """
    listings, tally = run.session.list_now(), run.session.new_tally()
    candidates = run.restorer.candidates(listings, request, tally)
    ranks = run.session.ranks
    exchange_failures = make_barrier(ranks, timeout_s=run.restorer.patience_s)

    left = list(candidates)
    while left:
        checkpoint = left.pop(0)
        opened: OpenedCheckpoint | None = None
        error: Exception | None = None
        parts = _parts(run, checkpoint, listings, request, tally)
        try:
            opened = _open(run, parts, values_of)
        except Exception as failure:
            error = _error_to_raise(failure, checkpoint, request)
            if isinstance(failure, PASSABLE) and not failure.is_damage:
                tally.found_unread(checkpoint.id)
            if (unsent := parts.give_up(failure)) is not None:
                raise unsent from failure
        failed = exchange_failures(checkpoint, error)
        if error is not None and not isinstance(error, (*PASSABLE, LostError)):
            raise error
        if failed is None:
            assert opened is not None
            return opened
        reason = ranks.topology.name_rank(failed.rank, failed.message)
        if request.step is not None or failed.permanent:
            kind = RestoreError if failed.permanent else DamagedError
            raise kind(f"{request.operation} of {checkpoint.id}: {reason}") from error
        tally.add_skipped(f"step {checkpoint.id}", reason, checkpoint.id)
        logger.error("%s: step %s is skipped: %s", request.operation, checkpoint.id, reason)
        request = replace(request, without=request.without | {checkpoint.id})
        listings = run.session.list_now()  # it may have been deleted meanwhile
        left = run.restorer.candidates(listings, request, tally)
    raise RestoreError(
        f"{request.operation}: run {run.session.run} holds no checkpoint that can be read"
        + "".join(f"; {fallback.what}: {fallback.reason}" for fallback in tally.fallbacks[-8:])
    )


def hold(run: OpenRun, id: CheckpointId, *, owner: object) -> Callable[[], object]:
    """Protect a checkpoint's copies on stored tiers from retention and eviction; return a function that ends this, as
    the end of ``owner`` does."""
    session = run.session
    session.call(lambda: session.coordinator.ledger.reading.update([id]))
    release = weakref.finalize(owner, _release, session, id)
    release.atexit = False
    return release


def _release(session: Session, id: CheckpointId) -> None:
    ledger = session.coordinator.ledger

    def end() -> None:
        ledger.reading -= Counter([id])

    session.call_soon(end)


def _error_to_raise(
    error: Exception, checkpoint: KnownCheckpoint, request: RestoreRequest
) -> Exception:
    """Return the error that ends the load if a copy could not be read: it must not be skipped like a damaged one."""
    if isinstance(error, LostError) or not isinstance(error, PASSABLE) or error.is_damage:
        return error
    raised = RestoreError(unread_text(f"{request.operation} of {checkpoint.id}", error, request))
    raised.__cause__ = error
    return raised


def _parts(
    run: OpenRun,
    checkpoint: KnownCheckpoint,
    listings: Sequence[Listing],
    request: RestoreRequest,
    tally: ReadTally,
) -> CheckpointReader:
    """Return a reader of the images of a checkpoint, which ranks exchange if they can, as in
    ``Checkpointer.restore``."""
    held = [listing.tier for listing in listings if listing.tier in checkpoint.copies]
    tiers = [tier for tier in held if request.tier in (None, tier)]
    exchange = run.restorer.exchange()
    made = (
        checkpoint,
        tiers,
        run.restorer.opener(),
        tally,
        run.session.ring,
        None,
        run.restorer.nowhere,
    )
    return CheckpointReader(*made) if exchange is None else exchange.reader(*made)


def _open(run: OpenRun, parts: CheckpointReader, values_of: int | None) -> OpenedCheckpoint:
    shard = run.session.ranks.shard
    world_size = parts.world_size(shard.world_size)
    own = shard.rank if world_size == shard.world_size else values_of
    entries: DcpEntries | None = None
    if own is not None and world_size > 1:
        entries = _by_index(run, parts, Shard(own, world_size))
    if entries is None:
        entries = DcpEntries(
            merge_images(parts, world_size, shard.rank, ResizeRules(values_of=own))
        )
    return OpenedCheckpoint(
        checkpoint=parts.checkpoint, parts=parts, entries=entries, world_size=world_size
    )


def _by_index(run: OpenRun, parts: CheckpointReader, own: Shard) -> DcpEntries | None:
    """Return the entries of a checkpoint from the header of one rank's image and the merged index; None unless all
    ranks can do so.

    For a name that these lack, this rank reads the headers of all ranks by itself.
    """
    merged: MergedHeader | None = None
    what = f"{parts.checkpoint.id} of {own.world_size} ranks"
    ours = run.session.ranks.shard
    try:
        if (index := _read_index(run, parts)) is not None:
            # Together the ranks check that all images exist.
            for rank in range(ours.rank, own.world_size, ours.world_size):
                parts.find(Shard(rank, own.world_size))
            merged = merge_with_index(parts.header_here(own), own.rank, index, what=what)
    except (*PASSABLE, NotSupportedError) as error:
        logger.warning(
            "dcp.load: the merged index cannot be used, so all headers are read: %s", error
        )
    slower_s = run.restorer.patience_s
    have = merged is not None
    ranks = run.session.ranks
    if not ranks.agree("dcp.load: index", have, _all_have_it, bool, timeout_s=slower_s):
        return None
    assert merged is not None, "all have it"

    def of_all() -> MergedHeader:
        return merge_headers(parts.headers_here(own.world_size), what=what, own=own.rank)

    return DcpEntries(merged, of_all)


def _all_have_it(found: dict[int, bool]) -> bool:
    return all(found.values())


def _read_index(run: OpenRun, parts: CheckpointReader) -> Index | None:
    """Read the merged index from the first tier that has it."""
    for tier in parts.tiers:
        commit, store = parts.checkpoint.copies[tier].commit, run.session.stores.get(tier)
        if store is not None and commit is not None and commit.file(keys.INDEX_NAME) is not None:
            return read_named_index(store, commit)
    return None
