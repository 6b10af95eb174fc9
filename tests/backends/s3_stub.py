"""A stand-in for an S3 server on loopback that says what it is told, and what its tests share."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.core.types.errors import BackendError

PART_BYTES = 5 * 1024 * 1024
SECRET = "tierfall-test-secret-5f1d"
KEY = "tierfall-test-key"

Reply = tuple[int, str]


BEGUN = "<R><UploadId>1</UploadId></R>"
COMPLETED = "<CompleteMultipartUploadResult><ETag>etag</ETag></CompleteMultipartUploadResult>"
EMPTY = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


def taking(method: str, query: dict[str, list[str]]) -> Reply:
    """Answer as a store that takes everything and holds nothing."""
    if "uploads" in query:
        return 200, BEGUN
    if "uploadId" in query and method == "POST":
        return 200, COMPLETED
    return 200, EMPTY if "list-type" in query else ""


def probed(*statuses: int) -> Callable[[str, dict[str, list[str]]], Reply]:
    """Answer the first creates, which are those of an opening, by these statuses; then as ``taking``."""
    left = list(reversed(statuses))
    return lambda method, query: (
        (left.pop(), "") if left and method == "PUT" else taking(method, query)
    )


def error_body(code: str) -> str:
    return f"<Error><Code>{code}</Code><Message>no</Message><AWSAccessKeyId>{KEY}</AWSAccessKeyId></Error>"


class Stub:
    """Answers every request by ``reply(method, query)``; None answers nothing at all.

    ``body`` and ``headers`` are the last request's; ``cut_bytes`` are announced beyond the answer's and never sent;
    ``region`` is the bucket's, where answers name it."""

    def __init__(self) -> None:
        self.reply: Callable[[str, dict[str, list[str]]], Reply | None] = taking
        self.requests: list[str] = []
        self.body = b""
        self.headers: dict[str, str] = {}
        self.cut_bytes = 0
        self.region = ""
        self.ended = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            """The body follows its head at once, and not after the client's delayed acknowledgement."""

            def answer(self) -> None:
                query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
                stub.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stub.headers = dict(self.headers)
                stub.requests.append(f"{self.command} {self.path}")
                reply = stub.reply(self.command, query)
                if reply is None:
                    stub.ended.wait(60)
                    self.close_connection = True
                    return
                body = reply[1].encode() if self.command != "HEAD" else b""
                self.send_response(reply[0])
                self.send_header("Content-Length", str(len(body) + stub.cut_bytes))
                self.send_header("ETag", '"etag"')
                if stub.region:
                    self.send_header("x-amz-bucket-region", stub.region)
                self.end_headers()
                with suppress(ConnectionError):
                    # Whoever gave up has not waited for it.
                    self.wfile.write(body)
                self.close_connection = stub.cut_bytes > 0

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def options(self) -> dict[str, Any]:
        return {
            "endpoint_url": f"http://127.0.0.1:{self._server.server_port}",
            "key": KEY,
            "secret": SECRET,
            "config_kwargs": {"connect_timeout": 1, "read_timeout": 0.5},
        }

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def refused(call: Callable[[], object]) -> BackendError:
    with pytest.raises(BackendError) as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert SECRET not in shown
    assert KEY not in shown, "the store's own text is not repeated"
    return caught.value


def opened(stub: Stub, **options: Any) -> ObjectStoreBackend:
    """Open a place in a store that keeps the condition; then it takes everything."""
    stub.reply = probed(200, 412)
    made = open_backend("s3://bucket/run", options={**stub.options, **options})
    assert isinstance(made, ObjectStoreBackend)
    stub.reply = taking
    stub.requests.clear()
    return made
