"""What several ranks need is read once, what one alone can read comes from there, and a failed pull costs a read."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pulls_help import Job, part
from restore_help import DictImage, flip, start_of
from several_help import PATIENCE_S, network, on_all

from tierfall.core.ranks.wire import Connection
from tierfall.core.restore import pulls
from tierfall.core.restore.pulled_reader import PulledReader
from tierfall.core.restore.restore import RestoreResult
from tierfall.core.types.errors import RestoreError, UnreachableError

RANKS = 4
ELEMENTS = 4500  # several chunks each


@pytest.fixture
def job() -> Iterator[Job]:
    with network("abcd") as joined:
        yield Job.of(joined)


def share(step: int, rank: int) -> dict[str, Any]:
    return {f"w{rank}": torch.arange(ELEMENTS, dtype=torch.float32) + 1000 * rank + step}


def put_shares(job: Job, *steps: int, seen_by: Callable[[int, int], bool] | None = None) -> Any:
    """Save a share of the state on each rank; return the copies on the store, by step, image and who reads it."""
    copies: dict[tuple[int, int, int], DictImage] = {}
    for step in steps:
        parts = [part(step, rank, RANKS, share(step, rank)) for rank in range(RANKS)]
        for number, peer in enumerate(job.peers):
            seen = [p for r, p in enumerate(parts) if seen_by is None or seen_by(number, r)]
            for made, image in zip(seen, peer.put("store", *seen), strict=True):
                copies[step, made.manifest.shard.rank, number] = image
    return copies


def want_all(job: Job) -> None:
    for peer in job.peers:
        peer.state = {f"w{rank}": torch.zeros(ELEMENTS) for rank in range(RANKS)}
        peer.state |= {"epoch": 0, "rng": None}


def want_own(job: Job) -> None:
    for rank, peer in enumerate(job.peers):
        peer.state = {f"w{rank}": torch.zeros(ELEMENTS), "epoch": 0, "rng": None}


def restored(job: Job, **request: Any) -> list[Any]:
    return on_all(lambda peer=peer: peer.restore(**request) for peer in job.peers)


def hold(job: Job, step: int) -> bool:
    return all(
        torch.equal(peer.state[name], share(step, int(name[1:]))[name])
        for peer in job.peers
        for name in peer.state
        if name.startswith("w")
    )


def data_bytes(job: Job, step: int) -> int:
    images = {(id, shard): i for p in job.peers for (_, id, shard), i in p.images.items()}
    return sum(
        len(image.made.image) - image.made.manifest.data_start
        for (id, _), image in images.items()
        if id.step == step
    )


def header_bytes(job: Job) -> int:
    return max(i.made.manifest.data_start for p in job.peers for i in p.images.values())


def test_what_all_want_is_read_once_in_equal_shares(job: Job) -> None:
    put_shares(job, 5)
    want_all(job)
    assert all(isinstance(outcome, RestoreResult) for outcome in restored(job))
    assert hold(job, 5)
    data = data_bytes(job, 5)
    headers = 2 * RANKS * header_bytes(job)  # each rank's own, and what was handed on
    assert data < sum(peer.read() for peer in job.peers) <= data + headers
    for rank, peer in enumerate(job.peers):
        assert peer.read() <= data // 4 + 2 * header_bytes(job) + 4096
        assert {got for _, got in peer.tally.received} == {*range(RANKS)} - {rank}
        assert {tier for tier, _ in peer.tally.received} == {"store"}
        assert peer.read() + sum(peer.tally.received.values()) >= data


@pytest.mark.parametrize("requested", [want_own, want_all])
@pytest.mark.parametrize("chunks", [[0], [1, 2, 3, 4, 5]])
def test_a_chunk_that_its_reader_finds_damaged_another_rank_reads(
    job: Job, chunks: list[int], requested: Callable[[Job], None]
) -> None:
    """Rank 0's image is on the disks of ranks 1 and 2, one of which is damaged; the store has it not."""
    put_shares(job, 5, seen_by=lambda rank, image: image != 0)
    made = part(5, 0, RANKS, share(5, 0))
    for number in (1, 2):
        (image,) = job.peers[number].put("nvme", made)
        for damaged in chunks if number == 1 else ():
            flip(image, damaged)
    requested(job)
    outcomes = restored(job)
    assert all(isinstance(outcome, RestoreResult) for outcome in outcomes), outcomes
    assert hold(job, 5)
    assert any(rank == 2 for _, rank in job.peers[0].tally.received)
    output = [f.reason for f in job.peers[1].tally.fallbacks]
    assert any("does not match its digest" in reason for reason in output)


