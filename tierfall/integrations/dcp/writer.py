"""TierWriter: DCP's plan becomes a checkpoint of the run, through host memory and tiers like any other.

In the training process it passes DCP's plan to the Checkpointer. Pickled for a process of DCP's own
(``AsyncCheckpointerType.PROCESS``), which has neither the host memory nor the Checkpointer, it becomes a DirectWriter:
each rank writes its image to the first stored tier, and the coordinator commits there once every rank has.

LazyStager: ``dcp.async_save`` returns at once, and the state is captured while DCP plans, as by ``save``. DCP gets
tensors without bytes: meta tensors of the state's shapes and dtypes. The bytes are captured from the state into the
run's host memory, lazily for what an optimizer changes, before its next step.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import currentframe
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tierfall.config import Config
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.copies.image_writes import write_view
from tierfall.core.flush.external_commits import ExternalCommits
from tierfall.core.format.records import Attempt, Commit, named_not_finite
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.sampling.finite import losses_not_finite
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types import keys
from tierfall.core.types.errors import CaptureError, ConfigError, FlushError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.integrations.dcp.planning import (
    Path,
    PlansUnchanged,
    nest,
    planned_state,
    refuse_wrapper,
    value_of,
)
from tierfall.run.checkpointer import Checkpointer, open_run_of
from tierfall.run.open_run import OpenRun
from tierfall.run.saver import as_step, checked_metrics, checked_tags
from tierfall.setup.tiers import is_shared, open_store

logger = logging.getLogger("tierfall")
_unused: weakref.WeakKeyDictionary[OpenRun, weakref.WeakSet[TierWriter]] = (
    weakref.WeakKeyDictionary()
)
"""The writers that DCP has not used yet: a stager gets its step from the writer of the same call."""
_warned: weakref.WeakSet[OpenRun] = weakref.WeakSet()
"""The runs of which it was logged that training and ``async_save`` share a group."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A capture that began before DCP planned: its handle, or the error instead of one, and dtype and shape of its
    tensors by name."""

    begun: SaveHandle | Exception
    tensors: Mapping[str, tuple[torch.dtype, torch.Size]]

    def handle(self, plan: SavePlan, planner: SavePlanner) -> SaveHandle:
        """Return the handle of what DCP plans to write. Raises the error of the capture if it did not begin, and
        CaptureError if a planner renamed or changed what was captured."""
        if isinstance(self.begun, Exception):
            raise self.begun
        for write in plan.items:
            if write.type is WriteItemType.BYTE_IO or write.tensor_data is None:
                continue
            planned = (write.tensor_data.properties.dtype, write.tensor_data.size)
            name = write.index.fqn
            if self.tensors.get(name) != planned or not self._is_hollow(name, planner):
                raise CaptureError(
                    f"dcp.async_save: {name} is planned as {planned[0]} {tuple(planned[1])}, and was captured "
                    "otherwise or not at all: a LazyStager captures the state that async_save receives, before a "
                    "planner changes it"
                )
        return self.begun

    def _is_hollow(self, name: str, planner: SavePlanner) -> bool:
        """Return whether the planned tensor is the staged one, which is on the meta device."""
        held = planner.state_dict.get(name) if isinstance(planner, DefaultSavePlanner) else None
        return isinstance(held, torch.Tensor) and held.is_meta


class TierWriter(PlansUnchanged, StorageWriter):
    """Writes one step through a Checkpointer: ``dcp.save(state, storage_writer=TierWriter(ckpt, step=100))``.

    ``step`` must follow the run's last one. ``until`` names the tier on which the checkpoint must be committed before
    DCP's save ends. Without it the save ends once every rank's image is sealed in host memory; with ``no_dist``, where
    ranks do not communicate, once this rank's image is. ``metrics`` and ``tags`` are as for ``Checkpointer.save``. DCP
    raises an error of any rank on all ranks, as CheckpointException.
    """

    @public_call
    def __init__(
        self,
        ckpt: Checkpointer,
        *,
        step: int,
        until: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        run = open_run_of(ckpt)
        known = [tier.name for tier in run.config.chain]
        if until is not None and until not in known:
            raise ConfigError(
                f"TierWriter: no tier is named {until!r}; there are {', '.join(known)}"
            )
        self.step = step
        self.metrics = metrics or {}
        self.tags = checked_tags(tags)
        self._run = run
        self._until = until
        self._staged: Staged | None = None
        self._used = False
        self._thread = threading.get_ident()  # async_save uses the writer on another
        _unused.setdefault(run, weakref.WeakSet()).add(self)

    # What DCP calls ----------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save; ConfigError for a path."""
        if checkpoint_id is not None:
            self._take()
        super().reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return None. DCP calls this first, so that from now on no stager captures for this writer."""
        self._take()
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin the save: one TierWriter writes one step."""
        if self._used:
            raise ConfigError(
                f"dcp.save: this TierWriter was used for step {self.step}; create a new one for each save"
            )
        self._used = True
        if threading.get_ident() == self._thread or self._run in _warned:
            return
        if _shares_default_group():
            _warned.add(self._run)
            logger.warning(
                "dcp.async_save: its thread and the training use one gloo group, the default one: their collectives "
                "mix, and ranks hang or abort. Make group = torch.distributed.new_group(backend='gloo'), and pass "
                "process_group=group to async_save and to tierfall.open"
            )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged; ConfigError where the ranks that save are not those that opened the
        Checkpointer."""
        there = self._run.session.ranks.shard.world_size
        if len(plans) not in (1, there):
            raise ConfigError(
                f"dcp.save: {len(plans)} ranks save, and the Checkpointer was opened by {there}: give open the same "
                "process_group"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and wait until all ranks' parts are stored as ``until`` demands."""
        staged, self._staged = self._staged, None
        handle = self._save(plan, planner) if staged is None else staged.handle(plan, planner)
        if self._until is None:
            handle.captured()
        else:
            handle.wait(self._until)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # DCP looks at none of them
        return done

    def _save(self, plan: SavePlan, planner: SavePlanner) -> SaveHandle:
        return self._run.save(
            self.step,
            lambda cache: walk_state(planned_state(plan, planner), with_random=False),
            metrics=self.metrics,
            tags=self.tags,
            may_be_lazy=False,
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the coordinator of the run commits. The metadata is unchanged: with cached plans all saves share
        the object."""

    # Called by a stager ------------------------------------------------------------------------------

    def stage(self, capture: Callable[[TierWriter], Staged]) -> None:
        """Capture the state now, for this writer's step."""
        self._take()
        self._staged = capture(self)

    def _take(self) -> None:
        _unused.get(self._run, weakref.WeakSet()).discard(self)

    # Pickling for another process --------------------------------------------------------------------

    def __reduce__(self) -> tuple[type[DirectWriter], tuple[Any]]:
        if self._staged is not None:
            raise ConfigError(
                "dcp.async_save: LazyStager needs AsyncCheckpointerType.THREAD: another process cannot wait for what "
                "is captured in this one"
            )
        self._take()
        orders = direct_write(self._run, self.step, metrics=self.metrics, tags=self.tags)
        return DirectWriter, (orders,)


def _shares_default_group() -> bool:
    """Return whether the collectives of DCP's call, which is on this thread's stack, use the default group, and gloo
    runs there what the training runs: the collectives of two threads on it are mixed up.

    DCP passes its group to no method of a writer.
    """
    frame = currentframe()
    while frame is not None and "distW" not in frame.f_locals:
        frame = frame.f_back
    call = None if frame is None else frame.f_locals["distW"]
    if call is None or not call.use_dist or call.group not in (None, dist.group.WORLD):
        return False
    backends = dict(each.split(":") for each in dist.get_backend_config().split(","))
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    used = backends.get(device.type, backends.get("cpu"))
    return dist.get_world_size() > 1 and used == "gloo"


def _next_writer(run: OpenRun) -> TierWriter:
    """Return the writer that a state is staged for: the only live one that has not been used.

    Raises ConfigError where there is none or are several: a state must not be saved as the step of another one.
    """
    unused = _unused.get(run, ())
    if len(unused) > 1:
        gc.collect()  # an unreachable writer may not have been collected yet
    found = sorted(unused, key=lambda writer: writer.step)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            "dcp.async_save: a LazyStager captures for a TierWriter of the same Checkpointer: "
            "storage_writer=TierWriter(ckpt, step=...), a new one for each save"
        )
    steps = ", ".join(str(writer.step) for writer in found)
    raise ConfigError(
        f"dcp.async_save: a LazyStager cannot know which TierWriter it captures for: those of steps {steps} are "
        "unused. Create each writer in the call of async_save: storage_writer=TierWriter(ckpt, step=...), and "
        "delete references to unused ones"
    )


