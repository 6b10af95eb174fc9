"""The commands that change what the tiers hold, and those that read or write whole copies.

``pin``, ``unpin``, ``tag``, ``untag``, ``rm``, ``prune``, ``forget``. ``drain``: flush what a dead trainer left in
memory. ``verify``: verify every copy, report what is damaged, where, and how to repair it; and repair it. ``copy``:
copy a step to a tier that does not hold it. ``prefetch``: bring what a restore will read to a disk of this node.
``export``: write a step, or a part of it, as files that can be read without tierfall. ``import``: save what another
program wrote as a step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from tierfall.cli.common import (
    RunFacts,
    check_ownerless,
    check_tier,
    document_of,
    load_settings,
    load_settings_if_any,
    load_settings_of_all,
    name_other_runs,
    of_this_user,
    owner_members,
    showing,
)
from tierfall.cli.look import held_members
from tierfall.cli.output import (
    CommandOutput,
    Part,
    as_state,
    counted,
    table,
    with_tier,
)
from tierfall.cli.usage import (
    CommandRefused,
    Exit,
    StepName,
    at_terminal,
    code_of,
    proposed,
    refuse,
)
from tierfall.config import Config
from tierfall.config.model import OnClose
from tierfall.core.copies.verify import CheckedCopy
from tierfall.core.flush.tasks import CommandKind
from tierfall.core.format.catalog import KnownCheckpoint, starts_in
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError, IntegrityError, TierfallError
from tierfall.core.types.keys import check_tag
from tierfall.core.types.text import format_some, members
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import CheckpointId, ExportDtype, ExportFormat
from tierfall.core.types.view import Decision, Verdict
from tierfall.export.export import export as export_checkpoint
from tierfall.export.output import DTYPES, ExportOptions, format_of
from tierfall.ops import commands, sync
from tierfall.ops.drain import DrainResult, find_owed
from tierfall.ops.drain import drain as drain_run
from tierfall.ops.prefetch import NodePart, PrefetchResult
from tierfall.ops.prefetch import prefetch as bring
from tierfall.ops.reader import HeldMemory, RunReader, find_owner_of, held_by_runs
from tierfall.ops.sync import Repairer, RepairResult, owned_reader
from tierfall.ops.verify import (
    Finding,
    RunReport,
    VerifyScope,
    check_run,
    planned_bytes,
    record_damage,
)
from tierfall.setup.places import run_folder
from tierfall.telemetry.progress import Progress

UNREAD = "Kept copies were not read; they count as good by their commit records. 'tierfall verify' reads them."
_DONE = {
    CommandKind.PIN: "pinned",
    CommandKind.UNPIN: "unpinned",
    CommandKind.TAG: "tagged",
    CommandKind.UNTAG: "untagged",
    CommandKind.DELETE: "deleted",
}


def rm(
    answer: CommandOutput, steps: list[StepName] | None, all: bool, yes: bool, even_the_last: bool
) -> None:
    """Delete steps, or a whole run."""
    if all:
        _rm_run(answer, steps or [])
    elif steps:
        _change(answer, steps, kind=CommandKind.DELETE, yes=yes, even_the_last=even_the_last)
    else:
        refuse("rm: missing argument 'STEP...'; see tierfall rm --help", Exit.USAGE)


def _change(
    answer: CommandOutput,
    steps: list[StepName],
    *,
    kind: CommandKind,
    tag: str = "",
    yes: bool = True,
    even_the_last: bool = True,
) -> None:
    """Find all steps first; then execute a command on them, or leave it in the tiers' lists for the living trainer.
    Nothing is deleted if one of them is pinned."""
    verb = "rm" if kind is CommandKind.DELETE else str(kind)
    if kind in (CommandKind.TAG, CommandKind.UNTAG):
        check_tag(tag, what=verb)
    settings = load_settings(answer.asked, doing=verb)
    facts = RunFacts.read(settings)
    found = {c.id: c for name in steps for c in [facts.find(answer, name, doing=verb)]}
    lost, owner = commands.without_good_copy(facts.known), facts.owner
    if kind is CommandKind.UNTAG and (bare := [c for c in found.values() if tag not in c.tags]):
        has = ", ".join(sorted(bare[0].tags)) or "none"
        answer.refuse(f"untag: {bare[0].id} has no tag {tag!r}; its tags: {has}")
    if kind is CommandKind.DELETE:
        _check_deletion(found, facts, answer, yes=yes, even_the_last=even_the_last)
    if owner is not None:
        results = [commands.decide_on_tiers(settings, kind, c, tag) for c in found.values()]
    else:
        facts.warn_if_elsewhere()
        results = list(
            commands.run_commands(settings, kind, list(found), even_the_last=even_the_last, tag=tag)
        )
    documents = []
    for result in results:
        failed = {**result.failed, **(facts.unread if owner else {})}
        documents.append(
            {
                "run": settings.run,
                "command": verb,
                **members(result, "id"),
                "done": list(result.done),
                "failed": {tier: str(error) for tier, error in failed.items()},
                "left_to": owner_members(owner),
            }
        )
        answer.show(*_describe_result(kind, result, owner))
        for tier, error in failed.items():
            answer.problem(f"{verb} {result.id}: {with_tier(tier, error)}")
        if kind is CommandKind.PIN and result.id in lost:
            answer.problem(f"pin {result.id}: {lost[result.id]}")
    answer.document = document_of(settings.run, documents)


pin, unpin, tag, untag = (
    partial(_change, kind=kind)
    for kind in (CommandKind.PIN, CommandKind.UNPIN, CommandKind.TAG, CommandKind.UNTAG)
)


def _describe_result(
    kind: CommandKind, result: commands.CommandResult, owner: LockOwner | None
) -> Sequence[str]:
    if not result.done:
        return ()
    where = ", ".join(result.done)
    if owner is None:
        return (f"{_DONE[kind]} {result.id} on {where}",)
    when = "at its next commit there, and within a minute"
    trainer = f"the trainer ({owner.process})"
    if kind is CommandKind.DELETE:
        return (f"marked {result.id} for deletion on {where}: {trainer} deletes it {when}",)
    return (f"{_DONE[kind]} {result.id} on {where}: {trainer} reads that {when}",)


def _check_deletion(
    chosen: Mapping[CheckpointId, KnownCheckpoint],
    facts: RunFacts,
    answer: CommandOutput,
    *,
    yes: bool,
    even_the_last: bool,
) -> None:
    """Refuse to delete a pinned checkpoint and, unless ``even_the_last``, the last that can be restored; ask before the
    newest one is deleted."""
    for id, checkpoint in chosen.items():
        if checkpoint.pinned:
            refuse(f"rm: {id} is pinned; unpin it first: tierfall unpin {id}")
    restorable = commands.restorable(facts.known)
    left = [id for id in restorable if id not in chosen]
    reasons = []
    if not left:
        reasons.append("after this, no step is left that can be restored")
    elif restorable[0] in chosen:
        reasons.append(
            f"{restorable[0]} is the newest step that can be restored; the next is {left[0]}"
        )
    reasons += [
        f"{id} could not be read, and may be good: {checkpoint.unread}"
        for id, checkpoint in chosen.items()
        if checkpoint.unread is not None
    ]
    what = "; ".join(reasons)
    if not left and not even_the_last:
        answer.refuse(f"rm: {what}. To delete it, repeat with --even-the-last")
    if yes or not reasons:
        return
    if answer.as_json or not at_terminal():
        answer.refuse(f"rm: {what}. To delete it, repeat with --yes")
    if not typer.confirm(f"{what}. Delete it?"):
        answer.refuse("rm: nothing was deleted")


def is_typed(run: str) -> bool:
    """Return whether the next line of standard input, a terminal or not, is the name of a run."""
    return sys.stdin.readline().rstrip("\r\n") == run


# A whole run -----------------------------------------------------------------------------------------


def _rm_run(answer: CommandOutput, steps: list[StepName]) -> None:
    """Delete a whole run, after its name was read from standard input."""
    run = answer.asked.run
    if steps or run is None:
        refuse("rm: --all deletes a whole run: name it by --run, and no STEP", Exit.USAGE)
    settings = load_settings_of_all(answer.asked, doing="rm")
    check_ownerless(settings, "rm", ": end it first; nothing was deleted")
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
        listings = facts.listings
        answer.note_unread(facts.unread)
        if answer.problems:
            forget = " and ".join(f"'tierfall forget {tier}'" for tier in facts.unread)
            answer.refuse(
                f"rm: nothing was deleted, since {', '.join(facts.unread)} may hold files of the run: repeat it once "
                "each tier answers, or without the tier in the file. If the files there were deleted without tierfall, "
                f"repeat it after {forget}"
            )
        kept = commands.foreign_files(reader.config, reader.stores)
        is_there = any(x.copies or x.attempts or x.damaged for x in listings)
        if not is_there and not any(store.marker.read() for store in reader.stores.values()):
            refuse(f"rm: no tier has a file of run {run!r}{name_other_runs(settings)}")
        commands.check_folders(settings)
        places = {name: store.place for name, store in reader.stores.items()}
        places[reader.config.host.name] = str(reader.memory_folder)
    facts.warn_if_elsewhere()
    say = partial(typer.echo, err=answer.as_json)
    say(f"all of run {run} is to be deleted:")
    for listing in listings:
        copies = counted(len(listing.copies), "checkpoint", "checkpoints")
        size = format_size(listing.used_bytes)
        say(f"  {listing.tier}: {copies}, {size} in {places[listing.tier]}")
    for tier, names in kept.items():
        for name in names:
            say(f"  {tier}: {run}/{name} stays: tierfall did not write it")
    say(f"To delete it, type the name of the run: {run}")
    if not is_typed(run):
        answer.refuse(f"rm: the line was not {run!r}: nothing was deleted")
    result = commands.delete_run(settings, listings)
    answer.document = {
        "run": run,
        "deleted": list(result.deleted),
        "kept": {tier: list(names) for tier, names in result.kept.items() if names},
        "failed": {tier: str(error) for tier, error in result.failed.items()},
    }
    answer.show(f"deleted run {run} on {', '.join(result.deleted)}")
    for tier, error in result.failed.items():
        answer.problem(f"rm: {with_tier(tier, error)}")


# prune -----------------------------------------------------------------------------------------------


def prune(answer: CommandOutput, dry_run: bool) -> None:
    """Apply the retention rules now, or print what they decide."""
    settings = load_settings(answer.asked, doing="" if dry_run else "prune")
    if not dry_run:
        why = " and applies the rules itself after each commit; nothing was changed. --dry-run shows what it will do"
        check_ownerless(settings, "prune", why)
    facts = RunFacts.read(settings)
    listings = facts.listings
    if dry_run or not any(x.copies for x in listings):  # opening for writing creates folders
        planned = commands.plan_prune(settings, listings)
        pruned = commands.PruneResult(decisions=planned, unread=commands.unread(listings))
    else:
        facts.warn_if_elsewhere()
        with showing("prune", settings) as watch:
            pruned = commands.prune(settings, watch)
    answer.document = {
        "run": settings.run,
        "dry_run": dry_run,
        "decisions": [
            {**members(d), "dropped": not dry_run and _is_dropped(d, pruned)}
            for d in pruned.decisions
        ],
        "notes": (notes := commands.notes_on_metrics(settings, listings)),
    }
    answer.show(*_decided(pruned, dry_run))
    if not settings.written:
        answer.show(
            "every tier is only read, so that no rule applies: name the YAML file with the rules by --config"
        )
    if any(decision.verdict is Verdict.DROP for decision in pruned.decisions):
        answer.show(UNREAD)
    if dry_run:  # else they were logged
        answer.show(*notes)
    for tier, error in pruned.unread.items():
        answer.problem(f"tier {tier} could not be read, nothing is decided there: {error}")
    for drop in pruned.left:
        answer.problem(f"prune: {drop.checkpoint} is still on {drop.tier}")


def _is_dropped(decision: Decision, pruned: commands.PruneResult) -> bool:
    return decision.verdict is Verdict.DROP and decision not in pruned.left


def _decided(pruned: commands.PruneResult, dry_run: bool) -> Sequence[Part]:
    drops = [d for d in pruned.decisions if _is_dropped(d, pruned)]
    rows = [
        (d.tier, str(d.checkpoint), format_size(d.bytes), str(d.verdict), d.reason)
        for d in pruned.decisions
    ]
    made = table(("TIER", "STEP", "SIZE", "DECISION", "REASON"), rows, ("STEP", "SIZE"))
    verb = "would be dropped" if dry_run else "dropped"
    of = f"of {counted(len(pruned.decisions), 'copy', 'copies')} {verb}"
    summary = (
        f"{len(drops)} {of}, {format_size(sum(d.bytes for d in drops))}" if drops else f"none {of}"
    )
    return (made, summary) if pruned.decisions else (summary,)


# forget ----------------------------------------------------------------------------------------------


def forget(answer: CommandOutput, tier: str) -> None:
    """Make the other tiers, and this machine, forget a tier whose files were removed on purpose."""
    settings = load_settings_of_all(answer.asked, doing="forget")
    if tier not in [stored.name for stored in settings.stored]:
        names = ", ".join(stored.name for stored in settings.stored)
        refuse(f"forget: no stored tier is named {tier!r}; there are {names}", Exit.USAGE)
    why = ", and writes what it remembers again; nothing was changed. Forget it once the trainer has ended"
    check_ownerless(settings, "forget", why)
    with RunReader(settings) as reader:
        new = reader.list_with_new()[1]
    forgotten_by, failed = ((), {}) if tier in new else commands.forget(settings, tier)
    answer.document = {
        "run": settings.run,
        "tier": tier,
        "forgotten_by": list(forgotten_by),
        "failed": {name: str(error) for name, error in failed.items()},
    }
    if forgotten_by:
        answer.show(
            f"{tier} is forgotten by {', '.join(forgotten_by)}: what is in its place now counts as that tier"
        )
    elif tier in new:
        answer.show(f"{tier} is not created yet, and nothing remembers it: nothing was changed")
    elif not failed:
        answer.show(f"nothing remembers {tier}: an empty folder there counts as a new tier already")
    for name, error in failed.items():
        answer.problem(f"forget {tier}: {with_tier(name, error)}")


# drain -----------------------------------------------------------------------------------------------


def drain(answer: CommandOutput, deadline: float | None, all: bool, discard: bool) -> None:
    """Flush what a dead trainer left in host memory, then free the memory; of every run, or only free it."""
    if all and answer.asked.run is not None:
        refuse("drain: --all drains every run: name none by --run", Exit.USAGE)
    if discard and deadline is not None:
        refuse("drain: --discard flushes nothing: leave --deadline out", Exit.USAGE)
    if discard:
        _discard_runs(answer, all)
    elif all:
        _drain_runs(answer, deadline)
    else:
        _drain_run(answer, deadline)


def _drain_run(answer: CommandOutput, deadline_s: float | None) -> None:
    settings = load_settings(answer.asked, doing="drain")
    check_ownerless(settings, "drain", " and flushes its memory itself; nothing was done")
    with RunReader(settings) as reader:
        memory = reader.memory()
        if memory.error is not None:
            refuse(f"drain: host memory cannot be read: {memory.error}")
        for problem in memory.damaged:
            answer.problem(f"host memory holds a damaged image: {problem}")
        facts = None if memory.copies else RunFacts(reader)
    if facts is None:
        answer.document = _drain(answer, settings, deadline_s)
    else:
        _report_empty(facts, answer)


def _drain(answer: CommandOutput, settings: Config, deadline_s: float | None) -> dict[str, Any]:
    """Drain a run, say what was done, and return its document."""
    forecast: list[str] = []

    def report_forecast(line: str) -> None:
        forecast.append(line)
        if not answer.as_json:  # on stderr, while the drain runs
            typer.echo(f"in at most {format_duration(deadline_s or 0.0)} {line}", err=True)

    with showing("drain", settings) as watch:
        drained = drain_run(settings, deadline_s, watch, report_forecast)
    _report_drain(answer, settings, drained)
    return _document_of(settings.run, drained, forecast)


def _document_of(run: str, drained: DrainResult, forecast: Sequence[str] = ()) -> dict[str, Any]:
    found = members(drained, "done", "left", "memory_kept", "seconds")
    return {"run": run, **found, "forecast": list(forecast)}


def _report_empty(facts: RunFacts, answer: CommandOutput) -> None:
    """Report the copies that are owed from another tier: only a trainer's attempt may make those."""
    answer.note_unread(facts.unread)
    owed = find_owed(facts.config, facts.listings)
    left = tuple(each for each in owed if each.tier not in facts.unread)
    answer.document = _document_of(facts.run, DrainResult(left=left))
    answer.show(
        f"run {facts.run}: nothing is in host memory{of_this_user(facts.config)}",
        *(f"still owed from another tier: {each}" for each in left),
    )
    if left:
        answer.show(
            "drain flushes only what is in memory: the next start of the trainer makes these"
        )


