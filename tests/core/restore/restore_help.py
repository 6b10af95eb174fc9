"""Checkpoints by hand, on tiers of nothing but dictionaries, whose reads can be made to fail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tierfall.core.capture.copier import ImageCopier
from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.catalog import FoundCopy, KnownCheckpoint, Listing
from tierfall.core.format.decided import DecidedList, Word
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit, Lineage, Manifest, NamedFile
from tierfall.core.image.layout import plan_layout
from tierfall.core.image.segments import Segmentation
from tierfall.core.image.sources import TensorSources
from tierfall.core.load.fill import plan_fill
from tierfall.core.restore.candidates import RestoreRequest, choose
from tierfall.core.restore.reshard import MakePlan
from tierfall.core.restore.restore import Choose, RestoreResult, fill_first
from tierfall.core.state.walk import walk_state
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import CheckpointId, CopyState, Shard

SHARD = Shard(0, 1)
CHUNK = 4096
ELEMENTS = 5000  # five chunks of data
STEM = "rank-00000-of-00001"


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((ELEMENTS,), float(step)), "epoch": step, "rng": None}


@dataclass
class Made:
    """One checkpoint: its image, and the records that vouch for it."""

    image: bytearray
    manifest: Manifest
    commit: Commit


def checkpoint(
    step: int,
    attempt: int = 1,
    started_from: CheckpointId | None = None,
    state: dict[str, Any] | None = None,
) -> Made:
    view = walk_state(state_of(step) if state is None else state)
    layout = plan_layout(view)
    header = layout.header(view)
    assert header is not None
    image = bytearray(layout.image_bytes)
    cutting = Segmentation(layout, view, CHUNK)
    filling = ImageCopier(
        memory=memoryview(image),
        header=header,
        cutting=cutting,
        sources=TensorSources(view, cutting),
        on_progress=lambda final: None,
    )
    filling.run()
    line = Lineage(
        run="run",
        checkpoint=CheckpointId(step, attempt),
        attempt_id=f"{attempt:016x}" * 2,
        ordinal=step,
        started_from=started_from,
    )
    manifest = Manifest(
        lineage=line,
        shard=SHARD,
        image_bytes=layout.image_bytes,
        data_start=layout.data_start,
        chunk_bytes=CHUNK,
        digests=tuple(filling.digests),
        structure=layout.structure,
        pieces=layout.pieces,
    )
    data = manifest.encode()
    commit = Commit(
        lineage=line,
        world_size=1,
        files=(
            NamedFile(name=f"{STEM}.safetensors", bytes=layout.image_bytes, digest=None),
            NamedFile(name=f"{STEM}.json", bytes=len(data), digest=sha256(data)),
        ),
        nodes=("n",),
        wall_time_s=1.0,
    )
    return Made(bytearray(image), manifest, commit)


@dataclass
class DictImage:
    """One copy. ``errors`` says which chunk, by its start, raises what; ``reads`` which ones were asked for."""

    tier: str
    made: Made
    in_memory: bool = False
    errors: dict[int, TierfallError] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    manifest_error: TierfallError | None = None

    def manifest_bytes(self, length: int | None = None) -> bytes:
        if self.manifest_error is not None:
            raise self.manifest_error
        return self.made.manifest.encode()

    def read(
        self, manifest: Manifest, index: int, buffer: memoryview, *, again: bool = False
    ) -> memoryview:
        start, end = manifest.chunk_range(index)
        self.reads.append(start)
        if start in self.errors:
            raise self.errors[start]
        if self.in_memory:
            return memoryview(self.made.image)[start:end]
        buffer[: end - start] = self.made.image[start:end]
        return buffer[: end - start]

    def read_cached(self, manifest: Manifest, index: int, views: Iterable[memoryview]) -> bool:
        return False


class Tiers:
    """Copies by tier and checkpoint, fastest tier first."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.images: dict[tuple[str, CheckpointId], DictImage] = {}
        self.found: dict[tuple[str, CheckpointId], FoundCopy] = {}
        self.errors: dict[str, TierfallError] = {}
        self.damaged: dict[str, tuple[TierfallError, ...]] = {}
        self.decided: dict[str, DecidedList] = {}

    def put(self, tier: str, made: Made, **members: Any) -> DictImage:
        """Lay a copy of its own on a tier."""
        id = made.commit.lineage.checkpoint
        copy = Made(bytearray(made.image), made.manifest, made.commit)
        image = DictImage(tier, copy, in_memory=tier == "host")
        self.images[tier, id] = image
        state = CopyState.SEALED if tier == "host" else CopyState.COMMITTED
        known = {"commit": made.commit, **members}
        self.found[tier, id] = FoundCopy(id=id, state=state, bytes=len(made.image), **known)
        return image

    def decide(self, tier: str, word: Word, made: Made) -> None:
        """Add an entry about a checkpoint to the list of a tier."""
        line, known = made.commit.lineage, self.decided.get(tier, DecidedList())
        self.decided[tier] = known.adding(word, line.checkpoint, line.attempt_id)

    def listings(self) -> tuple[Listing, ...]:
        return tuple(
            Listing(
                tier=name,
                copies=tuple(
                    copy for (tier, _), copy in sorted(self.found.items()) if tier == name
                ),
                damaged=self.damaged.get(name, ()),
                decided=self.decided.get(name, DecidedList()),
            )
            if name not in self.errors
            else Listing(tier=name, error=self.errors[name])
            for name in self.names
        )

    def chosen(self, candidates: Sequence[KnownCheckpoint]) -> Choose:
        return lambda request: [c for c in candidates if c.id not in request.without]

    def reader(self, *arguments: Any, **more: Any) -> CheckpointReader:
        checkpoint, tiers, tally = arguments
        images = self.images
        return CheckpointReader(checkpoint, tiers, lambda t, id, _: images[t, id], tally, **more)

    def restore(self, state: dict[str, Any], **request: Any) -> RestoreResult | None:
        return self.fill(lambda header: plan_fill(state, header), RestoreRequest(**request))

    def fill(
        self, make_plan: MakePlan, request: RestoreRequest | None = None, **reader: Any
    ) -> RestoreResult | None:
        """As one process does it. ``reader`` are arguments of a CheckpointReader."""
        request = request or RestoreRequest()
        tally = ReadTally()
        candidates = choose(self.listings(), request, tally)
        restored = fill_first(
            self.chosen(candidates),
            request,
            tally,
            make_plan=make_plan,
            shard=SHARD,
            make_reader=partial(self.reader, **reader),
        )
        if restored is not None:
            restored.plan.finish()
        return restored


def flip(image: DictImage, chunk: int) -> None:
    """Change one bit of a chunk; 0 is the header."""
    start = 0 if chunk == 0 else image.made.manifest.data_start + (chunk - 1) * CHUNK
    image.made.image[start + 17] ^= 4


def start_of(image: DictImage, chunk: int) -> int:
    return 0 if chunk == 0 else image.made.manifest.data_start + (chunk - 1) * CHUNK


def holds(state: dict[str, Any], step: int) -> bool:
    return state["epoch"] == step and bool((state["w"] == float(step)).all())


def passed_over(restored: RestoreResult) -> Iterable[str]:
    return [f"{f.what}: {f.reason}" for f in restored.tally.fallbacks]
