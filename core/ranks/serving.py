"""The server of a process of a run: it accepts connections, and serves those whose other side knows the run's secret.

One thread accepts, and one for each connection serves it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tierfall.core.ranks.wire import HANDSHAKE_S, Connection, WireError, admit, close_in_child
from tierfall.core.types.errors import AccessDeniedError

logger = logging.getLogger("tierfall")

UNAUTHENTICATED_MAX = 64
"""Connections that may be in the handshake at once; one more is closed."""
ACCEPT_PAUSE_S = 0.5


class Server:
    """Serves from its construction until ``close``, at the address of the socket ``listener``, which it owns.

    ``serve`` is called with each connection that was admitted, and the name of its sender, on a thread of its own.
    Once it returns, or raises OSError or WireError, the connection is closed. ``name`` is that of the service in log
    lines and of its threads.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        run: str,
        serve: Callable[[Connection, str], None],
        name: str,
    ) -> None:
        self._socket = listener
        self._secret = secret
        self._run = run
        self._serve_admitted = serve
        self._name = name
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._unauthenticated = 0
        self._closed = False
        at = listener.getsockname()
        self.port: int = at[1] if isinstance(at, tuple) else 0
        close_in_child(listener)
        self._thread = threading.Thread(target=self._accept, name=f"tierfall-{name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop listening, and close every connection; wait ``timeout_s`` for each call of ``serve`` in progress."""
        with self._lock:
            self._closed = True
            connections = dict(self._connections)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in connections:
            connection.close()
        self._thread.join()
        for thread in connections.values():
            thread.join(timeout_s)

    def _is_closed(self) -> bool:
        return self._closed

    def _accept(self) -> None:
        while not self._is_closed():
            try:
                accepted, address = self._socket.accept()
                connection = Connection(accepted, timeout_s=HANDSHAKE_S)
            except OSError:
                if self._is_closed():
                    return
                logger.warning("%s: a connection could not be accepted", self._name, exc_info=True)
                time.sleep(ACCEPT_PAUSE_S)  # out of descriptors, accept fails again at once
                continue
            place = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this node"
            if not self._start(connection, place):
                connection.close()

    def _start(self, connection: Connection, place: str) -> bool:
        """Serve a connection on a thread of its own; False where that is not possible now."""
        thread = threading.Thread(
            target=self._serve,
            args=(connection, place),
            name=f"tierfall-{self._name}-connection",
            daemon=True,
        )
        with self._lock:
            if self._closed or self._unauthenticated >= UNAUTHENTICATED_MAX:
                return False
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads
                logger.warning(
                    "%s: the connection from %s is not served: %s", self._name, place, error
                )
                return False
            self._unauthenticated += 1
            self._connections[connection] = thread  # here, so that ``close`` finds it
        return True

    def _serve(self, connection: Connection, place: str) -> None:
        try:
            if sender := self._greet(connection, place):
                self._serve_admitted(connection, sender)
        except (OSError, WireError) as error:
            logger.debug("%s: the connection from %s has ended: %s", self._name, place, error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _greet(self, connection: Connection, place: str) -> str:
        try:
            return admit(connection, self._secret, run=self._run)
        except AccessDeniedError as error:
            logger.warning("%s: the connection from %s is refused: %s", self._name, place, error)
            return ""
        finally:
            with self._lock:
                self._unauthenticated -= 1
