"""A client of a plug-in's store. The store's exceptions, and answers of another type, are raised as BackendErrors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from tierfall.backends.object.client import ObjectClient
from tierfall.backends.toolkit.object_store import MultipartStore, ObjectStore
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish, StoredObject
from tierfall.core.types.errors import (
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    TierfallError,
)


class StoreClient(ObjectClient):
    """See ``ObjectClient``. ``place`` names the store in messages, such as its address, without a credential."""

    def __init__(self, store: ObjectStore, *, place: str) -> None:
        self._store = store
        self.place = place
        self.durable = store.durable
        self.supports_if_absent = store.conditional_create
        self.max_parallel = store.max_parallel
        self.takes_parts = isinstance(store, MultipartStore)

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        if_absent = publish is Publish.IF_ABSENT
        with self.translated(what):
            is_new = self._store.put(key, data.toreadonly(), if_absent)
            if if_absent and not isinstance(is_new, bool):
                raise BackendError(
                    f"{what}: {self._name}.put returned {is_new!r:.40}; expected True, or False if the key is taken"
                )
        if if_absent and not is_new:
            raise KeyExistsError(f"{what}: the key is taken")

    def head(self, key: str, what: str) -> int:
        return self._get(key, 0, 0, what)[1]

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        data, _ = self._get(key, offset, offset + view.nbytes, what)
        if data.nbytes > view.nbytes:
            raise BackendError(
                f"{what}: {self._name}.get returned more bytes than it was asked for"
            )
        copy_bytes(view[: data.nbytes], data)
        return data.nbytes

    def list(self, prefix: str, what: str) -> Iterator[StoredObject]:
        folder, slash, start = prefix.rpartition("/")
        with self.translated(what):
            found = list(self._store.list(folder + slash, "/" if start else ""))
        for each in found:
            if not isinstance(each, StoredObject):
                raise BackendError(
                    f"{what}: {self._name}.list returned {each!r:.40}; expected a StoredObject(key=..., bytes=...) "
                    "for each object"
                )
            if each.key.startswith(prefix):
                yield each

    def delete(self, key: str, what: str) -> None:
        with self.translated(what):
            self._store.delete(key)

    def begin(self, key: str, what: str) -> str:
        with self.translated(what):
            return self._text(self._parts.begin(key), "begin", what)

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        with self.translated(what):
            mark = self._parts.put_part(key, upload, number, view.toreadonly())
            return self._text(mark, "put_part", what)

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        with self.translated(what):
            self._parts.complete(key, upload, parts)

    def pending(self, prefix: str, what: str) -> Sequence[tuple[str, str]]:
        with self.translated(what):
            return list(self._parts.pending(prefix)) if self.takes_parts else ()

    def abort(self, key: str, unfinished: str, what: str) -> None:
        with self.translated(what):
            self._parts.abort(key, unfinished)

    def check_open(self, *, read_only: bool) -> None:
        """Do nothing: the store was opened when it was constructed."""

    def close(self) -> None:
        with self.translated(f"close {self.place}"):
            self._store.close()

    def _get(self, key: str, start: int, end: int, what: str) -> tuple[memoryview, int]:
        with self.translated(what):
            found = self._store.get(key, start, end)
            if found is None:
                raise KeyNotFoundError(f"{what}: there is no such object")
            match found:
                case (bytes() | bytearray() | memoryview() as data, int() as length):
                    return flat(memoryview(data)), length
            raise BackendError(
                f"{what}: {self._name}.get returned {found!r:.40}; expected bytes and the object's length, or None if "
                "there is no object"
            )

    def _text(self, answer: object, call: str, what: str) -> str:
        if isinstance(answer, str) and answer:
            return answer
        raise BackendError(f"{what}: {self._name}.{call} returned {answer!r:.40}; expected a text")

    @property
    def _parts(self) -> MultipartStore:
        return cast(MultipartStore, self._store)

    @property
    def _name(self) -> str:
        return type(self._store).__name__

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Raise exceptions of the store's library as ``error_type`` classifies them."""
        try:
            yield
        except TierfallError:
            raise
        except Exception as error:
            raise self._store.error_type(error)(f"{what}: {error!r}") from error
