"""A client of obstore: ``gs://``, ``az://``, and for tests its own memory. obstore's exceptions are classified here.

obstore's writer accepts bytes in order, keeps up to ``_AT_ONCE`` parts in memory and in flight, and retries a failed
part itself, because no caller can. Its unfinished uploads cannot be listed after a kill: Azure deletes them after a
week, Google Cloud Storage by a bucket's lifecycle rule AbortIncompleteMultipartUpload."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import obstore
from obstore import exceptions
from obstore.store import ObjectStore

from tierfall.backends.object.client import Deletions, ObjectInfo, Row, Stream
from tierfall.backends.object.responses import (
    KEYS_HINT,
    answer_error,
    code_in,
    creating,
    head_or_get,
    silence_error,
    translating,
)
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish, part_bytes
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
)

_STREAM_BYTES = 1024 * 1024
_LIST_ROWS = 1000
# Of obstore's writer: the least length of a part, and the parts in flight at once.
_PART_BYTES = 16 * 1024 * 1024
_AT_ONCE = 4

_STATUS = re.compile(r"status code: ([0-9]{3})\b")
_SHORT = re.compile(
    r"object was only [0-9]+ bytes long"
)  # of stores that obstore reads without HTTP
_SILENCE = re.compile(r"Generic (S3|GCS|MicrosoftAzure) error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObstoreClient:
    """See ``ObjectClient``. ``streams`` is the same place as ``store``, with obstore's own retries."""

    place: str
    prefix: str
    durable: bool
    store: ObjectStore = field(repr=False)
    streams: ObjectStore = field(repr=False)
    deletions: Deletions | None = field(repr=False, default=None)
    atomic_replace: bool = True
    supports_if_absent: bool = True

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

    def head(self, key: str, what: str) -> ObjectInfo:
        with translated(what):
            found = head_or_get(lambda: self._head(key, what), lambda: obstore.get(self.store, key))
        return ObjectInfo(bytes=found["size"], etag=(found["e_tag"] or "").strip('"'))

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        filled = 0
        with translated(what):
            end = offset + view.nbytes
            answer = obstore.get(self.store, key, options={"range": (offset, end)})
            # A stream costs one copy of each chunk; for one buffer, obstore would join them before that copy.
            for piece in answer.stream(min_chunk_size=_STREAM_BYTES):
                source = flat(memoryview(piece))
                if filled + source.nbytes > view.nbytes:
                    raise BackendError(f"{what}: the store sent more than the range asked for")
                copy_bytes(view[filled : filled + source.nbytes], source)
                filled += source.nbytes
        return filled

    def _head(self, key: str, what: str) -> Any:
        with translated(what):
            return obstore.head(self.store, key)

    def list(self, prefix: str, what: str) -> Iterator[Row]:
        folder, _, start = prefix.rpartition("/")
        with translated(what):
            if start:
                # obstore lists by whole components of a key.
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
        """Do nothing: ``pending`` lists none."""

    def check_open(self) -> None:
        with translated(f"open {self.place}"):
            next(iter(obstore.list(self.store, self.prefix or None, chunk_size=1)), None)

    def close(self) -> None:
        """Do nothing: obstore closes connections with this object."""


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

    def abort(self) -> None:
        """Leave obstore's context manager by an error, which aborts the upload; deleting its writer would not."""
        writer, self._writer = self._writer, None
        if writer is None or writer.closed():
            return
        with translated(self._what):
            writer.__exit__(BackendError, BackendError("dropped"), None)


def _row(found: Any) -> Row:
    return Row(found["path"], found["size"], found.get("e_tag") or "")


def translated(what: str) -> AbstractContextManager[None]:
    """Raise obstore's exceptions as BackendErrors."""
    return translating(what, (exceptions.BaseError, OSError), store_error)


@contextmanager
def building(what: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Raise obstore's exceptions about options as BackendErrors that contain no option's value."""
    try:
        yield
    except (exceptions.BaseError, OSError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].rpartition("error: ")[2]
        if any(
            isinstance(each, str) and len(each) > 3 and each in reason for each in config.values()
        ):
            reason = type(error).__name__
        raise BackendError(f"{what}: obstore does not accept these options: {reason}") from None


def store_error(error: Exception, what: str) -> BackendError:
    """Classify an exception of obstore."""
    text = str(error).split("\n\nDebug source:")[0]
    status = _STATUS.search(text)
    if status:
        return answer_error(int(status.group(1)), code_in(text), what)
    if isinstance(error, FileNotFoundError):
        return KeyNotFoundError(f"{what}: there is no such object")
    if isinstance(error, exceptions.AlreadyExistsError):
        return KeyExistsError(f"{what}: the key is taken")
    if isinstance(
        error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError | PermissionError
    ):
        return AccessDeniedError(f"{what}: not allowed; {KEYS_HINT}")
    reason = text.splitlines()[0].rpartition(" - ")[2]
    if "redirect without LOCATION" in reason:
        return answer_error(301, "", what)
    if _SHORT.search(text):
        return answer_error(416, "", what)
    if isinstance(error, exceptions.GenericError) and _SILENCE.match(text):
        return silence_error(reason, what)
    return BackendError(f"{what}: {reason}")
