"""Multipart uploads over S3's own requests, because obstore has none with parts in any order.

Bytes go from the caller's memory to the socket without a copy. One request is one call here: nothing is retried, and
an error says whether it may be. Nothing here knows what an object is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from tierfall.backends.object.responses import answer_error, code_in, unsaid_error
from tierfall.backends.s3.connections import checked
from tierfall.backends.s3.requests import Page, Requests, root_name
from tierfall.core.types.errors import BackendError


class Multipart(Requests):
    """The five requests of multipart uploads to one bucket."""

    def begin(self, key: str, what: str) -> str:
        """Begin an upload; return its id."""
        text = self.ask("POST", key, {"uploads": ""}, what).text
        found = Page(text, what).text("UploadId")
        if not found:
            raise BackendError(f"{what}: the store answered without an upload id")
        return found

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        """Send one part; return its etag. The same number may be sent again."""
        query = {"partNumber": str(number), "uploadId": upload}
        return self.ask("PUT", key, query, what, view).etag

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        """Make the object visible, whole."""
        rows = [
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in parts
        ]
        body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
        text = self.ask("POST", key, {"uploadId": upload}, what, memoryview(body)).text
        # The status is sent before the store knows how it ends; the body tells.
        code = code_in(text)
        if code:
            raise answer_error(500, code, what)
        if root_name(text) != "CompleteMultipartUploadResult":
            raise unsaid_error(what)

    def abort(self, key: str, upload: str, what: str) -> None:
        """Remove an upload with its parts; one that is gone is no error."""
        answer = self.answer("DELETE", key, {"uploadId": upload}, what)
        if answer.status != 404 or code_in(answer.text) != "NoSuchUpload":
            checked(answer, what)

    def pending(self, prefix: str, what: str) -> Iterator[tuple[str, str]]:
        """Every unfinished upload whose key starts with ``prefix``, as key and id."""
        query = {"uploads": "", "prefix": prefix}
        marks: dict[str, str] = {}
        while True:
            text = self.ask("GET", "", {**query, **marks}, what).text
            page = Page(text, what, root="ListMultipartUploadsResult")
            for row in page.rows("Upload"):
                yield row["Key"], row.get("UploadId", "")
            if page.text("IsTruncated") != "true":
                return
            following = {
                "key-marker": page.text("NextKeyMarker"),
                "upload-id-marker": page.text("NextUploadIdMarker"),
            }
            if following == marks or not following["key-marker"]:
                raise BackendError(f"{what}: the store's listing of uploads does not go on")
            marks = following

    def close(self) -> None:
        self.lines.close()
