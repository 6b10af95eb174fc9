"""How a body is sent: a slow store is not a silent one, one that refuses early is heard; signatures and proxies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from s3_stub import KEY, PART_BYTES, SECRET, Stub, opened, refused, taking

from tierfall.backends.s3.client import open_client
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
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
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


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def send(listener: Listener) -> None:
    client = open_client(
        "s3://bucket",
        {
            "endpoint_url": listener.url,
            "key": KEY,
            "secret": SECRET,
            "config_kwargs": {"connect_timeout": 5, "read_timeout": 1.0},
        },
    )
    try:
        client.put_part("key", "upload", 1, BODY, "write")
    finally:
        client.close()


def test_a_slow_store_is_not_a_silent_one(listener: Listener) -> None:
    listener.serve = slowly
    start_s = time.monotonic()
    send(listener)
    assert time.monotonic() - start_s > 1.2, "it was to take longer than the timeout"


def test_a_refusal_before_the_body_is_read_is_received(listener: Listener) -> None:
    """The connection is reset then: what came before is the answer."""
    listener.serve = refuse
    kinds: set[type[BackendError]] = {type(refused(lambda: send(listener))) for _ in range(10)}
    assert kinds == {AccessDeniedError}


@pytest.mark.parametrize("by", ["environment", "option"])
def test_a_proxy_is_used_for_all(stub: Stub, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    proxy, proxies = stub.options["endpoint_url"], {}
    if by == "environment":
        monkeypatch.setenv("http_proxy", proxy)
    else:
        proxies = {"proxies": {"http": proxy}}
    words = {**stub.options["config_kwargs"], **proxies}
    backend = opened(stub, endpoint_url="http://store.invalid", config_kwargs=words)
    stub.reply = lambda method, query: (206, "four") if method == "GET" else taking(method, query)
    view = memoryview(bytearray(4))
    backend.read_into("key", 0, view)
    assert bytes(view) == b"four"
    data = bytes(range(256)) * (PART_BYTES // 256)
    with backend.create("key") as writer:
        writer.write(0, memoryview(data))
        assert stub.body == data
        writer.publish()
    stub.cut_bytes = 4
    assert (
        type(refused(lambda: backend.read_into("key", 0, memoryview(bytearray(8)))))
        is UnreachableError
    )
    stub.cut_bytes = 0
    assert all(" http://store.invalid/bucket/" in request for request in stub.requests)
    backend.close()
