"""Object stores keep every promise of the contract, through each library: a real S3 server, folders, memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from backend_places import retrying

from tests.object_store import SeaweedFS
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.obstore.client import ObstoreClient
from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Backend
from tierfall.core.types.values import Driver

BUCKET = "conformance"

Place = Callable[[str], Backend]


@pytest.fixture(scope="module")
def s3_place(s3_server: SeaweedFS) -> Place:
    s3_server.make_bucket(BUCKET)
    return lambda url: open_backend(url, options=s3_server.options())


def fresh() -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(6)}/below"


def test_s3_promises_all_that_it_can(s3_place: Place) -> None:
    """A promise that is not given is not checked below."""
    backend = s3_place(fresh())
    traits = backend.traits
    assert traits.durable
    assert traits.atomic_replace
    assert traits.conditional_create
    assert not traits.ordered_writes
    backend.close()


@pytest.mark.parametrize("name", CHECKS)
def test_s3(name: str, s3_place: Place) -> None:
    check_promise(
        name,
        lambda: s3_place(fresh()),
        reopen=lambda backend: s3_place(backend.place),
    )


@pytest.mark.parametrize("name", CHECKS)
def test_s3_behind_wrappers(name: str, s3_place: Place) -> None:
    check_promise(
        name,
        lambda: retrying(s3_place(fresh())),
        reopen=lambda backend: retrying(s3_place(backend.place)),
    )


@pytest.mark.parametrize("name", CHECKS)
def test_a_store_by_obstore(name: str, s3_server: SeaweedFS, s3_place: Place) -> None:
    """As on other stores, where no part can be sent again by itself; S3 stands in for them."""
    store = s3_server.store(BUCKET)

    def ordered(url: str) -> ObjectStoreBackend:
        prefix = url.removeprefix(f"s3://{BUCKET}/").rstrip("/") + "/"
        client = ObstoreClient(place=url, prefix=prefix, durable=True, store=store, streams=store)
        return ObjectStoreBackend(client)

    check_promise(name, lambda: ordered(fresh()), reopen=lambda backend: ordered(backend.place))


@pytest.mark.parametrize("name", CHECKS)
def test_memory_of_obstore(name: str) -> None:
    check_promise(name, lambda: open_backend("memory://", driver=Driver.OBSTORE))


@pytest.mark.parametrize("name", CHECKS)
def test_memory_of_fsspec(name: str) -> None:
    check_promise(
        name,
        lambda: open_backend(f"memory://{secrets.token_hex(6)}/below"),
        reopen=lambda backend: open_backend(backend.place),
    )


@pytest.mark.parametrize("name", CHECKS)
def test_folder_of_fsspec(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    def folder(path: Path) -> str:
        return f"file://{path}/below"

    check_promise(
        name,
        lambda: open_backend(folder(tmp_path_factory.mktemp("tier")), driver=Driver.FSSPEC),
        reopen=lambda backend: open_backend(backend.place, driver=Driver.FSSPEC),
    )
