"""Tensors in blocks and values, by key: checkpoints of adapters whose framework has layouts of its own.

Each rank saves its blocks of tensors, and values in groups. A load takes other blocks, from this rank's image if that
has them all, else from the images of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from tierfall import Checkpointer, SaveHandle, item
from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import ConflictNode, MapNode, Node, PiecesNode, TensorNode
from tierfall.core.load.build import CPU, BlockTarget, Builder
from tierfall.core.load.choices import nearest
from tierfall.core.load.plan import Action, ReadPlan
from tierfall.core.restore.reshard import ResizeRules, locate, merge_images, plan_reads
from tierfall.core.restore.restore import read_first
from tierfall.core.state.walk import walk_state
from tierfall.core.tensors.dtensor import Branch, LocalBlocks, TensorPiece
from tierfall.core.tensors.tensors import AddressRange, as_bytes
from tierfall.core.types.errors import RestoreError
from tierfall.run.checkpointer import open_run_of

T = TypeVar("T")
TENSORS = "tensors"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A block of the tensor of a key: ``data``, with as many dimensions as the whole, of ``shape``, where it begins at
    ``offset``. ``is_trained``: only an optimizer's step changes it. ``is_padded``: another shape of the whole is
    loaded, and what is not in it is 0.

    Blocks at one place are replicas, stored once, if they are of the same ``copy``. Another copy than the first may
    differ, and is loaded by a rank that has saved it."""

    key: str
    data: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_trained: bool = False
    is_padded: bool = False
    copy: int = 0

    @property
    def group(self) -> str:
        return f"{TENSORS}_{self.copy}" if self.copy else TENSORS

    @property
    def piece(self) -> TensorPiece:
        return TensorPiece(self.shape, self.offset, tuple(self.data.shape))