def _report_drain(answer: CommandOutput, settings: Config, drained: DrainResult) -> None:
    keeps = drained.memory_kept and settings.host.on_close is OnClose.KEEP
    for owed in drained.done:
        answer.show(f"flushed {owed}")
    if drained.done or drained.left:
        total = format_size(sum(owed.bytes for owed in drained.done))
        planned = counted(len(drained.done) + len(drained.left), "copy", "copies")
        count = f"{len(drained.done)} of {planned}"
        answer.show(
            f"run {settings.run}: {count} made durable, {total} in {format_duration(drained.seconds)}"
        )
    elif keeps or drained.problems:
        answer.show(f"run {settings.run}: no tier is owed what is in memory")
    elif drained.memory_kept:
        answer.show(
            f"run {settings.run}: by its flush rule no tier is owed what is in memory; flush: {{every: 1}} flushes the "
            "newest of it, and 'tierfall drain --discard' frees all of it"
        )
    else:
        answer.show(f"run {settings.run}: everything in host memory was durable already")
    kept = "host memory is kept (on_close: keep)" if keeps else "host memory is kept"
    answer.show(kept if drained.memory_kept else "host memory is freed")
    for owed in drained.left:
        answer.problem(f"drain: not done: {owed}")
    for problem in drained.problems:
        answer.problem(problem)


