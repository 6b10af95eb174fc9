"""Restore: fills the targets from the newest checkpoint that can be read, from its fastest good copies.

``candidates`` names those that may be restored. A damaged copy is replaced by the next one, and a step that is damaged
everywhere by the next older step, on all ranks at once; the report names each of these fallbacks. A step that could not
be read is not passed over, unless the caller says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierfall.core.copies.chunk_reader import Fallback, ReadTally
from tierfall.core.copies.shard_reader import PASSABLE, CheckpointReader, OpenImage
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.commit_files import image_file
from tierfall.core.load.plan import ReadPlan
from tierfall.core.restore.candidates import RestoreRequest, unread_text
from tierfall.core.restore.reshard import MakePlan, ResizeRules, plan_reads_of_rank
from tierfall.core.tensors.tensors import AddressRange, AddressRanges
from tierfall.core.types.errors import RanksError, RestoreError, TierfallError
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId, Shard

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


class EndedError(TierfallError):
    """All ranks end this candidate, since another one has failed."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(f"rank {failure.rank}: {failure.message}")
        self.failure = failure


Together = Callable[[KnownCheckpoint, BaseException | None], RankFailure | None]
"""Agrees with the other ranks on the end of a checkpoint: given is this rank's error, or None; returned is the failure
that all ranks follow, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What may be restored, newest first, and how its images are opened."""

    candidates: Sequence[KnownCheckpoint]
    open_image: OpenImage


MakeReader = Callable[[KnownCheckpoint, Sequence[str], OpenImage, ReadTally], CheckpointReader]
ChooseAgain = Callable[[RestoreRequest], Choice]
"""Lists the tiers again, and chooses, on all ranks together."""


def fill_first(
    chosen: Choice,
    request: RestoreRequest,
    tally: ReadTally,
    *,
    make_plan: MakePlan,
    shard: Shard,
    make_reader: MakeReader = CheckpointReader,
    resize: ResizeRules = RESIZE,
    together: Together | None = None,
    choose_again: ChooseAgain | None = None,
) -> RestoreResult:
    """Fill the targets of a plan from the first of the ``chosen`` candidates that is good. However it ends, no copy
    onto a device is in progress. ``make_reader`` opens a checkpoint on its tiers, fastest first; its reader is closed
    once all ranks agree on the end of that checkpoint.

    With several ranks, the candidates are the same on all. ``together`` is called once per candidate, however filling
    it ended; where any rank failed, all pass the candidate over, or all end: the failing rank with its own error, the
    others with a RestoreError that names it. An error that is no Exception, as Ctrl-C, is raised unchanged. The rules
    of ``resize`` reshard a checkpoint of other ranks. After each checkpoint that was passed over, which a trainer may
    have deleted, ``choose_again`` replaces the candidates that are left.

    Steps are never mixed: a RestoreError names tensors that a checkpoint which was skipped may have written to, and
    that the next one does not fill. Raises RestoreError with all that was tried; its text tells when targets are half
    filled.
    """
    progress = _Progress(request, tally)
    written: dict[AddressRange, tuple[str, CheckpointId]] = {}
    left = list(chosen.candidates)
    while left:
        checkpoint = progress.checkpoint = left.pop(0)
        plan: ReadPlan | None = None
        fill: Callable[[], None] | None = None  # that of the candidate before holds its targets
        error: BaseException | None = None
        is_cut_off = False
        tiers = _tiers(checkpoint, request)
        parts = make_reader(checkpoint, tiers, chosen.open_image, tally)
        try:
            plan, fill = plan_reads_of_rank(parts, make_plan, shard, resize)
            _check_none_left(plan, written, progress)
            fill()
        except BaseException as failure:  # noqa: BLE001 - Ctrl-C, too: the other ranks must know; raised below
            progress.touched |= parts.touched
            is_cut_off = isinstance(failure, RanksError)  # of an agreement: no other one is tried
            error = progress.classify(failure)
        progress.touched |= parts.touched
        try:
            failure_elsewhere = None
            if not is_cut_off:
                failure_elsewhere = progress.end_together(together, error)
            if error is not None and not isinstance(error, (*PASSABLE, EndedError)):
                raise error
            if failure_elsewhere is not None:
                progress.follow(failure_elsewhere, error)
            elif plan is not None and error is None:
                return RestoreResult(checkpoint=checkpoint, plan=plan, tally=tally)
            if plan is not None and parts.touched:
                written |= {each: (name, checkpoint.id) for each, name in plan.in_place().items()}
        finally:
            parts.close()
            del error  # its traceback holds this frame, and so the targets
        if choose_again is not None:
            request = replace(request, without=request.without | {checkpoint.id})
            try:
                chosen = choose_again(request)
            except TierfallError as failure:
                raise progress.final_error(failure, request.operation) from failure
            left = list(chosen.candidates)
    raise RestoreError(
        f"{request.operation}: none of the checkpoints can be read whole: "
        + "; ".join(f"{f.what}: {f.reason}" for f in tally.fallbacks[-8:])
        + progress.half_filled
    )


