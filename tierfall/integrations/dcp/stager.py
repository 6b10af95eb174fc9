"""LazyStager: ``dcp.async_save`` returns at once, and the state is captured while DCP plans, as by ``save``.

DCP gets tensors without bytes: meta tensors of the state's shapes and dtypes. The bytes are captured from the state
into the run's arena, lazily for what an optimizer changes, before its next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.integrations.dcp import planning
from tierfall.integrations.dcp.writer import Staged, TierWriter, next_writer
from tierfall.run.checkpointer import Checkpointer, open_run_of


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
        next_writer(self._run).stage(lambda writer: self._capture(flat, paths, writer))
        return planning.nest(staged, paths)

    def _capture(
        self, flat: Mapping[str, Any], paths: Mapping[str, planning.Path], writer: TierWriter
    ) -> Staged:
        def walk(cache: WalkCache) -> StateView:
            leaves = {name: _leaf(name, value) for name, value in flat.items()}
            return walk_state(planning.nest(leaves, paths), with_random=False)

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
        return planning.value_of(name, value)
    planning.refuse_wrapper(name, value)
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
