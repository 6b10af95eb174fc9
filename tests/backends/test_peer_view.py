"""Two nodes that keep each other's checkpoints: one is lost, and the other has all that it needs."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from backend_places import get, put

from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.memory import MemoryBackend
from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.server import PeerServer
from tierfall.backends.peer.view import PeerView
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import KeyNotFoundError, UnreachableError

SECRET = b"s" * 32
IMAGE = "run/step-00000010-a0001/rank-00000-of-00002.safetensors"
RECORD = "run/step-00000010-a0001/commit.json"


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


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", CHECKS)
def test_promise(name: str, copies: int) -> None:
    def make() -> PeerView:
        return PeerView([MemoryBackend()], [MemoryBackend() for _ in range(copies)])

    check_promise(name, make)


def test_a_lost_node_has_left_its_images_with_the_other(nodes: list[Node]) -> None:
    a, b = nodes
    with closing(a.view(b, attempt=1)) as view:
        put(view, IMAGE, b"image of a")
        put(view, RECORD, b"record")
        assert get(view, IMAGE) == b"image of a"
        assert [each.key for each in view.scan("run/")] == [RECORD, IMAGE]
    shutil.rmtree(a.folder, ignore_errors=True)
    with closing(b.view(a, attempt=None)) as view:
        assert [each.key for each in view.scan("run/")] == [RECORD, IMAGE]
        assert get(view, IMAGE) == b"image of a"
        view.attempt = 2
        view.delete(IMAGE)
        with pytest.raises(KeyNotFoundError):
            view.stat(IMAGE)


def test_what_another_node_sends_in_this_attempt_is_not_this_nodes(nodes: list[Node]) -> None:
    a, b = nodes
    with closing(a.view(b, attempt=1)) as sender, closing(b.view(a, attempt=1)) as receiver:
        put(sender, IMAGE, b"image of a")
        assert [each.key for each in receiver.scan("run/")] == []
        with pytest.raises(KeyNotFoundError):
            receiver.stat(IMAGE)
        receiver.delete(IMAGE)
        assert get(sender, IMAGE) == b"image of a"


def test_documents_of_no_checkpoint_are_found_on_either_side(nodes: list[Node]) -> None:
    a, b = nodes
    with closing(a.view(b, attempt=1)) as sender, closing(b.view(a, attempt=2)) as receiver:
        put(sender, "run/attempts/a0001.json", b"one")
        put(receiver, "run/attempts/a0002.json", b"two")
        for view in (sender, receiver):
            found = [each.key for each in view.scan("run/attempts/")]
            assert found == ["run/attempts/a0001.json", "run/attempts/a0002.json"]
            assert get(view, found[0]) == b"one"
        sender.delete("run/attempts/a0002.json")
        assert [each.key for each in receiver.scan("run/")] == ["run/attempts/a0001.json"]


def test_a_lost_receiver_is_not_taken_for_an_empty_one(nodes: list[Node]) -> None:
    a, b = nodes
    with closing(a.view(b, attempt=1)) as view:
        put(view, IMAGE, b"image of a")
        b.server.close()
        with pytest.raises(UnreachableError):
            view.stat(IMAGE)
        with pytest.raises(UnreachableError):
            list(view.scan("run/"))