class KeyedCheckpoints:
    """The checkpoints of a run that an adapter saves as the ``entry`` of a state. ``doing`` names its call in errors.
    All ranks make each call."""

    def __init__(self, ckpt: Checkpointer, entry: str, *, doing: str) -> None:
        self._run, self._entry, self._doing = open_run_of(ckpt), entry, doing

    def save(
        self, step: int, blocks: Iterable[Block], values: Mapping[str, Mapping[str, object]]
    ) -> SaveHandle:
        """Save this rank's blocks, and values by group and key. Replicas of blocks are stored once; the random state is
        left out."""
        parts: dict[tuple[str, str], dict[TensorPiece, Block]] = {}
        for block in blocks:
            parts.setdefault((block.group, block.key), {}).setdefault(block.piece, block)
        content = {group: Branch(those) for group, those in values.items()}
        for (group, key), those in parts.items():
            content.setdefault(group, Branch())[key] = _leaf([*those.values()])
        walk = partial(walk_state, {self._entry: Branch(content)}, with_random=False)
        return self._run.save(step, lambda _: walk(), metrics={}, tags=())

    def value_of_root(self, step: int | None, group: str, key: str) -> tuple[int, Any] | None:
        """Return a step, or the newest, and a value that rank 0 saved; None if the run has no checkpoint."""

        def read(parts: CheckpointReader) -> tuple[int, Any]:
            header = parts.header(0)
            builder = Builder(header)
            make = builder.prepare(_below(header, self._entry, group)[key], CPU, key)
            plan_reads(parts, locate(header, parts.headers(header.writers), 0), builder.targets)()
            return parts.checkpoint.id.step, make()

        return self._read(step, read)

    def describe(self, step: int, group: str) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return a meta tensor for each tensor, by key, and the keys of a group."""

        def read(parts: CheckpointReader) -> tuple[dict[str, torch.Tensor], list[str]]:
            header = merge_images(parts, 0, ResizeRules()).header
            tensors = {
                key: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
                for key, node in _below(header, self._entry, TENSORS).items()
                if isinstance(node, TensorNode)
                for stored in [header.tensors[node.position]]
            }
            return tensors, [*_below(header, self._entry, group)]

        found = self._read(step, read)
        assert found is not None, "a step that is not there is an error"
        return found

    def load(
        self,
        step: int,
        blocks: Sequence[Block],
        keys: Sequence[str],
        groups: Sequence[str],
        *,
        check: Callable[[Callable[[str], Collection[str]], str], None],
        continues: bool,
    ) -> list[Any]:
        """Fill the blocks, and return the values of ``keys``, each of the first of ``groups`` that has it. With
        ``continues`` the run continues from that checkpoint.

        ``check`` is called first, with a function that returns the keys of a group, and what these are read of. Raises
        RestoreError for what the checkpoint does not have, and for a block of another shape.
        """
        began, run, values = time.monotonic(), self._run, list[Any]()
        request = run.restore_request(step, None, doing=self._doing)
        run.check_usable()
        run.prepare_restore(continues=continues)
        with run.deletions_paused(), run.noting_half_filled(None) as note_begin:

            def make_plan(header: ImageHeader) -> ReadPlan:
                check(lambda group: _below(header, self._entry, group).keys(), header.what)
                plan = _Plan(header, self._entry)
                for block in blocks:
                    plan.block(block)
                makes = [plan.value(key, groups) for key in keys]
                plan.actions.append(lambda: values.extend(make() for make in makes))
                note_begin()
                return plan.plan()

            restored = run.fill_newest(request, make_plan, ResizeRules(), continues=continues)
            assert restored is not None, "a step that is not there is an error"
            run.lineage.half_filled.discard(None)
        run.report_restored(restored, began)
        return values

    def _read(self, step: int | None, read: Callable[[CheckpointReader], T]) -> T | None:
        run = self._run
        run.check_usable()
        run.prepare_restore(continues=False)
        request = replace(run.restore_request(step, None, doing=self._doing), in_place=False)
        with run.deletions_paused():
            found = run.read_newest(request, partial(read_first, read=read))
        if found is None:
            return None
        found[0].close()
        return found[1]


def _leaf(blocks: list[Block]) -> object:
    leaf = LocalBlocks(tuple((block.data.detach(), block.piece) for block in blocks), alone=True)
    return item(leaf, changes="on_step") if all(b.is_trained for b in blocks) else leaf


def _below(header: ImageHeader, entry: str, group: str) -> dict[Any, Node]:
    """Return the nodes of a group. Raises RestoreError if another program saved the checkpoint."""
    saved = dict(header.tree.entries).get(entry)
    if not isinstance(saved, MapNode):
        raise RestoreError(f"{header.what} has no entry {entry!r}: it was saved in another way")
    node = dict(saved.entries).get(group)
    return dict(node.entries) if isinstance(node, MapNode) else {}


class _Plan:
    """Plans the reads of blocks and values, of a rank's own image or of all images merged."""

    def __init__(self, header: ImageHeader, entry: str) -> None:
        self._header, self._entry = header, entry
        self._groups: dict[str, dict[Any, Node]] = {}
        self._builder = Builder(header)
        self._targets: list[BlockTarget] = []
        self._in_place: dict[AddressRange, str] = {}
        self.actions: list[Action] = []

    def plan(self) -> ReadPlan:
        return ReadPlan(
            targets=(*self._builder.targets, *self._targets),
            actions=tuple(self.actions),
            in_place=lambda: self._in_place,
        )

    def value(self, key: str, groups: Sequence[str]) -> Callable[[], Any]:
        found: dict[Any, Node] = {}
        for group in reversed(groups):
            found |= self._group(group)
        return self._builder.prepare(self._node(found, key), CPU, key)

    def block(self, block: Block) -> None:
        """Plan to read a block: directly into its memory, or through a copy if dtype, shape or layout differ."""
        key, piece = block.key, block.piece
        node = self._node(self._group(TENSORS if self._header.merged else block.group), key)
        positions = node.own_positions()
        if not self._header.merged:
            positions = [p for p in positions if self._header.tensors[p].piece == piece]
        if not isinstance(node, TensorNode | PiecesNode) or not positions:
            raise RestoreError(f"{self._header.what} has no block of {key} at {piece.offset}")
        stored = self._header.tensors[positions[0]]
        fits = stored.whole_shape == piece.shape
        if not fits and not (block.is_padded and len(stored.whole_shape) == len(piece.shape)):
            raise RestoreError(
                f"{self._header.what}: {key} has the shape {stored.whole_shape}, and {piece.shape} in the state"
            )
        live = block.data.detach()
        flat = as_bytes(live) if fits and live.dtype is stored.dtype else None
        if flat is None:
            size = live.numel() * stored.dtype.itemsize
            flat = torch.zeros(size, dtype=torch.uint8, device=live.device)
            source = flat.view(stored.dtype).view(live.shape)

            def copy() -> None:
                live.copy_(source)

            self.actions.append(copy)
        elif live.numel():
            self._in_place[AddressRange.of(live)] = key
        where = {"offset": piece.offset, "lengths": piece.lengths} if self._header.merged else {}
        self._targets.append(BlockTarget(position=positions[0], target=flat, **where))

    def _group(self, name: str) -> dict[Any, Node]:
        if name not in self._groups:
            self._groups[name] = _below(self._header, self._entry, name)
        return self._groups[name]

    def _node(self, nodes: Mapping[Any, Node], key: str) -> Node:
        node = nodes.get(key)
        if node is None:
            raise RestoreError(
                f"{self._header.what} has no {key!r}, which the state has; nearest: {nearest(key, nodes)}"
            )
        if isinstance(node, ConflictNode):
            raise RestoreError(f"{self._header.what}: {key} {node.reason}")
        return node