def _drain_runs(answer: CommandOutput, deadline_s: float | None) -> None:
    """Drain every run that has left images in this node's memory, by the file that its memory notes."""
    began = time.monotonic()
    drained: list[dict[str, Any]] = []
    for held in _left_by_runs(answer, load_settings_if_any(answer.asked, doing="drain")):
        if not (held.checkpoints or held.problems):
            answer.show(f"{held}: no image in host memory")
            continue
        left_s = None if deadline_s is None else max(0.0, deadline_s - (time.monotonic() - began))
        try:
            drained.append(_drain(answer, held.settings(), left_s))
        except ConfigError as error:
            answer.problem(
                f"{held}: {error}. To flush it by a file with its tiers: 'tierfall drain --run {held.run} --config "
                "FILE'; to free it: 'tierfall drain --all --discard'"
            )
        except TierfallError as error:
            answer.problem(f"{held}: {error}")
    answer.document = {"runs": drained}


def _discard_runs(answer: CommandOutput, every_run: bool) -> None:
    """Free what a dead run holds in this node's memory, or every one, once its name was typed."""
    if every_run:
        found = _left_by_runs(answer, load_settings_if_any(answer.asked, doing="drain"))
    else:
        settings = load_settings(answer.asked, doing="drain")
        found = _left_by_runs(answer, settings, only=run_folder(settings, settings.run))
    freed = [held for held in found if _discard(answer, held)]
    answer.document = {"freed": [held_members(held) for held in freed]}


