"""Values in which a rank differs from rank 0 are stored by name, and refer to bytes that exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.merge import merge_headers
from tierfall.core.image.tree import (
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    TensorNode,
    ValueNode,
)
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.export.gather import TensorPair, separate_per_rank


def header(tensors: Sequence[StoredTensor], values: Sequence[Any], **entries: Node) -> ImageHeader:
    return ImageHeader(
        what="header",
        data_start=0,
        data_bytes=max((t.end for t in tensors), default=0),
        tensors=tuple(tensors),
        tree=MapNode("dict", tuple(entries.items())),
        values=tuple(values),
    )


def floats(name: str, start: int, piece: TensorPiece | None = None) -> StoredTensor:
    return StoredTensor(name, torch.float32, (2,), start, start + 8, piece)


def nothing_differs(rank: int, pairs: Sequence[TensorPair]) -> frozenset[TensorPair]:
    return frozenset()


def all_differ(rank: int, pairs: Sequence[TensorPair]) -> frozenset[TensorPair]:
    return frozenset(pairs)


def test_a_tensor_whose_bytes_another_rank_has_is_read_there() -> None:
    """Rank 1 names a tensor of its object that it has no bytes of, since rank 0 wrote it for both."""

    def thing() -> ObjectNode:
        state = MapNode("dict", (("w", TensorNode(0)), ("n", ValueNode(0, ()))))
        return ObjectNode(state)

    absent = StoredTensor("thing.w", torch.float32, (2,), 0, 8, written_by=0)
    headers = {
        0: header([floats("thing.w", 0)], [1], thing=thing()),
        1: header([absent], [2], thing=thing()),
    }
    aside, name = separate_per_rank(headers, all_differ)
    merged = merge_headers(aside, what="merged", own=0)
    own = dict(merged.header.tree.entries)[name]
    assert isinstance(own, MapNode)
    ((rank, of_rank),) = own.entries
    assert rank == "1"
    assert isinstance(of_rank, MapNode)
    ((_, node),) = of_rank.entries
    assert isinstance(node, ObjectNode)
    position = dict(node.state.entries)["w"].position  # type: ignore[union-attr]
    assert [(block.rank, block.end) for block in merged.blocks[position]] == [(0, 8)]


def test_a_name_that_begins_another_keeps_its_own_place() -> None:
    """The keys of a module may have dots where other keys end."""
    headers = {
        rank: header(
            [],
            [rank, rank],
            m=ModuleNode((("a", "a", ValueNode(0, ())), ("a.b", "a.b", ValueNode(1, ())))),
        )
        for rank in range(2)
    }
    aside, name = separate_per_rank(headers, nothing_differs)
    own = dict(dict(aside[1].tree.entries)[name].entries)["1"]  # type: ignore[union-attr]
    assert set(dict(own.entries)) == {"m", "m.a.b"}
