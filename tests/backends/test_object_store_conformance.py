"""Object stores keep every promise of the contract, through each library: a real S3 server, folders, memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from backend_places import retrying

from tests.object_store import SeaweedFS
from tierfall.backends.conformance.suite import CHECKS, check_promise
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.obstore.options import open_client
from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Backend
from tierfall.core.types.values import Driver

BUCKET = "conformance"

Place = Callable[[str, Driver], Backend]


@pytest.fixture(scope="module")
def s3_place(s3_server: SeaweedFS) -> Place:
    s3_server.make_bucket(BUCKET)
    return lambda url, driver: open_backend(url, options=s3_server.options(), driver=driver)


def fresh() -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(6)}/below"


@pytest.mark.parametrize("driver", Driver)
def test_s3_promises_all_that_it_can(driver: Driver, s3_place: Place) -> None:
    """A promise that is not given is not checked below."""
    backend = s3_place(fresh(), driver)
    traits = backend.traits
    assert traits.durable
    assert traits.atomic_replace
    assert traits.conditional_create
    assert not traits.ordered_writes
    backend.close()


@pytest.mark.parametrize("driver", Driver)
@pytest.mark.parametrize("name", CHECKS)
def test_s3(name: str, driver: Driver, s3_place: Place) -> None:
    check_promise(
        name,
        lambda: s3_place(fresh(), driver),
        reopen=lambda backend: s3_place(backend.place, driver),
    )


@pytest.mark.parametrize("driver", Driver)
@pytest.mark.parametrize("name", CHECKS)
def test_s3_behind_wrappers(name: str, driver: Driver, s3_place: Place) -> None:
    check_promise(
        name,
        lambda: retrying(s3_place(fresh(), driver)),
        reopen=lambda backend: retrying(s3_place(backend.place, driver)),
    )


@pytest.mark.parametrize("name", CHECKS)
def test_s3_by_obstores_own_writer(name: str, s3_server: SeaweedFS, s3_place: Place) -> None:
    """As on other stores, where no part can be sent again by itself."""

    def ordered(url: str) -> ObjectStoreBackend:
        client = open_client(url, s3_server.options())
        client.close()
        return ObjectStoreBackend(replace(client, uploads=None))

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
