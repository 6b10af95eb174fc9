"""Peer memory of one node: the images that it keeps for others, and those that it sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kept_records import CUT, ONE, image_of, receive, records_of
from test_stored import attempt

from tierfall.core.format.decided import DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.restore.agreement import names_all_shards
from tierfall.core.types.errors import KeyNotFoundError, UnreachableError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.kept_images import KeptFolder, KeptImages
from tierfall.tiers.peers import PeerCache

TWO = CheckpointId(2, 1)


class Wired:
    """A node that another one sends to, without a wire: its requests, by the names of a ``PeerClient``. While
    ``silent`` names a request, it is not answered."""

    def __init__(self, images: KeptImages) -> None:
        self.images_there = images
        self.silent = ""
        self.begun: list[Any] = []

    def _ask(self, do: str, call: Callable[[], Any]) -> Any:
        if self.silent == do:
            raise UnreachableError("no answer, on purpose")
        return call()

    def begin(self, id: CheckpointId, shard: Shard, **more: Any) -> bool:
        self.begun.append((id, shard, more["attempt_id"], more["waiting"]))
        begin = self.images_there.begin
        return bool(self._ask("begin", lambda: begin(id, shard, **more)))

    def write(
        self, id: CheckpointId, shard: Shard, upload: int, offset: int, view: memoryview
    ) -> None:
        def write() -> None:
            with self.images_there.receiving(id, shard, upload, offset, view.nbytes) as memory:
                memory[:] = view

        self._ask("write", write)

    def seal(self, id: CheckpointId, shard: Shard, upload: int, **records: bytes) -> None:
        self._ask("seal", lambda: self.images_there.seal(id, shard, upload, **records))

    def discard(self, id: CheckpointId, shard: Shard, upload: int) -> None:
        self._ask("discard", lambda: self.images_there.discard(id, shard, upload))

    def images(self) -> Any:
        return self._ask("images", self.images_there.kept.images)

    def close(self) -> None:
        self.images_there.close(keep=True)


class Node:
    """A node of two ranks' job, with what it keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.images = KeptImages(KeptFolder(folder, "run"), 0)

    def cache(self, *sent: Node | Wired, rank: int = 0) -> PeerCache:
        clients: Any = [node if isinstance(node, Wired) else Wired(node.images) for node in sent]
        return PeerCache(
            name="peers",
            run="run",
            folder=self.folder,
            kept=self.images.kept,
            images=self.images,
            sent=clients,
            shard=Shard(rank, 2),
        )

    def kept(self) -> list[tuple[CheckpointId, int]]:
        images, _ = self.images.kept.images()
        return sorted((image.commit.lineage.checkpoint, image.shard.rank) for image in images)


Make = Callable[[], Node]


@pytest.fixture
def node(tmp_path: Path) -> Make:
    numbers = iter(range(100))
    return lambda: Node(tmp_path / f"node-{next(numbers)}")


def send(cache: PeerCache, rank: int = 0, id: CheckpointId = ONE, *, count: bool = True) -> None:
    """Send the image of a rank; ``count``: rank 0 says that the checkpoint is whole."""
    manifest, commit = records_of(id, rank)
    writer = cache.create_shard(id, Shard(rank, 2), CUT, Spliced(b"[]"))
    writer.write_chunks(0, 0, memoryview(image_of(id, rank)))
    writer.finish(manifest)
    cache.write_manifest(id, Shard(rank, 2), manifest.encode())
    if count:
        cache.commit(commit, attempt=attempt())


def read(cache: PeerCache, rank: int = 0, id: CheckpointId = ONE) -> bytes:
    data = bytearray(CUT.image_bytes)
    cache.read_into(id, Shard(rank, 2), 0, memoryview(data))
    return bytes(data)


def test_the_shards_of_two_attempts_of_one_number_never_add_up(node: Make) -> None:
    keeper = node()
    receive(keeper.images, ONE, 0)
    receive(keeper.images, ONE, 1, "b")
    (copy,) = keeper.cache().list().copies
    assert copy.commit is not None
    assert not names_all_shards(copy.commit)


def test_a_shard_counts_once_rank_0_has_said_that_the_checkpoint_is_whole(node: Make) -> None:
    keeper = node()
    sender = node().cache(keeper)
    send(sender, count=False)
    assert keeper.cache().list().copies == ()
    assert not sender.is_committed(ONE)
    sender.commit(records_of(ONE)[1], attempt=attempt())
    (copy,) = keeper.cache().list().copies
    assert (copy.id, copy.commit) == (ONE, records_of(ONE)[1])
    assert sender.is_committed(ONE)


def test_an_image_is_on_all_that_are_to_keep_it_or_not_written(node: Make) -> None:
    first, second = node(), node()
    wired = Wired(second.images)
    sender = node().cache(first, wired)
    send(sender, count=False)
    wired.silent = "seal"
    with pytest.raises(UnreachableError):
        sender.commit(records_of(ONE)[1], attempt=attempt())
    with pytest.raises(KeyNotFoundError):
        sender.written_commit(ONE)
    wired.silent = ""
    sender.commit(records_of(ONE)[1], attempt=attempt())
    assert sender.written_commit(ONE) == records_of(ONE)[1]
    assert first.kept() == second.kept() == [(ONE, 0)]


