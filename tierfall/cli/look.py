"""``ls``, ``show``, ``latest``, ``runs`` and ``watch``: commands that only read, beside a living trainer too.

``watch`` shows a run by the status of its trainer, or by a listing of the tiers.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

import tierfall
from tierfall.cli.common import (
    RunFacts,
    checkpoints_table,
    describe_new,
    document_of,
    format_metric,
    load_settings,
    load_settings_if_any,
    name_other_runs,
    of_this_user,
    owner_members,
    rough_duration,
)
from tierfall.cli.output import (
    CommandOutput,
    Part,
    as_state,
    cell,
    counted,
    print_parts,
    table,
    with_tier,
)
from tierfall.cli.usage import (
    Asked,
    Exit,
    StepName,
    StepOrSource,
    print_out,
    proposed,
    refuse,
    to_document,
)
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
from tierfall.core.types.units import (
    format_duration,
    format_rate,
    format_share,
    format_size,
)
from tierfall.core.types.values import Shard
from tierfall.ops.diff import Change, compare
from tierfall.ops.reader import (
    LIST_EVERY_S,
    HeldMemory,
    RankProcess,
    RunReader,
    RunSnapshot,
    Watcher,
    find_runs,
    held_by_runs,
)
from tierfall.policies.retention import used_metrics
from tierfall.setup.tiers import tier_rules
from tierfall.telemetry.figures import FIGURES, format_figure, of_run, of_tier
from tierfall.telemetry.reports import (
    CheckpointInfo,
    describe_peer_survival,
    format_bounds,
    format_run_ettr,
    format_unread,
)
from tierfall.telemetry.status import (
    HANGS_AFTER_S,
    MetricsServer,
    RunStatus,
    Status,
    TransferStatus,
    age_of,
)

# latest and runs -------------------------------------------------------------------------------------


def latest(answer: CommandOutput) -> None:
    """Print the newest step of which some tier has a good copy."""
    settings = load_settings(answer.asked)
    facts = RunFacts.read(settings)
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


def runs(answer: CommandOutput) -> None:
    """List all runs on the tiers, and what runs hold in the memory of this node; without a file, that alone."""
    # A folder of several runs needs a name; all are listed.
    settings = load_settings_if_any(Asked(answer.asked.config, "any", answer.as_json))
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


def _show_runs(answer: CommandOutput, settings: Config) -> list[dict[str, Any]]:
    names, unread = find_runs(settings)
    answer.note_unread(unread)
    found = [_describe_run(answer, settings, name) for name in names]
    right = ("STEPS", "LATEST", "AGE", "SIZE")
    rows = [
        (
            one["run"],
            str(one["checkpoints"]),
            "-" if one["step"] is None else f"{one['step']}@{one['attempt']}",
            cell(one["wall_time_s"], lambda at: rough_duration(max(0.0, time.time() - at))),
            format_size(one["bytes"]),
            ", ".join(one["tiers"]) or "-",
            f"process {one['owner']['pid']}" if one["owner"] else "-",
        )
        for one in found
    ]
    if rows:
        answer.show(table(("RUN", *right, "TIERS", "OWNER"), rows, right))
    answer.show((counted(len(found), "run", "runs") if found else "no run") + format_unread(unread))
    return found


def _memory_of_node(held: Sequence[HeldMemory], *, below: bool) -> Iterable[Part]:
    if below:
        yield ""
    right = ("STEPS", "SIZE", "FOR OTHERS")
    rows = [
        (
            one.run,
            "?" if one.problems and not one.checkpoints else str(len(one.checkpoints)),
            format_size(one.bytes),
            format_size(one.kept_bytes) if one.kept_bytes else "-",
            "no trainer" if one.owner is None else one.owner.process,
            one.file or "-",
        )
        for one in held
    ]
    yield table(("IN MEMORY HERE", *right, "OWNER", "FILE"), rows, right)
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
    facts = RunFacts.read(settings.model_copy(update={"run": run}))
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


def ls(answer: CommandOutput, last: int | None, metrics: bool) -> None:
    """List the steps of a run, or the newest ``last`` of them: age, size, and the state on each tier."""
    settings = load_settings(answer.asked)
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
        answer.problems += facts.problems
        known, told = facts.checkpoints, facts.trainer or facts
        shown = [*known][-(last or len(known)) :]
        answer.document = {
            "run": settings.run,
            "owner": owner_members(facts.owner),
            "tiers": [_tier_members(reader, facts, listing) for listing in facts.listings],
            "checkpoints": [members(known[id]) for id in shown if id in facts.by_id],
            **members(told.statistics, "loss_bound", "peer_survival", "run_ettr"),
        }
        if shown:
            all_names = sorted({m for one in known.values() for m in one.metrics})
            made = checkpoints_table(
                [known[id] for id in shown],
                [listing.tier for listing in facts.listings],
                all_names if metrics else used_metrics(facts.view.tiers),
                now_s=facts.wall_time_s,
                unread=facts.unread,
            )
            answer.show(made)
        if older := len(known) - len(shown):
            steps = counted(older, "older step is", "older steps are")
            answer.show(f"{steps} not shown (--last {last})")
        answer.show(*_summary(facts, settings))


def show(answer: CommandOutput, steps: list[StepName]) -> None:
    """Show steps in full: lineage, files, copies and why each is kept or deleted."""
    settings = load_settings(answer.asked)
    documents: list[dict[str, Any]] = []
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
        answer.problems += facts.problems
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


def _show_step(
    answer: CommandOutput, reader: RunReader, facts: RunFacts, checkpoint: KnownCheckpoint
) -> dict[str, Any]:
    """Show one step, and return its document."""
    files = {
        tier: _files(reader, tier, checkpoint, answer)
        for tier in checkpoint.copies
        if tier in reader.stores
    }
    manifests = _manifests(answer, reader, checkpoint)
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


def _summary(facts: RunFacts, settings: Config) -> Iterable[str]:
    count, trainer = len(facts.known), facts.trainer
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
    yield from format_run_ettr(found.run_ettr)
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
) -> Iterable[Part]:
    told = _head(facts, checkpoint, info)
    yield from (f"{name:<15}{value}" for name, value in told.items() if value)
    yield ""
    decisions = [facts.decision(tier, checkpoint.id) for tier in checkpoint.copies]
    copies = [
        (tier, as_state(info.on(tier)), format_size(copy.bytes), f"{d.verdict}: {d.reason}")
        for (tier, copy), d in zip(checkpoint.copies.items(), decisions, strict=True)
    ]
    yield table(("COPY", "STATE", "SIZE", "RETENTION"), copies, ("SIZE",))
    for manifest in manifests:
        yield ""
        yield from _manifest_lines(manifest)
    if named := sorted({name for found in files.values() for name in found}):
        sizes = [[cell(of.get(name), format_size) for of in files.values()] for name in named]
        yield ""
        rows = [(name, *of_file) for name, of_file in zip(named, sizes, strict=True)]
        yield table(("FILE", *files), rows, files)


def _head(facts: RunFacts, checkpoint: KnownCheckpoint, info: CheckpointInfo) -> dict[str, str]:
    """Return what is told of a step, by name; empty, if there is nothing to tell."""
    told, commit = {"step": str(info.step), "attempt": str(info.attempt)}, checkpoint.commit
    if commit is not None:
        start = commit.lineage.started_from
        begun = "started from nothing" if start is None else f"continued from {start}"
        at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(commit.wall_time_s))
        age = format_duration(round(max(0.0, facts.wall_time_s - commit.wall_time_s)))
        ranks = counted(commit.world_size, "rank", "ranks")
        told |= {
            "lineage": f"checkpoint {commit.lineage.ordinal} of this training, which {begun}",
            "saved": f"{at}, {age} ago",
            "by": f"{', '.join(commit.nodes)} ({ranks})",
        }
    return told | {
        "size": format_size(info.bytes),
        "metrics": ", ".join(f"{k} {format_metric(v)}" for k, v in info.metrics.items()),
        "remarks": ", ".join(info.remarks),
        "still owed to": ", ".join(info.owed),
    }


def _manifest_lines(manifest: dict[str, Any]) -> Iterable[Part]:
    chunks = counted(manifest["chunks"], "chunk", "chunks")
    tensors = counted(len(manifest["tensors"]), "tensor", "tensors")
    yield (
        f"{manifest['shard']}: an image of {format_size(manifest['image_bytes'])} in {chunks} of at most "
        f"{format_size(manifest['chunk_bytes'])}, with {tensors}, the largest:"
    )
    largest = sorted(manifest["tensors"], key=lambda t: (-t["bytes"], t["name"]))
    rows = [
        (t["name"], t["dtype"], "x".join(map(str, t["shape"])) or "scalar", format_size(t["bytes"]))
        for t in largest[:LARGEST_SHOWN]
    ]
    yield table(("TENSOR", "DTYPE", "SHAPE", "SIZE"), rows, ("SIZE",))


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


def _manifests(
    answer: CommandOutput, reader: RunReader, checkpoint: KnownCheckpoint
) -> list[dict[str, Any]]:
    """Read each shard's manifest from the fastest copy where it is good, for a document; report the errors."""
    found: list[dict[str, Any]] = []
    size = checkpoint.commit.world_size if checkpoint.commit else 0
    opener = reader.opener()
    for shard in [Shard(rank, size) for rank in range(size)]:
        for tier, copy in checkpoint.copies.items():
            # The record of one node, or of one rank's memory, names only its own shards.
            if copy.commit is None or (
                size > 1 and not copy.commit.file(keys.manifest_name(shard))
            ):
                continue
            try:
                manifest = checked_manifest(opener(tier, checkpoint.id, shard), copy.commit, shard)
                found.append(_of_manifest(manifest))
            except (IntegrityError, NotSupportedError, BackendError) as error:
                answer.problem(with_tier(tier, error))
                continue
            break
    return found


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


