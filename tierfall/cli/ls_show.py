"""``ls``, ``show``, ``latest`` and ``runs``: commands that only read, beside a living trainer too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from rich.table import Table

from tierfall.cli.common import (
    CommandOutput,
    cell,
    checkpoints_table,
    coloured,
    counted,
    describe_new,
    document_of,
    format_metric,
    of_this_user,
    rough_duration,
    table,
    with_tier,
)
from tierfall.cli.facts import (
    RunFacts,
    load_settings,
    load_settings_if_any,
    name_other_runs,
    owner_members,
)
from tierfall.cli.usage import Asked, StepName
from tierfall.config import Config
from tierfall.core.copies.images import checked_manifest
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.format.records import ImagePlan, Manifest
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    NotSupportedError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.text import members, to_json
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import Shard
from tierfall.ops.memory import HeldMemory, held_by_runs
from tierfall.ops.reader import RunReader, find_runs
from tierfall.ops.watch import find_living_status
from tierfall.policies.retention import used_metrics
from tierfall.telemetry.figures import of_tier
from tierfall.telemetry.reports import (
    CheckpointInfo,
    describe_peer_survival,
    format_bounds,
    format_unread,
)
from tierfall.telemetry.status import Status

# latest and runs -------------------------------------------------------------------------------------


def latest(asked: Asked) -> None:
    """Print the newest step of which some tier has a good copy."""
    settings = load_settings(asked)
    answer = CommandOutput(asked.as_json)
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
    answer.note_unread(facts.unread)
    facts.note_newer(answer, newest := facts.newest)
    if newest is None:
        answer.refuse(
            f"latest: run {settings.run} has no step that can be restored{name_other_runs(settings)}"
        )
    answer.document = {
        "run": settings.run,
        **members(facts.by_id[newest], "id"),
        "tiers": [t for t, copy in facts.by_id[newest].copies.items() if copy.damage is None],
    }
    answer.show(str(newest))
    answer.finish()


def runs(asked: Asked) -> None:
    """List all runs on the tiers, and what runs hold in the memory of this node; without a file, that alone."""
    answer = CommandOutput(asked.as_json)
    # A folder of several runs needs a name; all are listed.
    settings = load_settings_if_any(Asked(asked.config, "any", asked.as_json))
    held: list[HeldMemory] = []
    try:
        held = held_by_runs(settings)
    except UnreachableError as error:
        answer.problem(error)
    answer.document = {"memory": [held_members(one) for one in held]}
    if settings is not None:
        answer.document = {"runs": _show_runs(answer, settings), **answer.document}
    elif not held:
        answer.show("nothing of this user is in this node's memory")
    if held:
        answer.show(*_memory_of_node(held, below=settings is not None))
    answer.finish()


def _show_runs(answer: CommandOutput, settings: Config) -> list[dict[str, Any]]:
    names, unread = find_runs(settings)
    answer.note_unread(unread)
    found = [_describe_run(answer, settings, name) for name in names]
    right = ("STEPS", "LATEST", "AGE", "SIZE")
    made = table("RUN", *right, "TIERS", "OWNER", right=right)
    for one in found:
        made.add_row(
            one["run"],
            str(one["checkpoints"]),
            "-" if one["step"] is None else f"{one['step']}@{one['attempt']}",
            cell(one["wall_time_s"], lambda at: rough_duration(max(0.0, time.time() - at))),
            format_size(one["bytes"]),
            ", ".join(one["tiers"]) or "-",
            f"process {one['owner']['pid']}" if one["owner"] else "-",
        )
    if found:
        answer.show(made)
    answer.show((counted(len(found), "run", "runs") if found else "no run") + format_unread(unread))
    return found


def _memory_of_node(held: Sequence[HeldMemory], *, below: bool) -> Iterable[Table | str]:
    if below:
        yield ""
    right = ("STEPS", "SIZE", "FOR OTHERS")
    made = table("IN MEMORY HERE", *right, "OWNER", "FILE", right=right)
    for one in held:
        made.add_row(
            one.run,
            "?" if one.problems and not one.checkpoints else str(len(one.checkpoints)),
            format_size(one.bytes),
            format_size(one.kept_bytes) if one.kept_bytes else "-",
            "no trainer" if one.owner is None else one.owner.process,
            one.file or "-",
        )
    yield made
    if any(one.owner is None for one in held):
        yield "'tierfall drain --all' flushes what no trainer owns, --discard frees it"


def held_members(held: HeldMemory) -> dict[str, Any]:
    """Return what a run holds in this node's memory, for a document."""
    return {
        **members(held, "run", "folder", "file", "bytes", "kept_bytes", "problems"),
        "checkpoints": [members(id, "step", "attempt") for id in held.checkpoints],
        "owner": owner_members(held.owner),
    }