def test_what_a_node_has_sent_is_known_there_though_it_keeps_nothing(node: Make) -> None:
    sender = node().cache(node())
    send(sender)
    assert sender.list().copies == ()
    found = sender.find_copy(ONE)
    assert found is not None
    assert found.commit == sender.read_commit(ONE) == records_of(ONE)[1]
    assert read(sender) == image_of(ONE)


def test_a_deletion_takes_what_each_node_keeps_and_asks_no_other_node(node: Make) -> None:
    one, keeper = node(), node()
    receive(one.images, ONE, 1)
    wired = Wired(keeper.images)
    cache = one.cache(wired)
    send(cache)
    wired.silent = "discard"
    cache.delete(ONE, attempt=attempt(), known=DecidedList())
    assert one.kept() == []
    assert keeper.kept() == [(ONE, 0)]
    keeper.cache().delete(ONE, attempt=attempt(), known=DecidedList())
    assert keeper.kept() == []


def test_a_commit_that_is_revoked_costs_nothing_of_an_earlier_start(node: Make) -> None:
    one, keeper = node(), node()
    receive(one.images, ONE, 1)
    cache = one.cache(keeper)
    send(cache)
    cache.delete(ONE, attempt=attempt(), known=None)
    assert keeper.kept() == []
    assert one.kept() == [(ONE, 1)]
    assert not cache.is_committed(ONE)


def test_an_image_is_read_from_the_second_keeper_if_the_first_is_silent(node: Make) -> None:
    wired = Wired(node().images)
    cache = node().cache(wired, node())
    send(cache)
    wired.silent = "images"
    assert read(cache) == image_of(ONE)


def test_an_image_that_is_given_up_leaves_nothing_once_the_next_one_is_begun(node: Make) -> None:
    """The node was silent when it was given up."""
    keeper = node()
    wired = Wired(keeper.images)
    cache = node().cache(wired)
    writer = cache.create_shard(ONE, Shard(0, 2), CUT, Spliced(b"[]"))
    wired.silent = "discard"
    writer.abort()
    wired.silent = ""
    send(cache, id=TWO)
    assert keeper.kept() == [(TWO, 0)]
    assert len([*keeper.folder.glob("*.image")]) == 1


def test_an_image_that_waits_for_rank_0_stays_while_the_next_one_is_sent(node: Make) -> None:
    keeper = node()
    cache = node().cache(keeper)
    send(cache, count=False)
    send(cache, id=TWO)
    cache.commit(records_of(ONE)[1], attempt=attempt())
    assert keeper.kept() == [(ONE, 0), (TWO, 0)]


def test_what_a_keeper_has_of_an_earlier_start_is_not_sent_again(node: Make) -> None:
    keeper = node()
    receive(keeper.images, ONE)
    keeper.images.close(keep=True)
    later = Wired(KeptImages(KeptFolder(keeper.folder, "run"), 0))
    cache = node().cache(later)
    writer = cache.create_shard(ONE, Shard(0, 2), CUT, Spliced(b"[]"), attempt_id="a" * 32)
    assert writer.has_chunk(0)
    assert later.begun == [(ONE, Shard(0, 2), "a" * 32, [])]
    cache.write_manifest(ONE, Shard(0, 2), records_of(ONE)[0].encode())
    cache.commit(records_of(ONE)[1], attempt=attempt())
    assert keeper.kept() == [(ONE, 0)]
    cache.delete(ONE, attempt=attempt(), known=None)
    assert keeper.kept() == [(ONE, 0)], "it is not this start's to revoke"


def test_an_image_is_sent_if_it_takes_the_keeper_too_long_to_read_what_it_has(node: Make) -> None:
    keeper = node()
    wired = Wired(keeper.images)
    ask = wired._ask

    def too_long(do: str, call: Callable[[], Any]) -> Any:
        if wired.begun[-1][2] is not None:
            raise UnreachableError("no answer in time")
        return ask(do, call)

    wired._ask = too_long  # type: ignore[method-assign]
    cache = node().cache(wired)
    writer = cache.create_shard(ONE, Shard(0, 2), CUT, Spliced(b"[]"), attempt_id="a" * 32)
    writer.write_chunks(0, 0, memoryview(image_of(ONE)))
    cache.write_manifest(ONE, Shard(0, 2), records_of(ONE)[0].encode())
    cache.commit(records_of(ONE)[1], attempt=attempt())
    assert keeper.kept() == [(ONE, 0)]


def test_a_deletion_that_a_silent_node_has_not_heard_of_is_repeated(node: Make) -> None:
    keeper = node()
    wired = Wired(keeper.images)
    cache = node().cache(wired)
    send(cache)
    wired.silent = "discard"
    with pytest.raises(UnreachableError):
        cache.delete(ONE, attempt=attempt(), known=None)
    wired.silent = ""
    cache.delete(ONE, attempt=attempt(), known=None)
    assert keeper.kept() == []
