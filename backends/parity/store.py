"""The parity that a node keeps of the images of its group.

Members send their images block by block. Each block is added to what the file has there, in any order. A request whose
answer was lost is sent again: what was added once is not added a second time. A set is sealed when all members have
finished their images. One that a member gives up, or that fails, is removed, and cannot be begun again in this start:
another member may have finished its image already, and would not send it again.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tierfall.backends.parity.coding import add_product, coefficient
from tierfall.backends.parity.sets import (
    MemberImage,
    ParitySet,
    parity_key,
    record_key,
)
from tierfall.backends.parity.stripes import ParityGeometry
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.posix.folders import make_root
from tierfall.backends.posix.system import translated, write_whole
from tierfall.backends.toolkit.keys import check_key, unfinished_name
from tierfall.core.types.errors import BackendError

logger = logging.getLogger("tierfall")


class _SetPlan(NamedTuple):
    """A set as its members begin it: its key, the ids of their nodes, the number of the one that keeps this file."""

    key: str
    nodes: tuple[str, ...]
    at: int
    geometry: ParityGeometry


@dataclass(slots=True)
class _Contribution:
    """What has arrived of a member's image: the writer that sends it, and the lengths of its ranges, by offset."""

    writer: str
    ranges: dict[int, int] = field(default_factory=dict)
    image: MemberImage | None = None


class _OpenSet:
    """A set whose parity is incomplete. The caller holds ``lock``."""

    def __init__(self, root: Path, plan: _SetPlan) -> None:
        self.plan = plan
        self.key, self.nodes, self.at, self.geometry = plan
        self.lock = threading.Lock()
        self.members: dict[int, _Contribution] = {}
        self.is_closed = False
        self._place = root / parity_key(plan.key)
        self._partial = self._place.with_name(unfinished_name())
        self._scratch = memoryview(bytearray(plan.geometry.block_bytes))
        with translated(f"keep parity in {self._place}"):
            make_root(self._place.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._partial, flags, 0o600)

    def fold(self, member: int, offset: int, block: memoryview) -> None:
        """Add the bytes from ``offset`` of a member's image. Raises BackendError; nothing has been added then, or the
        set must be given up."""
        end = offset + block.nbytes
        pieces = list(self.geometry.pieces(member, offset, end))
        row = self.geometry.row(pieces[0].stripe, self.at) if len(pieces) == 1 else None
        if row is None:
            raise BackendError(f"parity of {self.key}: bytes {offset} to {end} have none here")
        within = pieces[0].within
        start = self.geometry.parity_offset(self.at, pieces[0].stripe) + within
        total = self._scratch[: block.nbytes]
        with translated(f"add to the parity in {self._place}"):
            count = os.preadv(self._file, [total], start)
            total[count:] = bytes(len(total) - count)
            add_product(total, block, coefficient(row, member, self.geometry.losses))
            write_whole(self._file, total, start)

    def check_complete(self, member: int, image_bytes: int) -> None:
        """Raise BackendError unless all bytes of a member's image that have their parity here have arrived, once."""
        ranges = sorted(self.members[member].ranges.items())
        share = self.geometry.parity_share(member, self.at, image_bytes)
        end = 0
        for offset, length in ranges:
            if offset < end:
                raise BackendError(f"parity of {self.key}: bytes {offset} to {end} came twice")
            end = offset + length
        arrived = sum(length for _, length in ranges)
        if arrived != share or end > image_bytes:
            raise BackendError(
                f"parity of {self.key}: {arrived} bytes of {self.nodes[member]} arrived, {share} expected"
            )

    def publish(self, record: ParitySet, backend: PosixBackend) -> None:
        """Make the parity visible, and then its record."""
        with translated(f"publish the parity in {self._place}"):
            os.rename(self._partial, self._place)
        data = record.encode()
        with backend.create(record_key(self.key), length=len(data)) as writer:
            writer.write(0, memoryview(data))
            writer.publish()

    def close(self) -> None:
        """Remove what is not published; the set is of no more use."""
        if self.is_closed:
            return
        self.is_closed = True
        os.close(self._file)
        with suppress(OSError):  # published, or the next start collects it
            self._partial.unlink()


