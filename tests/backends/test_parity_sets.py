"""Nodes that keep the parity of each other's images: whichever are lost, the others rebuild what these had, whatever
happened to requests and connections meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from backend_places import get, put
from parity_nodes import BLOCK, RUN, Cluster, Node, image_key, save_all, send

from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.memory import MemoryBackend
from tierfall.backends.parity import rebuild, store
from tierfall.backends.parity.sets import parity_key, parse_parity_set, record_key
from tierfall.backends.peer import server as peer_server
from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.parity import ParityBackend, ParityGroup
from tierfall.backends.peer.wire import Connection
from tierfall.core.format.documents import open_sealed, seal
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)

SET = f"{RUN}/step-00000010-a0001/00000"
SIZES = {0: 5 * BLOCK + 17, 1: 0, 2: 12 * BLOCK, 3: 1, 4: 7 * BLOCK - 1}

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeCluster]:
    made: list[Cluster] = []

    def start(members: int = 4, losses: int = 1, block: int = BLOCK) -> Cluster:
        made.append(Cluster(tmp_path / f"cluster-{len(made)}", members, losses, block))
        return made[-1]

    yield start
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(make: MakeCluster) -> Cluster:
    return make()


def views_of(cluster: Cluster) -> list[ParityBackend]:
    return [cluster.view(at) for at in range(len(cluster.nodes))]


@pytest.mark.parametrize("name", CHECKS)
def test_promise(name: str, cluster: Cluster) -> None:
    """What is no image is as on the backend of the documents."""
    check_promise(name, lambda: cluster.view(0, documents=MemoryBackend()))


# Lost nodes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "losses"), [(2, 1), (3, 1), (4, 1), (4, 2), (5, 3)])
def test_whichever_nodes_are_lost_the_others_rebuild_their_images(
    make: MakeCluster, members: int, losses: int
) -> None:
    cluster = make(members, losses)
    images = save_all(cluster, views_of(cluster), SIZES)
    cluster.restart()
    for lost in combinations(range(members), losses):
        cluster.close_views()
        for node in cluster.nodes:
            node.id = f"id-{node.number}" + "-new" * (node.number in lost)
        found: dict[str, bytes] = {}
        for at in set(range(members)) - set(lost):
            view = cluster.view(at)
            found |= {each.key: get(view, each.key) for each in view.scan(f"{RUN}/")}
        for key in (image_key(member, members) for member in lost):
            assert found[key] == images[key]


def test_a_start_after_the_loss_of_a_node_has_its_image(cluster: Cluster) -> None:
    images = save_all(cluster, views_of(cluster), SIZES)
    cluster.restart(2)
    key = image_key(2, 4)
    view = cluster.view(3)  # it has the documents of member 2
    assert [(each.key, each.bytes) for each in view.scan(f"{RUN}/")] == [(key, len(images[key]))]
    assert view.stat(key).bytes == len(images[key])
    random = Random(1)
    for _ in range(20):
        start, end = sorted(random.randrange(len(images[key]) + 1) for _ in range(2))
        target = bytearray(end - start)
        view.read_into(key, start, memoryview(target))
        assert target == images[key][start:end]
    with pytest.raises(BackendError, match="it ends at 12000"):
        view.read_into(key, 11_999, memoryview(bytearray(2)))
    assert not view.read_cached(key, 0, 1, [memoryview(bytearray(1))])
    new = cluster.view(2)
    assert list(new.scan(f"{RUN}/")) == []
    with pytest.raises(KeyNotFoundError):
        new.stat(key)


def test_a_node_that_is_there_has_its_image_read_from_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read in place of one for each member."""
    images = save_all(cluster, views_of(cluster), SIZES)
    cluster.restart()
    key, view = image_key(0, 4), cluster.view(1)
    reads = []
    request = PeerBackend.request

    def count(backend: PeerBackend, what: str, head: Any, *more: Any, **named: Any) -> Any:
        reads.append(head["key"])
        return request(backend, what, head, *more, **named)

    monkeypatch.setattr(PeerBackend, "request", count)
    assert get(view, key) == images[key]
    assert reads == [key]


