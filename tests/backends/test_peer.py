"""The memory of another node as a backend: every promise of the contract, who may connect, and what a lost connection
leaves."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from backend_places import get, put

from tests.memory_backend import MemoryBackend
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.kept import KeptFiles
from tierfall.backends.peer.server import PeerServer
from tierfall.core.ranks import serving
from tierfall.core.ranks.wire import SECRET_BYTES, Connection, greet
from tierfall.core.types.backend import Backend, StoredObject, put_object
from tierfall.core.types.errors import (
    AccessDeniedError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)

SECRET = b"s" * SECRET_BYTES
RUN = "run"

Serve = Callable[..., PeerServer]
OPENED: list[PeerBackend | Connection] = []
"""What a test has opened towards its servers; closed at its end."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    servers: list[PeerServer] = []

    def start(storage: Callable[[str], Backend] | None = None, **more: object) -> PeerServer:
        folders = storage or (lambda sender: KeptFiles(tmp_path / sender))
        options = {
            "secret": SECRET,
            "run": RUN,
            "folders": lambda: sorted(child.name for child in tmp_path.iterdir()),
            "listener": socket.create_server(("127.0.0.1", 0)),
            **more,
        }
        servers.append(PeerServer(storage=folders, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield start
    while OPENED:
        OPENED.pop().close()
    for server in servers:
        server.close()


def client(server: PeerServer, sender: str = "node-1", **more: object) -> PeerBackend:
    options = {"secret": SECRET, "run": RUN, "sender": sender, "timeout_s": 5.0, **more}
    OPENED.append(backend := PeerBackend(("127.0.0.1", server.port), **options))  # type: ignore[arg-type]
    return backend


@pytest.mark.parametrize("name", CHECKS)
def test_promise(name: str, serve: Serve) -> None:
    server, senders = serve(), iter(f"node-{number}" for number in range(1000))
    check_promise(
        name,
        lambda: client(server, next(senders)),
        reopen=lambda backend: client(server, backend._sender),
        leaves_unfinished=False,
    )


def test_a_client_learns_of_whom_anything_is_kept(serve: Serve) -> None:
    server = serve()
    for sender in ("node-1", "node-2"):
        put_object(client(server, sender), "run/document", b"kept")
    assert client(server).folders() == ["node-1", "node-2"]


def test_senders_do_not_see_each_other(serve: Serve) -> None:
    server = serve()
    one, other = client(server, "node-1"), client(server, "node-2")
    put(one, "a/b", b"one")
    assert [each.key for each in other.scan("a/")] == []
    with pytest.raises(KeyNotFoundError):
        other.stat("a/b")
    assert get(one, "a/b") == b"one"


def test_objects_outlive_the_sender_and_the_server(serve: Serve) -> None:
    first = serve()
    with closing(client(first)) as sender:
        put(sender, "a/b", b"kept")
    first.close()
    assert get(client(serve()), "a/b") == b"kept"


# Who may connect ---------------------------------------------------------------------------------------


def test_who_does_not_know_the_secret_is_refused_and_named(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    with pytest.raises(AccessDeniedError, match="does not know the secret of this run"):
        client(server, secret=b"x" * SECRET_BYTES).stat("a/b")
    wait_until(lambda: "127.0.0.1" in caplog.text)
    assert "is refused" in caplog.text


@pytest.mark.parametrize("proof", ["0" * 64, "\ud800"])
def test_a_rank_that_does_not_prove_itself_is_refused(
    serve: Serve, caplog: pytest.LogCaptureFixture, proof: str
) -> None:
    """It takes the server's word, and has no proof of its own."""
    connection = connect(serve())
    connection.send(hello())
    connection.receive()
    connection.send({"proof": proof})
    assert "only ranks of this start" in connection.receive()[0]["error"]
    wait_until(lambda: "does not know the secret" in caplog.text)


def test_a_recorded_handshake_proves_nothing(serve: Serve) -> None:
    server = serve()
    sent: list[dict[str, object]] = []
    connection = connect(server)
    send = connection.send
    connection.send = lambda head, payload=None: (sent.append(head), send(head, payload))[1]  # type: ignore[method-assign, assignment, misc]
    greet(connection, SECRET, run=RUN, sender="node-1", session="s")
    replayed = connect(server)
    replayed.send(sent[0])
    replayed.receive()
    replayed.send(sent[1])
    assert "the proof is wrong" in replayed.receive()[0]["error"]


def test_a_proof_sent_back_to_its_sender_proves_nothing(serve: Serve) -> None:
    connection = connect(serve())
    connection.send(hello())
    answer, _ = connection.receive()
    connection.send({"proof": answer["proof"]})
    assert "the proof is wrong" in connection.receive()[0]["error"]


def test_another_run_is_refused(serve: Serve) -> None:
    with pytest.raises(AccessDeniedError, match="this is run 'run'"):
        client(serve(), run="another").stat("a/b")


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 12, b"\0\0\0\2\0\0\0\0\0\0\0\0[]", b""]
)
def test_what_is_no_handshake_ends_the_connection(serve: Serve, data: bytes) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as other:
        other.sendall(data)
        with suppress(OSError):  # the server may have closed it already
            other.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert other.recv(1000) == b""
    put(client(server), "a/b", b"others are served")


def test_silent_connections_do_not_keep_ranks_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "UNAUTHENTICATED_MAX", 3)
    monkeypatch.setattr(serving, "HANDSHAKE_S", 0.2)
    server = serve()
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
    try:
        wait_until(lambda: reaches(client(server)))
    finally:
        for each in silent:
            each.close()


