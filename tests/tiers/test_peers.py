"""Peer memory of one node: the images that it keeps for others, and those that it sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_stored import CUT, IMAGE, attempt, commit_of, manifest_of

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tierfall.core.format.commit_files import raw_files, shards_of
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit
from tierfall.core.restore.agreement import names_all_shards
from tierfall.core.types.backend import Backend, put_object
from tierfall.core.types.errors import KeyNotFoundError, UnreachableError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.peers import PeerCache, PeerFolder

ONE = CheckpointId(1, 1)
MANIFEST = b"manifest"


class Node:
    """A node of two, with what it keeps, by sender."""

    def __init__(self) -> None:
        self.kept: dict[str, Backend] = {}

    def cache(self, *sent: Backend) -> PeerCache:
        folders = {name: PeerFolder("peers", "run", backend) for name, backend in self.kept.items()}
        return PeerCache(
            name="peers",
            run="run",
            kept=lambda: folders,
            sent=[PeerFolder("peers", "run", backend) for backend in sent],
            backend=(*sent, MemoryBackend("none"))[0],
        )


def record(rank: int, identity: str = "a") -> Commit:
    files = raw_files(Shard(rank, 2), image_bytes=len(IMAGE), manifest=MANIFEST)
    return replace(commit_of(1, identity=identity), world_size=2, files=files)


def send(cache: PeerCache, commit: Commit, *, count: bool = True) -> None:
    """Send the image of a rank; ``count``: rank 0 says that the checkpoint is whole."""
    (shard,) = shards_of(commit)
    writer = cache.create_shard(ONE, shard, CUT, Spliced(b"[]"))
    writer.write_chunks(0, 0, memoryview(IMAGE))
    writer.finish(manifest_of(1))
    cache.write_manifest(ONE, shard, MANIFEST)
    if count:
        cache.commit(commit, attempt=attempt())


def test_the_shards_of_two_attempts_of_one_number_never_add_up() -> None:
    keeper = Node()
    for sender, commit in (("1-0", record(0)), ("2-1", record(1, "b"))):
        keeper.kept[sender] = backend = MemoryBackend("keeper")
        send(Node().cache(backend), commit)
    (copy,) = keeper.cache().list().copies
    assert copy.commit is not None
    assert not names_all_shards(copy.commit)


def test_a_shard_counts_once_rank_0_has_said_that_the_checkpoint_is_whole() -> None:
    keeper = Node()
    keeper.kept["1-0"] = backend = MemoryBackend("keeper")
    sender = Node().cache(backend)
    send(sender, record(0), count=False)
    assert keeper.cache().list().copies == ()
    sender.commit(record(0), attempt=attempt())
    (copy,) = keeper.cache().list().copies
    assert (copy.id, copy.commit) == (ONE, record(0))


def test_an_image_is_on_all_that_are_to_keep_it_or_not_written() -> None:
    first, second = MemoryBackend("first"), MemoryBackend("second")
    once = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.CREATE, keys="*/commit.json")
    sender = Node().cache(first, Faulty(second, seed=0, plan=[once]))
    send(sender, record(0), count=False)
    with pytest.raises(UnreachableError):
        sender.commit(record(0), attempt=attempt())
    with pytest.raises(KeyNotFoundError):
        sender.written_commit(ONE)
    sender.commit(record(0), attempt=attempt())
    assert sender.written_commit(ONE) == record(0)


def test_what_is_kept_of_another_start_is_not_what_this_one_has_sent() -> None:
    node, keeper = Node(), MemoryBackend("keeper")
    node.kept["1-1"] = backend = MemoryBackend("node")
    send(Node().cache(backend), record(0))
    again = node.cache(keeper)
    assert not again.is_committed(ONE)
    assert again.read_commit(ONE) == record(0)


def test_a_deletion_takes_what_each_node_keeps_and_asks_no_other_node() -> None:
    node, keeper = Node(), MemoryBackend("keeper")
    node.kept["1-1"] = kept = MemoryBackend("node")
    send(Node().cache(kept), record(1))
    silent = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.DELETE, times=None)
    cache = node.cache(Faulty(keeper, seed=0, plan=[silent]))
    send(cache, record(0))
    cache.delete(ONE, attempt=attempt(), known=DecidedList())
    assert [*kept.scan("run/")] == []
    other = Node()
    other.kept["2-0"] = keeper
    other.cache().delete(ONE, attempt=attempt(), known=DecidedList())
    assert [*keeper.scan("run/")] == []


def test_a_damaged_record_in_one_folder_hides_nothing_in_another() -> None:
    node = Node()
    for sender in ("1-1", "2-1"):
        node.kept[sender] = MemoryBackend(sender)
        send(Node().cache(node.kept[sender]), record(1))
    put_object(node.kept["1-1"], "run/step-00000001-a0001/commit.json", b"damaged")
    target = bytearray(len(IMAGE))
    node.cache().read_into(ONE, Shard(1, 2), 0, memoryview(target))
    assert bytes(target) == IMAGE


def test_all_of_a_run_goes_from_all_that_keep_it() -> None:
    node, keepers = Node(), [MemoryBackend("first"), MemoryBackend("second")]
    node.kept["1-1"] = kept = MemoryBackend("node")
    send(Node().cache(kept), record(1))
    cache = node.cache(*keepers)
    send(cache, record(0))
    cache.delete_run()
    assert [s for backend in (kept, *keepers) for s in backend.scan("run/")] == []


def test_a_commit_that_is_revoked_costs_nothing_of_an_earlier_start() -> None:
    node, keeper = Node(), MemoryBackend("keeper")
    node.kept["1-1"] = kept = MemoryBackend("node")
    send(Node().cache(kept), record(1))
    cache = node.cache(keeper)
    send(cache, record(0))
    cache.delete(ONE, attempt=attempt(), known=None)
    assert [*keeper.scan("run/")] == []
    assert cache.list().copies


def test_an_image_is_read_from_the_second_keeper_if_the_first_is_silent() -> None:
    first, second = MemoryBackend("first"), MemoryBackend("second")
    silent = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.READ, keys="*.safetensors")
    cache = Node().cache(Faulty(first, seed=0, plan=[silent]), second)
    send(cache, record(0))
    target = bytearray(len(IMAGE))
    cache.read_into(ONE, Shard(0, 2), 0, memoryview(target))
    assert bytes(target) == IMAGE


def test_a_start_deletes_what_an_earlier_one_has_sent_in_part() -> None:
    keeper = Node()
    keeper.kept["1-0"] = backend = MemoryBackend("keeper")
    send(Node().cache(backend), record(0), count=False)
    keeper.cache().discard_unfinished(attempt=attempt(2))
    assert [*backend.scan("run/")] == []


def test_what_a_keeper_has_of_an_earlier_start_is_not_sent_again() -> None:
    asked = []

    def adopt(*image: object) -> bool:
        asked.append(image)
        return True

    cache = Node().cache(MemoryBackend("new"))
    cache._sent[0].adopt = adopt
    writer = cache.create_shard(ONE, Shard(0, 2), CUT, Spliced(b"[]"), attempt_id="a" * 32)
    assert writer.has_chunk(0)
    assert asked == [(ONE, Shard(0, 2), "a" * 32)]


def test_an_image_is_sent_to_a_keeper_that_cannot_tell_whether_it_has_it() -> None:
    def adopt(*image: object) -> bool:
        raise UnreachableError("no answer in time")

    keeper = MemoryBackend("new")
    cache = Node().cache(keeper)
    cache._sent[0].adopt = adopt
    writer = cache.create_shard(ONE, Shard(0, 2), CUT, Spliced(b"[]"), attempt_id="a" * 32)
    writer.write_chunks(0, 0, memoryview(IMAGE))
    writer.finish(manifest_of(1))
    assert [stored.bytes for stored in keeper.scan("run/")] == [len(IMAGE)]