def test_what_is_damaged_on_a_shared_tier_is_not_read_by_every_rank_of_a_large_job() -> None:
    """Two ranks on each of five nodes: what four nodes could not read is taken for damaged."""
    with network("aabbccddee") as joined:
        job = Job.of(joined)
        parts = [part(step, 0, 1, share(step, 0)) for step in (4, 5)]
        for peer in job.peers:
            images = peer.put("store", *parts)
            flip(images[1], 2)
            peer.state = {"w0": torch.zeros(ELEMENTS), "epoch": 0, "rng": None}
        restored(job)
        assert hold(job, 4)
        for peer in job.peers:
            (output,) = [f.reason for f in peer.tally.fallbacks if f.what == "step 5@1"]
            assert output.count("does not match its digest") == 4
            assert peer.agreements <= 2 * 8


def test_a_chunk_that_may_be_read_later_ends_the_restore(job: Job) -> None:
    copies = put_shares(job, 4, 5)
    for reader in range(RANKS):
        image = copies[5, 2, reader]
        image.errors[image.made.manifest.data_start] = UnreachableError("timeout")
    want_all(job)
    for outcome in restored(job):
        assert isinstance(outcome, RestoreError)
        assert "a copy could not be read" in str(outcome)
        assert "timeout" in str(outcome)


def test_what_the_owner_cannot_read_the_others_read_themselves(job: Job) -> None:
    """One rank's mount is gone; it gets its part, too."""
    copies = put_shares(job, 5)
    for (_, _, number), image in copies.items():
        if number == 1:
            starts = {start_of(image, chunk) for chunk in range(1, 6)}
            image.errors = dict.fromkeys(starts, UnreachableError("the mount is gone"))
    want_all(job)
    assert all(isinstance(outcome, RestoreResult) for outcome in restored(job))
    assert hold(job, 5)
    assert job.peers[1].read() <= RANKS * header_bytes(job), "it has read no chunk"


