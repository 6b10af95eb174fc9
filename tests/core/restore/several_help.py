"""Several ranks in one process: checkpoints of many shards on tiers of dictionaries, and a message_tree over queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from restore_help import Made, Tiers, checkpoint, state_of

from tests.core.ranks.threads import PATIENCE_S, network, on_all
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit, NamedFile
from tierfall.core.load.fill import plan_fill
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import agree_to_restore, make_barrier
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.restore import RestoreResult, fill_first
from tierfall.core.types.keys import manifest_name, shard_name
from tierfall.core.types.values import CheckpointId, Shard

__all__ = [
    "PATIENCE_S",
    "Rank",
    "all_named",
    "network",
    "on_all",
    "put_parts",
    "put_shared",
    "sharded",
]


def sharded(step: int, rank: int, world_size: int, **members: Any) -> Made:
    """One rank's part of a checkpoint; its record names this part alone, as on a tier that only this rank sees."""
    made = checkpoint(step, **members)
    shard = Shard(rank, world_size)
    manifest = replace(made.manifest, shard=shard)
    data = manifest.encode()
    files = (
        NamedFile(name=shard_name(shard), bytes=len(made.image), digest=None),
        NamedFile(name=manifest_name(shard), bytes=len(data), digest=sha256(data)),
    )
    commit = replace(made.commit, world_size=world_size, files=files)
    return Made(made.image, manifest, commit)


def all_named(parts: Sequence[Made]) -> Commit:
    """The record of a tier that all ranks see."""
    return replace(parts[0].commit, files=tuple(f for part in parts for f in part.commit.files))


def put_shared(ranks: Sequence[Tiers], tier: str, step: int, **members: Any) -> None:
    """Lay a whole checkpoint on a tier that all ranks see, each with an image of its own."""
    parts = [sharded(step, rank, len(ranks), **members) for rank in range(len(ranks))]
    for tiers, part in zip(ranks, parts, strict=True):
        tiers.put(tier, replace(part, commit=all_named(parts)))


def put_parts(ranks: Sequence[Tiers], tier: str, step: int, **members: Any) -> None:
    """Lay each rank's part on a tier of its own node."""
    for rank, tiers in enumerate(ranks):
        tiers.put(tier, sharded(step, rank, len(ranks), **members))


class Rank:
    """One rank that restores: what it sees, what it fills, and what it has passed over."""

    def __init__(self, ranks: Ranks, tiers: Tiers, *, mine: Sequence[str]) -> None:
        self.ranks = ranks
        self.tiers = tiers
        self.mine = mine
        self.state: dict[str, Any] = state_of(-1)
        self.tally = ReadTally()
        self.make_plan: Callable[[Any], Any] = lambda header: plan_fill(self.state, header)
        self.before_fill: Callable[[], None] = lambda: None
        self.tried: list[CheckpointId] = []

    def restore(self, **request: Any) -> RestoreResult | None:
        """As a checkpointer does it."""
        listings, asked = self.tiers.listings(), RestoreRequest(**request)
        candidates = agree_to_restore(self.ranks, listings, asked, mine=self.mine, tally=self.tally)
        if not candidates:
            return None
        self.before_fill()
        tell = make_barrier(self.ranks)

        def note_and_tell(known: Any, error: BaseException | None) -> Any:
            self.tried.append(known.id)
            return tell(known, error)

        restored = fill_first(
            self.tiers.chosen(candidates),
            asked,
            self.tally,
            make_plan=self.make_plan,
            shard=self.ranks.shard,
            make_reader=self.tiers.reader,
            together=note_and_tell,
        )
        assert restored is not None
        restored.plan.finish()
        return restored
