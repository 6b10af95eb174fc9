"""Nodes in one process that keep the parity of each other's images, for tests."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from random import Random

from tierfall.backends.memory import MemoryBackend
from tierfall.backends.parity.rebuild import NodeMemory
from tierfall.backends.parity.store import ParityStore
from tierfall.backends.parity.stripes import ParityGeometry
from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.parity import GroupMember, ParityBackend, ParityGroup
from tierfall.backends.peer.server import PeerServer
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.backend import Backend

RUN = "run"
BLOCK = 1000


class Node:
    """A node's memory: a folder with parity, the images of its own ranks, and the server of a start."""

    def __init__(self, folder: Path, number: int) -> None:
        self.id = f"id-{number}"
        self.number = number
        self.folder = folder
        self.originals = MemoryBackend()
        self.begin(b"1" * 32)

    def begin(self, secret: bytes) -> None:
        """Begin a start: a process with a store and a server of its own."""
        self.secret = secret
        self.store = ParityStore(self.folder / "parity")
        spaces = {"parity": self.kept, "originals": lambda: self.originals}
        self.server = PeerServer(
            secret=secret,
            run=RUN,
            storage=lambda sender: spaces.get(sender, self.documents)(),
            listener=socket.create_server(("127.0.0.1", 0)),
            parity=self.store,
        )

    def end(self) -> None:
        self.server.close()
        self.store.close()

    def lose(self) -> None:
        """Lose the node, with all that is in its memory."""
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.originals = MemoryBackend()

    def kept(self) -> Backend:
        return PosixBackend(self.folder / "parity", direct_io=False)

    def documents(self) -> Backend:
        return PosixBackend(self.folder / "documents", direct_io=False)

    def client(self, sender: str) -> PeerBackend:
        """Open a connection to this node."""
        return PeerBackend(
            ("127.0.0.1", self.server.port),
            secret=self.secret,
            run=RUN,
            sender=sender,
            timeout_s=2.0,
        )

    def files(self) -> list[str]:
        """Name all files of parity that this node keeps, those that are not published too."""
        root = self.folder / "parity"
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


class Cluster:
    """Nodes that form one group."""

    def __init__(self, folder: Path, members: int, losses: int = 1, block: int = BLOCK) -> None:
        self.geometry = ParityGeometry(members, losses, block)
        self.nodes = [Node(folder / f"node-{number}", number) for number in range(members)]
        self.opened: list[Backend] = []

    def view(
        self, at: int, *, documents: Backend | None = None, name: str = "00000"
    ) -> ParityBackend:
        """Open what a node sees of the tier; ``name`` is that of the sets of one of its ranks."""
        members, nodes = [], {}
        for node in self.nodes:
            parity, originals = node.client("parity"), node.client("originals")
            members.append(GroupMember(node.id, node.store.id, parity))
            nodes[node.id] = NodeMemory(parity, originals)
            self.opened += [parity, originals]
        view = ParityBackend(
            documents or MemoryBackend(),
            ParityGroup(tuple(members), at, name, self.geometry),
            kept=self.nodes[at].kept(),
            nodes=nodes,
        )
        self.opened.append(view)
        return view

    def restart(self, *lost: int) -> None:
        """End the start, lose some nodes, and begin another start with new ones in their place."""
        self.close_views()
        for node in self.nodes:
            if node.number in lost:
                node.lose()
                node.id += "-new"
            else:
                node.end()
            node.begin(node.secret[1:] + b"2")

    def close_views(self) -> None:
        for view in self.opened:
            view.close()
        self.opened.clear()

    def close(self) -> None:
        self.close_views()
        for node in self.nodes:
            node.end()


def image_key(member: int, members: int, step: int = 10) -> str:
    return f"{RUN}/step-{step:08d}-a0001/rank-{member:05d}-of-{members:05d}.safetensors"


def save_all(
    cluster: Cluster, views: list[ParityBackend], sizes: Mapping[int, int], step: int = 10
) -> dict[str, bytes]:
    """Save an image of each member, as its node has it in memory, and return all by key."""
    images = {}
    for member, node in enumerate(cluster.nodes):
        key = image_key(member, len(cluster.nodes), step)
        images[key] = Random(member + step).randbytes(sizes[member])
        node.originals.store.put(key, memoryview(images[key]), False)
        send(views[member], key, images[key])
    return images


def send(view: ParityBackend, key: str, image: bytes, *, chunk: int = 700) -> None:
    """Write an image in chunks, the last one first."""
    with view.create(key, length=len(image)) as writer:
        for start in reversed(range(0, len(image), chunk)):
            writer.write(start, memoryview(image)[start : start + chunk])
        writer.publish()