class ParityStore:
    """The sets of one process, in files below ``folder``. May be used by several threads.

    ``id`` is a random name of this store: members that meet another one at its address do not go on there, since what
    was sent to the first is lost. ``backend`` has what is published. ``operations`` are the requests of members without
    payload; the names of their arguments are those of the methods.
    """

    def __init__(
        self, folder: Path, *, check_room: Callable[[int], None] = lambda size: None
    ) -> None:
        """``check_room`` raises StorageFullError where so many bytes do not fit into memory."""
        self._check_room = check_room
        self.id = secrets.token_hex(16)
        self.backend = PosixBackend(folder, direct_io=False)
        self.operations: Mapping[str, Callable[[dict[str, Any]], Any]] = {
            "parity_join": self._join,
            "parity_finish": self._finish,
            "parity_give_up": self._give_up,
            "parity_is_open": lambda head: isinstance(self._sets.get(head["set"]), _OpenSet),
            "parity_delete": lambda head: self._remove(head["set"], "it was deleted"),
        }
        self._folder = folder
        self._lock = threading.Lock()
        self._sets: dict[str, _OpenSet | ParitySet | str] = {}
        """By key: an open set, the record of a sealed one, or why it is gone."""

    def close(self) -> None:
        """Remove the sets that are not sealed."""
        with self._lock:
            keys = [key for key, found in self._sets.items() if isinstance(found, _OpenSet)]
        for key in keys:
            self._remove(key, "the node that keeps it has closed it")
        self.backend.close()

    def fold(self, head: dict[str, Any], block: memoryview) -> None:
        """Add ``block``, which is the bytes from ``offset`` of the image of ``member``, to the parity of ``set``; it is
        in one block of it. Nothing is added where that has been done."""
        key, member, offset = head["set"], int(head["member"]), int(head["offset"])
        found = self._find(key)
        if isinstance(found, ParitySet):
            return  # a request that was sent twice, and has waited
        with found.lock:
            if found.is_closed:
                self._find(key)
                return
            sent = self._contribution(found, member).ranges
            if offset in sent and sent[offset] == block.nbytes:
                return
            if offset in sent or not block.nbytes:
                raise BackendError(f"parity of {key}: other bytes from {offset} came before")
            try:
                found.fold(member, offset, block)
            except BaseException as error:
                self._end(found, str(error))
                raise
            sent[offset] = block.nbytes

    def _join(self, head: dict[str, Any]) -> None:
        """Begin the image of ``member`` in a set; ``nodes`` are the ids of all members, ``at`` is this one's number,
        ``store`` is the id of the store that is expected here, ``writer`` a random name of the writer, and ``bytes``
        the image's length, 0 where it is not known."""
        key, member, writer = check_key(head["set"]), int(head["member"]), str(head["writer"])
        if head["store"] != self.id:
            raise BackendError(
                f"parity of {key}: the process that kept it is another by now, and what was sent is lost"
            )
        nodes, at = tuple(map(str, head["nodes"])), int(head["at"])
        try:
            cut = ParityGeometry(len(nodes), int(head["losses"]), int(head["block_bytes"]))
        except ValueError as error:
            raise BackendError(f"parity of {key}: {error}") from error
        if not 0 <= member < len(nodes) or not 0 <= at < len(nodes):
            raise BackendError(
                f"parity of {key}: members {member} and {at} of a group of {len(nodes)}"
            )
        self._check_room(-(-int(head["bytes"]) * cut.losses // cut.data))
        plan = _SetPlan(key, nodes, at, cut)
        while not self._try_join(plan, member, _Contribution(writer)):
            logger.debug("parity of %s: it was removed before anything of it arrived", key)

    def _try_join(self, plan: _SetPlan, member: int, own: _Contribution) -> bool:
        """Join the open set of that key, or begin it. False where it has just been removed."""
        key = plan.key
        with self._lock:
            if key not in self._sets:
                self._sets[key] = _OpenSet(self._folder, plan)
        found = self._find(key)
        if isinstance(found, ParitySet):
            raise BackendError(f"parity of {key}: it is complete; delete the checkpoint first")
        with found.lock:
            if found.is_closed:
                return False
            if found.plan != plan:
                raise BackendError(f"parity of {key}: another group has begun it")
            if found.members.setdefault(member, own).writer == own.writer:
                return True
            self._end(found, f"{found.nodes[member]} has begun its image a second time")
        self._find(key)
        return False

    def _finish(self, head: dict[str, Any]) -> None:
        """End the image ``file`` of ``member``, of ``bytes`` bytes; the last one seals the set."""
        key, member = head["set"], int(head["member"])
        file, size = str(head["file"]), int(head["bytes"])
        found = self._find(key)
        if isinstance(found, _OpenSet):
            with found.lock:
                if not found.is_closed:
                    self._finish_open(found, member, file, size)
                    return
            found = self._find(key)
        sealed = found.images[member] if isinstance(found, ParitySet) else None
        if sealed is None or (sealed.file, sealed.bytes) != (file, size):
            raise BackendError(f"parity of {key}: it was sealed without {file} of {size} bytes")

    def _finish_open(self, found: _OpenSet, member: int, file: str, size: int) -> None:
        contribution = self._contribution(found, member)
        found.check_complete(member, size)
        contribution.image = MemberImage(node=found.nodes[member], file=file, bytes=size)
        images = [each.image for each in found.members.values() if each.image is not None]
        if len(images) == found.geometry.members:
            self._seal(found)

    def _seal(self, found: _OpenSet) -> None:
        images = [found.members[number].image for number in range(found.geometry.members)]
        record = ParitySet(
            key=found.key,
            at=found.at,
            geometry=found.geometry,
            images=tuple(image for image in images if image is not None),
        )
        try:
            found.publish(record, self.backend)
        except BaseException as error:
            self._end(found, str(error))
            raise
        self._replace(found, record)
        found.close()

    def _give_up(self, head: dict[str, Any]) -> None:
        """End the writer of a member, which will not finish. If it ``sent`` anything, to any store, the set is removed
        where other members have joined it."""
        key, member = head["set"], int(head["member"])
        with self._lock:
            found = self._sets.get(key)
        if not isinstance(found, _OpenSet):
            return
        with found.lock:
            known = found.members.get(member)
            if found.is_closed or known is None or known.writer != head["writer"]:
                return
            others = found.members.keys() - {member}
            if others and head["sent"]:
                self._end(found, f"{found.nodes[member]} has given its image up")
                return
            del found.members[member]
            if not others:  # as if it had never begun
                found.close()
                self._replace(found, None)

    def _remove(self, key: str, why: str) -> None:
        """Remove a set, sealed or not; it cannot be begun again."""
        with self._lock:
            found, self._sets[check_key(key)] = self._sets.get(key), why
        if isinstance(found, _OpenSet):
            with found.lock:
                found.close()
        self.backend.delete(record_key(key))
        self.backend.delete(parity_key(key))

    def _end(self, found: _OpenSet, why: str) -> None:
        """Remove an open set that has failed. The caller holds its lock."""
        logger.warning("peers: the parity of %s is given up: %s", found.key, why)
        found.close()
        self._replace(found, why)

    def _replace(self, found: _OpenSet, by: ParitySet | str | None) -> None:
        """Note what has become of an open set, unless it was deleted meanwhile."""
        with self._lock:
            if self._sets.get(found.key) is not found:
                return
            if by is None:
                del self._sets[found.key]
            else:
                self._sets[found.key] = by

    def _find(self, key: str) -> _OpenSet | ParitySet:
        with self._lock:
            found = self._sets.get(key)
        if isinstance(found, _OpenSet | ParitySet):
            return found
        reason = found or "it was never begun here, or the process that kept it is another by now"
        raise BackendError(f"parity of {key}: it is gone: {reason}")

    def _contribution(self, found: _OpenSet, member: int) -> _Contribution:
        if member not in found.members:
            raise BackendError(f"parity of {found.key}: member {member} has not begun its image")
        return found.members[member]
