"""TierWriter: DCP's plan becomes a checkpoint of the run, through arena and tiers like any other.

In the training process it passes DCP's plan to the Checkpointer. Pickled for a process of DCP's own, it becomes a
``DirectWriter`` (``direct``).

LazyStager: ``dcp.async_save`` returns at once, and the state is captured while DCP plans, as by ``save``. DCP gets
tensors without bytes: meta tensors of the state's shapes and dtypes. The bytes are captured from the state into the
run's arena, lazily for what an optimizer changes, before its next step.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import currentframe
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types.errors import CaptureError, ConfigError
from tierfall.integrations.dcp.direct import DirectWriter, direct_write
from tierfall.integrations.dcp.planning import (
    Path,
    count_outcomes,
    nest,
    planned_state,
    refuse_wrapper,
    results_of,
    value_of,
)
from tierfall.run.checkpointer import Checkpointer, open_run_of
from tierfall.run.open_run import OpenRun
from tierfall.run.saver import checked_tags

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


class TierWriter(StorageWriter):
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
        """Refuse a path: the Checkpointer's configuration defines where checkpoints are written."""
        if checkpoint_id is not None:
            self._take()
            raise ConfigError(
                f"dcp.save: checkpoint_id={str(checkpoint_id)!r} with a TierWriter, whose Checkpointer defines where "
                "checkpoints are written: leave it out"
            )

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

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged; a plan that DCP has cached is not used."""
        return plan

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
        done.set_result(results_of(plan))
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
        """Check that every item was written. The metadata is unchanged: with cached plans all saves share the
        object."""
        count_outcomes(metadata, results, self.step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: no path is accepted."""
        return False

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