def test_a_handshake_has_one_deadline(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come one by one do not extend it."""
    monkeypatch.setattr(serving, "HANDSHAKE_S", 0.3)
    server = serve()
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port)) as slow, suppress(ConnectionError):
        slow.sendall(b"\0\0\x0f\xff" + bytes(8))  # a head of 4095 bytes, and no payload
        while time.monotonic() - began < 20:
            slow.sendall(b" ")
            time.sleep(0.05)
    assert time.monotonic() - began < 10


def reaches(sender: PeerBackend) -> bool:
    try:
        put(sender, "a/b", b"x")
    except UnreachableError:
        return False
    return True


# What a lost connection leaves --------------------------------------------------------------------------


def test_what_a_killed_sender_had_not_published_is_removed(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    sender = client(server)
    writer = sender.create("a/b", length=4)
    writer.write(0, memoryview(b"half"))
    assert files_below(tmp_path / "node-1")
    sender.close()
    wait_until(lambda: not files_below(tmp_path / "node-1"))


def test_a_silent_server_costs_the_timeout_once(serve: Serve) -> None:
    """The request is not sent again on a new connection with a time of its own."""
    asleep, asked = threading.Event(), list[str]()

    class Silent(MemoryBackend):
        def stat(self, key: str) -> object:  # type: ignore[override]
            asked.append(key)
            asleep.wait(10)
            return super().stat(key)

    sender = client(serve(lambda name: Silent()), timeout_s=1.0)
    put(sender, "a/b", b"x")  # leaves a connection that is idle
    with pytest.raises(UnreachableError, match="timed out"):
        sender.stat("a/b")
    asleep.set()
    assert asked == ["a/b"]


def test_no_request_goes_on_after_the_time_for_all_of_them(serve: Serve) -> None:
    """However often the server answers in between."""

    class Slow(MemoryBackend):
        def stat(self, key: str) -> StoredObject:
            time.sleep(0.1)
            return super().stat(key)

    server = serve(lambda name: Slow())
    put(client(server), "a/b", b"x")
    began = time.monotonic()
    reader = client(server, until_s=began + 0.5)
    answers = 0
    with suppress(UnreachableError):
        while answers < 100:
            reader.stat("a/b")
            answers += 1
    assert 0 < answers < 100
    assert time.monotonic() - began < 5
    with pytest.raises(UnreachableError, match="it is too late"):
        reader.stat("a/b")


def test_bytes_that_change_on_the_way_are_sent_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    sender = client(server)
    writer = sender.create("a/b", length=4)
    fill = Connection._fill

    def flip(connection: Connection, view: memoryview) -> None:
        fill(connection, view)
        if bytes(view) == b"data":
            view[0] ^= 1

    monkeypatch.setattr(Connection, "_fill", flip)
    with pytest.raises(UnreachableError, match="arrived damaged") as raised:
        writer.write(0, memoryview(b"data"))
    assert raised.value.retryable
    monkeypatch.undo()
    writer.write(0, memoryview(b"data"))
    writer.publish()
    assert get(sender, "a/b") == b"data"
    monkeypatch.setattr(Connection, "_fill", flip)
    with pytest.raises(UnreachableError, match="arrived damaged"):
        get(sender, "a/b")


def test_a_create_that_arrives_twice_keeps_what_was_written(serve: Serve) -> None:
    server = serve()
    connection = connect(server)
    greet(connection, SECRET, run=RUN, sender="node-1", session="s")
    create = {"do": "create", "writer": 0, "key": "a/b", "publish": "replace"}
    create |= {"length": None, "length_max": 4}
    write = {"do": "write", "writer": 0, "offset": 0}
    for head, payload in (
        (create, None),
        (write, memoryview(b"data")),
        (create, None),
        ({"do": "publish", "writer": 0}, None),
    ):
        connection.send(head, payload)
        assert connection.receive()[0] == {"value": None}
    assert get(client(server), "a/b") == b"data"


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_forked_child_does_not_keep_connections(
    serve: Serve, tmp_path: Path, is_in_use: bool
) -> None:
    server = serve()
    sender = client(server)
    writer = sender.create("a/b", length=4)
    writer.write(0, memoryview(b"half"))
    connection = sender._idle.pop() if is_in_use else sender._idle[0]
    assert connection is not None
    reader, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(reader, 1)
        os._exit(0)
    try:
        connection.socket.close()  # as a kill of the parent: without a shutdown, which would end the child's copy too
        wait_until(lambda: not files_below(tmp_path / "node-1"))
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_the_error_of_the_storage_is_the_error_here(serve: Serve) -> None:
    sender = client(serve())
    with pytest.raises(KeyNotFoundError, match="stat 'a/b' in the memory of"):
        sender.stat("a/b")


def test_the_error_of_a_storage_that_cannot_be_opened_is_the_error_here(serve: Serve) -> None:
    def full(sender: str) -> Backend:
        raise StorageFullError("no memory is left for node-1")

    with pytest.raises(StorageFullError, match="no memory is left for node-1"):
        client(serve(full)).stat("a/b")


def hello() -> dict[str, object]:
    return {"version": 1, "run": RUN, "sender": "node-1", "session": "s", "nonce": "n"}


def connect(server: PeerServer) -> Connection:
    sock = socket.create_connection(("127.0.0.1", server.port))
    OPENED.append(connection := Connection(sock, timeout_s=5.0))
    return connection


def files_below(folder: Path) -> list[str]:
    """The files below a folder, from which others may remove folders meanwhile: no walk of Path bears it."""
    return [name for _, _, names in os.walk(folder) for name in names]


def wait_until(holds: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)
