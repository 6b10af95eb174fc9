"""Bugs of peer memory that are planted on purpose, each found within some hours, with its seed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.simulation import peer_world
from tests.simulation.peer_hour import run_peer_hour
from tests.simulation.test_planted_bugs import count_uncommitted_ones, first_wrong
from tierfall.core.copies import images
from tierfall.core.copies.chunk_reader import ChunkReader
from tierfall.core.flush import worker
from tierfall.core.flush.commits import TierCommits
from tierfall.core.flush.memory import Admissions
from tierfall.core.flush.messages import UploadedFiles
from tierfall.core.flush.tasks import OpenShard
from tierfall.core.format.catalog import FoundCopy
from tierfall.core.format.records import Commit
from tierfall.core.types.errors import KeyNotFoundError, UnreachableError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.policies import eviction
from tierfall.policies.placement import CopyPlacement, place_copies
from tierfall.setup import peers, start
from tierfall.setup.host_memory import Leftovers
from tierfall.tiers.peer_requests import PeerClient
from tierfall.tiers.peers import PeerCache

SEEDS = 12
"""How many runs may pass until a bug is found. ``first`` is the seed that found it last."""
SECONDS = 1800.0
LONG = pytest.mark.torture


def keep_a_copy_on_its_own_node(patch: pytest.MonkeyPatch) -> None:
    """Each node keeps its own images, in place of another's."""

    def place(domains: Sequence[str], copies: int) -> CopyPlacement:
        return CopyPlacement(tuple((n,) * (copies + 1) for n in range(len(domains))), ())

    patch.setattr(peer_world, "place_copies", place)


def put_two_copies_on_one_node(patch: pytest.MonkeyPatch) -> None:
    """The second copy is where the first one is."""

    def place(domains: Sequence[str], copies: int) -> CopyPlacement:
        placed = place_copies(domains, copies)
        return CopyPlacement(tuple((n, first, first) for n, first, _ in placed.holders), ())

    patch.setattr(peer_world, "place_copies", place)


def write_the_first_copy_only(patch: pytest.MonkeyPatch) -> None:
    """An image counts as written once the first of the nodes that are to keep it has it."""

    def init(self: PeerCache, *, sent: Sequence[PeerClient] = (), **more: Any) -> None:
        real(self, sent=sent[:1], **more)

    real = PeerCache.__init__
    patch.setattr(PeerCache, "__init__", init)


def look_for_what_was_sent_in_own_memory(patch: pytest.MonkeyPatch) -> None:
    """An image counts as sent once this node keeps one of that rank, which is not where it is to be."""

    def committed_before(task: OpenShard, store: Any) -> Commit | None:
        try:
            commit: Commit = store.read_commit(task.id)
        except KeyNotFoundError:
            return None
        return commit

    patch.setattr(worker, "_committed_before", committed_before)


def delete_on_the_other_side(patch: pytest.MonkeyPatch) -> None:
    """A deletion reaches what this start has sent, and not what this node keeps of others."""

    def delete(self: PeerCache, checkpoint: CheckpointId, **more: Any) -> None:
        self.discard(checkpoint, attempt=None)

    patch.setattr(PeerCache, "delete", delete)