# watch ----------------------------------------------------------------------------------------------

ROWS_MAX = 12
EVENTS_SHOWN = 6
_SHOWN_MEMBERS = ("tier", "bytes", "seconds", "outcome", "reason", "doing", "count")

ROWS_ON_SCREEN = 200
HOME, CLEAR = "\x1b[H", "\x1b[H\x1b[2J"
TO_THE_END_OF_LINE, TO_THE_END = "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One frame. ``problems`` name what could not be read, ``unread`` the tiers that could not. ``metrics`` are those
    that people see; None: all."""

    snapshot: RunSnapshot
    status: RunStatus
    unread: tuple[str, ...] = ()
    problems: tuple[str, ...]
    metrics: Sequence[str] | None = None

    @property
    def document(self) -> dict[str, Any]:
        status, found = self.status, self.status.statistics
        return {
            "run": status.run,
            "wall_time_s": self.snapshot.wall_time_s,
            "owner": owner_members(self.snapshot.owner),
            "slots": [_slot_members(slot) for slot in self.snapshot.slots],
            "tiers": [
                {"name": tier, "kind": kind, **to_json(of_tier(found, tier))}
                for tier, kind in status.tiers.items()
            ],
            "checkpoints": [members(one) for one in status.checkpoints],
            **status.model_dump(mode="json", include={"checkpoints_known", "transfers"}),
            **(to_json(of_run(found)) if self.snapshot.live is not None else {}),
            **members(found, "newest", "loss_bound", "peer_survival"),
            "progress": list(self.snapshot.progress),
            "events": list(self.snapshot.events),
        }

    def shown(self, rows_max: int = ROWS_MAX) -> Iterator[Part]:
        """Give the lines and tables of a frame, the newest step first."""
        yield from _heading(self)
        yield ""
        seen = self.status
        yield _tier_table(seen)
        for tier, reason in seen.statistics.failing.items():
            if reason:
                yield Text(with_tier(tier, reason), style="red")
        if seen.transfers:
            yield ""
            yield _transfer_table(seen.transfers)
        yield from self.snapshot.progress
        rows = min(rows_max, len(seen.checkpoints))
        if rows:
            yield ""
            yield _grid(self, rows)
        if more := seen.checkpoints_known - rows:
            yield f"and {counted(more, 'older one', 'older ones')}"
        yield ""
        yield from format_bounds(seen.statistics.loss_bound, self.unread)
        yield from format_run_ettr(seen.statistics.run_ettr)
        if (found := seen.statistics.peer_survival) is not None:
            yield describe_peer_survival(found, live=self.snapshot.live is not None)
        if len(self.snapshot.slots) > 1 and any(s.owner or s.status for s in self.snapshot.slots):
            yield ""
            yield _slot_table(self.snapshot)
        if self.snapshot.events:
            yield ""
            yield from (_format_event(event) for event in self.snapshot.events[-EVENTS_SHOWN:])


def _with_memory_of_all(status: Status, snapshot: RunSnapshot) -> Status:
    """Count in the first tier, host memory, what all living ranks of this node have there."""
    ranks = [slot.status for slot in snapshot.slots if slot.status is not None and slot.alive]
    found, host = status.statistics, next(iter(status.tiers))
    used = sum(rank.statistics.used_bytes.get(host, 0) for rank in ranks)
    capacity = sum(rank.statistics.capacity_bytes.get(host) or 0 for rank in ranks)
    of_all = replace(
        found,
        used_bytes={**found.used_bytes, host: used},
        capacity_bytes={**found.capacity_bytes, host: capacity or None},
    )
    return status.model_copy(update={"statistics": of_all})


# For programs ----------------------------------------------------------------------------------------


def _slot_members(slot: RankProcess) -> dict[str, Any]:
    status = slot.status
    return {
        "slot": slot.number,
        "alive": slot.alive,
        "owner": owner_members(slot.owner),
        **members(status, "rank", "world_size", "attempt", "pid", "node"),
        "age_s": age_of(status) if status else None,
        **members(status, "failure"),
        **members(status and status.statistics, "lost_events"),
        "transfers": [t.model_dump(mode="json") for t in status.transfers] if status else [],
    }


# For people ------------------------------------------------------------------------------------------


def _heading(frame: RunView) -> Iterator[Part]:
    snapshot = frame.snapshot
    if (live := snapshot.live) is not None:
        yield (
            f"run {live.run}: trained by process {live.pid} on {live.node}, rank {live.rank} of "
            f"{live.world_size}, attempt {live.attempt}"
        )
        if live.failure:
            yield Text(f"it has stopped flushing: {live.failure}", style="red")
        elif (age_s := age_of(live)) > HANGS_AFTER_S:
            yield Text(f"its status is {format_duration(age_s)} old: it may hang", style="yellow")
        return
    if snapshot.owner is not None:
        yield f"run {frame.status.run}: a process owns it, and has written no status yet: {snapshot.owner}"
    else:
        yield f"run {frame.status.run}: no trainer is alive on this machine; this is what the tiers hold"
    if (last := snapshot.last_status) is not None:
        yield f"process {last.pid} has ended; its last status, {_ago(last)}:"
        yield _transfer_table(last.transfers) if last.transfers else "nothing was being copied"


def _ago(status: Status) -> str:
    return f"{format_duration(round(age_of(status)))} ago"


def _tier_table(status: RunStatus) -> Text:
    """Return the table of tiers: a column for each figure that has a heading."""
    shown = [figure for figure in FIGURES.values() if figure.column]
    right = [figure.column for figure in shown]
    rows = []
    for tier, kind in status.tiers.items():
        found = of_tier(status.statistics, tier)
        cells = [cell(found.get(each.name), partial(format_figure, each)) for each in shown]
        rows.append((tier, str(kind), *cells))
    made = table(("TIER", "KIND", *right), rows, right)
    for tier in status.statistics.failing:
        made.highlight_regex(rf"(?m)^{re.escape(tier)} .*", "red")
    return made


def _grid(frame: RunView, rows: int) -> Text:
    shown = [*reversed(frame.status.checkpoints[-rows:])]
    metrics = frame.metrics
    if metrics is None:
        metrics = sorted({name for one in shown for name in one.metrics})
    return checkpoints_table(
        shown,
        [*frame.status.tiers],
        metrics,
        now_s=frame.snapshot.wall_time_s,
        unread=frame.unread,
    )


def _transfer_table(transfers: Iterable[TransferStatus]) -> Text:
    right = ("DONE", "SIZE", "RATE", "LEFT")
    rows = [
        (
            f"{one.step}@{one.attempt}",
            one.tier,
            one.phase,
            format_share(round(one.done_bytes / max(1, one.bytes), 2)),
            format_size(one.bytes),
            cell(one.bytes_per_s or None, format_rate),
            cell(one.left_s, format_duration),
        )
        for one in transfers
    ]
    return table(("COPY", "TO", "PHASE", *right), rows, right)


def _slot_table(snapshot: RunSnapshot) -> Text:
    right, rows = ("SLOT", "RANK", "PROCESS", "SEEN"), []
    for slot in snapshot.slots:
        status, owner = slot.status, slot.owner
        told = ("-", "-" if owner is None else str(owner.pid), "-", "-", "-")
        if status is not None:
            told = (
                str(status.rank),
                str(status.pid) if slot.alive else f"{status.pid} (gone)",
                _ago(status),
                format_size(status.statistics.used_bytes.get(next(iter(status.tiers)), 0)),
                ", ".join(f"{t.step}@{t.attempt} to {t.tier}" for t in status.transfers) or "-",
            )
        rows.append((str(slot.number), *told))
    return table((*right, "IN MEMORY", "COPIES"), rows, right)


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "wall_time_s": lambda at: time.strftime("%H:%M:%S", time.localtime(at)),
    "bytes": format_size,
    "seconds": lambda seconds: f"in {format_duration(seconds)}",
}


def _format_event(event: dict[str, Any]) -> str:
    """Format an event as one line: time, kind, step, tier and its other members."""

    def told(name: str) -> str:
        value = event.get(name, "")
        try:
            return _FORMATS.get(name, str)(value)
        except (TypeError, ValueError, OverflowError, OSError):  # an event log is not to be trusted
            return str(value)

    parts = [told("wall_time_s") or "-", str(event["kind"]).replace("_", " ")]
    if "step" in event:
        parts.append(f"{event['step']}@{event.get('attempt')}")
    return " ".join([*parts, *filter(None, map(told, _SHOWN_MEMBERS))])


def watch(
    every: float,
    once: bool,
    prometheus: tuple[str, int] | None,
    metrics: bool,
    **shared: Any,
) -> None:
    """Show a run live, or one frame of it, or serve its metrics."""
    settings = load_settings(asked := Asked(**shared))
    if once and prometheus is not None:
        refuse(
            "--once and --prometheus: one ends at once, the other goes on; expected one", Exit.USAGE
        )
    watcher = Watcher(settings, run=settings.run)
    if prometheus is not None:
        _serve(asked, watcher, *prometheus, settings.run)
        return
    frames = _frames(settings, watcher, None if metrics else used_metrics(tier_rules(settings)))
    if once:
        frame = next(frames)
        answer = CommandOutput(asked, frame.document, [*frame.problems])
        answer.show(*frame.shown())
        answer.finish()
        return
    try:
        paint = _painter(as_json=asked.as_json)
        for frame in frames:
            paint(frame)
            time.sleep(every)
    except KeyboardInterrupt:
        return  # Ctrl-C is how a person ends it


def _serve(asked: Asked, watcher: Watcher, address: str, port: int, run: str) -> None:
    """Serve metrics until Ctrl-C, or until a signal ends the process."""
    server = MetricsServer(address, port, watcher.living_statuses, run=run, where="--prometheus")
    answer = CommandOutput(asked, {"run": run, "address": address, "port": port})
    answer.show(f"run {run}: /metrics and /healthz are served on port {port}; Ctrl-C ends it")
    answer.finish()
    try:
        while True:
            time.sleep(LIST_EVERY_S)
    except KeyboardInterrupt:
        return
    finally:
        server.close()


def _frames(settings: Config, watcher: Watcher, metrics: Sequence[str] | None) -> Iterator[RunView]:
    """Give frame by frame: by the status of a living trainer, else by a listing of the tiers every ``LIST_EVERY_S``."""
    facts: RunFacts | None = None
    while True:
        snapshot = watcher.take_snapshot()
        status: RunStatus
        unread: tuple[str, ...] = ()
        problems = snapshot.problems
        if (live := snapshot.live) is not None:
            facts, status = None, _with_memory_of_all(live, snapshot)
        else:
            if facts is None or snapshot.wall_time_s >= facts.wall_time_s + LIST_EVERY_S:
                facts = RunFacts.read(settings)
            status = RunStatus(
                run=settings.run,
                tiers={tier.name: tier.kind for tier in facts.safety.tiers},
                checkpoints=tuple(facts.checkpoints.values()),
                checkpoints_known=len(facts.checkpoints),
                statistics=facts.statistics,
            )
            unread, problems = (*facts.unread,), (*problems, *facts.problems)
        yield RunView(
            snapshot=snapshot, status=status, unread=unread, problems=problems, metrics=metrics
        )


def _painter(*, as_json: bool) -> Callable[[RunView], None]:
    """Return what prints a frame: as a line of JSON, over the last one on a terminal, or below it in a file or pipe."""
    console = Console(markup=False, highlight=False, emoji=False)
    if as_json:
        return lambda frame: print_out(to_document(frame.document, frame.problems) + "\n")
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        return lambda frame: print_parts(
            [*frame.shown(), *(f"tierfall: {proposed(problem)}" for problem in frame.problems), ""]
        )
    print_out(CLEAR)
    return partial(_paint, console)


def _paint(console: Console, frame: RunView) -> None:
    """Print a frame from the top of the screen, with as many steps as the screen has lines for."""
    lines = _drawn(console, frame, ROWS_ON_SCREEN)
    if (over := len(lines) - (console.height - 1)) > 0:
        rows = min(ROWS_ON_SCREEN, len(frame.status.checkpoints))
        lines = _drawn(console, frame, max(1, rows - over))
    shown = (f"{line}{TO_THE_END_OF_LINE}\n" for line in lines[: console.height - 1])
    print_out("".join([HOME, *shown, TO_THE_END]))


def _drawn(console: Console, frame: RunView, rows: int) -> list[str]:
    with console.capture() as drawn:
        for problem in frame.problems:
            console.print(f"tierfall: {proposed(problem)}", style="red")
        for part in frame.shown(rows):
            console.print(part)
    return drawn.get().splitlines()


# diff ------------------------------------------------------------------------------------------------


def diff(answer: CommandOutput, a: StepOrSource, b: StepOrSource, values: bool) -> None:
    """Show what differs between two steps; that something does is a problem, as for diff(1)."""
    try:
        with ExitStack() as opened:
            sides = [opened.enter_context(_open_side(answer, side)).opened for side in (a, b)]
            found = compare(*sides, values=values)
    except TierfallError as error:
        refuse(re.sub(r"\Aopen_tensors\b", "diff", str(error)), Exit.USAGE)
    answer.document = {
        **{name: members(one, "id") for name, one in zip("ab", sides, strict=True)},
        "differences": [members(one) for one in found],
    }
    ids = " and ".join(str(one.id) for one in sides)
    if not found:
        answer.show(f"{ids} are equal")
        return
    names = ("NAME", "CHANGE", "A", "B", "ELEMENTS", "LARGEST")
    rows = [
        (
            d.name,
            str(d.change),
            d.a or "",
            d.b or "",
            str(d.elements or ""),
            format_metric(d.largest),
        )
        for d in found
    ]
    answer.show(table(names, rows, ("ELEMENTS", "LARGEST")))
    left = sum(one.change is Change.MAY_DIFFER for one in found)
    said = []
    if left < len(found):
        said.append(counted(len(found) - left, "entry differs", "entries differ"))
    if left:
        said.append(f"{counted(left, 'entry', 'entries')} may differ (--values reads them)")
    answer.problem(f"{ids}: {', '.join(said)}")


def _open_side(answer: CommandOutput, side: StepOrSource) -> tierfall.Tensors:
    if isinstance(side, str):
        return tierfall.open_tensors(side)
    return tierfall.open_tensors(load_settings(answer.asked), step=side.step, attempt=side.attempt)
