"""Where credentials of ``s3://`` come from, that they are renewed in mid-run, and what is said where there are none."""

from __future__ import annotations

import gc
import http.server
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from backend_places import put
from botocore.utils import ContainerMetadataFetcher  # type: ignore[import-untyped]
from s3_stub import KEY, PART_BYTES, SECRET, Stub, error_body, opened, refused

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.core.types.errors import AccessDeniedError, ConfigError, UnreachableError

# botocore leaves connections to what issues credentials to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

PART = memoryview(bytes(PART_BYTES))
LONG = timedelta(hours=6)
# Below this botocore asks for others before each request.
SHORT = timedelta(minutes=5)
STS = """<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey><SessionToken>token</SessionToken>
<Expiration>{expiration}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


class Issuer:
    """Hands out credentials on loopback, each under a key id of its own, as containers, instances and STS do. STS waits
    for ``silence`` to be set."""

    def __init__(self) -> None:
        self.status = 200
        self.lifetime = LONG
        self.issued = 0
        self.silence = threading.Event()
        self.silence.set()
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith("/security-credentials/"):
                    self.reply("role")
                else:
                    self.reply(json.dumps(issuer.issue()))

            def do_PUT(self) -> None:
                self.reply("a token of the instance")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                issuer.silence.wait(30)
                found = issuer.issue()
                good = STS.format(
                    key=found["AccessKeyId"], secret=SECRET, expiration=found["Expiration"]
                )
                self.reply(good if issuer.status == 200 else error_body("AccessDenied"))

            def reply(self, text: str) -> None:
                self.send_response(issuer.status)
                self.send_header("Content-Length", str(len(text)))
                with suppress(ConnectionError):
                    # Whoever gave up has not waited for it.
                    self.end_headers()
                    self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def issue(self) -> dict[str, str]:
        self.issued += 1
        late = datetime.now(UTC) + self.lifetime
        return {
            "Code": "Success",
            "AccessKeyId": f"{KEY}-{self.issued}",
            "SecretAccessKey": SECRET,
            "Token": "token",
            "Expiration": late.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def close(self) -> None:
        self.silence.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    yield
    gc.collect()


def of_container(issuer: Issuer, patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "token").write_text("token")
    patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.url}/credentials")
    patch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(folder / "token"))


def by_web_identity(issuer: Issuer, patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "identity").write_text("an identity")
    patch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(folder / "identity"))
    patch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
    patch.setenv("AWS_ENDPOINT_URL_STS", issuer.url)
    patch.setenv("AWS_REGION", "eu-west-3")


Source = Callable[[Issuer, pytest.MonkeyPatch, Path], None]


def opened_without_keys(stub: Stub, **options: Any) -> ObjectStoreBackend:
    return opened(stub, key=None, secret=None, **options)


# An instance's service may be down: botocore then goes on with what it has.
@pytest.mark.parametrize("source", [of_container, by_web_identity])
def test_credentials_that_expire_are_renewed_in_mid_run(
    stub: Stub, issuer: Issuer, source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source(issuer, monkeypatch, tmp_path)
    issuer.lifetime = SHORT
    backend = opened_without_keys(stub)
    with backend.create("key") as writer:
        writer.write(0, PART)
        before = issuer.issued
        issuer.lifetime = LONG
        writer.write(PART_BYTES, PART)
        assert issuer.issued == before + 1
        assert f"Credential={KEY}-{issuer.issued}/" in stub.headers["Authorization"]
        writer.publish()
    assert issuer.issued == before + 1
    backend.close()


@pytest.mark.parametrize("status", [503, 404])
def test_credentials_that_cannot_be_renewed_are_no_answer_of_the_store(
    stub: Stub, issuer: Issuer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    of_container(issuer, monkeypatch, tmp_path)
    issuer.lifetime = SHORT
    backend = opened_without_keys(stub)
    writer = backend.create("key")
    writer.write(0, PART)
    issuer.status = status
    stub.requests.clear()
    for call in (
        lambda: writer.write(PART_BYTES, PART),
        lambda: backend.read_into("key", 0, memoryview(bytearray(1))),
        lambda: list(backend.scan("")),
    ):
        assert type(refused(call)) is UnreachableError
    assert stub.requests == []
    issuer.status = 200
    writer.write(PART_BYTES, PART)
    writer.publish()
    backend.close()


def test_a_role_that_is_refused_is_named_as_what_is_wrong(
    stub: Stub, issuer: Issuer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_web_identity(issuer, monkeypatch, tmp_path)
    issuer.status = 403
    error = refused(lambda: opened_without_keys(stub))
    assert type(error) is AccessDeniedError
    assert "AssumeRoleWithWebIdentity" in str(error)
    assert stub.requests == []


def test_without_credentials_it_is_reported_at_once(stub: Stub) -> None:
    waits: list[float] = []
    options = {**stub.options, "key": None, "secret": None}
    error = refused(lambda: open_backend("s3://bucket/run", options=options, sleep=waits.append))
    assert type(error) is AccessDeniedError
    assert "no credentials were found" in str(error)
    assert stub.requests == []
    assert waits == []


@pytest.mark.parametrize("by", ["option", "environment"])
def test_credentials_stand_in_a_profile(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    (tmp_path / "credentials").write_text(
        f"[other]\naws_access_key_id = {KEY}-other\naws_secret_access_key = {SECRET}\n"
    )
    if by == "environment":
        monkeypatch.setenv("AWS_PROFILE", "other")
    backend = opened_without_keys(stub, **({"profile": "other"} if by == "option" else {}))
    put(backend, "key", b"bytes")
    assert f"Credential={KEY}-other/" in stub.headers["Authorization"]
    backend.close()
    with pytest.raises(ConfigError, match="profile"):
        opened_without_keys(stub, profile="missing")


@pytest.mark.parametrize("options", [{"key": KEY}, {"secret": SECRET}])
def test_half_a_credential_is_none(stub: Stub, options: dict[str, Any]) -> None:
    error = refused(lambda: opened(stub, **{"key": None, "secret": None, **options}))
    assert type(error) is AccessDeniedError


@pytest.mark.parametrize("by", ["option", "environment"])
def test_nothing_is_signed_where_that_is_asked_for(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    backend = opened_without_keys(stub, **({"anon": True} if by == "option" else {}))
    for call in (
        lambda: put(backend, "key", bytes(2 * PART_BYTES)),
        lambda: list(backend.scan("")),
    ):
        call()
        assert "Authorization" not in stub.headers
    backend.close()


def test_no_log_shows_a_credential(
    stub: Stub,
    issuer: Issuer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_web_identity(issuer, monkeypatch, tmp_path)
    caplog.set_level(logging.DEBUG)
    backend = opened_without_keys(stub)
    put(backend, "key", b"bytes")
    backend.close()
    output = caplog.text + "".join(str(record.args) for record in caplog.records)
    for secret in (SECRET, KEY, "an identity", "'token'"):
        assert secret not in output