def _left_by_runs(
    answer: CommandOutput, settings: Config | None, *, only: Path | None = None
) -> list[HeldMemory]:
    """Return what dead runs hold in memory; a living one is named."""
    found = [held for held in held_by_runs(settings) if only in (None, held.folder)]
    for held in found:
        if held.owner is not None:
            answer.problem(f"{held}: a trainer owns it ({held.owner}); nothing was done")
    if not found:
        answer.show("nothing of this user is in this node's memory")
    return [held for held in found if held.owner is None]


def _discard(answer: CommandOutput, held: HeldMemory) -> bool:
    """Free what a run holds, if its name is typed."""
    steps = format_some([str(id) for id in held.checkpoints]) or "no image that can be read"
    kept = f", {format_size(held.kept_bytes)} kept for other nodes" if held.kept_bytes else ""
    typer.echo(
        f"{held}: {steps}, {format_size(held.bytes)}{kept}. What no tier has of it is lost. "
        f"To free it, type the name of the run:",
        err=True,
    )
    if not is_typed(held.run):
        answer.problem(f"drain: {held}: nothing was freed: that line was not the name of the run")
        return False
    try:
        held.discard()
    except TierfallError as error:
        answer.problem(error)
        return False
    answer.show(f"{held}: {format_size(held.bytes + held.kept_bytes)} freed")
    return True


