"""``prune``, ``pin``, ``unpin``, ``rm``, ``forget`` and ``drain``: the commands that change what the tiers hold."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from tierfall.cli.common import (
    CommandOutput,
    RunFacts,
    check_ownerless,
    counted,
    document_of,
    load_settings,
    load_settings_if_any,
    load_settings_of_all,
    name_other_runs,
    of_this_user,
    owner_members,
    progress_bar,
    table,
    with_tier,
)
from tierfall.cli.look import held_members
from tierfall.cli.usage import Asked, Exit, StepName, at_terminal, refuse
from tierfall.config import Config
from tierfall.config.sections import OnClose
from tierfall.core.flush.tasks import CommandKind
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.types.errors import ConfigError, TierfallError
from tierfall.core.types.keys import check_tag
from tierfall.core.types.text import format_some, members
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import Decision, Verdict
from tierfall.ops import commands
from tierfall.ops.drain import DrainResult, find_owed
from tierfall.ops.drain import drain as drain_run
from tierfall.ops.reader import HeldMemory, RunReader, held_by_runs
from tierfall.setup.places import run_folder

UNREAD = "Kept copies were not read; they count as good by their commit records. 'tierfall verify' reads them."
_DONE = {
    CommandKind.PIN: "pinned",
    CommandKind.UNPIN: "unpinned",
    CommandKind.TAG: "tagged",
    CommandKind.UNTAG: "untagged",
    CommandKind.DELETE: "deleted",
}


def rm(
    asked: Asked, steps: list[StepName] | None, all: bool, yes: bool, even_the_last: bool
) -> None:
    """Delete steps, or a whole run."""
    if all:
        _rm_run(asked, steps or [])
    elif steps:
        _change(asked, steps, kind=CommandKind.DELETE, yes=yes, even_the_last=even_the_last)
    else:
        refuse("rm: missing argument 'STEP...'; see tierfall rm --help", Exit.USAGE)


def _change(
    asked: Asked,
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
    settings, answer = load_settings(asked, doing=verb), CommandOutput(asked.as_json)
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
    found = {c.id: c for name in steps for c in [facts.find(answer, name, doing=verb)]}
    lost, owner = commands.without_good_copy(facts.known), facts.owner
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
    answer.finish()


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


def _rm_run(asked: Asked, steps: list[StepName]) -> None:
    """Delete a whole run, after its name was read from standard input."""
    run = asked.run
    if steps or run is None:
        refuse("rm: --all deletes a whole run: name it by --run, and no STEP", Exit.USAGE)
    settings, answer = load_settings_of_all(asked, doing="rm"), CommandOutput(asked.as_json)
    check_ownerless(settings, "rm", ": end it first; nothing was deleted")
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
        listings = facts.listings
        answer.note_unread(facts.unread)
        if answer.problems:
            answer.refuse(
                "rm: nothing was deleted, since the tier may hold files of the run: repeat it once the tier answers, "
                "or without the tier in the file. If the run was deleted there from another machine, repeat it after "
                "'tierfall forget TIER'"
            )
        kept = commands.foreign_files(reader.config, reader.stores)
        is_there = any(x.copies or x.attempts or x.damaged for x in listings)
        if not is_there and not any(store.marker.read() for store in reader.stores.values()):
            refuse(f"rm: no tier has a file of run {run!r}{name_other_runs(settings)}")
        commands.check_folders(settings)
        places = {name: store.place for name, store in reader.stores.items()}
        places[reader.config.host.name] = str(reader.memory_folder)
    facts.warn_if_elsewhere()
    say = partial(typer.echo, err=asked.as_json)
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
    answer.finish()


# prune -----------------------------------------------------------------------------------------------


def prune(asked: Asked, dry_run: bool) -> None:
    """Apply the retention rules now, or print what they decide."""
    settings = load_settings(asked, doing="" if dry_run else "prune")
    answer = CommandOutput(asked.as_json)
    if not dry_run:
        why = " and applies the rules itself after each commit; nothing was changed. --dry-run shows what it will do"
        check_ownerless(settings, "prune", why)
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
    listings = facts.listings
    if dry_run or not any(x.copies for x in listings):  # opening for writing creates folders
        planned = commands.plan_prune(settings, listings)
        pruned = commands.PruneResult(decisions=planned, unread=commands.unread(listings))
    else:
        facts.warn_if_elsewhere()
        with progress_bar("prune", as_json=asked.as_json) as watch:
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
    answer.finish()


def _is_dropped(decision: Decision, pruned: commands.PruneResult) -> bool:
    return decision.verdict is Verdict.DROP and decision not in pruned.left


def _decided(pruned: commands.PruneResult, dry_run: bool) -> Sequence[Table | str]:
    drops = [d for d in pruned.decisions if _is_dropped(d, pruned)]
    made = table("TIER", "STEP", "SIZE", "DECISION", "REASON", right=("STEP", "SIZE"))
    for decision in pruned.decisions:
        made.add_row(
            decision.tier,
            str(decision.checkpoint),
            format_size(decision.bytes),
            str(decision.verdict),
            decision.reason,
        )
    verb = "would be dropped" if dry_run else "dropped"
    of = f"of {counted(len(pruned.decisions), 'copy', 'copies')} {verb}"
    summary = (
        f"{len(drops)} {of}, {format_size(sum(d.bytes for d in drops))}" if drops else f"none {of}"
    )
    return (made, summary) if pruned.decisions else (summary,)


# forget ----------------------------------------------------------------------------------------------


def forget(asked: Asked, tier: str) -> None:
    """Make the other tiers, and this machine, forget a tier whose files were removed on purpose."""
    settings = load_settings_of_all(asked, doing="forget")
    answer = CommandOutput(asked.as_json)
    if tier not in [stored.name for stored in settings.stored]:
        names = ", ".join(stored.name for stored in settings.stored)
        refuse(f"forget: no stored tier is named {tier!r}; there are {names}")
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
    answer.finish()


# drain -----------------------------------------------------------------------------------------------


def drain(asked: Asked, deadline: float | None, all: bool, discard: bool) -> None:
    """Flush what a dead trainer left in host memory, then free the memory; of every run, or only free it."""
    if all and asked.run is not None:
        refuse("drain: --all drains every run: name none by --run", Exit.USAGE)
    if discard and deadline is not None:
        refuse("drain: --discard flushes nothing: leave --deadline out", Exit.USAGE)
    if discard:
        _discard_runs(asked, all)
    elif all:
        _drain_runs(asked, deadline)
    else:
        _drain_run(asked, deadline)


def _drain_run(asked: Asked, deadline_s: float | None) -> None:
    settings = load_settings(asked, doing="drain")
    answer = CommandOutput(asked.as_json)
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
    answer.finish()


def _drain(answer: CommandOutput, settings: Config, deadline_s: float | None) -> dict[str, Any]:
    """Drain a run, say what was done, and return its document."""
    forecast: list[str] = []

    def report_forecast(line: str) -> None:
        forecast.append(line)
        if not answer.as_json:  # on stderr, while the drain runs
            typer.echo(f"in at most {format_duration(deadline_s or 0.0)} {line}", err=True)

    with progress_bar("drain", as_json=answer.as_json) as watch:
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
            f"run {settings.run}: by its flush rule no tier is owed what is in memory; flush: {{every: 1}} flushes it"
        )
    else:
        answer.show(f"run {settings.run}: everything in host memory was durable already")
    kept = "host memory is kept (on_close: keep)" if keeps else "host memory is kept"
    answer.show(kept if drained.memory_kept else "host memory is freed")
    for owed in drained.left:
        answer.problem(f"drain: not done: {owed}")
    for problem in drained.problems:
        answer.problem(problem)


def _drain_runs(asked: Asked, deadline_s: float | None) -> None:
    """Drain every run that has left images in this node's memory, by the file that its memory notes."""
    began = time.monotonic()
    answer = CommandOutput(asked.as_json)
    drained: list[dict[str, Any]] = []
    for held in _left_by_runs(answer, load_settings_if_any(asked, doing="drain")):
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
    answer.finish()


def _discard_runs(asked: Asked, every_run: bool) -> None:
    """Free what a dead run holds in this node's memory, or every one, once its name was typed."""
    answer = CommandOutput(asked.as_json)
    if every_run:
        found = _left_by_runs(answer, load_settings_if_any(asked, doing="drain"))
    else:
        settings = load_settings(asked, doing="drain")
        found = _left_by_runs(answer, settings, only=run_folder(settings, settings.run))
    freed = [held for held in found if _discard(answer, held)]
    answer.document = {"freed": [held_members(held) for held in freed]}
    answer.finish()


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
