"""Megatron-Core: strategies of ``megatron.core.dist_checkpointing`` that save to tierfall's tiers, and load from them.

    dist_checkpointing.save(state, folder, TierSaveStrategy(ckpt))
    dist_checkpointing.load(state, folder, load, load)  # load = TierLoadStrategy(ckpt)

A checkpoint has everything: each rank's blocks of the tensors, the sharded objects and the common state. Replicas are
found by tierfall, and each is written once. The number in the folder's name is the step; core writes ``common.pt`` and
``metadata.json`` there, and reads ``metadata.json`` before a load.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tierfall import Checkpointer, SaveHandle
from tierfall.errors import CaptureError, ConfigError, RestoreError
from tierfall.integrations.frameworks import (
    begin,
    check_on_all_ranks,
    check_version,
    on_each_node,
)
from tierfall.integrations.keyed import Block, KeyedCheckpoints

check_version(
    "megatron-core"
)  # later ones replace a strategy that is not their own, without a word
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, dict_utils  # noqa: E402
from megatron.core.dist_checkpointing.mapping import is_main_replica  # noqa: E402
from megatron.core.dist_checkpointing.strategies import async_utils, base, common  # noqa: E402

__all__ = ["TierLoadStrategy", "TierSaveStrategy"]

ENTRY = "megatron"
BACKEND = "tierfall"
CONFIG = "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM reads there which step to load."""
_OBJECTS, _REPLICAS, _LAYOUTS, _COMMON_STATE = "objects", "replicas", "layouts", "common"
"""Groups of values. Each rank keeps its replica of an object: the same layout reads no other rank's image for it."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""The keys of optimizers: master weights and moments."""
_BUCKETS = re.compile(r"(.*optimizer\.distributed\.dp_group_idx_\d+)\.")
"""The keys of a distributed optimizer as dp_reshardable. Its buckets have the parameters of one rank's layout."""


def step_of(checkpoint_dir: str | os.PathLike[str]) -> int:
    """Return the step that the name of a folder ends with. Raises ConfigError."""
    found = re.search(r"(\d+)$", name := Path(checkpoint_dir).name)
    if found is None:
        raise ConfigError(
            f"dist_checkpointing: the folder's name, {name!r}, has no step; expected a number at its end, such as "
            "iter_0000100"
        )
    return int(found[1])


class _CommonState(common.TorchCommonSaveStrategy):  # type: ignore[misc]
    """Core's strategy for the common state, which keeps it for the save of the sharded state that follows: core accepts
    no other one."""

    kept: tuple[str, dict[str, Any]] | None = None

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: Any) -> None:
        super().save_common(common_state_dict, checkpoint_dir)
        self.kept = str(checkpoint_dir), common_state_dict

    def take(self, checkpoint_dir: Any) -> dict[str, Any]:
        (folder, state), self.kept = self.kept or ("", {}), None
        if folder != str(checkpoint_dir):
            raise CaptureError(
                "dist_checkpointing.save: core has not saved the common state before: call the strategy through "
                "megatron.core.dist_checkpointing.save"
            )
        return state


_COMMON = _CommonState("torch", 1)