# verify ----------------------------------------------------------------------------------------------

_OF_COPY = ("id", "tier", "good", "gone", "chunks", "bytes", "error")


def verify(
    answer: CommandOutput, steps: list[StepName] | None, tier: str | None, repair: bool
) -> None:
    """Verify every file of every copy, or of those of some steps, and repair what is damaged."""
    settings = load_settings(answer.asked, doing="verify --repair" if repair else "")
    check_tier(settings, tier)
    if repair:
        why = (
            " and may delete or write copies meanwhile; nothing was checked. Repair once it has ended; until then "
            "restores read the good copies"
        )
        check_ownerless(settings, "verify --repair", why)
    owning = owned_reader(settings, "tierfall verify") if repair else RunReader(settings)
    with owning as reader:
        facts = RunFacts(reader)
        listings = facts.listings
        found = frozenset(facts.find(answer, name, tier, doing="verify").id for name in steps or ())
        scope = VerifyScope(checkpoints=found or None, tier=tier)
        total = planned_bytes(listings, scope)
        repairer = Repairer(reader, listings) if repair else None
        if repair:
            facts.warn_if_elsewhere()
        with showing("verify", settings) as watch:
            report = check_run(reader, listings, scope, Progress(watch, total).add, repairer)
        report = replace(report, notes=(*report.notes, *record_damage(settings, listings, report)))
    repairs = None if repairer is None else repairer.repairs
    _answer_verify(answer, settings, report, repairs)


