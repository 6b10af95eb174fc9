"""How a body is sent: a slow store is not a silent one, and one that refuses early is heard."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from s3_stub import refused

from tierfall.backends.s3.connections import Lines, Timeouts, checked
from tierfall.core.types.errors import AccessDeniedError, BackendError, UnreachableError

BODY = memoryview(bytes(3 * 1024 * 1024))
REFUSAL = b"<Error><Code>ExpiredToken</Code></Error>"

Serve = Callable[[socket.socket, int], None]


class Listener:
    """Takes connections one by one, reads a request's head, and leaves the rest to ``serve``."""

    def __init__(self) -> None:
        self.serve: Serve = drain
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(4)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/bucket"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return
            with line:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += line.recv(1)
                assert b"Content-Length: %d\r\n" % BODY.nbytes in head
                assert b"chunked" not in head.lower()
                self.serve(line, BODY.nbytes)


def drain(line: socket.socket, left: int, *, wait_s: float = 0.0) -> None:
    while left:
        piece = line.recv(min(65536, left))
        if not piece:
            return
        left -= len(piece)
        time.sleep(wait_s)
    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def slowly(line: socket.socket, left: int) -> None:
    drain(line, left, wait_s=0.03)


def refuse(line: socket.socket, left: int) -> None:
    line.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(REFUSAL) + REFUSAL)


def never(line: socket.socket, left: int) -> None:
    line.recv(65536)
    time.sleep(2)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def send(listener: Listener) -> None:
    lines = Lines(listener.url, timeouts=Timeouts(connect_s=5, request_s=1.0), verify=True)
    try:
        checked(lines.send("PUT", f"{listener.url}/key?x=1", "write", body=BODY), "write")
    finally:
        lines.close()


def test_a_slow_store_is_not_a_silent_one(listener: Listener) -> None:
    listener.serve = slowly
    start_s = time.monotonic()
    send(listener)
    assert time.monotonic() - start_s > 1.2, "it was to take longer than the timeout"


def test_a_silent_store_is_given_up(listener: Listener) -> None:
    listener.serve = never
    start_s = time.monotonic()
    assert type(refused(lambda: send(listener))) is UnreachableError
    assert time.monotonic() - start_s < 10


def test_a_refusal_before_the_body_is_read_is_heard(listener: Listener) -> None:
    """The connection is reset then: what came before is the answer."""
    listener.serve = refuse
    kinds: set[type[BackendError]] = {type(refused(lambda: send(listener))) for _ in range(10)}
    assert kinds == {AccessDeniedError}