class TierSaveStrategy(base.AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves through a Checkpointer: ``dist_checkpointing.save(state, folder, TierSaveStrategy(ckpt))``.

    All ranks save, by one strategy for all saves. Parameters, and the tensors of optimizers, are captured lazily,
    before the next step of a torch optimizer; all else before ``save`` returns. A save ends once all ranks' images are
    in host memory. An asynchronous one starts no process, and the finalization of its request does not wait for the
    capture. ``handle`` is the SaveHandle of the last save, which can. Raises CaptureError on all ranks if one could not
    capture its part; the finalization, if one could not begin to.
    """

    def __init__(self, ckpt: Checkpointer) -> None:
        super().__init__(BACKEND, 1)
        self.handle: SaveHandle | None = None
        self._ckpt = ckpt
        self._saved = KeyedCheckpoints(ckpt, ENTRY, doing="dist_checkpointing.save")
        base.register_default_strategy(base.StrategyAction.SAVE_COMMON, "torch", 1, _COMMON)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: sharded objects are saved with the tensors."""
        return True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> async_utils.AsyncRequest:
        """Begin the capture, and return a request whose finalization raises on all ranks if one could not."""
        return async_utils.AsyncRequest(None, (), [self._begin(sharded_state_dict, checkpoint_dir)])

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save, and wait until all ranks' images are in host memory."""
        self._begin(sharded_state_dict, checkpoint_dir, waits=True)()

    def _begin(
        self, sharded_state_dict: Any, checkpoint_dir: Any, *, waits: bool = False
    ) -> Callable[[], None]:
        """Begin the capture. Return a function that raises on all ranks if one could not; if it ``waits``, also if the
        capture fails later."""
        step, entries = step_of(checkpoint_dir), [*dict_utils.nested_values(sharded_state_dict)]
        begun: SaveHandle | Exception
        try:
            blocks, values = _content(entries)
            state = _COMMON.take(checkpoint_dir)
            values[_COMMON_STATE] = {} if torch.distributed.get_rank() else {_COMMON_STATE: state}
            self.handle = begun = self._saved.save(step, blocks, values)
        except Exception as error:  # noqa: BLE001 - the other ranks wait; raised on all
            begun = error

        def finish() -> None:
            if isinstance(begun, Exception):
                raise begun
            if waits:
                begun.captured()

        what = f"dist_checkpointing.save of step {step}"
        return partial(check_on_all_ranks, self._ckpt, what, finish, CaptureError)


def _content(entries: Iterable[Any]) -> tuple[list[Block], dict[str, dict[str, Any]]]:
    """Return the blocks and the values of ShardedTensors and ShardedObjects."""
    blocks: list[Block] = []
    values: dict[str, dict[str, Any]] = {_OBJECTS: {}, _REPLICAS: {}}
    for entry in entries:
        if isinstance(entry, ShardedObject):
            group = _OBJECTS if is_main_replica(entry.replica_id) else _REPLICAS
            values[group][entry.unique_key] = entry.data
        elif entry.data is None:
            raise CaptureError(f"dist_checkpointing.save: {entry.key} has no data")
        elif entry.has_regular_grid or is_main_replica(entry.replica_id):
            blocks.append(_block(entry))  # others are buckets, whose padding nobody has set
    return blocks, {**values, _LAYOUTS: dict.fromkeys(_layouts(blocks), True)}


def _block(entry: Any) -> Block:
    """Return the block of a ShardedTensor. Parameters change in an optimizer's step alone, as do its own tensors, which
    require no gradients. Tensors that tensor parallel ranks duplicate may differ in their last bits."""
    replica = entry.replica_id
    return Block(
        key=entry.key,
        data=entry.data.detach()[(None,) * entry.prepend_axis_num],
        shape=tuple(entry.global_shape),
        offset=tuple(entry.global_offset),
        is_trained=entry.data.requires_grad or _OPTIMIZER.match(entry.key) is not None,
        is_padded=entry.allow_shape_mismatch,
        copy=replica[1] if isinstance(replica, tuple) and len(replica) == 3 else 0,
    )


def _layouts(blocks: Iterable[Block]) -> list[str]:
    """Return, for each distributed optimizer with buckets, a digest of the places of this rank's other blocks.

    All ranks together have all digests, and have the same ones with another number of replicas.
    """
    matched = [(_BUCKETS.match(block.key), block) for block in blocks]
    others = sorted((b.key, *b.piece) for found, b in matched if found is None)
    digest = hashlib.sha256(repr(others).encode()).hexdigest()[:32]
    return sorted({f"{found[1]} {digest}" for found, _ in matched if found is not None})


# Loading -------------------------------------------------------------------------------------------


class TierLoadStrategy(base.LoadShardedStrategy, base.LoadCommonStrategy):  # type: ignore[misc]
    """Loads through a Checkpointer, as sharded and as common strategy: ``dist_checkpointing.load(state, folder, load,
    load)``.

    All ranks load, into any layout; what several need is read once. The run continues from the loaded step, as after
    ``restore``; with ``resume=False`` it does not, for example to look at an older one. ``write_folder`` makes the
    folders that core and Megatron-LM look for. Raises RestoreError for a step that is not there, and for a state that
    does not fit it.
    """

    def __init__(self, ckpt: Checkpointer, *, resume: bool = True) -> None:
        self._ckpt, self._resume = ckpt, resume
        self._saved = KeyedCheckpoints(ckpt, ENTRY, doing="dist_checkpointing.load")
        for action in (base.StrategyAction.LOAD_SHARDED, base.StrategyAction.LOAD_COMMON):
            base.register_default_strategy(action, BACKEND, 1, self)

    def write_folder(self, folder: str | os.PathLike[str]) -> int | None:
        """Write what a load looks for into ``folder``, on each node: a folder such as iter_0000100 with
        ``metadata.json`` for each checkpoint, and the tracker file of Megatron-LM with the newest step. Return that.

        Returns None, and begins the run, if it has no checkpoint: Megatron-LM then loads what it finds there of its own
        format. Raises ConfigError if that is newer than the run. All ranks make this call.
        """
        found = self._saved.value_of_root(None, _COMMON_STATE, _COMMON_STATE)
        if found is None:
            begin(self._ckpt, "write_folder")
            return None
        newest, _ = found
        config = json.dumps({"sharded_backend": BACKEND, "common_backend": BACKEND})
        steps = {newest, *(c.step for c in self._ckpt.checkpoints() if not c.abandoned)}
        files = {Path(folder, f"iter_{step:07d}", CONFIG): config for step in steps}
        files[Path(folder, TRACKER)] = str(newest)

        def write(rank: int) -> None:
            _check_older(Path(folder), newest)
            for path, text in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                made = path.with_name(f".{path.name}.{rank}")
                made.write_text(text)
                made.replace(path)  # other nodes may read it

        on_each_node(self._ckpt, "write_folder", write)
        return newest

    # What core calls ----------------------------------------------------------------------------------

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: sharded objects are loaded with the tensors."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise ConfigError for a folder that another strategy wrote."""
        if loaded_backend not in (BACKEND, _COMMON.backend):
            raise ConfigError(
                f"dist_checkpointing.load: the folder has a checkpoint of the format {loaded_backend!r}: load it "
                "without TierLoadStrategy, and save it with TierSaveStrategy"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Do nothing: the format of tierfall has a version of its own."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Return the common state."""
        found = self._saved.value_of_root(step_of(checkpoint_dir), _COMMON_STATE, _COMMON_STATE)
        assert found is not None, "a step that is not there is an error"
        state: dict[str, Any] = found[1]
        return state

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Fill the ShardedTensors in place, and return the state with tensors and objects in place of them."""
        entries = [*dict_utils.nested_values(sharded_state_dict)]
        tensors = [each for each in entries if isinstance(each, ShardedTensor)]
        objects = [each for each in entries if isinstance(each, ShardedObject)]
        for each in tensors:
            each.init_data("cpu")  # unless it has some
        blocks = [_block(each) for each in tensors]
        values = self._saved.load(
            step_of(checkpoint_dir),
            blocks,
            [each.unique_key for each in objects],
            (_OBJECTS, _REPLICAS),
            check=partial(_check_buckets, _layouts(blocks)),
            continues=self._resume,
        )
        found: dict[int, Any] = {id(each): each.data.detach() for each in tensors}
        found |= {id(each): value for each, value in zip(objects, values, strict=True)}
        return dict_utils.dict_list_map_outplace(lambda each: found[id(each)], sharded_state_dict)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Load objects alone."""
        return self.load(sharded_objects_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Return a ShardedTensor without data for each tensor, by key."""
        found = self.load_sharded_metadata(checkpoint_dir).items()
        return {key: each for key, each in found if isinstance(each, ShardedTensor)}

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Return a ShardedTensor or a ShardedObject without data for each tensor and object, by key."""
        tensors, objects = self._saved.describe(step_of(checkpoint_dir), _OBJECTS)
        found = {key: ShardedObject.empty_from_unique_key(key) for key in objects}
        whole = ShardedTensor.from_rank_offsets
        return {**found, **{key: whole(key, each).without_data() for key, each in tensors.items()}}


def _check_buckets(
    wanted: Collection[str], keys_of: Callable[[str], Collection[str]], what: str
) -> None:
    """Raise RestoreError for buckets of a distributed optimizer if the parameters beside them are not those saved."""
    saved = keys_of(_LAYOUTS)
    if saved and not {*saved} >= {*wanted}:
        raise RestoreError(
            f"{what} has the state of the distributed optimizer as dp_reshardable, which another DP can load, and no "
            "other TP, PP or EP, nor a part of the state: save it as fully_reshardable "
            "(--dist-ckpt-optim-fully-reshardable) with the layout that saved this, and load that"
        )


def _check_older(folder: Path, newest: int) -> None:
    """Raise ConfigError if the tracker file there names a newer checkpoint of another format."""
    try:
        step = int((folder / TRACKER).read_text())
        config = json.loads((folder / f"iter_{step:07d}" / CONFIG).read_text())
    except (FileNotFoundError, ValueError):
        return
    if step > newest and config["sharded_backend"] != BACKEND:
        raise ConfigError(
            f"write_folder: {folder} has step {step} in the format {config['sharded_backend']!r}, and the run's newest "
            f"is {newest}: to continue from step {step}, open a new run; to go back to {newest}, delete "
            f"{folder / TRACKER}"
        )
