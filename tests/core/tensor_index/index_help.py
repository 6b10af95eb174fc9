"""Tables of ranks, as manifests have them."""

from __future__ import annotations

from typing import Any

from tierfall.core.tensor_index.builder import IndexBuilder


def piece(
    name: str, shape: list[int], offset: list[int], lengths: list[int], start: int, **more: Any
) -> dict[str, Any]:
    """A block of float32."""
    count = 4
    for length in lengths:
        count *= length
    entry = {"name": name, "dtype": "float32", "shape": shape, "offset": offset}
    return {**entry, "lengths": lengths, "start": start, "end": start + count, **more}


def table(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A matrix in rows, one in columns, a scalar that all have, and a vector of each rank's own."""
    rows, columns = [world_size * 3, 5], [4, world_size * 2]
    return [
        piece("rows", rows, [3 * rank, 0], [3, 5], 0),
        piece("columns", columns, [0, 2 * rank], [4, 2], 60),
        piece("scalar", [], [], [], 92),
        piece(f"own{rank}", [7], [0], [7], 96),
    ]


def make(world_size: int, *tables: list[dict[str, Any]], **limits: int) -> bytes:
    maker = IndexBuilder(world_size)
    for rank, pieces in enumerate(tables or [table(r, world_size) for r in range(world_size)]):
        maker.add(rank, pieces, what=f"rank {rank}")
    return maker.encode(**limits)
