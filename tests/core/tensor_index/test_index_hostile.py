"""Untrusted index bytes: an index or an IntegrityError, in bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import pytest
import xxhash
import zstandard
from index_help import make

from tierfall.core.format import documents
from tierfall.core.tensor_index.index import aligned, read_index
from tierfall.core.types.errors import IntegrityError, NotSupportedError

READ = (IntegrityError, NotSupportedError)


def packed(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def crafted(body: bytes = b"", tail: bytes = b"", **members: Any) -> bytes:
    """An index of one tensor of one block, some members of which are others."""
    body = body or struct.pack("<B7xB7xB7xB7x", 0, 0, 0, 4) + tail
    head = documents.seal(
        {
            "world_size": 1,
            "tensors": [["w", "float32", [4], 1]],
            "columns": {"rank": 1, "start": 1, "offset": 1, "lengths": 1},
            "columns_digest": "xxh3-128:" + xxhash.xxh3_128_hexdigest(body),
            **members,
        }
    )
    start = struct.pack("<Q", len(head)) + head
    return packed(start + bytes(aligned(len(start)) - len(start)) + body)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_cut_or_added_byte_is_found(seed: int) -> None:
    """zstd leaves a few bits of its headers without meaning: where the content is the same, so is the index."""
    draw, good = random.Random(seed), make(7)
    whole = [tensor.blocks for tensor in read_index(good, what="index")]
    for _ in range(300):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            assert [t.blocks for t in read_index(bytes(data), what="index")] == whole
        except READ:
            continue
    for length in (0, 1, 3, 9, len(good) // 2, len(good) - 1):
        with pytest.raises(IntegrityError):
            read_index(good[:length], what="index")
    with pytest.raises(IntegrityError, match="zstd frame has"):
        read_index(good + b"x", what="index")


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"world_size": 0}, "not within 1"),
        ({"tensors": "w"}, "'tensors' is missing or of a wrong type"),
        ({"tensors": [["w", "float32", [4]]]}, "does not have 4 members"),
        ({"tensors": [["w", "float32", [4], -1]]}, "a member of a wrong type"),
        ({"tensors": [["w", "float32", [4], True]]}, "a member of a wrong type"),
        ({"tensors": [["w", "float32", [1 << 61, 4], 1]]}, "a member of a wrong type"),
        ({"tensors": [["w", 7, [4], 1]]}, "a member of a wrong type"),
        ({"tensors": [["w", "float32", [4], 1 << 60]]}, "do not have the lengths"),
        ({"tensors": [["w", "float32", [4], 9]]}, "do not have the lengths"),
        ({"columns": {"rank": 1, "start": 1, "offset": 1}}, "'lengths' is missing"),
        ({"columns": {"rank": 3, "start": 1, "offset": 1, "lengths": 1}}, "no integer has"),
        ({"columns": {"rank": 16, "start": 1, "offset": 1, "lengths": 1}}, "not within 1 to 8"),
        ({"columns_digest": "xxh3-128:" + "0" * 32}, "not those that were written"),
        ({"tail": b"12345678"}, "do not have the lengths"),
    ],
)
def test_a_head_that_is_off_is_damage(members: dict[str, Any], says: str) -> None:
    with pytest.raises(IntegrityError, match=says):
        read_index(crafted(**members), what="index")


@pytest.mark.parametrize(
    "block",
    [
        (1, 0, 0, 4),  # no such rank
        (0, 0, 1, 4),  # behind the end of its whole
        (0, 0, 0, 5),
        (0, 1 << 60, 0, 4),  # behind the end of any image
        (0, 0, (1 << 64) - 1, 4),
        (0, 0, 0, (1 << 64) - 1),
    ],
)
def test_a_block_that_cannot_be_is_damage_once_it_is_asked_for(block: tuple[int, ...]) -> None:
    columns = {"rank": 8, "start": 8, "offset": 8, "lengths": 8}
    index = read_index(crafted(struct.pack("<4Q", *block), columns=columns), what="index")
    with pytest.raises(IntegrityError, match="a block of tensor 'w' has an impossible position"):
        index.find("w")


def test_a_newer_format_is_no_damage() -> None:
    content = zstandard.ZstdDecompressor().decompress(crafted())
    (length,) = struct.unpack_from("<Q", content)
    members = documents.open_sealed(content[8 : 8 + length], what="head")
    body = documents.dumps({**members, "requires": ["more"]})[:-1].rpartition(b',"digest"')[0]
    tail = f',"digest":"{documents.sha256(body)}"}}\n'.encode()
    start = struct.pack("<Q", len(body + tail)) + body + tail
    newer = packed(start + bytes(aligned(len(start)) - len(start)) + content[-32:])
    with pytest.raises(NotSupportedError, match="install the tierfall that wrote it"):
        read_index(newer, what="index")


def test_no_more_memory_is_taken_than_the_bound() -> None:
    bombs = [
        packed(bytes(64 << 20)),
        packed(struct.pack("<Q", 1 << 62) + bytes(4 << 20)),
        packed(bytes(1000), write_content_size=False),
        packed(b""),
        b"",
    ]
    tracemalloc.start()
    try:
        for bomb in bombs:
            with pytest.raises(IntegrityError):
                read_index(bomb, what="index", bytes_max=8 << 20)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(IntegrityError, match="unpacked; expected at most 1000"):
        read_index(make(300), what="index", bytes_max=1000)
