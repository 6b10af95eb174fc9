"""Ranks as threads that exchange: images by rank on tiers of dictionaries, and a wire that hands over like gloo's, a
send being done only once it was taken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from restore_help import DictImage, Made
from several_help import PATIENCE_S, all_named, sharded

from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import CheckpointReader
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.load.fill import plan_fill
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import agree_to_restore, make_barrier
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.exchange.exchange import Exchange
from tierfall.core.restore.exchange.gloo import LostError
from tierfall.core.restore.restore import Choice, RestoreResult, fill_first
from tierfall.core.types.values import CheckpointId, CopyState, Shard

ORDER = ("host", "nvme", "store")


class Wires:
    """All wires of a job. ``connected`` counts them."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self.changed = threading.Condition()
        self.boxes: dict[tuple[str, int, int, int], torch.Tensor] = {}
        self.cut: set[tuple[str, int]] = set()
        self.connected = 0
        self.patience_s = patience_s
        self.sent = 0
        self.most_open = 0

    def connect(self, name: str, rank: int, world_size: int, timeout_s: float) -> QueueWire:
        with self.changed:
            self.connected += 1
        return QueueWire(self, name, rank)


@dataclass
class QueueWire:
    wires: Wires
    name: str
    rank: int

    def send(self, rank: int, tag: int, bytes: torch.Tensor) -> QueueSending:
        key = (self.name, self.rank, rank, tag)
        with self.wires.changed:
            assert key not in self.wires.boxes, "a tag is used once"
            self._check(rank)
            self.wires.boxes[key] = bytes
            self.wires.sent += bytes.numel()
            self.wires.most_open = max(self.wires.most_open, len(self.wires.boxes))
            self.wires.changed.notify_all()
        return QueueSending(self, key)

    def receive(self, rank: int, tag: int, target: torch.Tensor) -> None:
        key = (self.name, rank, self.rank, tag)
        self._wait_for(rank, lambda: key in self.wires.boxes)
        with self.wires.changed:
            source = self.wires.boxes[key]
            assert source.numel() == target.numel(), "what is sent is what is received"
            target.copy_(source)
            del self.wires.boxes[key]
            self.wires.changed.notify_all()

    def cut(self) -> None:
        with self.wires.changed:
            self.wires.cut.add((self.name, self.rank))
            self.wires.changed.notify_all()

    def _wait_for(self, rank: int, true: Callable[[], bool]) -> None:
        with self.wires.changed:
            gone = {(self.name, rank), (self.name, self.rank)}
            came = self.wires.changed.wait_for(
                lambda: true() or bool(gone & self.wires.cut), self.wires.patience_s
            )
            if not true() or not came:
                raise LostError(f"rank {rank} is gone")

    def _check(self, rank: int) -> None:
        if {(self.name, rank), (self.name, self.rank)} & self.wires.cut:
            raise LostError(f"rank {rank} is gone")


@dataclass
class QueueSending:
    wire: QueueWire
    key: tuple[str, int, int, int]

    def wait(self) -> None:
        self.wire._wait_for(self.key[2], lambda: self.key not in self.wire.wires.boxes)


def part(step: int, rank: int, world_size: int, state: Mapping[str, Any]) -> Made:
    """One rank's part of a checkpoint, whose record names it alone."""
    return sharded(step, rank, world_size, state={**state, "epoch": step, "rng": None})


class Peer:
    """One rank that restores: what it sees of each tier, and what it fills."""

    def __init__(self, ranks: Ranks, wires: Wires) -> None:
        self.ranks, self.wires = ranks, wires
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

    def restore(self, *, exchanges: bool = True, **request: Any) -> RestoreResult:
        """As a checkpointer does it."""
        listings, asked = self.listings(), RestoreRequest(**request)
        candidates = agree_to_restore(self.ranks, listings, asked, mine=ORDER, tally=self.tally)
        real = self.ranks.agree

        def count(what: str, *args: Any, **more: Any) -> Any:
            self.agreements += what == "restore: exchange"
            return real(what, *args, **more)

        self.ranks.agree = count  # type: ignore[method-assign, assignment]
        exchange = Exchange(
            ranks=self.ranks,
            connect=self.wires.connect,
            order=ORDER,
            shared=["store"],
            timeout_s=PATIENCE_S,
        )
        restored = fill_first(
            Choice(
                candidates=candidates,
                listings=listings,
                open_image=lambda tier, id, shard: self.images[tier, id, shard],
            ),
            asked,
            self.tally,
            make_plan=self.make_plan,
            shard=self.ranks.shard,
            together=make_barrier(self.ranks),
            make_reader=exchange.reader if exchanges else CheckpointReader,
        )
        restored.plan.finish()
        return restored


@dataclass
class Job:
    """All ranks of a restore, and what was saved by how many."""

    peers: list[Peer]
    wires: Wires = field(default_factory=Wires)

    @classmethod
    def of(cls, ranks: Sequence[Ranks]) -> Job:
        wires = Wires()
        return cls([Peer(one, wires) for one in ranks], wires)
