"""Bugs of peer memory that are planted on purpose, each found within some hours, with its seed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.simulation import peer_world
from tests.simulation.peer_hour import run_peer_hour
from tests.simulation.peer_watch import id_of
from tests.simulation.peer_wires import RUN
from tierfall.backends.peer import view
from tierfall.backends.peer.view import PeerView
from tierfall.core.copies import images
from tierfall.core.copies.shard_reader import ShardReader
from tierfall.core.format.catalog import FoundCopy
from tierfall.core.format.records import Commit
from tierfall.core.ranks.message_tree import Bodies
from tierfall.core.scheduler import executor
from tierfall.core.scheduler.flush.admission import Admissions
from tierfall.core.scheduler.group.tier_commits import TierCommits
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import OpenShard
from tierfall.core.types.backend import Writer, delete_all
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import CheckpointView
from tierfall.policies import eviction
from tierfall.policies.placement import CopyPlacement, place_copies
from tierfall.session import start
from tierfall.session.leftovers import Leftovers

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
    """An object counts as written once the first of the nodes that are to keep it has it."""

    def create(sides: Sequence[Any], key: str, **options: Any) -> Writer:
        writer: Writer = sides[0].create(key, **options)
        return writer

    patch.setattr(view, "CopiesWriter", create)


def look_for_own_files_in_own_memory(patch: pytest.MonkeyPatch) -> None:
    """What this attempt has sent is looked for in what this node keeps for others."""
    real = PeerView._sides

    def sides(self: PeerView, key: str) -> Any:
        return self._kept if self._is_sent(key) else real(self, key)

    patch.setattr(PeerView, "_sides", sides)


def keep_adopted_images_here(patch: pytest.MonkeyPatch) -> None:
    """An image of an earlier attempt that this one has to send is written to this node's own memory."""

    def is_kept(self: PeerView, key: str) -> bool:
        checkpoint = view._checkpoint_of(key)
        return checkpoint is not None and checkpoint.attempt != self.attempt

    patch.setattr(PeerView, "_is_kept", is_kept)


def delete_on_the_other_side(patch: pytest.MonkeyPatch) -> None:
    """A deletion of this attempt's files goes to what this node keeps for others."""

    def delete_some(self: PeerView, keys: Sequence[str]) -> Sequence[str]:
        for key in keys:
            for side in self._kept if self._is_sent(key) else self._sides(key):
                side.delete(key)
        return ()

    patch.setattr(PeerView, "delete_some", delete_some)


