"""The arena file's layout, and the validation of what is read from it.

    0        header page:     magic, sealed document, zeros
    32 KiB   control blocks:  63 times one control page (the seal of a region), then the list of its marks
    2 MiB    extents:         image, padded to 4 KiB; manifest; commit record

A control page and a list of marks each begin with a *word* of 8 bytes: the number of valid bytes after it, and the
complement of that number. The valid bytes are written first and the word last, by one store, so a kill at any moment
leaves the old or the new state, never a torn one. They contain a SHA-256, so that damage is never read as an empty
slot. The header is written once, under a temporary file name, and never changed: after a growth the length of the file
is the capacity.

This module reads and writes memoryviews of the whole file or of a block. It must not know files, locks, allocation or
the content of a manifest. Integers have native byte order: an arena never leaves the machine that wrote it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields
from tierfall.core.format.records import IMAGE_BYTES_MAX
from tierfall.core.types.errors import ConfigError, IntegrityError, NotSupportedError
from tierfall.core.types.values import ByteRange, Shard

MAGIC = b"tierfall arena\n\0"
LAYOUT = 1
PAGE_BYTES = 4 << 10
BLOCK_BYTES = 32 << 10
SLOT_COUNT = 63
EXTENTS_START = (SLOT_COUNT + 1) * BLOCK_BYTES
CAPACITY_BYTES_MAX = IMAGE_BYTES_MAX

_WORD_BYTES = 8
_WORD_MASK = 0xFFFFFFFF
_LENGTH_BYTES = 4
_DIGEST_BYTES = hashlib.sha256().digest_size


def padded(length_bytes: int, multiple_bytes: int = PAGE_BYTES) -> int:
    """Round up to a multiple."""
    return -(-length_bytes // multiple_bytes) * multiple_bytes


def store(view: memoryview, offset: int, data: bytes) -> None:
    """Write bytes that no word makes valid yet."""
    view[offset : offset + len(data)] = data


def publish(view: memoryview, offset: int, length: int | None) -> None:
    """Write a word, by one store of 8 aligned bytes: ``length`` bytes after it are valid; None: the slot is empty."""
    word = 0 if length is None else length | (length ^ _WORD_MASK) << 32
    view[offset : offset + _WORD_BYTES].cast("Q")[0] = word


def _valid_bytes(view: memoryview, what: str) -> int | None:
    """Read the word at the start of ``view``: the number of valid bytes after it, None for an empty slot."""
    word = view[:_WORD_BYTES].cast("Q")[0]
    if word == 0:
        return None
    length: int = word & _WORD_MASK
    if word >> 32 != length ^ _WORD_MASK or length > len(view) - _WORD_BYTES:
        raise IntegrityError(f"{what}: its length word {word:#018x} is damaged")
    return length


class EntryList:
    """An append-only list of small entries, each with its digest; a kill during an append damages no older entry."""

    def __init__(self, view: memoryview, *, what: str) -> None:
        self._view = view
        self._what = what

    def clear(self) -> None:
        publish(self._view, 0, 0)

    def room_bytes(self) -> int:
        """The greatest length of the next entry."""
        used = self._used_bytes()
        overhead = _WORD_BYTES + _LENGTH_BYTES + _DIGEST_BYTES
        return len(self._view) - overhead - used

    def append(self, data: bytes) -> None:
        """Append an entry of at most ``room_bytes``."""
        used = self._used_bytes()
        length = len(data).to_bytes(_LENGTH_BYTES, "little")
        entry = length + data + hashlib.sha256(length + data).digest()
        store(self._view, _WORD_BYTES + used, entry)
        publish(self._view, 0, used + len(entry))

    def entries(self) -> tuple[bytes, ...]:
        """Read and verify all entries; raises IntegrityError where one differs from what was written."""
        data = bytes(self._view[_WORD_BYTES : _WORD_BYTES + self._used_bytes()])
        found: list[bytes] = []
        start = 0
        while start < len(data):
            end = (
                start
                + _LENGTH_BYTES
                + int.from_bytes(data[start : start + _LENGTH_BYTES], "little")
            )
            if hashlib.sha256(data[start:end]).digest() != data[end : end + _DIGEST_BYTES]:
                raise IntegrityError(f"{self._what}: entry {len(found)} differs from its digest")
            found.append(data[start + _LENGTH_BYTES : end])
            start = end + _DIGEST_BYTES
        return tuple(found)

    def _used_bytes(self) -> int:
        used = _valid_bytes(self._view, self._what)
        if used is None:
            raise IntegrityError(f"{self._what}: its length word is missing")
        return used


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaHeader:
    """The header of an arena. ``capacity_bytes`` is that at creation."""

    run: str
    shard: Shard
    slot: int
    capacity_bytes: int

    def encode(self) -> bytes:
        document = documents.seal(
            {
                "layout": LAYOUT,
                "run": self.run,
                "rank": self.shard.rank,
                "world_size": self.shard.world_size,
                "slot": self.slot,
                "capacity_bytes": self.capacity_bytes,
            }
        )
        return (MAGIC + document).ljust(PAGE_BYTES, b"\0")


def read_header(page: bytes, *, what: str) -> ArenaHeader:
    """Read the header page. Raises ConfigError, NotSupportedError or IntegrityError with the reason; the caller adds
    advice."""
    if page[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"{what}: its first bytes are not those of a tierfall arena")
    what = f"{what}: header"
    document = documents.open_sealed(page[len(MAGIC) :].rstrip(b"\0"), what=what)
    if document.get("layout") != LAYOUT:
        raise NotSupportedError(
            f"{what}: layout {document.get('layout')!r} was written by another tierfall; this one reads layout {LAYOUT}"
        )
    fields = JsonFields(document, what)
    return ArenaHeader(
        run=fields.get("run", str),
        shard=_read_shard(fields),
        slot=fields.number("slot", 0, 10**6),
        capacity_bytes=fields.number("capacity_bytes", PAGE_BYTES, CAPACITY_BYTES_MAX),
    )


def _read_shard(fields: JsonFields) -> Shard:
    world_size = fields.number("world_size", 1, 10**9)
    return Shard(fields.number("rank", 0, world_size - 1), world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRange:
    """The byte range of a manifest or a commit record in the file, and its SHA-256."""

    range: ByteRange
    digest: str

    def members(self) -> dict[str, object]:
        return {"offset": self.range.start, "bytes": self.range.length, "digest": self.digest}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The control page of a sealed region: the image's shard and byte ranges, and the digests of its records."""

    shard: Shard
    extent: ByteRange
    image_bytes: int
    manifest: RecordRange
    commit: RecordRange

    def encode(self) -> bytes:
        return documents.seal(
            {
                "rank": self.shard.rank,
                "world_size": self.shard.world_size,
                "offset": self.extent.start,
                "bytes": self.extent.length,
                "image_bytes": self.image_bytes,
                "manifest": self.manifest.members(),
                "commit": self.commit.members(),
            }
        )


