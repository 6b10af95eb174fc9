"""A node's view of peer memory: the images that it keeps for others, and those that it writes to other nodes.

The images of a lost node are in other nodes' memory, which list them at the next start. So the files of an earlier
attempt are read from this node's own memory. The files of this attempt are written to each of the nodes that keep a
copy, and read from the first of them that answers. So are those of a checkpoint of an earlier attempt that this
process adopts and writes, of which this node may keep another's files. Documents that belong to no checkpoint, such as
the attempts' records, are written to these nodes, too, and read from any of them, or from this node's memory.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from tierfall.backends.peer.copies import CopiesWriter
from tierfall.backends.peer.united import UnitedRecords, UnitingWriter
from tierfall.backends.toolkit.base import describe
from tierfall.backends.toolkit.keys import check_key, check_prefix
from tierfall.backends.wrappers.base import Wrapper
from tierfall.core.types.backend import Backend, Publish, StoredObject, Writer, delete_all
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    UnreachableError,
)
from tierfall.core.types.keys import (
    ATTEMPTS_FOLDER,
    COMMIT_NAME,
    parse_attempt,
    parse_step_folder,
)
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")
T = TypeVar("T")
_KEY = attrgetter("key")


class PeerView(Wrapper):
    """A ``Backend`` over several: ``kept`` are in this node's memory, each with what one other node has sent in a
    start; ``remotes`` are in other nodes' memory, one for each copy. Without ``remotes`` it is only read.

    ``attempt`` is the number of the attempt that writes: of the last attempt's record that was created here; None
    before that.
    """

    def __init__(
        self,
        kept: Sequence[Backend],
        remotes: Sequence[Backend],
        *,
        place: str = "",
    ) -> None:
        super().__init__((*remotes, *kept)[0])
        self._kept = tuple(kept)
        self._remotes = tuple(remotes)
        self._place = place or " and ".join(remote.place for remote in remotes)
        self._records = UnitedRecords(self._kept)
        self._silent: list[Backend] = []
        """The remotes that have not answered before this node wrote."""
        self._adopted: set[CheckpointId] = set()
        """The checkpoints of earlier attempts of which this process writes files."""
        self.attempt: int | None = None

    @property
    def place(self) -> str:
        return self._place

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        if not self._remotes:
            raise AccessDeniedError(
                f"{describe('create', key, self.place)}: only the ranks of a start write to other nodes' memory"
            )
        folder, _, name = key.rpartition("/")
        if folder.endswith(f"/{ATTEMPTS_FOLDER}"):
            self.attempt = parse_attempt(name)
        if self._is_kept(key):
            self._adopted.update(filter(None, [_checkpoint_of(key)]))
        sides = self._remotes
        if (
            name == COMMIT_NAME
            and publish is Publish.REPLACE
            and _checkpoint_of(key) in self._adopted
        ):
            return UnitingWriter(sides, key)
        return CopiesWriter(sides, key, length=length, length_max=length_max, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        if self._is_kept_record(key):
            self._records.read_into(key, offset, view)
        else:
            self._ask(key, lambda side: side.read_into(key, offset, view))

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        if not self._is_kept(key) or self._is_kept_record(key):
            check_key(key)
            return False
        return self._ask(key, lambda side: side.read_cached(key, offset, end, views))

    def stat(self, key: str) -> StoredObject:
        if self._is_kept_record(key):
            return self._records.stat(key)
        return self._ask(key, lambda side: side.stat(key))

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        sides = self._sides(prefix)
        listings: list[Iterable[StoredObject]] = []
        if self._remotes and sides[0] is self._remotes[0]:
            listings += (
                [each for each in found if not self._is_kept(each.key)]
                for found in self._scan_remotes(prefix)
            )
        listings += (
            (each for each in side.scan(prefix) if not self._is_sent(each.key))
            for side in self._kept
            if side in sides
        )
        for key, group in groupby(heapq.merge(*listings, key=_KEY), key=_KEY):
            first, *others = group
            if not others or not self._is_kept_record(key):
                yield first  # several may have such a document
            elif (united := self._records.find(key)) is not None:
                yield united

    def delete(self, key: str) -> None:
        check_key(key)
        _call_all(self._sides(key), lambda side: side.delete(key))

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        keys = [check_key(key) for key in keys]
        sides = self._sides(keys[0])
        selected = [key for key in keys if self._sides(key) == sides]
        _call_all(sides, lambda side: delete_all(side, selected))
        return [key for key in keys if self._sides(key) != sides]

    def discard_unfinished(self, prefix: str) -> int:
        count = 0
        sides = self._sides(check_prefix(prefix))
        for side in sides:
            try:
                count += side.discard_unfinished(prefix)
            except UnreachableError:
                if sides == self._remotes or side in self._kept:
                    raise
                logger.debug("what is unfinished in %s is left to its node", side.place)
        return count

    def close(self) -> None:
        with ExitStack() as closing:
            for side in (*self._kept, *self._remotes):
                closing.callback(side.close)

    # Sides -----------------------------------------------------------------------------------------

    def _sides(self, key: str) -> tuple[Backend, ...]:
        """Return who may have an object, or what is below a prefix."""
        checkpoint = _checkpoint_of(key)
        if checkpoint is None or checkpoint in self._adopted:
            return (*self._remotes, *self._kept)
        return self._remotes if checkpoint.attempt == self.attempt else self._kept

    def _is_kept(self, key: str) -> bool:
        """Whether a key is of a checkpoint of an earlier attempt that this process does not write."""
        checkpoint = _checkpoint_of(key)
        if checkpoint is None or checkpoint in self._adopted:
            return False
        return checkpoint.attempt != self.attempt

    def _is_sent(self, key: str) -> bool:
        """Whether a key is of a checkpoint of this attempt."""
        checkpoint = _checkpoint_of(key)
        return checkpoint is not None and checkpoint.attempt == self.attempt

    def _is_kept_record(self, key: str) -> bool:
        return key.endswith(f"/{COMMIT_NAME}") and self._is_kept(key)

    def _ask(self, key: str, call: Callable[[Backend], T]) -> T:
        """Return the answer of the first side that has the key. Raises KeyNotFoundError only if all have answered."""
        failure: BackendError | None = None
        for side in self._sides(check_key(key)):
            try:
                return call(side)
            except BackendError as error:
                if failure is None or not error.is_damage:
                    failure = error
        assert failure is not None
        raise failure

    def _scan_remotes(self, prefix: str) -> list[list[StoredObject]]:
        """Return the listing of the first remote that answers; of all of them, for what is below a checkpoint: a
        deletion that has failed on one of them goes by what it lists.

        Before this node writes, those that answer count: it has nothing there that the nodes there do not report
        themselves, and one of them may be new. A silent one is then asked once.
        """
        found: list[list[StoredObject]] = []
        silent: UnreachableError | None = None
        is_writing = self.attempt is not None
        asks_all = not is_writing or _checkpoint_of(prefix) is not None
        for remote in self._remotes:
            if (found and not asks_all) or (not is_writing and remote in self._silent):
                continue
            try:
                found.append(list(remote.scan(prefix)))
            except UnreachableError as error:
                silent = silent or error
                if not is_writing:
                    self._silent.append(remote)
                    logger.warning("peers: what other nodes keep is used, but: %s", error)
        if is_writing and silent is not None and (asks_all or not found):
            raise silent
        return found


def _checkpoint_of(key: str) -> CheckpointId | None:
    """Return the checkpoint that a key belongs to; None if it belongs to none."""
    found = (parse_step_folder(part) for part in key.split("/"))
    return next((each for each in found if each is not None), None)


def _call_all(sides: Iterable[Backend], call: Callable[[Backend], object]) -> None:
    """Call all sides, and raise the first error then: one that fails does not keep what is on the others."""
    failure: BackendError | None = None
    for side in sides:
        try:
            call(side)
        except BackendError as error:
            failure = failure or error
    if failure is not None:
        raise failure
