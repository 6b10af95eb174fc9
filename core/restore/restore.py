"""Restore: fills the targets from the newest checkpoint that can be read, from its fastest good copies.

``candidates`` names those that may be restored. A damaged copy is replaced by the next one, and a step that is damaged
everywhere by the next older step, on all ranks at once; the report names each of these fallbacks. A step that could not
be read is not passed over, unless the caller says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tierfall.core.copies.checkpoint_reader import PASSABLE, CheckpointReader
from tierfall.core.copies.chunk_reader import Fallback, ReadTally
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.commit_files import image_file
from tierfall.core.load.plan import ReadPlan
from tierfall.core.restore.candidates import RestoreRequest, unread_text
from tierfall.core.restore.reshard import MakePlan, ResizeRules, plan_reads_of_rank
from tierfall.core.tensors.tensors import AddressRange, AddressRanges
from tierfall.core.types.errors import IntegrityError, RanksError, RestoreError, TierfallError
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId, Shard

T = TypeVar("T")
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
        found = (f for f in self.tally.fallbacks if f.what != f"step {id}")
        return tuple(each for each in found if each.id is None or each.id >= id)

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


class DamagedError(RestoreError, IntegrityError):
    """A part of the checkpoint that was named is damaged in every copy, so an older one may be read. All ranks raise
    it."""


Together = Callable[[KnownCheckpoint, BaseException | None], RankFailure | None]
"""Agrees with the other ranks on the end of a checkpoint: given is this rank's error, or None; returned is the failure
that all ranks follow, or None."""


Choose = Callable[[RestoreRequest], Sequence[KnownCheckpoint]]
"""Lists the tiers, and returns what may be restored, newest first, the same on all ranks."""
MakeReader = Callable[[KnownCheckpoint, Sequence[str], ReadTally], CheckpointReader]


def fill_first(
    choose: Choose,
    request: RestoreRequest,
    tally: ReadTally,
    *,
    make_plan: MakePlan,
    shard: Shard,
    resize: ResizeRules = RESIZE,
    **how: Any,
) -> RestoreResult | None:
    """Fill the targets of a plan from the first candidate that is good; None if there is no candidate. However it ends,
    no copy onto a device is in progress. The rules of ``resize`` reshard a checkpoint of other ranks; ``how`` are
    further arguments of ``read_first``, whose errors it raises.

    Steps are never mixed: a RestoreError names tensors that a checkpoint which was skipped may have written to, and
    that the next one does not fill.
    """
    written: dict[AddressRange, tuple[str, CheckpointId]] = {}
    tried: list[tuple[CheckpointReader, ReadPlan]] = []

    def read(parts: CheckpointReader) -> ReadPlan:
        while tried:  # it was passed over
            written.update(_may_have_written(*tried.pop()))
        plan, fill = plan_reads_of_rank(parts, make_plan, shard, resize)
        tried.append((parts, plan))
        id = parts.checkpoint.id
        _check_none_left(plan, written, f"{request.operation} of {id}", id)
        fill()
        return plan

    found = read_first(choose, request, tally, read, **how)
    if found is None:
        return None
    parts, plan = found
    parts.close()
    return RestoreResult(checkpoint=parts.checkpoint, plan=plan, tally=tally)


def read_first(
    choose: Choose,
    request: RestoreRequest,
    tally: ReadTally,
    read: Callable[[CheckpointReader], T],
    *,
    make_reader: MakeReader,
    together: Together | None = None,
) -> tuple[CheckpointReader, T] | None:
    """Return what ``read`` reads of the first candidate that is good, and the reader of that, which the caller closes;
    None if there is no candidate.

    ``choose`` is called again after each checkpoint that was passed over: a trainer may have deleted others.
    ``make_reader`` opens a checkpoint on its tiers, fastest first; the reader is closed once all ranks agree on its
    end. Raises what ``Progress.read`` raises, and RestoreError with all that was tried.
    """
    progress = Progress(request, tally, together)
    candidates = choose(request)
    if not candidates:
        return None
    while candidates:
        checkpoint = candidates[0]
        with ExitStack() as closing:
            parts = make_reader(checkpoint, _tiers(checkpoint, request), tally)
            closing.callback(parts.close)
            found = progress.read(parts, read)
            if found is not None:
                closing.pop_all()
                return parts, found
        request = replace(request, without=request.without | {checkpoint.id})
        try:
            candidates = choose(request)
        except TierfallError as failure:
            raise progress.final_error(failure, request.operation) from failure
    tried = [
        f"\n  {f.what}: {f.reason}" for f in tally.fallbacks if f.what.startswith(("step", "tier"))
    ]
    raise RestoreError(
        f"{request.operation}: none of the checkpoints can be read whole{progress.half_filled}:{''.join(tried[-8:])}\n"
        "'tierfall verify' tells what is damaged where. Bring a copy back from a backup, or begin anew by open(..., "
        "fresh=True)"
    )


def _may_have_written(
    parts: CheckpointReader, plan: ReadPlan
) -> dict[AddressRange, tuple[str, CheckpointId]]:
    names = plan.in_place() if parts.touched else {}
    return {each: (name, parts.checkpoint.id) for each, name in names.items()}


def _check_none_left(
    plan: ReadPlan,
    written: Mapping[AddressRange, tuple[str, CheckpointId]],
    what: str,
    id: CheckpointId,
) -> None:
    """Raise RestoreError where tensors would keep what a checkpoint that was skipped may have ``written`` to them."""
    filled = AddressRanges(plan.in_place() if written else ())
    left = {
        name: other
        for each, (name, other) in written.items()
        if not filled.contains(each) and not plan.replaces(name)
    }
    if not left:
        return
    those = format_some([str(other) for other in sorted({*left.values()})])
    raise RestoreError(
        f"{what}: it does not have {format_some([*left])}, which {those}, tried first and skipped, may have "
        "written to: bytes of another step, not all of them verified, would remain there. Create the state again, or "
        f"set these tensors to their initial values, and name the step (step={id.step})"
    )


@dataclass(slots=True)
class Progress:
    """What a restore has come to: the ``checkpoint`` that is tried, and whether targets were ``touched``. ``together``
    is called once per candidate, however reading it ended."""

    request: RestoreRequest
    tally: ReadTally
    together: Together | None = None
    checkpoint: KnownCheckpoint = field(init=False)
    touched: bool = False

    @property
    def what(self) -> str:
        return f"{self.request.operation} of {self.checkpoint.id}"

    @property
    def half_filled(self) -> str:
        return HALF_FILLED if self.touched and self.request.in_place else ""

    def read(self, parts: CheckpointReader, read: Callable[[CheckpointReader], T]) -> T | None:
        """Return what ``read`` returns, once all ranks have read their part of a checkpoint; None if all pass it over,
        since a part is damaged in every copy. DamagedError if it was named.

        If any rank failed otherwise, all end: that rank with its own error, the others with a RestoreError that names
        it. An error that is no Exception, as Ctrl-C, is raised unchanged. The text of an error tells if targets are
        half filled.
        """
        self.checkpoint = parts.checkpoint
        found: T | None = None
        error: BaseException | None = None
        reason: object = None
        is_cut_off = False
        try:
            found = read(parts)
        except BaseException as failure:  # noqa: BLE001 - Ctrl-C, too: the other ranks must know; raised below
            self.touched |= parts.touched
            is_cut_off = isinstance(failure, RanksError)  # of an agreement: no other one is tried
            error = self._classify(failure)
        self.touched |= parts.touched
        try:
            failed = None if is_cut_off else self._end_together(error)
            if error is not None and not isinstance(error, (*PASSABLE, EndedError)):
                raise error
            reason = error if failed is None else self._follow(failed, error)
            if reason is not None and self.request.step is not None:
                kind = RestoreError if self.request.ignore_unreachable else DamagedError
                text = f"{self.what}: {reason}{self.half_filled}. {self._instead()}"
                raise kind(text) from error
            return found if reason is None else None
        finally:
            del error, reason  # its traceback holds this frame, and so the targets

    def _instead(self) -> str:
        """Return what can be restored in place of the step that was named."""
        text = "No other step is there without damage: bring a copy back from a backup"
        if others := ", ".join(map(str, self.tally.others)):
            text = f"Without known damage: {others}. Name one by step=, or leave step out"
        if self.request.tier is not None:
            text = (
                f"Only tier {self.request.tier} was read: leave tier out to read the others. {text}"
            )
        return f"{text}. 'tierfall verify' tells what is damaged where"

    def _classify(self, error: BaseException) -> BaseException:
        """Return the error itself if an older step may be tried (one of PASSABLE, which is damage unless the request
        says otherwise), or if another rank has failed (EndedError); else the error that the restore ends with."""
        if isinstance(error, EndedError):
            return error
        if not isinstance(error, PASSABLE):
            return self.final_error(error, self.what)
        if not error.is_damage:
            self.tally.found_unread(self.checkpoint.id)
            if not self.request.ignore_unreachable:
                text = unread_text(self.what, error, self.request)
                return _with_cause(RestoreError(text + self.half_filled), error)
        self._log_fallback(error)
        return error

    def _end_together(self, error: BaseException | None) -> RankFailure | None:
        """Agree with the other ranks on the end of the checkpoint. That they cannot be reached ends the restore, unless
        an error of this rank has ended it already."""
        if self.together is None:
            return None
        try:
            return self.together(self.checkpoint, error)
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

    def _follow(self, failed: RankFailure, error: BaseException | None) -> object:
        """Follow a rank's failure: end the restore, or return why the checkpoint is passed over."""
        text = f"rank {failed.rank}: {failed.message}"
        if failed.permanent or self.request.ignore_unreachable:
            self.tally.found_unread(self.checkpoint.id)  # perhaps damaged: the message does not say
        if failed.permanent:
            raise RestoreError(f"{self.what}: {text}{self.half_filled}")
        if error is not None and not isinstance(error, EndedError):
            return error
        self._log_fallback(text)
        return text

    def _log_fallback(self, reason: object) -> None:
        id = self.checkpoint.id
        self.tally.add_skipped(f"step {id}", reason, id)
        if self.request.step is None:  # else the error says it
            logger.error("%s: step %s is skipped: %s", self.request.operation, id, reason)

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
