"""A URL names its backend: which library serves it, what is refused, and what messages may show of it."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

import pytest
from backend_places import get, put
from fsspec.registry import _registry  # type: ignore[import-untyped]

from tests.object_store import SECRET
from tierfall.backends.fsspec.client import FsspecClient
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import check_url, open_backend, place_of
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    UnreachableError,
)
from tierfall.core.types.values import Driver


def client_of(backend: Backend) -> Any:
    assert isinstance(backend, ObjectStoreBackend)
    return backend._client


def test_memory_is_one_for_the_process() -> None:
    url = f"memory://{secrets.token_hex(6)}"
    put(open_backend(url), "run/key", b"bytes")
    second = open_backend(url)
    assert isinstance(client_of(second), FsspecClient)
    assert get(second, "run/key") == b"bytes"
    assert get(open_backend(f"{url}/run"), "key") == b"bytes"
    assert list(open_backend(f"{url}/ru").scan("")) == []
    assert not second.traits.durable


@pytest.mark.parametrize(
    ("protocol", "package", "module"),
    [("gs", "gcsfs", "gcsfs.core"), ("abfs", "adlfs", "adlfs"), ("s3", "s3fs", "s3fs")],
)
def test_a_missing_package_is_named(
    protocol: str, package: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(_registry, protocol, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        open_backend(f"{protocol}://bucket", driver=Driver.FSSPEC)


@pytest.mark.parametrize(
    ("url", "options", "driver", "word"),
    [
        ("s3://bucket", {"secrt": SECRET}, Driver.FSSPEC, "secrt"),
        ("s3://bucket", {"config_kwargs": SECRET}, Driver.FSSPEC, "does not accept"),
        ("gs://bucket", {"tokn": SECRET}, None, 'tokn; did you mean "token"'),
        ("az://bucket", {"account_nam": SECRET}, None, 'did you mean "account_name"'),
        ("az://bucket", {"connection_string": SECRET}, None, "does not accept"),
        ("nothing://x", {}, None, "not known"),
        ("file:///tmp", {"auto_mkdir": True}, None, "auto_mkdir"),
    ],
)
def test_what_does_not_go_together_is_refused(
    url: str, options: dict[str, Any], driver: Driver | None, word: str
) -> None:
    with pytest.raises((ConfigError, BackendError), match=word) as caught:
        open_backend(url, options=options, driver=driver)
    assert not caught.value.retryable
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)


SHOWN = [
    ("s3://bucket/a b/c#d%", "s3://bucket/a b/c#d%"),
    ("s3://key:secret@bucket/prefix", "s3://bucket/prefix"),
    ("s3://key:sec/r+et@bucket/prefix", "s3://bucket/prefix"),
    ("s3://key:s@cr@t@bucket/prefix", "s3://bucket/prefix"),
    ("s3://key@bucket", "s3://bucket"),
    ("az://container/p?sig=secret", "az://container/p"),
    ("abfss://box@acc.dfs.core.windows.net/p", "abfss://box@acc.dfs.core.windows.net/p"),
    ("abfss://box:secret@acc.dfs.core.windows.net/p", "abfss://acc.dfs.core.windows.net/p"),
    ("hdfs://host:8020/a", "hdfs://host:8020/a"),
    ("sftp://user:1234/secret@host/path", "sftp://host/path"),
    ("file:///a/b", "file:///a/b"),
    ("memory://", "memory://"),
    ("key:secret@bucket", "(no URL)"),
    ("", "(no URL)"),
]


@pytest.mark.parametrize(("url", "shown"), SHOWN)
def test_messages_show_no_credential(url: str, shown: str) -> None:
    assert place_of(url) == shown


GOOD = [
    "s3://bucket",
    "s3://bucket/prefix/",
    "gs://bucket/p",
    "gcs://bucket",
    "az://container",
    "abfss://box@acc.dfs.core.windows.net/p",
    "file:///a/b",
    "memory://",
    "memory://x/y",
    "hdfs://host:8020/a",
    "sftp://user@host:22/p",
]


@pytest.mark.parametrize("url", GOOD)
def test_what_is_good_passes(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("", "no URL"),
        ("bucket/prefix", "no URL"),
        ("/folder", "no URL"),
        ("S3://bucket", "no URL"),
        ("simplecache::s3://bucket", "no URL"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("gs://", "names no bucket"),
        ("az:///p", "names no bucket"),
        ("s3://bucket:9000/p", "names no bucket"),
        ("s3://key:secret@bucket", "user and password"),
        ("s3://key:sec/ret@bucket", "user and password"),
        ("sftp://user:secret@host/p", "user and password"),
        ("s3://key@bucket", "before a bucket"),
        ("az://container/p?sig=secret", "under options"),
        ("file://folder", "absolute"),
        ("s3a://bucket/prefix", "s3://bucket"),
        ("sftp://user:1234/secret@host/path", "user and password"),
        ("hdfs://host:8020/a@b", "no ':' before an '@'"),
    ],
)
def test_what_is_wrong_with_a_url_is_reported(url: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        check_url(url)
    with pytest.raises(ConfigError, match=word):
        open_backend(url)
    for secret in ("secret", "sec/ret", "key"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("driver", [None, Driver.FSSPEC])
def test_a_place_opened_for_reading_is_not_changed(tmp_path: Path, driver: Driver | None) -> None:
    url = f"file://{tmp_path}/tier"
    with pytest.raises(UnreachableError):
        open_backend(url, driver=driver, read_only=True)
    assert not (tmp_path / "tier").exists()
    writing = open_backend(url, driver=driver)
    put(writing, "key", b"bytes")
    reading = open_backend(url, driver=driver, read_only=True)
    assert get(reading, "key") == b"bytes"
    for call in (
        lambda: reading.create("key"),
        lambda: reading.delete("key"),
        lambda: reading.delete_some(["key", "other"]),
        lambda: reading.discard_unfinished(""),
    ):
        with pytest.raises(AccessDeniedError):
            call()
    for each in (writing, reading):
        each.close()
