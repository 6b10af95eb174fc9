"""Objects in S3 through s3fs, for whoever needs an option or a way to credentials that obstore has not.

Every request is one call to ``call_s3``, so that parts go in any order, a failed one is sent again alone, and
unfinished uploads can be listed. s3fs and botocore would repeat requests by themselves; that is switched off here,
because wrappers do it. ``config_kwargs`` may switch it on again for botocore.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fsspec.asyn import sync  # type: ignore[import-untyped]

from tierfall.backends.fsspec.errors import translated
from tierfall.backends.object.client import Found, Row, Stream, UploadGoneError
from tierfall.backends.object.responses import creating, is_worth_a_get, left_of, unsaid_error
from tierfall.backends.toolkit.keys import place_below
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError

# One try, and no checksums that stores other than Amazon's may not know.
_DEFAULTS = {
    "retries": {"total_max_attempts": 1},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return s3fs's options with this module's defaults for botocore below them."""
    return {**options, "config_kwargs": {**_DEFAULTS, **(options.get("config_kwargs") or {})}}


# How much of an answer is asked for at a time; what has come is handed over, mostly less.
_READ_BYTES = 1024 * 1024


class S3fsClient:
    """See ``ObjectClient``, ``Uploads`` and ``Deletions``."""

    durable = True
    atomic_replace = True
    knows_condition = True
    keys_max = 1000

    def __init__(self, system: Any, url: str) -> None:
        self._system = system
        system.retries = 1
        # Taken literally, past s3fs's own reading of paths.
        self._bucket, _, path = url.partition("://")[2].partition("/")
        self.place, self.prefix = place_below(f"s3://{self._bucket}", path)

    @property
    def uploads(self) -> S3fsClient:
        return self

    @property
    def deletions(self) -> S3fsClient:
        return self

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        raise AssertionError(f"{what}: this client has uploads, and no streams")

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        condition = {"IfNoneMatch": "*"} if publish is Publish.IF_ABSENT else {}
        with creating(publish):
            self._ask("put_object", what, Key=key, Body=_Reader(data), **condition)

    def look(self, key: str, what: str) -> Found:
        try:
            found = self._ask("head_object", what, Key=key)
        except BackendError as error:
            if not is_worth_a_get(error):
                raise
            self._close(self._ask("get_object", what, Key=key)["Body"])
            found = self._ask("head_object", what, Key=key)
        return Found(bytes=int(found["ContentLength"]), etag=found.get("ETag", "").strip('"'))

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        span = f"bytes={offset}-{offset + view.nbytes - 1}"
        body = self._ask("get_object", what, Key=key, Range=span)["Body"]
        filled = 0
        try:
            while True:
                with translated(what):
                    piece = flat(memoryview(sync(self._system.loop, body.read, _READ_BYTES)))
                if not piece.nbytes:
                    return filled
                if filled + piece.nbytes > view.nbytes:
                    raise BackendError(f"{what}: the store sent more than the range asked for")
                copy_bytes(view[filled : filled + piece.nbytes], piece)
                filled += piece.nbytes
        finally:
            self._close(body)

    def rows(self, prefix: str, what: str) -> Iterator[Row]:
        more: dict[str, str] = {}
        while True:
            page = self._ask("list_objects_v2", what, Prefix=prefix, **more)
            for row in page.get("Contents", ()):
                yield Row(row["Key"], int(row["Size"]), row.get("ETag", ""))
            if not page.get("IsTruncated"):
                return
            following = {"ContinuationToken": page.get("NextContinuationToken", "")}
            more = _going_on(more, following, what)

    def delete(self, key: str, what: str) -> None:
        self._ask("delete_object", what, Key=key)

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        rows = [{"Key": key} for key in keys]
        answer = self._ask("delete_objects", what, Delete={"Objects": rows})
        return left_of(keys, answer.get("Deleted", ()), answer.get("Errors", ()), what)

    def begin(self, key: str, what: str) -> str:
        upload = self._ask("create_multipart_upload", what, Key=key).get("UploadId")
        if not upload:
            raise BackendError(f"{what}: the store answered without an upload id")
        return str(upload)

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        answer = self._ask(
            "upload_part",
            what,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            Body=_Reader(view),
        )
        return str(answer.get("ETag", ""))

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        rows = [{"PartNumber": number, "ETag": etag} for number, etag in parts]
        answer = self._ask(
            "complete_multipart_upload",
            what,
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": rows},
        )
        if not answer.get("ETag"):
            # botocore reads a body that says nothing as an answer with nothing in it.
            raise unsaid_error(what)

    def pending(self, prefix: str, what: str) -> Iterator[tuple[str, str]]:
        more: dict[str, str] = {}
        while True:
            page = self._ask("list_multipart_uploads", what, Prefix=prefix, **more)
            for row in page.get("Uploads", ()):
                yield row["Key"], row["UploadId"]
            if not page.get("IsTruncated"):
                return
            following = {
                "KeyMarker": page.get("NextKeyMarker", ""),
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }
            more = _going_on(more, following, what)

    def abort(self, key: str, unfinished: str, what: str) -> None:
        with suppress(UploadGoneError):
            self._ask("abort_multipart_upload", what, Key=key, UploadId=unfinished)

    def check_open(self) -> None:
        self._ask("list_objects_v2", f"open {self.place}", Prefix=self.prefix, MaxKeys=1)

    def close(self) -> None:
        """Close the connections. Writers that are still open may go on to their abort, which opens others."""
        with translated(f"close {self.place}"):
            self._system.close_session(self._system.loop, self._system._s3creator)

    def _ask(self, method: str, what: str, **words: Any) -> Any:
        with translated(what):
            return self._system.call_s3(method, Bucket=self._bucket, **words)

    def _close(self, body: Any) -> None:
        """Close an answer that may not have been read to its end, on the thread that reads it."""
        self._system.loop.call_soon_threadsafe(body.close)


class _Reader(io.RawIOBase):
    """A caller's memory as a file, so that what sends it takes it piece by piece, and may begin again."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._view.nbytes}
        self._at = starts[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        with memoryview(target).cast("B") as room:
            piece = self._view[self._at : self._at + room.nbytes]
            copy_bytes(room[: piece.nbytes], piece)
        self._at += piece.nbytes
        return piece.nbytes


def _going_on(more: dict[str, str], following: dict[str, str], what: str) -> dict[str, str]:
    """Return where the next page of a listing begins; a listing that stands still is an error, not an end."""
    if following == more or not next(iter(following.values())):
        raise BackendError(f"{what}: the store's listing does not go on")
    return following
