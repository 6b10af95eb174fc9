"""Object stores keep every promise of the contract: a real S3 server, and what obstore gives for tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest
from backend_places import retrying

from tests.object_store import SeaweedFS
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.object_store import ObjectStoreBackend
from tierfall.core.contracts import Backend

BUCKET = "conformance"


@pytest.fixture(scope="module")
def s3_place(s3_server: SeaweedFS) -> Callable[[str], ObjectStoreBackend]:
    s3_server.make_bucket(BUCKET)
    return lambda url: ObjectStoreBackend(url, options=s3_server.options())


@pytest.mark.parametrize("name", CHECKS)
def test_s3(name: str, s3_place: Callable[[str], ObjectStoreBackend]) -> None:
    check_promise(
        name,
        lambda: s3_place(f"s3://{BUCKET}/{secrets.token_hex(6)}/below"),
        reopen=lambda backend: s3_place(backend.place),
    )


@pytest.mark.parametrize("name", CHECKS)
def test_s3_behind_wrappers(name: str, s3_place: Callable[[str], ObjectStoreBackend]) -> None:
    def reopen(backend: Backend) -> Backend:
        return retrying(s3_place(backend.place))

    check_promise(
        name, lambda: retrying(s3_place(f"s3://{BUCKET}/{secrets.token_hex(6)}")), reopen=reopen
    )


@pytest.mark.parametrize("name", CHECKS)
def test_memory(name: str) -> None:
    check_promise(name, lambda: ObjectStoreBackend("memory://"))
