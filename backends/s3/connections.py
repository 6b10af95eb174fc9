"""Connections to an S3 server, kept between requests, over which bytes go to and from the caller's memory directly.

One request is one call here: nothing is retried, and an error says whether it may be. Nothing here knows what an object
is for.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import quote, urlsplit

from tierfall.backends.object.responses import answer_error, code_in, silence_error

_ANSWER_BYTES_MAX = 16 * 1024 * 1024
_KEEP_IDLE = 16
_SEND_BYTES = 256 * 1024
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    connect_s: float = 5.0
    request_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a store said. ``filled``: bytes that came into the caller's memory; ``more``: there were more."""

    status: int
    etag: str
    text: str
    filled: int = 0
    more: bool = False


class Lines:
    """Connections to one host, kept between requests."""

    def __init__(self, url: str, *, timeouts: Timeouts, verify: bool) -> None:
        parts = urlsplit(url)
        self.address = url
        self._host = parts.netloc
        # Never the whole of what stands before the path: there may be a password in it.
        self._shown = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
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

    def send(
        self,
        method: str,
        url: str,
        what: str,
        *,
        body: memoryview | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        into: memoryview | None = None,
    ) -> Answer:
        """Ask once. A good answer's body goes into ``into``, if that is given; any other body is the answer's text."""
        parts = urlsplit(url)
        line: http.client.HTTPConnection | None = None
        try:
            line = self._take()
            _ask(line, method, f"{parts.path}?{parts.query}", body, headers)
            return self._answer(line, into)
        except (OSError, http.client.HTTPException) as error:
            if line is not None:
                line.close()
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise silence_error(f"{reason} at {self._shown}", what) from None

    def at(self, key: str) -> str:
        """Return an object's address; of the bucket where the key is ''."""
        return f"{self.address}/{quote(key, safe='/-_.~')}" if key else self.address

    def close(self) -> None:
        """Close what is idle, and from now on every connection after its use."""
        with self._lock:
            idle, self._idle, self._keep_idle = self._idle, [], 0
        for line in idle:
            line.close()

    def _answer(self, line: http.client.HTTPConnection, into: memoryview | None) -> Answer:
        response = line.getresponse()
        text, filled = "", 0
        if into is not None and response.status in (200, 206):
            filled = _fill(response, into)
        else:
            text = response.read(_ANSWER_BYTES_MAX).decode("utf-8", "replace")
            if response.length:
                # http.client says nothing of a body that broke off.
                raise http.client.IncompleteRead(b"", response.length)
        more = bool(response.length)
        if (response.isclosed() or response.length == 0) and line.sock is not None:
            response.close()
            self._give(line)
        else:
            response.close()
            line.close()
        return Answer(
            status=response.status,
            etag=response.getheader("ETag") or "",
            text=text,
            filled=filled,
            more=more,
        )

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
            # Else megabytes may wait in the kernel, and a slow store look silent while they drain.
            line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _SEND_BYTES)
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


def checked(answer: Answer, what: str) -> Answer:
    """Return a good answer, or raise its error."""
    if 200 <= answer.status < 300:
        return answer
    raise answer_error(answer.status, code_in(answer.text), what)


def _ask(
    line: http.client.HTTPConnection,
    method: str,
    target: str,
    body: memoryview | None,
    headers: Mapping[str, str],
) -> None:
    pieces = None if body is None else _pieces(body)
    length = {} if body is None else {"Content-Length": str(body.nbytes)}
    try:
        line.request(method, target, body=pieces, headers={**length, **headers})
    except (BrokenPipeError, ConnectionResetError):
        # A store that refuses says so before it has read the body; then the answer is there already.
        if line.sock is None:
            raise


def _pieces(body: memoryview) -> Iterator[memoryview]:
    """Cut a body, without a copy: a socket's timeout bounds one sending as a whole, and is to bound a silence."""
    for start in range(0, body.nbytes, _SEND_BYTES):
        yield body[start : start + _SEND_BYTES]


def _fill(response: http.client.HTTPResponse, view: memoryview) -> int:
    """Read a body to where it belongs, without a copy of it; a body that breaks off raises IncompleteRead."""
    filled = 0
    while filled < view.nbytes:
        count = response.readinto(view[filled:])
        if not count:
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            break
        filled += count
    return filled
