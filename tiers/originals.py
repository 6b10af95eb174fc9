"""Images in host memory as objects, read-only: other nodes rebuild from them what a lost node had.

The arenas may belong to processes that live: one may release an image and fill its memory anew while it is read here.
Whoever reads compares digests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tierfall.backends.toolkit.base import BackendBase, describe
from tierfall.backends.toolkit.keys import check_key, check_prefix
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish, StoredObject, Traits, Writer
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    TierfallError,
)
from tierfall.core.types.keys import parse_shard, parse_step_folder, shard_name
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.arena.region import Region
from tierfall.tiers.host import HostTier, arena_slots


class HostOriginals(BackendBase):
    """The sealed images of all slots in a run's ``folder`` of host memory, by the keys that they have on a stored tier.
    May be used by several threads."""

    _traits = Traits(durable=False, atomic_replace=True, conditional_create=False)

    def __init__(self, folder: Path, run: str) -> None:
        super().__init__(str(folder), read_only=True)
        self._folder = folder
        self._run = run
        self._lock = threading.Lock()
        self._found: dict[str, tuple[HostTier, Region]] = {}

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        self._check_create(key, length, length_max, publish)
        raise AccessDeniedError(
            f"{describe('create', key, self.place)}: only its owner writes there"
        )

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        target, what = flat(view, writable=True), self._what("read", check_key(key))
        image = self._find(key)
        if offset < 0 or offset + target.nbytes > image.nbytes:
            raise self._short_read(what, offset, offset + target.nbytes, image.nbytes)
        copy_bytes(target, image[offset : offset + target.nbytes])

    def stat(self, key: str) -> StoredObject:
        return StoredObject(key=key, bytes=self._find(check_key(key)).nbytes)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        raise BackendError(f"{self._what('list', prefix)}: images in memory are read by their keys")

    def delete(self, key: str) -> None:
        self._check_writable(self._what("delete", check_key(key)))

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        self._check_writable(self._what("delete", check_key(keys[0])))
        return []

    def discard_unfinished(self, prefix: str) -> int:
        self._check_writable(self._what("clean up", check_prefix(prefix)))
        return 0

    def close(self) -> None:
        with self._lock:
            hosts = {id(host): host for host, _ in self._found.values()}
            self._found.clear()
        for host in hosts.values():
            host.close(keep=True)

    def _find(self, key: str) -> memoryview:
        """Return the bytes of an image. Raises KeyNotFoundError where no slot has it."""
        with self._lock:
            if key not in self._found:
                self._found[key] = self._open(key)
            return self._found[key][1].image

    def _open(self, key: str) -> tuple[HostTier, Region]:
        folder, _, name = key.rpartition("/")
        run, _, step = folder.rpartition("/")
        checkpoint, shard = parse_step_folder(step), parse_shard(name)
        if run == self._run and checkpoint and shard and name == shard_name(shard):
            for slot in arena_slots(self._folder) if self._folder.is_dir() else ():
                host = HostTier(
                    name="host",
                    run=run,
                    folder=self._folder,
                    slot=slot,
                    shard=shard,
                    capacity_bytes=None,
                )
                if (region := _region(host, checkpoint, shard)) is not None:
                    return host, region
        raise KeyNotFoundError(f"{self._what('read', key)}: no image of it is in this memory")


def _region(host: HostTier, checkpoint: CheckpointId, shard: Shard) -> Region | None:
    """Return the region of an image in a slot, which stays open; None, with the slot closed, where it has none."""
    with suppress(TierfallError):  # what is damaged, or was removed just now, is not there
        if host.attach(writable=False):
            found = host.images().get(checkpoint)
            if found is not None and found.region.shard == shard:
                return found.region
    host.close(keep=True)
    return None
