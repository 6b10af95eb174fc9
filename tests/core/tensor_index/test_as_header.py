"""One rank's header with the merged index equals the merged headers of all ranks, or is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from index_help import piece
from torch import nn

from tierfall.core.image.header import ImageHeader, read_header
from tierfall.core.image.layout import plan_layout
from tierfall.core.image.merge import MergedHeader, merge_headers
from tierfall.core.image.tree import leaves, positions_of
from tierfall.core.state.walk import walk_state
from tierfall.core.tensor_index.as_header import merge_with_index
from tierfall.core.tensor_index.builder import IndexBuilder
from tierfall.core.tensor_index.index import Index, read_index
from tierfall.core.tensors.dtensor import Branch, LocalBlocks, TensorPiece
from tierfall.core.types.errors import IntegrityError

WHOLE = torch.arange(24.0).view(6, 4)


def image_of(state: Any, left_out: dict[int, int] | None = None) -> tuple[ImageHeader, list[Any]]:
    """The header of an image, and the table of its tensors that its manifest has."""
    view = walk_state(state)
    layout = plan_layout(view, left_out or {})
    data = layout.header(view)
    assert data is not None
    header = read_header(data, image_bytes=layout.image_bytes, what="the image")
    return header, json.loads(layout.pieces)


def indexed(tables: list[list[Any]]) -> Index:
    maker = IndexBuilder(len(tables))
    for rank, table in enumerate(tables):
        maker.add(rank, table, what=f"rank {rank}")
    return read_index(maker.encode(), what="index")


def same(found: MergedHeader, expected: MergedHeader) -> bool:
    """Say whether two say the same of every tensor and value, in whatever order they have them."""

    def said(merged: MergedHeader) -> dict[str, Any]:
        header = merged.header
        return {
            name: [
                (
                    header.tensors[position].name,
                    header.tensors[position].dtype,
                    header.tensors[position].shape,
                    sorted((b.offset, b.rank, b.start, b.end) for b in merged.blocks[position]),
                    merged.replicas.get(position, ()),
                )
                for position in positions_of(node)
            ]
            for name, node in leaves(header.tree, "")
        }

    return said(found) == said(expected) and found.header.values == expected.header.values


def laid(images: list[tuple[ImageHeader, list[Any]]], rank: int) -> MergedHeader | None:
    index = indexed([table for _, table in images])
    return merge_with_index(images[rank][0], rank, index, what="1@1")


def merged(images: list[tuple[ImageHeader, list[Any]]], rank: int) -> MergedHeader:
    return merge_headers(dict(enumerate(h for h, _ in images)), what="1@1", own=rank)


def rows(start: int, end: int) -> tuple[torch.Tensor, TensorPiece]:
    return WHOLE[start:end].clone(), TensorPiece((6, 4), (start, 0), (end - start, 4))


def blocks_of_dcp() -> list[Any]:
    """Rank 0 has two blocks of a tensor, rank 1 one, rank 2 none; of a list one lies on two ranks, and one on one."""
    one, two = torch.full((2,), 1.0), torch.full((3,), 2.0)
    return [
        {
            "m": Branch(w=LocalBlocks((rows(0, 2), rows(5, 6))), n=0),
            "l": [LocalBlocks(((one, None),)), LocalBlocks(())],
        },
        {
            "m": Branch(w=LocalBlocks((rows(2, 5),)), n=1),
            "l": [LocalBlocks(()), LocalBlocks(((two, None),))],
        },
        {"m": Branch(w=LocalBlocks(()), n=2), "l": [LocalBlocks(((one, None),)), LocalBlocks(())]},
    ]


def training() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "x": torch.zeros(0, 5), "s": torch.tensor(2.0)}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_blocks_that_a_plan_of_dcps_spread_over_ranks(rank: int) -> None:
    states = blocks_of_dcp()
    states[2]["l"][0] = LocalBlocks(())
    images = [image_of({**state, "rng": None}) for state in states]
    found = laid(images, rank)
    assert found is not None
    assert same(found, merged(images, rank))


def test_replicas_that_this_rank_has_none_of_are_compared_by_all_headers() -> None:
    images = [image_of({**state, "rng": None}) for state in blocks_of_dcp()]
    assert merged(images, 1).replicas, "ranks 0 and 2 have the first of the list"
    assert laid(images, 1) is None
    own = laid(images, 2)
    assert own is not None
    assert same(own, merged(images, 2))


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_that_ranks_divided_and_what_each_has_for_itself(rank: int) -> None:
    states = [{**training(), "own": r} for r in (0, 1)]
    names = walk_state(states[0]).names
    first, second = names.index("model.2.weight"), names.index("model.2.bias")
    images = [image_of(states[0], {first: 1}), image_of(states[1], {second: 0})]
    found = laid(images, rank)
    assert found is not None
    assert same(found, merged(images, rank))


def test_what_the_header_of_one_rank_does_not_name_or_names_otherwise_needs_all_headers() -> None:
    w, v = torch.zeros(4), torch.zeros(3)
    none = None
    stages = [image_of({"w": w, "rng": none}), image_of({"w": w, "v": v, "rng": none})]
    assert laid(stages, 0) is None
    assert laid(stages, 1) is not None, "it has all of it"
    shapes = [image_of({"w": w, "rng": none}), image_of({"w": v, "rng": none})]
    assert laid(shapes, 0) is None
    header, _ = image_of({"w": w, "rng": none})
    assert (
        merge_with_index(header, 0, indexed([[piece("w", [5], [0], [5], 0)]]), what="1@1") is None
    )


def test_blocks_that_do_not_add_up_are_reported_when_they_are_asked_for() -> None:
    images = [image_of({**state, "rng": None}) for state in blocks_of_dcp()]
    images[1] = image_of({**blocks_of_dcp()[2], "rng": None})
    images[1][1].append(piece("l.1", [3], [0], [3], 0))
    found = laid(images, 0)
    assert found is not None
    position = [tensor.name for tensor in found.header.tensors].index("m.w")
    with pytest.raises(IntegrityError, match=r"m\.w is incomplete"):
        found.blocks[position]
