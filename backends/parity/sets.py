"""A parity set: the images of one checkpoint that are coded together, one of each member of a group, and its record.

Each member keeps one file of parity and one record of it, beside each other. The record is written when the parity of
all images is complete: what has no record cannot be used.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierfall.backends.parity.stripes import SYMBOLS, ParityGeometry
from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.keys import parse_shard

PARITY_SUFFIX = ".parity"
RECORD_SUFFIX = ".json"
_BYTES_MAX = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberImage:
    """A member's image: the id of its node, the image's name in the checkpoint's folder, and its length in bytes."""

    node: str
    file: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySet:
    """The record of a set. ``key``: the checkpoint's folder and the set's name in it. ``at``: the number of the member
    that keeps this record. ``images``: of each member, by number."""

    key: str
    at: int
    geometry: ParityGeometry
    images: tuple[MemberImage, ...]

    @property
    def folder(self) -> str:
        """Folder of the checkpoint: run, step and attempt."""
        return self.key.rpartition("/")[0]

    def image_key(self, member: int) -> str:
        return f"{self.folder}/{self.images[member].file}"

    def encode(self) -> bytes:
        return documents.seal(
            {
                "set": self.key,
                "member": self.at,
                "losses": self.geometry.losses,
                "block_bytes": self.geometry.block_bytes,
                "images": [
                    {"node": image.node, "file": image.file, "bytes": image.bytes}
                    for image in self.images
                ],
            }
        )


def parity_key(key: str) -> str:
    """Key of the file of a set's parity."""
    return key + PARITY_SUFFIX


def record_key(key: str) -> str:
    """Key of a set's record."""
    return key + RECORD_SUFFIX


def parse_parity_set(data: bytes, *, what: str) -> ParitySet:
    """Parse a record from untrusted bytes; ``what`` names it in errors. Raises IntegrityError."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    images = tuple(_image(entry, what) for entry in reader.list_of("images", dict))
    losses = reader.number("losses", 1, SYMBOLS)
    block_bytes = reader.number("block_bytes", 1, _BYTES_MAX)
    try:
        geometry = ParityGeometry(len(images), losses, block_bytes)
    except ValueError as error:
        raise IntegrityError(f"{what}: {error}") from error
    return ParitySet(
        key=reader.get("set", str),
        at=reader.number("member", 0, len(images) - 1),
        geometry=geometry,
        images=images,
    )


def _image(entry: dict[str, object], what: str) -> MemberImage:
    reader = JsonFields(entry, f"{what}: images")
    file = reader.name("file")
    if parse_shard(file) is None:
        raise IntegrityError(f"{what}: {file!r} is no name of an image")
    return MemberImage(
        node=reader.get("node", str), file=file, bytes=reader.number("bytes", 0, _BYTES_MAX)
    )
