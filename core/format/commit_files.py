"""The files that a commit record names for each image: the raw image, or the packed one and the record of its frames.

A commit record belongs to one tier. Its plain form names raw images: this form is stored in host memory and in the
ledger, and the record of each tier is derived from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit, NamedFile, named_not_finite
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import Codec, Shard


def document_file(name: str, data: bytes) -> NamedFile:
    """The entry of a document in a commit record."""
    return NamedFile(name=name, bytes=len(data), digest=sha256(data))


def raw_files(shard: Shard, *, image_bytes: int, manifest: bytes) -> tuple[NamedFile, NamedFile]:
    """The entries of a raw image and its encoded ``manifest``."""
    image = NamedFile(name=keys.shard_name(shard), bytes=image_bytes, digest=None)
    return image, document_file(keys.manifest_name(shard), manifest)


class ImageFile(NamedTuple):
    """The entry of an image, and how it is packed."""

    file: NamedFile
    codec: Codec


def image_file(commit: Commit, shard: Shard) -> ImageFile | None:
    """The entry of a shard's image; None if the record has none."""
    for codec in Codec:
        if file := commit.file(keys.shard_name(shard, codec)):
            return ImageFile(file, codec)
    return None


def packed_files(
    shard: Shard, codec: Codec, *, stored_bytes: int, raw_bytes: int, record: bytes
) -> tuple[NamedFile, NamedFile]:
    """The entries of a packed image and the encoded ``record`` of its frames."""
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
    """Replace the raw image of a shard by ``files``; no change if there are none."""
    if not files:
        return commit
    raw = keys.shard_name(shard)
    others = tuple(file for file in commit.files if file.name != raw)
    return replace(commit, files=(*files, *others))


def files_of(commit: Commit, shard: Shard) -> tuple[NamedFile, ...]:
    """The entries of one shard: image, manifest, frame record."""
    return tuple(file for file in commit.files if keys.parse_shard(file.name) == shard)


def wrong_files(commit: Commit, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield name and problem of each file that is missing or has another size than its entry. ``sizes`` maps the files
    of the checkpoint's folder to their bytes."""
    for file in commit.files:
        found = sizes.get(file.name)
        if found is None:
            yield file.name, "it is missing"
        elif found != file.bytes:
            yield file.name, f"it has {found} bytes, {file.bytes} by the commit record"


def plain(commit: Commit) -> Commit:
    """Convert to the plain form: raw images, and nothing owed, as that concerns one tier."""
    files = tuple(_raw(file) for file in commit.files if not file.name.endswith(keys.STORED_SUFFIX))
    if files == commit.files and not commit.owed:
        return commit
    return replace(commit, files=files, owed=())


def _raw(file: NamedFile) -> NamedFile:
    shard = keys.parse_shard(file.name)
    if file.raw_bytes is None or shard is None:
        return file
    return NamedFile(name=keys.shard_name(shard), bytes=file.raw_bytes, digest=None)


def same_checkpoint(one: Commit, other: Commit) -> bool:
    """Whether two tiers' records name identical images, however each tier packs them. Of several nodes a tier may have
    the images of some ranks only: what one record names alone is no difference."""
    if (one.lineage, one.world_size) != (other.lineage, other.world_size):
        return False
    files = {file.name: file for file in plain(one).files}
    return all(files.get(file.name, file) == file for file in plain(other).files)


def shards_of(commit: Commit) -> list[Shard]:
    """The shards whose images a record names, sorted by rank."""
    found = {keys.parse_shard(file.name) for file in commit.files if file.digest is None}
    return sorted((s for s in found if s is not None), key=lambda shard: shard.rank)


def ranks_with_image(commit: Commit, world_size: int) -> frozenset[int]:
    """The ranks of ``world_size`` whose image and manifest a record names."""
    named = {file.name for file in commit.files}
    return frozenset(
        shard.rank
        for shard in shards_of(commit)
        if shard.world_size == world_size
        and shard.rank < world_size
        and keys.manifest_name(shard) in named
    )


def unite_records(records: Mapping[str, Commit]) -> Commit:
    """Merge commit records of one checkpoint, by the names of their places, into one that names the files of all.
    Raises IntegrityError where two contradict."""
    (first_at, first), *_ = records.items()
    files = {file.name: (first_at, file) for file in first.files}
    for where, record in records.items():
        of = f"{where}: commit record of {record.lineage.checkpoint}"
        if (record.lineage, record.world_size) != (first.lineage, first.world_size):
            raise IntegrityError(f"{of}: it contradicts that on {first_at}")
        for file in record.files:
            named_at, named = files.setdefault(file.name, (where, file))
            if named != file:
                raise IntegrityError(f"{of}: its {file.name} is another than that on {named_at}")
    owed = {id for record in records.values() for id in record.owed}
    return replace(
        first,
        files=tuple(file for _, file in files.values()),
        owed=tuple(sorted(owed)),
        not_finite=named_not_finite(name for each in records.values() for name in each.not_finite),
    )
