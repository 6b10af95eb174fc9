"""s3:// through obstore: what options mean, where parts go, what is shown, and how requests are signed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from s3_stub import KEY, SECRET, refused

from tierfall.backends.obstore.options import open_client
from tierfall.backends.s3.signing import Keys, sign_with


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://", {}),
        ("s3://key:secret@bucket", {}),
        ("ftp://bucket", {}),
        ("s3://bucket/a/../b", {}),
        ("s3://bucket", {"endpoint_url": f"http://{KEY}:{SECRET}@127.0.0.1:1"}),
        ("s3://bucket", {"endpoint_url": "127.0.0.1:1"}),
        ("s3://bucket", {"secrt": SECRET}),
        ("s3://bucket", {"client_kwargs": {"regin": "x"}}),
        ("s3://bucket", {"client_kwargs": "x"}),
        ("s3://bucket", {"config_kwargs": {"s3": {"adressing_style": "virtual"}}}),
        ("memory://", {"key": KEY}),
    ],
)
def test_a_wrong_address_or_option_is_refused(url: str, options: dict[str, Any]) -> None:
    assert not refused(lambda: open_client(url, options)).retryable


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, "https://s3.eu-west-3.amazonaws.com/bucket"),
        (
            {"config_kwargs": {"s3": {"addressing_style": "virtual"}}},
            "https://bucket.s3.eu-west-3.amazonaws.com",
        ),
        ({"endpoint_url": "https://host:9000/"}, "https://host:9000/bucket"),
        (
            {"client_kwargs": {"region_name": "eu-west-3"}},
            "https://s3.eu-west-3.amazonaws.com/bucket",
        ),
    ],
)
def test_parts_go_where_obstore_goes(
    options: dict[str, Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    keys = {"key": KEY, "secret": SECRET, "token": "token"}
    for credentials in ({}, keys, {"anon": True}):
        uploads = open_client("s3://bucket/prefix", {**credentials, **options}).uploads
        assert uploads is not None
        assert uploads.lines.address == address
    signing = open_client("s3://bucket", {**keys, **options}).uploads
    assert signing is not None
    assert "%2Feu-west-3%2Fs3%2F" in signing.sign("GET", address, "look")


def test_nothing_shows_a_credential() -> None:
    options = {"key": KEY, "secret": SECRET, "endpoint_url": "http://127.0.0.1:1"}
    client = open_client("s3://bucket", options)
    for each in (client, client.uploads, vars(client.uploads), client.store, client.streams):
        assert SECRET not in repr(each), repr(each)
        assert KEY not in repr(each), repr(each)


def test_the_signature_is_the_one_that_is_documented() -> None:
    """The example of "Authenticating Requests: Using Query Parameters" in the Amazon S3 API Reference."""
    keys = Keys(
        key="AKIAIOSFODNN7EXAMPLE",
        secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        region="us-east-1",
    )
    url = sign_with(
        keys,
        "GET",
        "https://examplebucket.s3.amazonaws.com/test.txt",
        now=datetime(2013, 5, 24, tzinfo=UTC),
        valid=timedelta(days=1),
    )
    assert url.endswith("=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404")
