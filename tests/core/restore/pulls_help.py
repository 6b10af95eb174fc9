"""Ranks as threads that pull from each other: images by rank on tiers of dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from restore_help import DictImage, Made
from several_help import PATIENCE_S, all_named, sharded

from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.load.fill import plan_fill
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import agree_to_restore, make_barrier
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.pulled_reader import PulledReader
from tierfall.core.restore.restore import RestoreResult, fill_first
from tierfall.core.types.values import CheckpointId, CopyState, Shard

ORDER = ("host", "nvme", "store")


def part(step: int, rank: int, world_size: int, state: Mapping[str, Any]) -> Made:
    """One rank's part of a checkpoint, whose record names it alone."""
    return sharded(step, rank, world_size, state={**state, "epoch": step, "rng": None})


class Peer:
    """One rank that restores: what it sees of each tier, and what it fills."""

    def __init__(self, ranks: Ranks, max_wait_s: float) -> None:
        self.ranks, self.max_wait_s = ranks, max_wait_s
        self.images: dict[tuple[str, CheckpointId, Shard], DictImage] = {}
        self.found: dict[tuple[str, CheckpointId], list[Made]] = {}
        self.state: dict[str, Any] = {}
        self.tally = ReadTally()
        self.agreements = 0
        self.make_plan: Callable[[Any], Any] = lambda header: plan_fill(self.state, header)

    def put(self, tier: str, *parts: Made) -> list[DictImage]:
        """Lay copies on a tier; its record names all that were laid there."""
        for made in parts:
            id, shard = made.commit.lineage.checkpoint, made.manifest.shard
            copy = Made(bytearray(made.image), made.manifest, made.commit)
            self.images[tier, id, shard] = DictImage(tier, copy, in_memory=tier == "host")
            self.found.setdefault((tier, id), []).append(made)
        return [self.images[tier, m.commit.lineage.checkpoint, m.manifest.shard] for m in parts]

    def listings(self) -> tuple[Listing, ...]:
        return tuple(
            Listing(
                tier=name,
                copies=tuple(
                    FoundCopy(id=id, state=CopyState.COMMITTED, bytes=1, commit=all_named(parts))
                    for (tier, id), parts in sorted(self.found.items())
                    if tier == name
                ),
            )
            for name in ORDER
        )

    def read(self) -> int:
        return sum(self.tally.bytes.values())

    def restore(self, **request: Any) -> RestoreResult:
        """As a checkpointer does it."""
        listings, asked = self.listings(), RestoreRequest(**request)
        candidates = agree_to_restore(self.ranks, listings, asked, mine=ORDER, tally=self.tally)
        real = self.ranks.agree

        def count(what: str, *args: Any, **more: Any) -> Any:
            self.agreements += what == "restore: fill"
            return real(what, *args, **more)

        self.ranks.agree = count  # type: ignore[method-assign, assignment]

        def make_reader(checkpoint: Any, tiers: Any, tally: ReadTally) -> PulledReader:
            return PulledReader(
                checkpoint,
                tiers,
                lambda tier, id, shard: self.images[tier, id, shard],
                tally,
                ranks=self.ranks,
                order=ORDER,
                max_wait_s=self.max_wait_s,
                patience_s=PATIENCE_S,
            )

        restored = fill_first(
            lambda request: [c for c in candidates or () if c.id not in request.without],
            asked,
            self.tally,
            make_plan=self.make_plan,
            shard=self.ranks.shard,
            together=make_barrier(self.ranks, timeout_s=PATIENCE_S),
            make_reader=make_reader,
        )
        assert restored is not None
        restored.plan.finish()
        return restored


@dataclass
class Job:
    """All ranks of a restore, and what was saved by how many."""

    peers: list[Peer]

    @classmethod
    def of(cls, ranks: Sequence[Ranks], *, max_wait_s: float = PATIENCE_S) -> Job:
        return cls([Peer(one, max_wait_s) for one in ranks])
