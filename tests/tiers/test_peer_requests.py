"""The memory of another node over TCP: who may connect, what arrives, and what a lost connection leaves."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kept_records import CUT, ONE, image_of, records_of

from tests.steps import wait_until
from tierfall.core.ranks import serving
from tierfall.core.ranks.wire import SECRET_BYTES, Connection, greet
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    LostWriteError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.kept_images import KeptFolder, KeptImages
from tierfall.tiers.peer_requests import PeerClient, PeerServer

SECRET = b"s" * SECRET_BYTES
RUN = "run"
SHARD = Shard(0, 2)
TWO = CheckpointId(2, 1)

Serve = Callable[..., PeerServer]
OPENED: list[PeerClient | Connection] = []
"""What a test has opened towards its servers; closed at its end."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    servers: list[PeerServer] = []

    def start(images: KeptImages | None = None) -> PeerServer:
        kept = images or KeptImages(KeptFolder(tmp_path, RUN), len(servers))
        listener = socket.create_server(("127.0.0.1", 0))
        servers.append(
            PeerServer(kept, secret=SECRET, run=RUN, senders=["node-1"], listener=listener)
        )
        return servers[-1]

    yield start
    while OPENED:
        OPENED.pop().close()
    for server in servers:
        server.close()
        server.images.close(keep=True)


def client(server: PeerServer, sender: str = "node-1", **more: object) -> PeerClient:
    options = {"secret": SECRET, "run": RUN, "sender": sender, "timeout_s": 5.0, **more}
    OPENED.append(made := PeerClient(("127.0.0.1", server.port), **options))  # type: ignore[arg-type]
    return made


def begin(sender: PeerClient, id: CheckpointId = ONE) -> bool:
    return sender.begin(
        id,
        SHARD,
        upload=id.step,
        image_bytes=CUT.image_bytes,
        records_bytes=20_000,
        attempt_id=None,
        waiting=[],
    )


def send(sender: PeerClient, id: CheckpointId = ONE, *, seals: bool = True) -> None:
    """Send an image, in two parts."""
    begin(sender, id)
    data = memoryview(image_of(id))
    for start in (0, 100_000):
        sender.write(id, SHARD, id.step, start, data[start : start + 100_000])
    if seals:
        seal(sender, id)


def seal(sender: PeerClient, id: CheckpointId = ONE) -> None:
    manifest, commit = records_of(id)
    sender.seal(id, SHARD, id.step, manifest=manifest.encode(), commit=commit.encode())


def received(reader: PeerClient) -> dict[CheckpointId, bytes]:
    found = {}
    for image in reader.images()[0]:
        data = bytearray(CUT.image_bytes)
        image.read(0, [memoryview(data)])
        found[image.commit.lineage.checkpoint] = bytes(data)
    return found


def test_an_image_arrives_as_it_was_sent_and_counts_once_it_is_sealed(serve: Serve) -> None:
    sender = client(serve())
    send(sender, seals=False)
    assert received(sender) == {}
    seal(sender)
    seal(sender)
    (image,) = sender.images()[0]
    manifest, commit = records_of(ONE)
    assert (image.commit, image.shard, image.manifest()) == (commit, SHARD, manifest.encode())
    assert received(sender) == {ONE: image_of(ONE)}


def test_all_processes_of_a_node_tell_what_it_keeps_and_it_outlives_them(serve: Serve) -> None:
    first = serve()
    send(client(first))
    other = client(serve(), "node-2")
    assert received(other) == {ONE: image_of(ONE)}
    first.close()
    first.images.close(keep=True)
    assert received(client(serve())) == {ONE: image_of(ONE)}


def test_damage_is_told(serve: Serve, tmp_path: Path) -> None:
    sender = client(serve())
    send(sender)
    with (tmp_path / "slot-0.0.image").open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    images, (problem,) = sender.images()
    assert not images
    assert problem.is_damage


def test_a_node_that_is_not_to_keep_an_image_refuses_it(serve: Serve) -> None:
    with pytest.raises(BackendError, match="no image of this node is kept here"):
        begin(client(serve(), "node-7"))


# Who may connect ---------------------------------------------------------------------------------------


def test_who_does_not_know_the_secret_is_refused_and_named(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    with pytest.raises(AccessDeniedError, match="does not know the secret of this run"):
        client(server, secret=b"x" * SECRET_BYTES).images()
    wait_until(lambda: "127.0.0.1" in caplog.text, "it is named")
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
    wait_until(lambda: "does not know the secret" in caplog.text, "it is named")


def test_a_recorded_handshake_proves_nothing(serve: Serve) -> None:
    server = serve()
    sent: list[dict[str, object]] = []
    connection = connect(server)
    send = connection.send
    connection.send = lambda head, payload=None: (sent.append(head), send(head, payload))[1]  # type: ignore[method-assign, assignment, misc]
    greet(connection, SECRET, run=RUN, sender="node-1")
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
        client(serve(), run="another").images()


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
    send(client(server))  # others are served


def test_silent_connections_do_not_keep_ranks_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "UNAUTHENTICATED_MAX", 3)
    monkeypatch.setattr(serving, "HANDSHAKE_S", 0.2)
    server = serve()
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
    try:
        wait_until(lambda: reaches(client(server)), "ranks come in")
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