def announce_a_commit_too_early(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 reports a copy as committed once the first node has its part."""

    def on_all_uploaded(
        self: TierCommits, tier: str, id: CheckpointId, uploads: dict[int, UploadedFiles]
    ) -> None:
        real(self, tier, id, uploads)
        if not self._group.is_shared(tier):
            self._announce_committed(tier, id, dict.fromkeys(uploads, 1))

    real = TierCommits.on_all_uploaded
    patch.setattr(TierCommits, "on_all_uploaded", on_all_uploaded)


def evict_what_peer_memory_relies_on(patch: pytest.MonkeyPatch) -> None:
    """An image in a node's own memory counts for nothing once another node keeps a copy."""
    patch.setattr(eviction, "_completes_peer_memory", lambda view, checkpoint: False)
    patch.setattr(Admissions, "_relied_on", lambda self, decision: frozenset())


def delete_images_whose_rest_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    """A start deletes images in memory where it does not see those of all other ranks."""
    patch.setattr(Leftovers, "add", lambda self, id, image, **more: image.region.release())


def forget_what_other_nodes_keep(patch: pytest.MonkeyPatch) -> None:
    """A rank whose node keeps nothing of a checkpoint does not know that peer memory has it."""
    nothing: tuple[FoundCopy, ...] = ()
    patch.setattr(start, "not_on_all_nodes", lambda listing, inventories: nothing)


def restore_a_part_of_an_older_step(patch: pytest.MonkeyPatch) -> None:
    """The image of another step that bears the same name is read, and its digests are not compared."""

    def read_into(
        self: PeerCache, checkpoint: CheckpointId, shard: Shard, *arguments: Any, **more: Any
    ) -> None:
        older = (c.id for c in self.list().copies if c.id < checkpoint)
        real(self, max(older, default=checkpoint), shard, *arguments, **more)

    real = PeerCache.read_into
    patch.setattr(PeerCache, "read_into", read_into)
    patch.setattr(PeerCache, "read_cached", lambda *arguments, **more: False)
    patch.setattr(images, "check_digest", lambda *arguments, **more: None)


def believe_one_keeper(patch: pytest.MonkeyPatch) -> None:
    """A copy counts as written once one of the nodes that are to keep it has its record."""

    def commit(self: PeerCache, commit: Commit, **more: Any) -> None:
        id = commit.lineage.checkpoint
        self._uploads[id] = self._uploads[id][:1]
        real(self, commit, **more)

    real = PeerCache.commit
    patch.setattr(PeerCache, "commit", commit)


def seal_what_has_arrived(patch: pytest.MonkeyPatch) -> None:
    """A start seals an image that it brings back though the keeper stops answering in the middle."""

    class Lenient(ChunkReader):
        def read(self, index: int, buffer: memoryview) -> memoryview:
            with suppress(UnreachableError):
                return super().read(index, buffer)
            return buffer

    patch.setattr(peers, "ChunkReader", Lenient)


def move_an_image_back(patch: pytest.MonkeyPatch) -> None:
    """A start that has brought an image back deletes it where it was kept."""
    real = peer_world.recover_image

    def recover_image(host: Any, keeper: Any, *arguments: Any, **more: Any) -> CheckpointId | None:
        id = real(host, keeper, *arguments, **more)
        if id is not None:
            keeper._kept._process().drop(id)
        return id

    patch.setattr(peer_world, "recover_image", recover_image)


@pytest.mark.parametrize(
    ("plant", "copies", "first"),
    [
        (keep_a_copy_on_its_own_node, 1, 0),
        (put_two_copies_on_one_node, 2, 0),
        (write_the_first_copy_only, 2, 0),
        (look_for_what_was_sent_in_own_memory, 1, 0),
        (delete_on_the_other_side, 1, 0),
        (announce_a_commit_too_early, 1, 0),
        (count_uncommitted_ones, 1, 8),
        (evict_what_peer_memory_relies_on, 1, 0),
        pytest.param(delete_images_whose_rest_is_not_seen, 1, 0, marks=LONG),
        pytest.param(forget_what_other_nodes_keep, 2, 0, marks=LONG),
        (restore_a_part_of_an_older_step, 1, 0),
        (believe_one_keeper, 2, 0),
        (seal_what_has_arrived, 1, 1),
        (move_an_image_back, 1, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_bug_of_peer_memory_is_found_and_its_seed_is_reported(
    plant: Callable[[pytest.MonkeyPatch], None],
    copies: int,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(monkeypatch)
    caplog.set_level(logging.CRITICAL)
    run = partial(run_peer_hour, seconds=SECONDS, copies=copies)
    seed, output = first_wrong(run, range(first, first + SEEDS))
    assert output.startswith(f"seed {seed},")
    assert f"--peers --copies {copies} --hours 0.5 --first {seed} --seeds 1" in output
