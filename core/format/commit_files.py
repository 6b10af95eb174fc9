"""How a commit record names the files of an image: as it is, or packed and with the record of its frames beside it.

A commit record is of one tier. Its plain form names every image raw, and no merged index: that is what host memory
holds, what the ledger keeps, and what the record of any tier is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit, Lineage, NamedFile
from tierfall.core.types import keys
from tierfall.core.types.values import Codec, Shard


def document_file(name: str, data: bytes) -> NamedFile:
    """Return what a commit record names of a document."""
    return NamedFile(name=name, bytes=len(data), digest=sha256(data))


def raw_files(shard: Shard, *, image_bytes: int, manifest: bytes) -> tuple[NamedFile, NamedFile]:
    """Return what a commit record names of a raw image; ``manifest`` is its encoded manifest."""
    image = NamedFile(name=keys.shard_name(shard), bytes=image_bytes, digest=None)
    return image, document_file(keys.manifest_name(shard), manifest)


class ImageFile(NamedTuple):
    """The file of an image, as a commit record names it."""

    file: NamedFile
    codec: Codec


def image_file(commit: Commit, shard: Shard) -> ImageFile | None:
    """Return the file of a shard's image; None where the record names none."""
    for codec in Codec:
        if file := commit.file(keys.shard_name(shard, codec)):
            return ImageFile(file, codec)
    return None


def packed_files(
    shard: Shard, codec: Codec, *, stored_bytes: int, raw_bytes: int, record: bytes
) -> tuple[NamedFile, NamedFile]:
    """Return what a commit record names in place of a raw image; ``record`` is the encoded record of its frames."""
    return (
        NamedFile(
            name=keys.shard_name(shard, codec),
            bytes=stored_bytes,
            digest=None,
            raw_bytes=raw_bytes,
        ),
        document_file(keys.stored_name(shard), record),
    )


def with_packed(commit: Commit, shard: Shard, files: tuple[NamedFile, ...]) -> Commit:
    """Name ``files`` in place of the raw image of a shard."""
    if not files:
        return commit
    raw = keys.shard_name(shard)
    others = tuple(file for file in commit.files if file.name != raw)
    return replace(commit, files=(*files, *others))


def files_of(commit: Commit, shard: Shard) -> tuple[NamedFile, ...]:
    """Return what a commit record names of one shard: its image, its manifest, the record of its frames."""
    return tuple(file for file in commit.files if keys.parse_shard(file.name) == shard)


def wrong_files(commit: Commit, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the name of each file that a commit record names and that is missing, or not as long as it says, and what
    is wrong with it. ``sizes`` are the bytes of the files in the folder of the checkpoint, by name."""
    for file in commit.files:
        found = sizes.get(file.name)
        if found is None:
            yield file.name, "it is missing"
        elif found != file.bytes:
            yield file.name, f"it has {found} bytes, the commit record says {file.bytes}"


def with_index(commit: Commit, data: bytes) -> Commit:
    """Name this index, and no other."""
    index = document_file(keys.INDEX_NAME, data)
    return replace(commit, files=(*without_index(commit).files, index))


def without_index(commit: Commit) -> Commit:
    files = tuple(file for file in commit.files if file.name != keys.INDEX_NAME)
    return commit if files == commit.files else replace(commit, files=files)


def plain(commit: Commit) -> Commit:
    """Return a record that names every image raw, no index, and nothing that is owed to the tier it was read on."""
    files = tuple(
        _raw(file)
        for file in without_index(commit).files
        if not file.name.endswith(keys.STORED_SUFFIX)
    )
    if files == commit.files and not commit.owed:
        return commit
    return replace(commit, files=files, owed=())


def _raw(file: NamedFile) -> NamedFile:
    shard = keys.parse_shard(file.name)
    if file.raw_bytes is None or shard is None:
        return file
    return NamedFile(name=keys.shard_name(shard), bytes=file.raw_bytes, digest=None)


def same_checkpoint(one: Commit, other: Commit) -> bool:
    """Say whether two tiers' records are of the very same images, however each tier packs them."""
    return one.line == other.line and _names(one) == _names(other)


def _names(commit: Commit) -> set[tuple[str, int, str | None]]:
    return {(file.name, file.bytes, file.digest) for file in plain(commit).files}


def damage_mark(line: Lineage) -> str:
    """Name the mark which says that a copy of this very checkpoint is damaged: another attempt of the same number may
    save a step of the same name."""
    return f"damaged-{sha256(line.attempt_id.encode()).removeprefix('sha256:')[:32]}"


def shards_of(commit: Commit) -> list[Shard]:
    """Return the shards whose images a record names, by rank."""
    found = {keys.parse_shard(file.name) for file in commit.files if file.digest is None}
    return sorted((s for s in found if s is not None), key=lambda shard: shard.rank)


def named_shards(commit: Commit, world_size: int) -> frozenset[int]:
    """Return the ranks whose image and manifest a record names."""
    named = {file.name for file in commit.files}
    return frozenset(
        shard.rank
        for shard in shards_of(commit)
        if shard.world_size == world_size
        and shard.rank < world_size
        and keys.manifest_name(shard) in named
    )
