"""What the options of ``s3://`` mean: where requests go, what they carry, what is refused, and what is shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from backend_places import put
from s3_stub import KEY, PART_BYTES, SECRET, Stub, opened, refused

from tierfall.backends.s3.client import open_client
from tierfall.core.types.errors import AccessDeniedError, ConfigError, UnreachableError

KEYS = {"key": KEY, "secret": SECRET}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")


@pytest.mark.parametrize("call", ["head", "delete", "read", "list"])
def test_a_missing_file_of_credentials_is_no_missing_object(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    client = open_client("s3://bucket/run", {"endpoint_url": "http://127.0.0.1:9"})
    calls = {
        "head": lambda: client.head("run/key", "head"),
        "delete": lambda: client.delete("run/key", "delete"),
        "read": lambda: client.read_into("run/key", 0, memoryview(bytearray(8)), "read"),
        "list": lambda: list(client.list("run/", "list")),
    }
    with pytest.raises(UnreachableError, match="No such file"):
        calls[call]()


@pytest.mark.parametrize(
    ("url", "options", "word"),
    [
        ("s3://", {}, "names no bucket"),
        ("s3://key:secret@bucket", {}, "names no bucket"),
        ("s3://bucket", {"endpoint_url": f"http://{KEY}:{SECRET}@127.0.0.1:1"}, "no credentials"),
        ("s3://bucket", {"endpoint_url": "127.0.0.1:1"}, "http"),
        ("s3://bucket", {"endpoint_url": f"{SECRET}?"}, "http"),
        ("s3://bucket", {"secrt": SECRET}, "secrt"),
        ("s3://bucket", {"username": KEY}, "username"),
        ("s3://bucket", {"client_kwargs": {"regin": SECRET}}, "regin"),
        ("s3://bucket", {"client_kwargs": "x"}, "client_kwargs"),
        ("s3://bucket", {"config_kwargs": {"read_timeot": 1}}, "read_timeot"),
        ("s3://bucket", {"config_kwargs": {"s3": {"adressing_style": "path"}}}, "adressing_style"),
        ("s3://bucket", {"config_kwargs": {"s3": {"addressing_style": "x"}}}, "style"),
        ("s3://bucket", {"config_kwargs": {"retries": {"x": 1}}}, "retry"),
        ("s3://bucket", {"client_kwargs": {"verify": "/nonexistent/ca.pem"}}, "FileNotFoundError"),
    ],
)
def test_a_wrong_address_or_option_is_refused(url: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        open_client(url, {**KEYS, **options})
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_address_of_the_environment_may_carry_no_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:1")
    with pytest.raises(ConfigError, match="no credentials in") as caught:
        open_client("s3://bucket", KEYS)
    assert SECRET not in str(caught.value)


class SentError(BaseException):
    """Ends a request before it is sent."""


AMAZON = "https://bucket.s3.eu-west-3.amazonaws.com/prefix/key"
VIRTUAL = {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}


@pytest.mark.parametrize(
    ("options", "environment", "address"),
    [
        ({}, {"AWS_REGION": "eu-west-3"}, AMAZON),
        ({}, {"AWS_DEFAULT_REGION": "eu-west-3"}, AMAZON),
        ({"client_kwargs": {"region_name": "eu-west-3"}}, {"AWS_REGION": "us-east-2"}, AMAZON),
        (
            {"config_kwargs": {"s3": {"addressing_style": "path"}}},
            {"AWS_REGION": "eu-west-3"},
            "https://s3.eu-west-3.amazonaws.com/bucket/prefix/key",
        ),
        ({"endpoint_url": "https://host:9000/"}, {}, "https://host:9000/bucket/prefix/key"),
        (
            {"client_kwargs": {"endpoint_url": "http://host"}},
            {"AWS_ENDPOINT_URL": "http://other"},
            "http://host/bucket/prefix/key",
        ),
        ({}, {"AWS_ENDPOINT_URL_S3": "http://host"}, "http://host/bucket/prefix/key"),
        ({}, {"AWS_ENDPOINT_URL": "http://host"}, "http://host/bucket/prefix/key"),
        ({}, {"AWS_ENDPOINT": "http://host"}, "http://host/bucket/prefix/key"),
        ({"endpoint_url": "http://host", **VIRTUAL}, {}, "http://bucket.host/prefix/key"),
        (
            {"endpoint_url": "http://host"},
            {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
            "http://bucket.host/prefix/key",
        ),
    ],
)
def test_options_and_environment_say_where_requests_go(
    options: dict[str, Any],
    environment: dict[str, str],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = open_client("s3://bucket/prefix", {**KEYS, **options})
    asked: list[str] = []

    def send(request: Any, **_: Any) -> None:
        asked.append(request.url.partition("?")[0])
        raise SentError

    for each in (client._service, client._parts):
        each.meta.events.register_first("before-send.s3", send)
    for call in (
        lambda: client.head("prefix/key", "look"),
        lambda: client.put_part("prefix/key", "1", 1, memoryview(b"x"), "write"),
    ):
        with pytest.raises(SentError):
            call()
    assert asked == [address] * 2
    client.close()


def test_a_bucket_of_another_region_is_followed_there_once(stub: Stub) -> None:
    backend = opened(stub)
    left = [301]
    stub.region = "eu-west-3"
    stub.reply = lambda method, query: (left.pop() if left else 200, "")
    put(backend, "key", b"bytes")
    assert stub.body == b"bytes"
    assert "/eu-west-3/s3/" in stub.headers["Authorization"]
    assert len(stub.requests) == 2
    backend.stat("key")
    assert len(stub.requests) == 3, "it is known from then on"
    stub.region = ""
    stub.requests.clear()
    stub.reply = lambda method, query: (301, "")
    assert type(refused(lambda: backend.stat("key"))) is AccessDeniedError
    assert len(stub.requests) < 4, "a store that names no region is not asked without end"
    backend.close()


def test_further_parameters_come_with_each_request_that_knows_them(stub: Stub) -> None:
    """As s3fs takes them."""
    backend = opened(
        stub, requester_pays=True, s3_additional_kwargs={"ServerSideEncryption": "aws:kms"}
    )
    put(backend, "key", b"bytes")
    assert stub.headers["x-amz-server-side-encryption"] == "aws:kms"
    backend.stat("key")
    assert "x-amz-server-side-encryption" not in stub.headers
    assert stub.headers["x-amz-request-payer"] == "requester"
    backend.create("key").write(0, memoryview(bytes(PART_BYTES)))
    assert stub.headers["x-amz-request-payer"] == "requester"
    backend.close()
