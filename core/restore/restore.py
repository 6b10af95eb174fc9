"""Restoring: the newest step that can be restored, from the fastest copies that are good, or the reason why not.

"Nothing there" is said only when every tier answered. A copy that is damaged gives way to the next one, a step that is
damaged everywhere to the next older step, and each such turn stands in the report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from tierfall.core import names
from tierfall.core.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.errors import (
    BackendError,
    IntegrityError,
    NotSupportedError,
    RestoreError,
    TierfallError,
)
from tierfall.core.image import Fill, ImageHeader, read_header
from tierfall.core.records import Commit, Manifest
from tierfall.core.restore.images import Image, checked_manifest, unpacked
from tierfall.core.restore.reader import ChunkReader, Tally, count_threads, read_fills
from tierfall.core.restore.ring import Ring
from tierfall.core.values import CheckpointId, Shard

logger = logging.getLogger("tierfall")


class Plan(Protocol):
    """Where the bytes of an image go."""

    @property
    def fills(self) -> Sequence[Fill]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to restore: by default the newest step of the live line. ``tier`` names the only tier to read from;
    ``operation`` and ``advice`` are words for messages."""

    step: int | None = None
    attempt: int | None = None
    tier: str | None = None
    ignore_unreachable: bool = False
    operation: str = "restore"
    advice: str = "or pass unreachable='ignore' to go on without it"


