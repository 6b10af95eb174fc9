"""The connection between two processes of a run: who may talk, and how requests and bytes travel.

A message is a head, which is JSON, and a payload, which is bytes. The head's length is bounded, and the payload ends in
its XXH3-128 digest. Both sides prove in a handshake that they know the run's secret, over two random numbers that are
used once: a recorded handshake proves nothing. What follows is neither encrypted nor signed: the network of the nodes
is trusted not to change bytes on purpose. Nothing is pickled.

Between processes of one node a connection is a Unix socket, and a payload may be a file in memory that is handed over.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
import weakref
from contextlib import suppress
from typing import Any

import xxhash

from tierfall.core.types.errors import AccessDeniedError, UnreachableError

VERSION = 1
SECRET_BYTES = 32
BUFFER_BYTES = 1 << 20
"""A payload is hashed, sent and received in parts of this length, which stay in the processor's cache."""
HEAD_BYTES_MAX = 4 << 20
HANDSHAKE_BYTES_MAX = 4096
HANDSHAKE_S = 10.0
"""Seconds per handshake."""
LEAST_TIMEOUT_S = 0.001
"""A timeout of 0 would make a socket one that never waits."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds of silence, seconds between the probes after that, and how many are not answered."""
_LENGTHS = struct.Struct(">IQ")
_DIGEST_BYTES = 16
_FILE = b"F"
"""The byte that a file is handed over with."""

Head = dict[str, Any]
Address = tuple[str, int] | str
"""Host and port; on this node, the name of a Unix socket without a file."""

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class WireError(UnreachableError):
    """The other side has closed the connection, or has sent what is no message."""


class DamagedPayloadError(UnreachableError):
    """The payload that arrived is not the payload that was sent. All of it was received."""


class Connection:
    """One side of a connection. Used by one thread at a time. After an OSError or a WireError it must be closed; after
    a DamagedPayloadError the next message can be received.

    The handshake, which is all before ``set_timeout``, has ``timeout_s`` seconds in all.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        self._deadline_s: float | None = time.monotonic() + timeout_s
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # a node that is lost says nothing
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket = sock
        close_in_child(sock)

    def set_timeout(self, seconds: float | None) -> None:
        """Bound how long the other side may be silent; None: not at all."""
        self._deadline_s = None
        self.socket.settimeout(seconds)

    def send(self, head: Head, payload: memoryview | None = None) -> None:
        """Send a message. ``payload`` is flat, of bytes; it must not change until this returns."""
        data = json.dumps(head, separators=(",", ":")).encode()
        length = 0 if payload is None else payload.nbytes
        self.socket.sendall(_LENGTHS.pack(len(data), length) + data)
        if payload is None or not length:
            return
        digest = xxhash.xxh3_128()
        for start in range(0, length, BUFFER_BYTES):
            part = payload[start : start + BUFFER_BYTES]
            digest.update(part)
            self.socket.sendall(part)
        self.socket.sendall(digest.digest())

    def receive(self, *, head_bytes_max: int = HEAD_BYTES_MAX) -> tuple[Head, int]:
        """Receive the head of a message, and the length of its payload, which must be received next."""
        prefix = bytearray(_LENGTHS.size)
        self._fill(memoryview(prefix))
        head_bytes, payload_bytes = _LENGTHS.unpack(prefix)
        if head_bytes > head_bytes_max:
            raise WireError(f"a head of {head_bytes} bytes; expected {head_bytes_max} at most")
        data = bytearray(head_bytes)
        self._fill(memoryview(data))
        try:
            head = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise WireError("a head that is no JSON") from error
        if not isinstance(head, dict):
            raise WireError("a head that is no mapping")
        return head, payload_bytes

    def fill(self, target: memoryview) -> None:
        """Receive a payload of the length of ``target``. Raises DamagedPayloadError where its digest differs."""
        digest = xxhash.xxh3_128()
        for start in range(0, target.nbytes, BUFFER_BYTES):
            part = target[start : start + BUFFER_BYTES]
            self._fill(part)
            digest.update(part)
        sent = bytearray(_DIGEST_BYTES if target.nbytes else 0)
        self._fill(memoryview(sent))
        if sent and digest.digest() != sent:
            raise DamagedPayloadError(f"{target.nbytes} bytes arrived damaged")

    def skip(self, length: int, buffer: memoryview) -> None:
        """Receive a payload of ``length`` bytes, and its digest, without using it."""
        left = length + _DIGEST_BYTES if length else 0
        for start in range(0, left, buffer.nbytes):
            self._fill(buffer[: min(buffer.nbytes, left - start)])

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < view.nbytes:
            if self._deadline_s is not None:
                self.socket.settimeout(max(self._deadline_s - time.monotonic(), LEAST_TIMEOUT_S))
            try:
                count = self.socket.recv_into(view[at:])
            except OSError as error:
                raise WireError(str(error) or type(error).__name__) from error
            if not count:
                raise WireError("the other side has closed the connection")
            at += count

    def send_file(self, head: Head, file: int) -> None:
        """Send a message, and hand over an open file after it; only on a Unix socket."""
        self.send(head)
        socket.send_fds(self.socket, [_FILE], [file])

    def receive_file(self) -> int:
        """Return the open file that follows a message."""
        try:
            flags = socket.MSG_CMSG_CLOEXEC
            _, files, _, _ = socket.recv_fds(self.socket, len(_FILE), 1, flags)
        except OSError as error:
            raise WireError(str(error) or type(error).__name__) from error
        if len(files) != 1:
            raise WireError("no file follows the message")
        return files[0]

    def is_readable(self, timeout_s: float) -> bool:
        """Wait until something arrives, or the other side closes the connection; False after ``timeout_s``."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    def close(self) -> None:
        """Close the connection; a thread that waits for it fails."""
        with suppress(OSError):  # the other side was faster
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


