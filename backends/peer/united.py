"""The commit records that a node keeps for others: each names the images of one node. Where several nodes have sent one
of the same checkpoint, they are read as one record, which names the images of all. Where one is sent again to a node
that keeps other images of the checkpoint, it names these, too."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from tierfall.backends.peer.copies import read_object
from tierfall.backends.toolkit.base import AbortOnExit, describe
from tierfall.core.format.commit_files import shards_of, unite_records
from tierfall.core.format.records import Commit, parse_commit
from tierfall.core.types.backend import Backend, StoredObject, put_object
from tierfall.core.types.errors import (
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
    TruncatedError,
)
from tierfall.core.types.keys import parse_shard

logger = logging.getLogger("tierfall")


class UnitedRecords:
    """Reads the commit records of ``kept``. May be used by several threads."""

    def __init__(self, kept: Sequence[Backend]) -> None:
        self._kept = kept
        self._united: dict[str, tuple[str, bytes]] = {}
        """By key: the versions of what was merged, and the record."""

    def find(self, key: str) -> StoredObject | None:
        """Describe the record of a key; None where there is none."""
        found = self._found(key)
        if len(found) < 2:
            return found[0][1] if found else None
        version = _version([stored for _, stored in found])
        return StoredObject(key=key, bytes=len(self._unite(key, found)), version=version)

    def stat(self, key: str) -> StoredObject:
        found = self.find(key)
        if found is None:
            raise KeyNotFoundError(f"stat {key!r} in {self._kept[0].place}: it is not kept here")
        return found

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        found = self._found(key)
        if len(found) < 2:
            side = found[0][0] if found else self._kept[0]
            side.read_into(key, offset, view)
            return
        data = self._unite(key, found)
        if not 0 <= offset <= offset + view.nbytes <= len(data):
            what = describe("read", key, found[0][0].place)
            raise TruncatedError(
                f"{what}: bytes {offset} to {offset + view.nbytes} were asked for, but it ends at {len(data)}"
            )
        view.cast("B")[:] = data[offset : offset + view.nbytes]

    def _found(self, key: str) -> list[tuple[Backend, StoredObject]]:
        found = []
        for side in self._kept:
            try:
                found.append((side, side.stat(key)))
            except KeyNotFoundError:
                continue
        return found

    def _unite(self, key: str, found: Sequence[tuple[Backend, StoredObject]]) -> bytes:
        versions = _version([stored for _, stored in found])
        known, data = self._united.get(key, ("", b""))
        if known != versions or not all(stored.version for _, stored in found):
            data = _unite([(side.place, read_object(side, key)) for side, _ in found], key)
            self._united[key] = versions, data
        return data


class UnitingWriter(AbortOnExit):
    """Replaces a commit record on each of ``sides``. A record there may name images of other ranks: the new one names
    them, too."""

    def __init__(self, sides: Sequence[Backend], key: str) -> None:
        self._sides = tuple(sides)
        self._key = key
        self._data = bytearray()

    def write(self, offset: int, view: memoryview) -> None:
        self._data[offset : offset + view.nbytes] = view.cast("B")

    def publish(self) -> None:
        for side in self._sides:
            put_object(side, self._key, self._with_images_of_others(side))

    def abort(self) -> None:
        """Nothing is there yet."""

    def _with_images_of_others(self, side: Backend) -> bytes:
        data = bytes(self._data)
        try:
            there = read_object(side, self._key)
            new, old = (
                parse_commit(each, what=f"{side.place}: {self._key}") for each in (data, there)
            )
        except (IntegrityError, KeyNotFoundError, NotSupportedError):
            return data  # there is nothing, or nothing good
        own = set(shards_of(new))
        others = [file for file in old.files if parse_shard(file.name) not in (None, *own)]
        if old.lineage != new.lineage or not others:
            return data
        return replace(new, files=(*new.files, *others)).encode()


def _unite(records: Sequence[tuple[str, bytes]], key: str) -> bytes:
    """Merge records, each with its place. One that is damaged, or of another start than the newest, is left out with a
    warning; if none is good, the first is returned as it is."""
    good: dict[str, Commit] = {}
    for number, (place, data) in enumerate(records, 1):
        try:
            good[f"{place} ({number})"] = parse_commit(data, what=f"{place}: {key}")
        except (IntegrityError, NotSupportedError) as error:
            logger.warning("peers: what one node has sent of a checkpoint is not used: %s", error)
    if not good:
        return records[0][1]
    newest = max(good.values(), key=lambda commit: commit.wall_time_s)
    same = {place: one for place, one in good.items() if one.lineage == newest.lineage}
    for place in good.keys() - same.keys():
        logger.warning("peers: %s: %s is of another start, and is not used", place, key)
    try:
        return unite_records(same).encode()
    except IntegrityError as error:
        logger.warning("peers: %s; the newest record is used alone", error)
        return newest.encode()


def _version(found: Sequence[StoredObject]) -> str:
    return "+".join(f"{stored.version}.{stored.bytes}" for stored in found)
