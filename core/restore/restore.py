"""Restoring: the newest step that can be restored, from the fastest copies that are good, or the reason why not.

``candidates`` says which may be taken. A copy that is damaged gives way to the next one, a step that is damaged
everywhere to the next older step, on all ranks at once, and each such turn stands in the report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tierfall.core.copies.buffer_ring import BufferRing
from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import NOWHERE, PASSABLE, OpenImage
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.format.commit_files import image_file
from tierfall.core.restore.candidates import RestoreRequest, choose
from tierfall.core.restore.exchange.exchange import Exchange
from tierfall.core.restore.exchange.gloo import LostError
from tierfall.core.restore.reshard import MakePlan, ResizeRules, RestorePlan, plan_parts
from tierfall.core.tensors.written_memory import LiveMemory
from tierfall.core.types.errors import RanksError, RestoreError, TierfallError
from tierfall.core.types.text import few_of
from tierfall.core.types.values import CheckpointId, Shard

__all__ = [
    "HALF_FILLED",
    "PASSABLE",
    "RankFailure",
    "RestoreRequest",
    "RestoreResult",
    "Together",
    "choose",
    "fill_first",
    "restore",
]

logger = logging.getLogger("tierfall")

RESIZE = ResizeRules()
HALF_FILLED = "; THE STATE IS HALF FILLED: do not train on it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """What was read: which checkpoint, the plan whose targets are filled, and from where."""

    checkpoint: KnownCheckpoint
    plan: RestorePlan
    tally: ReadTally

    def verified(self, shard: Shard) -> tuple[str, ...]:
        """Name the tiers of which all chunks of a shard's image were read, and were good. None where a part was read,
        or was got from elsewhere."""
        commit = self.checkpoint.commit
        image = None if commit is None else image_file(commit, shard)
        if image is None:
            return ()
        size = image.file.raw_bytes or image.file.bytes
        return tuple(tier for tier, read in self.tally.bytes.items() if read == size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What the first rank that failed says of a checkpoint; ``for_good``: no older one is to be tried either."""

    rank: int
    message: str
    for_good: bool


Together = Callable[[KnownCheckpoint, BaseException | None], RankFailure | None]
"""Tells the other ranks how a checkpoint was filled here (None: well), and returns how it was there (None: well)."""


def restore(
    listings: Sequence[Listing],
    request: RestoreRequest,
    *,
    open_image: OpenImage,
    make_plan: MakePlan,
    shard: Shard,
    ring: BufferRing | None = None,
    chunks_max: int | None = None,
    resize: ResizeRules = RESIZE,
    tally: ReadTally | None = None,
) -> RestoreResult | None:
    """Fill the targets of a plan from the newest restorable checkpoint; ``listings`` stand fastest first.

    Stored chunks are read through ``ring``, or through buffers of their own; beside the targets no more host memory is
    taken than ``chunks_max`` chunks need, where that is given. However it ends, no copy onto a device is under way.

    Returns None only when every tier answered and none holds a checkpoint. Raises RestoreError otherwise, with all that
    was tried; its text says when targets are half filled.
    """
    tally = tally or ReadTally()
    candidates = choose(listings, request, tally)
    if not candidates:
        return None
    return fill_first(
        candidates,
        listings,
        request,
        tally,
        open_image=open_image,
        make_plan=make_plan,
        shard=shard,
        ring=ring,
        chunks_max=chunks_max,
        resize=resize,
    )


def fill_first(
    candidates: Sequence[KnownCheckpoint],
    listings: Sequence[Listing],
    request: RestoreRequest,
    tally: ReadTally,
    *,
    open_image: OpenImage,
    make_plan: MakePlan,
    shard: Shard,
    ring: BufferRing | None = None,
    chunks_max: int | None = None,
    resize: ResizeRules = RESIZE,
    together: Together | None = None,
    exchange: Exchange | None = None,
    nowhere: str = NOWHERE,
) -> RestoreResult:
    """Fill the targets of a plan from the first of ``candidates`` that is good; the rest is as for ``restore``.

    With several ranks, ``candidates`` are the same on all. ``together`` is called once per candidate, however filling
    it ended; where any rank failed, all pass the candidate over, or all end: the failing rank with its own error, the
    others with a RestoreError that names it. What is not an Exception, as Ctrl-C, goes through as it is. What other
    ranks saved is resharded, as ``resize`` says. By ``exchange`` ranks hand each other what more than one of them
    wants, or only another one can read; without it ``nowhere`` says what it means that no tier here holds a part.

    Steps are never mixed: what a checkpoint that is passed over has written to, and the next one does not fill, is a
    RestoreError that names it.
    """
    touched = False
    written: dict[str, tuple[LiveMemory, CheckpointId]] = {}
    for checkpoint in candidates:
        plan: RestorePlan | None = None
        fill: Callable[[], None] | None = None  # the one before this holds its targets
        error: BaseException | None = None
        unheard: TierfallError | None = None
        tiers = _tiers(checkpoint, request, listings)
        made = (checkpoint, tiers, open_image, tally, ring, chunks_max, nowhere)
        parts = CheckpointReader(*made) if exchange is None else exchange.parts(*made)
        try:
            plan, fill = plan_parts(parts, make_plan, shard, resize)
            _check_none_left(plan, written, checkpoint, request)
            fill()
        except BaseException as failure:  # noqa: BLE001 - Ctrl-C, too: the other ranks must know; raised below
            unheard = parts.give_up(failure)
            error = _classify(failure, checkpoint, request, tally, touched or parts.touched)
        touched = touched or parts.touched
        try:
            elsewhere = _exchange_outcomes(together, checkpoint, error, request, touched, unheard)
            if error is not None and not isinstance(error, (*PASSABLE, LostError)):
                raise error
            if elsewhere is not None:
                _follow_failure(elsewhere, error, checkpoint, request, tally, touched)
            elif plan is not None and error is None:
                return RestoreResult(checkpoint=checkpoint, plan=plan, tally=tally)
            if plan is not None:
                for memory in plan.written(parts.written.targets()):
                    written[memory.name] = memory, checkpoint.id
        finally:
            del error  # its traceback holds this frame, and so the targets
    raise RestoreError(
        f"{request.operation}: none of the checkpoints can be read whole: "
        + "; ".join(f"{f.what}: {f.reason}" for f in tally.fallbacks[-8:])
        + _half_written(touched)
    )


