"""The record of a packed image: it round-trips, fits its manifest, and any error in it is damage."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from compression_help import CODECS, image_of, packed_file

from tierfall.core.compression.codec import frame_bytes_max
from tierfall.core.compression.frame_table import (
    chunk_widths,
    read_frame_table,
)
from tierfall.core.format import documents
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Manifest
from tierfall.core.types.errors import IntegrityError, NotSupportedError
from tierfall.core.types.values import Codec

# Seven chunks: the header, and data of 22,275 bytes in slices of 4096.
RAW, MANIFEST = image_of({"complex128": 5008, "float32": 9000, "bfloat16": 8190, "bool": 77})
FILES = {codec: packed_file(RAW, MANIFEST, codec) for codec in CODECS}
PACKED = {codec: packed for codec, (_, packed) in FILES.items()}
LENGTHS = PACKED[Codec.PLANES].lengths
OFFSETS = PACKED[Codec.PLANES].offsets
HUGE = 10**400
NO_NUMBER = [None, "7", 1.0, True, [], {}, -1, 0, 10**19, HUGE]
NO_NUMBERS = [None, "x", 7, {}, [], [None] * 7, ["1"] * 7, [1.0] * 7, [True] * 7, [[1]] * 7]


def with_entry(numbers: tuple[int, ...], index: int, number: int) -> list[int]:
    return [*numbers[:index], number, *numbers[index + 1 :]]


HOSTILE: dict[str, list[Any]] = {
    "codec": [None, 7, True, [], {}, "", "none", "ZSTD", "lz4", "zstd\0"],
    "level": [*NO_NUMBER, 20],
    "raw_bytes": [*NO_NUMBER, len(RAW) - 1, len(RAW) + 1, 1 << 50],
    "lengths": [
        *NO_NUMBERS,
        LENGTHS[:-1],
        [*LENGTHS, 10],
        with_entry(LENGTHS, 2, 0),
        with_entry(LENGTHS, 2, -5),
        with_entry(LENGTHS, 2, LENGTHS[2] + 1),
        with_entry(LENGTHS, 2, HUGE),
        with_entry(LENGTHS, 6, frame_bytes_max(4096) + 1),
        with_entry(LENGTHS, 6, 1 << 40),
    ],
    "offsets": [
        *NO_NUMBERS,
        OFFSETS[:-1],
        [*OFFSETS, OFFSETS[-1] + 10],
        with_entry(OFFSETS, 0, 1),
        with_entry(OFFSETS, 0, -1),
        with_entry(OFFSETS, 3, OFFSETS[3] - 1),
        with_entry(OFFSETS, 3, OFFSETS[3] + 1),
        with_entry(OFFSETS, 6, 1 << 60),
        with_entry(OFFSETS, 6, HUGE),
        [offset + 8 for offset in OFFSETS],
        OFFSETS[::-1],
    ],
    "widths": [*NO_NUMBERS, [1] * 6, [1] * 8]
    + [[1] * 6 + [width] for width in (-1, 0, 3, 32, 1 << 40, HUGE)],
}


def members_of(codec: Codec) -> dict[str, Any]:
    return {k: v for k, v in json.loads(PACKED[codec].encode()).items() if k != "digest"}


def sealed(members: dict[str, Any]) -> bytes:
    """Seal as a stranger would, who also knows how to compute a digest."""
    body = json.dumps(members)[:-1]
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},"digest":"sha256:{digest}"}}\n'.encode()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("member", HOSTILE)
def test_a_hostile_value_is_damage(codec: Codec, member: str) -> None:
    members = members_of(codec)
    if member not in members:
        return
    for value in HOSTILE[member]:
        with pytest.raises(IntegrityError, match="disk: gpt"):
            read_frame_table(sealed({**members, member: value}), MANIFEST, what="disk: gpt")


@pytest.mark.parametrize("codec", CODECS)
def test_a_record_of_another_image_is_damage(codec: Codec) -> None:
    others = [
        replace(MANIFEST, image_bytes=MANIFEST.image_bytes + 1),
        replace(MANIFEST, image_bytes=MANIFEST.image_bytes + 8192),
        replace(MANIFEST, chunk_bytes=8192),
    ]
    for other in others:
        with pytest.raises(IntegrityError):
            read_frame_table(PACKED[codec].encode(), other, what="x")


@pytest.mark.parametrize("change", [{"format": 2}, {"requires": ["other-objects"]}])
def test_a_newer_record_is_refused_and_an_unknown_member_is_not(change: dict[str, Any]) -> None:
    members = members_of(Codec.ZSTD)
    with pytest.raises(NotSupportedError, match="install the tierfall that wrote it"):
        read_frame_table(sealed({**members, **change}), MANIFEST, what="x")
    more = sealed({**members, "nonces": ["00"] * 7, "widths": "x"})
    assert read_frame_table(more, MANIFEST, what="x") == PACKED[Codec.ZSTD]


@pytest.mark.parametrize(
    "piece",
    [None, 7, "x", [], {}, {"start": 0, "end": 8}, {"start": 8, "end": 0, "dtype": "bool"}]
    + [{"start": number, "end": 8, "dtype": "bool"} for number in (None, -1, "0", True, HUGE)]
    + [{"start": 0, "end": 8, "dtype": dtype} for dtype in (None, 7, [])],
)
def test_a_hostile_piece_is_damage(piece: Any) -> None:
    manifest: Manifest = replace(MANIFEST, pieces=Spliced(documents.dumps([piece])))
    with pytest.raises(IntegrityError, match="disk: gpt"):
        chunk_widths(manifest.pieces, manifest, what="disk: gpt")
