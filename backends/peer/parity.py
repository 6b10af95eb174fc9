"""Peer memory with parity: in place of a copy of each image, the nodes of a group keep the parity of their images.

The documents of a checkpoint are stored as on any tier of peer memory. Of an image nothing but its parity is stored: it
is read from the memory of its own node, or rebuilt from the others'. The images of one checkpoint of the ranks with the
same place on each node of the group are one set.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from tierfall.backends.parity.rebuild import NodeMemory, SetReader
from tierfall.backends.parity.sets import (
    ParitySet,
    parity_key,
    record_key,
)
from tierfall.backends.parity.stripes import ParityGeometry
from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.kept_parity import images_known_by, is_image, key_of, read_sets
from tierfall.backends.peer.wire import BUFFER_BYTES
from tierfall.backends.toolkit.base import Extent, WriterBase, WriterState, describe
from tierfall.backends.toolkit.keys import check_key, check_prefix
from tierfall.backends.toolkit.views import flat
from tierfall.backends.wrappers.base import Wrapper
from tierfall.core.types.backend import Backend, Publish, StoredObject, Writer
from tierfall.core.types.errors import (
    BackendError,
    KeyNotFoundError,
    TruncatedError,
    UnreachableError,
)
from tierfall.core.types.keys import (
    ATTEMPTS_FOLDER,
    parse_attempt,
    parse_step_folder,
)

T = TypeVar("T")

BLOCK_BYTES = BUFFER_BYTES
"""One request carries one block, or a part of one."""


class GroupMember(NamedTuple):
    """A node of this start's group: its id, the id of the ``ParityStore`` that is expected there, and its parity."""

    node: str
    store: str
    parity: PeerBackend


@dataclass(frozen=True)
class ParityGroup:
    """The nodes that keep the parity of each other's images. ``at`` is this node's number among the ``members``, which
    include it; ``name`` that of the sets, in the folder of a checkpoint: it differs between the ranks of a node."""

    members: tuple[GroupMember, ...]
    at: int
    name: str
    geometry: ParityGeometry

    def __post_init__(self) -> None:
        if self.geometry.members != len(self.members):
            raise ValueError(f"stripes of {self.geometry.members} for {len(self.members)} members")
        if self.geometry.block_bytes > BLOCK_BYTES:
            raise ValueError(
                f"blocks of {self.geometry.block_bytes} bytes; expected {BLOCK_BYTES} at most"
            )

    @property
    def others(self) -> tuple[GroupMember, ...]:
        """The other members. The first ``losses`` keep the documents of this one."""
        return (*self.members[self.at + 1 :], *self.members[: self.at])


