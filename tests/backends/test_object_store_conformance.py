"""Object stores keep every promise of the contract, through each library: real servers, folders, memory.

``make test`` runs every check on S3 by our own client and on Google's by fsspec, and on each store what a run needs
most; ``make torture`` runs all of them everywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from backend_places import get, put

from tests.object_store import SeaweedFS
from tests.places import BUCKET, Azure, Google
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.conformance.kit import in_threads
from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Backend, Publish, delete_all
from tierfall.core.types.errors import BackendError, KeyExistsError, KeyNotFoundError
from tierfall.core.types.values import Driver

Place = Callable[[str], Backend]


@pytest.fixture(scope="module")
def s3_place(s3_server: SeaweedFS) -> Place:
    s3_server.make_bucket(BUCKET)
    return lambda url: open_backend(url, options=s3_server.options())


@pytest.fixture(scope="module")
def gs_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with closing(Google(tmp_path_factory.mktemp("google"), in_memory=True)) as service:
        service.start()
        yield lambda url: open_backend(url, options=service.options)


@pytest.fixture(scope="module")
def az_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with closing(Azure(tmp_path_factory.mktemp("azure"))) as service:
        service.start()
        yield lambda url: open_backend(url, options=service.options)


@pytest.fixture(scope="module")
def s3fs_place(s3_place: Place, s3_server: SeaweedFS) -> Place:
    return lambda url: open_backend(url, options=s3_server.options(), driver=Driver.FSSPEC)


PLACES = {"s3": "s3_place", "s3fs": "s3fs_place", "gs": "gs_place", "az": "az_place"}
SLOW = ("conditional_create_has_one_winner", "disjoint_ranges_from_threads")
"""Many requests at once for one key hold SeaweedFS up for seconds; of the core below in small."""
DATA = b"0123456789abcdef" * (11 << 16)
PART_BYTES = 6 << 20


def fresh(name: str = "s3") -> str:
    return f"{name.removesuffix('fs')}://{BUCKET}/{secrets.token_hex(6)}/below"


def on(*quick: str) -> list[object]:
    """Each check on each store; a torture but for those of ``quick`` that are not slow."""
    return [
        pytest.param(
            name, store, marks=[pytest.mark.torture] if store not in quick or name in SLOW else []
        )
        for store in PLACES
        for name in CHECKS
    ]


@pytest.mark.parametrize("store", PLACES)
def test_a_missing_bucket_is_refused(store: str, request: pytest.FixtureRequest) -> None:
    place: Place = request.getfixturevalue(PLACES[store])
    with pytest.raises(BackendError, match="there is no such bucket; make it, or name another"):
        place(fresh(store).replace(BUCKET, "no-such-bucket"))


@pytest.mark.parametrize("store", PLACES)
def test_a_store_keeps_what_a_run_needs_most(store: str, request: pytest.FixtureRequest) -> None:
    """Create, read, list, an upload in parts, a create under a condition, an abort, a delete."""
    place: Place = request.getfixturevalue(PLACES[store])
    with closing(place(fresh(store))) as backend:
        traits = backend.traits
        assert (traits.durable, traits.atomic_replace, traits.conditional_create) == (True,) * 3
        assert traits.ordered_writes is (store != "s3"), "what is not promised is not checked"
        put(backend, "run/a", b"old")
        for ends in (False, True):
            with backend.create("run/a", length=len(DATA)) as writer:
                for start in range(0, len(DATA), PART_BYTES):
                    writer.write(start, memoryview(DATA)[start : start + PART_BYTES])
                assert get(backend, "run/a") == b"old"
                if ends:
                    writer.publish()
        assert get(backend, "run/a") == DATA
        errors = in_threads(
            2, lambda index: put(backend, "run/b", bytes([index]), publish=Publish.IF_ABSENT)
        )
        (winner,) = (index for index, error in enumerate(errors) if error is None)
        assert all(isinstance(error, KeyExistsError) for error in errors if error is not None)
        assert get(backend, "run/b") == bytes([winner])
        with closing(place(backend.place)) as second:
            found = [(each.key, each.bytes) for each in second.scan("run/")]
            assert found == [("run/a", len(DATA)), ("run/b", 1)]
            assert second.discard_unfinished("") == 0
        delete_all(backend, ["run/a", "run/b", "run/none"])
        assert list(backend.scan("")) == []
        with pytest.raises(KeyNotFoundError):
            backend.stat("run/a")


@pytest.mark.parametrize(("name", "store"), on("s3", "gs"))
def test_a_store_keeps_each_promise(name: str, store: str, request: pytest.FixtureRequest) -> None:
    place: Place = request.getfixturevalue(PLACES[store])
    check_promise(name, lambda: place(fresh(store)), reopen=lambda backend: place(backend.place))


@pytest.mark.torture
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