def _answer_verify(
    answer: CommandOutput,
    settings: Config,
    report: RunReport,
    repairs: Sequence[RepairResult] | None,
) -> None:
    for repair in repairs or ():
        if repair.done:
            answer.show(f"repaired {_place(repair)}: {repair.why}")
        else:
            answer.problem(f"not repaired: {_place(repair)}: {repair.why}")
    for place, why in report.unread:
        answer.problem(f"{place} could not be read: {why}")
    for finding in report.findings:
        chunk = "" if finding.chunk is None else f", chunk {finding.chunk}"
        verdict = "not checked" if finding.newer else "damaged"
        answer.problem(f"{verdict}: {_place(finding)}{chunk}: {finding.problem} ({finding.advice})")
    if not report.copies and (others := name_other_runs(settings)):
        answer.problem(f"verify: no tier has a checkpoint of run {settings.run!r}{others}")
    good = [copy for copy in report.copies if copy.good]
    answer.document = {
        "run": settings.run,
        "copies": [members(copy, *_OF_COPY) for copy in report.copies],
        "damage": [members(f) | {"advice": proposed(f.advice)} for f in report.findings],
        "unread": [{"place": place, "reason": why} for place, why in report.unread],
        "notes": list(report.notes),
        "bytes": sum(copy.bytes for copy in report.copies),
    }
    if repairs is not None:
        answer.document["repairs"] = [members(r) | {"file": r.file or None} for r in repairs]
    rows = [
        (str(copy.id), copy.tier, str(copy.chunks), format_size(copy.bytes), _verdict(copy))
        for copy in sorted(report.copies, key=lambda c: c.id)
    ]
    if rows:
        right = ("STEP", "CHUNKS", "INTACT")
        answer.show(table(("STEP", "TIER", "CHUNKS", "INTACT", "RESULT"), rows, right))
    answer.show(*(f"note: {note}" for note in report.notes))
    total = format_size(sum(copy.bytes for copy in report.copies))
    newer = sum(finding.newer for finding in report.findings)
    damaged = len(report.findings) - newer
    damage = counted(damaged, "place is", "places are")
    what = f"{damage} damaged" if damaged else "nothing is damaged"
    if newer:
        what += f", {counted(newer, 'file', 'files')} of a newer tierfall could not be checked"
    copies = counted(len(report.copies), "copy is", "copies are")
    answer.show(f"run {settings.run}: {len(good)} of {copies} good, {total} intact; {what}")


def _place(found: RepairResult | Finding) -> str:
    place = " ".join(str(part) for part in (found.tier, found.id, found.file) if part)
    attempt = keys.parse_attempt(found.file.rpartition("/")[2])
    return place if attempt is None else f"{place} (the record of attempt {attempt})"


def _verdict(copy: CheckedCopy) -> str:
    if copy.gone:
        return "deleted meanwhile"
    if any(not damage.newer for damage in copy.damage):
        return as_state("DAMAGED")
    if copy.damage:
        return "could not be checked"
    return "good" if copy.error is None else "could not be read"


# copy ------------------------------------------------------------------------------------------------


