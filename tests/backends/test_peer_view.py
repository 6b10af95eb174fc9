"""Two nodes that keep each other's checkpoints: one is lost, and the other has all that it needs."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from backend_places import get, put

from tests.memory_backend import MemoryBackend
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.server import PeerServer
from tierfall.backends.peer.view import PeerView
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.format.commit_files import ranks_with_image
from tierfall.core.format.records import Commit, Lineage, NamedFile, parse_commit
from tierfall.core.types.backend import Backend, Publish, delete_all
from tierfall.core.types.errors import (
    KeyExistsError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId

SECRET = b"s" * 32
IMAGE = "run/step-00000010-a0001/rank-00000-of-00002.safetensors"
RECORD = "run/step-00000010-a0001/commit.json"
STEP = "run/step-00000010-a0001/"


class Node:
    """A node's memory: a folder, its server, and what the node sees of the tier."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = PeerServer(
            secret=SECRET,
            run="run",
            listener=socket.create_server(("127.0.0.1", 0)),
            storage=lambda sender: PosixBackend(folder, direct_io=False),
        )

    def view(self, other: Node, attempt: int | None) -> PeerView:
        remote = PeerBackend(
            ("127.0.0.1", other.server.port), secret=SECRET, run="run", sender=self.folder.name
        )
        view = PeerView([PosixBackend(self.folder, direct_io=False)], [remote])
        view.attempt = attempt
        return view


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    both = [Node(tmp_path / name) for name in "ab"]
    yield both
    for node in both:
        node.server.close()


@pytest.mark.parametrize("name", CHECKS)
def test_promise(name: str) -> None:
    check_promise(name, lambda: PeerView([MemoryBackend()], [MemoryBackend() for _ in range(2)]))


def test_an_image_that_is_adopted_is_sent_to_the_other_node() -> None:
    """A start finds an image of an earlier attempt in host memory, and peer memory is owed it. In this node's own
    memory it would go with the node; what this node keeps there of the same checkpoint is another node's."""
    kept, remote = [MemoryBackend(), MemoryBackend()], MemoryBackend()
    others = IMAGE.replace("rank-00000", "rank-00001")
    put(kept[1], others, b"image of another node")
    view = PeerView(kept, [remote])
    put(view, "run/attempts/a0002.json", b"{}")
    put(view, IMAGE, b"adopted")
    put(view, RECORD, b"record")
    assert get(remote, IMAGE) == b"adopted"
    assert get(remote, RECORD) == b"record"
    assert get(view, IMAGE) == b"adopted"
    assert get(view, others) == b"image of another node"
    assert [each.key for each in view.scan(STEP)] == [RECORD, IMAGE, others]
    delete_all(view, [RECORD, IMAGE, others])
    assert not [*remote.scan(STEP), *kept[1].scan(STEP)]


def test_a_lost_receiver_is_not_taken_for_an_empty_one(nodes: list[Node]) -> None:
    a, b = nodes
    with closing(a.view(b, attempt=1)) as view:
        put(view, IMAGE, b"image of a")
        b.server.close()
        with pytest.raises(UnreachableError):
            view.stat(IMAGE)
        with pytest.raises(UnreachableError):
            list(view.scan("run/"))


# Several copies ----------------------------------------------------------------------------------------


def remotes_of(*names: str) -> list[MemoryBackend]:
    return [MemoryBackend(place=name) for name in names]


class Silent(MemoryBackend):
    """Answers nothing while ``silent``, and to ``silent_to`` alone if that is set."""

    silent = True
    silent_to = ""

    def __getattribute__(self, name: str) -> Any:
        asks = ("create", "read_into", "stat", "scan", "delete", "discard_unfinished")
        if name in asks and self.silent and self.silent_to in ("", name):
            raise UnreachableError(f"{name}: it does not answer")
        return super().__getattribute__(name)


def view_of(
    kept: Sequence[Backend], remotes: Sequence[Backend], attempt: int | None = 1
) -> PeerView:
    view = PeerView(kept, remotes)
    view.attempt = attempt
    return view


