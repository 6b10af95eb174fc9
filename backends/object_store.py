"""Objects in an object store, by obstore: ``s3://``, and for tests ``memory://``.

obstore reads, lists, deletes and puts what is small. It has no upload whose parts may come in any order, be sent again
one by one, or be aborted, and cannot list unfinished uploads; these requests are made in ``s3_multipart``, signed with
the same credentials. Retry, throttling and faults are wrappers' work. Importing this needs the extra ``object``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import obstore
from obstore import exceptions

from tierfall.backends.keys import check_key, check_prefix, is_key, unfinished_name
from tierfall.backends.object_errors import translated, was_answered
from tierfall.backends.object_options import open_site
from tierfall.backends.object_writer import PART_BYTES_MAX, PART_BYTES_MIN, ObjectWriter
from tierfall.backends.views import copy_bytes, flat
from tierfall.core.contracts import Publish, Stored, Traits
from tierfall.core.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)

_MAX_PARALLEL = 8
_STREAM_BYTES = 1024 * 1024
_LIST_ROWS = 1000


class ObjectStoreBackend:
    """Stores objects below an address such as ``s3://bucket/prefix``; see ``core.contracts.Backend``.

    ``options`` are fsspec's (``object_options``). Opening creates one object twice, to see whether the store keeps
    its promise of a conditional create, and removes it; this also shows wrong keys and a missing bucket at once.
    ``read_only``: nothing is written and nothing probed but that the place can be listed; writing and deleting are
    AccessDeniedError.
    """

    def __init__(
        self, url: str, *, options: Mapping[str, Any] | None = None, read_only: bool = False
    ) -> None:
        self._site = open_site(url, options)
        self._read_only = read_only
        self._living: set[str] = set()
        is_s3 = self._site.uploads is not None
        try:
            conditional = self._looked() if read_only else self._probed()
        except BaseException:
            self.close()
            raise
        self._traits = Traits(
            durable=is_s3,
            atomic_replace=True,
            conditional_create=conditional,
            part_bytes_min=PART_BYTES_MIN if is_s3 else 0,
            part_bytes_max=PART_BYTES_MAX if is_s3 else 0,
            max_parallel=_MAX_PARALLEL,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r})"

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def place(self) -> str:
        return self._site.url

    def create(
        self, key: str, *, length: int | None = None, publish: Publish = Publish.REPLACE
    ) -> ObjectWriter:
        check_key(key)
        what = self._what("create", key)
        if length is not None and length < 0:
            raise BackendError(f"{what}: a length of {length} bytes")
        if publish is Publish.IF_ABSENT and not self._traits.conditional_create:
            raise BackendError(f"{what}: this store does not keep a conditional create")
        self._check_writable(what)
        return ObjectWriter(self._site, self._living, key, length=length, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        check_key(key)
        data = flat(view, writable=True)
        what = self._what("read", key)
        if offset < 0:
            raise BackendError(f"{what}: the offset {offset} is negative")
        if not data.nbytes:
            self.stat(key)
            return
        end, filled = offset + data.nbytes, 0
        with translated(what):
            answer = obstore.get(
                self._site.store, self._full(key), options={"range": (offset, end)}
            )
            # One copy for each piece as it comes; as one buffer, obstore would join them first.
            for piece in answer.stream(min_chunk_size=_STREAM_BYTES):
                source = flat(memoryview(piece))
                if filled + source.nbytes > data.nbytes:
                    raise BackendError(f"{what}: the store sent more than the range asked for")
                copy_bytes(data[filled : filled + source.nbytes], source)
                filled += source.nbytes
        if filled < data.nbytes:
            raise BackendError(
                f"{what}: bytes {offset} to {end} were asked for, but it ends at {offset + filled}; it was cut "
                "short, or another object was expected"
            )

    def stat(self, key: str) -> Stored:
        check_key(key)
        store, full = self._site.store, self._full(key)
        with translated(self._what("stat", key)):
            try:
                found = obstore.head(store, full)
            except (exceptions.BaseError, FileNotFoundError) as error:
                # An answer to HEAD has no body: a missing bucket looks like a missing object. A GET says why.
                if not was_answered(error):
                    raise
                obstore.get(store, full)
                found = obstore.head(store, full)
        return Stored(key=key, bytes=found["size"])

    def scan(self, prefix: str) -> Iterator[Stored]:
        check_prefix(prefix)
        return iter(self._listed(prefix))

    def delete(self, key: str) -> None:
        check_key(key)
        what = self._what("delete", key)
        self._check_writable(what)
        try:
            with translated(what):
                obstore.delete(self._site.store, self._full(key))
        except KeyNotFoundError:
            return

    def discard_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        what = self._what("clean up", prefix)
        self._check_writable(what)
        uploads, count = self._site.uploads, 0
        if uploads is None:
            # A writer keeps everything in memory there until it publishes.
            return count
        for full, upload in list(uploads.pending(self._full(prefix), what)):
            if upload not in self._living and is_key(full.removeprefix(self._site.prefix)):
                uploads.abort(full, upload, what)
                count += 1
        return count

    def close(self) -> None:
        """Close the connections. Writers that are still open may go on to their abort."""
        if self._site.uploads is not None:
            self._site.uploads.close()

    def _listed(self, prefix: str) -> list[Stored]:
        found: list[Stored] = []
        with translated(self._what("list", prefix)):
            full = self._full(prefix)
            for rows in obstore.list(self._site.store, full or None, chunk_size=_LIST_ROWS):
                for row in rows:
                    key = row["path"].removeprefix(self._site.prefix)
                    if is_key(key) and key.startswith(prefix):
                        found.append(Stored(key=key, bytes=row["size"]))
        return sorted(found, key=lambda each: each.key)

    def _probed(self) -> bool:
        """Create one object twice; say whether the second create lost."""
        name = unfinished_name()
        full, what = self._full(name), f"open {self.place}"
        try:
            for _ in range(2):
                with translated(what):
                    obstore.put(self._site.store, full, b"", mode="create", use_multipart=False)
            kept = False
        except KeyExistsError:
            kept = True
        except (AccessDeniedError, UnreachableError):
            raise
        except BackendError:
            # The store refuses the condition. Whether it takes the object without one is asked too.
            kept = False
            with translated(what):
                obstore.put(self._site.store, full, b"", use_multipart=False)
        with translated(what):
            obstore.delete(self._site.store, full)
        return kept

    def _looked(self) -> bool:
        with translated(f"open {self.place}"):
            next(
                iter(obstore.list(self._site.store, self._site.prefix or None, chunk_size=1)), None
            )
        return False

    def _check_writable(self, what: str) -> None:
        if self._read_only:
            raise AccessDeniedError(f"{what}: it was opened for reading only; open it for writing")

    def _full(self, key: str) -> str:
        return self._site.prefix + key

    def _what(self, operation: str, key: str) -> str:
        return f"{operation} {key!r} in {self.place}"