class ControlBlock:
    """One control page and its list of marks."""

    def __init__(self, file_view: memoryview, slot: int, *, what: str) -> None:
        start = (slot + 1) * BLOCK_BYTES
        self.what = f"{what}: control slot {slot}"
        self._page = file_view[start : start + PAGE_BYTES]
        self.marks = EntryList(
            file_view[start + PAGE_BYTES : start + BLOCK_BYTES], what=f"{self.what}: marks"
        )

    def write(self, seal: Seal) -> None:
        """Seal: clear the marks, write the document, and last the word that makes it valid."""
        document = seal.encode()
        self.marks.clear()
        store(self._page, _WORD_BYTES, document.ljust(PAGE_BYTES - _WORD_BYTES, b"\0"))
        publish(self._page, 0, len(document))

    def clear(self) -> None:
        """Clear the slot; it is empty from the first store on."""
        publish(self._page, 0, None)
        store(self._page, _WORD_BYTES, bytes(PAGE_BYTES - _WORD_BYTES))

    def read(self, capacity_bytes: int) -> Seal | None:
        """Return the seal, None for an empty slot; raises IntegrityError for a damaged or invalid seal."""
        length = _valid_bytes(self._page, self.what)
        if length is None:
            return None
        data = bytes(self._page[_WORD_BYTES:])
        if any(data[length:]):
            raise IntegrityError(f"{self.what}: bytes after its document are damaged")
        seal = _read_seal(documents.open_sealed(data[:length], what=self.what), self.what)
        _check_places(seal, capacity_bytes, self.what)
        return seal


def _read_seal(document: dict[str, Any], what: str) -> Seal:
    fields = JsonFields(document, what)
    end = EXTENTS_START + CAPACITY_BYTES_MAX
    start = fields.number("offset", EXTENTS_START, end)
    return Seal(
        shard=_read_shard(fields),
        extent=ByteRange(start=start, end=start + fields.number("bytes", 1, end)),
        image_bytes=fields.number("image_bytes", 1, IMAGE_BYTES_MAX),
        manifest=_read_record(fields, "manifest", what),
        commit=_read_record(fields, "commit", what),
    )


def _read_record(seal: JsonFields, name: str, what: str) -> RecordRange:
    fields = JsonFields(seal.get(name, dict), f"{what}: {name}")
    start = fields.number("offset", EXTENTS_START, EXTENTS_START + CAPACITY_BYTES_MAX)
    length = fields.number("bytes", 0, documents.MAX_DOCUMENT_BYTES)
    span = ByteRange(start=start, end=start + length)
    return RecordRange(range=span, digest=fields.get("digest", str))


def _check_places(seal: Seal, capacity_bytes: int, what: str) -> None:
    """Raise IntegrityError for an extent outside of the arena, and for an image or record that is outside of the extent
    or overlaps another."""
    extent = seal.extent
    order = (
        EXTENTS_START,
        extent.start,
        extent.start + padded(seal.image_bytes),
        seal.manifest.range.start,
        seal.manifest.range.end,
        seal.commit.range.start,
        seal.commit.range.end,
        extent.end,
        EXTENTS_START + capacity_bytes,
    )
    if list(order) != sorted(order):
        raise IntegrityError(f"{what}: its extent is outside of the arena, or its records overlap")
    if extent.start % PAGE_BYTES or extent.end % PAGE_BYTES:
        raise IntegrityError(f"{what}: its extent is not a multiple of {PAGE_BYTES} bytes")


def overlapping(seals: dict[int, Seal]) -> set[int]:
    """Return the slots whose extents overlap: none of them can be trusted."""
    found: set[int] = set()
    last: int | None = None
    for slot in sorted(seals, key=lambda slot: seals[slot].extent.start):
        if last is not None and seals[slot].extent.start < seals[last].extent.end:
            found |= {slot, last}
        if last is None or seals[slot].extent.end > seals[last].extent.end:
            last = slot
    return found
