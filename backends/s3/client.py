"""Objects in S3 stores: botocore makes, signs and reads each request, ``Connections`` sends it.

Each method is one request, or one for each page of a listing, and repeats nothing: wrappers do. botocore asks a second
time only where a bucket's region is another.
"""

from __future__ import annotations

import base64
import hashlib
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from tierfall.backends.object.client import Found, Row, Stream, UploadGoneError
from tierfall.backends.object.responses import creating, is_worth_a_get, left_of, unsaid_error
from tierfall.backends.s3.connections import Connections, ViewReader
from tierfall.backends.s3.errors import translated
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError

# The outermost element of each answer from whose silence something would be concluded.
_ROOTS = {
    "ListObjectsV2": "ListBucketResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "DeleteObjects": "DeleteResult",
}

# What may stand before the outermost element's name.
_START = rb"\s*(<\?.*?\?>\s*)?<([\w.-]+:)?"
_AFTER_OBJECTS = {"ContinuationToken": "NextContinuationToken"}
_AFTER_UPLOADS = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}


class S3Client:
    """See ``ObjectClient``, ``Uploads`` and ``Deletions``.

    ``service`` is a client of botocore's, ``parts`` one that leaves bodies unsigned. ``connections`` is None where
    botocore's own are used. ``extra``: further parameters of every request that knows them.
    """

    durable = True
    atomic_replace = True
    knows_condition = True
    keys_max = 1000

    def __init__(
        self,
        service: Any,
        parts: Any,
        connections: Connections | None,
        *,
        place: str,
        prefix: str,
        bucket: str,
        extra: Mapping[str, Any],
    ) -> None:
        self.place = place
        self.prefix = prefix
        self._service = service
        self._parts = parts
        self._connections = connections
        self._bucket = bucket
        self._extra = dict(extra)
        for each in (service, parts):
            each.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
            each.meta.events.register("before-parse.s3", _check_answer)
            if connections is not None:
                each.meta.events.register("before-send.s3", connections.send)
        if connections is not None:
            # For whoever forgets this object without closing it.
            weakref.finalize(self, connections.close)

    @property
    def uploads(self) -> S3Client:
        return self

    @property
    def deletions(self) -> S3Client:
        return self

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        raise AssertionError(f"{what}: this client has uploads, and no streams")

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        condition = {"IfNoneMatch": "*"} if publish is Publish.IF_ABSENT else {}
        with creating(publish):
            self._ask("put_object", what, Key=key, Body=ViewReader(data), **condition)

    def look(self, key: str, what: str) -> Found:
        try:
            found = self._ask("head_object", what, Key=key)
        except BackendError as error:
            if not is_worth_a_get(error):
                raise
            self._ask("get_object", what, Key=key)["Body"].close()
            found = self._ask("head_object", what, Key=key)
        return Found(bytes=int(found["ContentLength"]), etag=found.get("ETag", "").strip('"'))

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        span = f"bytes={offset}-{offset + view.nbytes - 1}"
        answer = self._ask("get_object", what, Key=key, Range=span)
        body, filled = answer["Body"], 0
        try:
            with translated(what):
                while filled < view.nbytes and (count := body.readinto(view[filled:])):
                    filled += count
                is_more = bool(body.read(1))
        finally:
            body.close()
        if is_more or (offset and answer["ResponseMetadata"]["HTTPStatusCode"] == 200):
            raise BackendError(f"{what}: the store sent more than the range asked for")
        return filled

    def rows(self, prefix: str, what: str) -> Iterator[Row]:
        for page in self._pages("list_objects_v2", what, _AFTER_OBJECTS, Prefix=prefix):
            for row in page.get("Contents", ()):
                if "Size" not in row:
                    raise BackendError(f"{what}: the store lists an object without its size")
                yield Row(row["Key"], row["Size"], row.get("ETag", ""))

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
            service=self._parts,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            Body=ViewReader(view),
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
        for page in self._pages("list_multipart_uploads", what, _AFTER_UPLOADS, Prefix=prefix):
            for row in page.get("Uploads", ()):
                yield row["Key"], row["UploadId"]

    def abort(self, key: str, unfinished: str, what: str) -> None:
        with suppress(UploadGoneError):
            self._ask("abort_multipart_upload", what, Key=key, UploadId=unfinished)

    def check_open(self) -> None:
        self._ask("list_objects_v2", f"open {self.place}", Prefix=self.prefix, MaxKeys=1)

    def close(self) -> None:
        """Close the connections. Writers that are still open may go on to their abort, which opens others."""
        if self._connections is not None:
            self._connections.close()
        for each in (self._service, self._parts):
            each.close()

    def _pages(
        self, method: str, what: str, following: Mapping[str, str], **words: Any
    ) -> Iterator[dict[str, Any]]:
        """Every page of a listing; ``following`` names what a page hands to the request for the next one."""
        marks: dict[str, str] = {}
        while True:
            page = self._ask(method, what, **words, **marks)
            yield page
            if not page.get("IsTruncated"):
                return
            before, marks = marks, {name: page.get(told, "") for name, told in following.items()}
            if marks == before or not next(iter(marks.values())):
                raise BackendError(f"{what}: the store's listing does not go on")

    def _ask(self, method: str, what: str, *, service: Any = None, **words: Any) -> dict[str, Any]:
        service = service or self._service
        if self._extra:
            operation = service.meta.method_to_api_mapping[method]
            known = service.meta.service_model.operation_model(operation).input_shape.members
            words = {
                **{name: value for name, value in self._extra.items() if name in known},
                **words,
            }
        with translated(what):
            answer: dict[str, Any] = getattr(service, method)(Bucket=self._bucket, **words)
        return answer


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """S3 requires a digest of a deletion of several. Older stores do not know the one that botocore adds."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _check_answer(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Refuse two answers before botocore reads them."""
    status, headers = response_dict["status_code"], response_dict["headers"]
    if status in (301, 302, 307) and "x-amz-bucket-region" not in headers:
        # botocore would ask for the bucket's region, be answered the same, and ask for it again, without end.
        answer = {"ResponseMetadata": {"HTTPStatusCode": 301, "HTTPHeaders": {}}}
        raise ClientError(answer, operation_model.name)
    root = _ROOTS.get(operation_model.name)
    if root is None or status >= 300:
        return
    if not re.match(_START + root.encode() + rb"[\s/>]", response_dict["body"], re.DOTALL):
        # Such as a page to sign in at, which botocore would read as an answer with nothing in it.
        raise ValueError(f"the answer is no {root}")
