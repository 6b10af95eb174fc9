"""TierReader: ``dcp.load`` from a run's tiers. DCP's planner reshards, each chunk is verified, and no stored bytes are
unpickled. All ranks choose the checkpoint together, and its shards are merged.

Python values are stored as tagged JSON. DCP's planners unpickle bytes; they get bytes that are pickled here from the
decoded values.
"""

from __future__ import annotations

import io
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import PASSABLE
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.image.tree import TensorNode
from tierfall.core.load.build import CPU, BlockTarget, Builder
from tierfall.core.ranks.messages import Message
from tierfall.core.restore.agreement import make_barrier
from tierfall.core.restore.candidates import RestoreRequest, unread_text
from tierfall.core.restore.exchange.gloo import LostError
from tierfall.core.restore.reshard import ResizeRules, merge_images, plan_reads
from tierfall.core.restore.restore import HALF_FILLED
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.tensors.tensors import as_bytes
from tierfall.core.types.errors import ConfigError, RestoreError
from tierfall.core.types.values import CheckpointId
from tierfall.integrations.dcp.fqns import DcpEntries, Leaf, Paths
from tierfall.run.checkpointer import Checkpointer, open_run_of
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
    merged = merge_images(parts, world_size, shard.rank, ResizeRules(values_of=own))
    return OpenedCheckpoint(
        checkpoint=parts.checkpoint, parts=parts, entries=DcpEntries(merged), world_size=world_size
    )


