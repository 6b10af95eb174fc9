"""``prune``, ``pin``, ``unpin``, ``rm`` and ``forget``: the commands that decide what is kept and what is deleted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from tierfall.cli.common import (
    CommandOutput,
    ConfigOption,
    JsonOption,
    ProgressBar,
    RunOption,
    StepArgument,
    counted,
    find_step,
    load_settings,
    owner_members,
    parse_step,
    refuse,
    table,
    warn_of,
    watched,
    with_tier,
)
from tierfall.config import Config
from tierfall.core.format.catalog import KnownCheckpoint, merge
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.scheduler.ledger.tasks import CommandKind
from tierfall.core.types.text import members
from tierfall.core.types.units import format_size
from tierfall.core.types.view import Decision, Verdict
from tierfall.ops import commands
from tierfall.ops.reader import RunReader

UNREAD = "Kept copies were not read; they count as good by their commit records. 'tierfall verify' reads them."
_DONE = {CommandKind.PIN: "pinned", CommandKind.UNPIN: "unpinned", CommandKind.DELETE: "deleted"}


def pin(
    step: StepArgument,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Protect a step from every deletion rule, on every tier that holds it, until it is unpinned."""
    _run_command(CommandKind.PIN, step, load_settings(config, run), CommandOutput(as_json))


