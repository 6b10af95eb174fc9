"""A proxy on loopback before a real S3 server, which on demand answers as a store does that has had too much."""

from __future__ import annotations

import http.client
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


class ThrottlingProxy:
    """Passes requests on to ``endpoint``; while ``throttled`` is set, every one is answered by 503; while
    ``lists_fail`` is, those that list."""

    def __init__(self, endpoint: str) -> None:
        self.throttled = threading.Event()
        self.lists_fail = threading.Event()
        self.refused = 0
        behind = urlsplit(endpoint).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                lists = self.command == "GET" and "prefix=" in self.path
                if proxy.throttled.is_set() or (lists and proxy.lists_fail.is_set()):
                    proxy.refused += 1
                    self.reply(503, {}, SLOW_DOWN)
                    return
                connection = http.client.HTTPConnection(behind, timeout=60)
                try:
                    # The Host header stays: it is part of what was signed.
                    connection.request(self.command, self.path, body, dict(self.headers))
                    response = connection.getresponse()
                    kept = {
                        name: value
                        for name, value in response.getheaders()
                        if name.lower()
                        in ("etag", "last-modified", "content-type", "content-range")
                        or (name.lower() == "content-length" and self.command == "HEAD")
                    }
                    self.reply(response.status, kept, response.read())
                finally:
                    connection.close()

            def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(ConnectionError):
                    if self.command != "HEAD":
                        self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