class LazyStager(AsyncStager):
    """Stages lazily: ``dcp.async_save(state, storage_writer=TierWriter(ckpt, step=100),
    async_stager=LazyStager(ckpt))``, in THREAD mode.

    The parameters and the state of an optimizer that has stepped since the last save are captured lazily. Everything
    else, and everything at the first save, is copied before ``async_save`` returns. Replicas of what is captured lazily
    are assigned to ranks, as by ``Checkpointer.save``. One stager serves all saves of a Checkpointer.
    """

    _synchronize_after_execute = False

    @public_call
    def __init__(self, ckpt: Checkpointer) -> None:
        self._run = open_run_of(ckpt)

    @public_call
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin the capture for the only TierWriter that was created and not used yet; return the state without its
        bytes.

        Raises ConfigError where there are several such writers. Raises CaptureError for what cannot be saved; with
        several ranks, the future of the save does.
        """
        flat, paths = flatten_state_dict(state_dict)
        staged = {name: _hollow(value) for name, value in flat.items()}
        _next_writer(self._run).stage(lambda writer: self._capture(flat, paths, writer))
        return nest(staged, paths)

    def _capture(
        self, flat: Mapping[str, Any], paths: Mapping[str, Path], writer: TierWriter
    ) -> Staged:
        def walk(cache: WalkCache) -> StateView:
            leaves = {name: _leaf(name, value) for name, value in flat.items()}
            return walk_state(nest(leaves, paths), with_random=False)

        tensors = {n: (t.dtype, t.shape) for n, t in flat.items() if isinstance(t, torch.Tensor)}
        begun: SaveHandle | Exception
        try:
            begun = self._run.save(writer.step, walk, metrics=writer.metrics, tags=writer.tags)
        except Exception as error:
            if not self._run.session.ranks.many:
                raise
            begun = error  # the other ranks wait in DCP's planning, which raises it on all ranks
        return Staged(begun, tensors)

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _leaf(name: str, value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value_of(name, value)
    refuse_wrapper(name, value)
    return value


def _hollow(value: Any) -> Any:
    """Return a tensor without bytes, as DCP plans it; a value unchanged."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            local = torch.empty_like(value.to_local(), device="meta")
        return DTensor.from_local(
            local,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="meta", requires_grad=False)
    return value