def reaches(sender: PeerClient) -> bool:
    try:
        sender.images()
    except UnreachableError:
        return False
    return True


# What a lost connection leaves --------------------------------------------------------------------------


def test_what_was_sent_stays_if_the_connection_breaks(serve: Serve) -> None:
    server = serve()
    sender = client(server)
    send(sender, seals=False)
    for connection in sender._idle:
        connection.socket.close()
    seal(sender)
    assert received(sender) == {ONE: image_of(ONE)}


def test_what_was_not_sealed_ends_with_the_server(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    send(client(server), seals=False)
    server.close()
    server.images.close(keep=True)
    assert [*tmp_path.iterdir()] == []
    sender = client(serve())
    with pytest.raises(LostWriteError):
        seal(sender)


def test_a_silent_server_costs_the_timeout_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is not sent again on a new connection with a time of its own."""
    asleep, asked = threading.Event(), list[str]()

    def images(self: KeptFolder) -> object:
        asked.append("images")
        asleep.wait(10)
        return [], []

    sender = client(serve(), timeout_s=1.0)
    send(sender)  # leaves a connection that is idle
    monkeypatch.setattr(KeptFolder, "images", images)
    with pytest.raises(UnreachableError, match="timed out"):
        sender.images()
    asleep.set()
    assert asked == ["images"]


def test_no_request_goes_on_after_the_time_for_all_of_them(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the server answers in between."""

    def images(self: KeptFolder) -> object:
        time.sleep(0.1)
        return [], []

    monkeypatch.setattr(KeptFolder, "images", images)
    began = time.monotonic()
    reader = client(serve(), until_s=began + 0.5)
    answers = 0
    with suppress(UnreachableError):
        while answers < 100:
            reader.images()
            answers += 1
    assert 0 < answers < 100
    assert time.monotonic() - began < 5
    with pytest.raises(UnreachableError, match="it is too late"):
        reader.images()


def test_bytes_that_change_on_the_way_are_sent_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = client(serve())
    begin(sender)
    fill, flips = Connection._fill, [1]

    def flip(connection: Connection, view: memoryview) -> None:
        fill(connection, view)
        if view.nbytes == 1000 and flips:
            flips.pop()
            view[0] ^= 1

    monkeypatch.setattr(Connection, "_fill", flip)
    data = memoryview(image_of(ONE))
    with pytest.raises(UnreachableError, match="arrived damaged") as raised:
        sender.write(ONE, SHARD, 1, 0, data[:1000])
    assert raised.value.retryable
    sender.write(ONE, SHARD, 1, 0, data[:1000])
    sender.write(ONE, SHARD, 1, 1000, data[1000:])
    seal(sender)
    assert received(sender) == {ONE: image_of(ONE)}
    flips += [1] * 10
    (image,) = sender.images()[0]
    with pytest.raises(UnreachableError, match="arrived damaged"):
        image.read(0, [memoryview(bytearray(1000))])


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_forked_child_does_not_keep_connections(serve: Serve, is_in_use: bool) -> None:
    server = serve()
    sender = client(server)
    send(sender)
    connection = sender._idle.pop() if is_in_use else sender._idle[0]
    reader, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(reader, 1)
        os._exit(0)
    try:
        connection.socket.close()  # as a kill of the parent: without a shutdown, which would end the child's copy too
        wait_until(lambda: not server._connections, "it is closed")
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_the_error_of_the_other_side_is_the_error_here(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    sender = client(server)
    send(sender)
    (image,) = sender.images()[0]
    server.images.drop(ONE)
    with pytest.raises(KeyNotFoundError, match="read in the memory of"):
        image.read(0, [memoryview(bytearray(1000))])

    def full(*arguments: object, **more: object) -> None:
        raise StorageFullError("no memory is left for it")

    monkeypatch.setattr(KeptImages, "begin", full)
    with pytest.raises(StorageFullError, match="no memory is left for it"):
        begin(sender, TWO)


def test_a_write_outside_of_the_image_is_refused(serve: Serve) -> None:
    sender = client(serve())
    begin(sender)
    for offset in (-1, CUT.image_bytes):
        with pytest.raises(BackendError, match="are not in the image"):
            sender.write(ONE, SHARD, 1, offset, memoryview(b"data"))
    send(sender)
    assert received(sender) == {ONE: image_of(ONE)}


def hello() -> dict[str, object]:
    return {"version": 1, "run": RUN, "sender": "node-1", "nonce": "n"}


def connect(server: PeerServer) -> Connection:
    sock = socket.create_connection(("127.0.0.1", server.port))
    OPENED.append(connection := Connection(sock, timeout_s=5.0))
    return connection