def announce_a_commit_too_early(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 reports a copy as committed once the first node has its part."""

    def on_all_uploaded(
        self: TierCommits, tier: str, id: CheckpointId, bodies: Bodies, **more: Any
    ) -> None:
        real(self, tier, id, bodies, **more)
        if not more["of_node_only"] and not self._shared[tier]:
            self._announce_committed(tier, id, dict.fromkeys(bodies, 1))

    real = TierCommits.on_all_uploaded
    patch.setattr(TierCommits, "on_all_uploaded", on_all_uploaded)


def count_uncommitted_ones(patch: pytest.MonkeyPatch) -> None:
    """A copy that is only arriving takes the place of the last committed one."""

    def readable_on(self: CheckpointView, tier: str) -> bool:
        return real(self, tier) or self.state(tier) is CopyState.ARRIVING

    real = CheckpointView.readable_on
    patch.setattr(CheckpointView, "readable_on", readable_on)


def evict_what_peer_memory_relies_on(patch: pytest.MonkeyPatch) -> None:
    """An image in a node's own memory counts for nothing once another node keeps a copy."""
    patch.setattr(eviction, "_completes_peer_memory", lambda view, checkpoint: False)
    patch.setattr(Admissions, "_relied_on", lambda self, decision: frozenset())


def delete_images_whose_rest_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    """A start deletes images in memory where it does not see those of all other ranks."""
    patch.setattr(Leftovers, "add_partial", lambda self, id, image: image.region.release())


def forget_what_other_nodes_keep(patch: pytest.MonkeyPatch) -> None:
    """A rank whose node keeps nothing of a checkpoint does not know that peer memory has it."""
    nothing: tuple[FoundCopy, ...] = ()
    patch.setattr(start, "not_on_all_nodes", lambda listing, inventories: nothing)


def restore_a_part_of_an_older_step(patch: pytest.MonkeyPatch) -> None:
    """The image of another step that bears the same name is read, and its digests are not compared."""

    def read_into(self: PeerView, key: str, offset: int, target: memoryview) -> None:
        name = key.rpartition("/")[2]
        others = [
            (side, other)
            for side in self._kept
            for other in sorted(side._objects)  # type: ignore[attr-defined]
            if name.endswith(".safetensors") and other.endswith(f"/{name}") and other != key
        ]
        for side, other in others[:1]:
            side.read_into(other, offset, target)
            return
        real(self, key, offset, target)

    real = PeerView.read_into
    patch.setattr(PeerView, "read_into", read_into)
    patch.setattr(images, "check_digest", lambda *arguments, **more: None)


def take_another_nodes_record_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """A rank that makes its copies again finds the record of another node's images, and sends nothing."""

    def committed_before(task: OpenShard, store: Any) -> Commit | None:
        commit: Commit | None = store.read_commit(task.id) if store.is_committed(task.id) else None
        return commit

    believe_one_keeper(patch)
    patch.setattr(executor, "_committed_before", committed_before)


def believe_one_keeper(patch: pytest.MonkeyPatch) -> None:
    """A rank that makes its copies again finds the record that one keeper has of them, and ends."""
    patch.setattr(Ledger, "is_of_earlier_start", lambda self, tier, entry: False)


def seal_what_has_arrived(patch: pytest.MonkeyPatch) -> None:
    """A start seals an image that it brings back though the keeper stops answering in the middle."""
    real = ShardReader.read_chunks

    def read_chunks(self: ShardReader, *arguments: Any) -> None:
        with suppress(UnreachableError):
            real(self, *arguments)

    patch.setattr(ShardReader, "read_chunks", read_chunks)


def move_an_image_back(patch: pytest.MonkeyPatch) -> None:
    """A start that has brought an image back deletes it where it was kept."""
    real = peer_world.recover_image

    def recover_image(host: Any, keepers: Any, *arguments: Any, **more: Any) -> CheckpointId | None:
        id = real(host, keepers, *arguments, **more)
        if id is not None:
            found = keepers.backend.scan(f"{RUN}/")
            delete_all(keepers.backend, [each.key for each in found if id_of(each.key) == id])
        return id

    patch.setattr(peer_world, "recover_image", recover_image)


def wrong(seed: int, copies: int) -> str:
    try:
        run_peer_hour(seed, seconds=SECONDS, copies=copies)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plant", "copies", "first"),
    [
        (keep_a_copy_on_its_own_node, 1, 0),
        (put_two_copies_on_one_node, 2, 0),
        (write_the_first_copy_only, 2, 0),
        (look_for_own_files_in_own_memory, 1, 0),
        pytest.param(keep_adopted_images_here, 1, 16, marks=LONG),
        (delete_on_the_other_side, 1, 0),
        (announce_a_commit_too_early, 1, 0),
        (count_uncommitted_ones, 1, 8),
        (evict_what_peer_memory_relies_on, 1, 0),
        pytest.param(delete_images_whose_rest_is_not_seen, 1, 0, marks=LONG),
        pytest.param(forget_what_other_nodes_keep, 2, 0, marks=LONG),
        (restore_a_part_of_an_older_step, 1, 0),
        (take_another_nodes_record_for_its_own, 1, 0),
        pytest.param(believe_one_keeper, 2, 52, marks=LONG),
        pytest.param(seal_what_has_arrived, 1, 5, marks=LONG),
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
    seed, output = next(
        ((s, output) for s in range(first, first + SEEDS) if (output := wrong(s, copies))),
        (0, ""),
    )
    assert output, f"none of {SEEDS} runs broke a promise"
    assert output.startswith(f"seed {seed},")
    assert f"--peers --copies {copies} --hours 0.5 --first {seed} --seeds 1" in output