# In a process of DCP's own -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectWrite:
    """What a process needs to write one rank's shard of one step."""

    config: Config
    tier: str
    attempt: Attempt
    shard: Shard
    commit: Commit
    """The record of the step, without its files."""


def direct_write(
    run: OpenRun, step: int, *, metrics: Mapping[str, Any], tags: Sequence[str]
) -> DirectWrite:
    """Reserve the next place in the run's lineage for ``step``, which another process writes.

    Raises StepError for a step that may not follow, ConfigError where one rank cannot commit on the first stored tier.
    """
    session, lineage = run.session, run.lineage
    run.check_usable()
    step = as_step(step)
    tier = next((t for t in run.config.written if t.name in session.stores), None)
    if tier is None:
        raise ConfigError(
            "dcp.async_save: PROCESS mode writes to a stored tier, and the configuration has none"
        )
    if not is_shared(tier) and len(session.ranks.topology.nodes) > 1:
        raise ConfigError(
            f"dcp.async_save: in PROCESS mode rank 0 commits, and each node has its own tier {tier.name}: put a tier "
            "first that all nodes share, or use AsyncCheckpointerType.THREAD"
        )
    with run.saver.lock:
        lineage.check(step)
        place = lineage.next(step, above=session.coordinator.ledger.least_ordinal)
        lineage.advance(place)
    session.call_soon(
        lambda: _expect(session.coordinator.external_commits, place.checkpoint, tier.name)
    )
    read = {name: float(value) for name, value in checked_metrics(metrics).items()}
    commit = Commit(
        lineage=place,
        world_size=session.ranks.shard.world_size,
        files=(),
        nodes=(session.node,),
        wall_time_s=time.time(),
        metrics=read,
        tags=checked_tags(tags),
        not_finite=named_not_finite(losses_not_finite(read)),
    )
    return DirectWrite(
        config=run.config,
        tier=tier.name,
        attempt=lineage.attempt,
        shard=session.ranks.shard,
        commit=commit,
    )


def _expect(finder: ExternalCommits, id: CheckpointId, tier: str) -> None:
    finder.search(InterruptibleEvent())  # for earlier ones
    finder.expect(id, tier)


@dataclass(frozen=True)
class ImageFiles(WriteResult):
    """A rank's image and manifest, as in the commit record, in ``storage_data``."""


class DirectWriter(PlansUnchanged, StorageWriter):
    """Writes one rank's shard of a step to a tier; on the coordinator it also commits."""

    def __init__(self, request: DirectWrite) -> None:
        self._request = request

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no setup is needed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's image and manifest, which do not count before ``finish``."""
        request = self._request
        view = walk_state(planned_state(plan, planner), with_random=False)
        with open_store(request.config, request.tier) as store:
            store.fence.check(request.attempt)
            shard, chunk_bytes = request.shard, request.config.chunk_bytes
            files = write_view(store, view, request.commit, shard=shard, chunk_bytes=chunk_bytes)
        index = MetadataIndex(keys.shard_name(request.shard))
        written = ImageFiles(
            index=index, size_in_bytes=sum(f.bytes for f in files), storage_data=files
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([written])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the step; FlushError where a rank's image is missing."""
        request = self._request
        id, world_size = request.commit.lineage.checkpoint, request.shard.world_size
        found = [r for of_rank in results for r in of_rank if isinstance(r, ImageFiles)]
        files = tuple(file for result in found for file in result.storage_data)
        if len({result.index for result in found}) != world_size:
            raise FlushError(
                f"dcp.save of step {id.step}: {len(found)} of {world_size} ranks have written their images; the step "
                "is not committed. In PROCESS mode all ranks of the Checkpointer save together, without no_dist"
            )
        with open_store(request.config, request.tier) as store:
            store.commit(replace(request.commit, files=files), attempt=request.attempt)
            store.write_latest(id)
