"""Restore: fills the targets from the newest checkpoint that can be read, from its fastest good copies.

``candidates`` names those that may be restored. A damaged copy is replaced by the next one, and a step that is damaged
everywhere by the next older step, on all ranks at once; the report names each of these fallbacks. A step that could not
be read is not passed over, unless the caller says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.copies.chunk_reader import BufferRing, Fallback, ReadTally
from tierfall.core.copies.shard_reader import NOWHERE, PASSABLE, OpenImage
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.format.commit_files import image_file
from tierfall.core.load.plan import ReadPlan
from tierfall.core.restore.candidates import RestoreRequest, choose, unread_text
from tierfall.core.restore.exchange.exchange import Exchange
from tierfall.core.restore.exchange.gloo import LostError
from tierfall.core.restore.reshard import MakePlan, ResizeRules, plan_reads_of_rank
from tierfall.core.tensors.address_ranges import AddressRange
from tierfall.core.types.errors import RanksError, RestoreError, TierfallError
from tierfall.core.types.text import format_some
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
    """The checkpoint that was read, the plan whose targets are filled, and the bytes that came from each tier."""

    checkpoint: KnownCheckpoint
    plan: ReadPlan
    tally: ReadTally

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """What was skipped: tiers, and copies of this checkpoint and of newer ones."""
        id = self.checkpoint.id
        return tuple(each for each in self.tally.fallbacks if each.id is None or each.id >= id)

    def verified(self, shard: Shard) -> tuple[str, ...]:
        """Return the tiers on which all chunks of a shard's image were read, and are good; empty where some were not
        read, or were received from another rank."""
        commit = self.checkpoint.commit
        image = None if commit is None else image_file(commit, shard)
        if image is None:
            return ()
        size = image.file.raw_bytes or image.file.bytes
        return tuple(tier for tier, read in self.tally.bytes.items() if read == size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The error of the first rank that failed to read a checkpoint; ``permanent``: no older one is to be tried."""

    rank: int
    message: str
    permanent: bool


Together = Callable[[KnownCheckpoint, BaseException | None], RankFailure | None]
"""Exchanges with the other ranks what became of a checkpoint: given is this rank's error, or None; returned is the
failure that all ranks follow, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What may be restored, newest first, by the ``listings``, fastest first, and how its images are opened."""

    candidates: Sequence[KnownCheckpoint]
    listings: Sequence[Listing]
    open_image: OpenImage


