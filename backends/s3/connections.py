"""Connections to S3 servers that send from and receive into the caller's memory without a copy.

botocore builds and signs a request and parses its answer; in between, ``Connections.send`` sends it, once.
"""

from __future__ import annotations

import http.client
import io
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

from botocore.awsrequest import AWSResponse  # type: ignore[import-untyped]

from tierfall.backends.object.client import describe_silence
from tierfall.backends.toolkit.views import copy_bytes

_ANSWER_BYTES_MAX = 16 * 1024 * 1024
_IDLE_MAX = 16
_SEND_BYTES = 256 * 1024

Connection = http.client.HTTPConnection


class NoAnswerError(Exception):
    """A request got no answer, or an incomplete one; the text has the reason and the server."""


class ViewReader(io.RawIOBase):
    """A caller's memory as a file for botocore; ``Connections`` sends ``view`` without reading the file."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self.view = view
        self._offset = 0

    def __len__(self) -> int:
        return self.view.nbytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self.view.nbytes}
        self._offset = starts[whence] + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, target: Any) -> int:
        with memoryview(target).cast("B") as room:
            source = self.view[self._offset : self._offset + room.nbytes]
            copy_bytes(room[: source.nbytes], source)
        self._offset += source.nbytes
        return source.nbytes


class Connections:
    """A pool of connections; ``tls`` is for https. Thread-safe."""

    def __init__(self, *, connect_s: float, read_s: float, tls: ssl.SSLContext | None) -> None:
        self._connect_s = connect_s
        self._read_s = read_s
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[Connection]] = {}
        self._idle_max = _IDLE_MAX

    def send(self, request: Any, **_: Any) -> AWSResponse:
        """Send a prepared request of botocore, once; a handler of its event ``before-send``. Raises NoAnswerError."""
        url = urlsplit(request.url)
        with _answering(url):
            connection = self._take(url)
        try:
            with _answering(url):
                _send_request(
                    connection, request, f"{url.path}?{url.query}" if url.query else url.path
                )
                response = connection.getresponse()
            body = _Body(self, url, connection, response)
            answer = AWSResponse(request.url, response.status, dict(response.getheaders()), body)
            if not request.stream_output:
                answer.content  # noqa: B018 - read now, so that a truncated answer is an error of the request
        except BaseException:
            connection.close()
            raise
        return answer

    def put_back(self, url: SplitResult, connection: Connection) -> None:
        """Keep a connection for the next request to the same server."""
        with self._lock:
            idle = self._idle.setdefault((url.scheme, url.netloc), [])
            if len(idle) < self._idle_max:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close idle connections, and from now on every connection after its use."""
        with self._lock:
            idle, self._idle, self._idle_max = self._idle, {}, 0
        for connection in [each for some in idle.values() for each in some]:
            connection.close()

    def _take(self, url: SplitResult) -> Connection:
        while True:
            with self._lock:
                idle = self._idle.get((url.scheme, url.netloc))
                connection = idle.pop() if idle else None
            if connection is None:
                return self._open(url)
            if not _is_readable(connection):
                return connection
            connection.close()

    def _open(self, url: SplitResult) -> Connection:
        connection = (
            http.client.HTTPSConnection(url.netloc, timeout=self._connect_s, context=self._tls)
            if url.scheme == "https"
            else http.client.HTTPConnection(url.netloc, timeout=self._connect_s)
        )
        try:
            connection.connect()
            connection.sock.settimeout(self._read_s)
            # Without this limit the kernel buffers megabytes, and a slow store seems silent while they drain.
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _SEND_BYTES)
        except BaseException:
            connection.close()
            raise
        return connection


class _Body:
    """The body of an answer, in the form that botocore reads. Once read to its end, its connection is reused."""

    def __init__(
        self,
        connections: Connections,
        url: SplitResult,
        connection: Connection,
        response: http.client.HTTPResponse,
    ) -> None:
        self._connections = connections
        self._url = url
        self._connection: Connection | None = connection
        self._response = response
        self._on_read(is_end=False)

    def read(self, size: int | None = None) -> bytes:
        size = _ANSWER_BYTES_MAX if size is None else size
        with _answering(self._url):
            data = self._response.read(size)
            self._on_read(is_end=len(data) < size)
        return data

    def readinto(self, view: memoryview) -> int:
        with _answering(self._url):
            count = self._response.readinto(view)
            self._on_read(is_end=not count and view.nbytes > 0)
        return count

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()
        if self._connection is not None:
            self.close()
            raise NoAnswerError(f"the answer is too long at {_server(self._url)}")

    def close(self) -> None:
        self._response.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _on_read(self, *, is_end: bool) -> None:
        left = self._response.length
        if is_end and left:
            # http.client does not report a truncated body.
            self.close()
            raise http.client.IncompleteRead(b"", left)
        if not (is_end or left == 0 or self._response.isclosed()):
            return
        self._response.close()
        connection, self._connection = self._connection, None
        if connection is not None and connection.sock is not None:
            self._connections.put_back(self._url, connection)


@contextmanager
def _answering(url: SplitResult) -> Iterator[None]:
    """Raise exceptions of a connection as NoAnswerError."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(describe_silence(error, _server(url))) from None


def _send_request(connection: Connection, request: Any, target: str) -> None:
    body = request.body
    view = body.view if isinstance(body, ViewReader) else memoryview(body) if body else None
    # The body is sent without waiting for "100 Continue": the answer of a store that refuses it is read all the same.
    headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
    try:
        connection.request(
            request.method,
            target,
            body=None if view is None else _slices(view),
            headers=headers,
        )
    except (BrokenPipeError, ConnectionResetError):
        # A store that refuses a request may answer before it has read the body: the answer is read next.
        if connection.sock is None:
            raise


def _slices(body: memoryview) -> Iterator[memoryview]:
    """Yield slices of a body. A socket's timeout applies to a whole send call; by slices it bounds a silence."""
    for start in range(0, body.nbytes, _SEND_BYTES):
        yield body[start : start + _SEND_BYTES]


def _is_readable(connection: Connection) -> bool:
    """Whether an idle connection has data: the server has closed it."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _server(url: SplitResult) -> str:
    """Return host and port for messages, without user and password."""
    return f"{url.hostname}:{url.port}" if url.port else str(url.hostname)


def tls_context(verify: bool | str) -> ssl.SSLContext:
    """Make the context for https. ``verify``: whether to verify certificates, or a file or folder of trusted ones."""
    context = ssl.create_default_context()
    if isinstance(verify, str):
        context.load_verify_locations(**{"capath" if os.path.isdir(verify) else "cafile": verify})
    elif not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
