"""Replicas are read once and sent on; what one rank alone can read, it sends; no rank waits without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pulls_help import Job, part
from restore_help import DictImage, flip
from several_help import network, on_all

from tierfall.core.restore.restore import RestoreResult
from tierfall.core.types.errors import RestoreError, UnreachableError
from tierfall.core.types.values import CheckpointId, Shard

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


def test_a_header_that_cannot_be_read_on_the_fastest_tier_comes_from_the_next(job: Job) -> None:
    """Rank 1's disk has rank 0's image, whose header is damaged there."""
    put_shares(job, 5)
    (image,) = job.peers[1].put("nvme", part(5, 0, RANKS, share(5, 0)))
    flip(image, 0)
    want_own(job)
    restored(job)
    assert hold(job, 5)
    assert "store" in {*job.peers[0].tally.bytes, *(t for t, _ in job.peers[0].tally.received)}


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


def test_images_of_another_number_of_ranks_are_read_once(job: Job) -> None:
    """Two ranks saved the same tensors; four restore them."""
    whole = {"w0": share(5, 0)["w0"], "w1": share(5, 1)["w1"]}
    parts = [part(5, rank, 2, whole) for rank in range(2)]
    for peer in job.peers:
        peer.put("store", *parts)
        peer.state = {"w0": torch.zeros(ELEMENTS), "w1": torch.zeros(ELEMENTS)}
        peer.state |= {"epoch": 0, "rng": None}
    restored(job)
    assert hold(job, 5)
    data = len(parts[0].image) - parts[0].manifest.data_start
    assert sum(peer.read() for peer in job.peers) <= data + 2 * header_bytes(job)
    assert job.peers[0].images["store", CheckpointId(5, 1), Shard(0, 2)].reads