ChooseAgain = Callable[[RestoreRequest], Choice]
"""Lists the tiers again, and chooses, on all ranks together."""


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
    look_again: Callable[[], tuple[Sequence[Listing], OpenImage]] | None = None,
) -> RestoreResult | None:
    """Fill the targets of a plan from the newest restorable checkpoint; ``listings`` are sorted fastest first.
    ``look_again`` is called after a checkpoint that was passed over, which a trainer may have deleted: what is newest
    then is tried next.

    Stored chunks are read through ``ring``, or through buffers of this call; beside the targets no more host memory is
    used than ``chunks_max`` chunks need, where that is given. However it ends, no copy onto a device is in progress.

    Returns None only when every tier answered and none holds a checkpoint. Raises RestoreError otherwise, with all that
    was tried; its text tells when targets are half filled.
    """
    tally = tally or ReadTally()
    candidates = choose(listings, request, tally)
    if not candidates:
        return None

    def choose_again(request: RestoreRequest) -> Choice:
        assert look_again is not None
        listings, open_image = look_again()
        chosen = choose(listings, request, tally)
        return Choice(candidates=chosen, listings=listings, open_image=open_image)

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
        choose_again=None if look_again is None else choose_again,
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
    choose_again: ChooseAgain | None = None,
) -> RestoreResult:
    """Fill the targets of a plan from the first of ``candidates`` that is good; the rest is as for ``restore``.

    With several ranks, ``candidates`` are the same on all. ``together`` is called once per candidate, however filling
    it ended; where any rank failed, all pass the candidate over, or all end: the failing rank with its own error, the
    others with a RestoreError that names it. An error that is no Exception, as Ctrl-C, is raised unchanged. The rules
    of ``resize`` reshard a checkpoint of other ranks. By ``exchange``, ranks send each other what several of them need,
    or only another one can read; without it ``nowhere`` is the reason where no tier here holds an image. After each
    checkpoint that was passed over, ``choose_again`` replaces the candidates that are left.

    Steps are never mixed: a RestoreError names tensors that a checkpoint which was skipped may have written to, and
    that the next one does not fill.
    """
    touched = False
    written: dict[AddressRange, tuple[str, CheckpointId]] = {}
    left = list(candidates)
    while left:
        checkpoint = left.pop(0)
        plan: ReadPlan | None = None
        fill: Callable[[], None] | None = None  # that of the candidate before holds its targets
        error: BaseException | None = None
        unreported: TierfallError | None = None
        tiers = _tiers(checkpoint, request, listings)
        made = (checkpoint, tiers, open_image, tally, ring, chunks_max, nowhere)
        parts = CheckpointReader(*made) if exchange is None else exchange.reader(*made)
        try:
            plan, fill = plan_reads_of_rank(parts, make_plan, shard, resize)
            _check_none_left(plan, written, checkpoint, request)
            fill()
        except BaseException as failure:  # noqa: BLE001 - Ctrl-C, too: the other ranks must know; raised below
            unreported = parts.give_up(failure)
            error = _classify(failure, checkpoint, request, tally, touched or parts.touched)
        touched = touched or parts.touched
        try:
            failure_elsewhere = _exchange_outcomes(
                together, checkpoint, error, request, touched, unreported
            )
            if error is not None and not isinstance(error, (*PASSABLE, LostError)):
                raise error
            if failure_elsewhere is not None:
                _follow_failure(failure_elsewhere, error, checkpoint, request, tally, touched)
            elif plan is not None and error is None:
                return RestoreResult(checkpoint=checkpoint, plan=plan, tally=tally)
            if plan is not None and parts.touched:
                written |= {each: (name, checkpoint.id) for each, name in plan.in_place.items()}
        finally:
            del error  # its traceback holds this frame, and so the targets
        if choose_again is not None:
            request = replace(request, without=request.without | {checkpoint.id})
            try:
                chosen = choose_again(request)
            except TierfallError as failure:
                raise _final_error(failure, request, request.operation, touched) from failure
            left, listings = list(chosen.candidates), chosen.listings
            open_image = chosen.open_image
    raise RestoreError(
        f"{request.operation}: none of the checkpoints can be read whole: "
        + "; ".join(f"{f.what}: {f.reason}" for f in tally.fallbacks[-8:])
        + _half_written(touched, request)
    )


def _check_none_left(
    plan: ReadPlan,
    written: Mapping[AddressRange, tuple[str, CheckpointId]],
    checkpoint: KnownCheckpoint,
    request: RestoreRequest,
) -> None:
    """Raise RestoreError where tensors would keep what a checkpoint that was skipped may have ``written`` to them."""
    left = {name: id for each, (name, id) in written.items() if plan.leaves_unchanged(each, name)}
    if not left:
        return
    those = format_some([str(id) for id in sorted({*left.values()})])
    raise RestoreError(
        f"{request.operation} of {checkpoint.id}: it does not have {format_some([*left])}, which {those}, tried first "
        "and skipped, may have written to: bytes of another step, not all of them verified, would remain there. Create "
        "the state again, or set these tensors to their initial values, and name the step "
        f"(step={checkpoint.id.step})"
    )


def _classify(
    error: BaseException,
    checkpoint: KnownCheckpoint,
    request: RestoreRequest,
    tally: ReadTally,
    touched: bool,
) -> BaseException:
    """Return the error itself if an older step may be tried (one of PASSABLE, which is damage unless the request says
    otherwise), or if another rank knows the reason (LostError); else the error that the restore ends with."""
    of = f"{request.operation} of {checkpoint.id}"
    if isinstance(error, LostError):
        return error
    if not isinstance(error, PASSABLE):
        return _final_error(error, request, of, touched)
    if not error.is_damage:
        tally.found_unread(checkpoint.id)
        if not request.ignore_unreachable:
            text = unread_text(of, error, request)
            return _with_cause(RestoreError(text + _half_written(touched, request)), error)
    _log_fallback(checkpoint, error, tally)
    if request.step is not None:
        return _with_cause(RestoreError(f"{of}: {error}" + _half_written(touched, request)), error)
    return error


