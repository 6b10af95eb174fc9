"""A backend on an object store, through a client: of S3, of a filesystem of fsspec, or of a plug-in's store.

It owns what is the same for all clients: keys, traits, the probe at open, the choice of the writer. Wrappers retry and
throttle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from tierfall.backends.object.client import BareAbsenceError, ObjectClient
from tierfall.backends.object.writers import (
    PART_BYTES_MIN,
    BufferedWriter,
    MultipartWriter,
    OrderedWriter,
)
from tierfall.backends.toolkit.base import BackendBase, Extent
from tierfall.backends.toolkit.keys import (
    check_key,
    check_prefix,
    is_key,
    is_unfinished,
    unfinished_name,
)
from tierfall.backends.toolkit.views import flat
from tierfall.core.types.backend import Publish, StoredObject, Traits, Writer
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)

_NOTHING = memoryview(b"")


class ObjectStoreBackend(BackendBase):
    """Stores objects below an address such as ``s3://bucket/prefix``; see ``core.types.backend.Backend``.

    Opening lists the place, so that wrong credentials and a missing bucket are errors, even if the store would create
    the bucket at the first write. Then it creates one object twice, to probe whether the store obeys a conditional
    create, and deletes it. ``read_only``: opening only lists; writing and deleting raise AccessDeniedError. The client
    is closed with the backend, and if opening fails.
    """

    _not_conditional = "this store does not keep a conditional create"

    def __init__(self, client: ObjectClient, *, read_only: bool = False) -> None:
        super().__init__(client.place, read_only=read_only)
        self._client = client
        self._active: set[str] = set()
        """The ids of the unfinished objects of active writers."""
        self._keys_max = client.keys_max
        """The most keys of one request for their deletion."""
        try:
            client.check_open(read_only=read_only)
            conditional = not read_only and self._probed()
        except BaseException:
            self.close()
            raise
        self._traits = Traits(
            durable=client.durable,
            atomic_replace=client.atomic_replace,
            conditional_create=conditional,
            ordered_writes=client.takes_streams,
            part_bytes_min=PART_BYTES_MIN if client.takes_parts else 0,
            max_parallel=client.max_parallel,
        )

    def _create(self, key: str, extent: Extent, publish: Publish) -> Writer:
        kind: type[BufferedWriter | MultipartWriter | OrderedWriter] = BufferedWriter
        if self._client.takes_parts:
            kind = MultipartWriter
        elif self._client.takes_streams:
            kind = OrderedWriter
        return kind(self._client, self._active, key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        check_key(key)
        data = flat(view, writable=True)
        what = self._what("read", key)
        if offset < 0:
            raise BackendError(f"{what}: the offset {offset} is negative")
        if not data.nbytes:
            self.stat(key)
            return
        filled = self._client.read_into(self._full(key), offset, data, what)
        if filled < data.nbytes:
            length = self._client.head(self._full(key), what)
            raise self._short_read(what, offset, offset + data.nbytes, length)

    def stat(self, key: str) -> StoredObject:
        check_key(key)
        length = self._client.head(self._full(key), self._what("stat", key))
        return StoredObject(key=key, bytes=length)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        found: list[StoredObject] = []
        for row in self._rows(prefix, self._what("list", prefix)):
            key = row.key.removeprefix(self._client.prefix)
            if is_key(key) and key.startswith(prefix):
                found.append(replace(row, key=key))
        return iter(sorted(found, key=lambda each: each.key))

    def delete(self, key: str) -> None:
        check_key(key)
        what = self._what("delete", key)
        self._check_writable(what)
        self._remove(self._full(key), what)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """See ``Backend``. After a store has refused a batch deletion, objects are deleted one by one."""
        keys = [check_key(key) for key in keys]
        if self._keys_max == 1 or len(keys) == 1:
            self.delete(keys[0])
            return keys[1:]
        batch = [self._full(key) for key in keys[: self._keys_max]]
        what = f"delete {len(batch)} objects in {self.place}"
        self._check_writable(what)
        try:
            left = self._client.delete_some(batch, what)
        except BackendError as error:
            if error.retryable and not isinstance(error, BareAbsenceError):
                raise
            # If a single deletion succeeds, the store does not support batches; else it raises the cause.
            self.delete(keys[0])
            self._keys_max = 1
            return keys[1:]
        # The failed keys come last, so that the next batch has others first.
        failed = [full.removeprefix(self._client.prefix) for full in left]
        return [*keys[len(batch) :], *failed]

    def discard_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        what = self._what("clean up", prefix)
        self._check_writable(what)
        count = 0
        for full, unfinished in list(self._client.pending(self._full(prefix), what)):
            if unfinished not in self._active and self._is_ours(full):
                self._client.abort(full, unfinished, what)
                count += 1
        return count

    def close(self) -> None:
        """Close the connections. Open writers may still abort."""
        self._client.close()

    def _rows(self, prefix: str, what: str) -> Iterator[StoredObject]:
        """List a prefix. KeyNotFoundError is no valid answer to that: without objects, the listing is empty."""
        try:
            yield from self._client.list(self._full(prefix), what)
        except KeyNotFoundError as error:
            raise UnreachableError(f"{error}; a listing cannot be missing, so try again") from None

    def _is_ours(self, full: str) -> bool:
        """Whether a writer of this package can have begun it."""
        name = full.removeprefix(self._client.prefix)
        folder, _, leaf = name.rpartition("/")
        return is_key(name) or (is_unfinished(leaf) and (not folder or is_key(folder)))

    def _probed(self) -> bool:
        """Create one object twice; return whether the second create was refused."""
        full, what = self._full(unfinished_name()), f"open {self.place}"
        try:
            obeys = self._client.supports_if_absent and self._second_create_fails(full, what)
            if not obeys:
                self._client.put(full, _NOTHING, Publish.REPLACE, what)
        except BaseException:
            # The object may exist, whatever the answer was. What cannot be deleted now stays: it is empty.
            with suppress(BackendError):
                self._remove(full, what)
            raise
        self._remove(full, what)
        return obeys

    def _second_create_fails(self, full: str, what: str) -> bool:
        try:
            self._client.put(full, _NOTHING, Publish.IF_ABSENT, what)
            try:
                self._client.put(full, _NOTHING, Publish.IF_ABSENT, what)
            except KeyExistsError:
                return True
        except BackendError as error:
            if error.retryable or isinstance(error, AccessDeniedError):
                raise
            # The store does not support the condition. The caller tries a put without one.
        return False

    def _remove(self, full: str, what: str) -> None:
        with suppress(KeyNotFoundError):
            self._client.delete(full, what)

    def _full(self, key: str) -> str:
        return self._client.prefix + key
