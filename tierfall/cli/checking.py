"""``verify``: read everything back and say what is damaged, where, and what helps."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tierfall.checking import Finding, RunReport, Scope, check_run, planned_bytes
from tierfall.cli.common import (
    Answer,
    ConfigOption,
    Exit,
    JsonOption,
    RunOption,
    counted,
    find_step,
    id_members,
    load_settings,
    parse_step,
    refuse,
    table,
    watched,
)
from tierfall.cli.progress import Watch
from tierfall.config import Config
from tierfall.core.catalog import Listing, merge
from tierfall.core.restore.verify import CheckedCopy
from tierfall.core.units import format_size
from tierfall.orders import unread
from tierfall.reading import Reader


def verify(
    step: Annotated[
        str | None,
        typer.Argument(metavar="[STEP]", help="Check this step only: 400, or 400@7."),
    ] = None,
    tier: Annotated[
        str | None, typer.Option("--tier", metavar="NAME", help="Check this tier only.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", hidden=True)] = False,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read back and check every file of every copy: every chunk, manifest, commit record and mark."""
    if repair:
        refuse("verify --repair: not supported yet", Exit.USAGE)
    settings = load_settings(config, run)
    named = None if step is None else parse_step(step)
    _check_tier(settings, tier)
    answer = Answer(as_json)
    with Reader(settings) as reader:
        listings = reader.list()
        scope = _scope(answer, listings, named, tier)
        with Watch("verify", planned_bytes(listings, scope), shown=watched(as_json)) as watch:
            report = check_run(reader, listings, scope, watch.add)
    _answer(answer, settings, report)
    answer.finish()


def _check_tier(settings: Config, tier: str | None) -> None:
    known = [t.name for t in settings.tiers]
    if tier is not None and tier not in known:
        refuse(f"no tier is named {tier!r}; there are {', '.join(known)}", Exit.USAGE)


def _scope(
    answer: Answer,
    listings: tuple[Listing, ...],
    named: tuple[int, int | None] | None,
    tier: str | None,
) -> Scope:
    if named is None:
        return Scope(tier=tier)
    known = [c for c in merge(listings) if tier is None or tier in c.copies]
    silent = unread(listing for listing in listings if tier in (None, listing.tier))
    found = find_step(answer, known, named, silent, doing="verify")
    return Scope(checkpoint=found.id, tier=tier)


def _answer(answer: Answer, settings: Config, report: RunReport) -> None:
    for place, why in report.unread:
        answer.problem(f"{place} could not be read: {why}")
    for finding in report.findings:
        answer.problem(_said(finding))
    good = [copy for copy in report.copies if copy.good]
    answer.document = {
        "run": settings.run,
        "copies": [_copy_members(copy) for copy in report.copies],
        "damage": [_finding_members(finding) for finding in report.findings],
        "unread": [{"place": place, "reason": why} for place, why in report.unread],
        "notes": list(report.notes),
        "bytes": sum(copy.bytes for copy in report.copies),
    }
    made = table("STEP", "TIER", "CHUNKS", "SIZE", "", right=("STEP", "CHUNKS", "SIZE"))
    for copy in sorted(report.copies, key=lambda c: c.id):
        made.add_row(
            str(copy.id), copy.tier, str(copy.chunks), format_size(copy.bytes), _verdict(copy)
        )
    if report.copies:
        answer.show(made)
    answer.show(*(f"note: {note}" for note in report.notes))
    total = format_size(sum(copy.bytes for copy in report.copies))
    damage = counted(len(report.findings), "place is", "places are")
    what = f"{damage} damaged" if report.findings else "nothing is damaged"
    copies = counted(len(report.copies), "copy is", "copies are")
    answer.show(f"run {settings.run}: {len(good)} of {copies} good, {total} read; {what}")


def _verdict(copy: CheckedCopy) -> str:
    if copy.gone:
        return "dropped meanwhile"
    if copy.damage:
        return "DAMAGED"
    return "good" if copy.error is None else "could not be read"


def _said(finding: Finding) -> str:
    place = " ".join(str(part) for part in (finding.tier, finding.id, finding.file) if part)
    chunk = "" if finding.chunk is None else f", chunk {finding.chunk}"
    return f"damaged: {place}{chunk}: {finding.problem} ({finding.advice})"


def _copy_members(copy: CheckedCopy) -> dict[str, Any]:
    return {
        **id_members(copy.id),
        "tier": copy.tier,
        "good": copy.good,
        "gone": copy.gone,
        "chunks": copy.chunks,
        "bytes": copy.bytes,
        "error": None if copy.error is None else str(copy.error),
    }


def _finding_members(finding: Finding) -> dict[str, Any]:
    return {
        "tier": finding.tier,
        "step": finding.id.step if finding.id else None,
        "attempt": finding.id.attempt if finding.id else None,
        "file": finding.file,
        "chunk": finding.chunk,
        "problem": finding.problem,
        "advice": finding.advice,
    }