def _check_none_left(
    plan: ReadPlan, written: Mapping[AddressRange, tuple[str, CheckpointId]], progress: _Progress
) -> None:
    """Raise RestoreError where tensors would keep what a checkpoint that was skipped may have ``written`` to them."""
    filled = AddressRanges(plan.in_place() if written else ())
    left = {
        name: id
        for each, (name, id) in written.items()
        if not filled.contains(each) and not plan.replaces(name)
    }
    if not left:
        return
    those = format_some([str(id) for id in sorted({*left.values()})])
    raise RestoreError(
        f"{progress.what}: it does not have {format_some([*left])}, which {those}, tried first and skipped, may have "
        "written to: bytes of another step, not all of them verified, would remain there. Create the state again, or "
        f"set these tensors to their initial values, and name the step (step={progress.checkpoint.id.step})"
    )


@dataclass(slots=True)
class _Progress:
    """What a restore has come to: the ``checkpoint`` that is tried, and whether targets were ``touched``. Decides what
    follows a failure."""

    request: RestoreRequest
    tally: ReadTally
    checkpoint: KnownCheckpoint = field(init=False)
    touched: bool = False

    @property
    def what(self) -> str:
        return f"{self.request.operation} of {self.checkpoint.id}"

    @property
    def half_filled(self) -> str:
        return HALF_FILLED if self.touched and self.request.in_place else ""

    def classify(self, error: BaseException) -> BaseException:
        """Return the error itself if an older step may be tried (one of PASSABLE, which is damage unless the request
        says otherwise), or if another rank has failed (EndedError); else the error that the restore ends with."""
        request = self.request
        if isinstance(error, EndedError):
            return error
        if not isinstance(error, PASSABLE):
            return self.final_error(error, self.what)
        if not error.is_damage:
            self.tally.found_unread(self.checkpoint.id)
            if not request.ignore_unreachable:
                text = unread_text(self.what, error, request)
                return _with_cause(RestoreError(text + self.half_filled), error)
        self._log_fallback(error)
        if request.step is not None:
            return _with_cause(RestoreError(f"{self.what}: {error}{self.half_filled}"), error)
        return error

    def end_together(
        self, together: Together | None, error: BaseException | None
    ) -> RankFailure | None:
        """Agree with the other ranks on the end of the checkpoint. That they cannot be reached ends the restore, unless
        an error of this rank has ended it already."""
        if together is None:
            return None
        try:
            return together(self.checkpoint, error)
        except BaseException as lost:
            over = error is not None and not isinstance(error, (*PASSABLE, EndedError))
            if over and isinstance(lost, Exception):
                assert error is not None
                error.add_note(f"the other ranks may not know of it: {lost}")
                return None
            ended = self.final_error(lost, self.what)
            if ended is lost:
                raise lost
            raise ended from lost

    def follow(self, failure_elsewhere: RankFailure, error: BaseException | None) -> None:
        """Follow another rank's failure: end the restore, or pass the checkpoint over."""
        text = f"rank {failure_elsewhere.rank}: {failure_elsewhere.message}"
        if failure_elsewhere.permanent or self.request.ignore_unreachable:
            self.tally.found_unread(self.checkpoint.id)  # perhaps damaged: the message does not say
        if failure_elsewhere.permanent:
            raise RestoreError(f"{self.what}: {text}{self.half_filled}")
        if error is None or isinstance(error, EndedError):
            self._log_fallback(text)

    def _log_fallback(self, reason: object) -> None:
        id = self.checkpoint.id
        self.tally.add_skipped(f"step {id}", reason, id)
        logger.error("restore: step %s is skipped: %s", id, reason)

    def final_error(self, error: BaseException, of: str) -> BaseException:
        """Return the error that a restore ends with. It tells whether targets were touched; an error of an agreement
        also names the checkpoint."""
        if not self.touched and isinstance(error, RanksError):
            return _with_cause(RanksError(f"{of}: {error}"), error)
        if not self.touched:
            return error
        if isinstance(error, RestoreError):
            return _with_cause(RestoreError(f"{error}{self.half_filled}"), error)
        text = str(error) if isinstance(error, TierfallError) else repr(error)
        what = f"{of}: {text}{self.half_filled}"
        if isinstance(error, Exception):
            return _with_cause(RestoreError(what), error)
        error.add_note(what)
        return error


def _with_cause(error: TierfallError, cause: BaseException) -> TierfallError:
    error.__cause__ = cause
    return error


def _tiers(checkpoint: KnownCheckpoint, request: RestoreRequest) -> list[str]:
    """Return the tiers that a checkpoint may be read from, fastest first; those whose copy lacks files come last."""
    read = [tier for tier in checkpoint.copies if request.tier in (None, tier)]
    return sorted(read, key=lambda tier: checkpoint.copies[tier].damage is not None)