@pytest.mark.parametrize("silent_to", ["create", "write", "publish"])
def test_a_copy_that_fails_is_the_failure_of_the_write(silent_to: str) -> None:
    """One copy alone does not count as committed."""
    one, two = remotes_of("one", "two")
    view = view_of([MemoryBackend()], [one, two])

    def refuse(*args: object) -> None:
        raise UnreachableError(f"{silent_to}: it does not answer")

    create = two.create

    def create_one(key: str, **options: Any) -> Any:
        if silent_to == "create":
            refuse()
        writer = create(key, **options)
        setattr(writer, silent_to, refuse)
        return writer

    two.create = create_one  # type: ignore[method-assign]
    with pytest.raises(UnreachableError):
        put(view, IMAGE, b"image")
    two.create = create  # type: ignore[method-assign]
    put(view, IMAGE, b"image")
    assert get(one, IMAGE) == get(two, IMAGE) == b"image"


def test_a_publish_that_failed_in_part_is_completed() -> None:
    one, two = remotes_of("one", "two")
    view = view_of([MemoryBackend()], [one, two])
    put(one, RECORD, b"record")  # the answer of two was lost, or two was silent
    with pytest.raises(KeyExistsError):
        put(view, RECORD, b"record", publish=Publish.IF_ABSENT)
    assert get(two, RECORD) == b"record"


def test_a_silent_node_does_not_hide_what_is_kept_here(caplog: pytest.LogCaptureFixture) -> None:
    kept = [MemoryBackend(), MemoryBackend()]
    put(kept[0], IMAGE, b"image")
    put(kept[1], "run/attempts/a0001.json", b"record")
    view = view_of(kept, [Silent()], attempt=None)
    for _ in range(2):
        found = [each.key for each in view.scan("run/")]
        assert found == ["run/attempts/a0001.json", IMAGE]
    assert get(view, "run/attempts/a0001.json") == b"record"
    assert view.discard_unfinished("run/") == 0
    assert len(caplog.messages) == 1
    assert "it does not answer" in caplog.text
    with pytest.raises(UnreachableError):
        view.stat("run/attempts/a0002.json")


# Records of one checkpoint from several nodes ------------------------------------------------------------


def record_of(rank: int, *, life: str = "a", wall_time_s: float = 1.0) -> Commit:
    """The record of a node with one rank, of four."""
    stem = f"rank-{rank:05d}-of-00004"
    return Commit(
        lineage=Lineage(
            run="run",
            checkpoint=CheckpointId(10, 1),
            attempt_id=life * 32,
            ordinal=1,
            started_from=None,
        ),
        world_size=4,
        files=(
            NamedFile(name=f"{stem}.safetensors", bytes=5, digest=None),
            NamedFile(name=f"{stem}.json", bytes=2, digest="sha256:" + "0" * 64),
        ),
        nodes=("n",),
        wall_time_s=wall_time_s,
    )


def kept_with(*records: bytes) -> PeerView:
    kept = [MemoryBackend(place=str(number)) for number in range(len(records) + 1)]
    for side, record in zip(kept[1:], records, strict=True):
        put(side, RECORD, record)
    return view_of(kept, [MemoryBackend()], attempt=2)


def ranks_in(view: PeerView) -> frozenset[int]:
    (listed,) = view.scan("run/")
    assert (listed, listed.version) == (view.stat(RECORD), view.stat(RECORD).version)
    data = get(view, RECORD)
    assert len(data) == listed.bytes
    return ranks_with_image(parse_commit(data, what="record"), 4)


def test_a_damaged_record_costs_the_images_of_its_node_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    damaged = record_of(0).encode().replace(b"world_size", b"world_sise")
    assert ranks_in(kept_with(damaged, record_of(1).encode())) == {1}
    assert "is not used" in caplog.text
    assert get(kept_with(damaged, b"worse"), RECORD) == damaged


def test_a_stale_record_of_another_start_is_not_mixed_in(caplog: pytest.LogCaptureFixture) -> None:
    """Starts that did not see each other's memory may have used one attempt number."""
    stale, newer = record_of(0, life="b"), record_of(1, wall_time_s=2.0)
    for records in ((stale, newer), (newer, stale)):
        assert ranks_in(kept_with(*(each.encode() for each in records))) == {1}
        assert "is of another start, and is not used" in caplog.text
        caplog.clear()
