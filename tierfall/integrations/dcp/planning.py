"""From DCP's plan to the state of an image: nested as the user's state, each tensor as the blocks that this rank
writes.

DCP's plan assigns tensors to ranks. It does not cover Python values: each rank writes its own, which DCP takes for
replicas of each other. They are never pickled.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from tierfall.core.state.item import item
from tierfall.core.state.state_dicts import is_stateful
from tierfall.core.tensors.dtensor import Branch, LocalBlocks, TensorPiece
from tierfall.core.tensors.wrappers import is_wrapper
from tierfall.core.types.errors import CaptureError, ConfigError, RestoreError

Path = tuple[str | int, ...]


class PlansUnchanged:
    """What a reader and a writer share: they leave DCP's plans unchanged, and accept no path."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged; a plan that DCP has cached is not used."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans unchanged."""
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse a path: the Checkpointer's configuration defines where checkpoints are."""
        if checkpoint_id is not None:
            raise ConfigError(
                f"{type(self).__name__}: checkpoint_id={str(checkpoint_id)!r}: its Checkpointer defines where "
                "checkpoints are: leave it out; TierReader(ckpt, step=...) loads an older one"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: no path is accepted."""
        return False


class TierSavePlanner(DefaultSavePlanner):
    """DCP's default planner with a plan cache of its own, and without ``torch.save``.

    DCP caches plans by the name of the planner's class, for the whole process: with ``enable_plan_caching=True``, two
    runs of one process need planners of two classes.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return tensors and Python values unchanged: TierWriter encodes values as tagged JSON."""
        return object


class CompleteLoadPlanner(DefaultLoadPlanner):
    """Refuses to leave tensors of the checkpoint out, such as a layer, which the next save would not have any more.
    ``without`` are the entries of the state that may be left out."""

    def __init__(self, without: Collection[str] = ()) -> None:
        super().__init__()
        self._without = frozenset(without)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raise RestoreError for tensors that no rank asks for."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        asked = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        left = [n for n in saved.keys() - asked if n.partition(".")[0] not in self._without]
        left = [
            n for n in left if isinstance(e := saved[n], TensorStorageMetadata) and e.size.numel()
        ]
        if left:
            raise RestoreError(
                f"dcp.load: the checkpoint has {len(left)} tensors that the state of this configuration lacks, such as "
                f"{min(left)}: resume with the configuration that saved. `tierfall export --format dcp` writes it as "
                "DCP's own, of which a new run may load a part"
            )
        return super().create_global_plan(global_plan)


def nest(leaves: Mapping[str, object], paths: Mapping[str, Path]) -> Branch:
    """Nest leaves, given by flat name, at their paths; a name without a path is a key of the state."""
    root = Branch()
    for name, leaf in leaves.items():
        *above, last = paths.get(name, (name,))
        container: Any = root
        for key in above:
            container = container.setdefault(key, Branch())
        container[last] = leaf
    return Branch({key: _with_lists(below) for key, below in root.items()})


def _with_lists(value: object) -> object:
    """Make a list of a branch whose keys are indices."""
    if not isinstance(value, Branch):
        return value
    built: dict[Any, object] = {key: _with_lists(below) for key, below in value.items()}
    if any(isinstance(key, int) for key in built):
        return [built.get(index) for index in range(max(built) + 1)]
    return Branch(built)


def planned_state(plan: SavePlan, planner: SavePlanner) -> Branch:
    """Return the state that this rank writes: its blocks of the plan's tensors, and its own Python values.

    Raises CaptureError, with the name, for an entry that cannot be saved; ConfigError for a planner that does not
    extend DCP's own.
    """
    if not isinstance(planner, DefaultSavePlanner):
        raise ConfigError(
            f"dcp.save: TierWriter supports planners that extend DefaultSavePlanner, not {type(planner).__qualname__}: "
            "it needs Python values before they are pickled"
        )
    blocks: dict[str, list[tuple[torch.Tensor, TensorPiece | None]]] = {}
    values: dict[str, object] = {}
    for write in plan.items:
        if write.type is WriteItemType.BYTE_IO:
            values[write.index.fqn] = planner.lookup_object(write.index)
        else:
            blocks.setdefault(write.index.fqn, []).append(_block(write, planner))
    leaves: dict[str, object] = {}
    for name, held in planner.state_dict.items():
        is_planned = isinstance(held, torch.Tensor) or hasattr(held, "__create_write_items__")
        is_value = name in values or not is_planned
        leaves[name] = value_of(name, held) if is_value else _as_leaf(blocks.pop(name, []))
    leaves |= {name: _as_leaf(held) for name, held in blocks.items()}
    leaves |= {name: value_of(name, v) for name, v in values.items() if name not in leaves}
    return nest(leaves, planner.mappings)


def _as_leaf(blocks: list[tuple[torch.Tensor, TensorPiece | None]]) -> object:
    """Return blocks as a leaf. A tensor on a device is read in the order of this thread's work there, without a second
    copy."""
    on_host = all(tensor.is_cpu for tensor, _ in blocks)
    return item(LocalBlocks(tuple(blocks), alone=True), changes="anytime" if on_host else "on_step")


def _block(
    write: WriteItem, planner: DefaultSavePlanner
) -> tuple[torch.Tensor, TensorPiece | None]:
    name, tensor_data = write.index.fqn, write.tensor_data
    tensor = planner.resolve_data(write)
    if not isinstance(tensor, torch.Tensor) or tensor_data is None:
        raise CaptureError(
            f"dcp.save: {name}: the planner returned {type(tensor).__qualname__} for a tensor"
        )
    refuse_wrapper(name, tensor)
    if tensor.is_meta:
        raise CaptureError(
            f"dcp.save: {name} has no data here: a LazyStager staged it for another TierWriter, one that had not been "
            "used. Create each writer in the call of async_save"
        )
    if write.type is WriteItemType.TENSOR:
        return tensor, None
    place = (tensor_data.size, tensor_data.chunk.offsets, tensor_data.chunk.sizes)
    return tensor, TensorPiece(*map(tuple, place))


def refuse_wrapper(name: str, tensor: object) -> None:
    """Raise CaptureError for a tensor whose class has inner tensors, which DCP does not plan."""
    if is_wrapper(tensor):
        kind = type(tensor)
        raise CaptureError(
            f"dcp.save: {name}: tensors of {kind.__module__}.{kind.__qualname__} are not saved by dcp.save; save the "
            "state with Checkpointer.save, which saves their inner tensors"
        )


def value_of(name: str, value: object) -> object:
    """Return a Python value that can be saved; CaptureError for an object that DCP would have pickled."""
    if is_stateful(value) or isinstance(value, nn.Module):
        raise CaptureError(
            f"dcp.save: {name} is an object with a state_dict of its own ({type(value).__qualname__}), and DCP calls "
            "that only for the entries of the state itself: put its state_dict() there"
        )
    return value
