"""A tier whose answers a test chooses: a store in memory, as a plug-in brings one. ``shelf://NAME``.

What is ``hidden`` is there and can be read, and no listing shows it. What is ``absent`` is listed, and the store
answers that it is not there. What is ``refused`` raises what the store says. A client with the option ``blind`` can
read nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tierfall.backends import toolkit

SHELVES: dict[str, Shelf] = {}


@dataclass(eq=False)
class Shelf:
    """The objects of one address. ``hidden``, ``absent`` and ``refused`` are by a part of the key; ``asked`` counts
    the requests by key, and the listings by prefix; ``clients`` those of each process that has opened it. ``on_read``
    is called with each key that is read."""

    values: dict[str, bytes] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    refused: dict[str, type[toolkit.BackendError]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    on_read: Callable[[str], object] = bool
    clients: list[Counter[str]] = field(default_factory=list)

    def steps(self) -> list[int]:
        """Return the steps of which the commit record and an image are there."""
        folders = {key.split("/")[1] for key in self.values if key.endswith("/commit.json")}
        images = {key.split("/")[1] for key in self.values if ".safetensors" in key}
        return sorted(int(folder.split("-")[1]) for folder in folders & images)

    def of_step(self, step: int) -> set[str]:
        return {key for key in self.values if f"/step-{step:08d}-" in key}


@toolkit.register("shelf")
class _Store(toolkit.ObjectStore):
    durable = conditional_create = True

    def __init__(self, url: str, *, options: Any, read_only: bool) -> None:
        self.shelf = SHELVES[url.removeprefix("shelf://")]
        self.is_blind = "blind" in options
        self.asked: Counter[str] = Counter()
        self.shelf.clients.append(self.asked)

    def get(self, key: str, start: int, end: int) -> tuple[bytes, int] | None:
        shelf = self.shelf
        self._ask(key)
        shelf.on_read(key)
        if self.is_blind:
            raise toolkit.UnreachableError(f"{key}: no way to it")
        for part, error in shelf.refused.items():
            if part in key:
                raise error(f"{key}: refused")
        value = shelf.values.get(key)
        if value is None or any(part in key for part in shelf.absent):
            return None
        return value[start:end], len(value)

    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        self._ask(key)
        if if_absent and key in self.shelf.values:
            return False
        self.shelf.values[key] = bytes(data)
        return True

    def delete(self, key: str) -> None:
        self._ask(key)
        self.shelf.values.pop(key, None)

    def list(self, prefix: str, delimiter: str) -> Iterable[toolkit.StoredObject]:
        self._ask(prefix)
        if self.is_blind:
            raise toolkit.UnreachableError(f"{prefix}: no way to it")
        return [
            toolkit.StoredObject(key=key, bytes=len(value))
            for key, value in list(self.shelf.values.items())
            if key.startswith(prefix) and not any(part in key for part in self.shelf.hidden)
        ]

    def _ask(self, key: str) -> None:
        self.shelf.asked[key] += 1
        self.asked[key] += 1


def new_shelf(name: str) -> Iterator[Shelf]:
    SHELVES[name] = Shelf()
    yield SHELVES[name]
    del SHELVES[name]
