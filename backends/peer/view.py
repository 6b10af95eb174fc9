"""A node's view of peer memory: the images that it keeps for others, and those that it writes to another node.

The images of a lost node are in another node's memory, which lists them at the next start. So the files of an earlier
attempt are read from this node's own memory. The files of this attempt are written to the other node, and read from
there. Documents that belong to no checkpoint, such as the attempts' records, are written to the other node, and read
from either.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from tierfall.backends.toolkit.keys import check_key
from tierfall.backends.wrappers.base import Wrapper
from tierfall.core.types.backend import Backend, Publish, StoredObject, Writer
from tierfall.core.types.errors import KeyNotFoundError
from tierfall.core.types.keys import ATTEMPTS_FOLDER, parse_attempt, parse_step_folder


class PeerView(Wrapper):
    """A ``Backend`` over two: ``kept`` is in this node's memory, ``remote`` in another's.

    ``attempt`` is the number of the attempt that writes: of the last attempt's record that was created here; None
    before that.
    """

    def __init__(self, kept: Backend, remote: Backend) -> None:
        super().__init__(remote)
        self._kept = kept
        self._remote = remote
        self.attempt: int | None = None

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        folder, _, name = key.rpartition("/")
        if folder.endswith(f"/{ATTEMPTS_FOLDER}"):
            self.attempt = parse_attempt(name)
        side = self._side(key) or self._remote
        return side.create(key, length=length, length_max=length_max, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self._holder(key).read_into(key, offset, view)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        side = self._side(key)
        return side is not None and side.read_cached(key, offset, end, views)

    def stat(self, key: str) -> StoredObject:
        if (side := self._side(key)) is not None:
            return side.stat(key)
        try:
            return self._remote.stat(key)
        except KeyNotFoundError:
            return self._kept.stat(key)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        if (side := self._side(prefix)) is not None:
            yield from side.scan(prefix)
            return
        last = ""
        sides = (self._of(self._remote, prefix), self._of(self._kept, prefix))
        for found in heapq.merge(*sides, key=lambda each: each.key):
            if found.key != last:  # both have such a document
                yield found
            last = found.key

    def delete(self, key: str) -> None:
        for side in self._sides(key):
            side.delete(key)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        keys = [check_key(key) for key in keys]
        sides = self._sides(keys[0])
        selected = [key for key in keys if self._sides(key) == sides]
        if len(sides) == 1:
            left = sides[0].delete_some(selected)
        else:
            self.delete(selected[0])
            left = selected[1:]
        return [*left, *(key for key in keys if self._sides(key) != sides)]

    def discard_unfinished(self, prefix: str) -> int:
        return sum(side.discard_unfinished(prefix) for side in self._sides(prefix))

    def close(self) -> None:
        try:
            self._remote.close()
        finally:
            self._kept.close()

    def _side(self, key: str) -> Backend | None:
        """Return who has the files of a checkpoint; None for what belongs to none."""
        found = (parse_step_folder(part) for part in key.split("/"))
        checkpoint = next((each for each in found if each is not None), None)
        if checkpoint is None:
            return None
        return self._remote if checkpoint.attempt == self.attempt else self._kept

    def _sides(self, key: str) -> tuple[Backend, ...]:
        side = self._side(key)
        return (self._remote, self._kept) if side is None else (side,)

    def _of(self, side: Backend, prefix: str) -> Iterator[StoredObject]:
        return (each for each in side.scan(prefix) if self._side(each.key) in (None, side))

    def _holder(self, key: str) -> Backend:
        if (side := self._side(key)) is not None:
            return side
        try:
            self._remote.stat(key)
        except KeyNotFoundError:
            return self._kept
        return self._remote