def test_what_a_node_has_sent_is_not_read_from_its_own_memory(cluster: Cluster) -> None:
    """Or a check of the copy would check the original."""
    views = views_of(cluster)
    images = save_all(cluster, views, SIZES)
    key = image_key(0, 4)
    cluster.nodes[0].originals.store.put(key, memoryview(b"x" * len(images[key])), False)
    assert get(views[0], key) == images[key]
    assert [each.key for each in views[0].scan(f"{RUN}/")] == [key]


def test_parity_takes_its_share_of_memory(make: MakeCluster) -> None:
    cluster = make(4, 2)
    image = 60 * BLOCK
    save_all(cluster, views_of(cluster), dict.fromkeys(range(4), image))
    for node in cluster.nodes:
        sizes = [(node.folder / "parity" / name).stat().st_size for name in node.files()]
        assert image <= sum(sizes) < image + 1000  # 2 / (4 - 2) of an image, and the record


def test_too_many_lost_nodes_are_named(cluster: Cluster) -> None:
    save_all(cluster, views_of(cluster), SIZES)
    cluster.restart(0, 2)
    view = cluster.view(1)
    with pytest.raises(
        BackendError, match=r"loss of 1 of 4 nodes, but .* image of id-0.*id-2"
    ) as no:
        get(view, image_key(0, 4))
    assert not no.value.retryable
    assert not isinstance(no.value, KeyNotFoundError)


