"""Connections to S3 servers, over which bytes go to and from the caller's memory without a copy.

botocore makes and signs a request and reads its answer; in between, ``Connections.send`` sends it. Nothing is retried.
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

from tierfall.backends.toolkit.views import copy_bytes

_ANSWER_BYTES_MAX = 16 * 1024 * 1024
_IDLE_MAX = 16
_SEND_BYTES = 256 * 1024

Connection = http.client.HTTPConnection


class NoAnswerError(Exception):
    """A request got no answer, or not all of it; the text names the reason and the server."""


class ViewReader(io.RawIOBase):
    """A caller's memory as the file that botocore takes; ``view`` is sent as it is."""

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
    """Connections that are kept between requests; ``tls`` is for https. May be used by several threads at once."""

    def __init__(self, *, connect_s: float, read_s: float, tls: ssl.SSLContext | None) -> None:
        self._connect_s = connect_s
        self._read_s = read_s
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[Connection]] = {}
        self._idle_max = _IDLE_MAX

    def send(self, request: Any, **_: Any) -> AWSResponse:
        """Send a prepared request of botocore's once (a handler of its event ``before-send``); NoAnswerError."""
        url = urlsplit(request.url)
        with answering(url):
            connection = self._take(url)
        try:
            with answering(url):
                _ask(connection, request, f"{url.path}?{url.query}" if url.query else url.path)
                response = connection.getresponse()
            body = _Body(self, url, connection, response)
            answer = AWSResponse(request.url, response.status, dict(response.getheaders()), body)
            if not request.stream_output:
                answer.content  # noqa: B018 - read now, so that an answer that breaks off is an error of the request
        except BaseException:
            connection.close()
            raise
        return answer

    def give(self, url: SplitResult, connection: Connection) -> None:
        """Keep a connection for the next request to the same server."""
        with self._lock:
            idle = self._idle.setdefault((url.scheme, url.netloc), [])
            if len(idle) < self._idle_max:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle, and from now on every connection after its use."""
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
            # Else megabytes may wait in the kernel, and a slow store look silent while they drain.
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _SEND_BYTES)
        except BaseException:
            connection.close()
            raise
        return connection


class _Body:
    """The body of an answer, as botocore reads one. Once it is read to its end, its connection is used again."""

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
        with answering(self._url):
            data = self._response.read(size)
            self._on_read(is_end=len(data) < size)
        return data

    def readinto(self, view: memoryview) -> int:
        with answering(self._url):
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
            # http.client reports nothing of a body that breaks off.
            self.close()
            raise http.client.IncompleteRead(b"", left)
        if not (is_end or left == 0 or self._response.isclosed()):
            return
        self._response.close()
        connection, self._connection = self._connection, None
        if connection is not None and connection.sock is not None:
            self._connections.give(self._url, connection)


@contextmanager
def answering(url: SplitResult) -> Iterator[None]:
    """Raise what a connection raises as a NoAnswerError."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise NoAnswerError(f"{reason} at {_server(url)}") from None


def _ask(connection: Connection, request: Any, target: str) -> None:
    body = request.body
    view = body.view if isinstance(body, ViewReader) else memoryview(body) if body else None
    # The body is sent at once: a store that refuses it is heard all the same.
    headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
    try:
        connection.request(
            request.method,
            target,
            body=None if view is None else _slices(view),
            headers=headers,
        )
    except (BrokenPipeError, ConnectionResetError):
        # A store that refuses says so before it has read the body; then the answer is there already.
        if connection.sock is None:
            raise


def _slices(body: memoryview) -> Iterator[memoryview]:
    """Slices of a body: a socket's timeout bounds one sending as a whole, and is to bound a silence."""
    for start in range(0, body.nbytes, _SEND_BYTES):
        yield body[start : start + _SEND_BYTES]


def _is_readable(connection: Connection) -> bool:
    """Whether something came without a request: the other side has closed it."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _server(url: SplitResult) -> str:
    """The server for messages; never a password that stands before it."""
    return f"{url.hostname}:{url.port}" if url.port else str(url.hostname)


def tls_context(verify: bool | str) -> ssl.SSLContext:
    """Make the context for https. ``verify``: whether certificates are verified, or a file or folder of those to
    trust."""
    context = ssl.create_default_context()
    if isinstance(verify, str):
        context.load_verify_locations(**{"capath" if os.path.isdir(verify) else "cafile": verify})
    elif not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
