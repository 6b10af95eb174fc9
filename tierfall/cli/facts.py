"""What ``ls`` and ``show`` know of a run: listings, decisions and manifests, gathered once and asked by name."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Self

from tierfall.core.copies.images import checked_manifest
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge, to_view
from tierfall.core.format.records import Manifest
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, CopyState, Shard, TierKind
from tierfall.core.types.view import Decision, Verdict, View
from tierfall.ops.commands import unread, view_of
from tierfall.ops.reader import RunReader
from tierfall.policies.defaults import plan_retention
from tierfall.setup.tiers import tier_rules


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One look at all tiers of a run."""

    listings: tuple[Listing, ...]
    known: tuple[KnownCheckpoint, ...]
    view: View
    safety: View
    """As ``view``, with the tiers that are only read: what is there is not lost."""
    owner: LockOwner | None
    wall_time_s: float

    @classmethod
    def gather(cls, reader: RunReader) -> Self:
        listings = reader.list()
        known = merge(listings)
        return cls(
            listings=listings,
            known=known,
            view=view_of(reader.config, known),
            safety=to_view(
                tier_rules(reader.config, read_too=True), known, wall_time_s=time.time()
            ),
            owner=reader.owner(),
            wall_time_s=time.time(),
        )

    @property
    def by_id(self) -> dict[CheckpointId, KnownCheckpoint]:
        return {c.id: c for c in self.known}

    @property
    def unread(self) -> dict[str, TierfallError]:
        return unread(self.listings)

    def rows(self) -> list[CheckpointId]:
        """Every checkpoint, and what is not one yet."""
        unfinished = {id for listing in self.listings for id in listing.unfinished}
        return sorted({*self.by_id, *unfinished})

    def rows_with_damage(self) -> list[CheckpointId]:
        """As ``rows``, with the steps in whose folders' places something else lies."""
        no_folders = {e.checkpoint for listing in self.listings for e in listing.no_folders()}
        return sorted({*self.rows(), *no_folders})

    def cell(self, id: CheckpointId, tier: str) -> str:
        """Say in a word what a tier holds of a checkpoint."""
        listing = next(x for x in self.listings if x.tier == tier)
        if listing.error is not None:
            return "?"
        copy = listing.copy(id)
        if copy is not None:
            return copy.label
        if listing.no_folders(id.step, id.attempt):
            return "damaged"
        if id in listing.unfinished:
            return str(CopyState.ARRIVING) if self.owner else "unfinished"
        return "-"

    def age_s(self, checkpoint: KnownCheckpoint) -> float | None:
        saved_s = checkpoint.wall_time_s
        return None if saved_s is None else max(0.0, self.wall_time_s - saved_s)

    def owed(self, id: CheckpointId) -> tuple[str, ...]:
        """Name the tiers that were read and still wait for it."""
        seen = next(c for c in self.view.checkpoints if c.id == id)
        owed = seen.owed - self.unread.keys()
        return tuple(tier.name for tier in self.view.tiers if tier.name in owed)

    def decision(self, tier: str, id: CheckpointId) -> Decision:
        """Say what becomes of a copy by rule, and why."""
        if all(rules.name != tier for rules in self.view.tiers):
            reason = "the tier is read-only: nothing there is dropped"
            return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)
        if self.view.tier(tier).kind is TierKind.HOST:
            return self._in_memory(tier, id)
        for decision in plan_retention(self.view, tier):
            if decision.checkpoint == id:
                return decision
        reason = (
            "it is damaged and counts for nothing: a trainer writes it anew where another copy is good, or lets it go "
            "where the rules would; so does 'tierfall verify --repair', or 'tierfall rm'"
        )
        return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)

    def _in_memory(self, tier: str, id: CheckpointId) -> Decision:
        newest = max((c.id for c in self.view.on(tier) if c.live), default=None)
        if newest == id:
            reason = "the newest in memory always stays"
        else:
            reason = "until a save needs its room; the oldest go first"
        return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A tensor, or the piece of it, that an image holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFacts:
    """What a manifest says of its image."""

    shard: str
    image_bytes: int
    chunks: int
    chunk_bytes: int
    tensors: tuple[TensorFacts, ...]

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    def largest(self, count: int) -> list[TensorFacts]:
        return sorted(self.tensors, key=lambda t: (-t.bytes, t.name))[:count]


def manifest_facts(
    reader: RunReader, checkpoint: KnownCheckpoint
) -> tuple[list[ManifestFacts], list[tuple[str, TierfallError]]]:
    """Read each shard's manifest from the fastest copy that has a good one; the second are the bad ones met."""
    found: list[ManifestFacts] = []
    problems: list[tuple[str, TierfallError]] = []
    if checkpoint.commit is None:
        return found, problems
    size = checkpoint.commit.world_size
    opener = reader.opener()
    for rank in range(size):
        shard = Shard(rank, size)
        for tier, copy in checkpoint.copies.items():
            if copy.commit is None:
                continue
            if size > 1 and copy.commit.file(keys.manifest_name(shard)) is None:
                continue  # the record of one node, or of one rank's memory, names its own parts
            try:
                manifest = checked_manifest(opener(tier, checkpoint.id, shard), copy.commit, shard)
                found.append(_manifested(manifest))
            except (IntegrityError, NotSupportedError, BackendError) as error:
                problems.append((tier, error))
                continue
            break
    return found, problems


def _manifested(manifest: Manifest) -> ManifestFacts:
    shard = manifest.shard
    try:
        tensors = tuple(_tensor(piece) for piece in json.loads(manifest.pieces))
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"manifest of {manifest.line.checkpoint}: its table of tensors is off: {error!r}"
        ) from error
    return ManifestFacts(
        shard=f"rank {shard.rank} of {shard.world_size}",
        image_bytes=manifest.image_bytes,
        chunks=manifest.chunk_count,
        chunk_bytes=manifest.chunk_bytes,
        tensors=tensors,
    )


def _tensor(piece: dict[str, Any]) -> TensorFacts:
    return TensorFacts(
        name=str(piece["name"]),
        dtype=str(piece["dtype"]),
        shape=tuple(int(length) for length in piece["lengths"]),
        bytes=int(piece["end"]) - int(piece["start"]),
    )