def test_a_node_that_does_not_answer_is_not_taken_for_lost_for_good(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = save_all(cluster, views_of(cluster), SIZES)
    cluster.restart(0)
    view = cluster.view(1)
    read, silent = PeerBackend.read_into, cluster.nodes[2].server.port

    def fail(backend: PeerBackend, key: str, offset: int, into: memoryview) -> None:
        if backend._address[1] == silent:
            raise UnreachableError("it is silent")
        read(backend, key, offset, into)

    with monkeypatch.context() as patched:
        patched.setattr(PeerBackend, "read_into", fail)
        with pytest.raises(UnreachableError, match="image of id-2: it is silent"):
            get(view, image_key(0, 4))
        with pytest.raises(UnreachableError):
            get(view, image_key(0, 4))
    monkeypatch.setattr(rebuild.time, "monotonic", lambda: float(1 << 40))
    assert get(view, image_key(0, 4)) == images[image_key(0, 4)]


def test_parity_is_used_of_those_that_have_it(make: MakeCluster) -> None:
    """With two blocks of parity for each stripe, one lost file of parity, and one lost image, of two members."""
    cluster = make(4, 2)
    images = save_all(cluster, views_of(cluster), SIZES)
    cluster.restart(0)
    (cluster.nodes[1].folder / "parity" / parity_key(SET)).unlink()
    assert get(cluster.view(2), image_key(0, 4)) == images[image_key(0, 4)]


def test_an_image_that_turns_out_to_be_lost_is_left_out(make: MakeCluster) -> None:
    """What was summed up before that is dropped."""
    cluster = make(4, 2)
    images = save_all(cluster, views_of(cluster), SIZES)
    cluster.restart(0)
    cluster.nodes[2].originals = MemoryBackend()
    target = bytearray(b"x" * len(images[image_key(0, 4)]))
    cluster.view(1).read_into(image_key(0, 4), 0, memoryview(target))
    assert target == images[image_key(0, 4)]


# Requests and connections -----------------------------------------------------------------------------


def test_every_request_may_arrive_twice(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    request = PeerBackend.request

    def twice(backend: PeerBackend, *args: Any, **named: Any) -> Any:
        request(backend, *args, **named)
        return request(backend, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(PeerBackend, "request", twice)
        images = save_all(cluster, views_of(cluster), SIZES)
    cluster.restart(2)
    assert get(cluster.view(3), image_key(2, 4)) == images[image_key(2, 4)]


def test_lost_answers_and_connections_change_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third block is added, and its connection ends before the answer."""
    fold, numbers = peer_server._RequestHandler._fold, iter(range(10_000))

    def lose(conversation: peer_server._RequestHandler, head: Any, length: int) -> Any:
        answer = fold(conversation, head, length)
        if next(numbers) % 3 == 0:
            conversation._connection.close()
        return answer

    views = views_of(cluster)
    monkeypatch.setattr(peer_server._RequestHandler, "_fold", lose)
    images = save_all(cluster, [Retried(view) for view in views], SIZES)  # type: ignore[misc]
    monkeypatch.undo()
    cluster.restart(2)
    assert next(numbers) > 20
    assert get(cluster.view(3), image_key(2, 4)) == images[image_key(2, 4)]


class Retried:
    """A view whose writers repeat what failed and may be repeated, as the tier does."""

    def __init__(self, view: ParityBackend) -> None:
        self._view = view

    def create(self, *args: Any, **named: Any) -> Any:
        writer = self._view.create(*args, **named)
        write = writer.write

        def again(offset: int, data: memoryview) -> None:
            for _ in range(10):
                try:
                    write(offset, data)
                    return
                except UnreachableError:
                    continue
            raise AssertionError("it never comes through")

        writer.write = again  # type: ignore[method-assign]
        return writer


def test_a_block_that_changes_on_the_way_is_not_added(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    views, image = views_of(cluster), b"image of node 0"
    writer = views[0].create(image_key(0, 4), length=len(image))
    fill = Connection._fill

    def flip(connection: Connection, view: memoryview) -> None:
        fill(connection, view)
        if bytes(view) == image:
            view[0] ^= 1

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "_fill", flip)
        with pytest.raises(UnreachableError, match="arrived damaged"):
            writer.write(0, memoryview(image))
    writer.write(0, memoryview(image))
    writer.publish()
    for member in range(1, 4):
        send(views[member], image_key(member, 4), b"")
    cluster.restart(0)
    assert get(cluster.view(1), image_key(0, 4)) == image


def test_threads_write_one_image_at_once(make: MakeCluster) -> None:
    cluster = make(3, 2, 64)
    views = views_of(cluster)
    image = Random(1).randbytes(64 * 200)
    writers = [view.create(image_key(at, 3)) for at, view in enumerate(views)]

    def write(at: int, first: int) -> None:
        for start in range(first * 100, len(image), 400):
            writers[at].write(start, memoryview(image)[start : start + 100])

    threads = [threading.Thread(target=write, args=(at, n)) for at in range(3) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, writer in enumerate(writers):
        cluster.nodes[at].originals.store.put(image_key(at, 3), memoryview(image), False)
        writer.publish()
    cluster.restart(0, 1)
    assert get(cluster.view(2), image_key(1, 3)) == image


# A set that is not completed --------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
def test_a_receiver_that_is_replaced_ends_the_set_and_the_older_one_stays(
    cluster: Cluster, begun: bool
) -> None:
    """A process that takes the place of the one that has parity must not go on with what the other has lost."""
    views = views_of(cluster)
    images = save_all(cluster, views, SIZES)
    new = [image_key(at, 4, step=11) for at in range(4)]
    send(views[0], new[0], b"0" * 9000)
    writer = views[2].create(new[2]) if begun else None
    if writer is not None:
        writer.write(0, memoryview(b"2" * 3000))
    replaced = cluster.nodes[1]
    secret, port = replaced.secret, replaced.server.port
    replaced.end()
    replaced.begin(secret)
    for view in views:
        backend = view._group.members[1].parity
        backend._address = ("127.0.0.1", replaced.server.port)
    assert replaced.server.port != port
    with pytest.raises(BackendError, match="process that kept it is another by now") as no:
        (writer or views[2].create(new[2])).write(3000, memoryview(b"2" * 6000))
    assert not no.value.retryable
    for node in cluster.nodes:
        assert record_key(SET) in node.files()
    cluster.restart(2)
    for node in cluster.nodes:
        node.kept().discard_unfinished(f"{RUN}/")
        assert all(name.startswith(SET) for name in node.files())
    assert get(cluster.view(3), image_key(2, 4)) == images[image_key(2, 4)]


def test_an_image_that_is_given_up_ends_the_set_for_all(cluster: Cluster) -> None:
    views = views_of(cluster)
    send(views[0], image_key(0, 4), b"0" * 9000)
    late = views[3].create(image_key(3, 4))
    with views[1].create(image_key(1, 4), length=9000) as writer:
        writer.write(0, memoryview(b"1" * 8000))
    assert all(node.files() == [] for node in cluster.nodes)
    with pytest.raises(BackendError, match="id-1 has given its image up"):
        late.write(0, memoryview(b"3" * 10))
    with pytest.raises(BackendError, match="this writer is dead"):
        late.write(0, memoryview(b"3" * 10))
    with pytest.raises(BackendError, match="id-1 has given its image up"):
        views[1].create(image_key(1, 4), length=9000)


def test_an_image_that_is_given_up_before_anything_was_sent_can_be_begun_again(
    cluster: Cluster,
) -> None:
    views = views_of(cluster)
    for at in (0, 2):
        views[at].create(image_key(at, 4)).abort()
    images = save_all(cluster, views[:1] + views[1:], SIZES)
    cluster.restart(0)
    assert get(cluster.view(1), image_key(0, 4)) == images[image_key(0, 4)]


def test_the_only_image_of_a_set_can_be_given_up_and_begun_again(cluster: Cluster) -> None:
    views = views_of(cluster)
    with views[0].create(image_key(0, 4), length=9000) as writer:
        writer.write(0, memoryview(b"0" * 8000))
    assert all(node.files() == [] for node in cluster.nodes)
    images = save_all(cluster, views, SIZES)
    cluster.restart(0)
    assert get(cluster.view(1), image_key(0, 4)) == images[image_key(0, 4)]


def test_a_second_writer_of_an_image_ends_the_set(cluster: Cluster) -> None:
    """What the first one has sent is in the parity, and cannot be told from other bytes."""
    view = cluster.view(0)
    first = view.create(image_key(0, 4))
    first.write(0, memoryview(b"0" * 100))
    with pytest.raises(BackendError, match="id-0 has begun its image a second time"):
        view.create(image_key(0, 4))
    with pytest.raises(BackendError, match="id-0 has begun its image a second time"):
        first.publish()
    assert all(node.files() == [] for node in cluster.nodes)


def test_a_set_is_complete_once_all_images_are(cluster: Cluster) -> None:
    views = views_of(cluster)
    for at in range(3):
        send(views[at], image_key(at, 4), b"x" * 5000)
    assert not any(record_key(SET) in node.files() for node in cluster.nodes)
    send(views[3], image_key(3, 4), b"x")
    assert all(node.files() == [record_key(SET), parity_key(SET)] for node in cluster.nodes)
    with pytest.raises(BackendError, match="it is complete; delete the checkpoint first"):
        views[3].create(image_key(3, 4))


def test_an_image_with_a_gap_is_not_finished(cluster: Cluster) -> None:
    writer = cluster.view(0).create(image_key(0, 4))
    writer.write(0, memoryview(b"0" * 1000))
    writer.write(4000, memoryview(b"0" * 1000))
    with pytest.raises(BackendError, match="bytes of id-0 arrived"):
        writer.publish()
    assert all(node.files() == [] for node in cluster.nodes)


def test_an_image_that_is_too_short_is_not_finished(cluster: Cluster) -> None:
    writer = cluster.view(0).create(image_key(0, 4), length=2000)
    writer.write(0, memoryview(b"0" * 1000))
    with pytest.raises(BackendError, match="1000 bytes were written, 2000 expected"):
        writer.publish()


def test_other_bytes_at_an_offset_are_refused(cluster: Cluster) -> None:
    writer = cluster.view(0).create(image_key(0, 4))
    writer.write(0, memoryview(b"0" * 100))
    with pytest.raises(BackendError, match="other bytes from 0 came before"):
        writer.write(0, memoryview(b"0" * 99))


def test_bytes_that_come_twice_in_other_ranges_are_found(cluster: Cluster) -> None:
    writer = cluster.view(0).create(image_key(0, 4))
    writer.write(0, memoryview(b"0" * 100))
    writer.write(50, memoryview(b"0" * 100))
    with pytest.raises(BackendError, match="bytes 50 to 100 came twice"):
        writer.publish()


def test_memory_that_is_full_ends_the_set(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = views_of(cluster)
    images = save_all(cluster, views, SIZES)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_whole", full)
        with pytest.raises(StorageFullError):
            send(views[0], image_key(0, 4, step=11), b"0" * 9000)
    with pytest.raises(BackendError, match="it is gone"):
        send(views[1], image_key(1, 4, step=11), b"1" * 9000)
    assert all(len(node.files()) == 2 for node in cluster.nodes)
    cluster.restart(2)
    assert get(cluster.view(3), image_key(2, 4)) == images[image_key(2, 4)]


def test_members_that_do_not_agree_on_the_group_are_refused(
    cluster: Cluster, make: MakeCluster
) -> None:
    views = views_of(cluster)
    views[0].create(image_key(0, 4))
    other = cluster.view(1)
    group = other._group
    other._group = ParityGroup(group.members[::-1], 2, group.name, group.geometry)
    with pytest.raises(BackendError, match="another group has begun it"):
        other.create(image_key(1, 4))


def test_an_image_is_not_created_conditionally(cluster: Cluster) -> None:
    with pytest.raises(BackendError, match="not created conditionally"):
        cluster.view(0).create(image_key(0, 4), publish=Publish.IF_ABSENT)


# Deletion, and records --------------------------------------------------------------------------------


def test_a_deleted_image_leaves_no_parity(cluster: Cluster) -> None:
    views = views_of(cluster)
    save_all(cluster, views, SIZES)
    put(views[0], f"{RUN}/step-00000010-a0001/commit.json", b"record")
    left = [found.key for found in views[0].scan(f"{RUN}/")]
    while left:
        left = list(views[0].delete_some(left))
    assert list(views[0].scan(f"{RUN}/")) == []
    assert all(node.files() == [] for node in cluster.nodes)
    views[1].delete(image_key(1, 4))
    assert list(views[1].scan(f"{RUN}/")) == []


def test_one_rank_of_a_node_sees_and_deletes_the_images_of_all(cluster: Cluster) -> None:
    """As the leader of a node does, once they are complete."""
    ranks = [[cluster.view(at, name=f"0000{rank}") for at in range(4)] for rank in range(2)]
    keys = [image_key(at, 8) for at in range(4)]
    others = [image_key(at + 4, 8) for at in range(4)]
    for at in range(4):
        send(ranks[0][at], keys[at], b"first" * 900)
    for at in range(4):
        assert others[0] not in [each.key for each in ranks[0][0].scan(f"{RUN}/")]
        send(ranks[1][at], others[at], b"second" * 900)
        cluster.nodes[at].originals.store.put(others[at], memoryview(b"second" * 900), False)
    leader, other = ranks[0][0], ranks[1][0]
    assert [each.key for each in leader.scan(f"{RUN}/")] == [keys[0], others[0]]
    assert leader.stat(others[0]).bytes == 5400
    assert get(leader, others[0]) == b"second" * 900
    for key in (keys[0], others[0]):
        leader.delete(key)
    assert all(node.files() == [] for node in cluster.nodes)
    for view in (leader, other):
        assert list(view.scan(f"{RUN}/")) == []
        with pytest.raises(KeyNotFoundError):
            view.stat(others[0])


def test_a_lost_receiver_is_not_taken_for_an_empty_one(cluster: Cluster) -> None:
    views = views_of(cluster)
    save_all(cluster, views, SIZES)
    for node in cluster.nodes[1:]:
        node.server.close()
    with pytest.raises(UnreachableError):
        list(views[0].scan(f"{RUN}/"))
    with pytest.raises(UnreachableError):
        views[0].stat(image_key(0, 4))


def test_an_image_that_others_never_completed_is_deleted(cluster: Cluster) -> None:
    view = cluster.view(0)
    send(view, image_key(0, 4), b"0" * 9000)
    assert any(node.files() for node in cluster.nodes)
    for found in view.scan(f"{RUN}/"):
        view.delete(found.key)
    assert not any(node.files() for node in cluster.nodes)


def test_an_earlier_attempts_image_is_deleted_where_its_parity_is_kept(cluster: Cluster) -> None:
    save_all(cluster, views_of(cluster), SIZES)
    cluster.restart()
    view = cluster.view(1)
    assert get(view, image_key(0, 4))
    view.delete(image_key(0, 4))
    with pytest.raises(KeyNotFoundError):
        get(view, image_key(0, 4))
    with pytest.raises(KeyNotFoundError):
        view.read_into(image_key(0, 4), 0, memoryview(bytearray(1)))
    assert list(view.scan(f"{RUN}/")) == []
    assert cluster.nodes[1].files() == []
    assert len(cluster.nodes[2].files()) == 2


def test_a_damaged_record_is_left_out_and_named(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(cluster, views_of(cluster), SIZES)
    cluster.restart()
    place = cluster.nodes[1].folder / "parity" / record_key(SET)
    place.write_bytes(place.read_bytes().replace(b"id-0", b"id-9"))
    view = cluster.view(1)
    assert list(view.scan(f"{RUN}/")) == []
    assert "parity is not used" in caplog.text
    assert "its digest does not match" in caplog.text


def test_the_record_of_another_set_is_not_used(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(cluster, views_of(cluster), SIZES)
    cluster.restart()
    root = cluster.nodes[1].folder / "parity"
    (root / record_key(SET)).rename(root / record_key(SET[:-1] + "1"))
    assert list(cluster.view(1).scan(f"{RUN}/")) == []
    assert f"it is the record of {SET}" in caplog.text


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"losses": 4}, "expected 1 to 3 losses"),
        ({"losses": True}, "wrong type"),
        ({"member": 4}, "not within 0 to 3"),
        ({"block_bytes": 0}, "not within 1"),
        ({"images": [{"node": "n", "file": "../x", "bytes": 1}]}, "'file'"),
        ({"images": [{"node": "n", "file": "commit.json", "bytes": 1}]}, "no name of an image"),
        ({"images": []}, "group of 0"),
        ({"set": 7}, "'set' is missing or of a wrong type"),
    ],
)
def test_a_hostile_record_is_refused(
    cluster: Cluster, change: dict[str, object], error: str
) -> None:
    save_all(cluster, views_of(cluster), SIZES)
    data = (cluster.nodes[1].folder / "parity" / record_key(SET)).read_bytes()
    members = open_sealed(data, what="record")
    for name in ("format", "requires", "digest"):
        members.pop(name, None)
    with pytest.raises(IntegrityError, match=error):
        parse_parity_set(seal(members | change), what="record")


def test_a_server_without_parity_refuses_a_block(cluster: Cluster, tmp_path: Path) -> None:
    node = Node(tmp_path / "alone", 9)
    node.server._parity = None
    backend = node.client("parity")
    try:
        with pytest.raises(BackendError, match="is no request"):
            backend.request("join", {"do": "parity_join"})
        with pytest.raises(UnreachableError):
            backend.request("fold", {"do": "parity_fold"}, memoryview(b"x"))
    finally:
        backend.close()
        node.end()