class TierReader(StorageReader):
    """Reads one checkpoint of a Checkpointer's run: ``dcp.load(state, storage_reader=TierReader(ckpt))``.

    It reads the newest checkpoint that can be restored, or ``step`` (and ``attempt``); ``tier`` limits the read to one
    tier. The run continues from the loaded checkpoint, as after ``restore``; with ``resume=False`` it does not, for
    example to inspect an older step. Each rank gets the Python values that it saved. If another number of ranks loads,
    they must have been equal on all ranks, or ``values_of`` names the rank whose values are loaded. DCP raises errors
    as CheckpointException.
    """

    @public_call
    def __init__(
        self,
        ckpt: Checkpointer,
        *,
        step: int | None = None,
        attempt: int | None = None,
        tier: str | None = None,
        values_of: int | None = None,
        resume: bool = True,
    ) -> None:
        self._run = open_run_of(ckpt)
        self._arguments = (step, attempt, tier)
        self._values_of = values_of
        self._resume = resume
        self._opened: OpenedCheckpoint | None = None
        self._release: Callable[[], object] = bool
        self._damaged = False

    @property
    def damaged(self) -> bool:
        """Whether the last load failed since the checkpoint is damaged in every copy; the same on all ranks."""
        return self._damaged

    # What DCP calls ----------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse a path: the Checkpointer's configuration defines where checkpoints are."""
        self._release()
        if checkpoint_id is not None:
            raise ConfigError(
                f"dcp.load: checkpoint_id={str(checkpoint_id)!r} with a TierReader, whose Checkpointer defines where "
                "checkpoints are: leave it out, and choose a step with TierReader(ckpt, step=...)"
            )

    def read_metadata(self) -> Metadata:
        """Choose the checkpoint together with the other ranks, and return its metadata.

        Its copies on stored tiers are not deleted until it has been read, until the next call of this reader, or until
        the reader is garbage-collected.
        """
        run = self._run
        self._release()
        run.check_usable()
        run.prepare_restore(continues=self._resume)
        self._damaged = False
        try:
            with run.restorer.deletions_paused():
                self._opened = open_checkpoint(run, self._request(), values_of=self._values_of)
                self._release = hold(run, self._opened.checkpoint.id, owner=self)
        except DamagedError:
            self._damaged = True
            raise
        entries = self._opened.entries
        return Metadata(
            state_dict_metadata=cast("dict[str, Any]", entries), planner_data=Paths(entries)
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: no setup is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan, each chunk from its fastest good copy. With ``resume`` the run continues from
        this checkpoint."""
        assert self._opened is not None, "read_data without read_metadata"
        reads = _Reads(self._opened, planner)
        try:
            self._read_on_all_ranks(lambda: reads.execute(plan))
        finally:
            self._opened = None  # closes the exchange between ranks
            self._release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: no path is accepted."""
        return False

    # Continuing the run ------------------------------------------------------------------------------

    def _request(self) -> RestoreRequest:
        step, attempt, tier = self._arguments
        request = self._run.restorer.request(step, attempt, tier, "raise")
        return RestoreRequest(
            step=request.step,
            attempt=request.attempt,
            tier=request.tier,
            operation="dcp.load",
            advice="or name a tier (TierReader(ckpt, tier=...))",
        )

    def _read_on_all_ranks(self, read: Callable[[], None]) -> None:
        """Read on all ranks; with ``resume``, continue from the checkpoint once all have read it. RestoreError on every
        rank if one has failed."""
        run, opened = self._run, self._opened
        assert opened is not None
        failure: Exception | None = None
        try:
            with run.restorer.deletions_paused():
                read()
        except Exception as error:
            failure = error
            if (unsent := opened.parts.give_up(error)) is not None:
                raise unsent from error
        lost = isinstance(failure, LostError)
        failed = None if failure is None else str(failure) or repr(failure)
        damaged = isinstance(failure, PASSABLE) and failure.is_damage
        all_ranks = run.session.ranks.agree(
            "dcp.load: read",
            _ReadOutcome(failed=failed, lost=lost, damaged=damaged, saved=run.lineage.saved_any),
            _read_by_all,
            _ReadDecision,
            timeout_s=run.restorer.patience_s,
        )
        self._damaged = all_ranks.damaged
        if failure is not None and not lost:
            if not (run.session.ranks.many and opened.parts.touched):
                raise failure
            of = f"dcp.load of {opened.checkpoint.id}"
            raise RestoreError(f"{of}: {failure}{HALF_FILLED}") from failure
        if all_ranks.failed is not None:
            of = f"dcp.load of {opened.checkpoint.id}"
            raise RestoreError(f"{of}: rank {all_ranks.rank}: {all_ranks.failed}{HALF_FILLED}")
        if self._resume:
            run.restorer.continue_from(opened.checkpoint, all_ranks.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadOutcome(Message):
    """The outcome of one rank's read. ``lost``: another rank knows the reason; ``damaged``: no copy is good; ``saved``:
    this rank has saved."""

    failed: str | None
    lost: bool
    damaged: bool
    saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadDecision(Message):
    """``failed`` is the error of ``rank``, if one failed; ``damaged``: damage is the reason of all; ``saved``: any rank
    has saved."""

    rank: int
    failed: str | None
    damaged: bool
    saved: bool


def _read_by_all(outcomes: Mapping[int, _ReadOutcome]) -> _ReadDecision:
    failed = [rank for rank, outcome in outcomes.items() if outcome.failed is not None]
    rank = next((r for r in failed if not outcomes[r].lost), failed[0] if failed else 0)
    saved = any(outcome.saved for outcome in outcomes.values())
    damaged = all(outcomes[r].damaged for r in failed if not outcomes[r].lost)
    return _ReadDecision(
        rank=rank,
        failed=outcomes[rank].failed,
        damaged=outcomes[rank].damaged and damaged,
        saved=saved,
    )


class _Reads:
    """The reads of one rank's plan."""

    def __init__(self, opened: OpenedCheckpoint, planner: LoadPlanner) -> None:
        self._opened = opened
        self._entries = opened.entries
        self._planner = planner
        self._builder = Builder(opened.entries.merged.header)
        self._targets: list[BlockTarget] = []
        self._after: list[Callable[[], None]] = []

    def execute(self, plan: LoadPlan) -> None:
        """Read everything into its targets, then pass tensors and values to the planner."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._value(item)
            else:
                self._tensor(item)
        targets = (*self._builder.targets(), *self._targets)
        opened = self._opened
        plan_reads(opened.parts, opened.entries.merged, opened.world_size, targets)()
        for action in self._after:
            action()

    def _tensor(self, item: ReadItem) -> None:
        """Read a box of a stored block; through a copy if its dtype differs or it is not contiguous."""
        node = self._entries.leaves[item.storage_index.fqn].node
        assert isinstance(node, TensorNode), "the plan has a tensor where the metadata has a value"
        stored = self._entries.merged.header.tensors[node.position]
        given = self._planner.resolve_tensor(item)
        target = given.detach()
        lengths = tuple(item.lengths)
        if tuple(target.shape) != lengths:
            raise RestoreError(
                f"dcp.load: {item.storage_index.fqn}: the planner returned {tuple(target.shape)} for {lengths}"
            )
        first = item.storage_index.offset or torch.Size((0,) * len(lengths))
        offset = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
        flat = as_bytes(target) if target.dtype is stored.dtype else None
        if flat is None:
            count = target.numel() * stored.dtype.itemsize
            flat = torch.empty(count, dtype=torch.uint8)
            source = flat.view(stored.dtype).view(lengths)
            self._after.append(lambda: _copy(target, source))
        self._targets.append(
            BlockTarget(position=node.position, target=flat, offset=offset, lengths=lengths)
        )
        self._after.append(lambda: self._planner.commit_tensor(item, given))

    def _value(self, item: ReadItem) -> None:
        leaf = self._entries.leaves[item.storage_index.fqn]
        if leaf.node is not None:
            self._builder.prepare(leaf.node, CPU, item.storage_index.fqn)
        self._after.append(lambda: self._planner.load_bytes(item, self._pickled(leaf)))

    def _pickled(self, leaf: Leaf) -> io.BytesIO:
        """Pickle a value that was decoded from JSON, as DCP's planners expect."""
        value: Any = leaf.value if leaf.node is None else self._builder.build(leaf.node, CPU)
        for key in leaf.inside:
            value = value[key]
        pickled = io.BytesIO()
        torch.save(value, pickled)
        pickled.seek(0)
        return pickled


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
