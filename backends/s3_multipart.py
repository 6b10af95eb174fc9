"""Multipart uploads over S3's own requests, because obstore has none with parts in any order.

Bytes go from the caller's memory to the socket without a copy. One request is one call here: nothing is retried, and
an error says whether it may be. Nothing here knows what an object is for.
"""

from __future__ import annotations

import http.client
import select
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tierfall.backends.s3_signature import Sign
from tierfall.backends.store_answers import answer_error, code_in, silence_error
from tierfall.core.errors import BackendError

_ANSWER_BYTES_MAX = 16 * 1024 * 1024
_KEEP_IDLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    connect_s: float = 5.0
    request_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    etag: str
    text: str


class Multipart:
    """The five requests of multipart uploads to one bucket, whose address is ``address``."""

    def __init__(
        self, address: str, sign: Sign, *, timeouts: Timeouts, verify: bool = True
    ) -> None:
        self.address = address
        self.sign = sign
        self._lines = _Lines(address, timeouts=timeouts, verify=verify)

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
            _check(answer, what)

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
        self._lines.close()

    def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        what: str,
        body: memoryview | None = None,
    ) -> Answer:
        return _check(self._answer(method, key, query, what, body), what)

    def _answer(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        what: str,
        body: memoryview | None = None,
    ) -> Answer:
        path = f"/{quote(key, safe='/-_.~')}" if key else ""
        url = f"{self.address}{path}?{urlencode(query, quote_via=quote, safe='')}"
        return self._lines.send(method, self.sign(method, url), body, what)


class _Lines:
    """Connections to one host, kept between requests."""

    def __init__(self, url: str, *, timeouts: Timeouts, verify: bool) -> None:
        parts = urlsplit(url)
        self._host = parts.netloc
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._keep_idle = _KEEP_IDLE
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._context = ssl.create_default_context()
            if not verify:
                self._context.check_hostname = False
                self._context.verify_mode = ssl.CERT_NONE

    def send(self, method: str, url: str, body: memoryview | None, what: str) -> Answer:
        parts = urlsplit(url)
        line: http.client.HTTPConnection | None = None
        try:
            line = self._take()
            return self._exchange(line, method, f"{parts.path}?{parts.query}", body)
        except (OSError, http.client.HTTPException) as error:
            if line is not None:
                line.close()
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise silence_error(f"{reason} at {self._host}", what) from None

    def close(self) -> None:
        """Close what is idle, and from now on every connection after its use."""
        with self._lock:
            idle, self._idle, self._keep_idle = self._idle, [], 0
        for line in idle:
            line.close()

    def _exchange(
        self, line: http.client.HTTPConnection, method: str, target: str, body: memoryview | None
    ) -> Answer:
        try:
            line.request(method, target, body=body)
        except BrokenPipeError:
            # A store that refuses says so before it has read the body; then the answer is there already.
            if line.sock is None:
                raise
        response = line.getresponse()
        text = response.read(_ANSWER_BYTES_MAX).decode("utf-8", "replace")
        answer = Answer(status=response.status, etag=response.getheader("ETag") or "", text=text)
        if response.isclosed() and line.sock is not None:
            self._give(line)
        else:
            response.close()
            line.close()
        return answer

    def _take(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                line = self._idle.pop() if self._idle else None
            if line is None:
                return self._open()
            if not _is_readable(line):
                return line
            line.close()

    def _open(self) -> http.client.HTTPConnection:
        line = (
            http.client.HTTPConnection(self._host, timeout=self._timeouts.connect_s)
            if self._context is None
            else http.client.HTTPSConnection(
                self._host, timeout=self._timeouts.connect_s, context=self._context
            )
        )
        try:
            line.connect()
            line.sock.settimeout(self._timeouts.request_s)
        except BaseException:
            line.close()
            raise
        return line

    def _give(self, line: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < self._keep_idle:
                self._idle.append(line)
                return
        line.close()


def _is_readable(line: http.client.HTTPConnection) -> bool:
    """Say whether something came without a request: the other side has closed it."""
    poll = select.poll()
    poll.register(line.sock, select.POLLIN)
    return bool(poll.poll(0))


def _check(answer: Answer, what: str) -> Answer:
    if 200 <= answer.status < 300:
        return answer
    raise answer_error(answer.status, code_in(answer.text), what)


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
