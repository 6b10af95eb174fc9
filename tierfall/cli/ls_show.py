"""``ls``, ``show``, ``latest`` and ``runs``: commands that only read, beside a living trainer too; and the facts of a
run that they and others show, from one listing of all tiers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

from rich.table import Table
from rich.text import Text

from tierfall.cli.common import (
    REMARKS,
    CommandOutput,
    cell,
    coloured,
    copies_table,
    counted,
    describe_new,
    document_of,
    find_step,
    format_metric,
    load_settings,
    load_settings_if_any,
    name_other_runs,
    of_this_user,
    owner_members,
    rough_duration,
    table,
    with_tier,
)
from tierfall.cli.usage import Asked, StepName
from tierfall.config import Config
from tierfall.core.copies.images import checked_manifest
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge, to_view
from tierfall.core.format.records import ImagePlan, Manifest
from tierfall.core.runtime.run_lock import LockOwner
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
from tierfall.core.types.values import CheckpointId, CopyState, Shard, TierKind
from tierfall.core.types.view import Decision, PeerSurvival, Verdict, View
from tierfall.ops.commands import restorable, unread, view_of
from tierfall.ops.memory import HeldMemory, held_by_runs
from tierfall.ops.reader import RunReader, find_runs
from tierfall.ops.watch import find_living_status
from tierfall.policies.forecast import loss_bounds, peer_survival
from tierfall.policies.retention import plan_retention, used_metrics
from tierfall.setup.start import newest_attempt
from tierfall.setup.tiers import tier_rules
from tierfall.telemetry.figures import Statistics, of_tier
from tierfall.telemetry.reports import describe_peer_survival, format_bounds, format_unread
from tierfall.telemetry.status import CheckpointStatus, Status

logger = logging.getLogger("tierfall")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One listing of all tiers of a run; those that are ``not_created`` yet are empty. ``safety`` is ``view`` with the
    read-only tiers, whose copies survive losses too. ``statistics`` has the figures that a listing gives;
    ``peer_survival`` is of the time at which the newest checkpoint in peer memory was committed."""

    listings: tuple[Listing, ...]
    not_created: tuple[str, ...]
    known: tuple[KnownCheckpoint, ...]
    view: View
    safety: View
    statistics: Statistics
    owner: LockOwner | None
    wall_time_s: float

    @classmethod
    def gather(cls, reader: RunReader) -> Self:
        listings, new = reader.list_with_new()
        known = merge(listings)
        rules = tier_rules(reader.config, read_too=True)
        safety = to_view(rules, known, wall_time_s=time.time())
        return cls(
            listings=listings,
            not_created=tuple(new),
            known=known,
            view=view_of(reader.config, known),
            safety=safety,
            statistics=Statistics(
                checkpoints={listing.tier: len(listing.copies) for listing in listings},
                used_bytes={listing.tier: listing.used_bytes for listing in listings},
                capacity_bytes={tier.name: tier.capacity_bytes for tier in rules},
                loss_bound=loss_bounds(safety),
                peer_survival=_peer_survival(reader, listings, safety),
            ),
            owner=reader.owner(),
            wall_time_s=time.time(),
        )

    @cached_property
    def by_id(self) -> dict[CheckpointId, KnownCheckpoint]:
        return {c.id: c for c in self.known}

    @cached_property
    def _owed(self) -> dict[CheckpointId, frozenset[str]]:
        return {c.id: c.owed - self.unread.keys() for c in self.view.checkpoints}

    @cached_property
    def unread(self) -> dict[str, TierfallError]:
        return unread(self.listings)

    def rows(self) -> list[CheckpointId]:
        """Return every checkpoint, and every unfinished one."""
        unfinished = {id for listing in self.listings for id in listing.unfinished}
        return sorted({*self.by_id, *unfinished})

    def cell(self, id: CheckpointId, tier: str) -> str:
        """Return the state of a tier's copy in one word; ``-``: none; ``?``: the tier could not be read."""
        listing = next(x for x in self.listings if x.tier == tier)
        if listing.error is not None:
            return "?"
        known = self.by_id.get(id)
        if known is not None and tier in known.copies:
            return known.copies[tier].label
        if id in listing.unfinished:
            return str(CopyState.ARRIVING) if self.owner else "unfinished"
        return "owed" if tier in self._owed.get(id, ()) else "-"

    def age_s(self, checkpoint: KnownCheckpoint) -> float | None:
        saved_s = checkpoint.wall_time_s
        return None if saved_s is None else max(0.0, self.wall_time_s - saved_s)

    def owed(self, id: CheckpointId) -> tuple[str, ...]:
        """Return the tiers that were read and are still owed a copy."""
        return tuple(tier.name for tier in self.view.tiers if tier.name in self._owed.get(id, ()))

    def decision(self, tier: str, id: CheckpointId) -> Decision:
        """Return what retention decides about a copy, with the reason."""
        rules = next((rules for rules in self.view.tiers if rules.name == tier), None)
        if rules is None:
            reason = "the tier is read-only: nothing is deleted there"
        elif rules.kind is TierKind.HOST:
            newest = max((c.id for c in self.view.on(tier) if c.live), default=None)
            reason = "until a save needs its room; the oldest is evicted first"
            if newest == id:
                reason = "the newest in memory is always kept"
        elif decided := [d for d in plan_retention(self.view, tier) if d.checkpoint == id]:
            return decided[0]
        else:
            reason = f"no rule deletes it: {self.by_id[id].copies[tier].damage}"
        return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)


