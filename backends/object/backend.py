"""Objects in an object store, through whatever client is handed in: of S3, obstore, or any filesystem of fsspec.

Here stands what is the same for all of them: keys, traits, the probe at open, which writer serves. Retry, throttling
and faults are wrappers' work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from tierfall.backends.object.client import BareAbsenceError, ObjectClient, Row
from tierfall.backends.object.multipart_writer import PART_BYTES_MAX, PART_BYTES_MIN, ObjectWriter
from tierfall.backends.object.writer_base import OrderedWriter, WriterContext
from tierfall.backends.toolkit.keys import (
    RESERVED_PREFIX,
    check_key,
    check_prefix,
    is_key,
    is_unfinished,
    unfinished_name,
)
from tierfall.backends.toolkit.views import flat
from tierfall.backends.toolkit.writers import Extent
from tierfall.core.types.backend import Publish, StoredObject, Traits, Writer
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)

_MAX_PARALLEL = 8
_NOTHING = memoryview(b"")


class ObjectStoreBackend:
    """Stores objects below an address such as ``s3://bucket/prefix``; see ``core.types.backend.Backend``.

    Opening creates one object twice, to see whether the store keeps its promise of a conditional create, and removes
    it; this also shows wrong keys and a missing bucket at once. ``read_only``: nothing is written and nothing probed
    but that the place can be listed; writing and deleting are AccessDeniedError. The client is closed with the
    backend, and where opening fails.
    """

    def __init__(self, client: ObjectClient, *, read_only: bool = False) -> None:
        self._client = client
        self._read_only = read_only
        self._living: set[str] = set()
        self._deletions = client.deletions
        try:
            conditional = self._looked() if read_only else self._probed()
        except BaseException:
            self.close()
            raise
        in_parts = client.uploads is not None
        self._traits = Traits(
            durable=client.durable,
            atomic_replace=client.atomic_replace,
            conditional_create=conditional,
            ordered_writes=not in_parts,
            part_bytes_min=PART_BYTES_MIN if in_parts else 0,
            part_bytes_max=PART_BYTES_MAX if in_parts else 0,
            max_parallel=_MAX_PARALLEL,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r})"

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def place(self) -> str:
        return self._client.place

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        check_key(key)
        what = self._what("create", key)
        extent = Extent(length=length, length_max=length_max)
        extent.check(what)
        if publish is Publish.IF_ABSENT and not self._traits.conditional_create:
            raise BackendError(f"{what}: this store does not keep a conditional create")
        self._check_writable(what)
        shop = WriterContext(client=self._client, living=self._living)
        uploads = self._client.uploads
        if uploads is None:
            return OrderedWriter(shop, key, extent=extent, publish=publish)
        return ObjectWriter(shop, uploads, key, extent=extent, publish=publish)

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
            raise BackendError(
                f"{what}: bytes {offset} to {offset + data.nbytes} were asked for, but it ends at {offset + filled}; "
                "it was cut short, or another object was expected"
            )

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        check_key(key)
        return False

    def stat(self, key: str) -> StoredObject:
        check_key(key)
        return StoredObject(
            key=key, bytes=self._client.look(self._full(key), self._what("stat", key)).bytes
        )

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        return iter(self._listed(prefix))

    def delete(self, key: str) -> None:
        check_key(key)
        what = self._what("delete", key)
        self._check_writable(what)
        self._remove(self._full(key), what)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """See ``Backend``. A store that refuses a deletion of several is asked for one at a time from then on."""
        deletions = self._deletions
        keys = [check_key(key) for key in keys]
        if deletions is None or len(keys) == 1:
            self.delete(keys[0])
            return keys[1:]
        batch = [self._full(key) for key in keys[: deletions.keys_max]]
        what = f"delete {len(batch)} objects in {self.place}"
        self._check_writable(what)
        try:
            left = deletions.delete_some(batch, what)
        except BackendError as error:
            if error.retryable and not isinstance(error, BareAbsenceError):
                raise
            if isinstance(error, KeyNotFoundError):  # of one of them, and nobody says which
                for key in keys[: len(batch)]:
                    self.delete(key)
                return keys[len(batch) :]
            # What one alone is answered tells whether it is the request that the store does not take.
            self.delete(keys[0])
            self._deletions = None
            return keys[1:]
        # Those that failed come last: the others are asked for meanwhile.
        failed = [full.removeprefix(self._client.prefix) for full in left]
        return [*keys[len(batch) :], *failed]

    def discard_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        what = self._what("clean up", prefix)
        self._check_writable(what)
        count = 0
        for full, unfinished in list(self._client.pending(self._full(prefix), what)):
            if unfinished not in self._living and self._is_ours(full):
                self._client.abort(full, unfinished, what)
                count += 1
        return count + (0 if prefix else self._discard_probes(what))

    def close(self) -> None:
        """Close the connections. Writers that are still open may go on to their abort."""
        self._client.close()

    def _listed(self, prefix: str) -> list[StoredObject]:
        found: list[StoredObject] = []
        for row in self._rows(prefix, self._what("list", prefix)):
            key = row.key.removeprefix(self._client.prefix)
            if is_key(key) and key.startswith(prefix):
                found.append(StoredObject(key=key, bytes=row.bytes, version=row.version))
        return sorted(found, key=lambda each: each.key)

    def _rows(self, prefix: str, what: str) -> Iterator[Row]:
        """List without ever saying "not there": nothing below a prefix is an empty listing."""
        try:
            yield from self._client.rows(self._full(prefix), what)
        except KeyNotFoundError as error:
            raise UnreachableError(f"{error}; a listing cannot be missing, so try again") from None

    def _is_ours(self, full: str) -> bool:
        """Say whether a writer of this package may have begun it."""
        name = full.removeprefix(self._client.prefix)
        folder, _, leaf = name.rpartition("/")
        return is_key(name) or (is_unfinished(leaf) and (not folder or is_key(folder)))

    def _discard_probes(self, what: str) -> int:
        """Remove what an opening has left that was cut off."""
        count = 0
        for full, *_ in list(self._rows(RESERVED_PREFIX, what)):
            if is_unfinished(full.removeprefix(self._client.prefix)):
                self._remove(full, what)
                count += 1
        return count

    def _probed(self) -> bool:
        """Create one object twice; say whether the second create lost."""
        full, what = self._full(unfinished_name()), f"open {self.place}"
        try:
            kept = self._client.knows_condition and self._heeds_condition(full, what)
            if not kept:
                self._client.put(full, _NOTHING, Publish.REPLACE, what)
        except BaseException:
            # It may have been taken, whatever was answered. What fails here too is left to discard_unfinished.
            with suppress(BackendError):
                self._remove(full, what)
            raise
        self._remove(full, what)
        return kept

    def _heeds_condition(self, full: str, what: str) -> bool:
        try:
            return self._second_create_loses(full, what)
        except BackendError as error:
            if error.retryable or isinstance(error, AccessDeniedError):
                raise
            # The store refuses the condition. Whether it takes the object without one is asked for next.
            return False

    def _remove(self, full: str, what: str) -> None:
        with suppress(KeyNotFoundError):
            self._client.delete(full, what)

    def _second_create_loses(self, full: str, what: str) -> bool:
        self._client.put(full, _NOTHING, Publish.IF_ABSENT, what)
        try:
            self._client.put(full, _NOTHING, Publish.IF_ABSENT, what)
        except KeyExistsError:
            return True
        return False

    def _looked(self) -> bool:
        self._client.check_open()
        return False

    def _check_writable(self, what: str) -> None:
        if self._read_only:
            raise AccessDeniedError(f"{what}: it was opened for reading only; open it for writing")

    def _full(self, key: str) -> str:
        return self._client.prefix + key

    def _what(self, operation: str, key: str) -> str:
        return f"{operation} {key!r} in {self.place}"
