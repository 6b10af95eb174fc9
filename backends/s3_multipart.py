"""Multipart uploads over S3's own requests, because obstore has none with parts in any order.

Bytes go from the caller's memory to the socket without a copy. One request is one call here: nothing is retried, and
an error says whether it may be. Nothing here knows what an object is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tierfall.backends.s3_lines import Answer, Lines, checked
from tierfall.backends.s3_signature import Sign
from tierfall.backends.store_answers import answer_error, code_in
from tierfall.core.errors import BackendError


class Multipart:
    """The five requests of multipart uploads to one bucket, over ``lines`` to its address."""

    def __init__(self, lines: Lines, sign: Sign) -> None:
        self.lines = lines
        self.sign = sign

    def begin(self, key: str, what: str) -> str:
        """Begin an upload; return its id."""
        answer = self._ask("POST", key, {"uploads": ""}, what)
        found = _texts(answer.text, "UploadId", what)
        if not found:
            raise BackendError(f"{what}: the store answered without an upload id")
        return found[0]

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        """Send one part; return its etag. The same number may be sent again."""
        query = {"partNumber": str(number), "uploadId": upload}
        return self._ask("PUT", key, query, what, view).etag

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        """Make the object visible, whole."""
        rows = [
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in parts
        ]
        body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
        answer = self._ask("POST", key, {"uploadId": upload}, what, memoryview(body))
        # The status is sent before the store knows how it ends; the body tells.
        code = code_in(answer.text)
        if code:
            raise answer_error(500, code, what)

    def abort(self, key: str, upload: str, what: str) -> None:
        """Remove an upload with its parts; one that is gone is no error."""
        answer = self._answer("DELETE", key, {"uploadId": upload}, what)
        if answer.status != 404 or code_in(answer.text) == "NoSuchBucket":
            checked(answer, what)

    def pending(self, prefix: str, what: str) -> Iterator[tuple[str, str]]:
        """Every unfinished upload whose key starts with ``prefix``, as key and id."""
        marks: dict[str, str] = {}
        while True:
            text = self._ask("GET", "", {"uploads": "", "prefix": prefix, **marks}, what).text
            for element in _elements(text, "Upload", what):
                row = {_name(child): child.text or "" for child in element}
                yield row.get("Key", ""), row.get("UploadId", "")
            if _texts(text, "IsTruncated", what) != ["true"]:
                return
            following = {
                "key-marker": "".join(_texts(text, "NextKeyMarker", what)),
                "upload-id-marker": "".join(_texts(text, "NextUploadIdMarker", what)),
            }
            if following == marks or not following["key-marker"]:
                raise BackendError(f"{what}: the store's listing of uploads does not go on")
            marks = following

    def close(self) -> None:
        self.lines.close()

    def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        what: str,
        body: memoryview | None = None,
    ) -> Answer:
        return checked(self._answer(method, key, query, what, body), what)

    def _answer(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        what: str,
        body: memoryview | None = None,
    ) -> Answer:
        url = f"{self.lines.at(key)}?{urlencode(query, quote_via=quote, safe='')}"
        return self.lines.send(method, self.sign(method, url), what, body=body)


def _elements(text: str, name: str, what: str) -> list[ElementTree.Element]:
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        raise BackendError(f"{what}: the store's answer is no XML; is this an S3 server?") from None
    return [element for element in root.iter() if _name(element) == name]


def _texts(text: str, name: str, what: str) -> list[str]:
    return [element.text for element in _elements(text, name, what) if element.text]


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