def copy(answer: CommandOutput, steps: list[StepName], to: str) -> None:
    """Copy steps to a tier that does not hold them, one after the other."""
    settings = load_settings(answer.asked, doing="copy")
    check_tier(settings, to)
    if to == settings.host.name:
        refuse(
            f"copy: {to} is memory, which only the trainer writes; name another tier", Exit.USAGE
        )
    why = (
        " and flushes by the rules of the file; nothing was copied. Copy once it has ended, or start it with another "
        "flush: {every: ...} for that tier"
    )
    check_ownerless(settings, "copy", why)
    facts = RunFacts.read(settings)
    found = [find_certain(answer, facts, name, None, doing="copy").id for name in steps]
    facts.warn_if_elsewhere()
    documents = []
    for id in dict.fromkeys(found):
        try:
            with (
                naming_unread_tiers(answer, facts),
                showing(f"copy {id}", settings) as watch,
            ):
                copied = sync.copy(settings, id, to, watch)
        except CommandRefused as refusal:
            if len(set(found)) == 1:
                raise
            answer.problems = refusal.problems
            continue
        documents.append({"run": settings.run, **members(copied)})
        size = format_size(copied.bytes)
        if copied.already:
            answer.show(f"{to} holds {id} already, and it is good ({size} read)")
        else:
            sources = ", ".join(copied.sources)
            answer.show(f"copied {id} from {sources} to {to}, which did not hold it ({size})")
        if copied.decided:
            answer.show(f"decided by the lists of other tiers: {', '.join(copied.decided)}")
        answer.show(*(f"note: {note}" for note in copied.notes))
    answer.document = document_of(settings.run, documents)


# prefetch --------------------------------------------------------------------------------------------


def parse_node(text: str) -> NodePart:
    """Parse K/N."""
    number, _, nodes = text.partition("/")
    if not (number.isdecimal() and nodes.isdecimal() and int(number) < int(nodes)):
        raise ConfigError(f"{text!r}; expected K/N, such as 0/4: the nodes are counted from 0")
    return int(number), int(nodes)


def prefetch(
    answer: CommandOutput, step: StepName | None, to: str | None, node: NodePart | None
) -> None:
    """Bring what a restore will read to a disk of this node."""
    settings = load_settings(answer.asked, doing="prefetch")
    check_tier(settings, to)
    if to == settings.host.name:
        refuse(
            f"prefetch: {to} is memory, which only the trainer writes; name a disk of this node",
            Exit.USAGE,
        )
    asked = step or StepName()
    request = RestoreRequest(
        step=asked.step,
        attempt=asked.attempt,
        operation="prefetch",
        advice="or leave it to the restore",
    )
    run, owner = settings.run, find_owner_of(settings)
    if owner is None:
        with showing("prefetch", settings) as watch:
            done = bring(settings, request, to=to, part=node, watch=watch)
    else:
        done = PrefetchResult()
    answer.document = {
        "run": run,
        **(members(done, "id") if done.id else {"step": None, "attempt": None}),
        **members(done, "tier", "already", "ranks", "bytes", "sources", "decided", "notes"),
    }
    if owner is not None:
        answer.show(f"run {run}: a trainer owns it here ({owner}): nothing is to be brought")
    elif done.id is None:
        answer.show(f"run {run}: there is no checkpoint yet: nothing is to be brought")
    elif done.tier is None:
        where = f" is on {', '.join(done.holding)}" if done.holding else ""
        answer.show(f"{done.id}{where}: nothing is to be brought")
    else:
        sources = ", ".join(done.sources) or "what an earlier call had brought"
        of = "" if node is None else f" of {counted(len(done.ranks), 'rank', 'ranks')}"
        answer.show(
            f"prefetched {done.id}{of} from {sources} to {done.tier} ({format_size(done.bytes)})"
        )
    answer.show(*(f"note: {note}" for note in done.notes))


# Tiers that could not be read ----------------------------------------------------------------------


def find_certain(
    answer: CommandOutput,
    facts: RunFacts,
    name: StepName,
    tier: str | None,
    *,
    doing: str,
) -> KnownCheckpoint:
    """Find the checkpoint that STEP names, and report the tiers that could not be read.

    Ends the command where it is absent, and where STEP names no attempt and an unread tier may hold that step of a
    newer attempt: the one that was found may be abandoned.
    """
    found = facts.find(answer, name, tier, doing=doing)
    if tier is not None:
        return found
    silent = facts.unread
    answer.note_unread(silent)
    if silent and name.attempt is None and _may_be_newer(facts, found.id):
        choice = f"name it {found.id}" + (", or a tier by --tier" if doing == "export" else "")
        answer.refuse(
            f"{doing}: a newer attempt than that of {found.id} may have saved step {found.id.step} too, on "
            f"{', '.join(silent)}: if {found.id} is meant, {choice}"
        )
    return found


def _may_be_newer(facts: RunFacts, id: CheckpointId) -> bool:
    """Whether a later attempt may have saved the checkpoint's step again: one exists, and is not known to have started
    at that step or above."""
    listings = facts.listings
    numbers = {n for listing in listings for n in listing.attempts} | {
        c.id.attempt for c in facts.known
    }
    begun = {start.attempt: start.step for start in starts_in(listings) if not start.passed_over}
    newest = max(numbers, default=id.attempt)
    return any(begun.get(n, -1) < id.step for n in range(id.attempt + 1, newest + 1))