def _describe_run(answer: CommandOutput, settings: Config, run: str) -> dict[str, Any]:
    with RunReader(settings.model_copy(update={"run": run})) as reader:
        facts = RunFacts(reader)
    answer.note_unread(facts.unread)
    held = [listing for listing in facts.listings if listing.copies]
    return {
        "run": run,
        "checkpoints": len(facts.known),
        **members(facts.by_id.get(facts.newest) if facts.newest else None, "id", "wall_time_s"),
        "bytes": sum(copy.bytes for listing in held for copy in listing.copies),
        "tiers": [listing.tier for listing in held],
        "owner": owner_members(facts.owner),
    }


# ls and show -----------------------------------------------------------------------------------------


LARGEST_SHOWN = 5


def ls(asked: Asked, last: int | None, metrics: bool) -> None:
    """List the steps of a run, or the newest ``last`` of them: age, size, and the state on each tier."""
    settings = load_settings(asked)
    answer = CommandOutput(asked.as_json)
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
        trainer = find_living_status(settings, run=settings.run)
        _note_unread(answer, facts)
        known = facts.checkpoints
        shown = [*known][-(last or len(known)) :]
        answer.document = {
            "run": settings.run,
            "owner": owner_members(facts.owner),
            "tiers": [_tier_members(reader, facts, listing) for listing in facts.listings],
            "checkpoints": [members(known[id]) for id in shown if id in facts.by_id],
            **members((trainer or facts).statistics, "loss_bound", "peer_survival"),
        }
        if shown:
            all_names = sorted({m for one in known.values() for m in one.metrics})
            transfers = trainer.transfers if trainer else ()
            made = checkpoints_table(
                [known[id] for id in shown],
                [listing.tier for listing in facts.listings],
                all_names if metrics else used_metrics(facts.view.tiers),
                now_s=facts.wall_time_s,
                unread=facts.unread,
                writing={(t.step, t.attempt, t.tier) for t in transfers},
            )
            answer.show(made)
        if older := len(known) - len(shown):
            steps = counted(older, "older step is", "older steps are")
            answer.show(f"{steps} not shown (--last {last})")
        answer.show(*_summary(facts, settings, trainer))
    answer.finish()


def show(asked: Asked, steps: list[StepName]) -> None:
    """Show steps in full: lineage, files, copies and why each is kept or deleted."""
    settings = load_settings(asked)
    answer = CommandOutput(asked.as_json)
    documents: list[dict[str, Any]] = []
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
        _note_unread(answer, facts)
        found = {
            checkpoint.id: checkpoint
            for name in steps
            for checkpoint in [facts.find(answer, name, doing="show")]
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
    files = {
        tier: _files(reader, tier, checkpoint, answer)
        for tier in checkpoint.copies
        if tier in reader.stores
    }
    manifests, problems = manifest_members(reader, checkpoint)
    for tier, error in problems:
        answer.problem(with_tier(tier, error))
    info = facts.checkpoints[checkpoint.id]
    answer.show(*_in_full(facts, checkpoint, info, manifests, files))
    document = {
        "run": reader.run,
        **members(info),
        **members(checkpoint.commit, "world_size"),
        "nodes": list(checkpoint.commit.nodes) if checkpoint.commit else [],
        "manifests": manifests,
    }
    for tier, of_copy in document["copies"].items():
        if tier not in checkpoint.copies:
            continue
        of_copy["decision"] = members(facts.decision(tier, checkpoint.id), "verdict", "reason")
        of_copy["files"] = [{"name": f, "bytes": n} for f, n in files.get(tier, {}).items()]
    return document


# For programs ----------------------------------------------------------------------------------------


def _tier_members(reader: RunReader, facts: RunFacts, listing: Listing) -> dict[str, Any]:
    store = reader.stores.get(listing.tier)
    kind = next(tier.kind for tier in reader.config.chain if tier.name == listing.tier)
    places = {tier.name: tier.place for tier in reader.config.stored}
    return {
        "name": listing.tier,
        "kind": str(kind),
        "place": store.place if store else places.get(listing.tier, str(reader.memory_folder)),
        "not_created": listing.tier in facts.not_created,
        **to_json(of_tier(facts.statistics, listing.tier)),
        **members(listing, "error", "damaged"),
        "unfinished": to_json(sorted(listing.unfinished)),
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
                why = str(copy.damage).removeprefix(f"{listing.tier}: ")
                why = why.removeprefix(f"{copy.id} was found damaged: ")  # by the tier's list
                answer.problem(f"{copy.id} {what} on tier {listing.tier}: {why}")


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
    found = (trainer or facts).statistics
    if trainer is not None or facts.known:
        yield from format_bounds(found.loss_bound, () if trainer else tuple(facts.unread))
    for tier in settings.stored:
        if tier.name in facts.not_created:
            yield describe_new(tier.name, tier.place)
    if found.peer_survival is not None:
        yield describe_peer_survival(found.peer_survival, live=trainer is not None)
    if facts.owner is not None:
        yield f"a trainer owns it: {facts.owner}"


def _in_full(
    facts: RunFacts,
    checkpoint: KnownCheckpoint,
    info: CheckpointInfo,
    manifests: Sequence[dict[str, Any]],
    files: dict[str, dict[str, int]],
) -> Iterable[Table | str]:
    yield _head(facts, checkpoint, info)
    yield ""
    copies = table("COPY", "STATE", "SIZE", "RETENTION", right=("SIZE",))
    for tier, copy in checkpoint.copies.items():
        decision = facts.decision(tier, checkpoint.id)
        copies.add_row(
            tier,
            coloured(copy.label),
            format_size(copy.bytes),
            f"{decision.verdict}: {decision.reason}",
        )
    yield copies
    for manifest in manifests:
        yield ""
        yield from _manifest_lines(manifest)
    if named := sorted({name for found in files.values() for name in found}):
        yield ""
        made = table("FILE", *files, right=files)
        for name in named:
            made.add_row(name, *(cell(found.get(name), format_size) for found in files.values()))
        yield made


def _head(facts: RunFacts, checkpoint: KnownCheckpoint, info: CheckpointInfo) -> Table:
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    commit = checkpoint.commit
    made.add_row("step", str(info.step))
    made.add_row("attempt", str(info.attempt))
    if commit is not None:
        start = commit.lineage.started_from
        begun = "started from nothing" if start is None else f"continued from {start}"
        made.add_row(
            "lineage", f"checkpoint {commit.lineage.ordinal} of this training, which {begun}"
        )
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit.wall_time_s))
        age = format_duration(round(max(0.0, facts.wall_time_s - commit.wall_time_s)))
        made.add_row("saved", f"{at}, {age} ago")
        made.add_row(
            "by", f"{', '.join(commit.nodes)} ({counted(commit.world_size, 'rank', 'ranks')})"
        )
    made.add_row("size", format_size(info.bytes))
    if info.metrics:
        made.add_row(
            "metrics", ", ".join(f"{k} {format_metric(v)}" for k, v in info.metrics.items())
        )
    if info.remarks:
        made.add_row("remarks", ", ".join(info.remarks))
    if info.owed:
        made.add_row("still owed to", ", ".join(info.owed))
    return made