def _check_none_left(
    plan: RestorePlan,
    written: Mapping[str, tuple[LiveMemory, CheckpointId]],
    checkpoint: KnownCheckpoint,
    request: RestoreRequest,
) -> None:
    """Raise RestoreError where tensors would stay as checkpoints that were passed over have ``written`` to them."""
    left = plan.leaves(memory for memory, _ in written.values())
    if not left:
        return
    those = few_of([str(id) for id in sorted({written[name][1] for name in left})])
    raise RestoreError(
        f"{request.operation} of {checkpoint.id}: it does not have {few_of(left)}, which {those}, tried first and "
        "passed over, has written to already: bytes of another step would stay there, not all of them verified. Make "
        "the state anew, or give these tensors the values that they are to begin with, and name the step "
        f"(step={checkpoint.id.step})"
    )


def _classify(
    error: BaseException,
    checkpoint: KnownCheckpoint,
    request: RestoreRequest,
    tally: ReadTally,
    touched: bool,
) -> BaseException:
    """Return the error itself, one of PASSABLE, where an older step may be tried, or a LostError, of which another rank
    knows more; else what the restore ends with."""
    of = f"{request.operation} of {checkpoint.id}"
    if isinstance(error, LostError):
        return error
    if not isinstance(error, PASSABLE):
        return _final_error(error, of, touched)
    if error.retryable and not request.ignore_unreachable:
        text = f"{of}: a copy could not be read, and no other is good: {error}. Try again, {request.advice}"
        return _with_cause(RestoreError(text + _half_written(touched)), error)
    _log_fallback(checkpoint, error, tally)
    if request.step is not None:
        return _with_cause(RestoreError(f"{of}: {error}" + _half_written(touched)), error)
    return error


def _exchange_outcomes(
    together: Together | None,
    checkpoint: KnownCheckpoint,
    error: BaseException | None,
    request: RestoreRequest,
    touched: bool,
    unheard: TierfallError | None,
) -> RankFailure | None:
    """Tell the other ranks how it went here, and hear how it went there. Where they cannot be reached, or could not be
    already (``unheard``), that ends the restore, unless it has ended here already."""
    if together is None:
        return None
    try:
        if unheard is not None:
            raise unheard
        return together(checkpoint, error)
    except BaseException as lost:
        over = error is not None and not isinstance(error, (*PASSABLE, LostError))
        if over and isinstance(lost, Exception):
            assert error is not None
            error.add_note(f"the other ranks may not know of it: {lost}")
            return None
        if isinstance(error, LostError) and isinstance(lost, TierfallError):
            lost = RanksError(f"{lost} ({error})")
        ended = _final_error(lost, f"{request.operation} of {checkpoint.id}", touched)
        if ended is lost:
            raise lost
        raise ended from lost


def _follow_failure(
    elsewhere: RankFailure,
    error: BaseException | None,
    checkpoint: KnownCheckpoint,
    request: RestoreRequest,
    tally: ReadTally,
    touched: bool,
) -> None:
    """Do what another rank's failure asks of this one: end, or pass the checkpoint over."""
    text = f"rank {elsewhere.rank}: {elsewhere.message}"
    if elsewhere.for_good:
        raise RestoreError(
            f"{request.operation} of {checkpoint.id}: {text}" + _half_written(touched)
        )
    if error is None or isinstance(error, LostError):
        _log_fallback(checkpoint, text, tally)


def _log_fallback(checkpoint: KnownCheckpoint, reason: object, tally: ReadTally) -> None:
    tally.passed_over(f"step {checkpoint.id}", reason)
    logger.error("restore: step %s is passed over: %s", checkpoint.id, reason)


def _final_error(error: BaseException, of: str, touched: bool) -> BaseException:
    """Return what a restore ends with that an error cut short: where targets were touched, it says so; and what the
    ranks could not do together names the checkpoint."""
    if not touched:
        return (
            _with_cause(RanksError(f"{of}: {error}"), error)
            if isinstance(error, RanksError)
            else error
        )
    if isinstance(error, RestoreError):
        return _with_cause(RestoreError(f"{error}" + _half_written(touched)), error)
    said = str(error) if isinstance(error, TierfallError) else repr(error)
    what = f"{of}: {said}" + _half_written(touched)
    if isinstance(error, Exception):
        return _with_cause(RestoreError(what), error)
    error.add_note(what)
    return error


def _with_cause(error: TierfallError, cause: BaseException) -> TierfallError:
    error.__cause__ = cause
    return error


def _half_written(touched: bool) -> str:
    return HALF_FILLED if touched else ""


def _tiers(
    checkpoint: KnownCheckpoint, request: RestoreRequest, listings: Sequence[Listing]
) -> list[str]:
    """Name the tiers that a checkpoint may be read from, fastest first; after them those whose copy lacks files."""
    held = [listing.tier for listing in listings if listing.tier in checkpoint.copies]
    read = [tier for tier in held if request.tier in (None, tier)]
    return sorted(read, key=lambda tier: checkpoint.copies[tier].damage is not None)
