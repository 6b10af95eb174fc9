"""TierReader: ``dcp.load`` from a run's tiers. DCP's planner reshards, each chunk is verified, and no stored bytes are
unpickled. All ranks choose the checkpoint together, and its shards are merged.

Python values are stored as tagged JSON. DCP's planners unpickle bytes; they get bytes that are pickled here from the
decoded values.

DCP's names of entries (FQNs) are flat: it joins keys by dots, and flattens a list only if it contains tensors or
mappings. Entries that ``Checkpointer.save`` wrote get such names, too: those of a module are the keys of its
state_dict, those of an optimizer are the ones of ``get_optimizer_state_dict``, by parameter name.
"""

from __future__ import annotations

import io
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.image.merge import MergedHeader
from tierfall.core.image.tree import (
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    OptimizerNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    leaves,
)
from tierfall.core.load.build import CPU, BlockTarget, Builder, Make
from tierfall.core.load.choices import plain_value
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.reshard import ResizeRules, merge_images, plan_reads
from tierfall.core.restore.restore import DamagedError, Progress, read_first
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.tensors import names
from tierfall.core.tensors.tensors import as_bytes
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.values import CheckpointId
from tierfall.integrations.dcp.planning import Path, PlansUnchanged
from tierfall.run.checkpointer import Checkpointer, open_run_of
from tierfall.run.open_run import OpenRun
from tierfall.run.session import Session

logger = logging.getLogger("tierfall")


def open_checkpoint(
    run: OpenRun, request: RestoreRequest, *, values_of: int | None
) -> tuple[CheckpointReader, DcpEntries]:
    """Open the newest checkpoint with good headers, the same on all ranks; return its reader and its entries.
    ``values_of`` is the rank whose values are loaded if another number of ranks saved.

    Raises RestoreError where there is none, none can be read, or the newest is temporarily unreachable.
    """
    shard = run.session.ranks.shard

    def read_headers(parts: CheckpointReader) -> DcpEntries:
        own = shard.rank if parts.world_size == shard.world_size else values_of
        return DcpEntries(merge_images(parts, shard.rank, ResizeRules(values_of=own)))

    found = run.read_newest(request, partial(read_first, read=read_headers))
    if found is None:
        raise RestoreError(
            f"{request.operation}: run {run.session.run} holds no checkpoint that can be read"
        )
    return found


def hold(run: OpenRun, parts: CheckpointReader, *, owner: object) -> Callable[[], object]:
    """Protect a checkpoint's copies on stored tiers from retention and eviction, and read for other ranks; return a
    function that ends this, as the end of ``owner`` does."""
    session, id = run.session, parts.checkpoint.id
    session.call_in_turn(lambda: session.coordinator.ledger.reading.update([id]))
    release = weakref.finalize(owner, _release, session, id, parts)
    release.atexit = False
    return release


def _release(session: Session, id: CheckpointId, parts: CheckpointReader) -> None:
    parts.close()
    ledger = session.coordinator.ledger

    def end() -> None:
        ledger.reading -= Counter([id])

    session.call_soon(end)