@contextmanager
def naming_unread_tiers(
    answer: CommandOutput, facts: RunFacts, gone: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """End the command where the block raises; where no copy was good, name the unread tiers that may hold a good one.

    ``gone`` returns a message if the copies were deleted meanwhile; it is called where no good copy was found.
    """
    silent = ", ".join(facts.unread)
    try:
        yield
    except IntegrityError as error:
        if dropped := gone():
            answer.refuse(dropped)
        more = f"; {silent} could not be read and may hold a good copy" if silent else ""
        answer.refuse(f"{error}{more}")
    except TierfallError as error:
        answer.refuse(error, code_of(error))


# export --------------------------------------------------------------------------------------------


def export(
    answer: CommandOutput,
    step: StepName,
    to: Path,
    format: ExportFormat | None,
    only: list[str] | None,
    max_shard: int | None,
    dtype: ExportDtype | None,
    beside: list[Path] | None,
    tier: str | None,
    force: bool,
) -> None:
    """Write a step as one file, as shards, or as a DCP folder."""
    to = to.expanduser()
    wish = ExportOptions(
        to=to,
        format=format_of(to, format),
        only=tuple(only or ()),
        replace=force,
        max_shard_bytes=max_shard,
        dtype=None if dtype is None else DTYPES[dtype],
        beside=tuple(path.expanduser() for path in beside or ()),
    )
    settings = load_settings(answer.asked)
    check_tier(settings, tier)
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
        checkpoint = find_certain(answer, facts, step, tier, doing="export")
        held = [listing.tier for listing in facts.listings if listing.tier in checkpoint.copies]
        tiers = [name for name in held if tier in (None, name)]
        with (
            naming_unread_tiers(answer, facts, lambda: _dropped(reader, checkpoint.id, tiers)),
            showing("export", settings) as watch,
        ):
            exported = export_checkpoint(checkpoint, tiers, reader.opener(), wish, watch)
    answer.document = {"run": settings.run, **members(exported)}
    tensors = counted(exported.tensors, "tensor", "tensors")
    answer.show(
        f"exported {exported.id} from {', '.join(exported.sources)} to {exported.path}: {tensors}, "
        f"{format_size(exported.bytes)}",
        *(f"skipped: {f.what}: {f.reason}" for f in exported.fallbacks),
        *(f"note: {note}" for note in exported.notes),
    )


def _dropped(reader: RunReader, id: CheckpointId, tiers: Sequence[str]) -> str:
    """Return a message if no tier that held the checkpoint has a commit record of it any more, else an empty text."""
    again = [listing for listing in reader.list() if listing.tier in tiers]
    if any(listing.error is not None or listing.copy(id) is not None for listing in again):
        return ""
    return f"export: {id} was deleted while it was read"


# import --------------------------------------------------------------------------------------------


def import_(answer: CommandOutput, path: Path, as_step: int, entry: str | None) -> None:
    """Save what another program wrote as a step of the run, on all of its stored tiers."""
    from tierfall.imports.importer import import_state, read_state

    settings = load_settings(answer.asked, doing="import")
    if entry is not None and not entry.isidentifier():
        refuse(f"import: --entry {entry!r}: expected a name, such as model", Exit.USAGE)
    read = read_state(path.expanduser(), entry)
    why = "; nothing was imported. Import once it has ended, or into another run by --run"
    check_ownerless(settings, "import", why)
    with RunReader(settings) as reader:
        new = reader.list_with_new()[1]
    with showing("import", settings) as watch:
        imported = import_state(settings, read, as_step, watch)
    answer.document = {"run": settings.run, "path": str(path), **members(imported)}
    answer.show(
        f"imported {path} ({imported.format}) as {imported.id} to {', '.join(imported.tiers)}: "
        f"{counted(imported.tensors, 'tensor', 'tensors')}, {format_size(imported.bytes)}",
        f"entries of the state: {', '.join(imported.entries)}",
    )
    for tier in (tier for tier in new if tier in imported.tiers):
        answer.show(f"{tier}: it was not created yet; the import has created it")
    answer.show(*(f"note: {note}" for note in imported.notes))
    if imported.left:
        answer.problem(
            f"import: {imported.id} is not on {', '.join(imported.left)} yet: the next start of the trainer copies it, "
            f"or tierfall copy {imported.id} --to TIER"
        )
