"""Objects through obstore: ``gs://``, ``az://``, and for tests its own memory.

obstore's writer takes bytes in order, keeps up to ``_AT_ONCE`` parts in memory and on their way, and sends a failed
part again by itself, because nobody else can. Nobody can list what it leaves unfinished when the process is killed: on
Azure that is deleted after a week, on Google Cloud Storage a bucket's lifecycle rule AbortIncompleteMultipartUpload
collects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import obstore
from obstore.store import ObjectStore

from tierfall.backends.object.client import Deletions, Found, Row, Stream
from tierfall.backends.object.responses import creating, is_worth_a_get
from tierfall.backends.obstore.errors import translated
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish, part_bytes
from tierfall.core.types.errors import BackendError

_STREAM_BYTES = 1024 * 1024
_LIST_ROWS = 1000
# Of obstore's writer: what one part holds at least, and how many are on their way at once.
_PART_BYTES = 16 * 1024 * 1024
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ObstoreClient:
    """See ``ObjectClient``. ``streams`` is the same place as ``store``, with obstore's retries."""

    place: str
    prefix: str
    durable: bool
    store: ObjectStore = field(repr=False)
    streams: ObjectStore = field(repr=False)
    deletions: Deletions | None = field(repr=False, default=None)
    atomic_replace: bool = True
    knows_condition: bool = True

    @property
    def uploads(self) -> None:
        return None

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        size_bytes = part_bytes(most_bytes or 0, _PART_BYTES)
        return _ObstoreStream(self.streams, key, size_bytes, what)

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        mode: Literal["create", "overwrite"] = (
            "create" if publish is Publish.IF_ABSENT else "overwrite"
        )
        with creating(publish), translated(what):
            # obstore refuses a view of no bytes.
            obstore.put(
                self.store, key, data if data.nbytes else b"", mode=mode, use_multipart=False
            )

    def look(self, key: str, what: str) -> Found:
        try:
            with translated(what):
                found = obstore.head(self.store, key)
        except BackendError as error:
            if not is_worth_a_get(error):
                raise
            with translated(what):
                obstore.get(self.store, key)
                found = obstore.head(self.store, key)
        return Found(bytes=found["size"], etag=(found["e_tag"] or "").strip('"'))

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        filled = 0
        with translated(what):
            end = offset + view.nbytes
            answer = obstore.get(self.store, key, options={"range": (offset, end)})
            # One copy for each piece as it comes; as one buffer, obstore would join them first.
            for piece in answer.stream(min_chunk_size=_STREAM_BYTES):
                source = flat(memoryview(piece))
                if filled + source.nbytes > view.nbytes:
                    raise BackendError(f"{what}: the store sent more than the range asked for")
                copy_bytes(view[filled : filled + source.nbytes], source)
                filled += source.nbytes
        return filled

    def rows(self, prefix: str, what: str) -> Iterator[Row]:
        folder, _, start = prefix.rpartition("/")
        with translated(what):
            if start:
                # obstore lists by whole parts of a name.
                for row in obstore.list_with_delimiter(self.store, folder or None)["objects"]:
                    if row["path"].startswith(prefix):
                        yield _row(row)
                return
            for rows in obstore.list(self.store, prefix or None, chunk_size=_LIST_ROWS):
                for row in rows:
                    yield _row(row)

    def delete(self, key: str, what: str) -> None:
        with translated(what):
            obstore.delete(self.store, key)

    def pending(self, prefix: str, what: str) -> Iterable[tuple[str, str]]:
        return ()

    def abort(self, key: str, unfinished: str, what: str) -> None:
        """Do nothing: none is listed."""

    def check_open(self) -> None:
        with translated(f"open {self.place}"):
            next(iter(obstore.list(self.store, self.prefix or None, chunk_size=1)), None)

    def close(self) -> None:
        """Do nothing: obstore has no call for it; connections are closed with this object."""


class _ObstoreStream:
    """An upload by obstore's writer."""

    unfinished = ""

    def __init__(self, store: ObjectStore, key: str, part_bytes: int, what: str) -> None:
        self._store = store
        self._key = key
        self._part_bytes = part_bytes
        self._what = what
        self._writer: Any = None

    def write(self, view: memoryview) -> None:
        with translated(self._what):
            if self._writer is None:
                self._writer = obstore.open_writer(
                    self._store, self._key, buffer_size=self._part_bytes, max_concurrency=_AT_ONCE
                )
            self._writer.write(view)

    def finish(self) -> None:
        with translated(self._what):
            self._writer.close()

    def drop(self) -> None:
        """Leave obstore's ``with`` by an error, which aborts the upload; dropping its writer would not."""
        writer, self._writer = self._writer, None
        if writer is None or writer.closed():
            return
        with translated(self._what):
            writer.__exit__(BackendError, BackendError("dropped"), None)


def _row(found: Any) -> Row:
    return Row(found["path"], found["size"], found.get("e_tag") or "")