OpenImage = Callable[[str, CheckpointId, Shard], Image]
MakePlan = Callable[[ImageHeader], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was read: which checkpoint, the plan whose targets are filled, and from where."""

    checkpoint: KnownCheckpoint
    plan: Plan
    tally: Tally


def restore(
    listings: Sequence[Listing],
    request: Request,
    *,
    open_image: OpenImage,
    make_plan: MakePlan,
    shard: Shard,
    ring: Ring | None = None,
    chunks_max: int | None = None,
) -> Restored | None:
    """Fill the targets of a plan from the newest restorable checkpoint; ``listings`` stand fastest first.

    Stored chunks are read through ``ring``, or through buffers of their own; beside the targets no more host memory is
    taken than ``chunks_max`` chunks need, where that is given. However it ends, no copy onto a device is under way.

    Returns None only when every tier answered and none holds a checkpoint. Raises RestoreError otherwise, with all that
    was tried; its text says when targets are half filled.
    """
    tally = Tally()
    _look(listings, request, tally)
    candidates = _candidates(listings, request, tally)
    if not candidates:
        _check_nothing(listings, request, tally)
        return None
    touched = False
    for checkpoint in candidates:
        try:
            tiers = _tiers(checkpoint, request, listings)
            images, manifest = find_images(checkpoint, tiers, open_image, shard, tally)
            with _Job(images, manifest, tally, ring, chunks_max) as job:
                plan = _plan(make_plan, job.read_header(), touched)
                touched = True
                job.fill(plan)
            return Restored(checkpoint=checkpoint, plan=plan, tally=tally)
        except (IntegrityError, BackendError, NotSupportedError) as error:
            if getattr(error, "retryable", False) and not request.ignore_unreachable:
                raise RestoreError(
                    f"{request.operation} of {checkpoint.id}: a copy could not be read, and no other is good: {error}. "
                    f"Try again, {request.advice}" + _half(touched)
                ) from error
            tally.passed_over(f"step {checkpoint.id}", error)
            logger.error("restore: step %s is passed over: %s", checkpoint.id, error)
            if request.step is not None:
                raise RestoreError(
                    f"{request.operation} of {checkpoint.id}: {error}" + _half(touched)
                ) from error
        except BaseException as error:  # out of memory, Ctrl-C: what was filled so far is told
            if not touched or isinstance(error, RestoreError):
                raise
            what = f"{request.operation} of {checkpoint.id}: {error!r}" + _half(touched)
            if isinstance(error, Exception):
                raise RestoreError(what) from error
            error.add_note(what)
            raise
    raise RestoreError(
        f"{request.operation}: none of the checkpoints can be read whole: "
        + "; ".join(f"{f.what}: {f.reason}" for f in tally.fallbacks[-8:])
        + _half(touched)
    )


def _plan(make_plan: MakePlan, header: ImageHeader, touched: bool) -> Plan:
    try:
        return make_plan(header)
    except RestoreError as error:
        if not touched:
            raise
        raise RestoreError(f"{error}" + _half(touched)) from error


def _half(touched: bool) -> str:
    return "; THE STATE IS HALF FILLED: do not train on it" if touched else ""


def _look(listings: Sequence[Listing], request: Request, tally: Tally) -> None:
    """Refuse to take "could not look" for "nothing there"."""
    for listing in listings:
        for damage in listing.damaged:
            tally.passed_over(f"tier {listing.tier}", damage)
        if listing.error is None or (request.tier is not None and listing.tier != request.tier):
            continue
        tally.passed_over(f"tier {listing.tier}", listing.error)
        if request.ignore_unreachable:
            logger.warning("restore: goes on without tier %s: %s", listing.tier, listing.error)
            continue
        if _found_elsewhere(listings, request):
            continue
        named = "name a step (step=...), " if request.step is None else ""
        raise RestoreError(
            f"{request.operation}: tier {listing.tier} could not be read and may hold something newer: "
            f"{listing.error}. Try again, {named}{request.advice}"
        ) from listing.error


def _found_elsewhere(listings: Sequence[Listing], request: Request) -> bool:
    """A step that was asked for by name, and is there, needs no look at the other tiers."""
    return request.step is not None and any(
        copy.id.step == request.step and request.attempt in (None, copy.id.attempt)
        for listing in listings
        for copy in listing.copies
    )


def _candidates(
    listings: Sequence[Listing], request: Request, tally: Tally
) -> list[KnownCheckpoint]:
    """Newest first: what the request allows, minus what was deleted or left behind."""
    candidates = []
    for checkpoint in reversed(merge(listings)):
        if request.tier is not None and request.tier not in checkpoint.copies:
            continue
        if request.step is not None and checkpoint.id.step != request.step:
            continue
        if request.attempt is not None and checkpoint.id.attempt != request.attempt:
            continue
        if checkpoint.tombstoned:
            tally.passed_over(f"step {checkpoint.id}", "deleted by a person")
        elif checkpoint.abandoned and (request.step is None or request.attempt is None):
            tally.passed_over(
                f"step {checkpoint.id}",
                "its line was left behind; name it by step= and attempt= to go back to it",
            )
        else:
            candidates.append(checkpoint)
    return candidates


def _check_nothing(listings: Sequence[Listing], request: Request, tally: Tally) -> None:
    """Raise RestoreError unless there is truly nothing: a request that fits none of what is there is no first start."""
    live = [c for c in merge(listings) if not c.tombstoned]
    damaged = any(listing.damaged for listing in listings)
    named = request.step is not None or request.attempt is not None
    unread = [x.tier for x in listings if x.error is not None and request.tier in (None, x.tier)]
    if not (live or damaged or named or unread):
        return
    asked = "" if request.step is None else f" of step {request.step}"
    if request.attempt is not None:
        asked += f" of attempt {request.attempt}"
    where = f" on tier {request.tier}" if request.tier else ""
    there = ", ".join(f"{c.id} on {'+'.join(c.copies)}" for c in live[-6:])
    there = there or ("only something damaged" if damaged else "none")
    if unread:
        there += (
            f"; tier {', '.join(unread)} could not be read, so it is not known whether this is a first start: try "
            "again, or open with fresh=True to begin anew"
        )
    reasons = "; ".join(f"{f.what}: {f.reason}" for f in tally.fallbacks[-6:])
    raise RestoreError(
        f"{request.operation}: there is no checkpoint{asked}{where} to restore; there are: {there}"
        + (f" ({reasons})" if reasons else "")
    )


class _Job:
    """One checkpoint, ready to be read: its good copies and its manifest. Used in a with."""

    def __init__(
        self,
        images: Sequence[Image],
        manifest: Manifest,
        tally: Tally,
        ring: Ring | None,
        chunks_max: int | None,
    ) -> None:
        self._manifest = manifest
        self._reader = ChunkReader(images, manifest, tally)
        self._threads = count_threads(manifest, images, chunks_max)
        self._own: Ring | None = None
        if ring is None:
            size = manifest.chunk_bytes
            ring = Ring(size) if chunks_max is None else Ring(size, count_max=self._threads)
            self._own = ring
        self._ring = ring

    def read_header(self) -> ImageHeader:
        with self._ring.pool.take(self._manifest.data_start) as buffer:
            view = self._reader.read(0, buffer)
            return read_header(
                view,
                image_bytes=self._manifest.image_bytes,
                what=f"header of {self._manifest.line.checkpoint}",
            )

    def fill(self, plan: Plan) -> None:
        ring = self._ring
        read_fills(self._reader, self._manifest, plan.fills, self._threads, ring.pool, ring.streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._own is not None:
            self._own.release()


def _vouch_for_the_same(one: Commit | None, other: Commit, shard: Shard) -> bool:
    """Say whether two commit records name the same manifest of a shard: then one reading of it serves both copies."""
    name = names.manifest_name(shard)
    return one is not None and one.line == other.line and one.file(name) == other.file(name)


def _tiers(checkpoint: KnownCheckpoint, request: Request, listings: Sequence[Listing]) -> list[str]:
    """Name the tiers that a checkpoint may be read from, fastest first."""
    held = [listing.tier for listing in listings if listing.tier in checkpoint.copies]
    return [tier for tier in held if request.tier in (None, tier)]


def find_images(
    checkpoint: KnownCheckpoint,
    tiers: Sequence[str],
    open_image: OpenImage,
    shard: Shard,
    tally: Tally,
) -> tuple[list[Image], Manifest]:
    """Open the copies of a shard on ``tiers``, fastest first, whose records are good; return them with their manifest.

    Raises IntegrityError where there is none, and the retryable error where one could not be read.
    """
    images: list[Image] = []
    manifest: Manifest | None = None
    vouched: Commit | None = None
    failures: list[TierfallError] = []
    for tier in tiers:
        found = checkpoint.copies[tier]
        try:
            if found.commit is None:
                raise found.damage or IntegrityError(f"{tier}: no commit record")
            image = open_image(tier, checkpoint.id, shard)
            if manifest is None:
                manifest, vouched = checked_manifest(image, found.commit, shard), found.commit
            elif not _vouch_for_the_same(vouched, found.commit, shard):
                raise IntegrityError(
                    f"{tier}: holds another snapshot of {checkpoint.id} than faster tiers do"
                )
            image = unpacked(image, found.commit, manifest)
        except (IntegrityError, BackendError, NotSupportedError) as error:
            failures.append(error)
            tally.passed_over(f"{checkpoint.id} on {tier}", error)
            continue
        images.append(image)
    if manifest is None or not images:
        raise next((e for e in failures if e.retryable), None) or IntegrityError(
            f"no copy of {checkpoint.id} has good records: "
            + "; ".join(str(error) for error in failures)
        )
    return images, manifest