def _exchange_outcomes(
    together: Together | None,
    checkpoint: KnownCheckpoint,
    error: BaseException | None,
    request: RestoreRequest,
    touched: bool,
    unreported: TierfallError | None,
) -> RankFailure | None:
    """Exchange outcomes with the other ranks. That they cannot be reached, or could not be before (``unreported``),
    ends the restore, unless an error of this rank has ended it already."""
    if together is None:
        return None
    try:
        if unreported is not None:
            raise unreported
        return together(checkpoint, error)
    except BaseException as lost:
        over = error is not None and not isinstance(error, (*PASSABLE, LostError))
        if over and isinstance(lost, Exception):
            assert error is not None
            error.add_note(f"the other ranks may not know of it: {lost}")
            return None
        if isinstance(error, LostError) and isinstance(lost, TierfallError):
            lost = RanksError(f"{lost} ({error})")
        of = f"{request.operation} of {checkpoint.id}"
        ended = _final_error(lost, request, of, touched)
        if ended is lost:
            raise lost
        raise ended from lost


def _follow_failure(
    failure_elsewhere: RankFailure,
    error: BaseException | None,
    checkpoint: KnownCheckpoint,
    request: RestoreRequest,
    tally: ReadTally,
    touched: bool,
) -> None:
    """Follow another rank's failure: end the restore, or pass the checkpoint over."""
    text = f"rank {failure_elsewhere.rank}: {failure_elsewhere.message}"
    if failure_elsewhere.permanent or request.ignore_unreachable:
        tally.found_unread(checkpoint.id)  # perhaps it is damaged: the message does not say
    if failure_elsewhere.permanent:
        raise RestoreError(
            f"{request.operation} of {checkpoint.id}: {text}" + _half_written(touched, request)
        )
    if error is None or isinstance(error, LostError):
        _log_fallback(checkpoint, text, tally)


def _log_fallback(checkpoint: KnownCheckpoint, reason: object, tally: ReadTally) -> None:
    tally.add_skipped(f"step {checkpoint.id}", reason, checkpoint.id)
    logger.error("restore: step %s is skipped: %s", checkpoint.id, reason)


def _final_error(
    error: BaseException, request: RestoreRequest, of: str, touched: bool
) -> BaseException:
    """Return the error that a restore ends with. It tells whether targets were touched; an error of an agreement also
    names the checkpoint."""
    if not touched:
        return (
            _with_cause(RanksError(f"{of}: {error}"), error)
            if isinstance(error, RanksError)
            else error
        )
    if isinstance(error, RestoreError):
        return _with_cause(RestoreError(f"{error}" + _half_written(touched, request)), error)
    text = str(error) if isinstance(error, TierfallError) else repr(error)
    what = f"{of}: {text}" + _half_written(touched, request)
    if isinstance(error, Exception):
        return _with_cause(RestoreError(what), error)
    error.add_note(what)
    return error


def _with_cause(error: TierfallError, cause: BaseException) -> TierfallError:
    error.__cause__ = cause
    return error


def _half_written(touched: bool, request: RestoreRequest) -> str:
    return HALF_FILLED if touched and request.in_place else ""


def _tiers(
    checkpoint: KnownCheckpoint, request: RestoreRequest, listings: Sequence[Listing]
) -> list[str]:
    """Return the tiers that a checkpoint may be read from, fastest first; those whose copy lacks files come last."""
    held = [listing.tier for listing in listings if listing.tier in checkpoint.copies]
    read = [tier for tier in held if request.tier in (None, tier)]
    return sorted(read, key=lambda tier: checkpoint.copies[tier].damage is not None)
