"""Opening a store: where credentials come from, what is tried again, and that no probe is left behind."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from backend_places import get, no_sleep, put
from s3_stub import KEY, PART_BYTES, SECRET, Reply, Stub, error_body, opened, refused, taking

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError, UnreachableError
from tierfall.core.types.values import Driver

PART = memoryview(bytes(PART_BYTES))


@pytest.fixture
def backend(stub: Stub, driver: Driver) -> Iterator[ObjectStoreBackend]:
    made = opened(stub, driver)
    yield made
    made.close()


class Metadata:
    """A metadata service on loopback that hands out credentials until it is told to die."""

    def __init__(self) -> None:
        self.status = 200
        self.asked = 0
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.asked += 1
                late = datetime.now(UTC) + timedelta(hours=6)
                body = json.dumps(
                    {
                        "AccessKeyId": KEY,
                        "SecretAccessKey": SECRET,
                        "Token": "token",
                        "Expiration": late.strftime("%Y-%m-%dT%H:%M:%SZ"),
                    }
                ).encode()
                self.send_response(service.status)
                self.send_header("Content-Length", str(len(body) if service.status == 200 else 0))
                self.end_headers()
                if service.status == 200:
                    self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Metadata]:
    made = Metadata()
    (tmp_path / "token").write_text("token")
    address = f"http://127.0.0.1:{made.server.server_port}/credentials"
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    yield made
    made.close()


@pytest.mark.parametrize("status", [503, 404])
def test_credentials_that_are_not_to_be_had_any_more_are_no_answer_of_the_store(
    stub: Stub, metadata: Metadata, status: int
) -> None:
    region = {"client_kwargs": {"region_name": "us-east-1"}}
    backend = opened(stub, Driver.OBSTORE, key=None, secret=None, **region)
    writer = backend.create("key")
    writer.write(0, PART)
    metadata.status = status
    for call in (
        lambda: writer.write(PART_BYTES, PART),
        lambda: backend.read_into("key", 0, memoryview(bytearray(1))),
        lambda: list(backend.scan("")),
    ):
        before = metadata.asked
        assert isinstance(refused(call), UnreachableError)
        assert metadata.asked == before + 1, "wrappers repeat"
    metadata.status = 200
    writer.write(PART_BYTES, PART)
    writer.publish()
    backend.close()


def test_the_environment_may_say_that_nothing_is_signed(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    backend = opened(stub, Driver.OBSTORE, key=None, secret=None)
    put(backend, "key", bytes(2 * PART_BYTES))
    list(backend.scan(""))
    assert stub.requests
    assert not any("X-Amz" in request for request in stub.requests)
    backend.close()


def test_an_address_of_the_environment_may_carry_no_password(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = stub.options["endpoint_url"].replace("//", f"//user:{SECRET}@")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    error = refused(lambda: opened(stub, Driver.OBSTORE, endpoint_url=None))
    assert "no credentials in" in str(error)


def replying(stub: Stub, statuses: list[int], code: str = "") -> None:
    """Let the first conditional creates be answered so; what comes then is taken."""
    left = list(reversed(statuses))

    def reply(method: str, query: dict[str, list[str]]) -> Reply:
        if method != "PUT" or not left:
            return taking(method, query)
        status = left.pop()
        return status, error_body(code) if code and status not in (200, 412) else ""

    stub.reply = reply


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([503, 200, 412], ""),
        ([200, 503, 200, 412], ""),
        ([200, 500, 503, 200, 412], "InternalError"),
        ([409, 200, 412], "ConditionalRequestConflict"),
    ],
)
def test_what_passes_at_open_is_tried_again(
    stub: Stub, driver: Driver, statuses: list[int], code: str
) -> None:
    replying(stub, statuses, code)
    made = open_backend("s3://bucket/run", options=stub.options, driver=driver, sleep=no_sleep)
    assert made.traits.conditional_create
    made.close()
    put_, deleted = (
        {request.split("?")[0].split()[1] for request in stub.requests if request.startswith(verb)}
        for verb in ("PUT", "DELETE")
    )
    assert put_ == deleted, "a probe is left behind"
    assert len(put_) > 1, "a name is used again"


@pytest.mark.parametrize(("answer_s", "waited"), [(0.0, 3), (3.5, 1), (20.0, 0)])
def test_patience_at_open_ends(stub: Stub, driver: Driver, answer_s: float, waited: int) -> None:
    """After a number of tries, or where the store takes long over its refusals, after some seconds."""
    waits: list[float] = []
    now_s = 0.0

    def busy(method: str, query: dict[str, list[str]]) -> Reply:
        nonlocal now_s
        now_s += answer_s if method == "PUT" else 0.0
        return 503, ""

    def sleep(seconds: float) -> None:
        nonlocal now_s
        waits.append(seconds)
        now_s += seconds

    stub.reply = busy
    error = refused(
        lambda: open_backend(
            "s3://bucket/run",
            options=stub.options,
            driver=driver,
            sleep=sleep,
            clock=lambda: now_s,
        )
    )
    assert type(error) is UnreachableError
    assert len(waits) == waited
    assert sum(waits) < 3


def test_a_definite_refusal_at_open_is_not_tried_again(stub: Stub, driver: Driver) -> None:
    stub.reply = lambda method, query: (403, error_body("AccessDenied"))
    waits: list[float] = []
    refused(
        lambda: open_backend(
            "s3://bucket/run", options=stub.options, driver=driver, sleep=waits.append
        )
    )
    assert waits == []


def test_probes_that_were_cut_off_are_collected(
    stub: Stub, backend: ObjectStoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = "run/.tierfall-1-0123456789abcdef.part"
    rows = "".join(
        f"<Contents><Key>{name}</Key><Size>0</Size></Contents>"
        for name in (probe, "run/.tierfall-other", "run/.tierfall-1/key")
    )

    def reply(method: str, query: dict[str, list[str]]) -> Reply:
        if "list-type" in query:
            assert query["prefix"] == ["run/.tierfall-"]
            return 200, f"<ListBucketResult>{rows}</ListBucketResult>"
        if "uploads" in query:
            return 200, "<ListMultipartUploadsResult/>"
        return taking(method, query)

    stub.reply = reply
    assert backend.discard_unfinished("") == 1
    deleted = [request.split("?")[0] for request in stub.requests if request.startswith("DELETE")]
    assert deleted == [f"DELETE /bucket/{probe}"]
    assert backend.discard_unfinished("gpt/") == 0, "probes lie at the place itself"


@pytest.mark.parametrize("url", ["memory://", "s3://{}/run"])
def test_a_probe_in_a_place_is_collected(
    url: str, bucket: str, s3_server: Any, driver: Driver
) -> None:
    place = url.format(bucket)
    options = s3_server.options() if url.startswith("s3") else {}
    backend = open_backend(place, options=options, driver=driver)
    assert isinstance(backend, ObjectStoreBackend)
    put(backend, "run/key", b"bytes")
    client = backend._client
    name = f"{client.prefix}.tierfall-1-0123456789abcdef.part"
    client.put(name, memoryview(b""), Publish.REPLACE, "leave a probe")
    assert backend.discard_unfinished("") == 1
    assert backend.discard_unfinished("") == 0
    assert get(backend, "run/key") == b"bytes"
    with suppress(BackendError):
        backend.delete("run/key")
    backend.close()


def test_a_call_for_a_listing_takes_one_row_at_open(stub: Stub) -> None:
    """A foreign name that comes first does not close a place to whoever only reads."""
    rows = "<Contents><Key>run//x</Key><Size>0</Size></Contents>"
    stub.reply = lambda method, query: (200, f"<ListBucketResult>{rows}</ListBucketResult>")
    made = open_backend("s3://bucket/run", options=stub.options, read_only=True)
    assert len(stub.requests) == 1
    assert "max-keys=1&" in stub.requests[0]
    made.close()
