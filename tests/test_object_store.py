"""The S3 server of the tests: it keeps objects and uploads over a crash, and refuses unknown credentials."""

from __future__ import annotations

from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from tests.object_store import SeaweedFS


def test_objects_come_back(s3_server: SeaweedFS, bucket: str) -> None:
    store = s3_server.bucket(bucket)
    store.put("a/b", b"bytes")
    assert store.get("a/b") == b"bytes"
    with pytest.raises(ClientError, match="PreconditionFailed"):
        store.put("a/b", b"other", IfNoneMatch="*")
    assert store.keys("a/") == ["a/b"]


def test_strangers_and_missing_buckets_are_refused(s3_server: SeaweedFS, bucket: str) -> None:
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        s3_server.bucket(bucket, aws_secret_access_key="wrong").put("key", b"")
    with pytest.raises(ClientError, match="NoSuchBucket"):
        s3_server.bucket("missing").put("key", b"")


def test_a_crash_keeps_what_was_published(tmp_path: Path) -> None:
    server = SeaweedFS(tmp_path)
    try:
        server.start()
        server.make_bucket("first")
        server.bucket("first").put("key", b"bytes")
        server.kill()
        with pytest.raises(BotoCoreError):
            server.bucket("first").get("key")
        server.start()
        server.make_bucket("first")
        assert server.bucket("first").get("key") == b"bytes"
    finally:
        server.kill()
