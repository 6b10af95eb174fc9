"""The S3 server of the tests: it keeps objects and uploads over a crash, and refuses unknown credentials."""

from __future__ import annotations

from pathlib import Path

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError

from tests.object_store import SeaweedFS


def test_objects_come_back(s3_server: SeaweedFS, bucket: str) -> None:
    store = s3_server.store(bucket)
    obstore.put(store, "a/b", b"bytes")
    assert bytes(obstore.get(store, "a/b").bytes()) == b"bytes"
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a/b", b"other", mode="create")


def test_strangers_and_missing_buckets_are_refused(s3_server: SeaweedFS, bucket: str) -> None:
    with pytest.raises(PermissionDeniedError):
        obstore.put(s3_server.store(bucket, secret_access_key="wrong"), "key", b"")
    with pytest.raises(FileNotFoundError):
        obstore.put(s3_server.store("missing"), "key", b"")


def test_a_crash_keeps_what_was_published(tmp_path: Path) -> None:
    server = SeaweedFS(tmp_path)
    try:
        server.start()
        server.make_bucket("first")
        obstore.put(server.store("first"), "key", b"bytes")
        server.kill()
        with pytest.raises(obstore.exceptions.BaseError):
            obstore.head(server.store("first"), "key")
        server.start()
        server.make_bucket("first")
        assert bytes(obstore.get(server.store("first"), "key").bytes()) == b"bytes"
    finally:
        server.kill()
