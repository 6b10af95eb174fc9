"""Object stores keep every promise of the contract, through each library: real servers, folders, memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]

from tests import cloud_servers
from tests.object_store import SeaweedFS
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Backend
from tierfall.core.types.values import Driver

BUCKET = "conformance"

Place = Callable[[str], Backend]


@pytest.fixture(scope="module")
def s3_place(s3_server: SeaweedFS) -> Place:
    s3_server.make_bucket(BUCKET)
    return lambda url: open_backend(url, options=s3_server.options())


@pytest.fixture(scope="module")
def gs_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with cloud_servers.google(tmp_path_factory.mktemp("google")) as options:
        GCSFileSystem(project="any", **options, skip_instance_cache=True).mkdir(BUCKET)
        yield lambda url: open_backend(url, options=options)


@pytest.fixture(scope="module")
def az_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with cloud_servers.azure(tmp_path_factory.mktemp("azure")) as options:
        fsspec.filesystem("az", **options, skip_instance_cache=True).mkdir(BUCKET)
        yield lambda url: open_backend(url, options=options)


@pytest.fixture(scope="module")
def s3fs_place(s3_place: Place, s3_server: SeaweedFS) -> Place:
    return lambda url: open_backend(url, options=s3_server.options(), driver=Driver.FSSPEC)


BY_FSSPEC = {"s3": "s3fs_place", "gs": "gs_place", "az": "az_place"}


def fresh(scheme: str = "s3") -> str:
    return f"{scheme}://{BUCKET}/{secrets.token_hex(6)}/below"


def test_s3_promises_all_that_it_can(s3_place: Place) -> None:
    """A promise that is not given is not checked below."""
    backend = s3_place(fresh())
    traits = backend.traits
    assert traits.durable
    assert traits.atomic_replace
    assert traits.conditional_create
    assert not traits.ordered_writes
    backend.close()


@pytest.mark.parametrize("scheme", BY_FSSPEC)
def test_a_store_by_fsspec_promises_all_that_it_can(
    scheme: str, request: pytest.FixtureRequest
) -> None:
    traits = request.getfixturevalue(BY_FSSPEC[scheme])(fresh(scheme)).traits
    assert traits.durable
    assert traits.atomic_replace
    assert traits.conditional_create


@pytest.mark.parametrize("scheme", BY_FSSPEC)
@pytest.mark.parametrize("name", CHECKS)
def test_a_store_by_fsspec(name: str, scheme: str, request: pytest.FixtureRequest) -> None:
    place: Place = request.getfixturevalue(BY_FSSPEC[scheme])
    check_promise(name, lambda: place(fresh(scheme)), reopen=lambda backend: place(backend.place))


@pytest.mark.parametrize("name", CHECKS)
def test_s3(name: str, s3_place: Place) -> None:
    check_promise(
        name,
        lambda: s3_place(fresh()),
        reopen=lambda backend: s3_place(backend.place),
    )


@pytest.mark.parametrize("name", CHECKS)
def test_memory_of_fsspec(name: str) -> None:
    check_promise(
        name,
        lambda: open_backend(f"memory://{secrets.token_hex(6)}/below"),
        reopen=lambda backend: open_backend(backend.place),
        leaves_unfinished=False,
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