class ParityBackend(Wrapper):
    """A ``Backend`` over ``documents``, which has all but images: on ``losses`` other members of the group.

    As in ``PeerView``, the images of this attempt are this node's own, and those of earlier attempts are the ones of
    the members whose documents this node keeps. ``kept`` has the parity in this node's memory. ``nodes`` are all nodes
    of this start, by id. ``close`` closes all of these.
    """

    def __init__(
        self,
        documents: Backend,
        group: ParityGroup,
        *,
        kept: Backend,
        nodes: Mapping[str, NodeMemory],
    ) -> None:
        super().__init__(documents)
        self._group = group
        self._kept = kept
        self._nodes = nodes
        self._attempt: int | None = None
        self._sent: dict[str, int] = {}
        """The lengths of the images that this backend has published, by key."""
        self._readers: dict[str, _ImageReader] = {}
        self._copied: set[str] = set()
        """The images of which this node keeps a copy, of an earlier start without parity."""

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
            self._attempt = parse_attempt(name)
        if not is_image(key):
            return self._inner.create(key, length=length, length_max=length_max, publish=publish)
        extent = Extent(length=length, length_max=length_max)
        extent.check(what := describe("create", check_key(key), self.place))
        if publish is not Publish.REPLACE:
            raise BackendError(f"{what}: an image is not created conditionally")
        checkpoint = parse_step_folder(folder.rpartition("/")[2])
        self._attempt = checkpoint.attempt if checkpoint else self._attempt
        return ParityWriter(
            self._group, key, self.place, extent=extent, on_published=self._note_sent
        )

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        if not self._is_coded(key):
            self._inner.read_into(key, offset, view)
            return
        target, reader = flat(view, writable=True), self._reader(key)
        size = reader.found.images[reader.member].bytes
        if offset < 0 or offset + target.nbytes > size:
            raise TruncatedError(
                f"{describe('read', key, self.place)}: bytes {offset} to {offset + target.nbytes} were asked for, but "
                f"it ends at {size}"
            )
        reader.sources.read_into(reader.member, offset, target)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        return not self._is_coded(key) and self._inner.read_cached(key, offset, end, views)

    def stat(self, key: str) -> StoredObject:
        if not self._is_coded(key):
            return self._inner.stat(key)
        if self._is_of_this_attempt(key):
            sent = self._sent_images(f"{key.rpartition('/')[0]}/")
            if key in sent:
                return StoredObject(key=key, bytes=sent[key].bytes)
        found, member = self._find(key)
        return StoredObject(key=key, bytes=found.images[member].bytes)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        images = sorted(self._images(check_prefix(prefix)), key=key_of)
        return heapq.merge(self._inner.scan(prefix), images, key=key_of)

    def delete(self, key: str) -> None:
        if not self._is_coded(key):
            self._inner.delete(key)
            return
        self._readers.pop(key, None)
        if self._is_of_this_attempt(key):
            sent = self._sent_images(f"{key.rpartition('/')[0]}/")
            if key in sent:
                head = {"do": "parity_delete", "set": sent[key].key}
                for member in self._group.members:
                    member.parity.request(describe("delete", key, member.parity.place), head)
                self._sent.pop(key, None)
            return
        with suppress(KeyNotFoundError):
            found, _ = self._find(key)
            self._kept.delete(record_key(found.key))
            self._kept.delete(parity_key(found.key))

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        others = []
        for key in keys:
            if self._is_coded(key):
                self.delete(key)
            else:
                others.append(key)
        return self._inner.delete_some(others) if others else []

    def discard_unfinished(self, prefix: str) -> int:
        return self._inner.discard_unfinished(prefix) + self._kept.discard_unfinished(prefix)

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(super().close)
            closing.callback(self._kept.close)
            for member in self._group.members:
                closing.callback(member.parity.close)
            for node in self._nodes.values():
                closing.callback(node.parity.close)
                closing.callback(node.originals.close)

    # Sets ------------------------------------------------------------------------------------------

    def _note_sent(self, key: str, bytes: int) -> None:
        self._sent[key] = bytes

    def _images(self, prefix: str) -> Iterator[StoredObject]:
        for key, sent in self._sent_images(prefix).items():
            yield StoredObject(key=key, bytes=sent.bytes)
        for found in self._kept_sets(prefix):
            yield from images_known_by(found)

    def _sent_images(self, prefix: str) -> dict[str, _SentImage]:
        """Return the images of this node in this attempt, of all its ranks, by key; of this rank also those that are
        published before their set is complete."""
        images = {}
        for found in self._sent_sets(prefix):
            image = found.images[self._group.at]
            images[found.image_key(self._group.at)] = _SentImage(image.bytes, found.key)
        for key, size in list(self._sent.items()):
            if key.startswith(prefix) and key not in images:
                name = f"{key.rpartition('/')[0]}/{self._group.name}"
                if self._ask(lambda other, name=name: _is_open(other, name)):  # type: ignore[misc]
                    images[key] = _SentImage(size, name)
                else:
                    self._sent.pop(key, None)  # another rank has deleted it
        return images

    def _sent_sets(self, prefix: str) -> list[ParitySet]:
        """Return the complete sets of this attempt that this node has images in, as another member keeps them."""
        if self._attempt is None or _attempt_of(prefix) not in (None, self._attempt):
            return []
        found = self._ask(lambda other: list(read_sets(other.parity, prefix)))
        return [each for each in found if _attempt_of(each.key) == self._attempt]

    def _kept_sets(self, prefix: str) -> list[ParitySet]:
        """Return the sets of earlier attempts whose parity is in this node's memory."""
        found = read_sets(self._kept, prefix)
        return [each for each in found if not self._is_of_this_attempt(each.key)]

    def _is_of_this_attempt(self, key: str) -> bool:
        return self._attempt is not None and _attempt_of(check_key(key)) == self._attempt

    def _is_coded(self, key: str) -> bool:
        """Return whether parity is kept of an object. Of an earlier start with ``copies`` there are whole images."""
        if not is_image(key) or key in self._copied:
            return False
        if key in self._readers or self._is_of_this_attempt(key):
            return True
        try:
            self._find(key)
        except KeyNotFoundError:
            with suppress(KeyNotFoundError):
                self._inner.stat(key)
                self._copied.add(key)
        return key not in self._copied

    def _find(self, key: str) -> tuple[ParitySet, int]:
        """Return the set of an image, and the number of its member. Raises KeyNotFoundError."""
        folder, _, name = check_key(key).rpartition("/")
        sets = self._sent_sets if self._is_of_this_attempt(key) else self._kept_sets
        for found in sets(f"{folder}/"):
            for member, image in enumerate(found.images):
                if image.file == name:
                    return found, member
        raise KeyNotFoundError(f"{describe('stat', key, self.place)}: no parity of it is kept here")

    def _ask(self, call: Callable[[GroupMember], T]) -> T:
        """Return the answer of the first other member that gives one."""
        silent: UnreachableError | None = None
        for other in self._group.others:
            try:
                return call(other)
            except UnreachableError as error:
                silent = silent or error
        assert silent is not None
        raise silent

    def _reader(self, key: str) -> _ImageReader:
        """Return the reader of an image. What this node has sent is not read from its own memory: that is no copy."""
        if key not in self._readers:
            found, member = self._find(key)
            lost = (member,) if self._is_of_this_attempt(key) else ()
            sources = SetReader(found, self._nodes, lost=lost)
            self._readers[key] = _ImageReader(found, member, sources)
        return self._readers[key]