def _peer_survival(
    reader: RunReader, listings: Sequence[Listing], safety: View
) -> PeerSurvival | None:
    """Return what peer memory survives, by the record of the newest attempt; None where no tier has that record, or
    this node has nothing in peer memory that it saved."""
    if reader.config.peers is None:
        return None
    try:
        found = newest_attempt(listings, reader.stores)
    except TierfallError as error:
        logger.debug("the record of the newest attempt could not be read: %s", error)
        return None
    if found is None or found[0].node_losses is None:
        return None
    return peer_survival(safety, found[0].number, found[0].node_losses)


# What a failure would cost -------------------------------------------------------------------------


def format_peer_survival(found: PeerSurvival | None, *, live: bool) -> tuple[str, ...]:
    """Format the line about peer memory, if there is one. Without a ``live`` trainer, a node may have been lost."""
    if found is None:
        return ()
    return (describe_peer_survival(found) + ("" if live else " (if no node is lost yet)"),)


# latest and runs -------------------------------------------------------------------------------------


def latest(asked: Asked) -> None:
    """Print the newest step of which some tier has a good copy."""
    settings = load_settings(asked)
    answer = CommandOutput(asked.as_json)
    with RunReader(settings) as reader:
        facts = RunFacts.gather(reader)
    answer.note_unread(facts.unread)
    newest = next(iter(restorable(facts.known)), None)
    answer.note_newer(facts.listings, newest)
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
        facts = RunFacts.gather(reader)
    answer.note_unread(facts.unread)
    newest = next(iter(restorable(facts.known)), None)
    held = [listing for listing in facts.listings if listing.copies]
    return {
        "run": run,
        "checkpoints": len(facts.known),
        **members(facts.by_id.get(newest) if newest else None, "id", "wall_time_s"),
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
            **members((trainer or facts).statistics, "loss_bound", "peer_survival"),
        }
        if listed:
            all_names = {m for c in facts.known for m in c.metrics}
            names = sorted(all_names) if metrics else used_metrics(facts.view.tiers)
            answer.show(_steps(facts, listed, trainer, names))
        if older := len(rows) - len(listed):
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
    files = {
        tier: _files(reader, tier, checkpoint, answer)
        for tier in checkpoint.copies
        if tier in reader.stores
    }
    manifests, problems = manifest_members(reader, checkpoint)
    for tier, error in problems:
        answer.problem(with_tier(tier, error))
    answer.show(*_in_full(facts, checkpoint, manifests, files))
    document = {
        "run": reader.run,
        **_members(facts, checkpoint),
        "owed": list(facts.owed(checkpoint.id)),
        **members(checkpoint.commit, "world_size"),
        "nodes": list(checkpoint.commit.nodes) if checkpoint.commit else [],
        "manifests": manifests,
    }
    for tier, of_copy in document["copies"].items():
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


