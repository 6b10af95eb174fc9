"""``verify``: verify every copy, report what is damaged, where, and how to repair it; and repair it."""

from __future__ import annotations

from dataclasses import replace

from tierfall.cli.common import (
    CommandOutput,
    ProgressBar,
    check_tier,
    coloured,
    counted,
    find_step,
    load_settings,
    table,
    warn_of,
    watched,
)
from tierfall.cli.usage import Asked, StepName, refuse
from tierfall.config import Config
from tierfall.core.copies.verify import CheckedCopy
from tierfall.core.types.text import members
from tierfall.core.types.units import format_size
from tierfall.ops.commands import trained_elsewhere
from tierfall.ops.findings import Finding
from tierfall.ops.reader import RunReader
from tierfall.ops.repair import Repairer, RepairResult
from tierfall.ops.verify import RunReport, VerifyScope, check_run, planned_bytes, record_damage
from tierfall.ops.write_copy import owned_reader

_OF_COPY = ("id", "tier", "good", "gone", "chunks", "bytes", "error")


def verify(asked: Asked, steps: list[StepName], tier: str | None, repair: bool) -> None:
    """Verify every file of every copy, or of those of some steps, and repair what is damaged."""
    settings = load_settings(asked, doing="verify --repair" if repair else "")
    check_tier(settings, tier)
    answer = CommandOutput(asked.as_json)
    repairs: tuple[RepairResult, ...] | None = None
    if repair:
        _check_ownerless(settings)
    owning = owned_reader(settings, "tierfall verify") if repair else RunReader(settings)
    with owning as reader:
        listings = reader.list()
        found = frozenset(
            find_step(answer, listings, name, tier, doing="verify").id for name in steps
        )
        scope = VerifyScope(checkpoints=found or None, tier=tier)
        total = planned_bytes(listings, scope)
        with ProgressBar("verify", total, shown=watched(asked.as_json)) as watch:
            if repair:
                warn_of(trained_elsewhere(listings, reader.stores))
                repairer = Repairer(reader, listings)
                report = check_run(reader, listings, scope, watch.add, repairer)
                repairs = tuple(repairer.repairs)
            else:
                report = check_run(reader, listings, scope, watch.add)
        report = replace(report, notes=(*report.notes, *record_damage(settings, listings, report)))
    _answer_verify(answer, settings, report, repairs)
    answer.finish()


def _check_ownerless(settings: Config) -> None:
    with RunReader(settings) as reader:
        owner = reader.owner()
    if owner is not None:
        refuse(
            f"verify --repair: a trainer owns run {settings.run!r} ({owner}) and may delete or write copies meanwhile; "
            "nothing was checked. Repair once it has ended; until then restores read the good copies"
        )


def _answer_verify(
    answer: CommandOutput,
    settings: Config,
    report: RunReport,
    repairs: tuple[RepairResult, ...] | None,
) -> None:
    for repair in repairs or ():
        if repair.done:
            answer.show(f"repaired {_place(repair)}: {repair.why}")
        else:
            answer.problem(f"not repaired: {_place(repair)}: {repair.why}")
    for place, why in report.unread:
        answer.problem(f"{place} could not be read: {why}")
    for finding in report.findings:
        answer.problem(_describe_finding(finding))
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
    made = table("STEP", "TIER", "CHUNKS", "SIZE", "", right=("STEP", "CHUNKS", "SIZE"))
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
    return " ".join(str(part) for part in (found.tier, found.id, found.file) if part)


def _verdict(copy: CheckedCopy) -> str:
    if copy.gone:
        return "deleted meanwhile"
    if any(not damage.newer for damage in copy.damage):
        return "DAMAGED"
    if copy.damage:
        return "could not be checked"
    return "good" if copy.error is None else "could not be read"


def _describe_finding(finding: Finding) -> str:
    chunk = "" if finding.chunk is None else f", chunk {finding.chunk}"
    verdict = "not checked" if finding.newer else "damaged"
    return f"{verdict}: {_place(finding)}{chunk}: {finding.problem} ({finding.advice})"
