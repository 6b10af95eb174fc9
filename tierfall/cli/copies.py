"""The commands that read or write whole copies.

``verify``: verify every copy, report what is damaged, where, and how to repair it; and repair it. ``copy``: copy a step
to a tier that does not hold it. ``export``: write a step, or a part of it, as files that can be read without tierfall.
``import``: save what another program wrote as a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tierfall.cli.common import (
    CommandOutput,
    RunFacts,
    check_ownerless,
    check_tier,
    coloured,
    counted,
    document_of,
    load_settings,
    progress_bar,
    table,
)
from tierfall.cli.usage import Asked, CommandRefused, Exit, StepName, code_of, refuse
from tierfall.config import Config
from tierfall.core.copies.verify import CheckedCopy
from tierfall.core.format.catalog import KnownCheckpoint, starts_in
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError, TierfallError
from tierfall.core.types.text import members
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, ExportDtype, ExportFormat
from tierfall.export.export import ExportResult
from tierfall.export.export import export as export_checkpoint
from tierfall.export.output import DTYPES, ExportOptions, format_of
from tierfall.ops import sync
from tierfall.ops.commands import Progress
from tierfall.ops.reader import RunReader
from tierfall.ops.sync import Repairer, RepairResult, owned_reader
from tierfall.ops.verify import (
    Finding,
    RunReport,
    VerifyScope,
    check_run,
    planned_bytes,
    record_damage,
)

_OF_COPY = ("id", "tier", "good", "gone", "chunks", "bytes", "error")


def verify(asked: Asked, steps: list[StepName] | None, tier: str | None, repair: bool) -> None:
    """Verify every file of every copy, or of those of some steps, and repair what is damaged."""
    settings = load_settings(asked, doing="verify --repair" if repair else "")
    check_tier(settings, tier)
    answer = CommandOutput(asked.as_json)
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
        with progress_bar("verify", as_json=asked.as_json) as watch:
            report = check_run(reader, listings, scope, Progress(watch, total).add, repairer)
        report = replace(report, notes=(*report.notes, *record_damage(settings, listings, report)))
    repairs = None if repairer is None else repairer.repairs
    _answer_verify(answer, settings, report, repairs)
    answer.finish()


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
    good = [copy for copy in report.copies if copy.good]
    answer.document = {
        "run": settings.run,
        "copies": [members(copy, *_OF_COPY) for copy in report.copies],
        "damage": [members(finding) for finding in report.findings],
        "unread": [{"place": place, "reason": why} for place, why in report.unread],
        "notes": list(report.notes),
        "bytes": sum(copy.bytes for copy in report.copies),
    }
    if repairs is not None:
        answer.document["repairs"] = [members(r) | {"file": r.file or None} for r in repairs]
    made = table("STEP", "TIER", "CHUNKS", "SIZE", "RESULT", right=("STEP", "CHUNKS", "SIZE"))
    for copy in sorted(report.copies, key=lambda c: c.id):
        made.add_row(
            str(copy.id),
            copy.tier,
            str(copy.chunks),
            format_size(copy.bytes),
            coloured(_verdict(copy)),
        )
    if report.copies:
        answer.show(made)
    answer.show(*(f"note: {note}" for note in report.notes))
    total = format_size(sum(copy.bytes for copy in report.copies))
    newer = sum(finding.newer for finding in report.findings)
    damaged = len(report.findings) - newer
    damage = counted(damaged, "place is", "places are")
    what = f"{damage} damaged" if damaged else "nothing is damaged"
    if newer:
        what += f", {counted(newer, 'file', 'files')} of a newer tierfall could not be checked"
    copies = counted(len(report.copies), "copy is", "copies are")
    answer.show(f"run {settings.run}: {len(good)} of {copies} good, {total} read; {what}")


def _place(found: RepairResult | Finding) -> str:
    place = " ".join(str(part) for part in (found.tier, found.id, found.file) if part)
    attempt = keys.parse_attempt(found.file.rpartition("/")[2])
    return place if attempt is None else f"{place} (the record of attempt {attempt})"


def _verdict(copy: CheckedCopy) -> str:
    if copy.gone:
        return "deleted meanwhile"
    if any(not damage.newer for damage in copy.damage):
        return "DAMAGED"
    if copy.damage:
        return "could not be checked"
    return "good" if copy.error is None else "could not be read"


# copy ------------------------------------------------------------------------------------------------


def copy(asked: Asked, steps: list[StepName], to: str) -> None:
    """Copy steps to a tier that does not hold them, one after the other."""
    settings = load_settings(asked, doing="copy")
    check_tier(settings, to)
    if to == settings.host.name:
        refuse(
            f"copy: {to} is memory, which only the trainer writes; name another tier", Exit.USAGE
        )
    answer = CommandOutput(asked.as_json)
    why = (
        " and flushes by the rules of the file; nothing was copied. Copy once it has ended, or start it with another "
        "flush: {every: ...} for that tier"
    )
    check_ownerless(settings, "copy", why)
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
    found = [find_certain(answer, facts, name, None, doing="copy").id for name in steps]
    facts.warn_if_elsewhere()
    documents = []
    for id in dict.fromkeys(found):
        try:
            with (
                naming_unread_tiers(answer, facts),
                progress_bar(f"copy {id}", as_json=asked.as_json) as watch,
            ):
                copied = sync.copy(settings, id, to, watch)
        except CommandRefused as refusal:
            if len(set(found)) == 1:
                raise
            answer.problems = refusal.problems
            continue
        documents.append({"run": settings.run, **members(copied)})
        _report_copy(answer, copied)
    answer.document = document_of(settings.run, documents)
    answer.finish()


def _report_copy(answer: CommandOutput, copied: sync.CopyResult) -> None:
    size = format_size(copied.bytes)
    if copied.already:
        answer.show(f"{copied.tier} holds {copied.id} already, and it is good ({size} read)")
    else:
        sources = ", ".join(copied.sources)
        answer.show(
            f"copied {copied.id} from {sources} to {copied.tier}, which did not hold it ({size})"
        )
    if copied.decided:
        answer.show(f"decided by the lists of other tiers: {', '.join(copied.decided)}")
    answer.show(*(f"note: {note}" for note in copied.notes))


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
    asked: Asked,
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
    settings = load_settings(asked)
    check_tier(settings, tier)
    answer = CommandOutput(asked.as_json)
    with RunReader(settings) as reader:
        facts = RunFacts(reader)
        checkpoint = find_certain(answer, facts, step, tier, doing="export")
        held = [listing.tier for listing in facts.listings if listing.tier in checkpoint.copies]
        tiers = [name for name in held if tier in (None, name)]
        with (
            naming_unread_tiers(answer, facts, lambda: _dropped(reader, checkpoint.id, tiers)),
            progress_bar("export", as_json=asked.as_json) as watch,
        ):
            exported = export_checkpoint(checkpoint, tiers, reader.opener(), wish, watch)
    _report_export(answer, settings.run, exported)
    answer.finish()


def _dropped(reader: RunReader, id: CheckpointId, tiers: Sequence[str]) -> str:
    """Return a message if no tier that held the checkpoint has a commit record of it any more, else an empty text."""
    again = [listing for listing in reader.list() if listing.tier in tiers]
    if any(listing.error is not None or listing.copy(id) is not None for listing in again):
        return ""
    return f"export: {id} was deleted while it was read"


def _report_export(answer: CommandOutput, run: str, exported: ExportResult) -> None:
    answer.document = {"run": run, **members(exported)}
    tensors = counted(exported.tensors, "tensor", "tensors")
    answer.show(
        f"exported {exported.id} from {', '.join(exported.sources)} to {exported.path}: {tensors}, "
        f"{format_size(exported.bytes)}"
    )
    answer.show(*(f"skipped: {f.what}: {f.reason}" for f in exported.fallbacks))
    answer.show(*(f"note: {note}" for note in exported.notes))


# import --------------------------------------------------------------------------------------------


def import_(asked: Asked, path: Path, as_step: int, entry: str | None) -> None:
    """Save what another program wrote as a step of the run, on all of its stored tiers."""
    from tierfall.imports.importer import import_state, read_state

    settings = load_settings(asked, doing="import")
    if entry is not None and not entry.isidentifier():
        refuse(f"import: --entry {entry!r}: expected a name, such as model", Exit.USAGE)
    answer = CommandOutput(asked.as_json)
    read = read_state(path.expanduser(), entry)
    why = "; nothing was imported. Import once it has ended, or into another run by --run"
    check_ownerless(settings, "import", why)
    with RunReader(settings) as reader:
        new = reader.list_with_new()[1]
    with progress_bar(f"import {path.name}", as_json=asked.as_json) as watch:
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
    answer.finish()