def _manifest_lines(manifest: dict[str, Any]) -> Iterable[Table | str]:
    chunks = counted(manifest["chunks"], "chunk", "chunks")
    tensors = counted(len(manifest["tensors"]), "tensor", "tensors")
    yield (
        f"{manifest['shard']}: an image of {format_size(manifest['image_bytes'])} in {chunks} of at most "
        f"{format_size(manifest['chunk_bytes'])}, with {tensors}, the largest:"
    )
    made = table("TENSOR", "DTYPE", "SHAPE", "SIZE", right=("SIZE",))
    largest = sorted(manifest["tensors"], key=lambda t: (-t["bytes"], t["name"]))
    for tensor in largest[:LARGEST_SHOWN]:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        made.add_row(tensor["name"], tensor["dtype"], shape, format_size(tensor["bytes"]))
    yield made


def _files(
    reader: RunReader, tier: str, checkpoint: KnownCheckpoint, answer: CommandOutput
) -> dict[str, int]:
    """Return the size of each file of a copy, by name."""
    try:
        return {file.key: file.bytes for file in reader.stores[tier].files(checkpoint.id)}
    except BackendError as error:
        answer.problem(f"tier {tier}: its files could not be listed: {error}")
        return {}


# Manifests -------------------------------------------------------------------------------------------


def manifest_members(
    reader: RunReader, checkpoint: KnownCheckpoint
) -> tuple[list[dict[str, Any]], list[tuple[str, TierfallError]]]:
    """Read each shard's manifest from the fastest copy where it is good, for a document; return also the errors, each
    with its tier."""
    found: list[dict[str, Any]] = []
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
                found.append(_of_manifest(manifest))
            except (IntegrityError, NotSupportedError, BackendError) as error:
                problems.append((tier, error))
                continue
            break
    return found, problems


def _of_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest has of its image; sizes are raw bytes."""
    shard = manifest.shard
    try:
        tensors = [_tensor(piece) for piece in json.loads(manifest.pieces)]
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"manifest of {manifest.lineage.checkpoint}: its tensor table is invalid: {error!r}"
        ) from error
    return {
        "shard": f"rank {shard.rank} of {shard.world_size}",
        **members(manifest, *(x.name for x in fields(ImagePlan) if x.name != "pieces")),
        "chunks": manifest.chunk_count,
        "tensor_bytes": sum(tensor["bytes"] for tensor in tensors),
        "tensors": tensors,
    }


def _tensor(piece: dict[str, Any]) -> dict[str, Any]:
    """Return a tensor, or the block of it that an image holds."""
    return {
        "name": str(piece["name"]),
        "dtype": str(piece["dtype"]),
        "shape": [int(length) for length in piece["lengths"]],
        "bytes": int(piece["end"]) - int(piece["start"]),
    }