class TierReader(PlansUnchanged, StorageReader):
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
        self._opened: tuple[CheckpointReader, DcpEntries] | None = None
        self._release: Callable[[], object] = bool
        self.damaged = False
        """Whether the last load failed since the checkpoint is damaged in every copy; the same on all ranks."""

    # What DCP calls ----------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load; ConfigError for a path."""
        self._release()
        super().reset(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Choose the checkpoint together with the other ranks, and return its metadata.

        Its copies on stored tiers are not deleted until it has been read, until the next call of this reader, or until
        the reader is garbage-collected.
        """
        run = self._run
        self._release()
        run.check_usable()
        run.prepare_restore(continues=self._resume)
        self.damaged = False
        try:
            with run.deletions_paused():
                self._opened = open_checkpoint(run, self._request(), values_of=self._values_of)
                self._release = hold(run, self._opened[0], owner=self)
        except DamagedError:
            self.damaged = True
            raise
        _, entries = self._opened
        paths = {name: leaf.path for name, leaf in entries.leaves.items()}
        return Metadata(state_dict_metadata=cast("dict[str, Any]", entries), planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: no setup is needed."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan, each chunk from its fastest good copy. With ``resume`` the run continues from
        this checkpoint."""
        assert self._opened is not None, "read_data without read_metadata"
        parts, entries = self._opened
        reads = _Reads(parts, entries, planner)
        try:
            self._read_on_all_ranks(parts, lambda: reads.execute(plan))
        finally:
            self._opened = None
            self._release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # Continuing the run ------------------------------------------------------------------------------

    def _request(self) -> RestoreRequest:
        step, attempt, tier = self._arguments
        request = self._run.restore_request(step, attempt, tier, doing="dcp.load")
        return replace(request, advice="or name a tier (TierReader(ckpt, tier=...))")

    def _read_on_all_ranks(self, parts: CheckpointReader, read: Callable[[], None]) -> None:
        """Read on all ranks; with ``resume``, continue from the checkpoint once all have read it. RestoreError on every
        rank if one has failed: with ``resume``, saves are refused if that left the state half filled."""
        run, id = self._run, parts.checkpoint.id
        named = replace(self._request(), step=id.step, attempt=id.attempt)
        progress = Progress(named, parts.tally, run.barrier())
        noting = run.noting_half_filled(None) if self._resume else nullcontext(lambda: None)
        try:
            with (
                run.deletions_paused(),
                run.showing("restore", parts.tally),
                noting as note_begin,
            ):
                note_begin()
                progress.read(parts, lambda parts: read())
                if self._resume:
                    run.finish_restore(parts.checkpoint, self._request())
                    run.lineage.half_filled.discard(None)
        except DamagedError:
            self.damaged = True
            raise


class _Reads:
    """The reads of one rank's plan."""

    def __init__(self, parts: CheckpointReader, entries: DcpEntries, planner: LoadPlanner) -> None:
        self._parts = parts
        self._entries = entries
        self._planner = planner
        self._builder = Builder(entries.merged.header)
        self._targets: list[BlockTarget] = []
        self._after: list[Callable[[], object]] = []

    def execute(self, plan: LoadPlan) -> None:
        """Read everything into its targets, then pass tensors and values to the planner."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._value(item)
            else:
                self._tensor(item)
        targets = (*self._builder.targets, *self._targets)
        plan_reads(self._parts, self._entries.merged, targets)()
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
            self._after.append(lambda: target.copy_(source))
        self._targets.append(
            BlockTarget(position=node.position, target=flat, offset=offset, lengths=lengths)
        )
        self._after.append(lambda: self._planner.commit_tensor(item, given))

    def _value(self, item: ReadItem) -> None:
        leaf = self._entries.leaves[item.storage_index.fqn]
        make: Make = lambda: leaf.value  # noqa: E731
        if leaf.node is not None:
            make = self._builder.prepare(leaf.node, CPU, item.storage_index.fqn)
        self._after.append(lambda: self._planner.load_bytes(item, _pickled(make(), leaf.inside)))


def _pickled(value: Any, inside: Iterable[Any]) -> io.BytesIO:
    """Pickle the part, at the keys ``inside``, of a value that was decoded from JSON, as DCP's planners expect."""
    for key in inside:
        value = value[key]
    pickled = io.BytesIO()
    torch.save(value, pickled)
    pickled.seek(0)
    return pickled


# Entries under DCP's names -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """The entry under one name: a node; a part of its value, at the keys ``inside``; or, without a node, a
    ``value``."""

    path: Path
    node: Node | None
    inside: tuple[Any, ...] = ()
    value: object = None


class DcpEntries(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """DCP's metadata of a checkpoint. Its objects are created on access, one at a time."""

    def __init__(self, merged: MergedHeader) -> None:
        self.merged = merged
        self.leaves: dict[str, Leaf] = {}
        for leaf in _Names(merged).below(merged.header.tree, ()):
            name = ".".join(map(str, leaf.path))
            if name in self.leaves:
                raise RestoreError(
                    f"dcp.load: two entries of {merged.header.what} have the same name {name!r} in DCP: use "
                    "Checkpointer.restore"
                )
            self.leaves[name] = leaf

    def __contains__(self, name: object) -> bool:
        return name in self.leaves

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        node = self.leaves[name].node
        if not isinstance(node, TensorNode):
            return BytesStorageMetadata()
        stored = self.merged.header.tensors[node.position]
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=stored.dtype),
            size=torch.Size(stored.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.lengths))
                for block in self.merged.blocks[node.position]
            ],
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)


class _Names:
    """Walks the tree of a checkpoint."""

    def __init__(self, merged: MergedHeader) -> None:
        self._header = merged.header
        named = leaves(merged.header.tree, "", frozenset({MapNode}))
        self._modules = tuple(name for name, node in named if isinstance(node, ModuleNode))

    def below(self, node: Node, path: Path) -> Iterator[Leaf]:
        match node:
            case MapNode() | ModuleNode() | SequenceNode(is_tuple=False):
                for key, child in _children(node):
                    yield from self.below(child, (*path, key))
            case OptimizerNode():
                yield from self._optimizer(node, path)
            case ObjectNode():
                yield from self.below(node.state, path)
            case ValueNode():
                yield from _inside(plain_value(self._header, node), path, node, ())
            case RandomNode():
                return  # the random state of the process has no name in DCP
            case _:
                yield Leaf(path, node)

    def _optimizer(self, node: OptimizerNode, path: Path) -> Iterator[Leaf]:
        for key, child in node.state:
            part = self._parameter(node, key) if isinstance(key, int) else str(key[0])
            yield from self.below(child, (*path, "state", part))
        for index, (numbers, child) in enumerate(node.groups):
            group = (*path, "param_groups", index)
            yield from self.below(child, group)
            members = [self._parameter(node, number) for number in numbers]
            yield Leaf((*group, "params"), None, value=members)

    def _parameter(self, node: OptimizerNode, number: int) -> str:
        """Return a parameter's name relative to its module; its number if it has no name."""
        name = node.names[number]
        if name is None:
            return str(number)
        within = next((m for m in self._modules if names.is_within(name, m)), None)
        return name if within is None else name.removeprefix(f"{within}.")


def _children(node: MapNode | ModuleNode | SequenceNode) -> list[tuple[str | int, Node]]:
    match node:
        case MapNode():
            return [(str(key), child) for key, child in node.entries]
        case ModuleNode():
            return [(key, child) for key, _, child in node.entries]
    return list(enumerate(node.nodes))


def _inside(value: Any, path: Path, node: Node, inside: tuple[Any, ...]) -> Iterator[Leaf]:
    """Flatten a value as DCP does: mappings, and lists that contain mappings."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _inside(child, (*path, str(key)), node, (*inside, key))
    elif isinstance(value, list) and not _is_leaf(value):
        for index, child in enumerate(value):
            yield from _inside(child, (*path, index), node, (*inside, index))
    else:
        yield Leaf(path, node, inside)


def _is_leaf(value: object) -> bool:
    """Return whether DCP does not flatten a value, though it may be a list."""
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, list) or all(map(_is_leaf, value))
