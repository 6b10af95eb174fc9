"""One checkpoint, open for reading parts: whole tensors by name, and slices of them, for ``tierfall.open_tensors``.

The headers of all ranks are merged, as for a load. A read takes the chunks that its elements are in; those at its edges
are kept in memory, since the next read may need the rest of them.
"""

from __future__ import annotations

import math
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from tierfall.config import Config
from tierfall.core.copies.checkpoint_reader import PASSABLE, CheckpointReader
from tierfall.core.copies.chunk_reader import (
    FoundDamage,
    ReadTally,
    TargetWriter,
    chunks_of,
    copy_bytes,
)
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.records import Manifest
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.merge import MergedHeader, TensorBlock
from tierfall.core.image.tree import (
    CONTAINERS_AND_OBJECTS,
    TENSORS,
    ConflictNode,
    Node,
    TensorNode,
    ValueNode,
    leaves,
    names_above,
    positions_of,
)
from tierfall.core.load.build import CPU, BlockTarget, Builder, Fill
from tierfall.core.load.choices import nearest
from tierfall.core.restore.candidates import RestoreRequest, choose
from tierfall.core.restore.reshard import ResizeRules, locate, merge_images, plan_reads
from tierfall.core.restore.restore import DamagedError, read_first
from tierfall.core.runtime.buffers import allocate
from tierfall.core.runtime.public_calls import public_call, public_class
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.types.errors import ConfigError, RestoreError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.ops.reader import RunReader
from tierfall.setup.tiers import SHARD

CHUNKS_MAX = 4
"""Chunks that are read at once."""
HELD_BYTES = 64 << 20
"""The most that is kept of chunks at the edges of what was read."""
SPAN_BYTES = 64 << 20
"""The most that is read to copy elements out of it."""


class NoTensorError(RestoreError, KeyError):
    """No tensor has that name."""

    __str__ = Exception.__str__


@dataclass(slots=True)
class _EdgeReader(CheckpointReader):
    """Keeps chunks of which not all was needed, those that were used last."""

    edges: OrderedDict[tuple[int, int], memoryview] = field(default_factory=OrderedDict)
    process: int = field(default_factory=os.getpid)

    def fill_here(self, fills: Mapping[int, Sequence[Fill]]) -> None:
        if self.process != os.getpid():  # a forked child reads zeros there: see ``allocate``
            self.process = os.getpid()
            self.edges.clear()
        parts = {rank: self.part(rank, those) for rank, those in sorted(fills.items())}
        writers = {rank: TargetWriter(part.fills) for rank, part in parts.items()}
        whole, cut = list[tuple[int, int]](), list[tuple[int, int]]()
        for rank, part in parts.items():
            manifest = part.reader.manifest
            for index in chunks_of(manifest, part.fills):
                start, end = (at - manifest.data_start for at in manifest.chunk_range(index))
                _, low, high = next(writers[rank].within(start, end))
                found = whole if (low, high) == (start, end) else cut
                found.append((rank, index))
        self.read(parts, whole)
        edges = self.edges

        def copy_cut(number: int) -> None:
            rank, index = cut[number]
            reader, view = parts[rank].reader, edges.get(cut[number])
            low, high = reader.manifest.chunk_range(index)
            if view is None:
                view = edges[rank, index] = reader.read(index, allocate(high - low))
            edges.move_to_end((rank, index))
            start = low - reader.manifest.data_start
            address = torch.frombuffer(view, dtype=torch.uint8).data_ptr() - start
            for fill, first, last in writers[rank].within(start, start + len(view)):
                for target in fill.targets:
                    to = target.data_ptr() + first - fill.start
                    copy_bytes(to, address + first, last - first)

        run_in_threads(min(READ_THREADS, len(cut)), copy_cut, range(len(cut)))
        held = sum(map(len, edges.values()))
        while held > HELD_BYTES:
            held -= len(edges.popitem(last=False)[1])