class _SentImage(NamedTuple):
    """The length of an image in bytes, and the key of its set."""

    bytes: int
    key: str


class _ImageReader(NamedTuple):
    found: ParitySet
    member: int
    sources: SetReader


class ParityWriter(WriterBase):
    """Sends an image to the members that keep its parity. An image that is given up ends the set, unless nothing of it
    was sent."""

    def __init__(
        self,
        group: ParityGroup,
        key: str,
        place: str,
        *,
        extent: Extent,
        on_published: Callable[[str, int], None],
    ) -> None:
        super().__init__(key, place, extent=extent, publish=Publish.REPLACE)
        self._group = group
        self._set = f"{key.rpartition('/')[0]}/{group.name}"
        self._writer = secrets.token_hex(16)
        self._note_published = on_published
        self._end = 0
        self._has_sent = False
        try:
            for at, member in enumerate(group.members):
                self._request("create", member, "parity_join", **self._description(at, member))
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        self._check_open("write")
        data = flat(view)
        self._extent.check_range(self._what("write"), offset, data.nbytes)
        self._has_sent = self._has_sent or data.nbytes > 0
        try:
            for piece in self._group.geometry.pieces(self._group.at, offset, offset + data.nbytes):
                block = data[piece.start - offset : piece.end - offset]
                for holder in self._group.geometry.holders(piece.stripe):
                    member = self._group.members[holder]
                    self._request("write", member, "parity_fold", block, offset=piece.start)
        except BackendError as error:
            if not error.retryable:
                self.abort()
            raise
        with self._lock:
            self._end = max(self._end, offset + data.nbytes)

    def _finish(self, what: str) -> None:
        if self._extent.length is not None and self._end != self._extent.length:
            raise BackendError(
                f"{what}: {self._end} bytes were written, {self._extent.length} expected"
            )
        file = self._key.rpartition("/")[2]
        for member in self._group.members:
            self._request("publish", member, "parity_finish", file=file, bytes=self._end)

    def _on_published(self) -> None:
        self._note_published(self._key, self._end)

    def _die(self) -> None:
        self._state = WriterState.DEAD
        for member in self._group.members:
            with suppress(BackendError):  # the set is never complete without this image
                own: dict[str, Any] = {"writer": self._writer, "sent": self._has_sent}
                self._request("abort", member, "parity_give_up", **own)

    def _description(self, at: int, member: GroupMember) -> dict[str, Any]:
        return {
            "at": at,
            "store": member.store,
            "bytes": self._extent.most_bytes or 0,
            "writer": self._writer,
            "nodes": [each.node for each in self._group.members],
            "losses": self._group.geometry.losses,
            "block_bytes": self._group.geometry.block_bytes,
        }

    def _request(
        self,
        operation: str,
        member: GroupMember,
        do: str,
        block: memoryview | None = None,
        **more: Any,
    ) -> None:
        head = {"do": do, "set": self._set, "member": self._group.at, **more}
        member.parity.request(f"{self._what(operation)}: {member.parity.place}", head, block)


def _attempt_of(key: str) -> int | None:
    """Return the number of the attempt that saved the checkpoint that a key belongs to; None if it belongs to none."""
    found = (parse_step_folder(part) for part in key.split("/"))
    return next((each.attempt for each in found if each is not None), None)


def _is_open(member: GroupMember, key: str) -> bool:
    """Ask a member whether a set is begun there, and neither complete nor given up."""
    head = {"do": "parity_is_open", "set": key}
    return bool(member.parity.request(describe("look for", key, member.parity.place), head))
