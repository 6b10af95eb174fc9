"""The merged index has for every tensor what the manifests have, at a thousandth of the cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from index_help import make, piece, table

from tests import forked
from tierfall.core.image.merge import TensorBlock
from tierfall.core.tensor_index.builder import IndexBuilder
from tierfall.core.tensor_index.index import read_index
from tierfall.core.types.errors import IntegrityError, NotSupportedError


def blocks_of(name: str, tables: list[list[dict[str, Any]]]) -> list[TensorBlock]:
    """What tables say of a tensor, read plainly."""
    return [
        TensorBlock(
            rank=rank,
            start=entry["start"],
            end=entry["end"],
            offset=tuple(entry["offset"]),
            lengths=tuple(entry["lengths"]),
        )
        for rank, pieces in enumerate(tables)
        for entry in pieces
        if entry["name"] == name
    ]


@pytest.mark.parametrize("world_size", [1, 2, 5, 300])
def test_every_tensor_has_the_blocks_of_the_tables(world_size: int) -> None:
    tables = [table(rank, world_size) for rank in range(world_size)]
    index = read_index(make(world_size), what="index")
    assert index.world_size == world_size
    assert index.names[:3] == ("rows", "columns", "scalar")
    assert len(index) == len(index.names) == 3 + world_size
    assert index.block_count == 4 * world_size
    for tensor in index:
        assert index.find(tensor.name) == (tensor,)
        assert list(tensor.blocks) == blocks_of(tensor.name, tables)
        assert tensor.dtype is torch.float32
    (rows,) = index.find("rows")
    assert rows.shape == (world_size * 3, 5)
    assert index.find("none") == ()


def test_ranks_with_different_tensors_under_one_name_are_distinguished() -> None:
    tables = [[piece("w", [n], [0], [n], 0)] for n in (3, 4, 3)]
    first, second = read_index(make(3, *tables), what="index").find("w")
    assert (first.shape, [b.rank for b in first.blocks]) == ((3,), [0, 2])
    assert (second.shape, [b.rank for b in second.blocks]) == ((4,), [1])


def test_a_block_whose_bytes_another_rank_has_is_left_to_that() -> None:
    """An image may name what it has no bytes of; what has no elements at all is there all the same."""
    absent = piece("w", [8], [0], [8], 10, end=10)
    tables = [
        [piece("w", [8], [0], [8], 0), piece("no", [0, 2], [0, 0], [0, 2], 32)],
        [absent],
    ]
    index = read_index(make(2, *tables), what="index")
    (w,), (no,) = index.find("w"), index.find("no")
    assert [block.rank for block in w.blocks] == [0]
    assert [(block.rank, block.start, block.end) for block in no.blocks] == [(0, 32, 32)]


def test_an_empty_state_and_large_numbers_come_back() -> None:
    assert read_index(make(2, [], []), what="index").names == ()
    huge = piece("h", [1 << 46], [(1 << 46) - 2], [2], (1 << 50) - 8)
    (tensor,) = read_index(make(1, [huge]), what="index").find("h")
    assert tensor.blocks[0].offset == ((1 << 46) - 2,)
    assert tensor.blocks[0].end == 1 << 50


def test_a_dtype_that_this_torch_lacks_costs_that_tensor_alone() -> None:
    unknown = piece("new", [4], [0], [4], 0, dtype="float3_e1m1", end=2)
    index = read_index(make(1, [unknown, piece("w", [4], [0], [4], 2)]), what="index")
    assert index.find("w")[0].shape == (4,)
    with pytest.raises(NotSupportedError, match="'float3_e1m1', unknown to torch"):
        index.find("new")


@pytest.mark.parametrize(
    "entry",
    [
        {"name": 5},
        {"dtype": None},
        {"shape": [-1]},
        {"shape": [4, 4]},
        {"shape": 4},
        {"offset": [1]},
        {"offset": [-1]},
        {"offset": ["0"]},
        {"offset": []},
        {"lengths": [5]},
        {"lengths": [3]},
        {"lengths": [4.5]},
        {"start": -16, "end": 0},
        {"start": "0"},
        {"end": 15},
        {"start": 1 << 60, "end": (1 << 60) + 16},
    ],
)
def test_a_table_that_no_rank_writes_is_refused(entry: dict[str, Any]) -> None:
    good = piece("w", [4], [0], [4], 0)
    with pytest.raises(IntegrityError, match="rank 0: pieces has an entry"):
        make(1, [{**good, **entry}])
    missing = {key: value for key, value in good.items() if key not in entry}
    with pytest.raises(IntegrityError, match="rank 0: pieces has an entry"):
        make(1, [missing])
    with pytest.raises(IntegrityError, match="rank 0: pieces has an entry"):
        make(1, [["w"]])  # type: ignore[list-item]


_READING = """
import json, sys, time, tracemalloc
from tierfall.core.tensor_index.index import read_index

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))

data = open(sys.argv[1], "rb").read()
read_index(open(sys.argv[2], "rb").read(), what="small").find("rows")
before = peak()
if sys.argv[3] == "traced":
    tracemalloc.start()
began = time.thread_time()  # what others do on this machine meanwhile is not its time
index = read_index(data, what="index")
seconds = time.thread_time() - began
traced = tracemalloc.get_traced_memory()[1] if sys.argv[3] == "traced" else 0
last = index.find("layer999.weight")[0].blocks[-1]
print(json.dumps([seconds, peak() - before, traced, index.block_count, last.rank, last.offset]))
"""


def test_a_thousand_tensors_of_a_thousand_ranks_are_read_in_a_second_and_50_mb(
    tmp_path: Path,
) -> None:
    maker = IndexBuilder(1024)
    for rank in range(1024):
        pieces = []
        start = 0
        for layer in range(1000):
            shape = [1024 * (1 + layer % 4), 512] if layer % 3 else [4096 * (1 + layer % 5)]
            rows = shape[0] // 1024
            offset = [rank * rows] + [0] * (len(shape) - 1)
            pieces.append(piece(f"layer{layer}.weight", shape, offset, [rows, *shape[1:]], start))
            start = pieces[-1]["end"]
        maker.add(rank, pieces, what="table")
    data = maker.encode()
    (tmp_path / "index").write_bytes(data)
    (tmp_path / "small").write_bytes(make(2))
    for how in ("bare", "traced"):
        done = forked.run(["-c", _READING, str(tmp_path / "index"), str(tmp_path / "small"), how])
        assert done.returncode == 0, done.stderr
        seconds, resident, traced, blocks, rank, offset = json.loads(done.stdout)
        print(
            f"{len(data)} bytes, {seconds * 1e3:.0f} ms, {resident / 1e6:.1f} MB, {traced / 1e6:.1f} MB {how}"
        )
        assert (blocks, rank, offset) == (1_024_000, 1023, [4096 * 5 - 20])
        assert seconds < 1.0
        assert resident < 50e6
        assert traced < 50e6
    assert len(data) < 1 << 20
