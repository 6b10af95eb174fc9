"""A backend behaves as a dictionary of bytes, whatever is done to it, in whatever order.

The model is a plain dict; nothing of the package is used to tell what is expected.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.backend import Backend, Publish, Writer, delete_all
from tierfall.core.types.errors import BackendError, KeyExistsError, KeyNotFoundError

KEYS = ("a", "a-b", "b/c", "b/c-d", "b/d/e", "b/d/f", "b-c/d", "é/🔥", "z/.x")
PREFIXES = ("", "b/", "b/d/", "b-c/", "é/", "nothing/", "a/")
SIZES = (0, 1, 2, 511, 4095, 4096, 4097, 262_144, 270_001)


@dataclass
class Open:
    """A writer and what it was given so far."""

    key: str
    writer: Writer
    length: int | None
    mode: Publish
    content: bytearray = field(default_factory=bytearray)
    living: bool = True


def filling(seed: int, size: int) -> bytes:
    return bytes((seed + 7 * index) % 251 for index in range(min(size, 251))) * (size // 251 + 1)


def write_and_publish(writer: Writer, start: int, data: bytes) -> None:
    writer.write(start, memoryview(data))
    writer.publish()


class PosixModel(RuleBasedStateMachine):
    direct_io = False
    writers = Bundle("writers")
    keys = st.sampled_from(KEYS)

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, bytes] = {}
        self.open: list[Open] = []
        self.left = 0
        """How many aborted writers may have left something to continue."""
        self.backend = self.make()

    def make(self) -> Backend:
        self.folder = tempfile.TemporaryDirectory(prefix="tierfall-model-")
        return PosixBackend(self.folder.name, direct_io=self.direct_io)

    def teardown(self) -> None:
        for each in self.open:
            each.writer.abort()
        self.backend.close()
        self.folder.cleanup()

    @rule(
        target=writers,
        key=keys,
        length=st.none() | st.sampled_from(SIZES),
        mode=st.sampled_from(Publish),
    )
    def create(self, key: str, length: int | None, mode: Publish) -> Open:
        writer = self.backend.create(key, length=length, publish=mode)
        opened = Open(key=key, writer=writer, length=length, mode=mode)
        self.open.append(opened)
        return opened

    @rule(opened=writers, size=st.sampled_from(SIZES), seed=st.integers(0, 250))
    def append(self, opened: Open, size: int, seed: int) -> None:
        data = filling(seed, size)[:size]
        start = len(opened.content)
        fits = opened.length is None or start + size <= opened.length
        if opened.living and fits:
            opened.writer.write(start, memoryview(data))
            opened.content += data
        elif opened.living:
            opened.living = False
            with pytest.raises(BackendError):
                write_and_publish(opened.writer, start, data)
        else:
            with pytest.raises(BackendError):
                opened.writer.write(start, memoryview(data))

    @rule(opened=writers, fill=st.booleans())
    def publish(self, opened: Open, fill: bool) -> None:
        missing = 0 if opened.length is None else opened.length - len(opened.content)
        if opened.living and fill and missing:
            rest = filling(missing % 251, missing)[:missing]
            opened.writer.write(len(opened.content), memoryview(rest))
            opened.content += rest
            missing = 0
        taken = opened.mode is Publish.IF_ABSENT and opened.key in self.model
        if not opened.living or missing:
            with pytest.raises(BackendError):
                opened.writer.publish()
        elif taken:
            with pytest.raises(KeyExistsError):
                opened.writer.publish()
        else:
            opened.writer.publish()
            self.model[opened.key] = bytes(opened.content)
        opened.living = False

    @rule(opened=writers)
    def abort(self, opened: Open) -> None:
        opened.writer.abort()
        opened.living = False
        # what it has written stays, for a writer that continues it
        self.left += opened.mode is Publish.RESUME

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.backend.delete(key)
        self.model.pop(key, None)

    @rule(several=st.lists(keys, min_size=1, unique=True))
    def delete_several(self, several: list[str]) -> None:
        delete_all(self.backend, several)
        for key in several:
            self.model.pop(key, None)

    @rule(key=keys, share=st.floats(0, 1), beyond=st.integers(0, 3), data=st.data())
    def read(self, key: str, share: float, beyond: int, data: st.DataObject) -> None:
        whole = self.model.get(key, b"")
        offset = int(len(whole) * share)
        size = data.draw(st.integers(0, len(whole) - offset)) + beyond
        view = memoryview(bytearray(size))
        if key not in self.model:
            with pytest.raises(KeyNotFoundError):
                self.backend.read_into(key, offset, view)
        elif offset + size > len(whole):
            with pytest.raises(BackendError) as caught:
                self.backend.read_into(key, offset, view)
            assert not isinstance(caught.value, KeyNotFoundError)
        else:
            self.backend.read_into(key, offset, view)
            assert view == whole[offset : offset + size]

    @rule(prefix=st.sampled_from(PREFIXES))
    def scan(self, prefix: str) -> None:
        expected = [
            (key, len(self.model[key])) for key in sorted(self.model) if key.startswith(prefix)
        ]
        assert [(each.key, each.bytes) for each in self.backend.scan(prefix)] == expected

    @rule(prefix=st.sampled_from(PREFIXES))
    def discard(self, prefix: str) -> None:
        self.discard_below(prefix)

    def discard_below(self, prefix: str) -> None:
        count = self.backend.discard_unfinished(prefix)
        assert count <= self.left
        self.left -= count
        assert self.backend.discard_unfinished(prefix) == 0

    @invariant()
    def same_objects(self) -> None:
        assert {each.key: each.bytes for each in self.backend.scan("")} == {
            key: len(value) for key, value in self.model.items()
        }

    @precondition(lambda self: not any(each.living for each in self.open))
    @rule()
    def reopen(self) -> None:
        self.backend.close()
        self.backend = PosixBackend(self.folder.name, direct_io=self.direct_io)
        self.discard_below("")


class DirectModel(PosixModel):
    direct_io = True


SETTINGS = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestBuffered = PosixModel.TestCase
TestBuffered.settings = SETTINGS
TestDirect = DirectModel.TestCase
TestDirect.settings = SETTINGS