def _members(facts: RunFacts, checkpoint: KnownCheckpoint) -> dict[str, Any]:
    line = checkpoint.commit.lineage if checkpoint.commit else None
    return {
        **members(checkpoint, "id"),
        **members(line, "ordinal", "started_from"),
        **members(checkpoint, "bytes", "wall_time_s", "pinned", "abandoned", "deleted"),
        **members(checkpoint, "tags", "metrics"),
        "copies": {
            tier: {"state": copy.label, **members(copy, "bytes", "damage")}
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
                why = str(copy.damage).removeprefix(f"{listing.tier}: ")
                why = why.removeprefix(f"{copy.id} was found damaged: ")  # by the tier's list
                answer.problem(f"{copy.id} {what} on tier {listing.tier}: {why}")


def _steps(
    facts: RunFacts, ids: Sequence[CheckpointId], trainer: Status | None, metrics: Sequence[str]
) -> Table | Text:
    tiers = [listing.tier for listing in facts.listings]
    written = {(t.step, t.attempt, t.tier) for t in (trainer.transfers if trainer else ())}

    def state(id: CheckpointId, tier: str) -> str:
        found = facts.cell(id, tier)
        arrives = found == "owed" and (id.step, id.attempt, tier) in written
        return str(CopyState.ARRIVING) if arrives else found

    rows = []
    for id in ids:
        checkpoint = facts.by_id.get(id)
        head, tail = [str(id), "", ""], [""] * (len(metrics) + 1)
        if checkpoint is not None:
            age = cell(facts.age_s(checkpoint), rough_duration)
            head = [str(id), age, format_size(checkpoint.bytes)]
            tail = [format_metric(checkpoint.metrics.get(name)) for name in metrics]
            tail.append(", ".join(remarks_on(checkpoint)))
        rows.append((head, {tier: state(id, tier) for tier in tiers}, tail))
    return copies_table(("STEP", "AGE", "SIZE"), tiers, (*metrics, REMARKS), rows)


def remarks_on(checkpoint: KnownCheckpoint | CheckpointStatus) -> Iterable[str]:
    yield from (f"#{tag}" for tag in sorted(checkpoint.tags))
    if checkpoint.pinned:
        yield "pinned"
    if checkpoint.abandoned:
        yield "abandoned"
    if isinstance(checkpoint, KnownCheckpoint) and checkpoint.deleted:
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
    found = (trainer or facts).statistics
    if trainer is not None or facts.known:
        yield from format_bounds(found.loss_bound, () if trainer else tuple(facts.unread))
    for tier in settings.stored:
        if tier.name in facts.not_created:
            yield describe_new(tier.name, tier.place)
    yield from format_peer_survival(found.peer_survival, live=trainer is not None)
    if facts.owner is not None:
        yield f"a trainer owns it: {facts.owner}"


def _in_full(
    facts: RunFacts,
    checkpoint: KnownCheckpoint,
    manifests: Sequence[dict[str, Any]],
    files: dict[str, dict[str, int]],
) -> Iterable[Table | str]:
    yield _head(facts, checkpoint)
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


def _head(facts: RunFacts, checkpoint: KnownCheckpoint) -> Table:
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    commit = checkpoint.commit
    made.add_row("step", str(checkpoint.id.step))
    made.add_row("attempt", str(checkpoint.id.attempt))
    if commit is not None:
        start = commit.lineage.started_from
        begun = "started from nothing" if start is None else f"continued from {start}"
        made.add_row(
            "lineage", f"checkpoint {commit.lineage.ordinal} of this training, which {begun}"
        )
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit.wall_time_s))
        age = format_duration(round(facts.age_s(checkpoint) or 0.0))
        made.add_row("saved", f"{at}, {age} ago")
        made.add_row(
            "by", f"{', '.join(commit.nodes)} ({counted(commit.world_size, 'rank', 'ranks')})"
        )
    made.add_row("size", format_size(checkpoint.bytes))
    if checkpoint.metrics:
        made.add_row(
            "metrics", ", ".join(f"{k} {format_metric(v)}" for k, v in checkpoint.metrics.items())
        )
    if remarks := list(remarks_on(checkpoint)):
        made.add_row("remarks", ", ".join(remarks))
    if owed := facts.owed(checkpoint.id):
        made.add_row("still owed to", ", ".join(owed))
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
