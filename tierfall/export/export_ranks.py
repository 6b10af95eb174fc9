"""Exporting what several ranks saved, merged over them, and DCP's folders, of one rank too.

Tensors are whole. Values are rank 0's, and what other ranks have otherwise stands below ``per_rank.<rank>``. Bytes go
to where they belong in a mapped file: in the safetensors file itself, or in one beside, from which torch writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tierfall.core.copies.shard_reader import OpenImage
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.image.tree import OptimizerNode, ValueNode
from tierfall.core.load.build import CPU, Builder
from tierfall.core.types.errors import ConfigError
from tierfall.export.dcp_names import as_state, by_parameter, prefix_of
from tierfall.export.gather import Gathered, Placed, gather, place_aside, place_file, slots_in
from tierfall.export.options import (
    Exported,
    Format,
    Wish,
    as_bytes,
    exported,
    file_name,
    lay_out,
    left_out,
)
from tierfall.export.output import check_free, check_free_folder, new_file, new_folder, write_all
from tierfall.export.select import Part, deep_leaves, select, tensors_of
from tierfall.export.torch_file import save_torch
from tierfall.ops.commands import Watch

VALUES = "tierfall.named_values"


def export_ranks(
    checkpoint: KnownCheckpoint,
    tiers: Sequence[str],
    open_image: OpenImage,
    wish: Wish,
    watch: Watch,
) -> Exported:
    """Write one checkpoint as ``export`` does; raises as that does."""
    gathered = gather(checkpoint, tiers, open_image, watch)
    path = wish.to
    if wish.format is Format.DCP:
        check_free_folder(path)
    else:
        path = wish.to / file_name(gathered.run, gathered.id, wish)
        check_free(path, replace=wish.replace)
    parts = select(gathered.header, wish.only)
    gathered.check(parts)
    tensors, notes = _EXPORT[wish.format](gathered, parts, path, wish)
    if gathered.own is not None and any(part.name in ("", gathered.own) for part in parts):
        notes.append(f"what ranks had otherwise than rank 0 stands below {gathered.own}, by rank")
    return exported(checkpoint.id, path, tensors, gathered.tally, notes)


def _export_safetensors(
    gathered: Gathered, parts: tuple[Part, ...], path: Path, wish: Wish
) -> tuple[int, list[str]]:
    header = gathered.header
    said = {"tierfall.checkpoint": f"{gathered.run} {gathered.id}"}
    if wish.only:
        named: dict[str, int] = {}
        for part in parts:
            named |= tensors_of(header, part, full_names=len(parts) > 1)
        notes = left_out(parts)
    else:
        named = {stored.name: slot for slot, stored in enumerate(header.tensors)}
        said[VALUES] = _named_values(gathered, parts)
        notes = []
    if not named:
        raise ConfigError(
            "export: there is no tensor in it, and safetensors holds nothing else; use --format torch"
        )
    by_items = sorted(named.values(), key=lambda slot: (-header.tensors[slot].dtype.itemsize, slot))
    head, places, length = lay_out(header, named, by_items, said)
    with new_file(path, replace=wish.replace, room_bytes=length) as unfinished:
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            place_file(gathered, descriptor, places, length)
            write_all(descriptor, memoryview(head), 0)
        finally:
            os.close(descriptor)
    return len(named), [*notes, *as_bytes(header, named)]


def _named_values(gathered: Gathered, parts: Sequence[Part]) -> str:
    """Return what is no tensor, by name: the tagged JSON of each value, and the tensors that are parts of it."""
    header = gathered.header
    return json.dumps(
        {
            name: [header.values[leaf.number], [header.tensors[slot].name for slot in leaf.blobs]]
            for part in parts
            for name, leaf in deep_leaves(part.name, part.node)
            if isinstance(leaf, ValueNode)
        },
        separators=(",", ":"),
    )


class _PlacedBuilder(Builder):
    """Builds a state whose tensors lie in a mapped file."""

    def __init__(self, gathered: Gathered, placed: Placed) -> None:
        super().__init__(gathered.header)
        self._gathered = gathered
        self._placed = placed
        self._mapped: dict[int, torch.Tensor] = {}

    def flat(self, slot: int, device: torch.device) -> torch.Tensor:
        if slot not in self._mapped:
            self._mapped[slot] = self._placed.flat(self._gathered, slot)
        return self._mapped[slot]


class _DcpBuilder(_PlacedBuilder):
    """Builds optimizers' states as DCP names them."""

    def _optimizer(self, node: OptimizerNode, device: torch.device) -> dict[str, Any]:
        built = super()._optimizer(node, device)
        return by_parameter(node, built, prefix_of(node, self.header.tree))


def _build(builder: Builder, parts: Sequence[Part]) -> Any:
    """Build the state that the parts are, or the one part."""
    for part in parts:
        builder.prepare(part.node, CPU)
    built = {part.name: builder.build(part.node, CPU) for part in parts}
    return built[parts[0].name] if len(parts) == 1 else built


def _export_torch(
    gathered: Gathered, parts: tuple[Part, ...], path: Path, wish: Wish
) -> tuple[int, list[str]]:
    slots = slots_in(parts)
    with new_file(path, replace=wish.replace, room_bytes=_room(gathered, slots)) as unfinished:
        builder = _PlacedBuilder(gathered, place_aside(gathered, slots, unfinished))
        notes = save_torch(_build(builder, parts), unfinished, path)
    return len(slots), notes


def _export_dcp(
    gathered: Gathered, parts: tuple[Part, ...], path: Path, wish: Wish
) -> tuple[int, list[str]]:
    from tierfall.export.dcp_folder import save_dcp

    slots = slots_in(parts)
    with new_folder(path, room_bytes=_room(gathered, slots)) as unfinished:
        builder = _DcpBuilder(gathered, place_aside(gathered, slots, unfinished))
        save_dcp(as_state(_build(builder, parts), parts[0].name), unfinished, path)
    return len(slots), []


def _room(gathered: Gathered, slots: Sequence[int]) -> int:
    """What torch writes, and what it is given, in bytes."""
    return 2 * sum(gathered.header.tensors[slot].length for slot in slots)


_EXPORT = {
    Format.SAFETENSORS: _export_safetensors,
    Format.TORCH: _export_torch,
    Format.DCP: _export_dcp,
}