def test_each_byte_crosses_to_a_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on each of three nodes: in a node bytes go through memory."""
    sent: list[int] = []
    send = Connection.send

    def count(connection: Connection, head: Any, payload: memoryview | None = None) -> None:
        assert payload is None or connection.socket.family != socket.AF_UNIX
        sent.append(0 if payload is None else payload.nbytes)
        send(connection, head, payload)

    monkeypatch.setattr(Connection, "send", count)
    with network("aabbcc") as joined:
        job = Job.of(joined)
        made = part(5, 0, 1, whole())
        for peer in job.peers:
            peer.put("store", made)
        want_all(job)
        assert all(isinstance(outcome, RestoreResult) for outcome in restored(job))
        assert hold(job, 5)
    data = len(made.image) - made.manifest.data_start
    headers = 2 * (made.manifest.data_start + len(made.manifest.encode()))
    assert sum(sent) == 2 * data + headers


def whole() -> dict[str, Any]:
    return {f"w{rank}": share(5, rank)[f"w{rank}"] for rank in range(RANKS)}


def test_ranks_of_one_node_open_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(address: str = "") -> socket.socket:
        raise AssertionError("a port")

    monkeypatch.setattr(pulls, "listen", listen)
    with network("aaaa") as joined:
        job = Job.of(joined)
        put_shares(job, 5)
        want_all(job)
        restored(job)
        assert hold(job, 5)
        assert all(peer.tally.received for peer in job.peers)


@pytest.mark.parametrize("missing", [AttributeError("memfd_create"), OSError("no memory")])
def test_where_no_memory_can_be_handed_over_chunks_are_sent(
    monkeypatch: pytest.MonkeyPatch, missing: Exception
) -> None:
    def fail(view: memoryview) -> pulls.ChunkMemory:
        raise missing

    monkeypatch.setattr(pulls.ChunkMemory, "holding", fail)
    with network("aab") as joined:
        job = Job.of(joined)
        put_shares(job, 5)
        want_all(job)
        assert all(isinstance(outcome, RestoreResult) for outcome in restored(job))
        assert hold(job, 5)
        assert all(peer.tally.received for peer in job.peers)


def test_a_network_that_lets_nothing_through_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[object] = []

    def connect_as(sender: str, address: object, *args: Any, **more: Any) -> Connection:
        tried.append(address)
        time.sleep(0.3)
        raise TimeoutError("timed out")

    monkeypatch.setattr(pulls, "connect_as", connect_as)
    with network("abcdefghijklmnop") as joined:
        job = Job.of(joined)
        made = part(5, 0, 1, whole())
        for peer in job.peers:
            peer.put("store", made)
        want_all(job)
        assert all(isinstance(outcome, RestoreResult) for outcome in restored(job))
        assert hold(job, 5)
    assert len(tried) < 2 * len(job.peers)


def test_who_can_reach_no_other_rank_reads_everything_itself_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with network("ab") as joined:
        job = Job.of(joined, max_wait_s=2.0)
        for peer in job.peers:
            peer.put("store", part(5, 0, 1, whole()))
        want_all(job)
        job.peers[1].ranks.secret = b"another"
        assert all(isinstance(outcome, RestoreResult) for outcome in restored(job))
        assert hold(job, 5)
        assert all(not peer.tally.received for peer in job.peers)
    said = [r.getMessage() for r in caplog.records if "does not send" in r.getMessage()]
    assert len(said) == 2, "each rank of the other"


def test_a_rank_that_fails_before_it_reads_keeps_nobody_waiting_for_its_chunks(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get what they ask it for, and fail with it."""
    put_shares(job, 5)
    want_all(job)
    make_part = PulledReader.part

    def part_of(self: PulledReader, rank: int, fills: Any) -> Any:
        if self.ranks.shard.rank == 1:
            raise MemoryError("no more")
        return make_part(self, rank, fills)

    monkeypatch.setattr(PulledReader, "part", part_of)
    began = time.monotonic()
    outcomes = restored(job)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert all("no more" in str(outcome) for outcome in outcomes)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_cannot_read_ahead_keeps_nobody_waiting_for_its_chunks(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others ask it for each of them."""
    put_shares(job, 5)
    want_all(job)
    wait_for_room, failed = pulls.ChunkPool.wait_for_room, []

    def wait(self: pulls.ChunkPool, size: int) -> bool:
        if not failed:
            failed.append(self)
        if self in failed:
            raise MemoryError("no more")
        return wait_for_room(self, size)

    monkeypatch.setattr(pulls.ChunkPool, "wait_for_room", wait)
    began = time.monotonic()
    outcomes = restored(job)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert all(isinstance(outcome, RestoreResult) for outcome in outcomes), outcomes
    assert hold(job, 5)


def test_a_rank_that_reads_slowly_is_not_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each chunk takes longer than a rank may be silent."""
    read_now = DictImage.read

    def read(self: DictImage, manifest: Any, index: int, *args: Any, **more: Any) -> memoryview:
        time.sleep(2.5 if index else 0)
        return read_now(self, manifest, index, *args, **more)

    monkeypatch.setattr(DictImage, "read", read)
    with network("abcd") as joined:
        job = Job.of(joined, max_wait_s=2.0)
        for peer in job.peers:
            peer.put("store", part(5, 0, 1, {"w0": share(5, 0)["w0"]}))
            peer.state = {"w0": torch.zeros(ELEMENTS), "epoch": 0, "rng": None}
        assert all(isinstance(outcome, RestoreResult) for outcome in restored(job))
        assert hold(job, 5)
    assert "does not send" not in caplog.text
