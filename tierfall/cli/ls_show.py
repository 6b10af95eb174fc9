"""``ls`` and ``show``: commands that only read, beside a living trainer too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from tierfall.cli.common import (
    CommandOutput,
    cell,
    coloured,
    copies_table,
    counted,
    describe_new,
    document_of,
    find_step,
    load_settings,
    name_other_runs,
    of_this_user,
    owner_members,
    rough_duration,
    table,
    with_tier,
)
from tierfall.cli.run_facts import (
    RunFacts,
    format_bounds,
    format_loss,
    format_peer_survival,
    known_bounds,
)
from tierfall.cli.usage import StepName
from tierfall.config import Config
from tierfall.core.copies.images import checked_manifest
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.format.records import Manifest
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.text import members, to_json
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.ops.reader import RunReader
from tierfall.ops.watch import find_living_status
from tierfall.telemetry.status import Status

LARGEST_SHOWN = 5
_OF_MANIFEST = ("shard", "image_bytes", "chunks", "chunk_bytes", "tensor_bytes", "tensors")


def ls(last: int | None, metrics: bool, config: str | None, run: str | None, as_json: bool) -> None:
    """List the steps of a run, or the newest ``last`` of them: age, size, and the state on each tier."""
    settings = load_settings(config, run)
    answer = CommandOutput(as_json)
    with RunReader(settings) as reader:
        facts = RunFacts.gather(reader)
        trainer = find_living_status(settings, run=settings.run)
        _note_unread(answer, facts)
        rows = facts.rows()
        listed = rows[-(last or len(rows)) :]
        shown = set(listed)
        answer.document = {
            "run": settings.run,
            "owner": owner_members(facts.owner),
            "tiers": [_tier_members(reader, facts, listing) for listing in facts.listings],
            "checkpoints": [_members(facts, c) for c in facts.known if c.id in shown],
            "loss_bound": to_json(trainer.loss_bound if trainer else known_bounds(facts.safety)),
            "peer_survival": to_json((trainer or facts).peer_survival),
        }
        if listed:
            answer.show(_steps(facts, listed, trainer, metrics=metrics))
        if older := len(rows) - len(listed):
            steps = counted(older, "older step is", "older steps are")
            answer.show(f"{steps} not shown (--last {last})")
        answer.show(*_summary(facts, settings, trainer))
    answer.finish()


def show(steps: list[StepName], config: str | None, run: str | None, as_json: bool) -> None:
    """Show steps in full: lineage, files, copies and why each is kept or deleted."""
    settings = load_settings(config, run)
    answer = CommandOutput(as_json)
    documents: list[dict[str, Any]] = []
    with RunReader(settings) as reader:
        facts = RunFacts.gather(reader)
        _note_unread(answer, facts)
        found = {
            checkpoint.id: checkpoint
            for name in steps
            for checkpoint in [find_step(answer, facts.listings, name, doing="show")]
        }
        for checkpoint in found.values():
            if documents:
                answer.show("")
            documents.append(_show_step(answer, reader, facts, checkpoint))
    answer.document = document_of(settings.run, documents)
    answer.finish()


def _show_step(
    answer: CommandOutput, reader: RunReader, facts: RunFacts, checkpoint: KnownCheckpoint
) -> dict[str, Any]:
    """Show one step, and return its document."""
    files = {tier: _files(reader, tier, checkpoint, answer) for tier in checkpoint.copies}
    manifests, problems = manifest_facts(reader, checkpoint)
    for tier, error in problems:
        answer.problem(with_tier(tier, error))
    answer.show(*_in_full(facts, checkpoint, manifests, files))
    document = {
        "run": reader.run,
        **_members(facts, checkpoint),
        "owed": list(facts.owed(checkpoint.id)),
        **members(checkpoint.commit, "world_size"),
        "nodes": list(checkpoint.commit.nodes) if checkpoint.commit else [],
        "manifests": [members(manifest, *_OF_MANIFEST) for manifest in manifests],
    }
    for tier, of_copy in document["copies"].items():
        of_copy["decision"] = members(facts.decision(tier, checkpoint.id), "verdict", "reason")
        of_copy["files"] = [{"name": f, "bytes": n} for f, n in files[tier]]
    return document


# For programs ----------------------------------------------------------------------------------------


def _tier_members(reader: RunReader, facts: RunFacts, listing: Listing) -> dict[str, Any]:
    store = reader.stores.get(listing.tier)
    kind = next(tier.kind for tier in reader.config.chain if tier.name == listing.tier)
    places = {tier.name: tier.place for tier in reader.config.stored}
    return {
        "name": listing.tier,
        "kind": str(kind),
        "place": store.place if store else places.get(listing.tier, str(reader.host.path)),
        "not_created": listing.tier in facts.not_created,
        "checkpoints": len(listing.copies),
        "bytes": sum(copy.bytes for copy in listing.copies),
        **members(listing, "error", "damaged"),
        "unfinished": to_json(sorted(listing.unfinished)),
    }


def _members(facts: RunFacts, checkpoint: KnownCheckpoint) -> dict[str, Any]:
    line = checkpoint.commit.lineage if checkpoint.commit else None
    return {
        **members(checkpoint, "id"),
        **members(line, "ordinal", "started_from"),
        **members(checkpoint, "bytes", "wall_time_s"),
        "age_s": facts.age_s(checkpoint),
        **members(checkpoint, "pinned", "abandoned"),
        "deleted": checkpoint.tombstoned,
        **members(checkpoint, "tags", "metrics"),
        "copies": {
            tier: {"state": copy.label, **members(copy, "bytes", "marks", "damage")}
            for tier, copy in checkpoint.copies.items()
        },
    }


# For people ------------------------------------------------------------------------------------------


def _note_unread(answer: CommandOutput, facts: RunFacts) -> None:
    answer.note_unread(facts.unread)
    for listing in facts.listings:
        for damage in listing.damaged:
            answer.problem(f"tier {listing.tier} holds a damaged file: {damage}")
        for copy in listing.copies:
            if copy.damage is not None:
                what = "could not be read" if copy.unread else "is damaged"
                answer.problem(f"{copy.id} {what} on {with_tier(listing.tier, copy.damage)}")


def _steps(
    facts: RunFacts, ids: Sequence[CheckpointId], trainer: Status | None, *, metrics: bool
) -> Table | Text:
    tiers = [listing.tier for listing in facts.listings]
    written = {(t.step, t.attempt, t.tier) for t in (trainer.transfers if trainer else ())}

    def state(id: CheckpointId, tier: str) -> str:
        found = facts.cell(id, tier)
        arrives = found == "owed" and (id.step, id.attempt, tier) in written
        return str(CopyState.ARRIVING) if arrives else found

    shown = sorted({m for c in facts.known for m in c.metrics}) if metrics else []
    rows = []
    for id in ids:
        checkpoint = facts.by_id.get(id)
        head, tail = [str(id), "", ""], [""] * (len(shown) + 1)
        if checkpoint is not None:
            age = cell(facts.age_s(checkpoint), rough_duration)
            head = [str(id), age, format_size(checkpoint.bytes)]
            values = checkpoint.metrics
            tail = [f"{values[name]:.6g}" if name in values else "" for name in shown]
            tail.append(", ".join(_remarks(checkpoint)))
        rows.append((head, {tier: state(id, tier) for tier in tiers}, tail))
    return copies_table(("STEP", "AGE", "SIZE"), tiers, (*shown, ""), rows)


def _age(facts: RunFacts, checkpoint: KnownCheckpoint) -> str:
    age_s = facts.age_s(checkpoint)
    return "" if age_s is None else format_duration(round(age_s))


def _remarks(checkpoint: KnownCheckpoint) -> Iterable[str]:
    yield from (f"#{tag}" for tag in sorted(checkpoint.tags))
    if checkpoint.pinned:
        yield "pinned"
    if checkpoint.abandoned:
        yield "abandoned"
    if checkpoint.tombstoned:
        yield "to be deleted"


def _summary(facts: RunFacts, settings: Config, trainer: Status | None) -> Iterable[str]:
    count = len(facts.known)
    what = counted(count, "checkpoint", "checkpoints")
    if not count:
        where = f"on the tiers or in host memory{of_this_user(settings)}"
        what = f"no checkpoint {where}{name_other_runs(settings)}"
    held = ", ".join(
        f"{listing.tier} {format_size(sum(copy.bytes for copy in listing.copies))}"
        for listing in facts.listings
        if listing.copies
    )
    yield f"run {settings.run}: {what}" + (f" ({held})" if held else "")
    if trainer is not None:
        yield format_bounds(trainer.loss_bound, describe=format_loss)
    elif facts.known:
        yield format_bounds(known_bounds(facts.safety), tuple(facts.unread))
    for tier in settings.stored:
        if tier.name in facts.not_created:
            yield describe_new(tier.name, tier.place)
    yield from format_peer_survival((trainer or facts).peer_survival, live=trainer is not None)
    if facts.owner is not None:
        yield f"a trainer owns it: {facts.owner}"


def _in_full(
    facts: RunFacts,
    checkpoint: KnownCheckpoint,
    manifests: Sequence[ManifestFacts],
    files: dict[str, list[tuple[str, int]]],
) -> Iterable[Table | str]:
    yield _head(facts, checkpoint)
    yield ""
    copies = table("COPY", "STATE", "SIZE", "MARKS", "RETENTION", right=("SIZE",))
    for tier, copy in checkpoint.copies.items():
        decision = facts.decision(tier, checkpoint.id)
        copies.add_row(
            tier,
            coloured(copy.label),
            format_size(copy.bytes),
            ", ".join(sorted(copy.marks)),
            f"{decision.verdict}: {decision.reason}",
        )
    yield copies
    for manifest in manifests:
        yield ""
        yield from _manifest_lines(manifest)
    for tier, found in files.items():
        if found:
            yield ""
            made = table(f"FILE on {tier}", "SIZE", right=("SIZE",))
            for name, size in found:
                made.add_row(name, format_size(size))
            yield made


def _head(facts: RunFacts, checkpoint: KnownCheckpoint) -> Table:
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    commit = checkpoint.commit
    made.add_row("step", str(checkpoint.id.step))
    made.add_row("attempt", str(checkpoint.id.attempt))
    if commit is not None:
        start = commit.lineage.started_from
        made.add_row("lineage", f"number {commit.lineage.ordinal}, {_from(start)}")
        made.add_row("saved", f"{_wall_time(commit.wall_time_s)}, {_age(facts, checkpoint)} ago")
        made.add_row(
            "by", f"{', '.join(commit.nodes)} ({counted(commit.world_size, 'rank', 'ranks')})"
        )
    made.add_row("size", format_size(checkpoint.bytes))
    if checkpoint.metrics:
        made.add_row("metrics", ", ".join(f"{k} {v:.6g}" for k, v in checkpoint.metrics.items()))
    if remarks := list(_remarks(checkpoint)):
        made.add_row("remarks", ", ".join(remarks))
    if owed := facts.owed(checkpoint.id):
        made.add_row("still owed to", ", ".join(owed))
    return made


def _from(start: CheckpointId | None) -> str:
    return "started from nothing" if start is None else f"continued from {start}"


def _wall_time(wall_time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_time_s))


def _manifest_lines(manifest: ManifestFacts) -> Iterable[Table | str]:
    chunks = counted(manifest.chunks, "chunk", "chunks")
    tensors = counted(len(manifest.tensors), "tensor", "tensors")
    yield (
        f"{manifest.shard}: an image of {format_size(manifest.image_bytes)} in {chunks} of at most "
        f"{format_size(manifest.chunk_bytes)}, with {tensors}, the largest:"
    )
    made = table("TENSOR", "DTYPE", "SHAPE", "SIZE", right=("SIZE",))
    for tensor in manifest.largest(LARGEST_SHOWN):
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        made.add_row(tensor.name, tensor.dtype, shape, format_size(tensor.bytes))
    yield made


def _files(
    reader: RunReader, tier: str, checkpoint: KnownCheckpoint, answer: CommandOutput
) -> list[tuple[str, int]]:
    """Return name and size of each file of a copy; none for host memory."""
    store = reader.stores.get(tier)
    if store is None:
        return []
    try:
        return [(stored.key, stored.bytes) for stored in store.files(checkpoint.id)]
    except BackendError as error:
        answer.problem(f"tier {tier}: its files could not be listed: {error}")
        return []


# Manifests -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A tensor, or the block of it that an image holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFacts:
    """One image by its manifest; sizes are raw bytes."""

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
    """Read each shard's manifest from the fastest copy where it is good; return also the errors, each with its tier."""
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
                continue  # the record of one node, or of one rank's memory, names only its own shards
            try:
                manifest = checked_manifest(opener(tier, checkpoint.id, shard), copy.commit, shard)
                found.append(_facts_of(manifest))
            except (IntegrityError, NotSupportedError, BackendError) as error:
                problems.append((tier, error))
                continue
            break
    return found, problems


def _facts_of(manifest: Manifest) -> ManifestFacts:
    shard = manifest.shard
    try:
        tensors = tuple(_tensor(piece) for piece in json.loads(manifest.pieces))
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"manifest of {manifest.lineage.checkpoint}: its tensor table is invalid: {error!r}"
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