def unpin(
    step: StepArgument,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the pin of a step, on every tier."""
    _run_command(CommandKind.UNPIN, step, load_settings(config, run), CommandOutput(as_json))


def rm(
    step: StepArgument,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Delete without a confirmation, the newest step too."),
    ] = False,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a step from every tier; a pinned one is refused."""
    _run_command(
        CommandKind.DELETE, step, load_settings(config, run), CommandOutput(as_json), yes=yes
    )


def _run_command(
    kind: CommandKind, step: str, settings: Config, answer: CommandOutput, *, yes: bool = True
) -> None:
    """Find the checkpoint, and execute the command, or leave a mark for the living trainer."""
    named = parse_step(step)
    verb = "rm" if kind is CommandKind.DELETE else str(kind)
    with RunReader(settings) as reader:
        listings = reader.list()
        known = merge(listings)
        unread = commands.unread(listings)
        answer.note_no_folders(listings, named)
        checkpoint = find_step(answer, known, named, unread, doing=verb)
        owner = reader.owner()
        elsewhere = commands.trained_elsewhere(listings, reader.stores)
    if kind is CommandKind.DELETE:
        _check_deletion(checkpoint, known, yes=yes, ask=not answer.as_json)
    if owner is not None:
        result = commands.set_mark_on_tiers(settings, kind, checkpoint)
        failed = {**result.failed, **unread}
    else:
        warn_of(elsewhere)
        result = commands.run_command(settings, kind, checkpoint.id)
        failed = dict(result.failed)
    answer.document = {
        "run": settings.run,
        "order": verb,
        **members(checkpoint, "id"),
        "done": list(result.done),
        "failed": {tier: str(error) for tier, error in failed.items()},
        "left_to": owner_members(owner),
    }
    answer.show(*_describe_result(kind, result, owner))
    for tier, error in failed.items():
        answer.problem(f"{verb} {checkpoint.id}: {with_tier(tier, error)}")
    answer.finish()


def _describe_result(
    kind: CommandKind, result: commands.CommandResult, owner: LockOwner | None
) -> Sequence[str]:
    if not result.done:
        return ()
    where = ", ".join(result.done)
    if owner is None:
        return (f"{_DONE[kind]} {result.id} on {where}",)
    when = "after its next commit there"
    trainer = f"the trainer (process {owner.pid})"
    if kind is CommandKind.DELETE:
        return (f"marked {result.id} for deletion on {where}: {trainer} deletes it {when}",)
    return (f"{_DONE[kind]} {result.id} on {where}: {trainer} reads the mark {when}",)


def _check_deletion(
    checkpoint: KnownCheckpoint, known: Sequence[KnownCheckpoint], *, yes: bool, ask: bool
) -> None:
    """Refuse to delete a pinned checkpoint, and, without a confirmation, the one that a restore would choose."""
    id = checkpoint.id
    if checkpoint.pinned:
        refuse(f"rm: {id} is pinned; unpin it first: tierfall unpin {id}")
    restorable = commands.newest_restorable(known)
    if yes or not restorable or restorable[0] != id:
        return
    after = f"the next is {restorable[1]}" if len(restorable) > 1 else "there is no other"
    what = f"{id} is the newest step that can be restored; {after}"
    if not (ask and at_terminal()):
        refuse(f"rm: {what}. To delete it, repeat with --yes")
    if not typer.confirm(f"{what}. Delete it?"):
        refuse("rm: nothing was deleted")


def at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


# prune -----------------------------------------------------------------------------------------------


def prune(
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the decisions and their reasons, and delete nothing."
        ),
    ] = False,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Apply the retention rules now, on every stored tier; print for each copy why it is kept or deleted."""
    settings = load_settings(config, run)
    answer = CommandOutput(as_json)
    with RunReader(settings) as reader:
        owner = reader.owner()
        listings = reader.list()
        elsewhere = commands.trained_elsewhere(listings, reader.stores)
    if owner is not None and not dry_run:
        refuse(
            f"prune: a trainer owns run {settings.run!r} ({owner}) and applies the rules itself after each commit; "
            "nothing was changed. --dry-run shows what it will do"
        )
    if dry_run:
        planned = commands.plan_prune(settings, listings)
        pruned = commands.PruneResult(decisions=planned, unread=commands.unread(listings))
    else:
        warn_of(elsewhere)
        with ProgressBar("prune", 0, shown=watched(as_json)) as watch:
            pruned = commands.prune(settings, watch.set)
    answer.document = {
        "run": settings.run,
        "dry_run": dry_run,
        "decisions": [_decision_members(d, pruned, dry_run) for d in pruned.decisions],
        "notes": (notes := commands.notes_on_metrics(settings, listings)),
    }
    answer.show(*_decided(pruned, dry_run))
    if any(decision.verdict is Verdict.DROP for decision in pruned.decisions):
        answer.show(UNREAD)
    if dry_run:  # else they were logged
        answer.show(*notes)
    for tier, error in pruned.unread.items():
        answer.problem(f"tier {tier} could not be read, nothing is decided there: {error}")
    for drop in pruned.left:
        answer.problem(f"prune: {drop.checkpoint} is still on {drop.tier}")
    answer.finish()


def _decision_members(
    decision: Decision, pruned: commands.PruneResult, dry_run: bool
) -> dict[str, Any]:
    gone = decision.verdict is Verdict.DROP and not dry_run and decision not in pruned.left
    return {**members(decision), "dropped": gone}


def _decided(pruned: commands.PruneResult, dry_run: bool) -> Sequence[Table | str]:
    drops = [d for d in pruned.decisions if d.verdict is Verdict.DROP and d not in pruned.left]
    made = table("TIER", "STEP", "SIZE", "", "REASON", right=("STEP", "SIZE"))
    for decision in pruned.decisions:
        made.add_row(
            decision.tier,
            str(decision.checkpoint),
            format_size(decision.bytes),
            str(decision.verdict),
            decision.reason,
        )
    verb = "would be dropped" if dry_run else "dropped"
    total = format_size(sum(d.bytes for d in drops))
    copies = counted(len(pruned.decisions), "copy", "copies")
    summary = f"{len(drops)} of {copies} {verb}, {total}"
    return (made, summary) if pruned.decisions else (summary,)


# forget ----------------------------------------------------------------------------------------------


def forget(
    tier: Annotated[
        str, typer.Argument(metavar="TIER", help="The name of the tier in the configuration.")
    ],
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the other tiers, and this machine, forget a tier whose files were removed on purpose."""
    settings = load_settings(config, run)
    answer = CommandOutput(as_json)
    if tier not in [stored.name for stored in settings.stored]:
        names = ", ".join(stored.name for stored in settings.stored)
        refuse(f"forget: no stored tier is named {tier!r}; there are {names}")
    forgotten_by, failed = commands.forget(settings, tier)
    answer.document = {
        "run": settings.run,
        "tier": tier,
        "forgotten_by": list(forgotten_by),
        "failed": {name: str(error) for name, error in failed.items()},
    }
    if forgotten_by:
        answer.show(
            f"{tier} is forgotten by {', '.join(forgotten_by)}: an empty folder there counts as a new tier"
        )
    elif not failed:
        answer.show(f"nothing remembers {tier}: an empty folder there counts as a new tier already")
    for name, error in failed.items():
        answer.problem(f"forget {tier}: {with_tier(name, error)}")
    answer.finish()