class OpenCheckpoint:
    """A checkpoint whose headers are read. Thread-safe: one read is made at a time."""

    def __init__(
        self,
        config: Config,
        request: RestoreRequest,
        shard: Shard = SHARD,
        cache: tuple[Path, int | None] | None = None,
        found_damage: FoundDamage = lambda *found: None,
    ) -> None:
        """``shard`` is the rank whose tensors are read, if so many ranks saved; else those of all are merged. Raises as
        ``tierfall.load`` does."""
        self._shard = shard
        self._lock, self._closed = threading.Lock(), False
        self._compared: set[int] = set()
        self._tally, self._operation = ReadTally(found_damage=found_damage), request.operation
        with ExitStack() as closing:
            reader = closing.enter_context(RunReader(config))
            kept = None if cache is None else reader.cache_in(*cache)

            def choose_now(request: RestoreRequest) -> list[KnownCheckpoint]:
                reader.reopen_memory()
                return choose(reader.list(), request, self._tally)

            def open_now(
                checkpoint: KnownCheckpoint, tiers: Sequence[str], tally: ReadTally
            ) -> CheckpointReader:
                images = reader.opener()
                return _EdgeReader(
                    checkpoint, tiers, images, tally, chunks_max=CHUNKS_MAX, cache=kept
                )

            found = read_first(
                choose_now, request, self._tally, self._read_headers, make_reader=open_now
            )
            if found is None:
                raise RestoreError(f"{request.operation}: {config.run} holds no checkpoint")
            self._parts, self._merged = found
            closing.callback(self._parts.close)
            self._open = closing.pop_all()

    @property
    def id(self) -> CheckpointId:
        return self._parts.checkpoint.id

    @property
    def header(self) -> ImageHeader:
        return self._merged.header

    @property
    def sources(self) -> dict[str, int]:
        with self._tally.lock:
            return dict(self._tally.bytes)

    @cached_property
    def leaves(self) -> Mapping[str, Node]:
        """The tensors, plain values and conflicts by name; tensors in the order of the images."""
        found = leaves(self.header.tree, "", CONTAINERS_AND_OBJECTS)
        return dict(sorted(found, key=lambda one: min(positions_of(one[1]), default=-1)))

    def find(self, name: str) -> Node:
        """Return the node of a tensor. Raises NoTensorError."""
        node = self.leaves.get(name)
        if isinstance(node, TENSORS):
            return node
        what = f"{self._operation}: {self.header.what}"
        if isinstance(node, ConflictNode):
            raise RestoreError(f"{what}: {name} {node.reason}")
        above = (each for each in (*names_above(str(name)), name) if each in self.leaves)
        if (value := next(above, None)) is not None and type(self.leaves[value]) is ValueNode:
            raise NoTensorError(
                f"{what}: {value} is a plain value: tierfall.load(..., only=[{value!r}])"
            )
        tensors = [each for each, node in self.leaves.items() if isinstance(node, TENSORS)]
        raise NoTensorError(
            f"{what} has no tensor named {name!r}; nearest: {nearest(str(name), tensors) or 'none'}"
        )

    def read(self, name: str, node: Node) -> torch.Tensor:
        """Read a whole tensor."""
        builder = Builder(self.header)
        make = builder.prepare(node, CPU, name)
        for each in builder.targets:
            if self._is_cut(each.position):
                ranges = [*map(range, self.header.tensors[each.position].shape)]
                self._select(each.position, ranges, each.target)
            else:
                self._fill([each])
        made: torch.Tensor = make()
        return made

    def select(self, position: int, ranges: Sequence[range]) -> torch.Tensor:
        """Read the bytes of the elements of a tensor whose indices are in ``ranges``, one for each dimension."""
        count = math.prod(map(len, ranges))
        flat = torch.empty(count * self.header.tensors[position].dtype.itemsize, dtype=torch.uint8)
        if count:
            self._select(position, ranges, flat)
        return flat

    def blocks(self, position: int) -> Iterator[tuple[TensorBlock, Manifest]]:
        """Yield the blocks of a tensor, each with the manifest of its image."""
        for block in sorted(self._merged.blocks[position], key=lambda block: block.offset):
            yield block, self._parts.find(block.rank)[1]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._open.close()

    # ---- reading

    def _read_headers(self, parts: CheckpointReader) -> MergedHeader:
        shard = self._shard
        if shard.world_size != parts.world_size:
            return merge_images(parts, 0, ResizeRules(values_of=0))
        header = parts.header(shard.rank)
        if not (header.is_whole if shard.world_size == 1 else header.complete):
            return merge_images(parts, shard.rank, ResizeRules(values_of=shard.rank))
        return locate(header, parts.headers(header.writers), shard.rank)

    def _fill(self, targets: Sequence[BlockTarget]) -> None:
        """Fill targets; replicas of their tensors that may differ are compared first, once."""
        what = f"{self._operation} of {self.id}"
        with self._lock:
            if self._closed:
                raise ConfigError(f"{what}: it was closed: open it again")
            new = {each.position for each in targets} - self._compared
            replicas = {p: self._merged.replicas[p] for p in new if p in self._merged.replicas}
            try:
                plan_reads(self._parts, replace(self._merged, replicas=replicas), targets)()
            except PASSABLE as error:
                kind = DamagedError if error.is_damage else RestoreError
                raise kind(f"{what}: {error}; open it again, or another step") from error
            self._compared |= new

    def _is_cut(self, position: int) -> bool:
        """Return whether some block of a tensor is not a contiguous range of it."""
        shape, blocks = self.header.tensors[position].shape, self._merged.blocks[position]
        return any(block.lengths[1:] != shape[1:] for block in blocks if math.prod(shape))

    def _select(self, position: int, ranges: Sequence[range], flat: torch.Tensor) -> None:
        """Read elements to flat memory, some at a time, so that no chunk is read that has none of them."""
        item, at = self.header.tensors[position].dtype.itemsize, 0
        for box in self._boxes(position, [*ranges]):
            lengths = [*map(len, box)]
            hull = tuple(part[-1] - part[0] + 1 for part in box)
            to = target = flat[at : at + math.prod(lengths) * item]
            at += to.numel()
            if [*hull] != lengths:
                target = torch.empty(math.prod(hull) * item, dtype=torch.uint8)
            first = tuple(part[0] for part in box)
            self._fill([BlockTarget(position=position, target=target, offset=first, lengths=hull)])
            if target is not to:
                steps = tuple(slice(None, None, part.step) for part in box)
                to.view(*lengths, item).copy_(target.view(*hull, item)[steps])

    def _boxes(self, position: int, ranges: list[range]) -> Iterator[list[range]]:
        """Divide elements, in their order: those that are not one range of bytes into parts of at most SPAN_BYTES, and
        at gaps that may hold a chunk."""
        stored = self.header.tensors[position]
        first = next((d for d, part in enumerate(ranges) if len(part) > 1), None)
        if first is None:
            yield ranges
            return
        part, inner = ranges[first], stored.shape[first + 1 :]
        is_whole = [*map(len, ranges[first + 1 :])] == [*inner]
        if part.step == 1 and is_whole and not self._is_cut(position):
            yield ranges
            return
        stride = math.prod(inner) * stored.dtype.itemsize * part.step
        has_gaps = stride > min(manifest.chunk_bytes for _, manifest in self.blocks(position))
        count = 1 if has_gaps else max(1, SPAN_BYTES // stride)
        for at in range(0, len(part), count):
            box = [*ranges[:first], part[at : at + count], *ranges[first + 1 :]]
            yield from self._boxes(position, box) if has_gaps else [box]


# What a user has of it --------------------------------------------------------------------------------


@public_class(alone=())
class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of one checkpoint by their dotted names; ``tierfall.open_tensors`` opens it. Use it as a context
    manager.

    ``tensors[name]`` reads a tensor; ``tensors.slice(name)[10:20, :]`` a part of it. Names and lengths, shapes and
    dtypes read nothing. ``items()`` and ``values()`` read one tensor after the other. Any thread may read: one read is
    made at a time, on several threads.
    """

    def __init__(self, opened: OpenCheckpoint) -> None:
        self.opened, self.step, self.attempt = opened, opened.id.step, opened.id.attempt
        self._names = [n for n, node in opened.leaves.items() if isinstance(node, TENSORS)]

    def __repr__(self) -> str:
        return f"<Tensors of checkpoint {self.opened.id}: {len(self)} tensors>"

    @property
    def sources(self) -> dict[str, int]:
        """The bytes that were read so far, by tier; those from the cache as ``cache``."""
        return self.opened.sources

    @public_call
    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor. Raises KeyError, which is also a RestoreError, for a name that no tensor has."""
        return self.opened.read(name, self.opened.find(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(self.opened.leaves.get(name), TENSORS)  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order in which the tensors are stored, in which they are read fastest."""
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def slice(self, name: str) -> TensorSlice:
        """Return a tensor for reading parts of it, without reading any; raises as ``tensors[name]`` does."""
        node = self.opened.find(name)
        if not isinstance(node, TensorNode):
            raise ConfigError(
                f"slice: {name} is a quantized tensor, or of a tensor class: read it whole, by tensors[{name!r}]"
            )
        return TensorSlice(self.opened, node.position)

    def close(self) -> None:
        """Close the tiers; what was read stays."""
        self.opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


class TensorSlice:
    """One tensor of a checkpoint. An index of integers, slices and ``...`` reads the elements that a tensor's has."""

    def __init__(self, opened: OpenCheckpoint, position: int) -> None:
        self._opened, self._position = opened, position
        stored = opened.header.tensors[position]
        self.shape, self.dtype = torch.Size(stored.shape), stored.dtype

    @public_call
    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read these elements, as a new tensor. Raises IndexError and ValueError as a tensor does."""
        parts = [*index] if isinstance(index, tuple) else [index]
        for part in parts:
            is_integer = hasattr(part, "__index__") and not getattr(part, "shape", ())
            if not (isinstance(part, slice) or part is ... or is_integer) or isinstance(part, bool):
                raise TypeError(
                    f"slice: {part!r:.80} is no index here: expected integers, slices and '...'; for others read the "
                    "tensor, and index that"
                )
        torch.empty(self.shape, device="meta")[index]  # raises for an index that does not fit
        if ... not in parts:
            parts.append(...)
        at = parts.index(...)
        left = len(self.shape) - len(parts) + 1
        parts[at : at + 1] = [slice(None)] * left
        ranges = [_range(part, n) for part, n in zip(parts, self.shape, strict=True)]
        flat = self._opened.select(self._position, ranges)
        found = flat.view(self.dtype).view([*map(len, ranges)])
        return found[tuple(slice(None) if isinstance(part, slice) else 0 for part in parts)]


def _range(part: Any, length: int) -> range:
    if isinstance(part, slice):
        return range(*part.indices(length))
    index = operator.index(part) % length
    return range(index, index + 1)