# Handshake ---------------------------------------------------------------------------------------------


def connect_as(
    sender: str, address: Address, secret: bytes, *, run: str, timeout_s: float
) -> Connection:
    """Connect to what listens at an address, and ``greet`` it. Raises OSError, WireError, and AccessDeniedError."""
    connection = Connection(
        _dial(address, timeout_s), timeout_s=max(min(HANDSHAKE_S, timeout_s), LEAST_TIMEOUT_S)
    )
    try:
        greet(connection, secret, run=run, sender=sender)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | WireError) and not isinstance(error, AccessDeniedError):
            raise WireError(f"in the handshake: {error}") from error
        raise
    return connection


def _dial(address: Address, timeout_s: float) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=timeout_s)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(f"\0{address}")
    except BaseException:
        sock.close()
        raise
    return sock


def greet(connection: Connection, secret: bytes, *, run: str, sender: str) -> None:
    """Begin a connection as ``sender``. Raises AccessDeniedError if the other side does not prove that it knows
    ``secret``, or refuses this one."""
    hello = {"version": VERSION, "run": run, "sender": sender}
    hello["nonce"] = secrets.token_hex(16)
    connection.send(hello)
    answer, _ = connection.receive(head_bytes_max=HANDSHAKE_BYTES_MAX)
    if "error" in answer:
        raise AccessDeniedError(str(answer["error"]))
    transcript = _transcript(hello, str(answer.get("nonce")))
    if not _is_proof(answer.get("proof"), secret, "server", transcript):
        connection.send({"error": "another secret"})
        raise AccessDeniedError(
            "it does not know the secret of this run: it is no rank of this start"
        )
    connection.send({"proof": _proof(secret, "client", transcript)})
    verdict, _ = connection.receive(head_bytes_max=HANDSHAKE_BYTES_MAX)
    if "error" in verdict:
        raise AccessDeniedError(str(verdict["error"]))


def admit(connection: Connection, secret: bytes, *, run: str) -> str:
    """Answer a ``greet``; return its sender. Raises AccessDeniedError, and tells the other side, if it does not prove
    that it knows ``secret``."""
    hello, length = connection.receive(head_bytes_max=HANDSHAKE_BYTES_MAX)
    names = [hello.get(name) for name in ("sender", "nonce")]
    if length or not all(isinstance(name, str) and 0 < len(name) <= 256 for name in names):
        raise AccessDeniedError("it does not begin with a handshake")
    if hello.get("version") != VERSION or hello.get("run") != run:
        reason = f"this is run {run!r}, version {VERSION} of the connection"
        connection.send({"error": reason})
        raise AccessDeniedError(f"it greets another run or version: {reason}")
    nonce = secrets.token_hex(16)
    transcript = _transcript(hello, nonce)
    connection.send({"nonce": nonce, "proof": _proof(secret, "server", transcript)})
    answer, length = connection.receive(head_bytes_max=HANDSHAKE_BYTES_MAX)
    if length or not _is_proof(answer.get("proof"), secret, "client", transcript):
        connection.send({"error": "the proof is wrong: only ranks of this start may connect"})
        raise AccessDeniedError("it does not know the secret of this run")
    connection.send({})
    return str(hello["sender"])


def _transcript(hello: Head, nonce: str) -> bytes:
    return json.dumps([hello, nonce], sort_keys=True).encode()


def _proof(secret: bytes, side: str, transcript: bytes) -> str:
    """The side is part of it, so that a proof cannot be sent back to its sender as the other side's."""
    return hmac.new(secret, side.encode() + b"\0" + transcript, hashlib.sha256).hexdigest()


def _is_proof(given: object, secret: bytes, side: str, transcript: bytes) -> bool:
    expected = _proof(secret, side, transcript)
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, expected)


def listen_on_node(name: str) -> socket.socket:
    """Return a socket that processes of this node reach by ``name``, without a port or a file. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(f"\0{name}")
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


def close_in_child(sock: socket.socket) -> None:
    """Have forked children close their copies of a socket: they must not hold those of their parent open."""
    _sockets.add(sock)


def _close_inherited() -> None:
    for sock in list(_sockets):
        with suppress(OSError):
            os.close(sock.detach())
    _sockets.clear()


os.register_at_fork(after_in_child=_close_inherited)
